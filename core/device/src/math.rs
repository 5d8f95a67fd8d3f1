//! Scalar mathematics with a fixed order of operations.
//!
//! Every function here is plain IEEE arithmetic with explicit fused multiply-adds, so the same source compiled
//! for any instruction set gives the same bits. Sums run over [`LANES`] interleaved accumulators that are folded
//! in a fixed tree, which is how a vector unit would do it. All are `inline(always)`: a backend compiles them
//! again under its own target features and gets vector code with these very results.

/// Interleaved accumulators of a sum: lane `j` takes the elements `i` with `i % LANES == j`.
pub const LANES: usize = 16;

/// The constants of [`exp`], for those who write it in vectors of their own.
pub mod exp_constants {
    /// Below it the result is 0.
    pub const LOW: f32 = -87.33;
    /// Above it the result is infinite.
    pub const HIGH: f32 = 88.3;
    /// -ln 2 as a sum of a short and a small number.
    pub const MINUS_LN_2: [f32; 2] = [-0.693_359_4, 2.121_944_4e-4];
    /// The polynomial of `(e^r - 1 - r) / r²`, highest power first.
    pub const POLYNOMIAL: [f32; 6] =
        [1.987_569_1e-4, 1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5];
    /// 1.5 · 2^23. Adding it rounds to an integer, half to even, and leaves the integer in the low bits.
    pub const ROUND: f32 = 12_582_912.0;
}

/// e^x, within 2 units in the last place; 0 below -87.33, infinite above 88.3, NaN for NaN.
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    use exp_constants::{HIGH, LOW, MINUS_LN_2, POLYNOMIAL, ROUND};
    // Comparisons written so that NaN goes through.
    let c = if x < LOW { LOW } else { x };
    let c = if c > HIGH { HIGH } else { c };
    // Unlike a conversion, every vector unit has an addition.
    let shifted = c * std::f32::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = n.mul_add(MINUS_LN_2[0], c);
    let r = n.mul_add(MINUS_LN_2[1], r);
    let [p, rest @ ..] = POLYNOMIAL;
    let p = rest.iter().fold(p, |p, next| p.mul_add(r, *next));
    let p = p.mul_add(r * r, r) + 1.0;
    let power = f32::from_bits(shifted.to_bits().wrapping_add(127) << 23);
    let y = p * power;
    let y = if x < LOW { 0.0 } else { y };
    if x > HIGH { f32::INFINITY } else { y }
}

/// GELU in its tanh form.
#[inline(always)]
pub fn gelu(x: f32) -> f32 {
    let inner = 0.797_884_6 * (0.044_715 * x * x).mul_add(x, x);
    // 0.5 * (1 + tanh(z)) = 1 / (1 + e^(-2z))
    x / (1.0 + exp(-2.0 * inner))
}

/// Folds the lanes of a sum in a fixed tree: 8 apart, 4, 2, 1.
#[inline(always)]
pub fn fold(lanes: [f32; LANES]) -> f32 {
    fold_with(lanes, |a, b| a + b)
}

/// Folds the lanes by any function, in the tree of [`fold`].
#[inline(always)]
pub fn fold_with(lanes: [f32; LANES], f: impl Fn(f32, f32) -> f32) -> f32 {
    // Arrays of fixed sizes, so that each level is one vector operation.
    let eight: [f32; 8] = std::array::from_fn(|j| f(lanes[j], lanes[j + 8]));
    let four: [f32; 4] = std::array::from_fn(|j| f(eight[j], eight[j + 4]));
    f(f(four[0], four[2]), f(four[1], four[3]))
}

/// Sum of the elements.
#[inline(always)]
pub fn sum(x: &[f32]) -> f32 {
    let mut lanes = [0.0f32; LANES];
    let (whole, rest) = x.as_chunks::<LANES>();
    for chunk in whole {
        lanes.iter_mut().zip(chunk).for_each(|(l, v)| *l += *v);
    }
    lanes.iter_mut().zip(rest).for_each(|(l, v)| *l += *v);
    fold(lanes)
}

/// Sum of the squares of the elements.
#[inline(always)]
pub fn sum_squares(x: &[f32]) -> f32 {
    let mut lanes = [0.0f32; LANES];
    let (whole, rest) = x.as_chunks::<LANES>();
    for chunk in whole {
        lanes.iter_mut().zip(chunk).for_each(|(l, v)| *l = v.mul_add(*v, *l));
    }
    lanes.iter_mut().zip(rest).for_each(|(l, v)| *l = v.mul_add(*v, *l));
    fold(lanes)
}

/// One row of RMS norm: `out[i] = x[i] / sqrt(mean(x²) + eps) * weight[i]`.
#[inline(always)]
pub fn rms_norm_row(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    let scale = 1.0 / (sum_squares(x) / x.len() as f32 + eps).sqrt();
    for ((o, v), w) in out.iter_mut().zip(x).zip(weight) {
        *o = v * scale * w;
    }
}

/// Rotates one head in place. `table` holds (cos, sin) per pair; pairs are `(2i, 2i+1)` when `adjacent`, else
/// `(i, i + pairs)`. Elements past the pairs stay as they are.
#[inline(always)]
pub fn rope_head(head: &mut [f32], table: &[[f32; 2]], adjacent: bool) {
    let pairs = table.len();
    if adjacent {
        for (pair, [cos, sin]) in head.as_chunks_mut::<2>().0.iter_mut().zip(table) {
            let [a, b] = *pair;
            *pair = [a * cos - b * sin, a * sin + b * cos];
        }
    } else {
        let (first, second) = head.split_at_mut(pairs);
        for ((a, b), [cos, sin]) in first.iter_mut().zip(second).zip(table) {
            (*a, *b) = (*a * cos - *b * sin, *a * sin + *b * cos);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_close_and_ends_well() {
        let mut x = -87.0f32;
        while x < 88.0 {
            let want = f64::from(x).exp();
            assert!((f64::from(exp(x)) / want - 1.0).abs() < 2.5e-7, "{x}");
            x += 0.013;
        }
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp(f32::INFINITY), f32::INFINITY);
        assert!(exp(f32::NAN).is_nan());
    }

    #[test]
    fn sums_are_right_for_every_tail() {
        for n in 0..70 {
            let x: Vec<f32> = (0..n).map(|i| i as f32).collect();
            assert_eq!(sum(&x), (0..n).sum::<i32>() as f32);
            assert_eq!(sum_squares(&x), (0..n).map(|i| i * i).sum::<i32>() as f32);
        }
    }

    #[test]
    fn both_pairings_turn_by_the_same_angle() {
        let table = [[0.8f32, 0.6], [0.0, 1.0]];
        let (mut adjacent, mut halves) = ([1.0f32, 2.0, 3.0, 4.0, 9.0], [1.0f32, 3.0, 2.0, 4.0, 9.0]);
        rope_head(&mut adjacent, &table, true);
        rope_head(&mut halves, &table, false);
        assert_eq!(adjacent[..2], [halves[0], halves[2]]);
        assert_eq!(adjacent[2..4], [halves[1], halves[3]]);
        assert_eq!((adjacent[4], halves[4]), (9.0, 9.0));
    }
}
