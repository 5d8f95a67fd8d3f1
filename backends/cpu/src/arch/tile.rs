//! The sums of the numeric law over vectors of rows, and the quantising of activations.
//!
//! The order of each sum is that of [`neuropil_device::quant`] whatever the tile: lanes, vectors and tokens are
//! outputs, and no output is ever split. The codes of 32 columns are unpacked once and used for each token of a tile.
//!
//! The functions here have no features of their own. They are inlined into the functions of an instruction set,
//! which do.

#![allow(clippy::needless_range_loop)] // sums over tokens index several arrays alike

use super::format::{FloatFormat, Format, codes as weight_codes};
use super::lanes::Lanes;
use super::passes::{Sums, VectorAt};
use super::{FloatRows, Job};
use crate::kernels::{Input, RECORD, TILE};
use crate::pack::{GROUP_ROWS, VECTOR};
use neuropil_device::quant::{ACT_BLOCK, GROUP, SLICE, add_energy, is_outlier};
use std::hint::cold_path;
use std::marker::PhantomData;

/// How far ahead of its use a weight is fetched when there are few tokens.
const AHEAD: usize = 4096;

/// Weights of the quantised format F.
pub(super) struct Quantized<F>(PhantomData<F>);

impl<F: Format> Sums for Quantized<F> {
    fn token_bytes(cols: usize) -> usize {
        cols / ACT_BLOCK * RECORD
    }

    fn input(job: &Job<'_, '_>, t: usize) -> *const u8 {
        match job.input {
            Input::Quantized(acts) => acts.tile(t).as_ptr(),
            _ => unreachable!("the entry refuses float input for quantised weights"),
        }
    }

    #[inline(always)]
    unsafe fn sums<V: Lanes, const T: usize, const N: usize>(
        w: [VectorAt; N],
        input: *const u8,
        cols: usize,
    ) -> [[V::F; T]; N] {
        // The refinements' records lie as far behind the others.
        let fine = cols / ACT_BLOCK * T * RECORD;
        // SAFETY: the loops go once through the blocks of the groups and the records of the tile.
        unsafe {
            let (mut at, mut a) = (0, input);
            let mut total = [[V::splat(0.0); T]; N];
            let mut left = cols / GROUP;
            while left > 0 {
                let mut acc = [[V::splat(0.0); T]; N];
                let slice = left.min(SLICE / GROUP);
                left -= slice;
                for _ in 0..slice / F::STEPS {
                    let mut heads = [[V::splat(0.0); 2]; N];
                    for v in 0..N {
                        heads[v] = F::head::<V>(w[v].group.add(at), w[v].r);
                    }
                    at += F::PACKED.head;
                    for _ in 0..F::STEPS {
                        for v in 0..N {
                            step::<V, F, T>(w[v].group.add(at), a, fine, w[v].r, heads[v], &mut acc[v]);
                        }
                        at += F::PACKED.step();
                        a = a.add(T * RECORD);
                    }
                }
                for v in 0..N {
                    for t in 0..T {
                        total[v][t] = V::add(total[v][t], acc[v][t]);
                    }
                }
            }
            total
        }
    }
}

/// Weights of the float type F.
pub(super) struct Floats<F>(PhantomData<F>);

impl<F: FloatFormat> Sums for Floats<F> {
    fn token_bytes(cols: usize) -> usize {
        cols * size_of::<f32>()
    }

    fn input(job: &Job<'_, '_>, t: usize) -> *const u8 {
        match job.input {
            Input::Floats(x) => x[t * job.w.cols()..].as_ptr().cast(),
            _ => unreachable!("the entry refuses quantised input for float weights"),
        }
    }

    #[inline(always)]
    unsafe fn sums<V: Lanes, const T: usize, const N: usize>(
        w: [VectorAt; N],
        input: *const u8,
        cols: usize,
    ) -> [[V::F; T]; N] {
        let x = input.cast::<f32>();
        // SAFETY: the loops go once through the columns of the groups and of the T rows of x.
        unsafe {
            let mut total = [[V::splat(0.0); T]; N];
            for start in (0..cols).step_by(SLICE) {
                let mut acc = [[V::splat(0.0); T]; N];
                for k in start..cols.min(start + SLICE) {
                    for v in 0..N {
                        let w = F::load::<V>(w[v].group.add((k * GROUP_ROWS + w[v].r) * F::BYTES));
                        for t in 0..T {
                            acc[v][t] = V::fma(w, V::splat(*x.add(t * cols + k)), acc[v][t]);
                        }
                    }
                }
                for v in 0..N {
                    for t in 0..T {
                        total[v][t] = V::add(total[v][t], acc[v][t]);
                    }
                }
            }
            total
        }
    }
}

/// 32 columns: the heart of every quantised matmul.
///
/// The refinements of a block follow the block itself, apart: so the way without them has no branch for each token.
///
/// # Safety
/// The features of V are enabled, `w` is at 32 columns of a group of format F with the block's `head`, and `a` is at
/// the record of as many columns of a tile of height T, whose refinement lies `fine` bytes behind it.
#[inline(always)]
unsafe fn step<V: Lanes, F: Format, const T: usize>(
    w: *const u8,
    a: *const u8,
    fine: usize,
    r: usize,
    head: [V::F; 2],
    acc: &mut [V::F; T],
) {
    // SAFETY: as for this function.
    unsafe {
        if T <= 4 && r == 0 {
            for line in 0..F::PACKED.step().div_ceil(VECTOR) {
                V::prefetch(w.wrapping_add(AHEAD + line * VECTOR));
            }
        }
        let c = weight_codes::<V, F>(w, r);
        let scales = F::scales::<V>(head, w, r);
        let halves = F::halves::<V>(w, r);
        for t in 0..T {
            acc[t] = add::<V, F>(&c, scales, halves, a, T, t, acc[t]);
        }
        if a.add(T * (ACT_BLOCK + 16)).cast::<u32>().read_unaligned() != 0 {
            cold_path();
            let a = a.add(fine);
            for t in 0..T {
                if scale(a, T, t) != 0.0 {
                    acc[t] = add::<V, F>(&c, scales, halves, a, T, t, acc[t]);
                }
            }
        }
    }
}

/// Adds the products of 32 columns with token t of a record of height h.
///
/// # Safety
/// The features of V are enabled, and the record has a token t of h.
#[inline(always)]
unsafe fn add<V: Lanes, F: Format>(
    c: &[V::W; 8],
    [dw, mw]: [V::F; 2],
    halves: [V::F; 2],
    record: *const u8,
    h: usize,
    t: usize,
    acc: V::F,
) -> V::F {
    // SAFETY: as for this function.
    unsafe {
        let q = record.add(t * ACT_BLOCK);
        let d_sum = record.add(h * (ACT_BLOCK + 4) + 4 * t).cast::<f32>().read_unaligned();
        let sum = record.add(h * (ACT_BLOCK + 8) + 4 * t).cast::<i32>().read_unaligned();
        let i = if F::HALVES {
            let low = record.add(h * (ACT_BLOCK + 12) + 4 * t).cast::<i32>().read_unaligned();
            let c_low = [c[0], c[1], c[2], c[3]];
            let c_high = [c[4], c[5], c[6], c[7]];
            let low_dot = dot::<V, F, 4>(&c_low, q, low);
            let high_dot = dot::<V, F, 4>(&c_high, q.add(16), sum - low);
            // Exact: each product and their sum are integers below 2^24.
            V::fma(V::to_f(high_dot), halves[1], V::mul(V::to_f(low_dot), halves[0]))
        } else {
            V::to_f(dot::<V, F, 8>(c, q, sum))
        };
        let acc = V::fma(V::mul(dw, V::splat(scale(record, h, t))), i, acc);
        if F::MIN { V::fma(mw, V::splat(d_sum), acc) } else { acc }
    }
}

/// `Σ (code − OFFSET) · q` over N steps, where the q sum to `sum`.
///
/// # Safety
/// The features of V are enabled, and `q` is good for 4 bytes for each step.
#[inline(always)]
unsafe fn dot<V: Lanes, F: Format, const N: usize>(c: &[V::W; N], q: *const u8, sum: i32) -> V::I {
    // SAFETY: as for this function.
    unsafe {
        let offset = if F::PACKED.bits == 8 && V::SIGNED_BYTES { 0 } else { F::OFFSET };
        let init = V::splat_i(-offset * sum);
        match F::PACKED.bits {
            4 => V::dot::<4, N>(c, q, init),
            5 => V::dot::<5, N>(c, q, init),
            6 => V::dot::<6, N>(c, q, init),
            _ => V::dot::<8, N>(c, q, init),
        }
    }
}

/// Quantises rows of activations into the records of a tile.
///
/// # Safety
/// The features of V are enabled, `x` is good for its rows, and `records` has `2 * x.height * x.blocks` records.
#[inline(always)]
pub(super) unsafe fn quantize<V: Lanes>(x: FloatRows, records: &mut [u8]) {
    let h = x.height;
    let (coarse, behind) = (records.as_mut_ptr(), x.blocks * h * RECORD);
    // SAFETY: each row has its blocks, and each record has a place for token t in each field.
    unsafe {
        // The largest magnitudes first: what stands out of a row is known only at its end.
        let mut energies = [0.0; TILE];
        for t in 0..h {
            for block in 0..x.blocks {
                let amax = f32::from_bits(V::max_magnitude(x.at(t, block)));
                energies[t] = add_energy(energies[t], amax);
                put_scale(coarse.add(block * h * RECORD), h, t, amax);
            }
        }
        for block in 0..x.blocks {
            let record = coarse.add(block * h * RECORD);
            let mut refined = [false; TILE];
            for t in 0..h {
                let amax = scale(record, h, t);
                refined[t] = amax.is_finite() && is_outlier(amax, energies[t], x.blocks);
                if amax.is_finite() {
                    codes::<V>(record, h, t, x.at(t, block), amax / 127.0, 127.0 / amax);
                } else {
                    record.add(t * ACT_BLOCK).write_bytes(0, ACT_BLOCK);
                    put(record, h, t, f32::NAN, 0, 0);
                }
            }
            let any = refined.contains(&true);
            for t in 0..h {
                record.add(h * (ACT_BLOCK + 16) + 4 * t).cast::<u32>().write_unaligned(u32::from(any));
                if refined[t] {
                    let d = scale(record, h, t);
                    let q = record.add(t * ACT_BLOCK).cast::<[i8; ACT_BLOCK]>().read();
                    let mut left = x.at(t, block).cast::<[f32; ACT_BLOCK]>().read();
                    left.iter_mut().zip(q).for_each(|(x, q)| *x = (-d).mul_add(f32::from(q), *x));
                    codes::<V>(record.add(behind), h, t, left.as_ptr(), d / 254.0, 254.0 / d);
                } else if any {
                    put_scale(record.add(behind), h, t, 0.0);
                }
            }
        }
    }
}

/// Writes token t's codes of 32 activations, with scale d, to a record.
///
/// # Safety
/// The features of V are enabled, `x` is good for 32 floats, and the record has a token t of h.
#[inline(always)]
unsafe fn codes<V: Lanes>(record: *mut u8, h: usize, t: usize, x: *const f32, d: f32, id: f32) {
    // SAFETY: as for this function.
    unsafe {
        let id = if id.is_finite() { id } else { 0.0 };
        let (low, high) = V::quantize(x, id, record.add(t * ACT_BLOCK));
        put(record, h, t, d, low + high, low);
    }
}

/// Writes token t's scale and sums to a record.
///
/// # Safety
/// The record has a token t of h.
#[inline(always)]
unsafe fn put(record: *mut u8, h: usize, t: usize, d: f32, sum: i32, low: i32) {
    // SAFETY: as for this function.
    unsafe {
        put_scale(record, h, t, d);
        record.add(h * (ACT_BLOCK + 4) + 4 * t).cast::<f32>().write_unaligned(d * sum as f32);
        record.add(h * (ACT_BLOCK + 8) + 4 * t).cast::<i32>().write_unaligned(sum);
        record.add(h * (ACT_BLOCK + 12) + 4 * t).cast::<i32>().write_unaligned(low);
    }
}

/// Writes token t's scale to a record.
///
/// # Safety
/// The record has a token t of h.
#[inline(always)]
unsafe fn put_scale(record: *mut u8, h: usize, t: usize, d: f32) {
    // SAFETY: as for this function.
    unsafe { record.add(h * ACT_BLOCK + 4 * t).cast::<f32>().write_unaligned(d) }
}

/// Token t's scale in a record.
///
/// # Safety
/// The record has a token t of h.
#[inline(always)]
unsafe fn scale(record: *const u8, h: usize, t: usize) -> f32 {
    // SAFETY: as for this function.
    unsafe { record.add(h * ACT_BLOCK + 4 * t).cast::<f32>().read_unaligned() }
}
