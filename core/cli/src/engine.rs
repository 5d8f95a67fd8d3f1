//! From flags to an engine, and from a text to tokens.

use std::io::{self, IsTerminal, Read};
use std::path::Path;
use std::sync::Arc;

use neuropil::engine::{Engine, EngineError, SessionOptions};
use neuropil::gguf::Gguf;
use neuropil::model::ModelError;
use neuropil::model::tokenizer::{EncodeOptions, Tokenizer};
use neuropil::pipeline::Trace;
use neuropil::sched::UnitEvent;
use neuropil_cpu::{CpuBackend, CpuOptions};
use neuropil_device::Timeline;

use crate::args::{EngineFlags, TextFlags};
use crate::error::{CliError, Exit};
use crate::progress::Bar;
use crate::units::Units;
use crate::{memory, output};

/// Most bytes of a text that are read; the tokenizer takes no more.
const MAX_TEXT: u64 = 1 << 30;

/// The CPU backend with this many threads, 0 for automatic.
pub fn cpu(threads: u32) -> Result<CpuBackend, CliError> {
    traced_cpu(threads, None)
}

/// As [`cpu`], and its threads tell the trace when they work.
fn traced_cpu(threads: u32, trace: Option<&Arc<Trace>>) -> Result<CpuBackend, CliError> {
    let timeline = trace.map(|trace| trace.clone() as Arc<dyn Timeline>);
    let options = CpuOptions { threads: Some(threads as usize), ..CpuOptions::default() };
    CpuBackend::traced(options, timeline).map_err(|error| CliError::new(Exit::Device, error))
}

/// Loads a model, or the store that it must be turned into to fit the memory.
pub fn open(model: &Path, flags: &EngineFlags) -> Result<Engine, CliError> {
    open_within(model, flags, false)
}

/// As [`open`], but a budget that is too small even for a store becomes the smallest that is not.
pub fn open_tight(model: &Path, flags: &EngineFlags) -> Result<Engine, CliError> {
    open_within(model, flags, true)
}

fn open_within(model: &Path, flags: &EngineFlags, raise: bool) -> Result<Engine, CliError> {
    flags.memory.check()?;
    if flags.exact {
        let gguf = Gguf::open_header(model).map_err(|error| CliError::of_model(model, error))?;
        let bytes =
            gguf.tensors().iter().fold(0u64, |sum, t| sum.saturating_add(t.elements().saturating_mul(4)));
        output::note(format!("--exact expands the weights to F32, which takes {}", memory::shown(bytes)));
    }
    let trace = flags.memory.new_trace();
    let cpu = traced_cpu(flags.threads, trace.as_ref())?;
    let units = Units::open(&flags.device, cpu, flags.strict, flags.memory.cache_dir.as_deref())?;
    let load = |file: &Path, flags: &EngineFlags| load(file, flags, &units, trace.as_ref());
    let mut file = flags.memory.file(model)?;
    let mut loaded = load(&file, flags);
    if let Err(EngineError::Model(ModelError::Budget { .. })) = &loaded
        && !flags.exact
        && let Some(store) = flags.memory.store_instead(&file)?
    {
        file = store;
        memory::forget_peak();
        loaded = load(&file, flags);
    }
    if let Err(EngineError::Model(ModelError::Budget { smallest, .. })) = &loaded
        && raise
    {
        let mut flags = flags.clone();
        flags.memory.memory = Some(*smallest);
        loaded = load(&file, &flags);
    }
    let engine = loaded.map_err(|error| CliError::of_model(&file, error))?;
    engine.notes().iter().for_each(output::note);
    // Of those that could not be opened a note told.
    engine.events().iter().skip(units.missing()).map(UnitEvent::to_string).for_each(output::note);
    Ok(engine)
}

fn load(
    model: &Path,
    flags: &EngineFlags,
    units: &Units,
    trace: Option<&Arc<Trace>>,
) -> Result<Engine, EngineError> {
    let mut builder = Engine::builder(model)
        .exact(flags.exact)
        .prediction(flags.predict.kind())
        .context(flags.context(), flags.kv.kind());
    builder = flags.memory.apply(builder);
    if let Some(trace) = trace {
        builder = builder.trace(trace.clone());
    }
    builder = units.apply(builder.strict(flags.strict))?;
    let bar = Bar::bytes("loading");
    builder.on_progress(|done, total| bar.set(done, total)).build()
}

/// Tells, when it goes, what happened to units since it came.
pub struct UnitWatch {
    engine: Engine,
    seen: usize,
}

impl UnitWatch {
    /// Begins to watch.
    pub fn new(engine: &Engine) -> UnitWatch {
        UnitWatch { engine: engine.clone(), seen: engine.events().len() }
    }
}

impl Drop for UnitWatch {
    fn drop(&mut self) {
        self.engine.events().iter().skip(self.seen).map(UnitEvent::to_string).for_each(output::note);
    }
}

/// How a session is set up by the flags.
pub fn session_options(flags: &EngineFlags) -> SessionOptions {
    SessionOptions { context: flags.context(), kv: flags.kv.kind(), ..SessionOptions::default() }
}

/// The model's tokenizer.
pub fn tokenizer(engine: &Engine) -> Result<&Tokenizer, CliError> {
    engine.tokenizer().map_err(|error| CliError::of_model(engine.gguf().path(), error))
}

/// The tokens of a raw text.
pub fn encode(tokenizer: &Tokenizer, text: &[u8], flags: TextFlags) -> Result<Vec<u32>, CliError> {
    let options = EncodeOptions { add_special: !flags.no_special, parse_special: flags.parse_special };
    Ok(tokenizer.encode(text, options)?)
}

/// All of standard input, byte for byte.
pub fn read_stdin(what: &str) -> Result<Vec<u8>, CliError> {
    let stdin = io::stdin();
    if stdin.is_terminal() {
        output::note(format!("reading {what} from the terminal; Ctrl-D ends it"));
    }
    read_all(stdin.lock(), "standard input")
}

/// All of a text file, byte for byte.
pub fn read_file(path: &Path) -> Result<Vec<u8>, CliError> {
    let shown = path.display();
    let file = std::fs::File::open(path).map_err(|error| {
        CliError::new(Exit::File, format!("{shown}: cannot be read ({error}); check the path"))
    })?;
    read_all(file, &shown.to_string())
}

fn read_all(from: impl Read, name: &str) -> Result<Vec<u8>, CliError> {
    let mut bytes = Vec::new();
    from.take(MAX_TEXT + 1).read_to_end(&mut bytes).map_err(|error| {
        CliError::new(Exit::File, format!("{name}: cannot be read ({error}); check that it is a text"))
    })?;
    if bytes.len() as u64 > MAX_TEXT {
        return Err(CliError::new(
            Exit::Prompt,
            format!("{name}: is longer than 1 GiB; give a shorter text"),
        ));
    }
    Ok(bytes)
}
