//! The chat template of a model: from messages to the text the model was trained on.
//!
//! Templates come with the file and are Jinja, written against Python's implementation. This is the `minijinja` crate
//! set up the same way: blocks trimmed, Python's string and map methods, `raise_exception`, `strftime_now`, `tojson`
//! as `json.dumps`, `break` and `continue`, and the training-only tags `generation` and `endgeneration` read as if
//! they were not there.
//!
//! A template is data of a stranger: it reads nothing but what it is given, and a budget of steps and bytes ends
//! one that would run or grow for ever. One that does not parse is no reason not to load the model; the error comes
//! when the template is used.

mod clock;
mod json;

pub use clock::Clock;

use minijinja::syntax::SyntaxConfig;
use minijinja::value::Value;
use minijinja::{Environment, Error, ErrorKind, context};

/// What one render may use; a step or 64 bytes cost about 1. Long chats need thousands.
const FUEL: u64 = 4_000_000;

/// Most levels of macros calling macros.
const DEPTH: usize = 100;

/// One message of a conversation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    /// `system`, `user`, `assistant`, or what else the template knows.
    pub role: String,
    /// The text.
    pub content: String,
}

impl Message {
    /// A message.
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Self {
        Self { role: role.into(), content: content.into() }
    }
}

/// Why a conversation could not be rendered.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ChatError {
    /// The file has no template, and another model's would be a guess.
    #[error("the model has no chat template (tokenizer.chat_template); give it plain text instead")]
    NoTemplate,
    /// The template is not valid.
    #[error("the model's chat template does not parse: line {line}, column {column}: {reason}")]
    Syntax {
        /// From 1.
        line: usize,
        /// In characters, from 1.
        column: usize,
        /// What the parser says.
        reason: String,
    },
    /// The template refuses this conversation, in its own words.
    #[error("the model's chat template refuses the conversation: {message}")]
    Raised {
        /// The template's message.
        message: String,
    },
    /// The template uses more than a template may.
    #[error("the model's chat template takes too many steps or too much memory")]
    TooExpensive,
    /// The template went wrong.
    #[error("the model's chat template fails in line {line}: {reason}")]
    Failed {
        /// From 1; 0 when it is not known.
        line: usize,
        /// What happened.
        reason: String,
    },
}

/// A model's chat template, ready to use or with the reason why it is not.
#[derive(Clone, Debug)]
pub struct ChatTemplate {
    environment: Result<Environment<'static>, ChatError>,
    bos: String,
    eos: String,
}

const NAME: &str = "chat";

impl ChatTemplate {
    /// Takes the template of a file, if it has one, and the texts of BOS and EOS (empty when there are none). Never
    /// fails; see [`check`](Self::check).
    pub fn new(source: Option<&str>, bos: &str, eos: &str) -> Self {
        Self::with_clock(source, bos, eos, clock::system())
    }

    /// As [`new`](Self::new), with another clock for `strftime_now`.
    pub fn with_clock(source: Option<&str>, bos: &str, eos: &str, clock: Clock) -> Self {
        let environment = source.ok_or(ChatError::NoTemplate).and_then(|source| environment(source, clock));
        Self { environment, bos: bos.to_owned(), eos: eos.to_owned() }
    }

    /// Whether the template can be used at all.
    ///
    /// # Errors
    /// `NoTemplate`, `Syntax`.
    pub fn check(&self) -> Result<(), ChatError> {
        self.environment.as_ref().map(|_| ()).map_err(Clone::clone)
    }

    /// The text of a conversation. With `add_generation_prompt` it ends where the assistant's answer begins.
    ///
    /// The template sees `messages`, `add_generation_prompt`, `bos_token`, `eos_token`, and `tools` and `documents`
    /// as none. The text may begin with BOS: `Tokenizer::encode_chat` takes care that it stays one.
    ///
    /// # Errors
    /// Any [`ChatError`].
    pub fn render(&self, messages: &[Message], add_generation_prompt: bool) -> Result<String, ChatError> {
        let environment = self.environment.as_ref().map_err(Clone::clone)?;
        let message = |m: &Message| context! { role => m.role.as_str(), content => m.content.as_str() };
        let values = context! {
            messages => messages.iter().map(message).collect::<Vec<Value>>(),
            add_generation_prompt,
            bos_token => self.bos.as_str(),
            eos_token => self.eos.as_str(),
            tools => Value::from(()),
            documents => Value::from(()),
        };
        let template = environment.get_template(NAME).map_err(render_error)?;
        template.render(values).map_err(render_error)
    }
}

fn environment(source: &str, clock: Clock) -> Result<Environment<'static>, ChatError> {
    let mut environment = Environment::new();
    // These options are always valid; if they were not, templates would only keep more whitespace.
    if let Ok(syntax) = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build() {
        environment.set_syntax(syntax);
    }
    environment.set_debug(true);
    environment.set_fuel(Some(FUEL));
    environment.set_recursion_limit(DEPTH);
    environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    environment.add_filter("tojson", json::filter);
    // In Python none is not iterable; templates ask that of tools.
    environment.add_test("iterable", |value: &Value| !value.is_none() && value.try_iter().is_ok());
    environment.add_function("raise_exception", |message: String| -> Result<Value, Error> {
        Err(Error::new(ErrorKind::InvalidOperation, "raise_exception").with_source(Raised(message)))
    });
    environment.add_function("strftime_now", move |format: &str| clock::format(clock(), format));
    let source = without_generation_tags(source);
    environment.add_template_owned(NAME, source.clone()).map_err(|error| {
        let line = error.line().unwrap_or(1);
        let before = error.range().and_then(|range| source.get(..range.start)).unwrap_or_default();
        let column = before.chars().rev().take_while(|&c| c != '\n').count() + 1;
        ChatError::Syntax { line, column, reason: reason(&error) }
    })?;
    Ok(environment)
}

/// A template's own refusal, on its way through the engine.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Raised(String);

fn render_error(error: Error) -> ChatError {
    let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(&error);
    while let Some(current) = cause {
        if let Some(Raised(message)) = current.downcast_ref() {
            return ChatError::Raised { message: message.clone() };
        }
        if current.downcast_ref::<Error>().is_some_and(|error| error.kind() == ErrorKind::OutOfFuel) {
            return ChatError::TooExpensive;
        }
        cause = current.source();
    }
    ChatError::Failed { line: error.line().unwrap_or(0), reason: reason(&error) }
}

/// What happened, in one line.
fn reason(error: &Error) -> String {
    let text = error.detail().map_or_else(|| error.kind().to_string(), str::to_owned);
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// Replaces the tags `generation` and `endgeneration` by an `if` that is always true: the same length, so that lines
/// and columns stay, and the same handling of whitespace.
fn without_generation_tags(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(at) = rest.find("{%") {
        let (before, tag) = rest.split_at(at + 2);
        out.push_str(before);
        let lead =
            tag.len() - tag.trim_start_matches(|c: char| c.is_whitespace() || c == '-' || c == '+').len();
        let (space, body) = tag.split_at(lead);
        out.push_str(space);
        rest = body;
        for (word, instead) in [("generation", "if true   "), ("endgeneration", "endif        ")] {
            let ends = |tail: &str| {
                let tail = tail.trim_start();
                tail.trim_start_matches(['-', '+']).starts_with("%}")
            };
            if body.strip_prefix(word).is_some_and(ends) {
                out.push_str(instead);
                rest = &body[word.len()..];
            }
        }
    }
    out.push_str(rest);
    out
}

#[cfg(test)]
mod tests;
