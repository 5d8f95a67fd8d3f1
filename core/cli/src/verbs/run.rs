//! `run`: continues a text.
//!
//! Standard output is the generated text and not a byte more, as it comes, so that it can be piped on; on a terminal
//! a line end follows. Several samples of one prompt generate together and are printed one after the other.

use std::ffi::OsString;

use neuropil::engine::{Engine, GenerateOptions};
use neuropil::model::chat::Message;

use crate::args::{self, EngineFlags, ModelFile, SamplingFlags, TextFlags};
use crate::chat_prompt;
use crate::engine;
use crate::error::CliError;
use crate::generation::{self, Outcome};
use crate::output;
use crate::signal::Interrupts;

/// Flags of `run`.
#[derive(clap::Args)]
#[command(after_help = "Examples:
  neuropil run model.gguf -p \"Once upon a time\" -n 64 --seed 7
  neuropil run model.gguf --chat -p \"Why is the sky blue?\" --temp 0 --json < /dev/null

The text comes from -p or from standard input, and is taken as it is, nothing trimmed. Without --json the output is the
generated text alone; with --samples each sample follows a line \"--- sample 1 ---\". Ctrl-C ends the generation and
what was generated is printed, with --json as a document whose finish_reason is \"cancelled\".")]
pub struct Args {
    #[command(flatten)]
    model: ModelFile,
    /// The text to continue; default: standard input
    #[arg(short, long, value_name = "TEXT", allow_hyphen_values = true)]
    prompt: Option<OsString>,
    /// Take the text as a user's message and wrap it in the model's chat template
    #[arg(long, conflicts_with_all = ["parse_special", "no_special"])]
    chat: bool,
    /// A system message that goes before the user's
    #[arg(long, value_name = "TEXT", requires = "chat", allow_hyphen_values = true, value_parser = args::text())]
    system: Option<String>,
    #[command(flatten)]
    text: TextFlags,
    #[command(flatten)]
    sampling: SamplingFlags,
    /// Generate N samples of the prompt as one batch, with the seeds SEED, SEED+1, and so on
    #[arg(long, value_name = "N", allow_negative_numbers = true,
        value_parser = clap::value_parser!(u32).range(1..=1024), help_heading = "Sampling")]
    samples: Option<u32>,
    #[command(flatten)]
    engine: EngineFlags,
    /// Print one JSON document instead of the text
    #[arg(long)]
    json: bool,
}

/// Runs the verb.
pub fn run(args: &Args, interrupts: &Interrupts) -> Result<(), CliError> {
    let engine = engine::open(&args.model.path, &args.engine)?;
    let given = match &args.prompt {
        Some(text) => text.clone().into_encoded_bytes(),
        None => engine::read_stdin("the prompt")?,
    };
    let prompt = prompt_tokens(args, &engine, given)?;
    let seed = generation::seed(&args.sampling);
    let samples = u64::from(args.samples.unwrap_or(1));
    let options: Vec<GenerateOptions> =
        (0..samples).map(|i| generation::options(&args.sampling, seed.wrapping_add(i))).collect();
    let session = engine.session(engine::session_options(&args.engine))?;
    let stream = !args.json && args.samples.is_none();
    let on_text = |_, text: &str| if stream && !text.is_empty() { output::text(text) } else { Ok(()) };
    let (outcome, _) = generation::generate(session, &prompt, &options, interrupts, on_text)?;
    if args.json {
        output::json(&outcome.json(&engine, &prompt, args.samples.is_some(), seed))?;
    } else {
        finish_text(&outcome, args.samples.is_some())?;
    }
    args.engine.memory.write_trace(&engine)?;
    outcome.exit()
}

fn prompt_tokens(args: &Args, engine: &Engine, given: Vec<u8>) -> Result<Vec<u32>, CliError> {
    if !args.chat {
        return engine::encode(engine::tokenizer(engine)?, &given, args.text);
    }
    let text = match String::from_utf8(given) {
        Ok(text) => text,
        Err(error) => {
            output::note("the message is not valid UTF-8; its bad bytes became U+FFFD");
            String::from_utf8_lossy(error.as_bytes()).into_owned()
        }
    };
    let mut turns: Vec<Message> = args.system.iter().map(|text| Message::new("system", text)).collect();
    turns.push(Message::new("user", text));
    chat_prompt::encode(engine, &turns)
}

fn finish_text(outcome: &Outcome, samples: bool) -> Result<(), CliError> {
    if samples {
        for (i, generation) in outcome.generations.iter().enumerate() {
            output::text(&format!("--- sample {} ---\n{}\n", i + 1, generation.text))?;
        }
    } else if output::is_terminal() {
        output::text("\n")?;
    }
    Ok(())
}
