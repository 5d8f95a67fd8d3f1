//! Blocks that are widened to F32 before they are multiplied.
//!
//! Their scales change too often, or their codes are places in a table, so integer products would save little: no
//! kernel reads them, and they follow the law of the float types. All they need is one decoder each, of 32 weights at
//! a time. It has the roundings of ggml, and plain loops, so that it vectorises in whichever function it is inlined.

use super::blocks::{GROUP, Half};
use crate::DType;
use bytemuck::{Pod, Zeroable};

/// A block whose weights are widened to F32.
pub trait ExpandedBlock: Pod {
    /// The type whose block this is.
    const DTYPE: DType;
    /// Groups of 32 weights in a block.
    const GROUPS: usize = Self::DTYPE.block_elements() / GROUP;
    /// Writes the weights of group `i` of the block, `i < GROUPS`.
    fn expand(&self, i: usize, out: &mut [f32; GROUP]);
}

/// 256 weights of 2 bits; each 16 have a 4-bit scale and a 4-bit minimum.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub struct BlockQ2K {
    /// Of each 16 weights: the scale in the low nibble, the minimum in the high one.
    pub scales: [u8; 16],
    /// In each half of 128 weights, bits `2g, 2g+1` of byte `i` are the code of element `i` of its group `g`.
    pub qs: [u8; 64],
    /// Scale of the scales.
    pub d: Half,
    /// Scale of the minimums.
    pub dmin: Half,
}

/// 256 weights of 3 bits; each 16 have a 6-bit scale; code 4 is zero.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub struct BlockQ3K {
    /// Bit `g` of byte `i` is the third bit of element `i` of group `g`.
    pub hmask: [u8; 32],
    /// Low two bits, as in [`BlockQ2K`].
    pub qs: [u8; 64],
    /// Packed 6-bit scales, see [`BlockQ3K::scale`].
    pub scales: [u8; 12],
    /// Scale of the scales.
    pub d: Half,
}

/// 32 weights of 4 bits, places in [`IQ4_VALUES`], with a scale.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub struct BlockIq4Nl {
    /// Scale.
    pub d: Half,
    /// Code `i` in the low nibble of byte `i`, code `i + 16` in its high nibble.
    pub qs: [u8; 16],
}

/// 256 weights of 4 bits, places in [`IQ4_VALUES`]; each 32 have a 6-bit scale.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub struct BlockIq4Xs {
    /// Scale of the scales.
    pub d: Half,
    /// High two bits of the scales: bits `2g, 2g+1` of the little-endian word belong to group `g`.
    pub scales_h: [u8; 2],
    /// Low four bits of the scales, two in a byte.
    pub scales_l: [u8; 4],
    /// Codes of each group, as in [`BlockIq4Nl`].
    pub qs: [u8; 128],
}

/// 32 weights of 4 bits, places in [`MXFP4_VALUES`], with a power of two as scale.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub struct BlockMxfp4 {
    /// The scale is `2^(e − 128)`; half of what the format says, because the table holds doubles.
    pub e: u8,
    /// Codes, as in [`BlockIq4Nl`].
    pub qs: [u8; 16],
}

/// What the codes of IQ4_NL and IQ4_XS stand for.
pub const IQ4_VALUES: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];

/// What the codes of MXFP4 stand for, doubled to be whole numbers.
pub const MXFP4_VALUES: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

impl BlockQ3K {
    /// The 6-bit scale of the 16 weights from `16 * i` on; 32 is zero.
    #[inline(always)]
    pub fn scale(&self, i: usize) -> u8 {
        let low = self.scales[i % 8] >> (i / 8 * 4) & 15;
        let high = self.scales[8 + i % 4] >> (i / 4 * 2) & 3;
        low | high << 4
    }
}

impl BlockIq4Xs {
    /// The 6-bit scale of group `i`; 32 is zero.
    #[inline(always)]
    pub fn scale(&self, i: usize) -> u8 {
        let low = self.scales_l[i / 2] >> (i % 2 * 4) & 15;
        let high = self.scales_h[i / 4] >> (i % 4 * 2) & 3;
        low | high << 4
    }
}

impl BlockMxfp4 {
    /// The scale that the values of the table are multiplied by.
    #[inline(always)]
    pub fn scale(&self) -> f32 {
        match self.e {
            // The two smallest have no bit of the exponent left.
            0 | 1 => f32::from_bits(0x0020_0000 << self.e),
            e => f32::from_bits((u32::from(e) - 1) << 23),
        }
    }
}

/// Two bits of each byte. Shifts by constants are vectorised, shifts by `g` are not.
#[inline(always)]
fn two_bits(bytes: &[u8; GROUP], g: usize) -> [u8; GROUP] {
    match g {
        0 => bytes.map(|b| b & 3),
        1 => bytes.map(|b| b >> 2 & 3),
        2 => bytes.map(|b| b >> 4 & 3),
        _ => bytes.map(|b| b >> 6),
    }
}

/// Low nibbles first, then high nibbles.
#[inline(always)]
fn look_up(qs: &[u8; 16], table: &[i8; 16], d: f32, out: &mut [f32; GROUP]) {
    let values = table.map(|v| d * f32::from(v));
    for i in 0..16 {
        out[i] = values[usize::from(qs[i] & 15)];
        out[i + 16] = values[usize::from(qs[i] >> 4)];
    }
}

impl ExpandedBlock for BlockQ2K {
    const DTYPE: DType = DType::Q2_K;
    #[inline(always)]
    fn expand(&self, i: usize, out: &mut [f32; GROUP]) {
        let (d, dmin) = (self.d.to_f32(), self.dmin.to_f32());
        let codes = two_bits(&self.qs.as_chunks().0[i / 4], i % 4);
        for half in 0..2 {
            let scale = self.scales[2 * i + half];
            let (d, m) = (d * f32::from(scale & 15), dmin * f32::from(scale >> 4));
            for k in 16 * half..16 * half + 16 {
                out[k] = d * f32::from(codes[k]) - m;
            }
        }
    }
}

impl ExpandedBlock for BlockQ3K {
    const DTYPE: DType = DType::Q3_K;
    #[inline(always)]
    fn expand(&self, i: usize, out: &mut [f32; GROUP]) {
        let d = self.d.to_f32();
        let codes = two_bits(&self.qs.as_chunks().0[i / 4], i % 4);
        let mask = 1 << i;
        for half in 0..2 {
            let d = d * (f32::from(self.scale(2 * i + half)) - 32.0);
            for k in 16 * half..16 * half + 16 {
                let low = if self.hmask[k] & mask == 0 { 4.0 } else { 0.0 };
                out[k] = d * (f32::from(codes[k]) - low);
            }
        }
    }
}

impl ExpandedBlock for BlockIq4Nl {
    const DTYPE: DType = DType::IQ4_NL;
    #[inline(always)]
    fn expand(&self, _: usize, out: &mut [f32; GROUP]) {
        look_up(&self.qs, &IQ4_VALUES, self.d.to_f32(), out);
    }
}

impl ExpandedBlock for BlockIq4Xs {
    const DTYPE: DType = DType::IQ4_XS;
    #[inline(always)]
    fn expand(&self, i: usize, out: &mut [f32; GROUP]) {
        let d = self.d.to_f32() * (f32::from(self.scale(i)) - 32.0);
        look_up(&self.qs.as_chunks().0[i], &IQ4_VALUES, d, out);
    }
}

impl ExpandedBlock for BlockMxfp4 {
    const DTYPE: DType = DType::MXFP4;
    #[inline(always)]
    fn expand(&self, _: usize, out: &mut [f32; GROUP]) {
        look_up(&self.qs, &MXFP4_VALUES, self.scale(), out);
    }
}
