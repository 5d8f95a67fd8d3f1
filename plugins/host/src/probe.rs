//! Lets a process of its own try a plugin first.
//!
//! Whoever loads a library runs its code, and a driver that crashes or sleeps for ever takes the process along. So an app
//! may start itself, or another program of its own, to do nothing but load the plugin and open its unit
//! ([`try_plugin`]); what happens to that process happens to nobody else.

use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};
use std::sync::mpsc::channel;
use std::thread;
use std::time::{Duration, Instant};

use crate::{Options, PluginBackend, PluginError};

/// How often the other process is looked at.
const PAUSE: Duration = Duration::from_millis(5);

/// How long the last words of a process that ended are waited for, and how many bytes of them are kept.
const LAST_WORDS: Duration = Duration::from_millis(500);
const MOST_WORDS: usize = 300;

/// The exit code with which the other process says that it is alive and the plugin cannot be used.
pub const REFUSED: u8 = 3;

/// Runs `command`, which must call [`try_plugin`] for the plugin at `path` and end with 0 or [`REFUSED`].
///
/// A plugin that is refused is no error here: who loads it next gets the reason first hand.
///
/// # Errors
/// [`PluginError::Crashed`] when the process ends in another way, [`PluginError::Silent`] when it does not end.
pub fn probe_in_child(path: &Path, mut command: Command, options: &Options) -> Result<(), PluginError> {
    let crashed = |how: String| PluginError::Crashed { path: path.into(), how };
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    let mut child = command.spawn().map_err(|error| crashed(format!("it could not be started: {error}")))?;
    let (said, words) = channel();
    if let Some(from) = child.stderr.take() {
        // Ends with the other process, or with those that it started; nobody waits for it.
        thread::spawn(move || said.send(last_line(from)));
    }
    let deadline = options.long_deadline();
    let start = Instant::now();
    loop {
        match child.try_wait() {
            Ok(Some(status)) if status.success() || status.code() == Some(REFUSED.into()) => return Ok(()),
            Ok(Some(status)) => {
                let last = words.recv_timeout(LAST_WORDS).unwrap_or_default();
                return Err(crashed(match last.is_empty() {
                    true => how(status),
                    false => format!("{}: {last}", how(status)),
                }));
            }
            Ok(None) if start.elapsed() < deadline => thread::sleep(PAUSE),
            Ok(None) => {
                // It may have ended by now, which is as good.
                let _ = child.kill();
                let _ = child.wait();
                return Err(PluginError::Silent { path: path.into(), seconds: deadline.as_secs_f64() });
            }
            Err(error) => return Err(crashed(error.to_string())),
        }
    }
}

/// What the other process does: loads the plugin and opens the unit that will be used.
///
/// # Errors
/// A sentence that nobody needs: the process ends with [`REFUSED`].
pub fn try_plugin(path: &Path, options: &str) -> Result<(), String> {
    let backend = PluginBackend::load(path, options).map_err(|error| error.to_string())?;
    let unit = Options::parse(options).map_err(|error| error.to_string())?.unit;
    backend.units().and_then(|_| backend.open_unit(unit)).map(drop).map_err(|error| error.to_string())
}

/// The last line that says something.
fn last_line(from: impl Read) -> String {
    let mut last = String::new();
    for line in BufReader::new(from.take(1 << 20)).split(b'\n').map_while(Result::ok) {
        let line = String::from_utf8_lossy(&line);
        if !line.trim().is_empty() {
            last = line.trim().chars().filter(|c| !c.is_control()).take(MOST_WORDS).collect();
        }
    }
    last
}

fn how(status: ExitStatus) -> String {
    #[cfg(unix)]
    if let Some(signal) = std::os::unix::process::ExitStatusExt::signal(&status) {
        return format!("signal {signal} ended it");
    }
    match status.code() {
        Some(code) => format!("it ended with code {code}"),
        None => "it was ended".into(),
    }
}
