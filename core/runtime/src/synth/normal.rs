//! The normal distribution, to the precision of f64: what turns firing frequencies into thresholds and back.

use std::f64::consts::TAU;

/// Beyond so many standard deviations nothing is left.
const EDGE: f64 = 8.0;

/// Pieces of the integrals.
const STEPS: usize = 32;

/// The density at `x`.
pub(super) fn density(x: f64) -> f64 {
    (-0.5 * x * x).exp() / TAU.sqrt()
}

/// Φ: the probability of a value up to `x`.
pub(super) fn cumulative(x: f64) -> f64 {
    if x.abs() >= EDGE {
        return if x < 0.0 { 0.0 } else { 1.0 };
    }
    // Φ(x) = 1/2 + φ(x) · (x + x³/3 + x⁵/(3·5) + …)
    let (mut term, mut sum, mut odd) = (x, x, 1.0);
    while term.abs() > 1e-17 * sum.abs() {
        odd += 2.0;
        term *= x * x / odd;
        sum += term;
    }
    0.5 + density(x) * sum
}

/// Φ⁻¹: where `cumulative` is `p`.
pub(super) fn probit(p: f64) -> f64 {
    bisect([-EDGE, EDGE], |x| cumulative(x) < p)
}

/// The probability that two normal values with correlation `c`, 0 to 1, both exceed `threshold`.
pub(super) fn both_above(threshold: f64, c: f64) -> f64 {
    // ∂P/∂c is the joint density at the corner; c = sin θ takes out the pole at 1.
    let integrand = |theta: f64| (-threshold * threshold / (1.0 + theta.sin())).exp();
    let apart = cumulative(-threshold);
    apart * apart + simpson([0.0, c.clamp(0.0, 1.0).asin()], integrand) / TAU
}

/// E[max(0, N − threshold)²].
pub(super) fn rectified_square(threshold: f64) -> f64 {
    let above = (1.0 + threshold * threshold) * cumulative(-threshold) - threshold * density(threshold);
    above.max(0.0)
}

/// The place between the ends at which `below` turns from true to false.
pub(super) fn bisect([mut low, mut high]: [f64; 2], below: impl Fn(f64) -> bool) -> f64 {
    for _ in 0..52 {
        let middle = 0.5 * (low + high);
        if below(middle) { low = middle } else { high = middle }
    }
    0.5 * (low + high)
}

fn simpson([from, to]: [f64; 2], f: impl Fn(f64) -> f64) -> f64 {
    let step = (to - from) / (2 * STEPS) as f64;
    let weighted = (0..=2 * STEPS).map(|i| {
        let weight = match i {
            0 => 1.0,
            i if i == 2 * STEPS => 1.0,
            i if i % 2 == 1 => 4.0,
            _ => 2.0,
        };
        weight * f(from + step * i as f64)
    });
    weighted.sum::<f64>() * step / 3.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_of_the_normal_distribution() {
        for (x, p) in
            [(0.0, 0.5), (1.0, 0.841_344_746_068), (-1.96, 0.024_997_895_148), (3.0, 0.998_650_101_968)]
        {
            assert!((cumulative(x) - p).abs() < 1e-11, "{x}");
            assert!((probit(p) - x).abs() < 1e-8, "{p}");
        }
        assert_eq!((cumulative(-9.0), cumulative(9.0)), (0.0, 1.0));
    }

    #[test]
    fn two_values_over_a_threshold() {
        for c in [0.0, 0.3, 0.7, 0.95] {
            assert!((both_above(0.0, c) - (0.25 + c.asin() / TAU)).abs() < 1e-9, "{c}");
        }
        assert!((both_above(1.3, 1.0) - cumulative(-1.3)).abs() < 1e-6);
        assert!((both_above(1.3, 0.0) - cumulative(-1.3).powi(2)).abs() < 1e-12);
    }

    #[test]
    fn the_square_of_what_is_above() {
        assert!((rectified_square(0.0) - 0.5).abs() < 1e-12);
        assert!((rectified_square(-8.0) - 65.0).abs() < 1e-6);
        assert!(rectified_square(6.0) < 1e-9);
    }
}
