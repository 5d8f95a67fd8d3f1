//! What a kernel reads: groups of 16 rows, wherever they lie.

use neuropil_device::DType;

use crate::pack::{GROUP_ROWS, Packed};

/// The groups of a weight, or a panel of one group.
#[derive(Clone, Copy)]
pub(crate) struct Groups<'a> {
    dtype: DType,
    cols: usize,
    group_bytes: usize,
    bytes: &'a [u8],
}

impl<'a> Groups<'a> {
    /// Those of a weight.
    pub fn of(w: &'a Packed) -> Self {
        Groups { dtype: w.dtype(), cols: w.cols(), group_bytes: w.group_bytes(), bytes: w.bytes() }
    }

    /// One group of `cols` columns of F32.
    ///
    /// # Panics
    /// When it has other bytes than [`panel_bytes`].
    pub fn panel(cols: usize, bytes: &'a [u8]) -> Self {
        assert_eq!(panel_bytes(cols), Some(bytes.len()), "a panel has {cols} columns");
        Groups { dtype: DType::F32, cols, group_bytes: bytes.len(), bytes }
    }

    /// Type.
    pub fn dtype(self) -> DType {
        self.dtype
    }

    /// Columns.
    pub fn cols(self) -> usize {
        self.cols
    }

    /// Bytes of a group.
    pub fn group_bytes(self) -> usize {
        self.group_bytes
    }

    /// All groups, one after the other.
    pub fn bytes(self) -> &'a [u8] {
        self.bytes
    }
}

/// Bytes of a group of `cols` columns of F32; `None` when that overflows.
pub(crate) fn panel_bytes(cols: usize) -> Option<usize> {
    cols.checked_mul(GROUP_ROWS * size_of::<f32>())
}
