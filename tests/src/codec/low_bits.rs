//! The types of two and three bits, and those whose codes are places in a table.

use neuropil_device::DType;

use super::{extreme, half, level, range, set_fours, set_half};

/// What the 4-bit codes of IQ4_NL and IQ4_XS mean.
const CURVE: [f32; 16] = [
    -127.0, -104.0, -83.0, -65.0, -49.0, -35.0, -22.0, -10.0, 1.0, 13.0, 25.0, 38.0, 53.0, 69.0, 89.0, 113.0,
];

/// A float of 4 bits: sign, two bits of exponent, one of mantissa; the smallest exponent has no leading one.
fn e2m1(code: u32) -> f32 {
    let (exponent, mantissa) = (code >> 1 & 3, (code & 1) as f32);
    let magnitude = match exponent {
        0 => mantissa / 2.0,
        _ => (1.0 + mantissa / 2.0) * f32::from(1u8 << (exponent - 1)),
    };
    // ggml's table of whole numbers has no negative zero.
    if code & 8 == 0 || magnitude == 0.0 { magnitude } else { -magnitude }
}

/// Where Q2_K and Q3_K keep the low bits of element `e`, counted from their first byte, and by how much shifted.
fn two_bits(e: usize) -> (usize, usize) {
    (e / 128 * 32 + e % 32, e % 128 / 32 * 2)
}

/// Where Q3_K keeps scale `s` in its 12 bytes: the byte and shift of four bits, and the byte and shift of two more.
fn q3_scale(s: usize) -> [(usize, usize); 2] {
    [(s % 8, s / 8 * 4), (8 + s % 4, s / 4 * 2)]
}

fn q3_step(b: &[u8], s: usize) -> f32 {
    let [low, high] = q3_scale(s).map(|(at, shift)| u32::from(b[96 + at] >> shift));
    (low & 15 | (high & 3) << 4) as f32 - 32.0
}

fn xs_step(b: &[u8], s: usize) -> f32 {
    let high = u32::from(u16::from_le_bytes([b[2], b[3]])) >> (2 * s) & 3;
    (u32::from(b[4 + s / 2] >> (s % 2 * 4)) & 15 | high << 4) as f32 - 32.0
}

/// Element `e` of a block.
pub(super) fn element(dtype: DType, b: &[u8], e: usize) -> f32 {
    let two = |from: usize| {
        let (at, shift) = two_bits(e);
        (b[from + at] >> shift & 3) as f32
    };
    let four = |from: usize| u32::from(b[from + e % 16] >> (e % 32 / 16 * 4)) & 15;
    match dtype {
        DType::Q2_K => {
            let scale = b[e / 16];
            half(b, 80) * f32::from(scale & 15) * two(16) - half(b, 82) * f32::from(scale >> 4)
        }
        DType::Q3_K => {
            let missing = if b[e % 32] >> (e / 32) & 1 == 0 { 4.0 } else { 0.0 };
            half(b, 108) * q3_step(b, e / 16) * (two(32) - missing)
        }
        DType::IQ4_NL => half(b, 0) * CURVE[four(2) as usize],
        DType::IQ4_XS => half(b, 0) * xs_step(b, e / 32) * CURVE[four(8 + e / 32 * 16) as usize],
        // In f64 the scale is a plain power. ggml keeps 255 a power too, where the standard has NaN.
        DType::MXFP4 => (f64::exp2(f64::from(b[0]) - 127.0) * f64::from(e2m1(four(1)))) as f32,
        _ => unreachable!("{dtype} is read elsewhere"),
    }
}

/// Writes a block of zeros.
pub(super) fn encode_block(dtype: DType, x: &[f32], b: &mut [u8]) {
    match dtype {
        DType::Q2_K => {
            let ranges: Vec<(f32, f32)> =
                x.chunks(16).map(range).map(|(l, h)| (l.min(0.0), h.max(0.0))).collect();
            let largest = |of: fn(&(f32, f32)) -> f32| ranges.iter().map(of).fold(0.0, f32::max);
            let d = set_half(b, 80, largest(|(low, high)| high - low) / 3.0 / 15.0);
            let dmin = set_half(b, 82, largest(|(low, _)| -low) / 15.0);
            for (s, ((low, high), x)) in ranges.iter().zip(x.chunks(16)).enumerate() {
                let (scale, min) = (level((high - low) / 3.0, d, 0.0, 15), level(-low, dmin, 0.0, 15));
                b[s] = (scale | min << 4) as u8;
                for (e, v) in (16 * s..).zip(x) {
                    let (at, shift) = two_bits(e);
                    b[16 + at] |= (level(v + dmin * min as f32, d * scale as f32, 0.0, 3) as u8) << shift;
                }
            }
        }
        DType::Q3_K => {
            let scales: Vec<f32> = x.chunks(16).map(|x| extreme(x) / -4.0).collect();
            let d = set_half(b, 108, extreme(&scales).abs() / 31.0);
            for (s, scale) in scales.iter().enumerate() {
                let bits = level(*scale, d, 32.0, 63) as u8;
                let [(low, by), (high, high_by)] = q3_scale(s);
                b[96 + low] |= (bits & 15) << by;
                b[96 + high] |= bits >> 4 << high_by;
            }
            for (e, v) in x.iter().enumerate() {
                let q = level(*v, d * q3_step(b, e / 16), 4.0, 7) as u8;
                let (at, shift) = two_bits(e);
                b[32 + at] |= (q & 3) << shift;
                b[e % 32] |= q >> 2 << (e / 32);
            }
        }
        DType::IQ4_NL => {
            let d = set_half(b, 0, extreme(x) / CURVE[0]);
            set_fours(&mut b[2..], x.iter().map(|v| nearest(*v, |code| d * CURVE[code as usize])));
        }
        DType::IQ4_XS => {
            let scales: Vec<f32> = x.chunks(32).map(|x| extreme(x) / CURVE[0]).collect();
            let d = set_half(b, 0, extreme(&scales).abs() / 31.0);
            for (s, (scale, x)) in scales.iter().zip(x.chunks(32)).enumerate() {
                let bits = level(*scale, d, 32.0, 63);
                b[4 + s / 2] |= (bits as u8 & 15) << (s % 2 * 4);
                b[2 + s / 4] |= (bits as u8 >> 4) << (s % 4 * 2);
                let step = d * xs_step(b, s);
                let codes = x.iter().map(|v| nearest(*v, |code| step * CURVE[code as usize]));
                set_fours(&mut b[8 + 16 * s..][..16], codes);
            }
        }
        DType::MXFP4 => {
            // 4 is the power of two in the widest code.
            let exponent = (extreme(x).abs().max(f32::MIN_POSITIVE) / 4.0).log2().floor();
            b[0] = (exponent + 127.0).clamp(0.0, 254.0) as u8;
            let step = (f32::from(b[0]) - 127.0).exp2();
            set_fours(&mut b[1..], x.iter().map(|v| nearest(*v, |code| step * e2m1(code))));
        }
        _ => unreachable!("{dtype} is written elsewhere"),
    }
}

/// The code whose value is nearest.
fn nearest(x: f32, value: impl Fn(u32) -> f32) -> u32 {
    let off = |code: &u32| (value(*code) - x).abs();
    (0..16).min_by(|a, b| off(a).total_cmp(&off(b))).unwrap_or(0)
}
