//! The blocks as they lie in a file, and one common view of them.
//!
//! Every format is read as groups of 32 weights with integer codes, so that dequantising, the reference matmul
//! and the packing of kernels share one decoder per format. The structs have alignment 1: a row in a mapped
//! file can be viewed in place, wherever it starts.

use crate::DType;
use bytemuck::{Pod, Zeroable};

/// Weights in a [`Group`].
pub const GROUP: usize = 32;

/// An f16 as two little-endian bytes.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct Half(pub [u8; 2]);

impl Half {
    /// Widens to f32, exactly. Plain arithmetic, so that loops over halves become vectors on every machine.
    #[inline]
    pub fn to_f32(self) -> f32 {
        // The bits of a half, moved up, are its value times 2^-112: the bias of f32 is larger by that.
        const UP: f32 = f32::from_bits((127 + 112) << 23);
        let bits = u32::from(u16::from_le_bytes(self.0));
        let magnitude = (bits & 0x7FFF) << 13;
        let finite = (f32::from_bits(magnitude) * UP).to_bits();
        let magnitude = if magnitude >= 0x7C00 << 13 { magnitude | 0x7F80_0000 } else { finite };
        f32::from_bits(magnitude | (bits & 0x8000) << 16)
    }

    /// Rounds to the nearest f16, ties to even; NaN stays NaN.
    #[inline]
    pub fn from_f32(x: f32) -> Half {
        const OVERFLOW: u32 = (127 + 16) << 23;
        const NORMAL: u32 = (127 - 14) << 23;
        let sign = (x.to_bits() >> 16) & 0x8000;
        let magnitude = x.to_bits() & 0x7FFF_FFFF;
        // The last bit that is kept of a normal half is bit 13: half of it is added, less one unit if that bit is even.
        let even = (magnitude >> 13) & 1;
        let normal = magnitude.wrapping_sub(112 << 23).wrapping_add(0xFFF + even) >> 13;
        // Added to 0.5, whose last bit is that of the smallest half, the value is rounded as it should be.
        let small = (f32::from_bits(magnitude) + 0.5).to_bits().wrapping_sub(0.5f32.to_bits());
        let large = if magnitude > 0x7F80_0000 { 0x7E00 } else { 0x7C00 };
        let finite = if magnitude < NORMAL { small } else { normal };
        Half(((if magnitude < OVERFLOW { finite } else { large } | sign) as u16).to_le_bytes())
    }
}

/// 32 consecutive weights of a row: weight `i` is `dw · scales[i / 16] · (codes[i] − offset) + mw`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Group {
    /// Unsigned codes, in the order of the elements.
    pub codes: [u8; GROUP],
    /// What to subtract from a code.
    pub offset: i32,
    /// Integer scale of each half; 1 where the format has none.
    pub scales: [i32; 2],
    /// Scale of the group.
    pub dw: f32,
    /// Minimum of the group, where the format has one.
    pub mw: Option<f32>,
}

impl Group {
    /// Writes the 32 weights, with the roundings of ggml: multiply, then add. Always inlined: where the format is known,
    /// most of its constants are.
    #[inline(always)]
    pub fn dequantize(&self, out: &mut [f32; GROUP]) {
        let halves = out.as_chunks_mut::<16>().0.iter_mut().zip(self.codes.as_chunks::<16>().0);
        for ((out, codes), scale) in halves.zip(self.scales) {
            let d = self.dw * scale as f32;
            for (out, &code) in out.iter_mut().zip(codes) {
                *out = d * (i32::from(code) - self.offset) as f32;
            }
        }
        if let Some(mw) = self.mw {
            out.iter_mut().for_each(|out| *out += mw);
        }
    }

    #[inline(always)]
    fn simple(codes: [u8; GROUP], offset: i32, d: Half) -> Group {
        Group { codes, offset, scales: [1, 1], dw: d.to_f32(), mw: None }
    }
}

/// A block of a quantised format.
pub trait QuantBlock: Pod {
    /// The type whose block this is.
    const DTYPE: DType;
    /// Groups of 32 weights in a block.
    const GROUPS: usize = Self::DTYPE.block_elements() / GROUP;
    /// The unsigned codes of group `i` of the block, `i < GROUPS`.
    fn codes(&self, i: usize) -> [u8; GROUP];
    /// Group `i` of the block, `i < GROUPS`.
    fn group(&self, i: usize) -> Group;
}

/// 32 weights of 4 bits with a scale; code 8 is zero.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub struct BlockQ4_0 {
    /// Scale.
    pub d: Half,
    /// Code `i` in the low nibble of byte `i`, code `i + 16` in its high nibble.
    pub qs: [u8; 16],
}

/// 32 weights of 4 bits with a scale and a minimum.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub struct BlockQ4_1 {
    /// Scale.
    pub d: Half,
    /// Minimum.
    pub m: Half,
    /// Codes, as in [`BlockQ4_0`].
    pub qs: [u8; 16],
}

/// 32 weights of 5 bits with a scale; code 16 is zero.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub struct BlockQ5_0 {
    /// Scale.
    pub d: Half,
    /// Bit `i` of the little-endian word is the fifth bit of code `i`.
    pub qh: [u8; 4],
    /// Low four bits, as in [`BlockQ4_0`].
    pub qs: [u8; 16],
}

/// 32 weights of 5 bits with a scale and a minimum.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub struct BlockQ5_1 {
    /// Scale.
    pub d: Half,
    /// Minimum.
    pub m: Half,
    /// Fifth bits, as in [`BlockQ5_0`].
    pub qh: [u8; 4],
    /// Low four bits, as in [`BlockQ4_0`].
    pub qs: [u8; 16],
}

/// 32 signed weights of 8 bits with a scale.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub struct BlockQ8_0 {
    /// Scale.
    pub d: Half,
    /// Signed codes.
    pub qs: [i8; 32],
}

/// 256 weights of 4 bits; each 32 have a 6-bit scale and a 6-bit minimum.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub struct BlockQ4K {
    /// Scale of the scales.
    pub d: Half,
    /// Scale of the minimums.
    pub dmin: Half,
    /// Packed 6-bit scales and minimums, see [`scale_min`].
    pub scales: [u8; 12],
    /// Bytes `32c..32c+32` hold group `2c` in the low nibbles and group `2c + 1` in the high ones.
    pub qs: [u8; 128],
}

/// 256 weights of 5 bits; each 32 have a 6-bit scale and a 6-bit minimum.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub struct BlockQ5K {
    /// Scale of the scales.
    pub d: Half,
    /// Scale of the minimums.
    pub dmin: Half,
    /// Packed 6-bit scales and minimums, see [`scale_min`].
    pub scales: [u8; 12],
    /// Bit `g` of byte `i` is the fifth bit of element `i` of group `g`.
    pub qh: [u8; 32],
    /// Low four bits, as in [`BlockQ4K`].
    pub qs: [u8; 128],
}

/// 256 weights of 6 bits; each 16 have an 8-bit scale; code 32 is zero.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub struct BlockQ6K {
    /// Low four bits. In each half of 128 weights, byte `i` holds element `i` in the low nibble and element
    /// `i + 64` in the high one.
    pub ql: [u8; 128],
    /// High two bits. In each half of 128 weights, bits `2g, 2g+1` of byte `i` belong to element `i` of its
    /// group `g`.
    pub qh: [u8; 64],
    /// Scale of each 16 weights.
    pub scales: [i8; 16],
    /// Scale of the scales.
    pub d: Half,
}

/// The 6-bit scale and minimum of group `i` (0 to 7) of a Q4_K or Q5_K block.
pub fn scale_min(scales: &[u8; 12], i: usize) -> (u8, u8) {
    if i < 4 {
        (scales[i] & 63, scales[i + 4] & 63)
    } else {
        let low = scales[i + 4];
        ((low & 15) | (scales[i - 4] >> 6 << 4), (low >> 4) | (scales[i] >> 6 << 4))
    }
}

/// Codes of 16 bytes: low nibbles first, then high nibbles.
#[inline(always)]
fn nibbles(qs: &[u8; 16]) -> [u8; GROUP] {
    let mut codes = [0; GROUP];
    for i in 0..16 {
        codes[i] = qs[i] & 15;
        codes[i + 16] = qs[i] >> 4;
    }
    codes
}

fn nibbles_and_bits(qs: &[u8; 16], qh: [u8; 4]) -> [u8; GROUP] {
    let bits = u32::from_le_bytes(qh);
    let mut codes = nibbles(qs);
    for (i, code) in codes.iter_mut().enumerate() {
        *code |= ((bits >> i) as u8 & 1) << 4;
    }
    codes
}

/// The low or the high nibble of each byte.
#[inline]
fn nibble(bytes: &[u8; GROUP], high: bool) -> [u8; GROUP] {
    let mut codes = [0; GROUP];
    if high {
        for i in 0..GROUP {
            codes[i] = bytes[i] >> 4;
        }
    } else {
        for i in 0..GROUP {
            codes[i] = bytes[i] & 15;
        }
    }
    codes
}

/// The nibbles of group `i` of a Q4_K or Q5_K block.
#[inline]
fn k_nibbles(qs: &[u8; 128], i: usize) -> [u8; GROUP] {
    let (chunks, _) = qs.as_chunks::<GROUP>();
    nibble(&chunks[i / 2], i % 2 == 1)
}

impl QuantBlock for BlockQ4_0 {
    const DTYPE: DType = DType::Q4_0;
    #[inline(always)]
    fn codes(&self, _: usize) -> [u8; GROUP] {
        nibbles(&self.qs)
    }
    #[inline(always)]
    fn group(&self, i: usize) -> Group {
        Group::simple(self.codes(i), 8, self.d)
    }
}

impl QuantBlock for BlockQ4_1 {
    const DTYPE: DType = DType::Q4_1;
    #[inline(always)]
    fn codes(&self, _: usize) -> [u8; GROUP] {
        nibbles(&self.qs)
    }
    #[inline(always)]
    fn group(&self, i: usize) -> Group {
        Group { mw: Some(self.m.to_f32()), ..Group::simple(self.codes(i), 0, self.d) }
    }
}

impl QuantBlock for BlockQ5_0 {
    const DTYPE: DType = DType::Q5_0;
    #[inline(always)]
    fn codes(&self, _: usize) -> [u8; GROUP] {
        nibbles_and_bits(&self.qs, self.qh)
    }
    #[inline(always)]
    fn group(&self, i: usize) -> Group {
        Group::simple(self.codes(i), 16, self.d)
    }
}

impl QuantBlock for BlockQ5_1 {
    const DTYPE: DType = DType::Q5_1;
    #[inline(always)]
    fn codes(&self, _: usize) -> [u8; GROUP] {
        nibbles_and_bits(&self.qs, self.qh)
    }
    #[inline(always)]
    fn group(&self, i: usize) -> Group {
        Group { mw: Some(self.m.to_f32()), ..Group::simple(self.codes(i), 0, self.d) }
    }
}

impl QuantBlock for BlockQ8_0 {
    const DTYPE: DType = DType::Q8_0;
    #[inline(always)]
    fn codes(&self, _: usize) -> [u8; GROUP] {
        // A loop, because mapping an array is not turned into vectors.
        let mut codes = [0; GROUP];
        for (code, q) in codes.iter_mut().zip(&self.qs) {
            *code = (*q as u8) ^ 0x80;
        }
        codes
    }
    #[inline(always)]
    fn group(&self, i: usize) -> Group {
        Group::simple(self.codes(i), 128, self.d)
    }
}

impl QuantBlock for BlockQ4K {
    const DTYPE: DType = DType::Q4_K;
    #[inline]
    fn codes(&self, i: usize) -> [u8; GROUP] {
        k_nibbles(&self.qs, i)
    }
    #[inline(always)]
    fn group(&self, i: usize) -> Group {
        k_group(self.codes(i), self.d, self.dmin, scale_min(&self.scales, i))
    }
}

impl QuantBlock for BlockQ5K {
    const DTYPE: DType = DType::Q5_K;
    #[inline]
    fn codes(&self, i: usize) -> [u8; GROUP] {
        let mut codes = k_nibbles(&self.qs, i);
        let mask = 1 << i;
        for (code, bits) in codes.iter_mut().zip(&self.qh) {
            *code |= if bits & mask != 0 { 16 } else { 0 };
        }
        codes
    }
    #[inline(always)]
    fn group(&self, i: usize) -> Group {
        k_group(self.codes(i), self.d, self.dmin, scale_min(&self.scales, i))
    }
}

/// A group whose scale and minimum are products of an f16 and a 6-bit integer, both exact in f32.
pub(super) fn k_group(codes: [u8; GROUP], d: Half, dmin: Half, (scale, min): (u8, u8)) -> Group {
    Group {
        codes,
        offset: 0,
        scales: [1, 1],
        dw: d.to_f32() * f32::from(scale),
        mw: Some(-(dmin.to_f32() * f32::from(min))),
    }
}

impl QuantBlock for BlockQ6K {
    const DTYPE: DType = DType::Q6_K;
    #[inline]
    fn codes(&self, i: usize) -> [u8; GROUP] {
        let (half, g) = (i / 4, i % 4);
        let (low, _) = self.ql.as_chunks::<GROUP>();
        let (high, _) = self.qh.as_chunks::<GROUP>();
        let mut codes = nibble(&low[2 * half + g % 2], g >= 2);
        let high = &high[half];
        for k in 0..GROUP {
            // Shifts by constants are vectorised, shifts by g are not.
            let bits = match g {
                0 => high[k] << 4,
                1 => high[k] << 2,
                2 => high[k],
                _ => high[k] >> 2,
            };
            codes[k] |= bits & 0x30;
        }
        codes
    }
    #[inline(always)]
    fn group(&self, i: usize) -> Group {
        let scales = [self.scales[2 * i], self.scales[2 * i + 1]].map(i32::from);
        Group { codes: self.codes(i), offset: 32, scales, dw: self.d.to_f32(), mw: None }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn halves_are_widened_and_rounded_as_the_standard_says() {
        for bits in 0..=u16::MAX {
            let half = half::f16::from_bits(bits);
            let wide = Half(bits.to_le_bytes()).to_f32();
            assert!(
                wide.to_bits() == half.to_f32().to_bits() || wide.is_nan() && half.is_nan(),
                "{bits:04x}"
            );
            // All exponents, and every way in which a value lies between two halves.
            for low in [0, 1, 0xFFF, 0x1000, 0x1001, 0x1FFF, 0x2000, 0x3000, 0x7FFF, 0x8000, 0xFFFF] {
                let x = f32::from_bits(u32::from(bits) << 16 | low);
                let (got, want) = (u16::from_le_bytes(Half::from_f32(x).0), half::f16::from_f32(x));
                let nan = x.is_nan() && half::f16::from_bits(got).is_nan();
                assert!(nan || got == want.to_bits(), "{:08x}", x.to_bits());
            }
        }
    }
}
