//! Quantising to the types that are expanded (see [`super::expanded`]).
//!
//! MXFP4 has the codes of ggml. The others round each group to its own range and search no further.

use super::quantize::{extreme, inverse, nibbles, range};
use super::{BlockIq4Nl, BlockIq4Xs, BlockMxfp4, BlockQ2K, BlockQ3K, GROUP, Half, IQ4_VALUES, MXFP4_VALUES};

/// The first code whose value, times `d`, is nearest to x.
fn nearest(table: &[i8; 16], d: f32, x: f32) -> u8 {
    let (mut best, mut least) = (0, f32::INFINITY);
    for (code, value) in (0..).zip(table) {
        let error = (d * f32::from(*value) - x).abs();
        if error < least {
            (best, least) = (code, error);
        }
    }
    best
}

fn places(x: &[f32; GROUP], table: &[i8; 16], d: f32) -> [u8; 16] {
    nibbles(&x.map(|x| nearest(table, d, x)))
}

/// Codes of 2 bits as they lie in a block.
fn two_bits(code: impl Fn(usize) -> u8) -> [u8; 64] {
    std::array::from_fn(|i| {
        let first = i / GROUP * 128 + i % GROUP;
        (0..4).fold(0, |bits, g| bits | ((code(first + GROUP * g) & 3) << (2 * g)))
    })
}

pub(super) fn q2_k(x: &[f32; 256]) -> BlockQ2K {
    let (parts, _) = x.as_chunks::<16>();
    let ranges: [(f32, f32); 16] = std::array::from_fn(|i| {
        let (min, max) = range(&parts[i]);
        (min.min(0.0), max)
    });
    let scale = |(min, max): (f32, f32)| (max - min) / 3.0;
    let d = Half::from_f32(ranges.iter().fold(0.0, |m, &r| scale(r).max(m)) / 15.0);
    let dmin = Half::from_f32(ranges.iter().fold(0.0, |m: f32, r| m.max(-r.0)) / 15.0);
    let (d32, dmin32) = (d.to_f32(), dmin.to_f32());
    let scales = ranges.map(|r| {
        let sc = ((scale(r) * inverse(d32)).round() as u8).min(15);
        let mn = ((-r.0 * inverse(dmin32)).round() as u8).min(15);
        sc | mn << 4
    });
    let qs = two_bits(|k| {
        let (sc, mn) = (scales[k / 16] & 15, scales[k / 16] >> 4);
        let id = inverse(d32 * f32::from(sc));
        (((x[k] + dmin32 * f32::from(mn)) * id + 0.5) as u8).min(3)
    });
    BlockQ2K { scales, qs, d, dmin }
}

pub(super) fn q3_k(x: &[f32; 256]) -> BlockQ3K {
    let (parts, _) = x.as_chunks::<16>();
    let wanted: [f32; 16] = std::array::from_fn(|i| extreme(&parts[i]) / -4.0);
    let d = Half::from_f32(extreme(&wanted) / -32.0);
    let id = inverse(d.to_f32());
    let steps = wanted.map(|s| ((s * id).round() as i8).clamp(-32, 31));
    let mut scales = [0; 12];
    for (i, step) in steps.iter().enumerate() {
        let bits = (step + 32) as u8;
        scales[i % 8] |= (bits & 15) << (i / 8 * 4);
        scales[8 + i % 4] |= bits >> 4 << (i / 4 * 2);
    }
    let code = |k: usize| {
        let scale = inverse(d.to_f32() * f32::from(steps[k / 16]));
        ((x[k] * scale + 4.5) as u8).min(7)
    };
    let hmask = std::array::from_fn(|i| (0..8).fold(0, |bits, g| bits | (code(i + GROUP * g) >> 2) << g));
    BlockQ3K { hmask, qs: two_bits(code), scales, d }
}

/// A scale that gives the value furthest from zero the widest code.
fn iq4_scale(x: &[f32; GROUP]) -> f32 {
    extreme(x) / f32::from(IQ4_VALUES[0])
}

pub(super) fn iq4_nl(x: &[f32; GROUP]) -> BlockIq4Nl {
    let d = Half::from_f32(iq4_scale(x));
    BlockIq4Nl { d, qs: places(x, &IQ4_VALUES, d.to_f32()) }
}

pub(super) fn iq4_xs(x: &[f32; 256]) -> BlockIq4Xs {
    let (groups, _) = x.as_chunks::<GROUP>();
    let wanted: [f32; 8] = std::array::from_fn(|g| iq4_scale(&groups[g]));
    let d = Half::from_f32(extreme(&wanted) / -32.0);
    let mut block = BlockIq4Xs { d, scales_h: [0; 2], scales_l: [0; 4], qs: [0; 128] };
    let (qs, _) = block.qs.as_chunks_mut::<16>();
    for (g, (x, qs)) in groups.iter().zip(qs).enumerate() {
        let step = ((wanted[g] * inverse(d.to_f32())).round() as i8).clamp(-32, 31);
        let bits = (step + 32) as u8;
        block.scales_l[g / 2] |= (bits & 15) << (g % 2 * 4);
        block.scales_h[g / 4] |= bits >> 4 << (g % 4 * 2);
        *qs = places(x, &IQ4_VALUES, d.to_f32() * f32::from(step));
    }
    block
}

pub(super) fn mxfp4(x: &[f32; GROUP]) -> BlockMxfp4 {
    // The largest value gets the exponent of 4, which the widest codes have.
    let exponent = extreme(x).abs().to_bits() >> 23;
    let mut block = BlockMxfp4 { e: exponent.saturating_sub(2) as u8, qs: [0; 16] };
    block.qs = places(x, &MXFP4_VALUES, block.scale());
    block
}
