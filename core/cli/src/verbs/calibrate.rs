//! `calibrate`: what a text tells of a model's neurons, written into its neuron store.

use std::path::{Path, PathBuf};
use std::time::Instant;

use neuropil::calibrate::{
    CalibrateError, CalibrateOptions, CalibrateReport, PredictorReport, Quality, RECALLS, Rank, Target,
    calibrate,
};
use neuropil::engine::Engine;
use neuropil::gguf::Gguf;
use neuropil::pipeline::CancelToken;
use neuropil::store::Store;
use serde_json::{Value, json};

use crate::args::ModelFile;
use crate::engine;
use crate::error::{CliError, Exit};
use crate::files::{check_output, same};
use crate::progress::Bar;
use crate::signal::Interrupts;
use crate::{memory, output};

/// Flags of `calibrate`.
#[derive(clap::Args)]
#[command(after_help = "Example:
  neuropil calibrate model.gguf -f text.txt -o model.store.gguf

Runs the text through the model and writes a neuron store with the neurons in the order of how often they fire. For a
model whose gate never is zero (SiLU, GELU) it also finds what may be left out: perplexity on every fifth chunk of the
text, which is not learned from, rises by about --loss at most. A model that is no neuron store yet is converted first.")]
pub struct Args {
    #[command(flatten)]
    model: ModelFile,
    /// The text, of the kind that the model will meet; some ten thousand words are enough
    #[arg(short, long, value_name = "FILE")]
    file: PathBuf,
    /// Where the result goes; default: a neuron store is replaced
    #[arg(short, long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// How much perplexity may rise, as a share
    #[arg(long, value_name = "F", default_value_t = 0.01, allow_negative_numbers = true, value_parser = share)]
    loss: f64,
    /// Leave out this share of the neurons instead, whatever it costs
    #[arg(long, value_name = "F", allow_negative_numbers = true, value_parser = share, conflicts_with = "loss")]
    sparsity: Option<f64>,
    /// Most chunks of 512 tokens to use of the text
    #[arg(long, value_name = "N", default_value_t = 50, allow_negative_numbers = true,
        value_parser = clap::value_parser!(u32).range(10..))]
    chunks: u32,
    /// For a model whose gate can be zero: also fit predictors of this rank, or of a quarter of the width (auto)
    #[arg(long, value_name = "RANK", value_parser = rank)]
    predictors: Option<Rank>,
    /// Seed of the random start of the fit
    #[arg(long, value_name = "N", default_value_t = 0, allow_negative_numbers = true)]
    seed: u64,
    /// Compute threads; 0 chooses them by the cores and limits of the machine
    #[arg(short, long, default_value_t = 0, allow_negative_numbers = true,
        value_parser = clap::value_parser!(u32).range(0..=4096))]
    threads: u32,
    /// Print one JSON document
    #[arg(long)]
    json: bool,
}

/// Runs the verb.
pub fn run(args: &Args, interrupts: &Interrupts) -> Result<(), CliError> {
    let start = Instant::now();
    let text = engine::read_file(&args.file)?;
    let out = output_file(args)?;
    check_output(out)?;
    let backend = engine::cpu(args.threads)?;
    let target = args.sparsity.map_or(Target::Loss(args.loss), Target::Sparsity);
    let chunks = args.chunks as usize;
    let options = CalibrateOptions { target, chunks, rank: args.predictors, seed: args.seed };
    let stop = CancelToken::default();
    let _watch = interrupts.watch(vec![stop.clone()]);
    let bar = Bar::steps("reading the model");
    let report = calibrate(
        &args.model.path,
        out,
        &text,
        &options,
        &|path, prediction| Engine::builder(path).prediction(prediction).backend(&backend)?.build(),
        &mut |what, done, total| {
            bar.say(what);
            bar.set(done, total);
            !stop.is_cancelled()
        },
    );
    drop(bar);
    let report = report.map_err(|error| {
        let short = matches!(error, CalibrateError::ShortText { .. });
        CliError::from(error).in_file(if short { &args.file } else { &args.model.path })
    })?;
    if args.json {
        return output::json(&json!({
            "out": out.display().to_string(),
            "learned_tokens": report.tokens[0],
            "held_out_tokens": report.tokens[1],
            "ppl_before": report.before,
            "ppl_after": report.after,
            "predict": report.prediction.name(),
            "active": report.active,
            "overlap": report.overlap,
            "thresholds": report.thresholds,
            "cost": report.cost,
            "predictors": report.predictors.iter().map(predictor_json).collect::<Vec<_>>(),
            "seconds": start.elapsed().as_secs_f64(),
        }));
    }
    output::text(&summary(&report))
}

/// Where the result goes.
fn output_file(args: &Args) -> Result<&Path, CliError> {
    let usage = |reason: String| Err(CliError::new(Exit::Usage, reason));
    let model = &args.model.path;
    let out = args.out.as_deref().unwrap_or(model);
    if same(out, &args.file) {
        return usage(format!("{}: is the text; give another name for the result", out.display()));
    }
    if args.out.is_some() && !same(out, model) {
        return Ok(out);
    }
    // A folder is a model of another kind, and so not a store.
    if !model.is_dir() && Store::is_store(&Gguf::open_header(model)?) {
        return Ok(out);
    }
    usage(format!(
        "{}: is no neuron store, so the result needs a name of its own; give one with -o FILE",
        model.display()
    ))
}

fn predictor_json(predictor: &PredictorReport) -> Value {
    let quality = |(asked, quality): (&f64, &Quality)| {
        json!({
            "asked": asked,
            "recall": quality.recall,
            "precision": quality.precision,
            "evaluated": quality.evaluated,
        })
    };
    let qualities: Vec<Value> = RECALLS.iter().zip(&predictor.quality).map(quality).collect();
    json!({ "name": predictor.name, "bytes": predictor.bytes, "quality": qualities })
}

fn summary(report: &CalibrateReport) -> String {
    let mean = |values: &[f64]| 100.0 * values.iter().sum::<f64>() / values.len().max(1) as f64;
    let CalibrateReport { tokens: [learned, held_out], before, after, active, overlap, .. } = report;
    let mut text = format!(
        "learned from {learned} tokens, checked on {held_out} others\n\
         perplexity {before:.3} with all neurons, {after:.3} with those chosen by --predict {} ({:+.2} %)\n\
         {:.1} % of the neurons fire for a token, {:.0} % of them fired for the token before\n",
        report.prediction.name(),
        100.0 * (after / before - 1.0),
        mean(active),
        mean(overlap),
    );
    for predictor in &report.predictors {
        text += &format!("predictor: {}, {}\n", predictor.name, memory::shown(predictor.bytes));
        for quality in &predictor.quality {
            text += &format!(
                "  finds {:.1} % of the neurons that fire among {:.1} % of all\n",
                100.0 * quality.recall,
                100.0 * quality.evaluated
            );
        }
    }
    text
}

fn rank(text: &str) -> Result<Rank, String> {
    if text == "auto" {
        return Ok(Rank::Auto);
    }
    let rank = text.parse().ok().filter(|rank: &usize| (1..=65536).contains(rank) && rank.is_multiple_of(32));
    rank.map(Rank::Of).ok_or_else(|| "it must be auto, or a multiple of 32 up to 65536".into())
}

fn share(text: &str) -> Result<f64, String> {
    let value: f64 = text.trim().parse().map_err(|_| "it is not a number".to_owned())?;
    if (0.0..1.0).contains(&value) { Ok(value) } else { Err("it must be 0 or more, and less than 1".into()) }
}
