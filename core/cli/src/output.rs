//! What the program writes where.
//!
//! Standard output carries results and nothing else; all other words go to standard error. A reader that goes away
//! (`neuropil ... | head`) is no failure to talk about, so nothing here panics on a closed pipe, as `println!` does.

use std::io::{self, IsTerminal, Write};

use serde_json::Value;

use crate::error::{CliError, Exit, message_line};

/// Writes bytes to standard output and makes sure that they are out.
pub fn bytes(bytes: &[u8]) -> Result<(), CliError> {
    let mut out = io::stdout().lock();
    out.write_all(bytes).and_then(|()| out.flush()).map_err(output_error)
}

/// Writes text to standard output and makes sure that it is out.
pub fn text(text: &str) -> Result<(), CliError> {
    bytes(text.as_bytes())
}

/// Writes the one JSON document of a command.
pub fn json(document: &Value) -> Result<(), CliError> {
    let mut line = document.to_string();
    line.push('\n');
    text(&line)
}

/// Tells the user something on standard error, on one line.
pub fn note(message: impl AsRef<str>) {
    say(&format!("note: {}", message_line(message.as_ref())));
}

/// Writes a line to standard error as it is. A standard error that is closed has nobody to tell.
pub fn say(line: &str) {
    let _ = writeln!(io::stderr().lock(), "{line}");
}

/// Writes to standard error without ending the line.
pub fn prompt(text: &str) {
    let mut err = io::stderr().lock();
    let _ = err.write_all(text.as_bytes()).and_then(|()| err.flush());
}

/// Whether results go to a terminal.
pub fn is_terminal() -> bool {
    io::stdout().is_terminal()
}

/// What a failing write to standard output means.
pub fn output_error(error: io::Error) -> CliError {
    match error.kind() {
        io::ErrorKind::BrokenPipe => CliError::silent(Exit::Output),
        _ => CliError::new(
            Exit::Output,
            format!("standard output cannot be written ({error}); see where it goes"),
        ),
    }
}
