//! A conversation as tokens, by the model's own template.

use neuropil::engine::Engine;

use crate::error::{CliError, Exit};

/// One message.
#[derive(Clone, Debug)]
pub struct Turn {
    /// `system`, `user` or `assistant`.
    pub role: &'static str,
    /// What was said.
    pub text: String,
}

/// stub
pub fn encode(engine: &Engine, turns: &[Turn], parse_special: bool) -> Result<Vec<u32>, CliError> {
    let _ = (turns, parse_special, Exit::Prompt, engine);
    Ok(Vec::new())
}
