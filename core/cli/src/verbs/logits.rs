//! `logits`: what the model thinks comes next, in raw numbers.

use std::ffi::OsString;

use neuropil::model::sampler::{log_sum_exp, top};
use serde_json::json;

use crate::args::{EngineFlags, ModelFile, TextFlags};
use crate::engine;
use crate::error::{CliError, Exit, NAN_CURE};
use crate::output;
use crate::signal::Interrupts;

/// Fewest logits that are shown.
const LEAST: usize = 5;

/// Flags of `logits`.
#[derive(clap::Args)]
#[command(
    group = clap::ArgGroup::new("input").required(true).args(["tokens", "prompt"]),
    after_help = "Example:
  neuropil logits model.gguf -p \"The capital of France is\" --top 10

The output is {\"top\":[[id,logit]..],\"log_sum_exp\":F}: the largest logits after the last token, five or more, largest first, as
the model gives them, and the logarithm of the sum of the exponentials of all. The numbers are the same for any number of
threads.")]
pub struct Args {
    #[command(flatten)]
    model: ModelFile,
    /// Token ids of the prompt, as they are
    #[arg(long, value_name = "IDS", value_delimiter = ',', conflicts_with_all = ["parse_special", "no_special"])]
    tokens: Option<Vec<u32>>,
    /// Text of the prompt
    #[arg(short, long, value_name = "TEXT", allow_hyphen_values = true)]
    prompt: Option<OsString>,
    #[command(flatten)]
    text: TextFlags,
    /// How many logits to show; at least 5 are
    #[arg(long, value_name = "N", default_value_t = 5, allow_negative_numbers = true,
        value_parser = clap::value_parser!(u32).range(1..))]
    top: u32,
    #[command(flatten)]
    engine: EngineFlags,
    /// Print one JSON document, as without it
    #[arg(long)]
    json: bool,
}

/// Runs the verb.
pub fn run(args: &Args, interrupts: &Interrupts) -> Result<(), CliError> {
    let engine = engine::open(&args.model.path, &args.engine)?;
    let _units = engine::UnitWatch::new(&engine);
    let tokens = match (&args.tokens, &args.prompt) {
        (Some(tokens), _) => tokens.clone(),
        (None, Some(text)) => {
            engine::encode(engine::tokenizer(&engine)?, text.as_encoded_bytes(), args.text)?
        }
        (None, None) => Vec::new(),
    };
    let mut session = engine.session(engine::session_options(&args.engine))?;
    let _watch = interrupts.watch(vec![session.cancel_token()]);
    session.prefill(&tokens)?;
    args.engine.memory.write_trace(&engine)?;
    let logits = session.logits();
    if logits.iter().any(|logit| logit.is_nan()) {
        let error = CliError::new(Exit::Other, format!("the logits hold NaN; {NAN_CURE}"));
        return Err(error.in_file(&args.model.path));
    }
    output::json(
        &json!({ "top": top(logits, (args.top as usize).max(LEAST)), "log_sum_exp": log_sum_exp(logits) }),
    )
}
