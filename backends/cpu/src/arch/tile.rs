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
use crate::kernels::{Input, RECORD, TILE, codes_at, eights, field, tile_height};
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
            Input::Quantized(acts) => {
                let before = job.w.first_col() / ACT_BLOCK * tile_height(t, acts.tokens()) * RECORD;
                acts.tile(t)[before..].as_ptr()
            }
            _ => unreachable!("the entry refuses float input for quantised weights"),
        }
    }

    #[inline(always)]
    unsafe fn sums<V: Lanes, const T: usize, const N: usize>(
        w: [VectorAt; N],
        input: *const u8,
        cols: usize,
        pitch: usize,
    ) -> [[V::F; T]; N] {
        // The refinements' records lie behind those of all columns.
        let fine = pitch / ACT_BLOCK * T * RECORD;
        // A single slice lies in the cache; what lies behind it is not a weight.
        let from_memory = cols > SLICE;
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
                            step::<V, F, T>(
                                w[v].group.add(at),
                                a,
                                w[v].r,
                                heads[v],
                                from_memory,
                                &mut acc[v],
                            );
                        }
                        if a.add(T * field::FINE).cast::<u32>().read_unaligned() != 0 {
                            cold_path();
                            for v in 0..N {
                                let w = VectorAt { group: w[v].group.add(at), r: w[v].r };
                                refine::<V, F, T>(w, a.add(fine), heads[v], &mut acc[v]);
                            }
                        }
                        at += F::PACKED.step();
                        a = V::in_register(a.add(T * RECORD));
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
    const PAIRS: bool = true;

    fn token_bytes(cols: usize) -> usize {
        cols * size_of::<f32>()
    }

    fn input(job: &Job<'_, '_>, t: usize) -> *const u8 {
        match job.input {
            Input::Floats(x) => x[t * job.pitch + job.w.first_col()..].as_ptr().cast(),
            _ => unreachable!("the entry refuses quantised input for float weights"),
        }
    }

    #[inline(always)]
    unsafe fn sums<V: Lanes, const T: usize, const N: usize>(
        w: [VectorAt; N],
        input: *const u8,
        cols: usize,
        pitch: usize,
    ) -> [[V::F; T]; N] {
        let x = input.cast::<f32>();
        // SAFETY: the loops go once through the columns of the groups and of the T rows of x.
        unsafe {
            let mut total = [[V::splat(0.0); T]; N];
            for start in (0..cols).step_by(SLICE) {
                let mut acc = [[V::splat(0.0); T]; N];
                let end = cols.min(start + SLICE);
                let single = if V::FOURS { start + (end - start) / 4 * 4 } else { start };
                for k in (start..single).step_by(4) {
                    for v in 0..N {
                        let w = [0, 1, 2, 3].map(|i| {
                            F::load::<V>(w[v].group.add(((k + i) * GROUP_ROWS + w[v].r) * F::BYTES))
                        });
                        for t in 0..T {
                            acc[v][t] = V::fma_four(&w, x.add(t * pitch + k), acc[v][t]);
                        }
                    }
                }
                for k in single..end {
                    let w = w.map(|w| F::load::<V>(w.group.add((k * GROUP_ROWS + w.r) * F::BYTES)));
                    for t in 0..T {
                        let x = V::splat(*x.add(t * pitch + k));
                        for v in 0..N {
                            acc[v][t] = V::fma(w[v], x, acc[v][t]);
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
/// # Safety
/// The features of V are enabled, `w` is at 32 columns of a group of format F with the block's `head`, and `a` is at
/// the record of as many columns of a tile of height T.
#[inline(always)]
unsafe fn step<V: Lanes, F: Format, const T: usize>(
    w: *const u8,
    a: *const u8,
    r: usize,
    head: [V::F; 2],
    from_memory: bool,
    acc: &mut [V::F; T],
) {
    // SAFETY: as for this function.
    unsafe {
        if T <= 4 && r == 0 && from_memory {
            for line in 0..F::PACKED.step().div_ceil(VECTOR) {
                V::prefetch(w.wrapping_add(AHEAD + line * VECTOR));
            }
        }
        let c = weight_codes::<V, F>(w, r);
        let scales = F::scales::<V>(head, w, r);
        let halves = F::halves::<V>(w, r);
        if V::BY_LANE && T > 1 {
            // Not a loop: the sums must stay in registers.
            add_pair::<V, F, T, 0>(&c, scales, halves, a, acc);
            if T > 2 {
                add_pair::<V, F, T, 2>(&c, scales, halves, a, acc);
            }
            if T > 4 {
                add_pair::<V, F, T, 4>(&c, scales, halves, a, acc);
                add_pair::<V, F, T, 6>(&c, scales, halves, a, acc);
            }
        } else {
            for t in 0..T {
                acc[t] = add::<V, F, T>(&c, scales, halves, a, t, acc[t]);
            }
        }
    }
}

/// The refinements of 32 columns. They follow the block itself, apart and with weights read again: so the way without
/// them has no branch for each token and keeps nothing for them.
///
/// # Safety
/// As for [`step`], with `a` at the refinements.
#[inline(always)]
unsafe fn refine<V: Lanes, F: Format, const T: usize>(
    w: VectorAt,
    a: *const u8,
    head: [V::F; 2],
    acc: &mut [V::F; T],
) {
    // SAFETY: as for this function.
    unsafe {
        let c = weight_codes::<V, F>(w.group, w.r);
        let scales = F::scales::<V>(head, w.group, w.r);
        let halves = F::halves::<V>(w.group, w.r);
        if V::BY_LANE && T > 1 {
            refine_pair::<V, F, T, 0>(&c, scales, halves, a, acc);
            if T > 2 {
                refine_pair::<V, F, T, 2>(&c, scales, halves, a, acc);
            }
            if T > 4 {
                refine_pair::<V, F, T, 4>(&c, scales, halves, a, acc);
                refine_pair::<V, F, T, 6>(&c, scales, halves, a, acc);
            }
        } else {
            for t in 0..T {
                if scale(a, T, t) != 0.0 {
                    acc[t] = add::<V, F, T>(&c, scales, halves, a, t, acc[t]);
                }
            }
        }
    }
}

/// [`add_pair`] for those of the two tokens that are refined.
///
/// # Safety
/// As for [`add_pair`], with a record of refinements.
#[inline(always)]
unsafe fn refine_pair<V: Lanes, F: Format, const T: usize, const AT: usize>(
    c: &[V::W; 8],
    scales: [V::F; 2],
    halves: [V::F; 2],
    record: *const u8,
    acc: &mut [V::F; T],
) {
    let before = [acc[AT], acc[AT + 1]];
    // SAFETY: as for this function.
    unsafe {
        let [first, second] = [scale(record, T, AT) != 0.0, scale(record, T, AT + 1) != 0.0];
        if first || second {
            add_pair::<V, F, T, AT>(c, scales, halves, record, acc);
            acc[AT] = if first { acc[AT] } else { before[0] };
            acc[AT + 1] = if second { acc[AT + 1] } else { before[1] };
        }
    }
}

/// Adds the products of 32 columns with token t of a record of height T.
///
/// # Safety
/// The features of V are enabled, and the record has a token t of T.
#[inline(always)]
unsafe fn add<V: Lanes, F: Format, const T: usize>(
    c: &[V::W; 8],
    [dw, mw]: [V::F; 2],
    halves: [V::F; 2],
    record: *const u8,
    t: usize,
    acc: V::F,
) -> V::F {
    // SAFETY: as for this function.
    unsafe {
        let q = record.add(codes_at(T, t));
        let i = if F::HALVES {
            let [low, high] = [0, 1].map(|half| start::<V, F>(record, T, t, half));
            let c_low = [c[0], c[1], c[2], c[3]];
            let c_high = [c[4], c[5], c[6], c[7]];
            let low_dot = dot::<V, F, 4, T>(&c_low, q, low);
            let high_dot = dot::<V, F, 4, T>(&c_high, q.add(2 * eights(T)), high);
            // Exact: each product and their sum are integers below 2^24.
            V::fma(V::to_f(high_dot), halves[1], V::mul(V::to_f(low_dot), halves[0]))
        } else {
            V::to_f(dot::<V, F, 8, T>(c, q, start::<V, F>(record, T, t, 0)))
        };
        let acc = V::fma(V::mul(dw, V::splat(scale(record, T, t))), i, acc);
        let d_sum = record.add(T * field::SCALED_SUM + 4 * t).cast::<f32>().read_unaligned();
        if F::MIN { V::fma(mw, V::splat(d_sum), acc) } else { acc }
    }
}

/// The same for the two tokens from `AT` on, which is even.
///
/// # Safety
/// The features of V are enabled, and the record has the tokens.
#[inline(always)]
unsafe fn add_pair<V: Lanes, F: Format, const T: usize, const AT: usize>(
    c: &[V::W; 8],
    [dw, mw]: [V::F; 2],
    halves: [V::F; 2],
    record: *const u8,
    acc: &mut [V::F; T],
) {
    // SAFETY: as for this function.
    unsafe {
        let q = record.add(codes_at(T, AT));
        let i = if F::HALVES {
            let [low, high] = [0, 1].map(|half| start::<V, F>(record, T, AT, half));
            let low = dot_pair::<V, F, 4>(&[c[0], c[1], c[2], c[3]], q, low);
            let high = dot_pair::<V, F, 4>(&[c[4], c[5], c[6], c[7]], q.add(ACT_BLOCK), high);
            // Exact, as above.
            let sum = |t: usize| V::fma(V::to_f(high[t]), halves[1], V::mul(V::to_f(low[t]), halves[0]));
            [sum(0), sum(1)]
        } else {
            dot_pair::<V, F, 8>(c, q, start::<V, F>(record, T, AT, 0)).map(|i| V::to_f(i))
        };
        let d = V::mul_pair(dw, record.add(T * field::SCALE + 4 * AT).cast());
        let sums = [V::fma(d[0], i[0], acc[AT]), V::fma(d[1], i[1], acc[AT + 1])];
        let d_sum = record.add(T * field::SCALED_SUM + 4 * AT).cast();
        [acc[AT], acc[AT + 1]] = if F::MIN { V::fma_pair(mw, d_sum, sums) } else { sums };
    }
}

/// Where the number is that the products of token t start from, in the second half or else from the first on; none
/// where that is 0.
///
/// # Safety
/// The record has a token t of h.
#[inline(always)]
unsafe fn start<V: Lanes, F: Format>(
    record: *const u8,
    h: usize,
    t: usize,
    half: usize,
) -> Option<*const i32> {
    if F::PACKED.bits == 8 && V::SIGNED_BYTES {
        return None;
    }
    // SAFETY: as for this function.
    F::START.map(|n| unsafe { record.add(h * (field::STARTS + 4 * (n + half)) + 4 * t).cast() })
}

/// `start + Σ code · q` over N steps of one token of a record of height T.
///
/// # Safety
/// The features of V are enabled, and `q` is good for the codes of the steps.
#[inline(always)]
unsafe fn dot<V: Lanes, F: Format, const N: usize, const T: usize>(
    c: &[V::W; N],
    q: *const u8,
    start: Option<*const i32>,
) -> V::I {
    // SAFETY: as for this function.
    unsafe {
        let init = V::splat_i(start.map_or(0, |start| start.read_unaligned()));
        match (F::PACKED.bits, T) {
            (4, 1) => V::dot::<4, N, 8>(c, q, init),
            (4, _) => V::dot::<4, N, 16>(c, q, init),
            (5, 1) => V::dot::<5, N, 8>(c, q, init),
            (5, _) => V::dot::<5, N, 16>(c, q, init),
            (6, 1) => V::dot::<6, N, 8>(c, q, init),
            (6, _) => V::dot::<6, N, 16>(c, q, init),
            (_, 1) => V::dot::<8, N, 8>(c, q, init),
            (_, _) => V::dot::<8, N, 16>(c, q, init),
        }
    }
}

/// The same for a pair of tokens.
///
/// # Safety
/// As for [`dot`], with the codes and sums of a pair.
#[inline(always)]
unsafe fn dot_pair<V: Lanes, F: Format, const N: usize>(
    c: &[V::W; N],
    q: *const u8,
    start: Option<*const i32>,
) -> [V::I; 2] {
    // SAFETY: as for this function.
    unsafe {
        match F::PACKED.bits {
            4 => V::dot_pair::<4, N>(c, q, start),
            5 => V::dot_pair::<5, N>(c, q, start),
            6 => V::dot_pair::<6, N>(c, q, start),
            _ => V::dot_pair::<8, N>(c, q, start),
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
            let mut codes = [[0; ACT_BLOCK]; TILE];
            for t in 0..h {
                let amax = scale(record, h, t);
                refined[t] = amax.is_finite() && is_outlier(amax, energies[t], x.blocks);
                if amax.is_finite() {
                    codes[t] = quantize_codes::<V>(record, h, t, x.at(t, block), amax / 127.0, 127.0 / amax);
                } else {
                    put_codes(record, h, t, [0; ACT_BLOCK]);
                    put(record, h, t, f32::NAN, 0, 0);
                }
            }
            let any = refined.contains(&true);
            for t in 0..h {
                record.add(h * field::FINE + 4 * t).cast::<u32>().write_unaligned(u32::from(any));
                if refined[t] {
                    let d = scale(record, h, t);
                    let mut left = x.at(t, block).cast::<[f32; ACT_BLOCK]>().read();
                    left.iter_mut().zip(codes[t]).for_each(|(x, q)| *x = (-d).mul_add(f32::from(q), *x));
                    quantize_codes::<V>(record.add(behind), h, t, left.as_ptr(), d / 254.0, 254.0 / d);
                } else if any {
                    put_scale(record.add(behind), h, t, 0.0);
                }
            }
        }
    }
}

/// Writes token t's codes of 32 activations, with scale d, to a record, and returns them.
///
/// # Safety
/// The features of V are enabled, `x` is good for 32 floats, and the record has a token t of h.
#[inline(always)]
unsafe fn quantize_codes<V: Lanes>(
    record: *mut u8,
    h: usize,
    t: usize,
    x: *const f32,
    d: f32,
    id: f32,
) -> [i8; ACT_BLOCK] {
    // SAFETY: as for this function.
    unsafe {
        let id = if id.is_finite() { id } else { 0.0 };
        let mut codes = [0; ACT_BLOCK];
        let (low, high) = V::quantize(x, id, codes.as_mut_ptr().cast());
        put_codes(record, h, t, codes);
        put(record, h, t, d, low + high, low);
        codes
    }
}

/// Writes token t's codes to a record.
///
/// # Safety
/// The record has a token t of h.
#[inline(always)]
unsafe fn put_codes(record: *mut u8, h: usize, t: usize, codes: [i8; ACT_BLOCK]) {
    for (n, eight) in codes.as_chunks::<8>().0.iter().enumerate() {
        // SAFETY: as for this function.
        unsafe { record.add(codes_at(h, t) + n * eights(h)).cast::<[i8; 8]>().write(*eight) };
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
        record.add(h * field::SCALED_SUM + 4 * t).cast::<f32>().write_unaligned(d * sum as f32);
        let high = sum - low;
        for (n, start) in [-8 * sum, -16 * sum, -128 * sum, -32 * low, -32 * high].into_iter().enumerate() {
            record.add(h * (field::STARTS + 4 * n) + 4 * t).cast::<i32>().write_unaligned(start);
        }
    }
}

/// Writes token t's scale to a record.
///
/// # Safety
/// The record has a token t of h.
#[inline(always)]
unsafe fn put_scale(record: *mut u8, h: usize, t: usize, d: f32) {
    // SAFETY: as for this function.
    unsafe { record.add(h * field::SCALE + 4 * t).cast::<f32>().write_unaligned(d) }
}

/// Token t's scale in a record.
///
/// # Safety
/// The record has a token t of h.
#[inline(always)]
unsafe fn scale(record: *const u8, h: usize, t: usize) -> f32 {
    // SAFETY: as for this function.
    unsafe { record.add(h * field::SCALE + 4 * t).cast::<f32>().read_unaligned() }
}
