//! Why a model was not converted.

use std::path::PathBuf;

use neuropil_device::DType;

use crate::gguf::{GgufError, WriteError};
use crate::store::StoreError;

/// Why a model was not converted. Nothing is left under the name of the result.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs)] // the fields are named for what the message says of them
pub enum ConvertError {
    /// The source, as a GGUF file.
    #[error(transparent)]
    Gguf(#[from] GgufError),
    /// The source, as a neuron store; or a layout that cannot be.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The result.
    #[error(transparent)]
    Write(#[from] WriteError),
    /// A source that is no model that can be cut into neurons.
    #[error("{}: {reason}", file.display())]
    Source { file: PathBuf, reason: String },
    /// A tensor that does not fit the others.
    #[error("{}: the tensor \"{tensor}\" {reason}", file.display())]
    Tensor { file: PathBuf, tensor: String, reason: String },
    /// A type that rows of neurons cannot have.
    #[error("{what} rows cannot be {dtype}; they can be: {fitting}")]
    Type { what: &'static str, dtype: DType, fitting: String },
    /// Weights that another type cannot hold.
    #[error(
        "{}: layer {layer} has weights that are not finite, or too large for {dtype}; look for damage with neuropil verify, or choose another type", file.display()
    )]
    NotFinite { file: PathBuf, layer: usize, dtype: DType },
    /// Memory that could not be had.
    #[error("{bytes} bytes of memory for the conversion could not be reserved; free some memory")]
    OutOfMemory { bytes: u64 },
    /// The caller said stop.
    #[error("the conversion was stopped")]
    Cancelled,
}
