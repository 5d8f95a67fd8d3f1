//! Quantising weights: for tests, synthetic models and conversion.
//!
//! The 32-element formats choose the same codes as ggml's reference. The K formats here round each group to its
//! own range without a search for better scales; ggml's own files are a little closer to the source. The types that
//! are expanded are in [`super::quantize_expanded`].

use super::quantize_expanded::{iq4_nl, iq4_xs, mxfp4, q2_k, q3_k};
use super::{
    BlockQ4_0, BlockQ4_1, BlockQ4K, BlockQ5_0, BlockQ5_1, BlockQ5K, BlockQ6K, BlockQ8_0, GROUP, Half,
    scale_min,
};
use crate::DType;
use bytemuck::Pod;

/// Quantises a row `x` to `dtype` into `out`, which has `dtype.row_bytes(x.len())` bytes.
///
/// Values that are not finite give an unspecified block, never a panic.
///
/// # Panics
/// When the lengths do not match.
pub fn quantize_row(dtype: DType, x: &[f32], out: &mut [u8]) {
    assert_eq!(dtype.row_bytes(x.len()), Some(out.len()), "{} values as {dtype}", x.len());
    match dtype {
        DType::F32 => narrow(x, out, f32::to_le_bytes),
        DType::F16 => narrow(x, out, |x| half::f16::from_f32(x).to_le_bytes()),
        DType::BF16 => narrow(x, out, |x| half::bf16::from_f32(x).to_le_bytes()),
        DType::Q4_0 => blocks(x, out, q4_0),
        DType::Q4_1 => blocks(x, out, q4_1),
        DType::Q5_0 => blocks(x, out, q5_0),
        DType::Q5_1 => blocks(x, out, q5_1),
        DType::Q8_0 => blocks(x, out, q8_0),
        DType::Q4_K => blocks(x, out, q4_k),
        DType::Q5_K => blocks(x, out, q5_k),
        DType::Q6_K => blocks(x, out, q6_k),
        DType::Q2_K => blocks(x, out, q2_k),
        DType::Q3_K => blocks(x, out, q3_k),
        DType::IQ4_NL => blocks(x, out, iq4_nl),
        DType::IQ4_XS => blocks(x, out, iq4_xs),
        DType::MXFP4 => blocks(x, out, mxfp4),
    }
}

fn narrow<const N: usize>(x: &[f32], out: &mut [u8], f: impl Fn(f32) -> [u8; N]) {
    let (out, _) = out.as_chunks_mut::<N>();
    for (o, x) in out.iter_mut().zip(x) {
        *o = f(*x);
    }
}

fn blocks<B: Pod, const N: usize>(x: &[f32], out: &mut [u8], f: impl Fn(&[f32; N]) -> B) {
    let (x, _) = x.as_chunks::<N>();
    for (x, out) in x.iter().zip(bytemuck::cast_slice_mut(out)) {
        *out = f(x);
    }
}

/// The first value of the largest magnitude, with its sign.
pub(super) fn extreme(x: &[f32]) -> f32 {
    x.iter().fold(0.0, |m: f32, &x| if x.abs() > m.abs() { x } else { m })
}

pub(super) fn range(x: &[f32]) -> (f32, f32) {
    let min = x.iter().copied().fold(f32::INFINITY, f32::min);
    (min, x.iter().copied().fold(f32::NEG_INFINITY, f32::max))
}

pub(super) fn inverse(d: f32) -> f32 {
    if d == 0.0 { 0.0 } else { 1.0 / d }
}

/// Codes `x · id + shift` rounded half up, at most `max`.
fn codes(x: &[f32; GROUP], min: f32, id: f32, shift: f32, max: u8) -> [u8; GROUP] {
    let mut codes = [0; GROUP];
    for (code, x) in codes.iter_mut().zip(x) {
        *code = (((x - min) * id + (shift + 0.5)) as u8).min(max);
    }
    codes
}

pub(super) fn nibbles(codes: &[u8; GROUP]) -> [u8; 16] {
    std::array::from_fn(|i| (codes[i] & 15) | ((codes[i + 16] & 15) << 4))
}

pub(super) fn fifth_bits(codes: &[u8; GROUP]) -> [u8; 4] {
    let bits = codes.iter().enumerate().fold(0, |bits, (i, c)| bits | (u32::from((c >> 4) & 1) << i));
    bits.to_le_bytes()
}

fn q4_0(x: &[f32; GROUP]) -> BlockQ4_0 {
    let d = extreme(x) / -8.0;
    BlockQ4_0 { d: Half::from_f32(d), qs: nibbles(&codes(x, 0.0, inverse(d), 8.0, 15)) }
}

fn q4_1(x: &[f32; GROUP]) -> BlockQ4_1 {
    let (min, max) = range(x);
    let d = (max - min) / 15.0;
    let codes = codes(x, min, inverse(d), 0.0, 15);
    BlockQ4_1 { d: Half::from_f32(d), m: Half::from_f32(min), qs: nibbles(&codes) }
}

fn q5_0(x: &[f32; GROUP]) -> BlockQ5_0 {
    let d = extreme(x) / -16.0;
    let codes = codes(x, 0.0, inverse(d), 16.0, 31);
    BlockQ5_0 { d: Half::from_f32(d), qh: fifth_bits(&codes), qs: nibbles(&codes) }
}

fn q5_1(x: &[f32; GROUP]) -> BlockQ5_1 {
    let (min, max) = range(x);
    let d = (max - min) / 31.0;
    let codes = codes(x, min, inverse(d), 0.0, 31);
    BlockQ5_1 { d: Half::from_f32(d), m: Half::from_f32(min), qh: fifth_bits(&codes), qs: nibbles(&codes) }
}

fn q8_0(x: &[f32; GROUP]) -> BlockQ8_0 {
    let d = largest(x) / 127.0;
    let id = inverse(d);
    // A loop, because mapping an array is not turned into vectors.
    let mut qs = [0; GROUP];
    for (code, x) in qs.iter_mut().zip(x) {
        *code = nearest(x * id);
    }
    BlockQ8_0 { d: Half::from_f32(d), qs }
}

/// The largest magnitude.
fn largest(x: &[f32; GROUP]) -> f32 {
    // Floats that are not negative are ordered as their bits, and a maximum of integers is turned into vectors.
    let magnitude = |x: &f32| (x.to_bits() & 0x7FFF_FFFF) as i32;
    f32::from_bits(x.iter().map(magnitude).fold(0, i32::max) as u32)
}

/// `x`, at most 127 away from zero, rounded as [`f32::round`] does, ties away from zero; without a call or a checked
/// cast, so that it becomes vectors.
fn nearest(x: f32) -> i8 {
    // Floats of this size have no fraction, so the sum is rounded to the nearest whole number, ties to even.
    const WHOLE: f32 = 8_388_608.0;
    let magnitude = if x.abs() < 127.0 { x.abs() } else { 127.0 };
    let even = (magnitude + WHOLE).to_bits() as i32 & 0xFF;
    let code = even + i32::from(magnitude - even as f32 == 0.5);
    (if x < 0.0 { -code } else { code }) as i8
}

/// What Q4_K and Q5_K share: scales, minimums and unpacked codes of eight groups.
struct KGroups {
    d: Half,
    dmin: Half,
    scales: [u8; 12],
    codes: [[u8; GROUP]; 8],
}

fn k_groups(x: &[f32; 256], max_code: u8) -> KGroups {
    let (x, _) = x.as_chunks::<GROUP>();
    let ranges: [(f32, f32); 8] = std::array::from_fn(|g| {
        let (min, max) = range(&x[g]);
        (min.min(0.0), max)
    });
    let scale = |(min, max): (f32, f32)| (max - min) / f32::from(max_code);
    let d = Half::from_f32(ranges.iter().fold(0.0, |m, &r| scale(r).max(m)) / 63.0);
    let dmin = Half::from_f32(ranges.iter().fold(0.0, |m: f32, r| m.max(-r.0)) / 63.0);
    let (id, idmin) = (inverse(d.to_f32()), inverse(dmin.to_f32()));
    let mut scales = [0; 12];
    for (i, r) in ranges.iter().enumerate() {
        let sc = ((scale(*r) * id).round() as u8).min(63);
        let mn = ((-r.0 * idmin).round() as u8).min(63);
        put_scale_min(&mut scales, i, sc, mn);
    }
    let codes = std::array::from_fn(|g| {
        let (sc, mn) = scale_min(&scales, g);
        let (dw, mw) = (d.to_f32() * f32::from(sc), dmin.to_f32() * f32::from(mn));
        codes(&x[g], -mw, inverse(dw), 0.0, max_code)
    });
    KGroups { d, dmin, scales, codes }
}

/// The opposite of [`scale_min`]; the groups are put in order, into zeros.
pub(super) fn put_scale_min(scales: &mut [u8; 12], i: usize, sc: u8, mn: u8) {
    if i < 4 {
        scales[i] = sc;
        scales[i + 4] = mn;
    } else {
        scales[i + 4] = (sc & 15) | (mn << 4);
        scales[i - 4] |= sc >> 4 << 6;
        scales[i] |= mn >> 4 << 6;
    }
}

pub(super) fn k_fifth_bits(codes: &[[u8; GROUP]; 8]) -> [u8; 32] {
    std::array::from_fn(|k| (0..8).fold(0, |bits, g| bits | ((codes[g][k] >> 4) << g)))
}

pub(super) fn k_nibbles(codes: &[[u8; GROUP]; 8]) -> [u8; 128] {
    std::array::from_fn(|i| {
        let (pair, k) = (i / GROUP * 2, i % GROUP);
        (codes[pair][k] & 15) | ((codes[pair + 1][k] & 15) << 4)
    })
}

fn q4_k(x: &[f32; 256]) -> BlockQ4K {
    let KGroups { d, dmin, scales, codes } = k_groups(x, 15);
    BlockQ4K { d, dmin, scales, qs: k_nibbles(&codes) }
}

fn q5_k(x: &[f32; 256]) -> BlockQ5K {
    let KGroups { d, dmin, scales, codes } = k_groups(x, 31);
    BlockQ5K { d, dmin, scales, qh: k_fifth_bits(&codes), qs: k_nibbles(&codes) }
}

fn q6_k(x: &[f32; 256]) -> BlockQ6K {
    let (parts, _) = x.as_chunks::<16>();
    let wanted: [f32; 16] = std::array::from_fn(|i| extreme(&parts[i]) / -32.0);
    let d = Half::from_f32(extreme(&wanted) / -128.0);
    let id = inverse(d.to_f32());
    let scales = wanted.map(|s| (s * id).round() as i8);
    let code = |k: usize| {
        let scale = inverse(d.to_f32() * f32::from(scales[k / 16]));
        ((x[k] * scale + 32.5) as u8).min(63)
    };
    let (ql, qh) = six_bits(code);
    BlockQ6K { ql, qh, scales, d }
}

/// The low four and the high two bits of 256 codes, as Q6_K keeps them.
pub(super) fn six_bits(code: impl Fn(usize) -> u8) -> ([u8; 128], [u8; 64]) {
    let ql = std::array::from_fn(|i| {
        let k = i / 64 * 128 + i % 64;
        (code(k) & 15) | ((code(k + 64) & 15) << 4)
    });
    let qh = std::array::from_fn(|i| {
        let k = i / 32 * 128 + i % 32;
        (0..4).fold(0, |bits, g| bits | ((code(k + 32 * g) >> 4) << (2 * g)))
    });
    (ql, qh)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::quant::dequantize_row;

    fn wave(n: usize) -> Vec<f32> {
        (0..n).map(|i| (i as f32 * 0.37).sin() * (1.0 + (i / 32) as f32 * 0.2) + 0.1).collect()
    }

    #[test]
    fn a_quantised_row_is_close_to_its_source() {
        let x = wave(512);
        let amplitude = 4.2;
        let bounds = [0.0, 1e-3, 1e-2, 0.3, 0.2, 0.15, 0.1, 0.02, 0.25, 0.15, 0.1, 0.6, 0.4, 0.25, 0.25, 0.3];
        for (dtype, bound) in DType::ALL.into_iter().zip(bounds) {
            let mut bytes = vec![0; dtype.row_bytes(x.len()).unwrap()];
            quantize_row(dtype, &x, &mut bytes);
            let mut back = vec![0.0; x.len()];
            dequantize_row(dtype, &bytes, &mut back);
            let worst = x.iter().zip(&back).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            assert!(worst <= bound * amplitude, "{dtype}: {worst}");
        }
    }

    #[test]
    fn codes_of_8_bits_are_rounded_as_the_standard_library_does() {
        let below = |x: f32| f32::from_bits(x.to_bits() - 1);
        for i in 0..=127_000 {
            let x = i as f32 / 1000.0;
            let half = (i as f32 / 2.0).min(127.0);
            for x in [x, half, below(half.max(0.5)), 127.00001] {
                assert_eq!(nearest(x), x.round() as i8, "{x}");
                assert_eq!(nearest(-x), (-x).round() as i8, "-{x}");
            }
        }
    }

    #[test]
    fn values_that_are_not_finite_never_panic() {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::MAX, f32::MIN_POSITIVE, 0.0] {
            let mut x = wave(256);
            x[3] = bad;
            for dtype in DType::ALL {
                quantize_row(dtype, &x, &mut vec![0; dtype.row_bytes(256).unwrap()]);
                quantize_row(dtype, &[bad; 256], &mut vec![0; dtype.row_bytes(256).unwrap()]);
            }
        }
    }
}
