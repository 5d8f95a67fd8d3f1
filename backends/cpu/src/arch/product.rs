//! A few rows of coefficients times a matrix that is read line by line, the sums in registers.
//!
//! Both products of attention are this loop. Each sum takes its terms one by one in the order of the lines, whatever
//! the number of rows, so how rows are put together changes no bit.

use std::ops::Range;

use half::f16;

use super::lanes::Lanes;

/// Rows that share a line: as many sums as fit the registers.
pub(super) const BLOCK: usize = 6;

/// An element of a page.
pub(super) trait Element {
    /// Widens the next `V::LANES` elements.
    ///
    /// # Safety
    /// The features of V are enabled, and the pointer is good for them.
    unsafe fn load<V: Lanes>(p: *const Self) -> V::F;
    fn widen(self) -> f32;
}

impl Element for f16 {
    #[inline(always)]
    unsafe fn load<V: Lanes>(p: *const f16) -> V::F {
        // SAFETY: as for this function.
        unsafe { V::load_f16(p.cast()) }
    }
    #[inline(always)]
    fn widen(self) -> f32 {
        self.to_f32()
    }
}

impl Element for f32 {
    #[inline(always)]
    unsafe fn load<V: Lanes>(p: *const f32) -> V::F {
        // SAFETY: as for this function.
        unsafe { V::load_f32(p.cast()) }
    }
    #[inline(always)]
    fn widen(self) -> f32 {
        self
    }
}

/// Rows of coefficients and the sums that they add to.
pub(super) struct ProductRows {
    pub count: usize,
    /// Whether the sums begin at zero, whatever they hold.
    pub fresh: bool,
    pub coefficients: [*const f32; BLOCK],
    pub sums: [*mut f32; BLOCK],
}

impl ProductRows {
    /// No rows.
    #[inline(always)]
    pub fn none(fresh: bool) -> ProductRows {
        ProductRows {
            count: 0,
            fresh,
            coefficients: [std::ptr::null(); BLOCK],
            sums: [std::ptr::null_mut(); BLOCK],
        }
    }

    /// Adds a row.
    #[inline(always)]
    pub fn push(&mut self, coefficients: *const f32, sums: *mut f32) {
        self.coefficients[self.count] = coefficients;
        self.sums[self.count] = sums;
        self.count += 1;
    }
}

/// `sums[r][j] += Σ_s coefficients[r][s] · m[s - first][j]` for `s` in `steps`, which begin at `first`, and `j < width`,
/// each sum in the order of `s`.
///
/// # Safety
/// The features of V are enabled; each row has coefficients for the steps and `width` sums, which nobody else reads or
/// writes; `m` is good for a line of `width` for each step, `stride` apart.
#[inline(always)]
pub(super) unsafe fn product<V: Lanes, E: Element, const N: usize>(
    rows: &ProductRows,
    steps: Range<usize>,
    m: *const E,
    stride: usize,
    width: usize,
) {
    let mut row = 0;
    while row < rows.count {
        let steps = steps.clone();
        // SAFETY: as for this function; as many rows are left.
        unsafe {
            row += match rows.count - row {
                6.. => product_of::<V, E, 6, N>(rows, row, steps, m, stride, width),
                4.. => product_of::<V, E, 4, N>(rows, row, steps, m, stride, width),
                3 => product_of::<V, E, 3, N>(rows, row, steps, m, stride, width),
                2 => product_of::<V, E, 2, N>(rows, row, steps, m, stride, width),
                _ => product_of::<V, E, 1, N>(rows, row, steps, m, stride, width),
            };
        }
    }
}

/// `product` for R rows from `row` on; returns R.
///
/// # Safety
/// As for `product`, and there are R rows.
#[inline(always)]
pub(super) unsafe fn product_of<V: Lanes, E: Element, const R: usize, const N: usize>(
    rows: &ProductRows,
    row: usize,
    steps: Range<usize>,
    m: *const E,
    stride: usize,
    width: usize,
) -> usize {
    let these = Rows::<R> {
        fresh: rows.fresh,
        coefficients: std::array::from_fn(|r| rows.coefficients[row + r].wrapping_add(steps.start)),
        sums: std::array::from_fn(|r| rows.sums[row + r]),
    };
    let (rows, steps) = (these, steps.len());
    let mut j = 0;
    // SAFETY: as for `product`; every vector lies below `width`.
    unsafe {
        while j + N * V::LANES <= width {
            lines::<V, E, R, N>(&rows, steps, m.add(j), stride, j);
            j += N * V::LANES;
        }
        while N > 2 && j + 2 * V::LANES <= width {
            lines::<V, E, R, 2>(&rows, steps, m.add(j), stride, j);
            j += 2 * V::LANES;
        }
        while j + V::LANES <= width {
            lines::<V, E, R, 1>(&rows, steps, m.add(j), stride, j);
            j += V::LANES;
        }
        for j in j..width {
            for r in 0..R {
                let mut sum = if rows.fresh { 0.0 } else { *rows.sums[r].add(j) };
                for s in 0..steps {
                    sum = (*rows.coefficients[r].add(s)).mul_add(m.add(s * stride + j).read().widen(), sum);
                }
                *rows.sums[r].add(j) = sum;
            }
        }
    }
    R
}

/// As many rows as share the registers.
struct Rows<const R: usize> {
    fresh: bool,
    coefficients: [*const f32; R],
    sums: [*mut f32; R],
}

/// The heart: N vectors of sums for each of R rows.
///
/// # Safety
/// As for `product`, with `m` at column `j`: `j + N * V::LANES` is at most the width.
#[inline(always)]
#[expect(clippy::needless_range_loop, reason = "one index runs over several arrays of registers")]
unsafe fn lines<V: Lanes, E: Element, const R: usize, const N: usize>(
    rows: &Rows<R>,
    steps: usize,
    m: *const E,
    stride: usize,
    j: usize,
) {
    // SAFETY: as for `product`, for the N vectors from `j` on.
    unsafe {
        let mut sums = [[V::splat(0.0); N]; R];
        if !rows.fresh {
            for r in 0..R {
                for n in 0..N {
                    sums[r][n] = V::load_f32(rows.sums[r].add(j + n * V::LANES).cast());
                }
            }
        }
        for s in 0..steps {
            let mut line = [V::splat(0.0); N];
            for (n, line) in line.iter_mut().enumerate() {
                *line = E::load::<V>(m.add(s * stride + n * V::LANES));
            }
            for r in 0..R {
                let c = V::splat(*rows.coefficients[r].add(s));
                for n in 0..N {
                    sums[r][n] = V::fma(c, line[n], sums[r][n]);
                }
            }
        }
        for r in 0..R {
            for n in 0..N {
                V::store(rows.sums[r].add(j + n * V::LANES), sums[r][n]);
            }
        }
    }
}
