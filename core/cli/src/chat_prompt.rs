//! A conversation as tokens, by the model's own template.

use neuropil::engine::{Engine, EngineError};
use neuropil::model::chat::Message;

use crate::error::CliError;

/// The tokens of a conversation, up to where the next answer begins.
pub fn encode(engine: &Engine, messages: &[Message]) -> Result<Vec<u32>, CliError> {
    let tokens = || -> Result<_, EngineError> {
        Ok(engine.chat_template()?.prompt(engine.tokenizer()?, messages, true)?)
    };
    tokens().map_err(|error| CliError::of_model(engine.gguf().path(), error))
}
