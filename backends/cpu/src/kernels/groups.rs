//! What a kernel reads: groups of 16 rows, wherever they lie.

use std::ops::Range;

use neuropil_device::DType;

use crate::pack::{Packed, group_bytes};

/// The groups of a weight, or a panel: some groups, maybe of some columns only.
#[derive(Clone, Copy)]
pub(crate) struct Groups<'a> {
    dtype: DType,
    columns: (usize, usize),
    group_bytes: usize,
    bytes: &'a [u8],
}

impl<'a> Groups<'a> {
    /// Those of a weight.
    pub fn of(w: &'a Packed) -> Self {
        Groups { dtype: w.dtype(), columns: (0, w.cols()), group_bytes: w.group_bytes(), bytes: w.bytes() }
    }

    /// Groups with the weights of some columns of the input.
    ///
    /// # Panics
    /// When they have other bytes than such groups.
    pub fn panel(dtype: DType, columns: Range<usize>, bytes: &'a [u8]) -> Self {
        let group_bytes = group_bytes(dtype, columns.len()).unwrap_or(0);
        assert!(bytes.len().is_multiple_of(group_bytes), "a panel has columns {columns:?}");
        Groups { dtype, columns: (columns.start, columns.len()), group_bytes, bytes }
    }

    /// Type.
    pub fn dtype(self) -> DType {
        self.dtype
    }

    /// Columns.
    pub fn cols(self) -> usize {
        self.columns.1
    }

    /// The column of the input that meets the first.
    pub fn first_col(self) -> usize {
        self.columns.0
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
