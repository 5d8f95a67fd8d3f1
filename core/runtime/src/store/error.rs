//! What can be wrong with a neuron store.

use std::path::PathBuf;

use neuropil_device::DType;

use crate::gguf::GgufError;

/// Why a file is no neuron store that can be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// The file, a key or a tensor of it.
    #[error(transparent)]
    Gguf(#[from] GgufError),
    /// A later version, or none that exists.
    #[error(
        "{}: is a neuron store of version {found}, and this program reads version {known}; convert the model again, or use a newer neuropil", file.display()
    )]
    Version {
        /// The store.
        file: PathBuf,
        /// Its version.
        found: u32,
        /// The newest that is known.
        known: u32,
    },
    /// A key that does not fit the rest of the file.
    #[error("{}: the key \"{key}\" is wrong: {reason}; convert the model again", file.display())]
    Key {
        /// The store.
        file: PathBuf,
        /// The key.
        key: String,
        /// What is wrong with it.
        reason: String,
    },
    /// A tensor that does not fit the rest of the file.
    #[error("{}: the tensor \"{tensor}\" {reason}; convert the model again", file.display())]
    Tensor {
        /// The store.
        file: PathBuf,
        /// The tensor.
        tensor: String,
        /// What is wrong with it.
        reason: String,
    },
    /// Rows that a type cannot hold.
    #[error("rows of {width} elements cannot be stored as {dtype}; types that fit are: {fitting}")]
    Width {
        /// The type.
        dtype: DType,
        /// Elements of a row.
        width: usize,
        /// Types that fit.
        fitting: String,
    },
    /// A read unit that the format does not have.
    #[error("{found} is no read unit of the format; there are 4096, 512 and 64")]
    ReadUnit {
        /// What was found.
        found: u64,
    },
}

impl StoreError {
    pub(super) fn width(dtype: DType, width: usize) -> StoreError {
        let fits = |dtype: &DType| neuropil_device::quant::bundle_row_bytes(*dtype, width).is_some();
        let fitting: Vec<&str> =
            DType::ALL.iter().filter(|dtype| fits(dtype)).map(|dtype| dtype.name()).collect();
        StoreError::Width { dtype, width, fitting: fitting.join(" ") }
    }
}
