//! The GGUF element types, written from the definition of the formats and for nothing but clarity.
//!
//! It shares no code with the engine: a mistake in the engine's reading of a format must not hide here. Decoding
//! works element by element, from where a block keeps its bits; the encoders are the simplest that give sane
//! weights, not the best.

mod low_bits;

use half::{bf16, f16};
use neuropil_device::DType;

/// The type's id in a GGUF file.
pub fn type_id(dtype: DType) -> u32 {
    match dtype {
        DType::F32 => 0,
        DType::F16 => 1,
        DType::Q4_0 => 2,
        DType::Q4_1 => 3,
        DType::Q5_0 => 6,
        DType::Q5_1 => 7,
        DType::Q8_0 => 8,
        DType::Q2_K => 10,
        DType::Q3_K => 11,
        DType::Q4_K => 12,
        DType::Q5_K => 13,
        DType::Q6_K => 14,
        DType::IQ4_NL => 20,
        DType::IQ4_XS => 23,
        DType::BF16 => 30,
        DType::MXFP4 => 39,
    }
}

/// Elements and bytes of one block.
pub fn block(dtype: DType) -> (usize, usize) {
    match dtype {
        DType::F32 => (1, 4),
        DType::F16 | DType::BF16 => (1, 2),
        DType::Q4_0 => (32, 2 + 16),
        DType::Q4_1 => (32, 4 + 16),
        DType::Q5_0 => (32, 2 + 4 + 16),
        DType::Q5_1 => (32, 4 + 4 + 16),
        DType::Q8_0 => (32, 2 + 32),
        DType::Q4_K => (256, 4 + 12 + 128),
        DType::Q5_K => (256, 4 + 12 + 32 + 128),
        DType::Q6_K => (256, 128 + 64 + 16 + 2),
        DType::Q2_K => (256, 16 + 64 + 4),
        DType::Q3_K => (256, 32 + 64 + 12 + 2),
        DType::IQ4_NL => (32, 2 + 16),
        DType::IQ4_XS => (256, 2 + 2 + 4 + 128),
        DType::MXFP4 => (32, 1 + 16),
    }
}

/// The values that the bytes stand for.
///
/// # Panics
/// When the bytes are not whole blocks.
pub fn decode(dtype: DType, bytes: &[u8]) -> Vec<f32> {
    let (elements, size) = block(dtype);
    assert!(bytes.len().is_multiple_of(size), "{} bytes are not whole {dtype} blocks", bytes.len());
    bytes.chunks_exact(size).flat_map(|b| (0..elements).map(move |e| element(dtype, b, e))).collect()
}

/// The bytes of values, rounded to the type.
///
/// # Panics
/// When the values are not whole blocks.
pub fn encode(dtype: DType, values: &[f32]) -> Vec<u8> {
    let (elements, size) = block(dtype);
    assert!(values.len().is_multiple_of(elements), "{} values are not whole {dtype} blocks", values.len());
    let mut out = vec![0u8; values.len() / elements * size];
    for (x, block) in values.chunks_exact(elements).zip(out.chunks_exact_mut(size)) {
        encode_block(dtype, x, block);
    }
    out
}

/// Element `e` of a block.
fn element(dtype: DType, b: &[u8], e: usize) -> f32 {
    let nibble = |from: usize, index: usize, high: usize| u32::from(b[from + index] >> (4 * high)) & 15;
    // The 32-element types: low nibbles hold the first half, high nibbles the second; fifth bits are a bit set.
    let four = |from: usize| nibble(from, e % 16, e / 16);
    let fifth = |from: usize| (u32::from(b[from + e / 8]) >> (e % 8) & 1) << 4;
    // The 256-element types: two sub-blocks of 32 share 32 bytes; fifth bits of sub-block s are bit s.
    let (sub, lane) = (e / 32, e % 32);
    let four_k = |from: usize| nibble(from, sub / 2 * 32 + lane, sub % 2);
    let affine_k = |q: u32| {
        let (scale, min) = scale_min(&b[4..16], sub);
        half(b, 0) * f32::from(scale) * q as f32 - half(b, 2) * f32::from(min)
    };
    match dtype {
        DType::F32 => f32::from_le_bytes([b[0], b[1], b[2], b[3]]),
        DType::F16 => half(b, 0),
        DType::BF16 => bf16::from_le_bytes([b[0], b[1]]).to_f32(),
        DType::Q4_0 => half(b, 0) * (four(2) as f32 - 8.0),
        DType::Q4_1 => half(b, 0) * four(4) as f32 + half(b, 2),
        DType::Q5_0 => half(b, 0) * ((four(6) | fifth(2)) as f32 - 16.0),
        DType::Q5_1 => half(b, 0) * (four(8) | fifth(4)) as f32 + half(b, 2),
        DType::Q8_0 => half(b, 0) * f32::from(b[2 + e] as i8),
        DType::Q4_K => affine_k(four_k(16)),
        DType::Q5_K => affine_k(four_k(48) | (u32::from(b[16 + lane] >> sub) & 1) << 4),
        DType::Q6_K => {
            let (low, high, shift) = six_bits(e);
            let q = nibble(0, low, shift / 4) | (u32::from(b[128 + high] >> shift) & 3) << 4;
            half(b, 208) * f32::from(b[192 + e / 16] as i8) * (q as f32 - 32.0)
        }
        _ => low_bits::element(dtype, b, e),
    }
}

/// Where Q6_K keeps element `e`: index of the byte with its low four bits, index of the byte with its high two
/// bits, and by how much those are shifted. The low bits are in the upper nibble when that shift is 4 or more.
fn six_bits(e: usize) -> (usize, usize, usize) {
    let (half, quarter, lane) = (e / 128, e % 128 / 32, e % 32);
    (half * 64 + quarter % 2 * 32 + lane, half * 32 + lane, 2 * quarter)
}

fn half(b: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([b[at], b[at + 1]]).to_f32()
}

/// Scale and minimum of sub-block `s` out of the 12 bytes of Q4_K and Q5_K.
fn scale_min(b: &[u8], s: usize) -> (u8, u8) {
    if s < 4 {
        return (b[s] & 63, b[s + 4] & 63);
    }
    (b[s + 4] & 15 | b[s - 4] >> 6 << 4, b[s + 4] >> 4 | b[s] >> 6 << 4)
}

fn set_scale_min(b: &mut [u8], s: usize, scale: u8, min: u8) {
    if s < 4 {
        b[s] |= scale;
        b[s + 4] |= min;
    } else {
        b[s + 4] |= scale & 15 | (min & 15) << 4;
        b[s - 4] |= scale >> 4 << 6;
        b[s] |= min >> 4 << 6;
    }
}

/// Writes a half and gives back what it reads as.
fn set_half(b: &mut [u8], at: usize, value: f32) -> f32 {
    b[at..at + 2].copy_from_slice(&f16::from_f32(value).to_le_bytes());
    half(b, at)
}

/// `x / step` as a level between 0 and `top`, counted from `zero`.
fn level(x: f32, step: f32, zero: f32, top: u32) -> u32 {
    let steps = if step == 0.0 { 0.0 } else { x / step };
    (steps + zero).round().clamp(0.0, top as f32) as u32
}

/// The value furthest from zero, with its sign.
fn extreme(x: &[f32]) -> f32 {
    x.iter().fold(0.0, |a: f32, v| if v.abs() > a.abs() { *v } else { a })
}

fn range(x: &[f32]) -> (f32, f32) {
    x.iter().fold((f32::INFINITY, f32::NEG_INFINITY), |(low, high), v| (low.min(*v), high.max(*v)))
}

fn encode_block(dtype: DType, x: &[f32], b: &mut [u8]) {
    match dtype {
        DType::F32 => b.copy_from_slice(&x[0].to_le_bytes()),
        DType::F16 => b.copy_from_slice(&f16::from_f32(x[0]).to_le_bytes()),
        DType::BF16 => b.copy_from_slice(&bf16::from_f32(x[0]).to_le_bytes()),
        DType::Q4_0 => {
            let step = set_half(b, 0, extreme(x) / -8.0);
            set_fours(&mut b[2..], x.iter().map(|v| level(*v, step, 8.0, 15)));
        }
        DType::Q5_0 => {
            let step = set_half(b, 0, extreme(x) / -16.0);
            let levels: Vec<u32> = x.iter().map(|v| level(*v, step, 16.0, 31)).collect();
            set_fifths(&mut b[2..6], &levels);
            set_fours(&mut b[6..], levels.into_iter());
        }
        DType::Q4_1 | DType::Q5_1 => {
            let top = if dtype == DType::Q4_1 { 15 } else { 31 };
            let (low, high) = range(x);
            let step = set_half(b, 0, (high - low) / top as f32);
            let low = set_half(b, 2, low);
            let levels: Vec<u32> = x.iter().map(|v| level(v - low, step, 0.0, top)).collect();
            if dtype == DType::Q5_1 {
                set_fifths(&mut b[4..8], &levels);
            }
            let from = b.len() - 16;
            set_fours(&mut b[from..], levels.into_iter());
        }
        DType::Q8_0 => {
            let step = set_half(b, 0, extreme(x).abs() / 127.0);
            for (b, v) in b[2..].iter_mut().zip(x) {
                *b = (level(*v, step, 128.0, 255) as i32 - 128) as u8;
            }
        }
        DType::Q4_K | DType::Q5_K => encode_affine_k(dtype, x, b),
        DType::Q6_K => {
            let scales: Vec<f32> = x.chunks(16).map(|x| extreme(x) / -32.0).collect();
            let d = set_half(b, 208, extreme(&scales).abs() / 127.0);
            for (s, scale) in scales.iter().enumerate() {
                b[192 + s] = (level(*scale, d, 128.0, 255) as i32 - 128) as u8;
            }
            for (e, v) in x.iter().enumerate() {
                let q = level(*v, d * f32::from(b[192 + e / 16] as i8), 32.0, 63) as u8;
                let (low, high, shift) = six_bits(e);
                b[low] |= (q & 15) << (shift / 4 * 4);
                b[128 + high] |= q >> 4 << shift;
            }
        }
        _ => low_bits::encode_block(dtype, x, b),
    }
}

fn encode_affine_k(dtype: DType, x: &[f32], b: &mut [u8]) {
    let top = if dtype == DType::Q4_K { 15 } else { 31 };
    // A minimum is stored as what is subtracted, so it cannot be above zero.
    let ranges: Vec<(f32, f32)> = x.chunks(32).map(range).map(|(l, h)| (l.min(0.0), h.max(0.0))).collect();
    let largest = |of: fn(&(f32, f32)) -> f32| ranges.iter().map(of).fold(0.0, f32::max);
    let d = set_half(b, 0, largest(|(low, high)| high - low) / top as f32 / 63.0);
    let dmin = set_half(b, 2, largest(|(low, _)| -low) / 63.0);
    for (s, ((low, high), x)) in ranges.iter().zip(x.chunks(32)).enumerate() {
        let scale = level((high - low) / top as f32, d, 0.0, 63) as u8;
        let min = level(-low, dmin, 0.0, 63) as u8;
        set_scale_min(&mut b[4..16], s, scale, min);
        let from = b.len() - 128 + s / 2 * 32;
        for (lane, v) in x.iter().enumerate() {
            let q = level(v + dmin * f32::from(min), d * f32::from(scale), 0.0, top) as u8;
            b[from + lane] |= (q & 15) << (s % 2 * 4);
            if dtype == DType::Q5_K {
                b[16 + lane] |= q >> 4 << s;
            }
        }
    }
}

fn set_fours(b: &mut [u8], levels: impl Iterator<Item = u32>) {
    levels.enumerate().for_each(|(e, q)| b[e % 16] |= (q as u8 & 15) << (e / 16 * 4));
}

fn set_fifths(b: &mut [u8], levels: &[u32]) {
    levels.iter().enumerate().for_each(|(e, q)| b[e / 8] |= ((q >> 4) as u8) << (e % 8));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn low_nibbles_are_the_first_half_of_a_block() {
        let mut bytes = vec![0x00, 0x38];
        bytes.extend([0x1f; 16]);
        let values = decode(DType::Q4_0, &bytes);
        assert_eq!((values[..16].to_vec(), values[16..].to_vec()), (vec![3.5; 16], vec![-3.5; 16]));
    }

    #[test]
    fn every_type_keeps_values_to_its_precision() {
        let x: Vec<f32> = (0..1024).map(|i| (i as f32 * 0.7).sin() * (1.0 + (i / 32 % 5) as f32)).collect();
        let bound = |dtype| match dtype {
            DType::F32 => 0.0,
            DType::F16 => 2e-3,
            DType::BF16 | DType::Q8_0 => 2.1e-2,
            DType::Q6_K => 0.17,
            DType::Q5_0 | DType::Q5_1 | DType::Q5_K => 0.32,
            DType::Q4_0 | DType::Q4_1 | DType::Q4_K | DType::IQ4_NL | DType::IQ4_XS => 0.64,
            DType::MXFP4 => 1.0,
            DType::Q3_K => 1.3,
            DType::Q2_K => 2.0,
        };
        for dtype in DType::ALL {
            let back = decode(dtype, &encode(dtype, &x));
            assert_eq!(back.len(), x.len());
            let worst = x.iter().zip(&back).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            assert!(worst <= bound(dtype), "{dtype}: {worst}");
        }
    }

    #[test]
    fn zeros_stay_zeros() {
        for dtype in DType::ALL {
            assert!(decode(dtype, &encode(dtype, &[0.0; 256])).iter().all(|v| *v == 0.0), "{dtype}");
        }
    }
}
