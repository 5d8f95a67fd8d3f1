//! The sums of the numeric law over vectors of rows, and the quantising of activations.
//!
//! The order of each sum is that of [`neuropil_device::quant`] whatever the tile: lanes, vectors and tokens are
//! outputs, and no output is ever split. The codes of 32 columns are unpacked once and used for each token of a tile.
//!
//! The functions here have no features of their own. They are inlined into the functions of an instruction set,
//! which do.

#![allow(clippy::needless_range_loop)] // sums over tokens index several arrays alike

use super::format::{FloatFormat, Format, codes};
use super::lanes::Lanes;
use super::rows::{Sums, VectorAt};
use super::{Job, Rows};
use crate::kernels::{Input, RECORD};
use crate::pack::{GROUP_ROWS, VECTOR};
use neuropil_device::quant::{ACT_BLOCK, GROUP, SLICE};
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
            Input::Floats(_) => unreachable!("the entry refuses float input for quantised weights"),
        }
    }

    #[inline(always)]
    unsafe fn sums<V: Lanes, const T: usize, const N: usize>(
        w: [VectorAt; N],
        input: *const u8,
        cols: usize,
    ) -> [[V::F; T]; N] {
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
                            step::<V, F, T>(w[v].group.add(at), a, w[v].r, heads[v], &mut acc[v]);
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
            Input::Quantized(_) => unreachable!("the entry refuses quantised input for float weights"),
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
#[inline(always)]
unsafe fn step<V: Lanes, F: Format, const T: usize>(
    w: *const u8,
    a: *const u8,
    r: usize,
    head: [V::F; 2],
    acc: &mut [V::F; T],
) {
    // SAFETY: w is at 32 columns of a group and a at the record of as many columns of a tile of height T.
    unsafe {
        if T <= 4 && r == 0 {
            for line in 0..F::PACKED.step().div_ceil(VECTOR) {
                V::prefetch(w.wrapping_add(AHEAD + line * VECTOR));
            }
        }
        let c = codes::<V, F>(w, r);
        let [dw, mw] = F::scales::<V>(head, w, r);
        let halves = F::halves::<V>(w, r);
        for t in 0..T {
            let q = a.add(t * ACT_BLOCK);
            let d = a.add(T * ACT_BLOCK + 4 * t).cast::<f32>().read_unaligned();
            let d_sum = a.add(T * (ACT_BLOCK + 4) + 4 * t).cast::<f32>().read_unaligned();
            let sum = a.add(T * (ACT_BLOCK + 8) + 4 * t).cast::<i32>().read_unaligned();
            let i = if F::HALVES {
                let low = a.add(T * (ACT_BLOCK + 12) + 4 * t).cast::<i32>().read_unaligned();
                let c_low = [c[0], c[1], c[2], c[3]];
                let c_high = [c[4], c[5], c[6], c[7]];
                let low_dot = dot::<V, F, 4>(&c_low, q, low);
                let high_dot = dot::<V, F, 4>(&c_high, q.add(16), sum - low);
                // Exact: each product and their sum are integers below 2^24.
                V::fma(V::to_f(high_dot), halves[1], V::mul(V::to_f(low_dot), halves[0]))
            } else {
                V::to_f(dot::<V, F, 8>(&c, q, sum))
            };
            acc[t] = V::fma(V::mul(dw, V::splat(d)), i, acc[t]);
            if F::MIN {
                acc[t] = V::fma(mw, V::splat(d_sum), acc[t]);
            }
        }
    }
}

/// `Σ (code − OFFSET) · q` over N steps, where the q sum to `sum`.
#[inline(always)]
unsafe fn dot<V: Lanes, F: Format, const N: usize>(c: &[V::W; N], q: *const u8, sum: i32) -> V::I {
    // SAFETY: as for `step`; q is good for 4 bytes for each step.
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

/// Quantises activations into the records of a tile.
///
/// # Safety
/// The features of V are enabled, `x` is good for its rows, and `records` has `x.height * x.blocks` records.
#[inline(always)]
pub(super) unsafe fn quantize<V: Lanes>(x: Rows, records: &mut [u8]) {
    let (h, out) = (x.height, records.as_mut_ptr());
    for block in 0..x.blocks {
        for t in 0..h {
            // SAFETY: row t has this block, and the record of the block has a place for token t in each field.
            unsafe {
                let x = x.x.add(t * x.stride + block * ACT_BLOCK);
                let record = out.add(block * h * RECORD);
                let mut d = f32::NAN;
                let amax = f32::from_bits(V::max_magnitude(x));
                let q = record.add(t * ACT_BLOCK);
                let (mut low, mut high) = (0, 0);
                if amax.is_finite() {
                    d = amax / 127.0;
                    let id = 127.0 / amax;
                    (low, high) = V::quantize(x, if id.is_finite() { id } else { 0.0 }, q);
                } else {
                    q.write_bytes(0, ACT_BLOCK);
                }
                let sum = low + high;
                record.add(h * ACT_BLOCK + 4 * t).cast::<f32>().write_unaligned(d);
                record.add(h * (ACT_BLOCK + 4) + 4 * t).cast::<f32>().write_unaligned(d * sum as f32);
                record.add(h * (ACT_BLOCK + 8) + 4 * t).cast::<i32>().write_unaligned(sum);
                record.add(h * (ACT_BLOCK + 12) + 4 * t).cast::<i32>().write_unaligned(low);
            }
        }
    }
}
