//! Flags about memory and storage, and the store that a model needs to run in less memory than its weights.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use clap::{Args, ValueEnum};
use neuropil::cache::Window;
use neuropil::engine::{Engine, EngineBuilder};
use neuropil::gguf::Gguf;
use neuropil::io::IoChoice;
use neuropil::pipeline::{PipelineOptions, Trace};
use neuropil::predict::Prediction;
use neuropil::store::{self, ConvertError, ConvertOptions, Store};
use neuropil::system::Machine;

use crate::error::{CliError, Exit};
use crate::files::check_output;
use crate::progress::Bar;
use crate::{cache, memory, output};

/// Steps for which LLM in a flash keeps what was read.
const WINDOW: u32 = 5;

/// Memory that is left to the system when no budget is given, and the part of it that it is at most: a small container has
/// nobody to leave much to.
const LEFT_TO_OTHERS: u64 = 256 << 20;
const LEFT_SHARE: u64 = 8;

/// How much memory is used, and how neurons are read that do not fit.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Memory and storage")]
pub struct MemoryFlags {
    /// Most memory that the process takes, such as 2GiB; default: what is free and allowed
    #[arg(long, value_name = "SIZE", value_parser = size)]
    pub memory: Option<u64>,
    /// How neurons are read that are not in memory: auto, uring, pread, or throttle:PROFILE, which imitates the storage of
    /// a phone (ufs4.0 or ufs3.1)
    #[arg(long, value_name = "ENGINE", default_value = "auto", value_parser = io)]
    pub io: IoChoice,
    /// What runs where memory is short
    #[arg(long, value_name = "NAME", default_value = "neuropil")]
    pub policy: Policy,
    /// Read a neuron's rows one by one
    #[arg(long)]
    pub no_bundle: bool,
    /// Keep no neurons from token to token
    #[arg(long)]
    pub no_cache: bool,
    /// Wait for all reads of a layer before computing it
    #[arg(long)]
    pub no_pipeline: bool,
    /// Never read a neuron's gate first
    #[arg(long)]
    pub no_two_phase: bool,
    /// Write what the conductor, the reading thread, units and compute threads did when to a file that Chrome and
    /// Perfetto show
    #[arg(long, value_name = "FILE")]
    pub trace: Option<PathBuf>,
    /// Compute every N-th block of neurons that another unit computed on the processor too, and compare; and check after
    /// every N tokens that nobody has written into the model's files. Default: no block, for products of units are
    /// checked in a cheaper way, and the files after every token
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = clap::value_parser!(u32).range(1..))]
    pub verify_every: Option<u32>,
    /// Where models that are fetched and stores that models are turned into are kept; default: neuropil in the user's cache directory
    #[arg(long, value_name = "DIR")]
    pub cache_dir: Option<PathBuf>,
}

/// What runs where memory is short.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Policy {
    /// The cache of neurons and its pipeline
    Neuropil,
    /// All weights through the system's page cache, for comparison
    Mmap,
    /// What LLM in a flash does: a window of the last tokens' neurons and no pipeline, for comparison
    LlmFlash,
}

/// A size such as `512MiB`, `2GiB`, `1.5GB` or plain bytes.
pub fn size(text: &str) -> Result<u64, String> {
    const UNITS: [(&str, f64); 9] = [
        ("KiB", 1024.0),
        ("MiB", 1048576.0),
        ("GiB", 1073741824.0),
        ("TiB", 1099511627776.0),
        ("KB", 1e3),
        ("MB", 1e6),
        ("GB", 1e9),
        ("TB", 1e12),
        ("B", 1.0),
    ];
    let text = text.trim();
    let unit = UNITS.iter().find_map(|(unit, factor)| {
        let end = text.len().checked_sub(unit.len())?;
        let number =
            text.get(..end).filter(|_| text.get(end..).is_some_and(|end| end.eq_ignore_ascii_case(unit)))?;
        Some((number.trim_end(), *factor))
    });
    let (number, factor) = unit.unwrap_or((text, 1.0));
    let bytes = number.parse::<f64>().map(|number| number * factor);
    match bytes {
        Ok(bytes)
            if bytes >= 1.0
                && bytes < u64::MAX as f64
                && number.starts_with(|c: char| c.is_ascii_digit()) =>
        {
            Ok(bytes as u64)
        }
        _ => Err("it must be a size such as 512MiB, 2GiB, 1.5GB or a number of bytes".into()),
    }
}

/// What to take of memory that is free and allowed.
fn of_available(bytes: u64) -> u64 {
    bytes - LEFT_TO_OTHERS.min(bytes / LEFT_SHARE)
}

fn io(text: &str) -> Result<IoChoice, String> {
    text.parse().map_err(|error: neuropil::io::IoError| error.to_string())
}

impl MemoryFlags {
    /// The budget: what was asked for, or what the machine has and allows.
    pub fn budget(&self) -> Option<u64> {
        self.memory.or_else(|| Machine::this().available().map(of_available))
    }

    /// Refuses what cannot be written to in the end.
    pub fn check(&self) -> Result<(), CliError> {
        self.trace.as_deref().map_or(Ok(()), check_output)
    }

    /// Tells the builder.
    pub fn apply<'a>(&self, builder: EngineBuilder<'a>) -> EngineBuilder<'a> {
        let flash = self.policy == Policy::LlmFlash;
        let mut builder = builder.io(self.io.clone()).pipeline(PipelineOptions {
            bundle: !self.no_bundle,
            cache: !self.no_cache,
            pipeline: !self.no_pipeline && !flash,
            two_phase: !self.no_two_phase && !flash,
        });
        if let Some(every) = self.verify_every {
            builder = builder.verify_every(every).cross_check(every);
        }
        if self.policy == Policy::Mmap {
            return builder.mapped(true).prediction(Prediction::Off);
        }
        builder = builder.memory(self.budget());
        if flash {
            builder = builder.eviction(|_| Box::new(Window::new(WINDOW))).hot_share(0.0).warm(false);
        }
        builder
    }

    /// A new trace, if one was asked for.
    pub fn new_trace(&self) -> Option<Arc<Trace>> {
        self.trace.as_ref().map(|_| Arc::default())
    }

    /// Writes the trace of an engine, if one was asked for.
    pub fn write_trace(&self, engine: &Engine) -> Result<(), CliError> {
        let (Some(path), Some(trace)) = (&self.trace, engine.trace()) else { return Ok(()) };
        std::fs::write(path, trace.json()).map_err(|error| {
            let path = path.display();
            CliError::new(Exit::Output, format!("{path}: cannot be written ({error}); give another --trace"))
        })
    }

    /// The file to run. Only neurons of a store can be computed out of a map.
    pub fn file(&self, model: &Path) -> Result<PathBuf, CliError> {
        match self.policy {
            Policy::Mmap => Ok(self.store_instead(model)?.unwrap_or_else(|| model.into())),
            _ => Ok(model.into()),
        }
    }

    /// The store that a model was or is now turned into, because it does not fit the memory; `None` if it is a store.
    pub fn store_instead(&self, model: &Path) -> Result<Option<PathBuf>, CliError> {
        let gguf = Gguf::open_header(model).map_err(|error| CliError::of_model(model, error))?;
        if Store::is_store(&gguf) {
            return Ok(None);
        }
        let folder = cache::directory(self.cache_dir.as_deref())?.join("stores");
        std::fs::create_dir_all(&folder).map_err(|error| {
            let folder = folder.display();
            CliError::new(Exit::File, format!("{folder}: cannot be made ({error}); give --cache-dir"))
        })?;
        let key = store::content_key(&gguf).map_err(|error| CliError::of_model(model, error))?;
        let out = folder.join(format!("{key}.gguf"));
        // One of another version is made anew, too.
        if out.exists() && Gguf::open(&out).is_ok_and(|gguf| Store::read(&gguf).is_ok()) {
            return Ok(Some(out));
        }
        output::note(format!(
            "{} of weights do not fit the memory; turning the model into a neuron store, once: {}",
            memory::shown(gguf.tensors().iter().map(|tensor| tensor.bytes).sum()),
            out.display()
        ));
        let bar = Bar::bytes("converting");
        let converted = store::convert(model, &out, &ConvertOptions::default(), &mut |done, total| {
            bar.set(done, total);
            true
        });
        drop(bar);
        match converted {
            Ok(report) => {
                report.notes.iter().for_each(output::note);
                Ok(Some(out))
            }
            Err(ConvertError::Write(error)) => Err(CliError::new(
                Exit::Output,
                format!("{error}; free some space, or name another place with --cache-dir"),
            )),
            Err(error) => Err(error.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_small_container_is_not_left_to_others() {
        assert_eq!(of_available(16 << 30), (16 << 30) - (256 << 20));
        assert_eq!(of_available(256 << 20), 224 << 20);
        assert_eq!(of_available(0), 0);
    }

    #[test]
    fn sizes_have_units() {
        assert_eq!(size("512MiB"), Ok(512 << 20));
        assert_eq!(size("1.5GB"), Ok(1_500_000_000));
        assert_eq!(size("2 gib"), Ok(2 << 30));
        assert_eq!(size("4096"), Ok(4096));
        for wrong in ["", "GiB", "-1GiB", "1XB", "nan", "0", "inf", "1e30GB"] {
            assert!(size(wrong).is_err(), "{wrong}");
        }
    }
}
