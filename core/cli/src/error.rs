//! Why the program ends, as one line and an exit code.
//!
//! Scripts branch on the code and people read the line, so every failure of every layer is turned into these two
//! here and nowhere else.

use std::fmt;

use neuropil::engine::EngineError;
use neuropil::gguf::GgufError;
use neuropil::model::ModelError;
use neuropil::model::chat::ChatError;
use neuropil::model::sampler::SamplerError;
use neuropil_device::DeviceError;

/// The exit codes; 0 is success. Each is listed in `neuropil --help`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    /// Anything that has no code of its own.
    Other = 1,
    /// The command line is wrong.
    Usage = 2,
    /// A file cannot be read, or is damaged or no GGUF file.
    File = 3,
    /// The model cannot run here, or lacks what was asked for.
    Model = 4,
    /// The prompt or its tokens do not fit the model or the context.
    Prompt = 5,
    /// A compute unit failed or does not exist.
    Device = 6,
    /// The default model could not be downloaded.
    Download = 7,
    /// Memory ran out.
    Memory = 8,
    /// The output cannot be written; silent when its reader has gone.
    Output = 9,
    /// Ctrl-C; what was generated until then has been printed.
    Interrupted = 10,
    /// A bug of the program.
    Bug = 11,
    /// Ctrl-C again: ended on the spot.
    Killed = 99,
}

/// The list of exit codes for `--help`.
pub const EXIT_CODES: &str = "\
Exit codes:
  0   success
  1   another failure
  2   wrong command line
  3   a file cannot be read, is damaged, or is no GGUF file
  4   the model cannot run here, or lacks what was asked for
  5   the prompt or its tokens do not fit the model or the context
  6   a compute unit failed
  7   the default model could not be downloaded
  8   out of memory
  9   the output could not be written (silent when its reader has gone)
  10  interrupted by Ctrl-C; what was generated until then is printed
  11  a bug of the program
  99  ended at once by a second Ctrl-C";

/// A failure of the program.
#[derive(Debug)]
pub struct CliError {
    /// The exit code.
    pub exit: Exit,
    /// What is wrong and what to do; nothing when there is nobody to tell.
    pub message: String,
}

impl CliError {
    /// A failure with its line.
    pub fn new(exit: Exit, message: impl fmt::Display) -> CliError {
        CliError { exit, message: message.to_string() }
    }

    /// A failure that needs no words.
    pub fn silent(exit: Exit) -> CliError {
        CliError { exit, message: String::new() }
    }
}

/// Text on one line, with control characters escaped: messages carry names out of files and arguments.
pub fn one_line(text: &str) -> String {
    let mut line = String::with_capacity(text.len());
    for c in text.chars() {
        // Also what turns the writing direction around.
        if c.is_control()
            || matches!(c, '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
        {
            line.extend(c.escape_debug());
        } else {
            line.push(c);
        }
    }
    line
}

impl From<GgufError> for CliError {
    fn from(error: GgufError) -> CliError {
        let exit = match &error {
            GgufError::OutOfMemory { .. } => Exit::Memory,
            GgufError::UnsupportedType { .. }
            | GgufError::MissingKey { .. }
            | GgufError::MissingTensor { .. }
            | GgufError::WrongType { .. } => Exit::Model,
            _ => Exit::File,
        };
        CliError::new(exit, error)
    }
}

fn device_exit(error: &DeviceError) -> Exit {
    match error {
        DeviceError::OutOfMemory { .. } => Exit::Memory,
        DeviceError::Source { .. } => Exit::File,
        _ => Exit::Device,
    }
}

impl From<DeviceError> for CliError {
    fn from(error: DeviceError) -> CliError {
        CliError::new(device_exit(&error), error)
    }
}

impl From<ModelError> for CliError {
    fn from(error: ModelError) -> CliError {
        let exit = match &error {
            ModelError::OutOfMemory { .. } => Exit::Memory,
            ModelError::Weight { source, .. } => device_exit(source),
            ModelError::Gguf(_) => {
                let ModelError::Gguf(error) = error else { unreachable!("the arm matched") };
                return error.into();
            }
            _ => Exit::Model,
        };
        CliError::new(exit, error)
    }
}

impl From<EngineError> for CliError {
    fn from(error: EngineError) -> CliError {
        match error {
            EngineError::Gguf(error) => error.into(),
            EngineError::Model(error) => error.into(),
            EngineError::Device(error) => error.into(),
            EngineError::Cancelled => CliError::silent(Exit::Interrupted),
            EngineError::ContextFull { tokens, context } => CliError::new(
                Exit::Prompt,
                format!(
                    "the prompt has {tokens} tokens, but the context holds {context}; shorten it, or give a larger \
                     --ctx if the model allows one"
                ),
            ),
            EngineError::ContextTooLarge { asked, context } => CliError::new(
                Exit::Prompt,
                format!(
                    "--ctx {asked} is more than the {context} positions the model was made for; give --ctx {context} or less"
                ),
            ),
            EngineError::EmptyPrompt | EngineError::Token { .. } => CliError::new(Exit::Prompt, error),
            EngineError::Chat(ChatError::Raised { .. }) => CliError::new(Exit::Prompt, error),
            EngineError::NoVocabulary | EngineError::Tokenizer(_) | EngineError::Chat(_) => {
                CliError::new(Exit::Model, error)
            }
            EngineError::Sampler(SamplerError::Option { .. } | SamplerError::BiasToken { .. }) => {
                CliError::new(Exit::Usage, error)
            }
            EngineError::NoDevice => CliError::new(Exit::Device, error),
            other => CliError::new(Exit::Other, other),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::one_line;

    #[test]
    fn a_line_has_no_control_characters() {
        assert_eq!(one_line("a\nb\x1b[31mé\u{202e}"), "a\\nb\\u{1b}[31mé\\u{202e}");
    }
}
