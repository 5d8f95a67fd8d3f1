//! The kernels: the numeric law over vectors of rows, for tiles of 1, 2, 4 or 8 tokens.
//!
//! A tile takes one group of 16 rows through all of K. The codes of 32 columns are unpacked once and used for each
//! token of the tile. The order of each sum is that of [`neuropil_device::quant`] whatever the tile: lanes and tokens
//! are outputs, and no output is ever split.
//!
//! The functions here have no features of their own. They are inlined into the functions of an instruction set,
//! which do.

use super::format::{FloatFormat, Format, codes};
use super::lanes::Lanes;
use super::{Job, Rows};
use crate::kernels::{Input, RECORD, TILE, tile_height};
use crate::pack::GROUP_ROWS;
use neuropil_device::quant::{ACT_BLOCK, GROUP, SLICE};

/// Bytes of input that a pass over the weights may take, so that they stay in a core's cache.
const CACHED_INPUT: usize = 512 << 10;

/// Tokens in a pass over the weights, when a token has `bytes` of input.
fn pass_tokens(bytes: usize) -> usize {
    (CACHED_INPUT / bytes.max(1) / TILE * TILE).clamp(TILE, 1024)
}

/// Where a tile writes: row 0 of token 0 in `y`, and only the first `rows` rows.
struct Out {
    y: *mut f32,
    stride: usize,
    rows: usize,
    accumulate: bool,
}

impl Out {
    /// Writes the vector of rows `r..r + LANES` of a token.
    ///
    /// # Safety
    /// `y` is good for `rows` rows of this token; the features of V are enabled.
    #[inline(always)]
    unsafe fn put<V: Lanes>(&self, token: usize, r: usize, total: V::F) {
        // SAFETY: the vector is written whole only when all its rows are inside; else row by row.
        unsafe {
            let y = self.y.add(token * self.stride + r);
            if r + V::LANES <= self.rows {
                let total = if self.accumulate { V::add(V::load_f32(y.cast()), total) } else { total };
                V::store(y, total);
            } else {
                let mut rows = [0.0; GROUP_ROWS];
                V::store(rows.as_mut_ptr(), total);
                for (i, &total) in rows.iter().enumerate().take(self.rows - r) {
                    let y = y.add(i);
                    *y = if self.accumulate { *y + total } else { total };
                }
            }
        }
    }
}

/// Runs a job with a quantised weight.
///
/// # Safety
/// The features of V are enabled, and the weight of the job has format F.
#[inline(always)]
pub(super) unsafe fn quantized<V: Lanes, F: Format>(job: &mut Job<'_, '_>) {
    let Input::Quantized(acts) = job.input else { return };
    let (tokens, blocks) = (job.out.tokens(), job.w.cols() / GROUP);
    let pass = pass_tokens(blocks * RECORD);
    for first in (0..tokens).step_by(pass) {
        for group in job.out.groups() {
            let w = &job.w.bytes()[group * job.w.group_bytes()..][..job.w.group_bytes()];
            let mut t = first;
            while t < tokens.min(first + pass) {
                let height = tile_height(t, tokens);
                let out = out(job, group, t);
                let (w, a) = (w.as_ptr(), acts.tile(t).as_ptr());
                // SAFETY: the weight has `blocks` groups of 32 columns in format F, the tile as many records of
                // this height, and the output these rows and tokens.
                unsafe {
                    match height {
                        8 => quantized_tile::<V, F, 8>(w, a, blocks, &out),
                        4 => quantized_tile::<V, F, 4>(w, a, blocks, &out),
                        2 => quantized_tile::<V, F, 2>(w, a, blocks, &out),
                        _ => quantized_tile::<V, F, 1>(w, a, blocks, &out),
                    }
                }
                t += height;
            }
        }
    }
}

/// The output of a group for the tile at token `t`.
fn out(job: &mut Job<'_, '_>, group: usize, t: usize) -> Out {
    let row = group * GROUP_ROWS;
    let rows = (job.out.rows().end - row).min(GROUP_ROWS);
    Out { y: job.out.at(t, row), stride: job.out.stride(), rows, accumulate: job.accumulate }
}

#[inline(always)]
unsafe fn quantized_tile<V: Lanes, F: Format, const T: usize>(
    w: *const u8,
    a: *const u8,
    blocks: usize,
    out: &Out,
) {
    let mut r = 0;
    while r < out.rows {
        // SAFETY: r < 16 and a multiple of LANES, so every vector is inside the group; see `quantized`.
        unsafe {
            let (mut w, mut a) = (w, a);
            let mut total = [V::splat(0.0); T];
            let mut left = blocks;
            while left > 0 {
                let mut acc = [V::splat(0.0); T];
                let slice = left.min(SLICE / GROUP);
                left -= slice;
                for _ in 0..slice / F::STEPS {
                    let head = F::head::<V>(w, r);
                    w = w.add(F::PACKED.head);
                    for _ in 0..F::STEPS {
                        step::<V, F, T>(w, a, r, head, &mut acc);
                        w = w.add(F::PACKED.step());
                        a = a.add(T * RECORD);
                    }
                }
                for t in 0..T {
                    total[t] = V::add(total[t], acc[t]);
                }
            }
            for (t, total) in total.into_iter().enumerate() {
                out.put::<V>(t, r, total);
            }
        }
        r += V::LANES;
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

/// Runs a job with a weight of plain floats.
///
/// # Safety
/// The features of V are enabled, and the weight of the job has type F.
#[inline(always)]
pub(super) unsafe fn floats<V: Lanes, F: FloatFormat>(job: &mut Job<'_, '_>) {
    let Input::Floats(x) = job.input else { return };
    let (tokens, cols) = (job.out.tokens(), job.w.cols());
    let pass = pass_tokens(cols * 4);
    for first in (0..tokens).step_by(pass) {
        for group in job.out.groups() {
            let w = &job.w.bytes()[group * job.w.group_bytes()..][..job.w.group_bytes()];
            let mut t = first;
            while t < tokens.min(first + pass) {
                let height = tile_height(t, tokens);
                let out = out(job, group, t);
                let (w, x) = (w.as_ptr(), x[t * cols..][..height * cols].as_ptr());
                // SAFETY: the weight has `cols` columns of type F, x as many in `height` rows, and the output
                // these rows and tokens.
                unsafe {
                    match height {
                        8 => float_tile::<V, F, 8>(w, x, cols, &out),
                        4 => float_tile::<V, F, 4>(w, x, cols, &out),
                        2 => float_tile::<V, F, 2>(w, x, cols, &out),
                        _ => float_tile::<V, F, 1>(w, x, cols, &out),
                    }
                }
                t += height;
            }
        }
    }
}

#[inline(always)]
unsafe fn float_tile<V: Lanes, F: FloatFormat, const T: usize>(
    w: *const u8,
    x: *const f32,
    cols: usize,
    out: &Out,
) {
    let mut r = 0;
    while r < out.rows {
        // SAFETY: r < 16 and a multiple of LANES, so every vector is inside the group; see `floats`.
        unsafe {
            let mut total = [V::splat(0.0); T];
            for start in (0..cols).step_by(SLICE) {
                let mut acc = [V::splat(0.0); T];
                for k in start..cols.min(start + SLICE) {
                    let w = F::load::<V>(w.add((k * GROUP_ROWS + r) * F::BYTES));
                    for t in 0..T {
                        acc[t] = V::fma(w, V::splat(*x.add(t * cols + k)), acc[t]);
                    }
                }
                for t in 0..T {
                    total[t] = V::add(total[t], acc[t]);
                }
            }
            for (t, total) in total.into_iter().enumerate() {
                out.put::<V>(t, r, total);
            }
        }
        r += V::LANES;
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
