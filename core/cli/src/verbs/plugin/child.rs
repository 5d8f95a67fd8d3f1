//! The process that runs the suite, and the one that watches it.
//!
//! The child writes a line of JSON for everything that happens, behind a character that no plugin prints by chance; the
//! rest of its output is the plugin's. A case that began and did not end is the one that the plugin died in, or that takes
//! too long.

use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

use neuropil_plugin_conformance::{
    CaseReport, Event, Filter, Library, Report, Status, check as check_library,
};
use neuropil_plugin_host::{HOST_KEYS, PluginBackend, PluginError};
use serde_json::{Value, json};

use super::{CheckArgs, Plugin, case_document};
use crate::error::{CliError, Exit};
use crate::output;
use crate::progress::Bar;

/// What a line of the child begins with.
const MARK: char = '\u{1e}';

/// Bytes of the child's standard error that are kept.
const MOST_WORDS: usize = 4096;

/// How long a child that has said everything may take to end.
const FAREWELL: Duration = Duration::from_secs(5);

/// Runs the suite as the child.
pub fn be(path: &str, options: &str, filter: &Filter) -> Result<(), CliError> {
    if let Err(error) = suite(path, options, filter) {
        tell(&json!({ "refused": error.message, "exit": error.exit as i32 }))?;
    }
    tell(&json!({ "done": true }))?;
    // Destructors of a vendor's library have no say any more.
    std::process::exit(0);
}

fn suite(path: &str, options: &str, filter: &Filter) -> Result<(), CliError> {
    let pairs = plugin_options(options)?;
    // The host says best what a file is that is no plugin.
    let backend = PluginBackend::load(path.as_ref(), "").map_err(refused)?;
    let (major, minor) = backend.abi();
    let (name, version) = (backend.plugin_name(), backend.version());
    tell(&json!({ "plugin": { "name": name, "version": version, "abi": format!("{major}.{minor}") } }))?;
    let pairs: Vec<(&str, &str)> = pairs.iter().map(|(key, value)| (key.as_str(), value.as_str())).collect();
    let library =
        Library::load(&backend.path(), &pairs).map_err(|error| CliError::new(Exit::Device, error))?;
    check_library(&library, filter, &mut |event| {
        let line = match event {
            Event::Known(id) => json!({ "known": id }),
            Event::Begins(id) => json!({ "begins": id }),
            Event::Ended(case) => json!({ "ended": case_document(case) }),
        };
        if tell(&line).is_err() {
            // Nobody listens any more.
            std::process::exit(Exit::Output as i32);
        }
    });
    Ok(())
}

/// The options for the plugin.
fn plugin_options(options: &str) -> Result<Vec<(String, String)>, CliError> {
    let mut pairs = Vec::new();
    for pair in options.split('&').filter(|pair| !pair.is_empty()) {
        let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
        if HOST_KEYS.contains(&key) {
            let text = format!(
                "option {key} is for --device and changes nothing for the plugin itself: leave it out of plugin check"
            );
            return Err(CliError::new(Exit::Usage, text));
        }
        pairs.push((key.to_owned(), value.to_owned()));
    }
    Ok(pairs)
}

fn refused(error: PluginError) -> CliError {
    let exit = if matches!(error, PluginError::Read { .. }) { Exit::File } else { Exit::Device };
    CliError::new(exit, error)
}

fn tell(line: &Value) -> Result<(), CliError> {
    output::text(&format!("\n{MARK}{line}\n"))
}

/// Starts the child, watches it, and gives what it found, and the case in which it ended too soon if it did.
pub fn check(args: &CheckArgs, timeout: Duration) -> Result<(Plugin, Report, Option<CaseReport>), CliError> {
    let spawn = |error: std::io::Error| {
        CliError::new(
            Exit::Other,
            format!("the process for the plugin cannot be started ({error}); try again"),
        )
    };
    let mut command = Command::new(std::env::current_exe().map_err(spawn)?);
    command.args(["plugin", "check", "--child"]);
    if let Some(filter) = &args.filter {
        command.arg("--filter").arg(filter.text());
    }
    command.arg("--").arg(&args.plugin);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = Watched(command.spawn().map_err(spawn)?);
    let (lines, words) = (child.lines(), child.words());
    let mut seen = Seen::default();
    let bar = Bar::steps("checking");
    let silent = loop {
        match lines.recv_timeout(timeout) {
            Ok(line) => seen.take(&line),
            Err(RecvTimeoutError::Timeout) => break true,
            Err(RecvTimeoutError::Disconnected) => break false,
        }
        bar.set(seen.report.cases.len() as u64, seen.report.known.len() as u64);
        if seen.done {
            break false;
        }
    };
    drop(bar);
    let status = child.end(if silent { Duration::ZERO } else { FAREWELL });
    if let Some(error) = seen.refused {
        return Err(error);
    }
    if seen.done {
        return Ok((seen.plugin, seen.report, None));
    }
    let reason = match silent {
        true => format!("it did not end within {} s, and the process was stopped", timeout.as_secs()),
        false => {
            // A process of the plugin's own may still hold the pipe.
            let words = words.recv_timeout(FAREWELL).unwrap_or_default();
            let last = words.lines().rev().map(str::trim).find(|line| !line.is_empty());
            let last = last.map_or(String::new(), |line| format!(": {line}"));
            format!("the plugin ended the process ({}){last}", ended(status))
        }
    };
    match seen.running {
        Some(id) => {
            let case = CaseReport { id, status: Status::Failed(reason), error: None, ns: None };
            Ok((seen.plugin, seen.report, Some(case)))
        }
        None => {
            let text = format!("plugin {} cannot be checked: {reason}", args.plugin);
            Err(CliError::new(Exit::Device, text))
        }
    }
}

/// How a process ended, in words.
fn ended(status: Option<ExitStatus>) -> String {
    #[cfg(unix)]
    if let Some(signal) = status.and_then(|status| std::os::unix::process::ExitStatusExt::signal(&status)) {
        let name = match signal {
            4 => " SIGILL",
            6 => " SIGABRT",
            7 => " SIGBUS",
            8 => " SIGFPE",
            9 => " SIGKILL",
            11 => " SIGSEGV",
            _ => "",
        };
        return format!("signal {signal}{name}");
    }
    status.and_then(|status| status.code()).map_or("no exit code".into(), |code| format!("exit code {code}"))
}

/// A child that does not outlive this.
struct Watched(Child);

impl Watched {
    /// The lines of the child.
    fn lines(&mut self) -> Receiver<Value> {
        let (send, lines) = channel();
        if let Some(out) = self.0.stdout.take() {
            thread::spawn(move || {
                let mut out = BufReader::new(out);
                let mut line = Vec::new();
                while out.read_until(b'\n', &mut line).is_ok_and(|bytes| bytes > 0) {
                    let text = String::from_utf8_lossy(&line);
                    let told = text.rsplit_once(MARK).and_then(|(_, json)| serde_json::from_str(json).ok());
                    if told.is_some_and(|told| send.send(told).is_err()) {
                        break;
                    }
                    line.clear();
                }
            });
        }
        lines
    }

    /// The last words on the child's standard error.
    fn words(&mut self) -> Receiver<String> {
        let (send, words) = channel();
        let err = self.0.stderr.take();
        thread::spawn(move || {
            let (mut err, mut last, mut piece) = (err, Vec::new(), [0; MOST_WORDS]);
            while let Some(Ok(bytes @ 1..)) = err.as_mut().map(|err| err.read(&mut piece)) {
                last.extend_from_slice(piece.get(..bytes).unwrap_or_default());
                let over = last.len().saturating_sub(MOST_WORDS);
                last.drain(..over);
            }
            // Nobody listens when the child ended well.
            let _ = send.send(String::from_utf8_lossy(&last).into_owned());
        });
        words
    }

    /// Waits for the end, but not longer than `most`.
    fn end(&mut self, most: Duration) -> Option<ExitStatus> {
        let began = Instant::now();
        while began.elapsed() < most {
            if let Ok(Some(status)) = self.0.try_wait() {
                return Some(status);
            }
            thread::sleep(Duration::from_millis(5));
        }
        // It may have ended by itself a moment ago.
        let _ = self.0.kill();
        self.0.wait().ok()
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        // As above.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// What the child told.
#[derive(Default)]
struct Seen {
    plugin: Plugin,
    report: Report,
    running: Option<String>,
    refused: Option<CliError>,
    done: bool,
}

impl Seen {
    fn take(&mut self, line: &Value) {
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        if let Some(plugin) = line.get("plugin") {
            self.plugin = Plugin {
                name: text(&plugin["name"]),
                version: text(&plugin["version"]),
                abi: text(&plugin["abi"]),
            };
        } else if let Some(id) = line.get("known") {
            self.report.known.push(text(id));
        } else if let Some(id) = line.get("begins") {
            self.running = Some(text(id));
        } else if let Some(case) = line.get("ended") {
            self.running = None;
            let reason = text(&case["reason"]);
            let status = match case["status"].as_str() {
                Some("passed") => Status::Passed,
                Some("unsupported") => Status::Unsupported(reason),
                _ => Status::Failed(reason),
            };
            let (error, ns) = (case["error"].as_f64(), case["ns"].as_u64());
            self.report.cases.push(CaseReport { id: text(&case["id"]), status, error, ns });
        } else if let Some(message) = line.get("refused") {
            let exit = match line["exit"].as_i64() {
                Some(code) if code == Exit::Usage as i64 => Exit::Usage,
                Some(code) if code == Exit::File as i64 => Exit::File,
                _ => Exit::Device,
            };
            self.refused = Some(CliError::new(exit, text(message)));
        } else if line.get("done").is_some() {
            self.done = true;
        }
    }
}
