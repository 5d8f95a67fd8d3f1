//! What tells whether a file is still what it was when it was opened.
//!
//! A model is read as long as it runs: neurons, and a row of the vocabulary's table for each token. An open file stays
//! the same when another one is renamed over it; when somebody writes *into* it, what is read may be of two models. The
//! system notes each write in the file's time of change before the new bytes can be read. So who reads first and asks
//! then knows that what was read is of the file that was opened. Asking takes a microsecond; comparing contents would
//! take the whole file. Not seen is a writer that sets the time back, or that writes within the few milliseconds by which
//! the clock of files steps after the write before.

use std::fs::{File, Metadata};
use std::io;
use std::time::SystemTime;

/// Which file it is, its size, and when it was last written to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Stamp {
    len: u64,
    modified: Option<SystemTime>,
    /// Device and number on it.
    #[cfg(unix)]
    id: (u64, u64),
}

impl Stamp {
    /// That of an open file, now.
    pub(crate) fn of(file: &File) -> io::Result<Stamp> {
        file.metadata().map(|metadata| Stamp::from(&metadata))
    }
}

impl From<&Metadata> for Stamp {
    fn from(metadata: &Metadata) -> Stamp {
        #[cfg(unix)]
        use std::os::unix::fs::MetadataExt;
        Stamp {
            len: metadata.len(),
            modified: metadata.modified().ok(),
            #[cfg(unix)]
            id: (metadata.dev(), metadata.ino()),
        }
    }
}
