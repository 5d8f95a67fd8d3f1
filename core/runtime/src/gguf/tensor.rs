//! One entry of the tensor directory, and where its bytes lie.
//!
//! Everything that sizes or places a tensor is checked here, once: the reader hands out only tensors whose rows
//! are whole blocks and whose bytes are inside the file and belong to no other tensor.

use std::ops::Deref;
use std::path::Path;

use neuropil_device::DType;

use super::error::{GgufError, shown};
use super::types::{TensorType, tensor_type};

/// The dimensions of a tensor, fastest first: one to four numbers, none of them zero.
///
/// It reads as a slice. A scalar of the file (no dimensions) reads as one element in one dimension.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Dims {
    sizes: [u64; 4],
    len: u8,
}

impl Dims {
    /// One dimension of one element, to be overwritten by [`Dims::set`].
    pub(super) fn scalar() -> Dims {
        Dims { sizes: [1; 4], len: 1 }
    }

    /// Sets dimension `index`, counted from 0 and rising; more than four are left out.
    pub(super) fn set(&mut self, index: usize, size: u64) {
        if let Some(slot) = self.sizes.get_mut(index) {
            *slot = size;
            self.len = index as u8 + 1;
        }
    }
}

impl Deref for Dims {
    type Target = [u64];

    fn deref(&self) -> &[u64] {
        self.sizes.get(..usize::from(self.len)).unwrap_or_default()
    }
}

impl std::fmt::Debug for Dims {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.deref().fmt(f)
    }
}

/// One tensor of a file.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct TensorInfo {
    /// The name, unique in the file or set.
    pub name: String,
    /// Dimensions, fastest first: `[cols, rows]` of a matrix.
    pub dims: Dims,
    /// The type id in the file.
    pub type_id: u32,
    /// The type that computes. After [`Gguf::open`](super::Gguf::open) it lacks only in I8 and I32 tensors, which hold
    /// the bundles and lists of a neuron store.
    pub dtype: Option<DType>,
    /// Which file of the set holds it, counted from 0.
    pub shard: usize,
    /// Where its bytes begin in that file.
    pub offset: u64,
    /// How many they are; 0 when the type is so unknown that its size is too.
    pub bytes: u64,
}

impl TensorInfo {
    /// Elements of one row: the first dimension.
    pub fn cols(&self) -> u64 {
        self.dims.sizes[0]
    }

    /// Rows of [`TensorInfo::cols`] elements: the product of the other dimensions, 1 for a vector.
    pub fn rows(&self) -> u64 {
        // Cannot overflow: the reader has checked the product of all dimensions.
        self.dims.iter().skip(1).product()
    }

    /// Elements in all.
    pub fn elements(&self) -> u64 {
        self.dims.iter().product()
    }

    /// The name of its type: `Q4_K`, or `unknown`.
    pub fn type_name(&self) -> &'static str {
        tensor_type(self.type_id).map_or("unknown", |known| known.name)
    }

    /// Where its bytes end in its file.
    pub fn end(&self) -> u64 {
        self.offset.saturating_add(self.bytes)
    }
}

/// The bytes of a tensor of `dims`, with each way in which they cannot be had.
pub(super) fn tensor_bytes(
    file: &Path,
    name: &str,
    dims: &Dims,
    kind: Option<&TensorType>,
) -> Result<u64, GgufError> {
    if let Some(dim) = dims.iter().position(|&size| size == 0) {
        return Err(GgufError::ZeroDim { file: file.into(), tensor: shown(name), dim });
    }
    let overflow = || GgufError::SizeOverflow { file: file.into(), tensor: shown(name) };
    let elements =
        dims.iter().try_fold(1u64, |product, &size| product.checked_mul(size)).ok_or_else(overflow)?;
    let Some(kind) = kind else { return Ok(0) };
    let cols = dims.sizes[0];
    if !cols.is_multiple_of(kind.block_elements) {
        return Err(GgufError::RowNotWhole {
            file: file.into(),
            tensor: shown(name),
            cols,
            type_name: kind.name,
            block: kind.block_elements,
        });
    }
    (elements / kind.block_elements).checked_mul(kind.block_bytes).ok_or_else(overflow)
}

/// Checks that every tensor lies inside the `len` bytes of `file` and that no two share a byte.
pub(super) fn check_extents(file: &Path, tensors: &[TensorInfo], len: u64) -> Result<(), GgufError> {
    for tensor in tensors {
        let outside = tensor.offset.checked_add(tensor.bytes).is_none_or(|end| end > len);
        if outside {
            let (tensor, end) = (shown(&tensor.name), tensor.end());
            return Err(GgufError::Truncated { file: file.into(), tensor, end, len });
        }
    }
    let mut order: Vec<u32> = super::cursor::reserve(tensors.len() as u64, file)?;
    order.extend(0..tensors.len() as u32);
    let at = |index: u32| tensors.get(index as usize);
    order.sort_unstable_by_key(|&index| at(index).map(|t| (t.offset, t.bytes)));
    let mut before: Option<&TensorInfo> = None;
    for tensor in order.into_iter().filter_map(at) {
        if let Some(other) = before
            && other.end() > tensor.offset
        {
            return Err(GgufError::Overlap {
                file: file.into(),
                tensor: shown(&tensor.name),
                offset: tensor.offset,
                other: shown(&other.name),
                other_end: other.end(),
            });
        }
        before = Some(tensor);
    }
    Ok(())
}
