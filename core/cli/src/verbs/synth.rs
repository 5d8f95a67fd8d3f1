//! `synth`: makes a model with a real shape and a chosen sparsity, and measures what came out.

use std::path::{Path, PathBuf};
use std::time::Instant;

use neuropil::pipeline::CancelToken;
use neuropil::synth::{self, Measured, Predictor, Preset, SHAPES, Shape, Synth, SynthError, SynthOptions};
use serde_json::{Map, Value, json};

use crate::engine;
use crate::error::{CliError, Exit};
use crate::files::{check_output, same};
use crate::progress::Bar;
use crate::signal::Interrupts;
use crate::{memory, output};

/// Flags of `synth`.
#[derive(clap::Args)]
#[command(after_help = format!("Example:
  neuropil synth --shape mistral-7b model.npl.gguf --preset smollm2 --rank 1024 --recall 0.95

Shapes: {}

Writes a neuron store with random weights whose neurons fire as asked for, runs it for a few tokens, and prints what
was asked for beside what was measured. The presets are two ends: `paper` has the figures of the PowerInfer papers,
which flatter every cache, `smollm2` those of a small real model. Its text means nothing.", names()))]
pub struct Args {
    /// The store to write
    #[arg(value_name = "OUT")]
    out: PathBuf,
    /// The shape, one of those below
    #[arg(long, value_name = "NAME")]
    shape: String,
    /// How neurons fire: paper or smollm2
    #[arg(long, value_name = "NAME", default_value = "paper")]
    preset: String,
    /// Share of the neurons that fire for a token; default: the preset's
    #[arg(long, value_name = "F", allow_negative_numbers = true)]
    active: Option<f64>,
    /// Share of a token's neurons that fire for the next token too; default: the preset's
    #[arg(long, value_name = "F", allow_negative_numbers = true)]
    overlap: Option<f64>,
    /// Rows of the first matrix of predictors; without it the store has none
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    rank: Option<u32>,
    /// Share of the neurons that fire which predictors find; as many are found for nothing as are missed
    #[arg(long, value_name = "F", default_value_t = 0.95, requires = "rank", allow_negative_numbers = true)]
    recall: f64,
    /// How unevenly experts are used, from 0 to 4; with 0 the tokens alone decide
    #[arg(long, value_name = "F", default_value_t = 0.0, allow_negative_numbers = true)]
    skew: f64,
    /// Layers, instead of the shape's own number
    #[arg(long, value_name = "N")]
    layers: Option<u32>,
    /// The same seed gives the same bytes
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
    /// Type of the large matrices: q4_0 q8_0 f16
    #[arg(long = "type", value_name = "TYPE", default_value = "q4_0")]
    dtype: String,
    /// Also write the shape as an ordinary model file of the same types, for other programs
    #[arg(long, value_name = "FILE")]
    twin: Option<PathBuf>,
    /// Compute threads of the measurement; 0 chooses them
    #[arg(short, long, default_value_t = 0, allow_negative_numbers = true,
        value_parser = clap::value_parser!(u32).range(0..=crate::args::MAX_THREADS))]
    threads: u32,
    /// Print one JSON document
    #[arg(long)]
    json: bool,
}

fn names() -> String {
    SHAPES.map(|shape| shape.name).join(" ")
}

/// Runs the verb.
pub fn run(args: &Args, interrupts: &Interrupts) -> Result<(), CliError> {
    for out in [Some(&args.out), args.twin.as_ref()].into_iter().flatten() {
        check_output(out)?;
    }
    if args.twin.as_ref().is_some_and(|twin| same(twin, &args.out) || *twin == args.out) {
        return Err(CliError::new(Exit::Usage, "OUT and --twin are the same file; give --twin another name"));
    }
    let synth = options(args).and_then(Synth::new).map_err(of_flags)?;
    let cancel = CancelToken::default();
    let _watch = interrupts.watch(vec![cancel.clone()]);
    let start = Instant::now();
    let bytes = written("writing the store", |bar| synth.write_store(&args.out, &cancel, bar))?;
    let twin_bytes = match &args.twin {
        Some(twin) => Some(written("writing the twin", |bar| synth.write_twin(twin, &cancel, bar))?),
        None => None,
    };
    let seconds = start.elapsed().as_secs_f64();
    let backend = engine::cpu(args.threads)?;
    let measured = synth.measure(&args.out, &backend, &cancel).map_err(|error| of_work(error, &args.out))?;
    if args.json {
        return output::json(&document(args, synth.options(), [Some(bytes), twin_bytes], seconds, &measured));
    }
    output::text(&table(args, synth.options(), bytes, seconds, &measured))
}

fn options(args: &Args) -> Result<SynthOptions, SynthError> {
    let mut shape = Shape::named(&args.shape)?;
    if let Some(layers) = args.layers {
        shape.layers = layers as usize;
    }
    let preset = Preset::named(&args.preset)?;
    let mut options = SynthOptions::new(shape, preset);
    options.active = args.active.unwrap_or(options.active);
    options.overlap = args.overlap.unwrap_or(options.overlap);
    options.predictor = args.rank.map(|rank| Predictor { rank: rank as usize, recall: args.recall });
    options.skew = args.skew;
    options.seed = args.seed;
    options.dtype = synth::type_named(&args.dtype)?;
    Ok(options)
}

fn written(
    what: &str,
    write: impl FnOnce(&mut dyn FnMut(u64, u64)) -> Result<u64, SynthError>,
) -> Result<u64, CliError> {
    let bar = Bar::bytes(what);
    write(&mut |done, total| bar.set(done, total)).map_err(|error| of_work(error, Path::new("")))
}

/// What is wrong with the flags.
fn of_flags(error: SynthError) -> CliError {
    CliError::new(Exit::Usage, format!("{error}; see neuropil synth --help"))
}

/// What went wrong with a file.
fn of_work(error: SynthError, file: &Path) -> CliError {
    match error {
        SynthError::Cancelled => CliError::silent(Exit::Interrupted),
        SynthError::Engine(error) => CliError::of_model(file, error),
        SynthError::Write(error) => error.into(),
        SynthError::Store(error) => error.into(),
        SynthError::NoSpace { .. } => CliError::new(Exit::Output, error),
        error => CliError::new(Exit::Other, error),
    }
}

fn document(
    args: &Args,
    options: &SynthOptions,
    [bytes, twin_bytes]: [Option<u64>; 2],
    seconds: f64,
    measured: &Measured,
) -> Value {
    let with = |mut map: Map<String, Value>, key: &str, value: Option<f64>| {
        value.into_iter().for_each(|value| drop(map.insert(key.into(), json!(value))));
        map
    };
    let object = |value: Value| match value {
        Value::Object(map) => map,
        _ => Map::new(),
    };
    let mut asked = object(json!({"active": options.active, "overlap": options.overlap}));
    if let Some(Predictor { rank, recall }) = options.predictor {
        asked.insert("recall".into(), json!(recall));
        asked.insert("rank".into(), json!(rank));
    }
    if options.skew > 0.0 {
        asked.insert("skew".into(), json!(options.skew));
    }
    let found = object(json!({"active": measured.active, "overlap": measured.overlap}));
    let found = with(with(found, "recall", measured.recall), "predicted", measured.predicted);
    let mut found = Value::Object(found);
    found["tokens"] = json!(measured.tokens);
    found["layers"] = json!(measured.layers);
    let mut all = object(json!({
        "file": args.out.display().to_string(),
        "bytes": bytes,
        "shape": options.shape.name,
        "layers": options.shape.layers,
        "preset": options.preset.name,
        "type": options.dtype.name(),
        "seed": options.seed,
        "write_seconds": seconds,
    }));
    if let (Some(twin), Some(bytes)) = (&args.twin, twin_bytes) {
        all.insert("twin".into(), json!({"file": twin.display().to_string(), "bytes": bytes}));
    }
    all.insert("asked".into(), Value::Object(asked));
    all.insert("measured".into(), found);
    Value::Object(all)
}

fn table(args: &Args, options: &SynthOptions, bytes: u64, seconds: f64, measured: &Measured) -> String {
    let mut text = format!(
        "{}: {}, {} layers, {}, written in {seconds:.1} s\n\n            asked  measured\n",
        args.out.display(),
        options.shape.name,
        options.shape.layers,
        memory::shown(bytes)
    );
    let mut line = |name: &str, asked: Option<f64>, measured: f64| {
        let asked = asked.map_or(String::new(), |asked| format!("{asked:.3}"));
        text += &format!("{name:<10} {asked:>6}  {measured:>8.3}\n");
    };
    line("active", Some(options.active), measured.active);
    line("overlap", Some(options.overlap), measured.overlap);
    if let (Some(recall), Some(predictor)) = (measured.recall, options.predictor) {
        line("recall", Some(predictor.recall), recall);
    }
    if let Some(predicted) = measured.predicted {
        line("predicted", None, predicted);
    }
    let layers: Vec<String> = measured.layers.iter().map(ToString::to_string).collect();
    let part = match measured.layers.len() < options.shape.layers {
        true => format!("layers {}", layers.join(", ")),
        false => "all layers".into(),
    };
    text + &format!("\nmeasured over {} tokens, {part}\n", measured.tokens)
}
