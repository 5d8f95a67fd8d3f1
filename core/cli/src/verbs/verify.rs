//! `verify`: reads every byte of a file. Damage is an error like any other: one line and an exit code.

use std::path::PathBuf;

use neuropil::gguf::{self, Gguf};
use neuropil::store::Store;
use serde_json::json;

use crate::error::{CliError, Exit};
use crate::progress::Bar;
use crate::{memory, output};

/// Flags of `verify`.
#[derive(clap::Args)]
#[command(after_help = "Example:
  neuropil verify model.gguf

Checks that the header is sound, that every tensor lies inside its file and shares no byte with another, that weights and
block scales are finite numbers, and checksums where the file has them, as a neuron store does. Exit code 3 on damage, 4 when a tensor's type is unknown, so that nothing
can be said.")]
pub struct Args {
    /// A GGUF file; of a set of several, any one
    file: PathBuf,
    /// Print one JSON document
    #[arg(long)]
    json: bool,
}

/// Runs the verb.
pub fn run(args: &Args) -> Result<(), CliError> {
    let gguf = Gguf::open_header(&args.file)?;
    if Store::is_store(&gguf) {
        Store::read(&gguf)?;
    }
    let total = gguf.tensors().iter().fold(0, |sum: u64, t| sum.saturating_add(t.bytes));
    if let Some(tensor) = gguf.tensors().iter().find(|tensor| tensor.bytes == 0) {
        let (name, id) = (&tensor.name, tensor.type_id);
        let reason = format!(
            "{}: nothing is known of type {id} of tensor {name}, not even its size, so the file cannot be verified; \
             try a newer neuropil",
            gguf.shard_path(tensor).display()
        );
        return Err(CliError::new(Exit::Model, reason));
    }
    let bar = Bar::bytes("verifying");
    let report = gguf::verify(&gguf, &mut |done| bar.set(done, total))?;
    drop(bar);
    if args.json {
        return output::json(&json!({
            "ok": true,
            "files": gguf.paths().map(|path| path.display().to_string()).collect::<Vec<_>>(),
            "tensors": report.tensors,
            "bytes": report.bytes,
            "blocks": report.blocks,
            "unchecked_tensors": report.unchecked,
            "checksums": report.checksums,
        }));
    }
    let bytes = memory::shown(report.bytes);
    let mut line = format!("sound: {} tensors, {bytes}, {} blocks\n", report.tensors, report.blocks);
    if report.checksums > 0 {
        line += &format!("the checksums of {} tensors are right\n", report.checksums);
    }
    if report.unchecked > report.checksums {
        line += &format!("{} tensors are of types whose values are not looked at\n", report.unchecked);
    }
    if report.tensors == 0 {
        line += "the file has no tensors: only its header was there to check\n";
    }
    output::text(&line)
}
