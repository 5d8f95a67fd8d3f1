//! `perplexity`: how well a model predicts a text.
//!
//! As llama.cpp measures it, so that numbers compare: the text's tokens are cut into chunks, each chunk is read from
//! an empty context, and only the predictions in its second half count, which have half a chunk of context at least.

use std::path::PathBuf;

use neuropil::engine::SessionOptions;
use neuropil::model::tokenizer::EncodeOptions;
use serde_json::{Map, Value, json};

use crate::args::{EngineFlags, ModelFile};
use crate::engine;
use crate::error::{CliError, Exit, NAN_CURE};
use crate::generation;
use crate::output;
use crate::progress::Bar;
use crate::signal::Interrupts;

/// Flags of `perplexity`.
#[derive(clap::Args)]
#[command(after_help = "Example:
  neuropil perplexity model.gguf -f text.txt

The text is cut into chunks of tokens; each is read from an empty context, and the predictions in its second half are
scored. Tokens after the last whole chunk are dropped. Where the file asks for BOS, it takes the place of each chunk's
first token. The output is {\"ppl\":F,\"chunks\":N,\"tokens\":N,\"running\":[..]}: tokens counts the predictions scored, and
running is the perplexity after each chunk.")]
pub struct Args {
    #[command(flatten)]
    model: ModelFile,
    /// The text
    #[arg(short, long, value_name = "FILE")]
    file: PathBuf,
    /// Tokens of a chunk
    #[arg(long, value_name = "N", default_value_t = 512, allow_negative_numbers = true,
        value_parser = clap::value_parser!(u32).range(4..))]
    chunk: u32,
    #[command(flatten)]
    engine: EngineFlags,
    /// Print one JSON document, as without it
    #[arg(long)]
    json: bool,
}

/// Runs the verb.
pub fn run(args: &Args, interrupts: &Interrupts) -> Result<(), CliError> {
    let text = engine::read_file(&args.file)?;
    let engine = engine::open(&args.model.path, &args.engine)?;
    let _units = engine::UnitWatch::new(&engine);
    let tokenizer = engine::tokenizer(&engine)?;
    let options = EncodeOptions { add_special: true, parse_special: false };
    let mut tokens = tokenizer.encode(&text, options)?;
    let chunk = args.chunk as usize;
    let context = args.engine.context().unwrap_or(engine.spec().context);
    if chunk > context {
        let reason = format!(
            "a chunk of {chunk} tokens does not fit the context of {context}; give a smaller --chunk"
        );
        return Err(CliError::new(Exit::Prompt, reason));
    }
    let chunks = tokens.len() / chunk;
    if chunks == 0 {
        let reason = format!(
            "{} has {} tokens, which is less than one chunk of {chunk}; give a longer text or a smaller --chunk",
            args.file.display(),
            tokens.len()
        );
        return Err(CliError::new(Exit::Prompt, reason));
    }
    let bos = tokenizer.bos().filter(|_| tokenizer.adds_bos());
    // What is predicted in decode is predicted here, or else the figure would not tell what it costs.
    let options = SessionOptions {
        context: Some(context),
        sparse_prompt: true,
        ..engine::session_options(&args.engine)
    };
    let mut session = engine.session(options)?;
    let _watch = interrupts.watch(vec![session.cancel_token()]);
    let bar = Bar::steps("reading chunks");
    let (mut sum, mut scored, mut running) = (0.0, 0usize, Vec::new());
    for (index, chunk_tokens) in tokens.chunks_exact_mut(chunk).enumerate() {
        if let (Some(bos), Some(first)) = (bos, chunk_tokens.first_mut()) {
            *first = bos;
        }
        sum += session.loss(chunk_tokens)?;
        scored += chunk - 1 - chunk / 2;
        if sum.is_nan() {
            let error = CliError::new(Exit::Other, format!("the logits hold NaN; {NAN_CURE}"));
            return Err(error.in_file(&args.model.path));
        }
        running.push((sum / scored as f64).exp());
        bar.set(index as u64 + 1, chunks as u64);
    }
    drop(bar);
    args.engine.memory.write_trace(&engine)?;
    let mut document = Map::new();
    document.insert("ppl".into(), json!(running.last()));
    document.insert("chunks".into(), json!(chunks));
    document.insert("tokens".into(), json!(scored));
    document.insert("running".into(), json!(running));
    if let Some(activity) = generation::activity_json(session.activity()) {
        document.insert("activity".into(), activity);
    }
    output::json(&Value::Object(document))
}
