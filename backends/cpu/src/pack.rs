//! The packed layout of weights: 16 rows side by side, the same for every instruction set.
//!
//! A kernel computes 16 rows at once, so one 64-byte vector must hold the same few columns of 16 rows. All
//! instruction sets share the layout: a narrower one reads a part of each vector. The bits of the weights are
//! kept; nothing is quantised again.
//!
//! Rows are cut in groups of [`GROUP_ROWS`]; the last group is filled up with zero rows. A group is
//!
//! - for F32, F16, BF16: for each column, 16 values;
//! - for the types that are expanded: the 16 rows as they lie in a file, one after the other;
//! - else for each block of the format: a head, then for each 32 columns codes and scales.
//!
//! In a 64-byte vector of codes, row r has bytes `4r..4r+4`, four consecutive columns. 32 columns are 8 steps of
//! 4 columns. Code vector j (0 to 3) holds the low four bits of step j in its low nibbles and of step j + 4 in
//! its high ones. The fifth bit of step j is bit j of each byte of one more vector, the sixth of another. 8-bit
//! codes are 8 vectors, one per step, stored unsigned (biased by 128).
//!
//! | format | head | codes | scales after the codes |
//! |---|---|---|---|
//! | Q4_0, Q5_0, Q8_0 | | 256, 320, 512 | f16 d\[16\] |
//! | Q4_1, Q5_1 | | 256, 320 | f16 d\[16\], f16 m\[16\] |
//! | Q4_K, Q5_K | f16 d\[16\], f16 dmin\[16\] | 256, 320 | u8 scale\[16\], u8 min\[16\] |
//! | Q6_K | f16 d\[16\] | 384 | i8 scale\[16\] of the first 16 columns, i8 scale\[16\] of the others |

use crate::arch::{Gather, Isa};
use neuropil_device::quant::{GROUP, Parts, bundle_row, bundle_row_bytes};
use neuropil_device::{AlignedBytes, DType, OutOfMemory};

/// Rows in a group.
pub const GROUP_ROWS: usize = 16;
/// Bytes of a vector of codes.
pub(crate) const VECTOR: usize = 64;

/// Why a weight cannot be packed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PackError {
    /// The width is not whole blocks, or the bytes are not the rows.
    #[error("the bytes of the weight do not match its type and shape")]
    Shape,
    /// The packed weight does not fit in memory.
    #[error(transparent)]
    OutOfMemory(#[from] OutOfMemory),
}

/// The sizes of one packed format, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PackedFormat {
    /// Bits of a code.
    pub bits: usize,
    /// Scales of the whole block.
    pub head: usize,
    /// Scales of 32 columns.
    pub scales: usize,
}

impl PackedFormat {
    /// The format of a type that kernels read in blocks; `None` for the float types and those that are expanded.
    pub const fn of(dtype: DType) -> Option<PackedFormat> {
        match Parts::of(dtype) {
            None => None,
            Some(parts) => Some(PackedFormat {
                bits: parts.bits,
                head: parts.block_halves * 2 * GROUP_ROWS,
                scales: (parts.group_halves * 2 + parts.group_bytes) * GROUP_ROWS,
            }),
        }
    }

    /// Bytes of the codes of 32 columns.
    pub const fn codes(self) -> usize {
        self.bits * VECTOR
    }

    /// Bytes of 32 columns.
    pub const fn step(self) -> usize {
        self.codes() + self.scales
    }
}

/// Bytes of a packed group of 16 rows; `None` when a row is not whole blocks or the size overflows.
pub fn group_bytes(dtype: DType, cols: usize) -> Option<usize> {
    let row = dtype.row_bytes(cols)?;
    match PackedFormat::of(dtype) {
        None => row.checked_mul(GROUP_ROWS),
        Some(f) => {
            let steps = dtype.block_elements() / GROUP;
            (cols / dtype.block_elements()).checked_mul(f.head + steps * f.step())
        }
    }
}

/// A weight in the layout of the kernels.
#[derive(Debug)]
pub struct Packed {
    dtype: DType,
    rows: usize,
    cols: usize,
    group_bytes: usize,
    bytes: AlignedBytes,
}

impl Packed {
    /// A weight whose groups are still to be packed with [`pack_groups`]; the memory of `recycle` is reused
    /// where it fits. Until then its values are unspecified.
    pub fn unfilled(
        dtype: DType,
        rows: usize,
        cols: usize,
        recycle: Option<Packed>,
    ) -> Result<Packed, PackError> {
        let group_bytes = group_bytes(dtype, cols).ok_or(PackError::Shape)?;
        let len = group_bytes.checked_mul(rows.div_ceil(GROUP_ROWS)).ok_or(PackError::Shape)?;
        let bytes = match recycle {
            Some(old) => old.bytes.resized(len)?,
            None => AlignedBytes::zeroed(len)?,
        };
        Ok(Packed { dtype, rows, cols, group_bytes, bytes })
    }

    /// Type of the weight.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Rows, without the ones that fill up the last group.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Columns.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Groups of 16 rows.
    pub fn groups(&self) -> usize {
        self.rows.div_ceil(GROUP_ROWS)
    }

    /// Bytes of a group.
    pub fn group_bytes(&self) -> usize {
        self.group_bytes
    }

    /// All groups, one after the other.
    pub fn bytes(&self) -> &[u8] {
        self.bytes.as_ref()
    }

    /// All groups, to be filled by [`pack_groups`], in pieces of whole groups.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        self.bytes.as_mut()
    }
}

/// Packs a whole weight on the calling thread.
pub fn pack(
    isa: Isa,
    dtype: DType,
    rows: usize,
    cols: usize,
    bytes: &[u8],
    recycle: Option<Packed>,
) -> Result<Packed, PackError> {
    if dtype.matrix_bytes(rows, cols) != Some(bytes.len()) {
        return Err(PackError::Shape);
    }
    let mut packed = Packed::unfilled(dtype, rows, cols, recycle)?;
    pack_groups(isa, dtype, cols, bytes, packed.bytes_mut())?;
    Ok(packed)
}

/// Packs consecutive rows, of which the first starts a group, into the groups `dst`.
///
/// `rows` are whole rows as in a file. `dst` has the bytes of exactly as many groups as the rows need; rows that
/// the last group lacks become zero.
pub fn pack_groups(
    isa: Isa,
    dtype: DType,
    cols: usize,
    rows: &[u8],
    dst: &mut [u8],
) -> Result<(), PackError> {
    let row_bytes = dtype.row_bytes(cols).ok_or(PackError::Shape)?;
    let group_bytes = group_bytes(dtype, cols).ok_or(PackError::Shape)?;
    let sorted_bytes = bundle_row_bytes(dtype, cols).ok_or(PackError::Shape)?;
    if row_bytes == 0 {
        return if rows.is_empty() && dst.is_empty() { Ok(()) } else { Err(PackError::Shape) };
    }
    let groups = rows.len().div_ceil(row_bytes).div_ceil(GROUP_ROWS);
    if !rows.len().is_multiple_of(row_bytes) || groups.checked_mul(group_bytes) != Some(dst.len()) {
        return Err(PackError::Shape);
    }
    // A row is sorted as in a bundle, and 16 such rows are turned: each step runs straight through its memory.
    let mut sorted = AlignedBytes::zeroed(sorted_bytes.checked_mul(GROUP_ROWS).ok_or(PackError::Shape)?)?;
    let sorted = sorted.as_mut();
    for (rows, dst) in rows.chunks(row_bytes * GROUP_ROWS).zip(dst.chunks_exact_mut(group_bytes)) {
        if dtype.is_expanded() {
            let (whole, lacking) = dst.split_at_mut(rows.len());
            whole.copy_from_slice(rows);
            lacking.fill(0);
            continue;
        }
        let mut places = sorted.chunks_exact_mut(sorted_bytes);
        for (row, place) in rows.chunks_exact(row_bytes).zip(&mut places) {
            bundle_row(dtype, cols, row, place);
        }
        places.for_each(|place| place.fill(0));
        let turned = std::array::from_fn(|r| &sorted[r * sorted_bytes..][..sorted_bytes]);
        isa.gather(&Gather::new(dtype, cols, turned, turned), 0..cols, dst);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packed_sizes_are_about_the_file_sizes() {
        for dtype in DType::ALL {
            let file = dtype.matrix_bytes(16, 512).unwrap();
            let packed = group_bytes(dtype, 512).unwrap();
            assert!(packed >= file && packed * 100 <= file * 103, "{dtype}: {packed} for {file}");
        }
        assert_eq!(group_bytes(DType::Q4_K, 128), None);
        assert_eq!(group_bytes(DType::F32, usize::MAX / 32), None);
    }

    #[test]
    fn a_known_element_lies_where_the_table_says() {
        let mut rows = vec![0u8; 3 * 18];
        let row = &mut rows[2 * 18..];
        row[..2].copy_from_slice(&[0x12, 0x34]);
        row[2 + 6] = 0xA5; // column 6 is 5, column 22 is 10
        let packed = pack(Isa::Scalar, DType::Q4_0, 3, 32, &rows, None).unwrap();
        // Column 6 is byte 2 of step 1.
        assert_eq!(packed.bytes()[64 + 2 * 4 + 2], 0xA5);
        assert_eq!(packed.bytes()[256 + 2 * 2..][..2], [0x12, 0x34]);
        assert_eq!(packed.bytes().iter().filter(|b| **b != 0).count(), 3);
    }

    #[test]
    fn pieces_equal_the_whole_and_recycled_memory_is_clean() {
        for (isa, dtype) in Isa::all_available().into_iter().flat_map(|isa| DType::ALL.map(|d| (isa, d))) {
            let (rows, cols) = (37, 768);
            let row = dtype.row_bytes(cols).unwrap();
            let bytes: Vec<u8> = (0..rows * row).map(|i| (i * 37 % 251) as u8).collect();
            let whole = pack(Isa::Scalar, dtype, rows, cols, &bytes, None).unwrap();
            let mut dirty = Packed::unfilled(dtype, rows, cols, None).unwrap();
            dirty.bytes_mut().fill(0xFF);
            let mut pieces = Packed::unfilled(dtype, rows, cols, Some(dirty)).unwrap();
            let size = 2 * pieces.group_bytes();
            for (src, dst) in bytes.chunks(32 * row).zip(pieces.bytes_mut().chunks_mut(size)) {
                pack_groups(isa, dtype, cols, src, dst).unwrap();
            }
            assert_eq!(whole.bytes(), pieces.bytes(), "{dtype}");
        }
    }

    #[test]
    fn wrong_shapes_are_refused() {
        assert_eq!(pack(Isa::Scalar, DType::Q4_K, 2, 128, &[0; 144], None).unwrap_err(), PackError::Shape);
        assert_eq!(pack(Isa::Scalar, DType::Q4_0, 2, 32, &[0; 35], None).unwrap_err(), PackError::Shape);
        assert_eq!(pack_groups(Isa::Scalar, DType::Q4_0, 32, &[0; 18], &mut [0; 287]), Err(PackError::Shape));
        assert_eq!(pack(Isa::Scalar, DType::F32, usize::MAX, 4, &[], None).unwrap_err(), PackError::Shape);
        assert_eq!(pack(Isa::Scalar, DType::F32, 0, 4, &[], None).unwrap().groups(), 0);
        assert_eq!(pack(Isa::Scalar, DType::F32, 4, 0, &[], None).unwrap().groups(), 1);
    }
}
