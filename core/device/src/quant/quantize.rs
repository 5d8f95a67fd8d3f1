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
        DType::F16 => narrow(x, out, |x| Half::from_f32(x).0),
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

/// Lanes of the loops that look for the largest and the smallest: two vectors of the narrowest machine.
const LANES: usize = 8;

/// Folds values lane by lane, then the lanes: an order that becomes vectors.
#[inline(always)]
fn fold(x: &[f32], start: f32, better: impl Fn(f32, f32) -> f32) -> f32 {
    let (chunks, rest) = x.as_chunks::<LANES>();
    let mut lanes = [start; LANES];
    for chunk in chunks {
        // A new array each time: lanes that are changed in place are taken apart.
        let mut next = lanes;
        for i in 0..LANES {
            next[i] = better(lanes[i], chunk[i]);
        }
        lanes = next;
    }
    let mut half = [start; LANES / 2];
    for (i, half) in half.iter_mut().enumerate() {
        *half = better(lanes[i], lanes[i + LANES / 2]);
    }
    let best = better(better(half[0], half[2]), better(half[1], half[3]));
    rest.iter().fold(best, |best, x| better(best, *x))
}

// Comparisons that NaN fails, as one instruction each.
#[inline(always)]
fn larger(a: f32, b: f32) -> f32 {
    if b > a { b } else { a }
}

#[inline(always)]
fn smaller(a: f32, b: f32) -> f32 {
    if b < a { b } else { a }
}

/// The first value of the largest magnitude, with its sign.
#[inline(always)]
pub(super) fn extreme(x: &[f32]) -> f32 {
    let (low, high) = (fold(x, 0.0, smaller), fold(x, 0.0, larger));
    // Which sign wins is a coin's toss, so that is no branch; that both are equal is rare.
    if high == -low {
        return x.iter().copied().find(|x| x.abs() == high && high > 0.0).unwrap_or(0.0);
    }
    if high > -low { high } else { low }
}

#[inline(always)]
pub(super) fn range(x: &[f32]) -> (f32, f32) {
    (fold(x, f32::INFINITY, smaller), fold(x, f32::NEG_INFINITY, larger))
}

pub(super) fn inverse(d: f32) -> f32 {
    if d == 0.0 { 0.0 } else { 1.0 / d }
}

/// Codes `x · id + shift` rounded half up, at most `max`; what is no number is 0.
#[inline(always)]
fn codes(x: &[f32; GROUP], min: f32, id: f32, shift: f32, max: u8) -> [u8; GROUP] {
    // Floats of this size have no fraction, so a sum is rounded to a whole number, and back where that was up.
    const WHOLE: f32 = 8_388_608.0;
    let (shift, max) = (shift + 0.5, f32::from(max));
    let mut codes = [0; GROUP];
    for (code, x) in codes.iter_mut().zip(x) {
        let value = smaller(max, larger(0.0, (x - min) * id + shift));
        let near = value + WHOLE;
        *code = (near.to_bits() as i32 - i32::from(near - WHOLE > value)) as u8;
    }
    codes
}

#[inline(always)]
pub(super) fn nibbles(codes: &[u8; GROUP]) -> [u8; 16] {
    // A loop, because a function for each element is not turned into vectors.
    let mut nibbles = [0; 16];
    for (i, nibble) in nibbles.iter_mut().enumerate() {
        *nibble = (codes[i] & 15) | (codes[i + 16] << 4);
    }
    nibbles
}

pub(super) fn fifth_bits(codes: &[u8; GROUP]) -> [u8; 4] {
    let bits = codes.iter().enumerate().fold(0, |bits, (i, c)| bits | (u32::from((c >> 4) & 1) << i));
    bits.to_le_bytes()
}

fn q4_0(x: &[f32; GROUP]) -> BlockQ4_0 {
    // As a division by -8, and sooner there.
    let d = extreme(x) * -0.125;
    BlockQ4_0 { d: Half::from_f32(d), qs: nibbles(&codes(x, 0.0, inverse(d), 8.0, 15)) }
}

fn q4_1(x: &[f32; GROUP]) -> BlockQ4_1 {
    let (min, max) = range(x);
    let d = (max - min) / 15.0;
    let codes = codes(x, min, inverse(d), 0.0, 15);
    BlockQ4_1 { d: Half::from_f32(d), m: Half::from_f32(min), qs: nibbles(&codes) }
}

fn q5_0(x: &[f32; GROUP]) -> BlockQ5_0 {
    let d = extreme(x) * -0.0625;
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
    fold(x, 0.0, |largest, x| larger(largest, x.abs()))
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
    use proptest::prelude::*;

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

    /// The codes as they are defined, one value at a time.
    fn plain_codes(x: &[f32; GROUP], min: f32, id: f32, shift: f32, max: u8) -> [u8; GROUP] {
        x.map(|x| (((x - min) * id + (shift + 0.5)) as u8).min(max))
    }

    /// Whatever floats are finite, and groups in which values come more than once.
    fn group() -> impl Strategy<Value = [f32; GROUP]> {
        use proptest::num::f32::{NEGATIVE, NORMAL, POSITIVE, SUBNORMAL, ZERO};
        let any = proptest::array::uniform32(
            (POSITIVE | NEGATIVE | NORMAL | SUBNORMAL | ZERO).prop_map(|x| x + 0.0),
        );
        let steps = proptest::array::uniform32((-8i8..8).prop_map(|n| f32::from(n) * 0.037));
        let weights = proptest::array::uniform32(-1.0f32..1.0);
        prop_oneof![any, steps, weights]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(4096))]
        #[test]
        fn groups_are_quantised_as_one_value_at_a_time_would_be(x in group()) {
            let first = x.iter().fold(0.0, |m: f32, &x| if x.abs() > m.abs() { x } else { m });
            prop_assert_eq!(extreme(&x).to_bits(), first.to_bits());
            let largest_of = x.iter().fold(0.0, |m: f32, x| m.max(x.abs()));
            prop_assert_eq!(largest(&x), largest_of);
            let (min, max) = range(&x);
            prop_assert_eq!(min, x.iter().copied().fold(f32::INFINITY, f32::min));
            prop_assert_eq!(max, x.iter().copied().fold(f32::NEG_INFINITY, f32::max));
            for (d, min, shift, most) in [(first / -8.0, 0.0, 8.0, 15), ((max - min) / 31.0, min, 0.0, 31)] {
                let id = inverse(d);
                prop_assert_eq!(codes(&x, min, id, shift, most), plain_codes(&x, min, id, shift, most));
            }
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
