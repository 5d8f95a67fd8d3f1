//! Why the program ends, as one line and an exit code.
//!
//! Scripts branch on the code and people read the line, so every failure of every layer is turned into these two
//! here and nowhere else.

use std::fmt;
use std::io;
use std::path::Path;

use neuropil::calibrate::CalibrateError;
use neuropil::engine::EngineError;
use neuropil::gguf::{GgufError, WriteError};
use neuropil::io::IoError;
use neuropil::model::ModelError;
use neuropil::model::chat::ChatError;
use neuropil::model::sampler::SamplerError;
use neuropil::model::tokenizer::TokenizerError;
use neuropil::store::{ConvertError, StoreError};
use neuropil_device::DeviceError;

/// Most characters of a line: a file may hold megabytes of text where a name should be.
const LONGEST_LINE: usize = 600;

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

    /// What went wrong with the model in the file at `path`, which the line names.
    pub fn of_model(path: &Path, error: impl Into<EngineError>) -> CliError {
        let error = error.into();
        // These name their file themselves, which may be another one of a set.
        let named = matches!(error, EngineError::Gguf(_) | EngineError::Cancelled);
        let error = CliError::from(error);
        if named { error } else { error.in_file(path) }
    }

    /// The same failure, its line beginning with the file if it does not name it anyway.
    pub fn in_file(self, path: &Path) -> CliError {
        let file = path.display().to_string();
        let message = if self.message.is_empty() || self.message.contains(&file) {
            self.message
        } else {
            format!("{file}: {}", self.message)
        };
        CliError { message, ..self }
    }

    /// A failure that needs no words.
    pub fn silent(exit: Exit) -> CliError {
        CliError { exit, message: String::new() }
    }
}

/// A message as a line of bounded length. What is too much goes out of its middle: the file is named at the beginning,
/// and the cure at the end.
pub fn message_line(text: &str) -> String {
    let line = one_line(text);
    let length = line.chars().count();
    if length <= LONGEST_LINE {
        return line;
    }
    let end = LONGEST_LINE / 2;
    let start = line.chars().take(LONGEST_LINE - end - 1);
    start.chain(['…']).chain(line.chars().skip(length - end)).collect()
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

impl From<StoreError> for CliError {
    fn from(error: StoreError) -> CliError {
        match error {
            StoreError::Gguf(error) => error.into(),
            StoreError::Width { .. } | StoreError::Version { .. } => CliError::new(Exit::Model, error),
            StoreError::ReadUnit { .. } => CliError::new(Exit::Usage, error),
            _ => CliError::new(Exit::File, error),
        }
    }
}

impl From<WriteError> for CliError {
    fn from(error: WriteError) -> CliError {
        let exit = match &error {
            WriteError::OutOfMemory { .. } => Exit::Memory,
            WriteError::Gguf(_) | WriteError::Tensor { .. } | WriteError::TooMany { .. } => Exit::Model,
            WriteError::Late { .. } => Exit::Bug,
            _ => Exit::Output,
        };
        CliError::new(exit, error)
    }
}

impl From<ConvertError> for CliError {
    fn from(error: ConvertError) -> CliError {
        let exit = match error {
            ConvertError::Gguf(error) => return error.into(),
            ConvertError::Store(error) => return error.into(),
            ConvertError::Write(error) => return error.into(),
            ConvertError::Cancelled => return CliError::silent(Exit::Interrupted),
            ConvertError::OutOfMemory { .. } => Exit::Memory,
            ConvertError::Type { .. } => Exit::Usage,
            _ => Exit::Model,
        };
        CliError::new(exit, error)
    }
}

impl From<CalibrateError> for CliError {
    fn from(error: CalibrateError) -> CliError {
        match error {
            CalibrateError::Engine(error) => error.into(),
            CalibrateError::Gguf(error) => error.into(),
            CalibrateError::Store(error) => error.into(),
            CalibrateError::Convert(error) => error.into(),
            CalibrateError::Device(error) => error.into(),
            CalibrateError::Cancelled => CliError::silent(Exit::Interrupted),
            CalibrateError::ShortText { .. } => CliError::new(Exit::Prompt, error),
            CalibrateError::Rank { .. } | CalibrateError::NothingToPredict => {
                CliError::new(Exit::Usage, error)
            }
            _ => CliError::new(Exit::Other, error),
        }
    }
}

impl From<GgufError> for CliError {
    fn from(error: GgufError) -> CliError {
        let exit = match &error {
            GgufError::OutOfMemory { .. } => Exit::Memory,
            GgufError::Io { source, .. } => {
                let (exit, cure) = match source.kind() {
                    io::ErrorKind::OutOfMemory => (Exit::Memory, "free some memory or raise the limit of it"),
                    io::ErrorKind::NotFound => (Exit::File, "check the path"),
                    io::ErrorKind::PermissionDenied => (Exit::File, "allow this user to read it"),
                    _ => (Exit::File, "check the path and the disk"),
                };
                return CliError::new(exit, format!("{error}; {cure}"));
            }
            GgufError::UnsupportedType { .. }
            | GgufError::MissingKey { .. }
            | GgufError::MissingTensor { .. }
            | GgufError::WrongType { .. } => Exit::Model,
            _ => Exit::File,
        };
        CliError::new(exit, error)
    }
}

/// The code for a device's failure, and what to do about it.
fn device_cure(error: &DeviceError) -> (Exit, &'static str) {
    match error {
        DeviceError::OutOfMemory { .. } => {
            (Exit::Memory, "free some memory, or give a smaller model or --ctx")
        }
        DeviceError::Source { .. } => (Exit::File, "look for damage with neuropil verify"),
        DeviceError::Unsupported { .. } | DeviceError::Shape { .. } => {
            (Exit::Device, "neuropil devices lists what each unit can do")
        }
        _ => (Exit::Device, "try again, and report it if it stays"),
    }
}

impl From<DeviceError> for CliError {
    fn from(error: DeviceError) -> CliError {
        let (exit, cure) = device_cure(&error);
        CliError::new(exit, format!("{error}; {cure}"))
    }
}

impl From<IoError> for CliError {
    fn from(error: IoError) -> CliError {
        let exit = match error {
            IoError::OutOfMemory { .. } => Exit::Memory,
            IoError::UnknownEngine { .. } | IoError::UnknownProfile { .. } => Exit::Usage,
            IoError::Unavailable { .. } => Exit::Device,
            _ => Exit::File,
        };
        // Each says itself what to do.
        CliError::new(exit, error)
    }
}

impl From<ModelError> for CliError {
    fn from(error: ModelError) -> CliError {
        let (exit, cure) = match error {
            ModelError::Gguf(error) => return error.into(),
            ModelError::Weight { ref source, .. } => device_cure(source),
            ModelError::OutOfMemory { .. } => {
                (Exit::Memory, "free some memory, or give a smaller model or --ctx")
            }
            ModelError::Architecture { .. } => (Exit::Model, "give a model of one of these"),
            ModelError::Key { .. } | ModelError::Shape { .. } => {
                (Exit::Model, "download the model again, or convert it again with a current converter")
            }
            ModelError::Store(error) => return error.into(),
            ModelError::Type { .. }
            | ModelError::Prediction { .. }
            | ModelError::StoreShape { .. }
            | ModelError::GateWidth { .. } => return CliError::new(Exit::Model, error),
            // These say themselves what to do.
            ModelError::Budget { .. }
            | ModelError::ContextMemory { .. }
            | ModelError::UnitMemory { .. }
            | ModelError::Cache(_) => return CliError::new(Exit::Memory, error),
            ModelError::Io(error) => return error.into(),
            ModelError::UnusedTensor { .. } => (Exit::Model, "give a file of a model without it"),
            ModelError::NoDevice { .. } => {
                (Exit::Model, "give a file of types that neuropil devices lists under matmul")
            }
            _ => (Exit::Model, "give another model"),
        };
        CliError::new(exit, format!("{error}; {cure}"))
    }
}

impl From<TokenizerError> for CliError {
    fn from(error: TokenizerError) -> CliError {
        let (exit, cure) = match &error {
            TokenizerError::OutOfMemory { .. } => (Exit::Memory, "; free some memory"),
            TokenizerError::UnknownModel { .. } | TokenizerError::UnknownPre { .. } => {
                (Exit::Model, "; give a model with one of these")
            }
            TokenizerError::NoToken { .. } => (Exit::Prompt, ""),
            TokenizerError::TooLong { .. } => (Exit::Prompt, "; give a shorter text"),
            TokenizerError::Missing { .. } | TokenizerError::SpecialId { .. } => {
                (Exit::Model, "; convert the model again")
            }
            TokenizerError::Empty => (Exit::Model, "; give a file with one"),
            _ => (Exit::Model, ""),
        };
        CliError::new(exit, format!("{error}{cure}"))
    }
}

impl From<ChatError> for CliError {
    fn from(error: ChatError) -> CliError {
        let (exit, cure) = match &error {
            ChatError::Raised { .. } => (Exit::Prompt, "change the messages"),
            ChatError::NoTemplate => (Exit::Model, "neuropil run without --chat takes it"),
            _ => (Exit::Model, "use neuropil run without --chat, or a file with another template"),
        };
        CliError::new(exit, format!("{error}; {cure}"))
    }
}

impl From<SamplerError> for CliError {
    fn from(error: SamplerError) -> CliError {
        match &error {
            SamplerError::NotANumber { id } => {
                CliError::new(Exit::Other, format!("the logit of token {id} is NaN; {NAN_CURE}"))
            }
            SamplerError::BiasToken { id, n_vocab } => CliError::new(
                Exit::Usage,
                format!(
                    "--logit-bias names token {id}, but the vocabulary has {n_vocab}; give ids below {n_vocab}"
                ),
            ),
            SamplerError::NothingLeft => {
                CliError::new(Exit::Other, format!("{error}; give fewer --logit-bias"))
            }
            SamplerError::Option { .. } => CliError::new(Exit::Usage, error),
            _ => CliError::new(Exit::Other, format!("{error}; please report it")),
        }
    }
}

/// What to do about logits that are no numbers.
pub const NAN_CURE: &str = "look for damage with neuropil verify, and try --exact";

impl From<EngineError> for CliError {
    fn from(error: EngineError) -> CliError {
        let (exit, cure) = match error {
            EngineError::Gguf(error) => return error.into(),
            EngineError::Model(error) => return error.into(),
            EngineError::Device(error) => return error.into(),
            EngineError::Tokenizer(error) => return error.into(),
            EngineError::Chat(error) => return error.into(),
            EngineError::Sampler(error) => return error.into(),
            EngineError::Cancelled => return CliError::silent(Exit::Interrupted),
            EngineError::ContextFull { .. } => {
                (Exit::Prompt, "; shorten it, or give a larger --ctx if the model allows one".into())
            }
            EngineError::ContextTooLarge { context, .. } => {
                (Exit::Prompt, format!("; give --ctx {context} or less"))
            }
            EngineError::EmptyPrompt => (Exit::Prompt, String::new()),
            EngineError::Token { vocab, .. } => (Exit::Prompt, format!("; give ids below {vocab}")),
            EngineError::NoVocabulary => (Exit::Model, "; only neuropil logits --tokens takes ids".into()),
            EngineError::NoDevice => (Exit::Device, String::new()),
            _ => (Exit::Other, "; please report it".into()),
        };
        let said = match error {
            EngineError::ContextFull { tokens, context } => {
                format!("the prompt has {tokens} tokens, but the context holds {context}")
            }
            other => other.to_string(),
        };
        CliError::new(exit, said + &cure)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_has_no_control_characters() {
        assert_eq!(one_line("a\nb\x1b[31mé\u{202e}"), "a\\nb\\u{1b}[31mé\\u{202e}");
    }

    #[test]
    fn a_long_message_keeps_its_file_and_its_cure() {
        let line = message_line(&format!("m.gguf: {} is wrong; do this", "é".repeat(5_000_000)));
        assert_eq!(line.chars().count(), LONGEST_LINE);
        assert!(line.starts_with("m.gguf: é") && line.contains('…') && line.ends_with("is wrong; do this"));
        assert_eq!(message_line(&"a".repeat(LONGEST_LINE)), "a".repeat(LONGEST_LINE));
    }

    #[test]
    fn a_line_names_the_model_once() {
        let path = Path::new("m.gguf");
        let line = CliError::of_model(path, EngineError::NoVocabulary).message;
        assert!(line.starts_with("m.gguf: the file has no vocabulary"), "{line}");
        let named = GgufError::MissingKey { file: path.into(), key: "k".into() };
        assert_eq!(CliError::of_model(path, named).message.matches("m.gguf").count(), 1);
    }

    #[test]
    fn no_memory_for_a_map_is_no_memory() {
        let source = io::Error::from(io::ErrorKind::OutOfMemory);
        let error = CliError::from(GgufError::Io { file: "m.gguf".into(), source });
        assert_eq!(error.exit, Exit::Memory);
    }
}
