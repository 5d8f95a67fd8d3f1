//! What can be wrong with a GGUF file.
//!
//! A model file is untrusted input, so each thing that can be wrong with it has its own variant: a program can
//! tell a cut download from a type it cannot run. Names that come out of a file are escaped and shortened before
//! they go into an error, so a message never carries control characters or a megabyte of text.

use std::io;
use std::path::PathBuf;

pub(super) use crate::shown::shown;

/// An error of the GGUF reader. Each message is one sentence that names the file.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs)] // the fields are named for what the message says of them
pub enum GgufError {
    /// The operating system refused to open, map or read the file.
    #[error("{file}: cannot be read ({source})")]
    Io { file: PathBuf, source: io::Error },
    /// A directory, a pipe or a device instead of a file.
    #[error("{file}: is not a regular file; give the path of a .gguf file")]
    NotAFile { file: PathBuf },
    /// The first four bytes are not `GGUF`.
    #[error(
        "{file}: is not a GGUF file (it begins with \"{found}\"); a saved web page or a Git LFS pointer looks like this, download the model itself"
    )]
    NotGguf { file: PathBuf, found: String },
    /// A file of PowerInfer, which is converted before it runs.
    #[error("{file}: is a file of PowerInfer; convert it with neuropil convert and run the result")]
    PowerInfer { file: PathBuf },
    /// The version field is byte-swapped.
    #[error(
        "{file}: is a big-endian GGUF file; neuropil reads little-endian files, convert it or download the little-endian one"
    )]
    BigEndian { file: PathBuf },
    /// A version other than 2 and 3.
    #[error(
        "{file}: is GGUF version {version}; neuropil reads versions 2 and 3, convert the model again with a current converter"
    )]
    UnsupportedVersion { file: PathBuf, version: u32 },
    /// The file ends inside its header, or a count or length in it is larger than what is left.
    #[error(
        "{file}: {what} needs {needed} bytes at byte {at} and {left} are left; the file is cut or damaged, download it again"
    )]
    HeaderCut { file: PathBuf, what: String, at: u64, needed: u64, left: u64 },
    /// The header passes [`MAX_HEADER_BYTES`](super::MAX_HEADER_BYTES).
    #[error("{file}: the header passes the limit of {limit} bytes at {what}; the file is damaged or hostile")]
    HeaderTooLarge { file: PathBuf, what: String, limit: u64 },
    /// More of something than the reader accepts.
    #[error("{file}: has {count} {what} and the limit is {limit}; the file is damaged or hostile")]
    TooMany { file: PathBuf, what: &'static str, count: u64, limit: u64 },
    /// Memory for a part of the header could not be had.
    #[error("{file}: {bytes} bytes of memory for its header could not be reserved; free some memory")]
    OutOfMemory { file: PathBuf, bytes: u64 },
    /// A key or a tensor name longer than [`MAX_NAME_BYTES`](super::MAX_NAME_BYTES).
    #[error("{file}: {what} is {bytes} bytes long and the limit is {limit}; the file is damaged")]
    NameTooLong { file: PathBuf, what: String, bytes: u64, limit: u64 },
    /// A name, or a string that is asked for as text, is not UTF-8.
    #[error("{file}: {what} is not valid UTF-8; the file is damaged")]
    NotUtf8 { file: PathBuf, what: String },
    /// The same metadata key twice.
    #[error("{file}: the key \"{key}\" appears twice; which one holds cannot be known, write the file again")]
    DuplicateKey { file: PathBuf, key: String },
    /// A metadata value of a type that GGUF does not have.
    #[error(
        "{file}: the key \"{key}\" has the unknown value type {type_id}; the file is damaged or of a newer format"
    )]
    UnknownValueType { file: PathBuf, key: String, type_id: u32 },
    /// An array of arrays: legal in GGUF, used by no known model, refused here.
    #[error(
        "{file}: the key \"{key}\" holds an array of arrays, which neuropil does not read; write the file again without it"
    )]
    NestedArray { file: PathBuf, key: String },
    /// A value of the right type that cannot be used.
    #[error(
        "{file}: the key \"{key}\" is {value}, but {wanted} is needed; correct the key or convert the model again"
    )]
    BadValue { file: PathBuf, key: String, value: String, wanted: &'static str },
    /// A value of another type than the one that is asked for.
    #[error(
        "{file}: the key \"{key}\" has the wrong type, {found} instead of {wanted}; convert the model again"
    )]
    WrongType { file: PathBuf, key: String, wanted: &'static str, found: &'static str },
    /// A required key is absent.
    #[error("{file}: the key \"{key}\" is missing; the file is incomplete or not a model of this kind")]
    MissingKey { file: PathBuf, key: String },
    /// The same tensor name twice in one file.
    #[error(
        "{file}: the tensor \"{tensor}\" appears twice; which one holds cannot be known, write the file again"
    )]
    DuplicateTensor { file: PathBuf, tensor: String },
    /// More than four dimensions.
    #[error(
        "{file}: the tensor \"{tensor}\" has {n_dims} dimensions and the limit is 4; the file is damaged"
    )]
    BadRank { file: PathBuf, tensor: String, n_dims: u32 },
    /// A dimension of zero.
    #[error("{file}: the tensor \"{tensor}\" is empty, its dimension {dim} is 0; the file is damaged")]
    ZeroDim { file: PathBuf, tensor: String, dim: usize },
    /// The size of a tensor, or the sum of the sizes up to it, does not fit 64 bits.
    #[error("{file}: the size of the tensor \"{tensor}\" overflows 64 bits; the file is damaged or hostile")]
    SizeOverflow { file: PathBuf, tensor: String },
    /// A tensor type that neuropil does not run.
    #[error(
        "{file}: the tensor \"{tensor}\" has type {type_id} ({type_name}), which is not supported; use a file of types {supported}"
    )]
    UnsupportedType {
        file: PathBuf,
        tensor: String,
        type_id: u32,
        type_name: &'static str,
        supported: String,
    },
    /// The first dimension is not a whole number of blocks.
    #[error(
        "{file}: the tensor \"{tensor}\" has rows of {cols} elements, which is not a multiple of the {block} of a {type_name} block; quantise the model again with a type that fits"
    )]
    RowNotWhole { file: PathBuf, tensor: String, cols: u64, type_name: &'static str, block: u64 },
    /// An offset that is not a multiple of the alignment.
    #[error(
        "{file}: the tensor \"{tensor}\" begins at offset {offset}, not a multiple of the alignment {alignment}; the file is damaged"
    )]
    Misaligned { file: PathBuf, tensor: String, offset: u64, alignment: u64 },
    /// A tensor reaches past the end of the file.
    #[error(
        "{file}: the tensor \"{tensor}\" ends at byte {end} and the file has {len}; the download is incomplete, download it again"
    )]
    Truncated { file: PathBuf, tensor: String, end: u64, len: u64 },
    /// Somebody has written to a file that is in use.
    #[error(
        "{file}: was changed while in use, so what is read may be of two models; start again, and replace a model by renaming the new file over it"
    )]
    Changed { file: PathBuf },
    /// Two tensors share bytes.
    #[error(
        "{file}: the tensor \"{tensor}\" begins at byte {offset}, inside \"{other}\", which ends at {other_end}; the file is damaged"
    )]
    Overlap { file: PathBuf, tensor: String, offset: u64, other: String, other_end: u64 },
    /// A required tensor is absent.
    #[error(
        "{file}: the required tensor \"{tensor}\" is missing; the file is incomplete or its tensors have other names"
    )]
    MissingTensor { file: PathBuf, tensor: String },
    /// A destination of another size than the tensor.
    #[error(
        "{file}: the tensor \"{tensor}\" has {bytes} bytes and the destination {given}; give a buffer of the tensor's size"
    )]
    BufferSize { file: PathBuf, tensor: String, bytes: u64, given: u64 },
    /// A file of a split set is not there.
    #[error("{file}: is part of a set of {count} and \"{missing}\" is missing; download it into the same folder", missing = missing.display())]
    MissingShard { file: PathBuf, missing: PathBuf, count: u64 },
    /// A shard whose name does not tell the names of the others.
    #[error(
        "{file}: is part {number} of {count}, so its name must end in \"{wanted}\"; give it its original name back"
    )]
    SplitName { file: PathBuf, number: u64, count: u64, wanted: String },
    /// A shard that belongs to another set.
    #[error("{file}: has {key} = {found} where the set of \"{opened}\" needs {wanted}; the files are not of one set, download them again", opened = opened.display())]
    SplitMismatch { file: PathBuf, opened: PathBuf, key: &'static str, found: u64, wanted: u64 },
    /// The tensors of a set do not add up.
    #[error(
        "{file}: the {shards} files of the set hold {found} tensors and split.tensors.count says {wanted}; download the set again"
    )]
    SplitTensorCount { file: PathBuf, shards: u64, found: u64, wanted: u64 },
    /// The same tensor in two shards.
    #[error("{file}: the tensor \"{tensor}\" is also in \"{other}\"; the files are not of one set, download them again", other = other.display())]
    SplitDuplicateTensor { file: PathBuf, tensor: String, other: PathBuf },
    /// Bytes of a tensor that are not those that were written, found by [`verify`](super::verify).
    #[error(
        "{file}: the bytes of the tensor \"{tensor}\" have the checksum {found:08x} and {wanted:08x} was written; the file is damaged, get or convert it again"
    )]
    Checksum { file: PathBuf, tensor: String, wanted: u32, found: u32 },
    /// A weight or a block scale that is not a finite number, found by [`verify`](super::verify).
    #[error(
        "{file}: block {block} of the tensor \"{tensor}\" ({type_name}) has a value that is {value}; the file is damaged, download it again"
    )]
    NotFinite { file: PathBuf, tensor: String, type_name: &'static str, block: u64, value: &'static str },
}
