//! The softmax of one page for many query rows, with the bits of the scalar body.
//!
//! It goes in passes over all rows and not row by row: the folds of a row are long chains of short operations, and
//! only those of other rows can fill the time between them.

use std::ops::Range;

use neuropil_device::{KV_PAGE, Softmax, math};

use super::attention::QUERIES;
use super::lanes::Lanes;

/// The scores of a page, or the weights that they become.
pub(super) type Scores = [f32; KV_PAGE];

/// What a page does to the running softmax of its rows.
#[repr(align(64))]
pub(super) struct Turn {
    /// Largest score of the page.
    largest: [f32; QUERIES],
    /// Largest score so far, this page included.
    new: [f32; QUERIES],
    /// Factor of what was summed before.
    pub shrink: [f32; QUERIES],
}

impl Turn {
    pub fn new() -> Turn {
        Turn { largest: [0.0; QUERIES], new: [0.0; QUERIES], shrink: [0.0; QUERIES] }
    }

    /// Makes weights of scores and takes them into the running softmax. `seen` says which places each row sees; it
    /// becomes empty for a row that the page does not touch.
    ///
    /// # Safety
    /// The features of V are enabled.
    #[inline(always)]
    pub unsafe fn weigh<V: Lanes>(
        &mut self,
        scores: &mut [Scores],
        seen: &mut [Range<usize>],
        running: &mut [Softmax],
        scale: f32,
    ) {
        let mut old = [f32::NEG_INFINITY; QUERIES];
        for (i, (scores, seen)) in scores.iter_mut().zip(seen.iter_mut()).enumerate() {
            // SAFETY: as for this function.
            self.largest[i] = unsafe { largest::<V>(scores, seen, scale) };
            // A maximum passes over NaN; a page of nothing but NaN must not be passed over.
            if self.largest[i] == f32::NEG_INFINITY && scores.iter().all(|s| *s == f32::NEG_INFINITY) {
                *seen = 0..0;
            }
            old[i] = running[i].max;
        }
        for at in (0..scores.len()).step_by(V::LANES) {
            // SAFETY: as for this function; QUERIES is a multiple of LANES.
            unsafe {
                let old = V::load_f32(old.as_ptr().add(at).cast());
                let new = V::max(old, V::load_f32(self.largest.as_ptr().add(at).cast()));
                let shrink = exp_down::<V>(V::add(old, V::mul(new, V::splat(-1.0))));
                V::store(self.new.as_mut_ptr().add(at), new);
                V::store(self.shrink.as_mut_ptr().add(at), shrink);
            }
        }
        for (i, (scores, seen)) in scores.iter_mut().zip(seen.iter()).enumerate() {
            if !seen.is_empty() {
                // SAFETY: as for this function.
                let total = unsafe { weights::<V>(scores, self.new[i]) };
                running[i] =
                    Softmax { max: self.new[i], total: running[i].total.mul_add(self.shrink[i], total) };
            }
        }
    }
}

/// Scales the scores that a row sees, hides the others and finds the largest that is a number.
///
/// # Safety
/// The features of V are enabled.
#[inline(always)]
unsafe fn largest<V: Lanes>(scores: &mut Scores, seen: &Range<usize>, scale: f32) -> f32 {
    if seen.is_empty() {
        scores.fill(f32::NEG_INFINITY);
        return f32::NEG_INFINITY;
    }
    let larger = |a: f32, b: f32| if a > b { a } else { b };
    // SAFETY: as for this function. The score comes first, so that one that is not a number loses.
    let lanes = unsafe {
        let scale = V::splat(scale);
        if seen.len() == KV_PAGE {
            by_lane::<V>(scores, f32::NEG_INFINITY, |s| V::mul(s, scale), |all, s| V::max(s, all))
        } else {
            by_lane::<V>(scores, 0.0, |s| V::mul(s, scale), |all, _| all);
            scores[..seen.start].fill(f32::NEG_INFINITY);
            scores[seen.end..].fill(f32::NEG_INFINITY);
            by_lane::<V>(scores, f32::NEG_INFINITY, |s| s, |all, s| V::max(s, all))
        }
    };
    math::fold_with(lanes, larger)
}

/// Makes weights of the scores, none of which is above `max`, and gives their [`math::sum`].
///
/// # Safety
/// The features of V are enabled.
#[inline(always)]
unsafe fn weights<V: Lanes>(scores: &mut Scores, max: f32) -> f32 {
    // SAFETY: as for this function.
    math::fold(unsafe {
        let minus = V::splat(-max);
        by_lane::<V>(scores, 0.0, |s| exp_down::<V>(V::add(s, minus)), |all, w| V::add(all, w))
    })
}

/// Changes each element of a page and joins what becomes of them in [`math::LANES`] interleaved lanes, in order.
///
/// # Safety
/// The features of V are enabled.
#[inline(always)]
unsafe fn by_lane<V: Lanes>(
    page: &mut Scores,
    first: f32,
    change: impl Fn(V::F) -> V::F,
    join: impl Fn(V::F, V::F) -> V::F,
) -> [f32; math::LANES] {
    let mut lanes = [0.0; math::LANES];
    for part in (0..math::LANES).step_by(V::LANES) {
        // SAFETY: as for this function; V::LANES divides math::LANES, and that KV_PAGE.
        unsafe {
            let mut all = V::splat(first);
            for at in (part..KV_PAGE).step_by(math::LANES) {
                let p = page.as_mut_ptr().add(at);
                let x = change(V::load_f32(p.cast_const().cast()));
                V::store(p, x);
                all = join(all, x);
            }
            V::store(lanes.as_mut_ptr().add(part), all);
        }
    }
    lanes
}

/// [`math::exp`] of numbers that are not positive, and of NaN.
///
/// # Safety
/// The features of V are enabled.
#[inline(always)]
unsafe fn exp_down<V: Lanes>(x: V::F) -> V::F {
    use math::exp_constants::{LOW, MINUS_LN_2, POLYNOMIAL, ROUND};
    // SAFETY: as for this function.
    unsafe {
        let low = V::splat(LOW);
        let c = V::max(low, x);
        let shifted = V::add(V::mul(c, V::splat(std::f32::consts::LOG2_E)), V::splat(ROUND));
        let n = V::add(shifted, V::splat(-ROUND));
        let r = V::fma(n, V::splat(MINUS_LN_2[0]), c);
        let r = V::fma(n, V::splat(MINUS_LN_2[1]), r);
        let mut p = V::splat(POLYNOMIAL[0]);
        for next in &POLYNOMIAL[1..] {
            p = V::fma(p, r, V::splat(*next));
        }
        let p = V::add(V::fma(p, V::mul(r, r), r), V::splat(1.0));
        V::zero_below(x, low, V::mul(p, V::power_of_two(shifted)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arch::scalar::ScalarLanes;

    #[test]
    fn the_exponential_in_vectors_has_the_bits_of_the_scalar_one() {
        let mut x = -120.0f32;
        let ends = [0.0, -0.0, f32::NEG_INFINITY, f32::NAN, -87.33, -87.330_01, -1e-30, -0.346_573_6];
        let mut all = ends.to_vec();
        while x < 0.0 {
            all.push(x);
            x += 0.003_1;
        }
        all.resize(all.len().next_multiple_of(math::LANES), -1.0);
        for chunk in all.chunks_exact(math::LANES) {
            // SAFETY: plain Rust needs no features; a chunk has 16 floats.
            let got = unsafe { exp_down::<ScalarLanes>(ScalarLanes::load_f32(chunk.as_ptr().cast())) };
            for (x, got) in chunk.iter().zip(got) {
                let want = math::exp(*x);
                assert!(got.to_bits() == want.to_bits() || got.is_nan() && want.is_nan(), "{x}");
            }
        }
    }
}
