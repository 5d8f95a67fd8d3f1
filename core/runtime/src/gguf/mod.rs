//! Reads GGUF files: the header with every check, the data by map or by positioned reads. [`GgufWriter`] writes them.
//!
//! A model file is untrusted input. The reader promises, whatever the bytes are:
//!
//! - It returns a file or a [`GgufError`] that names the file and the cure. It does not panic or hang.
//! - The header has at most [`MAX_HEADER_BYTES`], [`MAX_PAIRS`] keys and [`MAX_TENSORS`] tensors.
//! - Every tensor lies inside its file, no two share a byte, and every row is a whole number of blocks.
//! - Memory stays below the size of the file plus 64 MiB. Nothing is reserved from a count that the bytes left
//!   in the file do not bear out.
//! - No key and no tensor name appears twice, in one file or in a set of files.
//!
//! Versions 2 and 3, little-endian. A dimension of zero is refused; a tensor without dimensions is a scalar and
//! reads as one element. An array of arrays is refused. `general.alignment` is a u32 and a power of two from 8 to
//! [`MAX_ALIGNMENT`].
//!
//! One thing a memory map cannot survive: another program that makes the file shorter while it is open. Replace a
//! model by renaming a new file over it. Weights that compute are read with [`Gguf::read_into`], where a shrunk
//! file is an ordinary error. [`Gguf::unchanged`] tells of a file that was written to.

mod cursor;
mod encode;
mod error;
mod map;
mod metadata;
mod parse;
mod shard;
mod split;
mod staged;
mod stamp;
mod tensor;
mod types;
mod value;
mod verify;
mod write;

use std::fmt;
use std::path::{Path, PathBuf};

use error::shown;
use shard::Shard;

pub(crate) use shard::read_at;
pub(crate) use stamp::Stamp;

pub(crate) use cursor::reserve;
pub use error::GgufError;
pub use metadata::Metadata;
pub use parse::{
    Header, MAX_ALIGNMENT, MAX_HEADER_BYTES, MAX_NAME_BYTES, MAX_PAIRS, MAX_TENSORS, TypePolicy, parse,
};
pub use tensor::{Dims, TensorInfo};
pub use types::{I8, I32, TENSOR_TYPES, TensorType, tensor_id, tensor_type};
pub use value::{Array, Strings, Value};
pub use verify::{VerifyReport, verify};
pub use write::{CHECKSUM_KEY, GgufWriter, NewTensor, Pairs, WriteError};

/// A GGUF file, or a set of them, open for reading: metadata, tensor directory, and the data.
pub struct Gguf {
    path: PathBuf,
    version: u32,
    powerinfer: bool,
    metadata: Metadata,
    tensors: Vec<TensorInfo>,
    /// Indices into `tensors`, sorted by name.
    order: Vec<u32>,
    shards: Vec<Shard>,
}

impl Gguf {
    /// Opens the file, and the rest of its set if it is one of several, and checks everything that a header can
    /// be checked for. Every tensor has a type that neuropil runs.
    pub fn open(path: &Path) -> Result<Gguf, GgufError> {
        Gguf::open_as(path, TypePolicy::Supported)
    }

    /// Opens the file to list or convert it: as [`Gguf::open`], but tensors may have any type. One of a type that is not
    /// even known by name counts as 0 bytes.
    pub fn open_header(path: &Path) -> Result<Gguf, GgufError> {
        Gguf::open_as(path, TypePolicy::Any)
    }

    fn open_as(path: &Path, types: TypePolicy) -> Result<Gguf, GgufError> {
        let set = split::open(path, types)?;
        Ok(Gguf {
            path: path.into(),
            version: set.version,
            powerinfer: set.powerinfer,
            metadata: set.metadata,
            tensors: set.tensors,
            order: set.order,
            shards: set.shards,
        })
    }

    /// The path it was opened by.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The version of the format, 2 or 3.
    pub fn version(&self) -> u32 {
        self.version
    }

    /// Whether it is a file of PowerInfer; [`Gguf::open`] takes none.
    pub fn is_powerinfer(&self) -> bool {
        self.powerinfer
    }

    /// The size of the file, or of all files of the set.
    pub fn file_bytes(&self) -> u64 {
        self.shards.iter().map(|shard| shard.bytes().len() as u64).sum()
    }

    /// The paths of the files, in the order of the set.
    pub fn paths(&self) -> impl ExactSizeIterator<Item = &Path> {
        self.shards.iter().map(|shard| &*shard.path)
    }

    /// The key-value pairs; of a set, those of its first file.
    pub fn metadata(&self) -> &Metadata {
        &self.metadata
    }

    /// The tensors in the order of the file, files in the order of the set.
    pub fn tensors(&self) -> &[TensorInfo] {
        &self.tensors
    }

    /// The tensor of this name.
    pub fn tensor(&self, name: &str) -> Option<&TensorInfo> {
        metadata::position(&self.tensors, &self.order, |tensor| &tensor.name, name)
    }

    /// The number of the tensor of this name.
    pub fn index(&self, name: &str) -> Option<usize> {
        metadata::index(&self.tensors, &self.order, |tensor| &tensor.name, name)
    }

    /// The tensor of this name; an absent one is an error.
    pub fn require(&self, name: &str) -> Result<&TensorInfo, GgufError> {
        self.tensor(name).ok_or_else(|| self.missing(name))
    }

    /// The bytes of a tensor in the map; none for a tensor of another file. See the module on what a map cannot
    /// survive.
    pub fn data(&self, tensor: &TensorInfo) -> &[u8] {
        let range = usize::try_from(tensor.offset).ok().zip(usize::try_from(tensor.end()).ok());
        let shard = self.shards.get(tensor.shard).map(Shard::bytes).unwrap_or_default();
        range.and_then(|(start, end)| shard.get(start..end)).unwrap_or_default()
    }

    /// Reads a tensor into `out`, which has exactly its size, by positioned reads. Short and interrupted reads
    /// are continued. Any number of threads may read at once.
    ///
    /// # Errors
    /// A buffer of another size, a failing read, a file that has become too short.
    pub fn read_into(&self, tensor: &TensorInfo, out: &mut [u8]) -> Result<(), GgufError> {
        let given = out.len() as u64;
        if given != tensor.bytes {
            let (file, bytes) = (self.shard_path(tensor).into(), tensor.bytes);
            return Err(GgufError::BufferSize { file, tensor: shown(&tensor.name), bytes, given });
        }
        self.read_part(tensor, 0, out)
    }

    /// Reads the bytes `from .. from + out.len()` of a tensor, as [`Gguf::read_into`] does: some rows of it.
    pub fn read_part(&self, tensor: &TensorInfo, from: u64, out: &mut [u8]) -> Result<(), GgufError> {
        let given = out.len() as u64;
        if from.checked_add(given).is_none_or(|end| end > tensor.bytes) {
            let (file, bytes) = (self.shard_path(tensor).into(), tensor.bytes);
            return Err(GgufError::BufferSize { file, tensor: shown(&tensor.name), bytes, given });
        }
        let shard = self.shards.get(tensor.shard).ok_or_else(|| self.missing(&tensor.name))?;
        shard.read(tensor, from, out)
    }

    /// Tells the system that it may drop the cached pages of a tensor, for instance after its weights were read
    /// and packed: else they fill the memory that the model needs. Does nothing where there is no such advice.
    pub fn release(&self, tensor: &TensorInfo) {
        if let Some(shard) = self.shards.get(tensor.shard) {
            shard.release(tensor);
        }
    }

    /// Whether all files are as they were when they were opened; files that others were renamed over are. What was read
    /// before this was asked is then of one model.
    ///
    /// # Errors
    /// [`GgufError::Changed`].
    pub fn unchanged(&self) -> Result<(), GgufError> {
        self.shards.iter().try_for_each(Shard::unchanged)
    }

    /// What tells the files from others, in the order of the set.
    pub(crate) fn stamps(&self) -> impl Iterator<Item = Stamp> {
        self.shards.iter().map(|shard| shard.stamp)
    }

    /// The path of the file that holds the tensor.
    pub fn shard_path(&self, tensor: &TensorInfo) -> &Path {
        self.shards.get(tensor.shard).map_or(&self.path, |shard| &shard.path)
    }

    fn missing(&self, name: &str) -> GgufError {
        GgufError::MissingTensor { file: self.path.clone(), tensor: shown(name) }
    }
}

impl fmt::Debug for Gguf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (tensors, keys) = (self.tensors.len(), self.metadata.len());
        f.debug_struct("Gguf")
            .field("path", &self.path)
            .field("tensors", &tensors)
            .field("keys", &keys)
            .finish()
    }
}
