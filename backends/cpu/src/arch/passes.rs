//! Which rows and tokens are computed together.
//!
//! A pass takes all row groups for as many tokens as a core's cache holds. Within it a tile of 4 or 8 tokens takes
//! one vector of rows at a time, or two of floats where the registers hold their sums. With 1 or 2 tokens, reading the
//! weights is the work: several vectors of rows side by side make several streams, which memory serves faster than one,
//! and hide the latency of the additions.

use super::Job;
use super::lanes::Lanes;
use crate::kernels::{TILE, tile_height};
use crate::pack::GROUP_ROWS;

/// Bytes of input that a pass over the weights may take, so that they stay in a core's cache.
const CACHED_INPUT: usize = 512 << 10;
/// Vectors of rows that go side by side with one token.
const STREAMS: usize = 4;

/// Where the rows of a vector begin: their group, and the first row in it.
#[derive(Clone, Copy)]
pub(super) struct VectorAt {
    pub group: *const u8,
    pub r: usize,
}

/// The sums of a kind of weight.
pub(super) trait Sums {
    /// Whether two vectors of rows go side by side with 4 or 8 tokens, where the registers hold their sums.
    const PAIRS: bool = false;
    /// Bytes of input of one token.
    fn token_bytes(cols: usize) -> usize;
    /// The input of the tile that begins at token `t`.
    fn input(job: &Job<'_, '_>, t: usize) -> *const u8;
    /// The sums of N vectors of rows for T tokens.
    ///
    /// # Safety
    /// The features of V are enabled, `w` are vectors of groups of this kind with `cols` columns, and `input` is that
    /// of a tile of T tokens of `pitch` columns, at the first of `cols` columns of it.
    unsafe fn sums<V: Lanes, const T: usize, const N: usize>(
        w: [VectorAt; N],
        input: *const u8,
        cols: usize,
        pitch: usize,
    ) -> [[V::F; T]; N];
}

/// Runs a job.
///
/// # Safety
/// The features of V are enabled; the weight and the input of the job are of the kind S.
#[inline(always)]
pub(super) unsafe fn run<V: Lanes, S: Sums>(job: &mut Job<'_, '_>) {
    let tokens = job.out.tokens();
    let groups = job.out.groups();
    let pass = (CACHED_INPUT / S::token_bytes(job.w.cols()).max(1) / TILE * TILE).clamp(TILE, 1024);
    for first in (0..tokens).step_by(pass) {
        let last = tokens.min(first + pass);
        let (mut row, end) = (groups.start * GROUP_ROWS, groups.end * GROUP_ROWS);
        while row < end {
            let vectors = if row + STREAMS * V::LANES <= end { STREAMS } else { 1 };
            let mut narrow = first;
            // SAFETY: the rows are inside the groups of the job, the tiles inside its tokens.
            unsafe {
                let together = if S::PAIRS && V::MANY && vectors == STREAMS { 2 } else { 1 };
                for v in (0..vectors).step_by(together) {
                    narrow = first;
                    while last - narrow >= 4 {
                        let height = tile_height(narrow, tokens);
                        match (height, together) {
                            (8, 1) => tile::<V, S, 8, 1>(job, row + v * V::LANES, narrow),
                            (8, _) => tile::<V, S, 8, 2>(job, row + v * V::LANES, narrow),
                            (_, 1) => tile::<V, S, 4, 1>(job, row + v * V::LANES, narrow),
                            (_, _) => tile::<V, S, 4, 2>(job, row + v * V::LANES, narrow),
                        }
                        narrow += height;
                    }
                }
                while narrow < last {
                    let height = tile_height(narrow, tokens);
                    match (height, vectors) {
                        (2, STREAMS) => {
                            tile::<V, S, 2, 2>(job, row, narrow);
                            tile::<V, S, 2, 2>(job, row + 2 * V::LANES, narrow);
                        }
                        (2, _) => tile::<V, S, 2, 1>(job, row, narrow),
                        (_, STREAMS) => tile::<V, S, 1, STREAMS>(job, row, narrow),
                        (_, _) => tile::<V, S, 1, 1>(job, row, narrow),
                    }
                    narrow += height;
                }
            }
            row += vectors * V::LANES;
        }
    }
}

/// Computes and writes N vectors of rows from row `row` on for the T tokens from `t` on.
///
/// # Safety
/// As for [`run`]; the rows are inside the groups of the job, and a tile of height T begins at `t`.
#[inline(always)]
unsafe fn tile<V: Lanes, S: Sums, const T: usize, const N: usize>(
    job: &mut Job<'_, '_>,
    row: usize,
    t: usize,
) {
    let mut w = [VectorAt { group: job.w.bytes().as_ptr(), r: 0 }; N];
    for (v, w) in w.iter_mut().enumerate() {
        let row = row + v * V::LANES;
        let group_bytes = job.w.group_bytes();
        w.group = job.w.bytes()[row / GROUP_ROWS * group_bytes..][..group_bytes].as_ptr();
        w.r = row % GROUP_ROWS;
    }
    // SAFETY: the vectors are inside the groups, because LANES divides 16.
    let sums = unsafe { S::sums::<V, T, N>(w, S::input(job, t), job.w.cols(), job.pitch) };
    for (v, sums) in sums.into_iter().enumerate() {
        for (i, sum) in sums.into_iter().enumerate() {
            // SAFETY: the features of V are enabled.
            unsafe { put::<V>(job, row + v * V::LANES, t + i, sum) };
        }
    }
}

/// Writes or adds the sums of a vector of rows of one token. FloatRows that only fill up the last group are left out.
///
/// # Safety
/// The features of V are enabled.
#[inline(always)]
unsafe fn put<V: Lanes>(job: &mut Job<'_, '_>, row: usize, token: usize, sums: V::F) {
    let rows = job.out.rows().end.saturating_sub(row);
    if rows == 0 {
        return;
    }
    let y = job.out.at(token, row);
    // SAFETY: `rows` rows of this token follow from y on. The vector is written whole only when all are there.
    unsafe {
        if rows >= V::LANES {
            V::store(y, if job.accumulate { V::add(V::load_f32(y.cast()), sums) } else { sums });
        } else {
            let mut values = [0.0; GROUP_ROWS];
            V::store(values.as_mut_ptr(), sums);
            for (i, &value) in values.iter().enumerate().take(rows) {
                let y = y.add(i);
                *y = if job.accumulate { *y + value } else { value };
            }
        }
    }
}
