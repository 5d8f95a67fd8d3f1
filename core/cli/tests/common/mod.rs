//! Runs the program as a user does and looks at what comes out.

// Each test file uses a part of it.
#![allow(dead_code)]

use std::io::Write;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use serde_json::Value;

/// A run of the program that has ended.
pub struct Ran {
    /// The exit code; nothing after a signal.
    pub code: Option<i32>,
    /// Standard output.
    pub stdout: Vec<u8>,
    /// Standard error.
    pub stderr: String,
}

/// The program with these arguments, not started yet.
pub fn command(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_neuropil"));
    command.args(args);
    command
}

/// Runs the program with nothing on standard input.
pub fn neuropil(args: &[&str]) -> Ran {
    with_input(args, b"")
}

/// Runs the program with these bytes on standard input.
pub fn with_input(args: &[&str], input: &[u8]) -> Ran {
    let pipes = |command: &mut Command| {
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()
    };
    let mut child = pipes(&mut command(args)).expect("the program starts");
    // A program that fails early closes its input.
    let _ = child.stdin.take().expect("standard input is a pipe").write_all(input);
    Ran::new(child.wait_with_output().expect("the program ends"))
}

impl Ran {
    /// What is left of a run.
    pub fn new(output: Output) -> Ran {
        let Output { status, stdout, stderr } = output;
        Ran { code: status.code(), stdout, stderr: String::from_utf8(stderr).expect("messages are text") }
    }

    /// The one JSON document on standard output of a successful run.
    pub fn json(&self) -> Value {
        assert_eq!(self.code, Some(0), "{}", self.stderr);
        serde_json::from_slice(&self.stdout).expect("standard output is one JSON document")
    }

    /// The output of a successful run.
    pub fn text(&self) -> &str {
        assert_eq!(self.code, Some(0), "{}", self.stderr);
        std::str::from_utf8(&self.stdout).expect("the output is text")
    }

    /// The line of a failed run, which says nothing on standard output.
    pub fn error(&self, code: i32) -> &str {
        assert_eq!(self.code, Some(code), "{}", self.stderr);
        assert!(self.stdout.is_empty(), "{}", String::from_utf8_lossy(&self.stdout));
        let mut lines = self.stderr.lines().filter(|line| !line.starts_with("note: "));
        let line = lines.next().expect("there is a line");
        assert_eq!(lines.next(), None, "{}", self.stderr);
        line.strip_prefix("error: ").expect("it is an error")
    }
}

/// A path as an argument.
pub fn arg(path: &Path) -> &str {
    path.to_str().expect("temporary paths are text")
}
