//! Which engine, by name or by what works here.

use std::fmt;
use std::path::Path;
use std::str::FromStr;
use std::sync::Arc;

use super::pread::{Pread, THREADS};
use super::profile::StorageProfile;
use super::{Files, IoEngine, IoError, Throttle};

/// The engine to open, as `--io` names it: `auto`, `uring`, `pread` or `throttle:PROFILE`.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum IoChoice {
    /// io_uring where the system lets it be used, else `pread`.
    #[default]
    Auto,
    /// io_uring.
    Uring,
    /// Threads with positioned reads.
    Pread,
    /// Storage as the profile has it, imitated on top of `auto`.
    Throttle(StorageProfile),
}

impl IoChoice {
    /// All names.
    fn known() -> String {
        let profiles = StorageProfile::NAMES.map(|name| format!("throttle:{name}"));
        format!("auto, uring, pread, {}", profiles.join(", "))
    }
}

impl FromStr for IoChoice {
    type Err = IoError;

    fn from_str(text: &str) -> Result<IoChoice, IoError> {
        match text {
            "auto" => Ok(IoChoice::Auto),
            "uring" => Ok(IoChoice::Uring),
            "pread" => Ok(IoChoice::Pread),
            _ => match text.strip_prefix("throttle:") {
                Some(profile) => StorageProfile::named(profile).map(IoChoice::Throttle),
                None => Err(IoError::UnknownEngine { found: text.into(), known: IoChoice::known() }),
            },
        }
    }
}

impl fmt::Display for IoChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            IoChoice::Auto => f.write_str("auto"),
            IoChoice::Uring => f.write_str("uring"),
            IoChoice::Pread => f.write_str("pread"),
            IoChoice::Throttle(profile) => write!(f, "throttle:{}", profile.name),
        }
    }
}

/// Opens the files and an engine that reads them. A read's `file` is an index into `paths`.
///
/// # Errors
/// As [`Files::open`] and [`open_files`].
pub fn open<P: AsRef<Path>>(choice: &IoChoice, paths: &[P]) -> Result<Box<dyn IoEngine>, IoError> {
    open_files(choice, Arc::new(Files::open(paths)?))
}

/// Opens an engine for files that are open already.
///
/// # Errors
/// [`IoError::Unavailable`] when the engine that was chosen does not work here, [`IoError::OutOfMemory`].
pub fn open_files(choice: &IoChoice, files: Arc<Files>) -> Result<Box<dyn IoEngine>, IoError> {
    match choice {
        IoChoice::Auto => match uring(&files) {
            Err(IoError::Unavailable { .. }) => Ok(Box::new(Pread::new(files, THREADS)?)),
            engine => engine,
        },
        IoChoice::Uring => uring(&files),
        IoChoice::Pread => Ok(Box::new(Pread::new(files, THREADS)?)),
        IoChoice::Throttle(profile) => {
            let inner = open_files(&IoChoice::Auto, files)?;
            Ok(Box::new(Throttle::new(inner, profile.clone())))
        }
    }
}

#[cfg(target_os = "linux")]
fn uring(files: &Arc<Files>) -> Result<Box<dyn IoEngine>, IoError> {
    Ok(Box::new(super::Uring::new(files.clone(), super::uring::DEPTH)?))
}

#[cfg(not(target_os = "linux"))]
fn uring(_files: &Arc<Files>) -> Result<Box<dyn IoEngine>, IoError> {
    Err(IoError::Unavailable { engine: "uring", reason: "it exists on Linux only".into() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_what_is_printed_and_others_list_the_known_ones() {
        for name in ["auto", "uring", "pread", "throttle:ufs4.0", "throttle:ufs3.1"] {
            assert_eq!(name.parse::<IoChoice>().unwrap().to_string(), name);
        }
        let error = "aio".parse::<IoChoice>().unwrap_err().to_string();
        assert!(error.contains("\"aio\"") && error.contains("uring") && error.contains("throttle:ufs4.0"));
        for profile in ["", "ufs9"] {
            let error = format!("throttle:{profile}").parse::<IoChoice>().unwrap_err().to_string();
            assert!(error.contains("ufs4.0, ufs3.1"), "{error}");
        }
    }
}
