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

use crate::mem::{AlignedBytes, OutOfMemory};
use neuropil_device::DType;
use neuropil_device::quant::{
    BlockQ4_0, BlockQ4_1, BlockQ4K, BlockQ5_0, BlockQ5_1, BlockQ5K, BlockQ6K, BlockQ8_0, GROUP, Half,
    QuantBlock, scale_min,
};

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
        let (bits, head, scales) = match dtype {
            DType::F32 | DType::F16 | DType::BF16 => return None,
            DType::Q2_K | DType::Q3_K | DType::IQ4_NL | DType::IQ4_XS | DType::MXFP4 => return None,
            DType::Q4_0 => (4, 0, 32),
            DType::Q4_1 => (4, 0, 64),
            DType::Q5_0 => (5, 0, 32),
            DType::Q5_1 => (5, 0, 64),
            DType::Q8_0 => (8, 0, 32),
            DType::Q4_K => (4, 64, 32),
            DType::Q5_K => (5, 64, 32),
            DType::Q6_K => (6, 32, 32),
        };
        Some(PackedFormat { bits, head, scales })
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
    pack_groups(dtype, cols, bytes, packed.bytes_mut())?;
    Ok(packed)
}

/// Packs consecutive rows, of which the first starts a group, into the groups `dst`.
///
/// `rows` are whole rows as in a file. `dst` has the bytes of exactly as many groups as the rows need; rows that
/// the last group lacks become zero.
pub fn pack_groups(dtype: DType, cols: usize, rows: &[u8], dst: &mut [u8]) -> Result<(), PackError> {
    let row_bytes = dtype.row_bytes(cols).ok_or(PackError::Shape)?;
    let group_bytes = group_bytes(dtype, cols).ok_or(PackError::Shape)?;
    if row_bytes == 0 {
        return if rows.is_empty() && dst.is_empty() { Ok(()) } else { Err(PackError::Shape) };
    }
    let groups = rows.len().div_ceil(row_bytes).div_ceil(GROUP_ROWS);
    if !rows.len().is_multiple_of(row_bytes) || groups.checked_mul(group_bytes) != Some(dst.len()) {
        return Err(PackError::Shape);
    }
    for (rows, dst) in rows.chunks(row_bytes * GROUP_ROWS).zip(dst.chunks_mut(group_bytes)) {
        if rows.len() < row_bytes * GROUP_ROWS {
            dst.fill(0);
        }
        for (r, row) in rows.chunks(row_bytes).enumerate() {
            match dtype {
                DType::F32 => interleave::<4>(row, r, dst),
                DType::F16 | DType::BF16 => interleave::<2>(row, r, dst),
                DType::Q4_0 => pack_row::<BlockQ4_0>(row, r, dst),
                DType::Q4_1 => pack_row::<BlockQ4_1>(row, r, dst),
                DType::Q5_0 => pack_row::<BlockQ5_0>(row, r, dst),
                DType::Q5_1 => pack_row::<BlockQ5_1>(row, r, dst),
                DType::Q8_0 => pack_row::<BlockQ8_0>(row, r, dst),
                DType::Q4_K => pack_row::<BlockQ4K>(row, r, dst),
                DType::Q5_K => pack_row::<BlockQ5K>(row, r, dst),
                DType::Q6_K => pack_row::<BlockQ6K>(row, r, dst),
                DType::Q2_K | DType::Q3_K | DType::IQ4_NL | DType::IQ4_XS | DType::MXFP4 => {
                    dst[r * row_bytes..][..row_bytes].copy_from_slice(row);
                }
            }
        }
    }
    Ok(())
}

/// Puts the elements of one row in their place in a group of plain floats.
fn interleave<const N: usize>(row: &[u8], r: usize, dst: &mut [u8]) {
    let (elements, _) = row.as_chunks::<N>();
    let (slots, _) = dst.as_chunks_mut::<N>();
    for (element, slot) in elements.iter().zip(slots[r..].iter_mut().step_by(GROUP_ROWS)) {
        *slot = *element;
    }
}

/// The scales of a block, one value per row in each array.
trait PackBlock: QuantBlock {
    const FORMAT: PackedFormat = match PackedFormat::of(Self::DTYPE) {
        Some(f) => f,
        None => panic!("a block format is packed"),
    };
    fn head(&self, _r: usize, _dst: &mut [u8]) {}
    fn scales(&self, group: usize, r: usize, dst: &mut [u8]);
}

fn pack_row<B: PackBlock>(row: &[u8], r: usize, dst: &mut [u8]) {
    let f = B::FORMAT;
    let blocks: &[B] = bytemuck::cast_slice(row);
    for (block, dst) in blocks.iter().zip(dst.chunks_exact_mut(f.head + B::GROUPS * f.step())) {
        let (head, steps) = dst.split_at_mut(f.head);
        block.head(r, head);
        for (g, step) in steps.chunks_exact_mut(f.step()).enumerate() {
            let (codes, scales) = step.split_at_mut(f.codes());
            pack_codes(f.bits, &block.codes(g), r, codes);
            block.scales(g, r, scales);
        }
    }
}

#[inline]
fn pack_codes(bits: usize, codes: &[u8; GROUP], r: usize, dst: &mut [u8]) {
    let (vectors, _) = dst.as_chunks_mut::<VECTOR>();
    if bits == 8 {
        put_steps(vectors, r, codes);
        return;
    }
    let mut nibbles = [0; 16];
    for i in 0..16 {
        nibbles[i] = (codes[i] & 15) | (codes[i + 16] << 4);
    }
    put_steps(vectors, r, &nibbles);
    for (plane, bit) in vectors[4..].iter_mut().zip(4..) {
        let mut bits = [0; 4];
        for (j, step) in codes.as_chunks::<4>().0.iter().enumerate() {
            for i in 0..4 {
                bits[i] |= ((step[i] >> bit) & 1) << j;
            }
        }
        plane[4 * r..][..4].copy_from_slice(&bits);
    }
}

#[inline]
fn put_steps(vectors: &mut [[u8; VECTOR]], r: usize, bytes: &[u8]) {
    for (vector, step) in vectors.iter_mut().zip(bytes.as_chunks::<4>().0) {
        vector[4 * r..][..4].copy_from_slice(step);
    }
}

/// Writes the value of row `r` in the `array`-th array of 16.
#[inline]
fn put<const N: usize>(dst: &mut [u8], array: usize, r: usize, value: [u8; N]) {
    dst[(array * GROUP_ROWS + r) * N..][..N].copy_from_slice(&value);
}

impl PackBlock for BlockQ4_0 {
    fn scales(&self, _: usize, r: usize, dst: &mut [u8]) {
        put(dst, 0, r, self.d.0);
    }
}

impl PackBlock for BlockQ5_0 {
    fn scales(&self, _: usize, r: usize, dst: &mut [u8]) {
        put(dst, 0, r, self.d.0);
    }
}

impl PackBlock for BlockQ8_0 {
    fn scales(&self, _: usize, r: usize, dst: &mut [u8]) {
        put(dst, 0, r, self.d.0);
    }
}

impl PackBlock for BlockQ4_1 {
    fn scales(&self, _: usize, r: usize, dst: &mut [u8]) {
        put(dst, 0, r, self.d.0);
        put(dst, 1, r, self.m.0);
    }
}

impl PackBlock for BlockQ5_1 {
    fn scales(&self, _: usize, r: usize, dst: &mut [u8]) {
        put(dst, 0, r, self.d.0);
        put(dst, 1, r, self.m.0);
    }
}

fn k_head(d: Half, dmin: Half, r: usize, dst: &mut [u8]) {
    put(dst, 0, r, d.0);
    put(dst, 1, r, dmin.0);
}

fn k_scales(scales: &[u8; 12], group: usize, r: usize, dst: &mut [u8]) {
    let (scale, min) = scale_min(scales, group);
    put(dst, 0, r, [scale]);
    put(dst, 1, r, [min]);
}

impl PackBlock for BlockQ4K {
    fn head(&self, r: usize, dst: &mut [u8]) {
        k_head(self.d, self.dmin, r, dst);
    }
    fn scales(&self, group: usize, r: usize, dst: &mut [u8]) {
        k_scales(&self.scales, group, r, dst);
    }
}

impl PackBlock for BlockQ5K {
    fn head(&self, r: usize, dst: &mut [u8]) {
        k_head(self.d, self.dmin, r, dst);
    }
    fn scales(&self, group: usize, r: usize, dst: &mut [u8]) {
        k_scales(&self.scales, group, r, dst);
    }
}

impl PackBlock for BlockQ6K {
    fn head(&self, r: usize, dst: &mut [u8]) {
        put(dst, 0, r, self.d.0);
    }
    fn scales(&self, group: usize, r: usize, dst: &mut [u8]) {
        put(dst, 0, r, [self.scales[2 * group] as u8]);
        put(dst, 1, r, [self.scales[2 * group + 1] as u8]);
    }
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
        let packed = pack(DType::Q4_0, 3, 32, &rows, None).unwrap();
        // Column 6 is byte 2 of step 1.
        assert_eq!(packed.bytes()[64 + 2 * 4 + 2], 0xA5);
        assert_eq!(packed.bytes()[256 + 2 * 2..][..2], [0x12, 0x34]);
        assert_eq!(packed.bytes().iter().filter(|b| **b != 0).count(), 3);
    }

    #[test]
    fn pieces_equal_the_whole_and_recycled_memory_is_clean() {
        for dtype in DType::ALL {
            let (rows, cols) = (37, 256);
            let row = dtype.row_bytes(cols).unwrap();
            let bytes: Vec<u8> = (0..rows * row).map(|i| (i * 37 % 251) as u8).collect();
            let whole = pack(dtype, rows, cols, &bytes, None).unwrap();
            let mut dirty = Packed::unfilled(dtype, rows, cols, None).unwrap();
            dirty.bytes_mut().fill(0xFF);
            let mut pieces = Packed::unfilled(dtype, rows, cols, Some(dirty)).unwrap();
            let size = 2 * pieces.group_bytes();
            for (src, dst) in bytes.chunks(32 * row).zip(pieces.bytes_mut().chunks_mut(size)) {
                pack_groups(dtype, cols, src, dst).unwrap();
            }
            assert_eq!(whole.bytes(), pieces.bytes(), "{dtype}");
        }
    }

    #[test]
    fn wrong_shapes_are_refused() {
        assert_eq!(pack(DType::Q4_K, 2, 128, &[0; 144], None).unwrap_err(), PackError::Shape);
        assert_eq!(pack(DType::Q4_0, 2, 32, &[0; 35], None).unwrap_err(), PackError::Shape);
        assert_eq!(pack_groups(DType::Q4_0, 32, &[0; 18], &mut [0; 287]), Err(PackError::Shape));
        assert_eq!(pack(DType::F32, usize::MAX, 4, &[], None).unwrap_err(), PackError::Shape);
        assert_eq!(pack(DType::F32, 0, 4, &[], None).unwrap().groups(), 0);
        assert_eq!(pack(DType::F32, 4, 0, &[], None).unwrap().groups(), 1);
    }
}
