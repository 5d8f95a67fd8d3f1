//! What can go wrong between storage and a lease.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;

/// Why bytes could not be read. Cheap to clone, since one failed read can end several jobs.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum IoError {
    /// A file that cannot be opened.
    #[error("{}: cannot be opened: {source}; check the path and its permissions", file.display())]
    Open {
        /// The file.
        file: PathBuf,
        /// What the system said.
        source: Arc<io::Error>,
    },
    /// A folder, a pipe or a device.
    #[error("{}: is not a regular file; give the path of a model file", file.display())]
    NotAFile {
        /// The path.
        file: PathBuf,
    },
    /// Storage did not give the bytes.
    #[error(
        "{}: reading {len} bytes at {offset} failed: {source}; check the disk, or copy the file to another one", file.display()
    )]
    Read {
        /// The file.
        file: PathBuf,
        /// First byte of the range that failed.
        offset: u64,
        /// Bytes of that range.
        len: usize,
        /// What the system said.
        source: Arc<io::Error>,
    },
    /// The file ends before the range does.
    #[error(
        "{}: {len} bytes at {offset} are missing, since the file ends at {size}: it was cut off, perhaps while in use; restore it and start again", file.display()
    )]
    Truncated {
        /// The file.
        file: PathBuf,
        /// First byte of the range.
        offset: u64,
        /// Bytes of the range.
        len: usize,
        /// Bytes of the file.
        size: u64,
    },
    /// A read of a file that the engine does not have.
    #[error("there is no file {file} among the {files} that are open; submit reads of those")]
    NoSuchFile {
        /// Number that was asked for.
        file: usize,
        /// Files that are open.
        files: usize,
    },
    /// A read whose range or targets do not fit.
    #[error("the read of {len} bytes at {offset} does not fit {what}; correct the range")]
    Misfit {
        /// First byte of the range.
        offset: u64,
        /// Bytes of the range.
        len: usize,
        /// What it does not fit.
        what: &'static str,
    },
    /// An engine that this system does not offer.
    #[error("the I/O engine {engine} is not to be had here: {reason}; choose another with --io")]
    Unavailable {
        /// The engine.
        engine: &'static str,
        /// What the system said.
        reason: String,
    },
    /// The name of no engine.
    #[error("there is no I/O engine \"{found}\"; there are {known}")]
    UnknownEngine {
        /// What was given.
        found: String,
        /// Those that exist.
        known: String,
    },
    /// The name of no storage profile.
    #[error("there is no storage profile \"{found}\"; there are {known}")]
    UnknownProfile {
        /// What was given.
        found: String,
        /// Those that exist.
        known: String,
    },
    /// The engine's own buffers are not to be had.
    #[error("{bytes} bytes of memory for I/O are not to be had; free some memory")]
    OutOfMemory {
        /// Bytes that were asked for.
        bytes: usize,
    },
}
