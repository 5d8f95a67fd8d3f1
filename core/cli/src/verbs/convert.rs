//! `convert`: from a model file to a neuron store.

use std::path::PathBuf;
use std::time::Instant;

use neuropil::pipeline::CancelToken;
use neuropil::store::{self, ConvertOptions, ConvertReport, LayerReport};
use neuropil_device::DType;
use serde_json::{Value, json};

use crate::error::{CliError, Exit};
use crate::files::{check_output, same};
use crate::progress::Bar;
use crate::signal::Interrupts;
use crate::{memory, output};

/// Flags of `convert`.
#[derive(clap::Args)]
#[command(after_help = "Example:
  neuropil convert model.gguf model.store.gguf

A neuron store is a GGUF file in which the weights of each neuron of the feed-forward layers lie side by side, so that
one can be read alone. IN may be a GGUF file, a file of PowerInfer, a neuron store, or a folder with config.json and
safetensors files. Gate and up keep their bits. Down
is stored by neuron, and becomes q8_0 unless it is of a float type; how much that changes is printed. OUT appears when
it is complete; an existing file is replaced then.")]
pub struct Args {
    /// The model; of a set of several files, any one; of a safetensors model, its folder
    #[arg(value_name = "IN")]
    source: PathBuf,
    /// The neuron store to write
    #[arg(value_name = "OUT")]
    out: PathBuf,
    /// Type of all three matrices, such as q4_0; down takes q8_0 where it cannot have it
    #[arg(long, value_name = "TYPE", value_parser = dtype)]
    ffn_type: Option<DType>,
    /// Type of down: f32, f16, bf16, q4_0, q4_1 or q8_0
    #[arg(long, value_name = "TYPE", value_parser = dtype)]
    down_type: Option<DType>,
    /// A file with firing counts, such as calibrate writes: neurons that fire most are stored first
    #[arg(long, value_name = "FILE")]
    counts: Option<PathBuf>,
    /// What reads are multiples of: 4096, 512 or 64 bytes; default: the largest that wastes at most 15 %, or 64
    #[arg(long, value_name = "BYTES", value_parser = read_unit)]
    read_unit: Option<usize>,
    /// Also write the same weights as an ordinary GGUF file
    #[arg(long, value_name = "FILE")]
    twin: Option<PathBuf>,
    /// Print one JSON document
    #[arg(long)]
    json: bool,
}

fn dtype(text: &str) -> Result<DType, String> {
    let found = DType::ALL.into_iter().find(|dtype| dtype.name() == text);
    let names = || DType::ALL.map(DType::name).join(" ");
    found.ok_or_else(|| format!("there is no such type; there are {}", names()))
}

fn read_unit(text: &str) -> Result<usize, String> {
    let unit = text.parse().ok().filter(|unit| store::READ_UNITS.contains(unit));
    unit.ok_or_else(|| "it must be 4096, 512 or 64".into())
}

/// Runs the verb.
pub fn run(args: &Args, interrupts: &Interrupts) -> Result<(), CliError> {
    for out in [Some(&args.out), args.twin.as_ref()].into_iter().flatten() {
        check_output(out)?;
        if same(out, &args.source) {
            let message =
                format!("{}: is the model that is read; give another name for the result", out.display());
            return Err(CliError::new(Exit::Usage, message));
        }
    }
    if args.twin.as_ref().is_some_and(|twin| same(twin, &args.out) || *twin == args.out) {
        return Err(CliError::new(Exit::Usage, "OUT and --twin are the same file; give --twin another name"));
    }
    let options = ConvertOptions {
        ffn_type: args.ffn_type,
        down_type: args.down_type,
        counts: args.counts.clone(),
        read_unit: args.read_unit,
        ..ConvertOptions::default()
    };
    let cancel = CancelToken::default();
    let _watch = interrupts.watch(vec![cancel.clone()]);
    let start = Instant::now();
    let bar = Bar::bytes("converting");
    let report = store::convert(&args.source, &args.out, &options, &mut |done, total| {
        bar.set(done, total);
        !cancel.is_cancelled()
    })?;
    drop(bar);
    report.notes.iter().for_each(output::note);
    let seconds = start.elapsed().as_secs_f64();
    let mut twin_bytes = None;
    if let Some(twin) = &args.twin {
        let bar = Bar::bytes("writing the twin");
        twin_bytes = Some(store::twin(&args.out, twin, &mut |done, total| {
            bar.set(done, total);
            !cancel.is_cancelled()
        })?);
    }
    if args.json {
        output::json(&json_of(&report, seconds, twin_bytes))
    } else {
        output::text(&text(args, &report))
    }
}

fn padding(report: &ConvertReport) -> f64 {
    report.padding_bytes as f64 / report.bundle_bytes.max(1) as f64
}

fn json_of(report: &ConvertReport, seconds: f64, twin_bytes: Option<u64>) -> Value {
    let layer = |(index, layer): (usize, &LayerReport)| {
        json!({
            "layer": index,
            "neurons": layer.neurons,
            "experts": layer.experts,
            "gate_type": layer.gate_type.name(),
            "down_type": layer.down_type.name(),
            "gate_up": layer.gate_up_loss,
            "down": layer.down_loss,
        })
    };
    let mut document = json!({
        "source_bytes": report.source_bytes,
        "source_sha256": report.sha256,
        "bytes": report.bytes,
        "resident_bytes": report.resident_bytes,
        "bundle_bytes": report.bundle_bytes,
        "padding_share": padding(report),
        "read_unit": report.read_unit,
        "sorted": report.sorted,
        "seconds": seconds,
        "layers": report.layers.iter().enumerate().map(layer).collect::<Vec<_>>(),
        "notes": report.notes,
    });
    if let (Some(object), Some(bytes)) = (document.as_object_mut(), twin_bytes) {
        object.insert("twin_bytes".into(), json!(bytes));
    }
    document
}

fn text(args: &Args, report: &ConvertReport) -> String {
    let [all, resident, bundles] =
        [report.bytes, report.resident_bytes, report.bundle_bytes].map(memory::shown);
    let mut text = format!("{}: {all}\n", args.out.display());
    text += &format!("  resident part   {resident}\n");
    text += &format!(
        "  neurons         {bundles}, read unit {}, {:.1} % padding, {}\n",
        report.read_unit,
        100.0 * padding(report),
        if report.sorted { "those that fire most first" } else { "in the order of the model" }
    );
    text += &format!("  gate and up     {}\n", part(report, |l| l.gate_type, |l| l.gate_up_loss));
    text += &format!("  down            {}\n", part(report, |l| l.down_type, |l| l.down_loss));
    text
}

/// The types of a matrix over the layers, and how much its weights have changed.
fn part(report: &ConvertReport, dtype: fn(&LayerReport) -> DType, loss: fn(&LayerReport) -> f64) -> String {
    let mut types: Vec<DType> = report.layers.iter().map(dtype).collect();
    types.sort();
    types.dedup();
    let names: Vec<&str> = types.iter().map(|dtype| dtype.name()).collect();
    let losses = || report.layers.iter().map(loss);
    let worst = losses().fold(0.0, f64::max);
    let changed = if worst == 0.0 {
        "weights unchanged".to_owned()
    } else {
        let mean = losses().sum::<f64>() / report.layers.len().max(1) as f64;
        format!(
            "weights changed by {:.2} % on average, {:.2} % in the worst layer",
            100.0 * mean,
            100.0 * worst
        )
    };
    format!("{}, {changed}", names.join(" "))
}
