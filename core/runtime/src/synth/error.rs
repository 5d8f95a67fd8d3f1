//! Why no model was made.

use std::path::PathBuf;

use crate::engine::EngineError;
use crate::gguf::WriteError;
use crate::store::StoreError;

/// Why no synthetic model was made. Nothing is left behind.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs)] // the fields are named for what the message says of them
pub enum SynthError {
    /// A shape that is not in the table.
    #[error("there is no shape \"{found}\"; known are: {known}")]
    Shape { found: String, known: String },
    /// A preset that does not exist.
    #[error("there is no preset \"{found}\"; known are: {known}")]
    Preset { found: String, known: String },
    /// A type that weights cannot be made in.
    #[error("weights cannot be made as \"{found}\"; types that can are: {known}")]
    Type { found: String, known: String },
    /// A number out of its range.
    #[error("{what} is {found}, and it must be {wanted}")]
    Range { what: &'static str, found: f64, wanted: String },
    /// The disk lacks room.
    #[error(
        "{}: {needed} bytes are needed there and {free} are free; free some, give another path, or cut the model with --layers", folder.display()
    )]
    NoSpace { folder: PathBuf, needed: u64, free: u64 },
    /// The file cannot be written.
    #[error(transparent)]
    Write(#[from] WriteError),
    /// The layout of the store.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The model that was written does not run.
    #[error("the model that was written does not run: {0}")]
    Engine(#[from] EngineError),
    /// Somebody asked for the stop.
    #[error("stopped before the model was complete")]
    Cancelled,
}
