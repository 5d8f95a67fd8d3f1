//! The chat template of a model: from messages to the text the model was trained on.
//!
//! Templates come with the file and are Jinja, written against Python's implementation. This is the `minijinja` crate
//! set up the same way: blocks trimmed, Python's string and map methods, `raise_exception`, `strftime_now`, `tojson`
//! as `json.dumps`, `break` and `continue`, and the training-only tags `generation` and `endgeneration` read as if
//! they were not there.
//!
//! A template is data of a stranger: it reads nothing but what it is given, and a budget of steps and bytes ends
//! one that would run or grow for ever. The engine parses, prints and frees nested things by recursion, so how deep
//! they nest is bounded too: in the source by counting (`limits`), at run time by the budget, since a level costs a
//! step. What remains runs on a thread of its own whose stack fits the budget. One that does not parse is no reason
//! not to load the model; the error comes when the template is used.
//!
//! What a message says is text, whatever it looks like: [`ChatTemplate::prompt`] gives ids in which only the
//! template has written control tokens (`guard` says how).

mod clock;
mod guard;
mod json;
mod limits;

pub use clock::{Clock, civil};

use minijinja::syntax::SyntaxConfig;
use minijinja::value::Value;
use minijinja::{Environment, Error, ErrorKind, context};

use super::tokenizer::{Tokenizer, TokenizerError};
use guard::Guard;
use limits::{fuel, on_large_stack};

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
    /// The source of the template is larger or more nested than a template's may be.
    #[error("the model's chat template is too complex: more than {limit} {what}; it is damaged or hostile")]
    TooComplex {
        /// What there is too much of.
        what: &'static str,
        /// How much there may be.
        limit: usize,
    },
    /// The thread on which the template would run could not be had.
    #[error("no thread for the model's chat template ({reason}); free some memory")]
    NoThread {
        /// What the system says.
        reason: String,
    },
    /// What the template made cannot be written in the model's tokens.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
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
        let environment = source.ok_or(ChatError::NoTemplate).and_then(|source| {
            limits::check(source)?;
            on_large_stack(0, || environment(source, clock))
        });
        Self { environment, bos: bos.to_owned(), eos: eos.to_owned() }
    }

    /// Whether the template can be used at all.
    ///
    /// # Errors
    /// `NoTemplate`, `Syntax`.
    pub fn check(&self) -> Result<(), ChatError> {
        self.environment.as_ref().map(|_| ()).map_err(Clone::clone)
    }

    /// The text of a conversation, to be read: for the model there is [`prompt`](Self::prompt). With
    /// `add_generation_prompt` it ends where the assistant's answer begins.
    ///
    /// The template sees `messages`, `add_generation_prompt`, `bos_token`, `eos_token`, and `tools` and `documents`
    /// as none.
    ///
    /// # Errors
    /// Any [`ChatError`].
    pub fn render(&self, messages: &[Message], add_generation_prompt: bool) -> Result<String, ChatError> {
        let contents = messages.iter().map(|message| message.content.as_str()).collect();
        self.render_with(messages, contents, add_generation_prompt)
    }

    /// The ids of a conversation. Control tokens come from the template alone: their texts in a message's content
    /// stay text. Where the vocabulary asks for BOS there is exactly one at the start, whether or not the template
    /// wrote it; no EOS is added, since an answer follows. Roles are the app's, and are not guarded.
    ///
    /// # Errors
    /// Any [`ChatError`].
    pub fn prompt(
        &self,
        tokenizer: &Tokenizer,
        messages: &[Message],
        add_generation_prompt: bool,
    ) -> Result<Vec<u32>, ChatError> {
        let guard = Guard::choose(messages);
        let render = |contents: &[String]| {
            let contents = contents.iter().map(String::as_str).collect();
            self.render_with(messages, contents, add_generation_prompt)
        };
        let wanted = guard.contents(tokenizer, messages);
        let mut text = render(&wanted)?;
        if let Some(strict) = guard.strict_contents(tokenizer, messages) {
            // Did the template itself put together a control token out of a message?
            let (strict, mark) = (render(&strict)?, guard.mark());
            if tokenizer.guarded_tokens(&text, mark) != tokenizer.guarded_tokens(&strict, mark) {
                text = strict;
            }
        }
        Ok(tokenizer.encode_guarded(&text, guard.mark())?)
    }

    fn render_with(
        &self,
        messages: &[Message],
        contents: Vec<&str>,
        add_generation_prompt: bool,
    ) -> Result<String, ChatError> {
        let environment = self.environment.as_ref().map_err(Clone::clone)?;
        let bytes = messages.iter().zip(&contents).map(|(m, content)| m.role.len() + content.len()).sum();
        let fuel = fuel(messages.len(), bytes);
        on_large_stack(fuel, || {
            let mut environment = environment.clone();
            environment.set_fuel(Some(fuel));
            let message =
                |(m, content): (&Message, &&str)| context! { role => m.role.as_str(), content => *content };
            let values = context! {
                messages => messages.iter().zip(&contents).map(message).collect::<Vec<Value>>(),
                add_generation_prompt,
                bos_token => self.bos.as_str(),
                eos_token => self.eos.as_str(),
                tools => Value::from(()),
                documents => Value::from(()),
            };
            let template = environment.get_template(NAME).map_err(render_error)?;
            template.render(values).map_err(render_error)
        })
    }
}

fn environment(source: &str, clock: Clock) -> Result<Environment<'static>, ChatError> {
    let mut environment = Environment::new();
    // These options are always valid; if they were not, templates would only keep more whitespace.
    if let Ok(syntax) = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build() {
        environment.set_syntax(syntax);
    }
    environment.set_debug(true);
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
            return ChatError::Raised { message: short(message) };
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
    error.detail().map_or_else(|| error.kind().to_string(), short)
}

/// A template's words in one line, without control characters, shortened to 200 characters.
fn short(text: &str) -> String {
    let words = text.split_whitespace().flat_map(|word| [" ", word]).skip(1);
    let mut line = words.flat_map(str::chars).filter(|c| !c.is_control());
    let mut short: String = line.by_ref().take(200).collect();
    if line.next().is_some() {
        short.push('…');
    }
    short
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

#[cfg(test)]
mod guard_tests;

#[cfg(test)]
mod hostile_tests;
