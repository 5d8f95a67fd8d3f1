//! `chat`: a conversation, one line per turn.
//!
//! The whole conversation is rendered by the model's template each turn; the session keeps what it has in common with
//! the turn before, so only the new turn is computed. On a terminal there is a prompt and there are hints, on standard
//! error; from a pipe, each line is a turn, and the answers are the output.

use std::io::{self, BufRead, IsTerminal, Read};

use neuropil::engine::{Engine, FinishReason, Session};
use neuropil::model::chat::Message;
use serde_json::{Value, json};

use crate::args::{self, EngineFlags, ModelFile, SamplingFlags};
use crate::chat_prompt;
use crate::engine;
use crate::error::{CliError, Exit, message_line};
use crate::generation::{self, Outcome};
use crate::signal::Interrupts;
use crate::{memory, output};

const HELP: &str = "/reset forgets the conversation, /stats shows speed and memory, /system TEXT sets the system \
                    message and starts anew, /help says this; Ctrl-C stops an answer, Ctrl-D ends";

/// Bytes of a line that are taken at a time; the tokenizer takes no longer text.
const LONGEST_LINE: u64 = 1 << 30;

/// Flags of `chat`.
#[derive(clap::Args)]
#[command(after_help = "Examples:
  neuropil chat model.gguf --system \"Answer in one sentence.\"
  printf 'Hi!\\nWhat did I just say?\\n' | neuropil chat model.gguf --temp 0

Commands: /reset, /stats, /system TEXT, /help; a message that begins with / needs a space before it. Each answer ends
with a line end. Ctrl-C stops the answer, Ctrl-D ends. With --json the output is {\"turns\":[..]} at the end, each turn
with the fields of run. When a turn from a pipe fails, the program ends with its error, and the turns before it are
still in the output.")]
pub struct Args {
    #[command(flatten)]
    model: ModelFile,
    /// The system message
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true, value_parser = args::text())]
    system: Option<String>,
    #[command(flatten)]
    sampling: SamplingFlags,
    #[command(flatten)]
    engine: EngineFlags,
    /// Print one JSON document at the end instead of the answers
    #[arg(long)]
    json: bool,
}

/// Runs the verb.
pub fn run(args: &Args, interrupts: &Interrupts) -> Result<(), CliError> {
    let engine = engine::open(&args.model.path, &args.engine)?;
    // A model without a template is told so before the first line, not after it.
    engine.chat_template().map_err(|error| CliError::of_model(&args.model.path, error))?;
    let terminal = io::stdin().is_terminal();
    let mut chat = Chat::new(args, engine, terminal)?;
    if terminal {
        output::say(HELP);
    }
    let mut input = io::stdin().lock();
    let mut end = Ok(());
    loop {
        if terminal {
            interrupts.hint_when_idle("\nCtrl-D ends, and so does Ctrl-C once more\n> ");
            output::prompt("> ");
        }
        let line = match read_line(&mut input) {
            Ok(Some(line)) => line,
            Ok(None) => break,
            Err(error) => {
                end = Err(error);
                break;
            }
        };
        match chat.take(&line, interrupts) {
            Ok(()) => {}
            // On a terminal the user can shorten or reset; what was wrong is said and the conversation goes on.
            Err(error) if terminal && error.exit == Exit::Prompt => {
                output::say(&format!("error: {}; or /reset", message_line(&error.message)));
            }
            Err(error) if terminal && error.exit == Exit::Usage => {
                output::say(&format!("error: {}", message_line(&error.message)));
            }
            Err(error) => {
                end = Err(error);
                break;
            }
        }
    }
    if terminal {
        output::say("");
    }
    args.engine.memory.write_trace(&chat.engine)?;
    // A turn that fails takes none of the answers with it that were there before.
    if args.json && (end.is_ok() || !chat.report.is_empty()) {
        let memory = generation::memory_json(&chat.engine, chat.kv_bytes());
        output::json(&json!({ "turns": chat.report, "seed": chat.seed, "memory": memory }))?;
    }
    end
}

/// The next line without its end; nothing at the end of the input.
fn read_line(input: &mut impl BufRead) -> Result<Option<String>, CliError> {
    let mut line = Vec::new();
    let read = input.by_ref().take(LONGEST_LINE).read_until(b'\n', &mut line);
    let read = read.map_err(|e| {
        CliError::new(Exit::File, format!("standard input: cannot be read ({e}); see where it comes from"))
    })?;
    if read == 0 {
        return Ok(None);
    }
    let line = line.strip_suffix(b"\n").map_or(&line[..], |line| line.strip_suffix(b"\r").unwrap_or(line));
    Ok(Some(match String::from_utf8_lossy(line) {
        std::borrow::Cow::Borrowed(text) => text.to_owned(),
        std::borrow::Cow::Owned(text) => {
            output::note("the line is not valid UTF-8; its bad bytes became U+FFFD");
            text
        }
    }))
}

struct Chat<'a> {
    args: &'a Args,
    engine: Engine,
    terminal: bool,
    system: Option<String>,
    turns: Vec<Message>,
    /// Away while it generates.
    session: Option<Session>,
    seed: u64,
    answers: u64,
    last: Option<Outcome>,
    report: Vec<Value>,
}

impl<'a> Chat<'a> {
    fn new(args: &'a Args, engine: Engine, terminal: bool) -> Result<Chat<'a>, CliError> {
        let session = engine.session(engine::session_options(&args.engine))?;
        Ok(Chat {
            args,
            engine,
            terminal,
            system: args.system.clone(),
            turns: Vec::new(),
            session: Some(session),
            seed: generation::seed(&args.sampling),
            answers: 0,
            last: None,
            report: Vec::new(),
        })
    }

    fn take(&mut self, line: &str, interrupts: &Interrupts) -> Result<(), CliError> {
        let (word, rest) = line.split_once(char::is_whitespace).unwrap_or((line, ""));
        match word {
            _ if line.trim().is_empty() => Ok(()),
            "/reset" => {
                self.turns.clear();
                Ok(())
            }
            "/system" => {
                self.system = Some(rest.trim().to_owned()).filter(|text| !text.is_empty());
                self.turns.clear();
                Ok(())
            }
            "/stats" => {
                output::say(&self.stats());
                Ok(())
            }
            "/help" => {
                output::say(HELP);
                Ok(())
            }
            _ if line.starts_with('/') => Err(CliError::new(
                Exit::Usage,
                format!(
                    "{word} is no command; there are /reset, /stats, /system TEXT and /help, and a message that \
                     begins with / needs a space before it"
                ),
            )),
            _ => self.answer(line, interrupts),
        }
    }

    fn answer(&mut self, text: &str, interrupts: &Interrupts) -> Result<(), CliError> {
        let mut turns: Vec<Message> = self.system.iter().map(|text| Message::new("system", text)).collect();
        turns.extend(self.turns.iter().cloned());
        turns.push(Message::new("user", text));
        let prompt = chat_prompt::encode(&self.engine, &turns)?;
        // Each answer has a seed of its own, and the conversation as a whole can be repeated.
        let options = [generation::options(&self.args.sampling, self.seed.wrapping_add(self.answers))];
        let session = match self.session.take() {
            Some(session) => session,
            None => self.engine.session(engine::session_options(&self.args.engine))?,
        };
        let json = self.args.json;
        let on_text = |_, text: &str| if json { Ok(()) } else { output::text(text) };
        let (outcome, sessions) = generation::generate(session, &prompt, &options, interrupts, on_text)?;
        self.session = sessions.into_iter().next();
        self.answers += 1;
        if !json {
            output::text("\n")?;
        }
        let Some(generation) = outcome.first() else { return Ok(()) };
        // A question that the model did not read to its end is not asked.
        if !(outcome.interrupted() && generation.tokens.is_empty()) {
            self.turns.push(Message::new("user", text));
            self.turns.push(Message::new("assistant", &generation.text));
        }
        if json {
            let mut turn = json!({ "user": text });
            let seed = self.seed.wrapping_add(self.answers - 1);
            if let (Some(turn), Value::Object(rest)) =
                (turn.as_object_mut(), outcome.json(&self.engine, &prompt, false, seed))
            {
                turn.extend(rest);
            }
            self.report.push(turn);
        }
        let held = prompt.len() + generation.tokens.len();
        let context = self.session.as_ref().map_or(0, Session::context);
        if generation.finish_reason == FinishReason::Length && held > context {
            output::note(format!("the context is full ({context} of {context} tokens); /reset starts anew"));
        }
        let interrupted = outcome.interrupted();
        self.last = Some(outcome);
        if interrupted && !self.terminal { Err(CliError::silent(Exit::Interrupted)) } else { Ok(()) }
    }

    fn kv_bytes(&self) -> u64 {
        self.session.as_ref().map_or(0, |session| session.kv_bytes() as u64)
    }

    fn stats(&self) -> String {
        let (held, context) = self.session.as_ref().map_or((0, 0), |s| (s.tokens().len(), s.context()));
        let weights = memory::shown(self.engine.memory().weights);
        let kv = memory::shown(self.kv_bytes());
        let peak =
            memory::peak_bytes().map_or(String::new(), |peak| format!(", peak {}", memory::shown(peak)));
        let last = self.last.as_ref().map_or("no answer yet".to_owned(), Outcome::summary);
        format!("{last}\ncontext {held} of {context} tokens; weights {weights}, KV cache {kv}{peak}")
    }
}
