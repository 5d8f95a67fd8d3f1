//! The row of one neuron, as it lies in a bundle: the bits of the file's blocks, sorted by kind.
//!
//! A block of a file mixes codes and scales in odd sizes (18 bytes, 210 bytes), which suits neither aligned reads nor
//! vectors, and a neuron is read alone, so its row cannot lie interleaved with others. Here all codes of a row come
//! first, in pieces of 16 bytes, then what they lack, then the scales: 16 such rows are turned into a group of a
//! matmul kernel at the speed of memory. No bit of the weights is changed.
//!
//! A row of `cols` elements has `groups = cols / 32`, and `blocks` blocks of its type. One after the other:
//!
//! | part | for each | bytes | types |
//! |---|---|---|---|
//! | codes of 4 to 6 bits: the low four bits | group | 16: code i in the low nibble of byte i, code i + 16 in the high one | all but Q8_0 |
//! | codes of 8 bits | group | 32, signed | Q8_0 |
//! | fifth bits | group | 4: that of code 4j + i is bit j of byte i | Q5_0 Q5_1 Q5_K Q6_K |
//! | sixth bits | group | 4, alike | Q6_K |
//! | f16 scales | group | 2 | Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 |
//! | f16 minimums | group | 2 | Q4_1 Q5_1 |
//! | f16 scales of scales | block | 2 | Q4_K Q5_K Q6_K |
//! | f16 scales of minimums | block | 2 | Q4_K Q5_K |
//! | integer scales (Q6_K: i8, of the first 16 columns) | group | 1 | Q4_K Q5_K Q6_K |
//! | integer minimums (Q6_K: i8 scales of the others) | group | 1 | Q4_K Q5_K Q6_K |
//!
//! Rows of other types are as in a file.

use super::blocks::k_group;
use super::quantize::{fifth_bits, k_fifth_bits, k_nibbles, nibbles, put_scale_min, six_bits};
use super::{
    BlockQ4_0, BlockQ4_1, BlockQ4K, BlockQ5_0, BlockQ5_1, BlockQ5K, BlockQ6K, BlockQ8_0, GROUP, Group, Half,
    QuantBlock, dequantize_row, scale_min,
};
use crate::DType;

/// What a quantised type consists of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Parts {
    /// Bits of a code: 4, 5, 6 or 8.
    pub bits: usize,
    /// f16 values of each group.
    pub group_halves: usize,
    /// f16 values of each block.
    pub block_halves: usize,
    /// Bytes of integer scales of each group.
    pub group_bytes: usize,
}

impl Parts {
    /// The parts of a type; `None` for the types of which rows lie as in a file.
    pub const fn of(dtype: DType) -> Option<Parts> {
        let (bits, group_halves, block_halves, group_bytes) = match dtype {
            DType::F32 | DType::F16 | DType::BF16 => return None,
            DType::Q2_K | DType::Q3_K | DType::IQ4_NL | DType::IQ4_XS | DType::MXFP4 => return None,
            DType::Q4_0 => (4, 1, 0, 0),
            DType::Q4_1 => (4, 2, 0, 0),
            DType::Q5_0 => (5, 1, 0, 0),
            DType::Q5_1 => (5, 2, 0, 0),
            DType::Q8_0 => (8, 1, 0, 0),
            DType::Q4_K => (4, 0, 2, 2),
            DType::Q5_K => (5, 0, 2, 2),
            DType::Q6_K => (6, 0, 1, 2),
        };
        Some(Parts { bits, group_halves, block_halves, group_bytes })
    }

    /// Bytes of the codes of a group, without fifth and sixth bits.
    pub const fn code_bytes(self) -> usize {
        if self.bits == 8 { GROUP } else { GROUP / 2 }
    }

    /// Bits of a code that lie apart.
    pub const fn planes(self) -> usize {
        if self.bits == 8 { 0 } else { self.bits - 4 }
    }
}

/// Where the parts of a quantised row lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BundleRow {
    /// What it consists of.
    pub parts: Parts,
    /// Groups of 32 columns.
    pub groups: usize,
    /// Blocks of its type.
    pub blocks: usize,
}

impl BundleRow {
    /// The parts of a row of `cols` elements; `None` when it is not whole blocks, or lies as in a file.
    pub fn new(dtype: DType, cols: usize) -> Option<BundleRow> {
        dtype.row_bytes(cols)?;
        let parts = Parts::of(dtype)?;
        Some(BundleRow { parts, groups: cols / GROUP, blocks: cols / dtype.block_elements() })
    }

    /// Where the `plane`-th of the bits that lie apart begins (0: fifth bits).
    pub fn plane(&self, plane: usize) -> usize {
        self.groups * (self.parts.code_bytes() + 4 * plane)
    }

    /// Where the `array`-th array of f16 begins, of those for each group.
    pub fn group_halves(&self, array: usize) -> usize {
        self.plane(self.parts.planes()) + 2 * self.groups * array
    }

    /// Where the `array`-th array of f16 begins, of those for each block.
    pub fn block_halves(&self, array: usize) -> usize {
        self.group_halves(self.parts.group_halves) + 2 * self.blocks * array
    }

    /// Where the `array`-th array of bytes begins.
    pub fn group_bytes(&self, array: usize) -> usize {
        self.block_halves(self.parts.block_halves) + self.groups * array
    }

    /// Bytes of the row.
    pub fn bytes(&self) -> usize {
        self.group_bytes(self.parts.group_bytes)
    }

    /// Sorts some blocks of a file's row of `dtype` into `out`, the whole row of a bundle. The first of them is block
    /// `first` of the row.
    ///
    /// # Panics
    /// When the blocks are not whole, or not in the row, or `out` is shorter than the row.
    #[inline]
    pub fn sort(&self, dtype: DType, first: usize, blocks: &[u8], out: &mut [u8]) {
        match dtype {
            DType::F32 | DType::F16 | DType::BF16 => {}
            DType::Q2_K | DType::Q3_K | DType::IQ4_NL | DType::IQ4_XS | DType::MXFP4 => {}
            DType::Q4_0 => split::<BlockQ4_0, 16, 1>(self, first, blocks, out, |b| (&b.qs, [b.d])),
            DType::Q4_1 => split::<BlockQ4_1, 16, 2>(self, first, blocks, out, |b| (&b.qs, [b.d, b.m])),
            DType::Q5_0 => sort::<BlockQ5_0>(self, first, blocks, out),
            DType::Q5_1 => sort::<BlockQ5_1>(self, first, blocks, out),
            DType::Q8_0 => {
                split::<BlockQ8_0, 32, 1>(self, first, blocks, out, |b| (bytemuck::cast_ref(&b.qs), [b.d]))
            }
            DType::Q4_K => sort::<BlockQ4K>(self, first, blocks, out),
            DType::Q5_K => sort::<BlockQ5K>(self, first, blocks, out),
            DType::Q6_K => sort::<BlockQ6K>(self, first, blocks, out),
        }
    }
}

/// Bytes of a row of `cols` elements in a bundle; `None` when it is not whole blocks.
pub fn bundle_row_bytes(dtype: DType, cols: usize) -> Option<usize> {
    match BundleRow::new(dtype, cols) {
        Some(row) => Some(row.bytes()),
        None => dtype.row_bytes(cols),
    }
}

/// Sorts a row of a file into the row of a bundle.
///
/// # Panics
/// When `row` is not `cols` elements, or `out` not [`bundle_row_bytes`].
pub fn bundle_row(dtype: DType, cols: usize, row: &[u8], out: &mut [u8]) {
    assert_eq!(dtype.row_bytes(cols), Some(row.len()), "a row of {cols} {dtype}");
    assert_eq!(bundle_row_bytes(dtype, cols), Some(out.len()), "a bundle's row of {cols} {dtype}");
    bundle_row_part(dtype, cols, 0, row, out);
}

/// As [`bundle_row`], of a piece of the row: whole blocks, of which the first holds column `col`.
///
/// # Panics
/// When the piece is not whole blocks of the row, or `out` not [`bundle_row_bytes`].
pub fn bundle_row_part(dtype: DType, cols: usize, col: usize, piece: &[u8], out: &mut [u8]) {
    assert_eq!(bundle_row_bytes(dtype, cols), Some(out.len()), "a bundle's row of {cols} {dtype}");
    let first = dtype.row_bytes(col).unwrap_or_else(|| panic!("column {col} begins no block of {dtype}"));
    match BundleRow::new(dtype, cols) {
        Some(to) => to.sort(dtype, col / dtype.block_elements(), piece, out),
        None => out[first..first + piece.len()].copy_from_slice(piece),
    }
}

/// Puts a row of a bundle back into the row of a file: the opposite of [`bundle_row`].
///
/// # Panics
/// When `row` is not [`bundle_row_bytes`], or `out` not `cols` elements.
pub fn unbundle_row(dtype: DType, cols: usize, row: &[u8], out: &mut [u8]) {
    assert_eq!(bundle_row_bytes(dtype, cols), Some(row.len()), "a bundle's row of {cols} {dtype}");
    assert_eq!(dtype.row_bytes(cols), Some(out.len()), "a row of {cols} {dtype}");
    let Some(from) = BundleRow::new(dtype, cols) else {
        out.copy_from_slice(row);
        return;
    };
    for (b, block) in out.chunks_exact_mut(dtype.block_bytes()).enumerate() {
        unsort(dtype, &from, row, b, block);
    }
}

/// Block `b` of a row, from the parts of the bundle's row.
fn unsort(dtype: DType, from: &BundleRow, row: &[u8], b: usize, block: &mut [u8]) {
    let per_block = from.groups / from.blocks;
    let codes = |i: usize| codes_of(from, row, b * per_block + i);
    let of_group = |array: usize| Half([0, 1].map(|i| row[from.group_halves(array) + 2 * b + i]));
    let of_block = |array: usize| Half([0, 1].map(|i| row[from.block_halves(array) + 2 * b + i]));
    let byte = |i: usize, array: usize| row[from.group_bytes(array) + b * per_block + i];
    let scales = || {
        let mut scales = [0; 12];
        (0..8).for_each(|i| put_scale_min(&mut scales, i, byte(i, 0), byte(i, 1)));
        scales
    };
    let mut put = |bytes: &[u8]| block.copy_from_slice(bytes);
    match dtype {
        DType::Q4_0 => put(bytemuck::bytes_of(&BlockQ4_0 { d: of_group(0), qs: nibbles(&codes(0)) })),
        DType::Q4_1 => {
            put(bytemuck::bytes_of(&BlockQ4_1 { d: of_group(0), m: of_group(1), qs: nibbles(&codes(0)) }))
        }
        DType::Q5_0 => {
            let codes = codes(0);
            let (qh, qs) = (fifth_bits(&codes), nibbles(&codes));
            put(bytemuck::bytes_of(&BlockQ5_0 { d: of_group(0), qh, qs }))
        }
        DType::Q5_1 => {
            let codes = codes(0);
            let (qh, qs) = (fifth_bits(&codes), nibbles(&codes));
            put(bytemuck::bytes_of(&BlockQ5_1 { d: of_group(0), m: of_group(1), qh, qs }))
        }
        DType::Q8_0 => {
            let qs = codes(0).map(|code| (code ^ 0x80) as i8);
            put(bytemuck::bytes_of(&BlockQ8_0 { d: of_group(0), qs }))
        }
        DType::Q4_K => {
            let codes = std::array::from_fn(codes);
            let (d, dmin, qs) = (of_block(0), of_block(1), k_nibbles(&codes));
            put(bytemuck::bytes_of(&BlockQ4K { d, dmin, scales: scales(), qs }))
        }
        DType::Q5_K => {
            let codes = std::array::from_fn(codes);
            let (d, dmin, qh, qs) = (of_block(0), of_block(1), k_fifth_bits(&codes), k_nibbles(&codes));
            put(bytemuck::bytes_of(&BlockQ5K { d, dmin, scales: scales(), qh, qs }))
        }
        DType::Q6_K => {
            let codes: [[u8; GROUP]; 8] = std::array::from_fn(codes);
            let (ql, qh) = six_bits(|k| codes[k / GROUP][k % GROUP]);
            let scales = std::array::from_fn(|i| byte(i / 2, i % 2) as i8);
            put(bytemuck::bytes_of(&BlockQ6K { ql, qh, scales, d: of_block(0) }))
        }
        _ => {}
    }
}

/// Widens a row of a bundle to f32, with the bits of [`dequantize_row`].
///
/// # Panics
/// When `row` is not a bundle's row of `out.len()` elements.
pub fn dequantize_bundle_row(dtype: DType, row: &[u8], out: &mut [f32]) {
    assert_eq!(
        bundle_row_bytes(dtype, out.len()),
        Some(row.len()),
        "a bundle's row of {} {dtype}",
        out.len()
    );
    match BundleRow::new(dtype, out.len()) {
        None => dequantize_row(dtype, row, out),
        Some(from) => {
            for (g, out) in out.as_chunks_mut().0.iter_mut().enumerate() {
                group(dtype, &from, row, g).dequantize(out);
            }
        }
    }
}

/// The scales of a block by kind.
trait Scales: QuantBlock {
    /// The f16 values, of which a type has one or two.
    fn halves(&self) -> [Half; 2];
    /// The integer scales of group `g`.
    fn bytes(&self, _g: usize) -> [u8; 2] {
        [0; 2]
    }
    /// The codes of group `g`, of a type of 4 bits.
    #[inline]
    fn nibbles(&self, g: usize) -> [u8; 16] {
        nibbles(&self.codes(g))
    }
}

impl Scales for BlockQ5_0 {
    fn halves(&self) -> [Half; 2] {
        [self.d, self.d]
    }
}

impl Scales for BlockQ5_1 {
    fn halves(&self) -> [Half; 2] {
        [self.d, self.m]
    }
}

impl Scales for BlockQ4K {
    fn halves(&self) -> [Half; 2] {
        [self.d, self.dmin]
    }
    fn bytes(&self, g: usize) -> [u8; 2] {
        scale_min(&self.scales, g).into()
    }
}

impl Scales for BlockQ5K {
    fn halves(&self) -> [Half; 2] {
        [self.d, self.dmin]
    }
    fn bytes(&self, g: usize) -> [u8; 2] {
        scale_min(&self.scales, g).into()
    }
}

impl Scales for BlockQ6K {
    fn halves(&self) -> [Half; 2] {
        [self.d, self.d]
    }
    fn bytes(&self, g: usize) -> [u8; 2] {
        [self.scales[2 * g] as u8, self.scales[2 * g + 1] as u8]
    }
}

/// As [`sort`], of a type whose codes are in a bundle what they are in a file, and whose scales are all f16: at the speed
/// of memory.
fn split<B: QuantBlock, const CODES: usize, const HALVES: usize>(
    to: &BundleRow,
    first: usize,
    piece: &[u8],
    out: &mut [u8],
    parts: impl Fn(&B) -> (&[u8; CODES], [Half; HALVES]),
) {
    let blocks: &[B] = bytemuck::cast_slice(piece);
    let (all, halves) = out.split_at_mut(CODES * to.groups);
    let all = &mut all.as_chunks_mut().0[first..][..blocks.len()];
    for (out, block) in all.iter_mut().zip(blocks) {
        *out = *parts(block).0;
    }
    for array in 0..HALVES {
        let halves = &mut halves.as_chunks_mut().0[to.groups * array + first..][..blocks.len()];
        for (out, block) in halves.iter_mut().zip(blocks) {
            *out = parts(block).1[array].0;
        }
    }
}

/// Sorts the blocks of `piece`, which are those from `first` on.
fn sort<B: Scales>(to: &BundleRow, first: usize, piece: &[u8], out: &mut [u8]) {
    let blocks: &[B] = bytemuck::cast_slice(piece);
    let parts = to.parts;
    for (block, b) in blocks.iter().zip(first..) {
        for array in 0..parts.block_halves {
            out[to.block_halves(array) + 2 * b..][..2].copy_from_slice(&block.halves()[array].0);
        }
        for i in 0..B::GROUPS {
            let g = b * B::GROUPS + i;
            if parts.bits == 4 {
                out[GROUP / 2 * g..][..GROUP / 2].copy_from_slice(&block.nibbles(i));
            } else {
                let codes = block.codes(i);
                out[GROUP / 2 * g..][..GROUP / 2].copy_from_slice(&nibbles(&codes));
                for plane in 0..parts.planes() {
                    let bits = gather_bits(&codes, 4 + plane as u32);
                    out[to.plane(plane) + 4 * g..][..4].copy_from_slice(&bits);
                }
            }
            for array in 0..parts.group_halves {
                out[to.group_halves(array) + 2 * g..][..2].copy_from_slice(&block.halves()[array].0);
            }
            for array in 0..parts.group_bytes {
                out[to.group_bytes(array) + g] = block.bytes(i)[array];
            }
        }
    }
}

/// Bit `bit` of each code: that of code 4j + i is bit j of byte i.
#[inline]
fn gather_bits(codes: &[u8; GROUP], bit: u32) -> [u8; 4] {
    let mut bits = 0u32;
    for (j, step) in codes.as_chunks::<4>().0.iter().enumerate() {
        bits |= ((u32::from_le_bytes(*step) >> bit) & 0x0101_0101) << j;
    }
    bits.to_le_bytes()
}

/// The unsigned codes of group `g` of a row of a bundle.
fn codes_of(from: &BundleRow, row: &[u8], g: usize) -> [u8; GROUP] {
    let parts = from.parts;
    let mut codes = [0; GROUP];
    let low = &row[parts.code_bytes() * g..][..parts.code_bytes()];
    for (i, code) in codes.iter_mut().enumerate() {
        *code = match parts.bits {
            8 => low[i] ^ 0x80,
            _ if i < 16 => low[i] & 15,
            _ => low[i - 16] >> 4,
        };
        for plane in 0..parts.planes() {
            let bits = row[from.plane(plane) + 4 * g + i % 4];
            *code |= ((bits >> (i / 4)) & 1) << (4 + plane);
        }
    }
    codes
}

/// Group `g` of a row of a bundle.
fn group(dtype: DType, from: &BundleRow, row: &[u8], g: usize) -> Group {
    let codes = codes_of(from, row, g);
    let half = |at: usize| Half([row[at], row[at + 1]]);
    let of_group = |array| half(from.group_halves(array) + 2 * g).to_f32();
    let of_block = |array| half(from.block_halves(array) + 2 * (g * from.blocks / from.groups));
    let byte = |array| row[from.group_bytes(array) + g];
    let plain = Group { codes, offset: 0, scales: [1, 1], dw: 0.0, mw: None };
    match dtype {
        DType::Q4_0 => Group { offset: 8, dw: of_group(0), ..plain },
        DType::Q5_0 => Group { offset: 16, dw: of_group(0), ..plain },
        DType::Q8_0 => Group { offset: 128, dw: of_group(0), ..plain },
        DType::Q4_1 | DType::Q5_1 => Group { dw: of_group(0), mw: Some(of_group(1)), ..plain },
        DType::Q4_K | DType::Q5_K => k_group(codes, of_block(0), of_block(1), (byte(0), byte(1))),
        DType::Q6_K => {
            let scales = [byte(0), byte(1)].map(|s| i32::from(s as i8));
            Group { offset: 32, scales, dw: of_block(0).to_f32(), ..plain }
        }
        _ => plain,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_keeps_its_weights() {
        for dtype in DType::ALL {
            let cols = 768;
            let mut row = vec![0; dtype.row_bytes(cols).unwrap()];
            row.iter_mut().enumerate().for_each(|(i, b)| *b = (i * 89 % 251) as u8);
            let mut sorted = vec![0xEE; bundle_row_bytes(dtype, cols).unwrap()];
            bundle_row(dtype, cols, &row, &mut sorted);
            let (mut want, mut got) = (vec![0.0; cols], vec![0.0; cols]);
            dequantize_row(dtype, &row, &mut want);
            dequantize_bundle_row(dtype, &sorted, &mut got);
            let bits = |v: &[f32]| v.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
            assert_eq!(bits(&got), bits(&want), "{dtype}");
            let mut back = vec![0xEE; row.len()];
            unbundle_row(dtype, cols, &sorted, &mut back);
            assert_eq!(back, row, "{dtype}");
            let mut pieces = vec![0xEE; sorted.len()];
            for col in (0..cols).step_by(256) {
                let at = |col| dtype.row_bytes(col).unwrap();
                bundle_row_part(dtype, cols, col, &row[at(col)..at(col + 256)], &mut pieces);
            }
            assert_eq!(pieces, sorted, "{dtype}");
            assert!(sorted.len() >= row.len() && sorted.len() * 100 <= row.len() * 103, "{dtype}");
        }
        assert_eq!(bundle_row_bytes(DType::Q4_K, 128), None);
        assert_eq!(bundle_row_bytes(DType::F16, usize::MAX), None);
    }

    #[test]
    fn the_parts_of_a_q5_0_row_lie_where_the_table_says() {
        let mut row = vec![0; 2 * 22];
        row[22..24].copy_from_slice(&[0x12, 0x34]);
        row[24] = 1 << 6; // the fifth bit of column 6 of the second block
        row[28 + 6] = 0xA5;
        let mut sorted = vec![0; 44];
        bundle_row(DType::Q5_0, 64, &row, &mut sorted);
        let mut want = vec![0; 44];
        want[16 + 6] = 0xA5;
        want[32 + 4 + 2] = 1 << 1; // column 6 is byte 2 of step 1
        want[40 + 2..].copy_from_slice(&[0x12, 0x34]);
        assert_eq!(sorted, want);
    }
}
