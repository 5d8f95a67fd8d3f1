//! `tokenize`: texts to ids and back, without loading weights.

use std::path::{Path, PathBuf};

use neuropil::engine::open_tokenizer;
use neuropil::model::tokenizer::Tokenizer;
use serde_json::json;

use crate::args::TextFlags;
use crate::engine;
use crate::error::{CliError, Exit};
use crate::output;

/// Flags of `tokenize`.
#[derive(clap::Args)]
#[command(after_help = "Examples:
  printf 'Hello world' | neuropil tokenize model.gguf
  neuropil tokenize model.gguf --decode 19556,905

Standard input is taken as it is, nothing trimmed; a model with a byte-level BPE vocabulary reads a byte that is
no UTF-8 as U+FFFD. The output is {\"tokens\":[..]}. With --decode it is the text's bytes, or with
--json {\"text\":\"..\"}; control tokens have no text unless --parse-special asks for their names.")]
pub struct Args {
    /// A GGUF file; one that holds a vocabulary alone will do
    #[arg(value_name = "MODEL")]
    model: PathBuf,
    /// Turn these ids into text instead
    #[arg(long, value_name = "IDS", value_delimiter = ',', conflicts_with = "no_special")]
    decode: Option<Vec<u32>>,
    #[command(flatten)]
    text: TextFlags,
    /// Print one JSON document; only --decode prints anything else without it
    #[arg(long)]
    json: bool,
}

/// Runs the verb.
pub fn run(args: &Args) -> Result<(), CliError> {
    match &args.decode {
        Some(ids) => {
            let tokenizer = open(&args.model)?;
            let bytes = decode(&tokenizer, ids, args.text.parse_special)?;
            if args.json {
                output::json(&json!({ "text": String::from_utf8_lossy(&bytes) }))
            } else {
                output::bytes(&bytes)
            }
        }
        None => {
            let tokenizer = open(&args.model)?;
            tokenizer.notes().iter().for_each(output::note);
            let text = engine::read_stdin("the text")?;
            output::json(&json!({ "tokens": engine::encode(&tokenizer, &text, args.text)? }))
        }
    }
}

fn open(model: &Path) -> Result<Tokenizer, CliError> {
    open_tokenizer(model).map_err(|error| CliError::of_model(model, error))
}

fn decode(tokenizer: &Tokenizer, ids: &[u32], shown: bool) -> Result<Vec<u8>, CliError> {
    let len = tokenizer.len();
    if let Some(id) = ids.iter().find(|id| **id as usize >= len) {
        let message = format!("token {id} is outside the vocabulary of {len}; give smaller ids");
        return Err(CliError::new(Exit::Prompt, message));
    }
    if !shown {
        return Ok(tokenizer.decode_text(ids)?);
    }
    let mut bytes = Vec::new();
    for run in ids.chunk_by(|a, b| tokenizer.is_control(*a) == tokenizer.is_control(*b)) {
        if run.first().is_some_and(|id| tokenizer.is_control(*id)) {
            run.iter().try_for_each(|id| tokenizer.decode_token_shown(*id, &mut bytes))?;
        } else {
            bytes.extend(tokenizer.decode_text(run)?);
        }
    }
    Ok(bytes)
}
