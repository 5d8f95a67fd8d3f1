//! What can go wrong on a device and must not be a panic.
//!
//! A device checks every job against its buffers and weights before it touches them, so a job that does not fit
//! together is an error too: leases come from safe code, and a device must not read past them.

use crate::DType;

/// An error of a compute unit. Comparable, so tests can name the one they expect.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DeviceError {
    /// The device cannot hold another `bytes`.
    #[error("device {device} is out of memory: {bytes} more bytes were asked for")]
    OutOfMemory {
        /// The device's name.
        device: String,
        /// Bytes of the request that failed.
        bytes: usize,
    },
    /// The device does not offer this operation; `supports` would have said so.
    #[error("device {device} does not support {what}")]
    Unsupported {
        /// The device's name.
        device: String,
        /// The operation, in words.
        what: String,
    },
    /// A backend has no such unit.
    #[error("backend {name} has no device {index}: choose one that it lists")]
    NoSuchDevice {
        /// The backend's name.
        name: String,
        /// The index that was asked for.
        index: usize,
    },
    /// A buffer or weight made by another device.
    #[error("the handle was made by another device than {device}")]
    ForeignHandle {
        /// The device that refused it.
        device: String,
    },
    /// The memory is leased to another job.
    #[error("the buffer is in use by another job")]
    Leased,
    /// The memory is somebody else's, such as a map of a file, and cannot be written.
    #[error("the memory is read-only: copy it to memory of your own to change it")]
    ReadOnly,
    /// The bytes of a weight do not match its type and shape.
    #[error("a {rows} x {cols} weight of type {dtype} does not fit {bytes} bytes")]
    Shape {
        /// Type of the weight.
        dtype: DType,
        /// Rows of the weight.
        rows: usize,
        /// Columns of the weight.
        cols: usize,
        /// Bytes that were given.
        bytes: usize,
    },
    /// The bytes of a weight could not be read.
    #[error("reading a weight failed: {reason}")]
    Source {
        /// What went wrong, with the file's name.
        reason: String,
    },
    /// The parts of a job do not fit together.
    #[error("the job does not fit together: {found} {what}, but it needs {needed}")]
    Mismatch {
        /// What was counted: `values of x`, `columns of a weight`.
        what: &'static str,
        /// How many the job needs.
        needed: usize,
        /// How many there are.
        found: usize,
    },
    /// The device is gone (driver reset, unplugged); every later call fails too.
    #[error("device {device} is lost: {reason}")]
    Lost {
        /// The device's name.
        device: String,
        /// What the driver said.
        reason: String,
    },
    /// The device gave a wrong result, found by a sample; those before it were not looked at.
    #[error(
        "device {device} gave a wrong result, and so may have been what it computed before: run without it, or check \
         each result (--verify-every 1)"
    )]
    Wrong {
        /// The device's name.
        device: String,
    },
    /// The job was dropped without being finished.
    #[error("the job was dropped before it finished")]
    Dropped,
    /// An error that a plugin reported, with its vendor's own code.
    #[error("plugin {plugin} failed{}: {text}", vendor_code(*code))]
    Plugin {
        /// The plugin's name.
        plugin: String,
        /// The vendor's code.
        code: i64,
        /// The vendor's text.
        text: String,
    },
}

/// A vendor's code, if there is one.
fn vendor_code(code: i64) -> String {
    if code == 0 { String::new() } else { format!(" (code {code})") }
}
