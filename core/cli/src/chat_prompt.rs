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
