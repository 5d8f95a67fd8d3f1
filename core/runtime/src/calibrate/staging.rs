//! Stores on the way to the result: hidden, each of one run only, and gone with it.

use std::fs::{File, OpenOptions};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use super::CalibrateError;

/// Names that are tried.
const TRIES: u32 = 1000;

/// A file of this run beside the result. It goes when the calibration does.
pub(super) struct Interim(PathBuf);

impl Interim {
    /// Makes an empty file beside `out`, under a name that nobody has.
    pub(super) fn beside(out: &Path) -> Result<Interim, CalibrateError> {
        let mut start = std::ffi::OsString::from(".");
        start.push(out.file_name().unwrap_or_default());
        start.push(format!(".calibrating-{}", std::process::id()));
        for number in 0..TRIES {
            let mut name = start.clone();
            name.push(format!("-{number}"));
            let path = out.with_file_name(name);
            match OpenOptions::new().write(true).create_new(true).open(&path) {
                Ok(_) => return Ok(Interim(path)),
                Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
                Err(source) => return Err(CalibrateError::Stage { file: path, source }),
            }
        }
        let source = std::io::Error::from(ErrorKind::AlreadyExists);
        Err(CalibrateError::Stage { file: out.into(), source })
    }

    pub(super) fn path(&self) -> &Path {
        &self.0
    }

    /// Gives the file its final name, whatever has that now.
    pub(super) fn rename(self, out: &Path) -> Result<(), CalibrateError> {
        let failed = |source| CalibrateError::Stage { file: out.into(), source };
        std::fs::rename(&self.0, out).map_err(failed)?;
        let folder = out.parent().filter(|folder| !folder.as_os_str().is_empty());
        // The file itself is on the disk; some systems cannot sync a folder.
        if let Ok(folder) = File::open(folder.unwrap_or(Path::new("."))) {
            let _ = folder.sync_all();
        }
        Ok(())
    }
}

impl Drop for Interim {
    fn drop(&mut self) {
        // One that cannot be removed is hidden, and in nobody's way.
        let _ = std::fs::remove_file(&self.0);
    }
}
