//! The exponential function and the random numbers of the sampler.
//!
//! Both are written here so that the same seed gives the same tokens on every platform: they use only additions,
//! multiplications and bit operations, which IEEE 754 fixes, and no function of the system's mathematics library.

/// e to the `x` for `x <= 0`; relative error below 3e-7, exactly 1 at 0 and 0 below -87.
#[inline]
pub(super) fn exp(x: f32) -> f32 {
    const LOG2_E: f32 = std::f32::consts::LOG2_E;
    // ln 2 in two parts, so that x - n ln 2 is exact to the last bits.
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    // Adding and taking away 1.5 * 2^23 rounds to an integer.
    const ROUND: f32 = 12_582_912.0;
    let clamped = if x < -87.0 { -87.0 } else { x };
    let rounded = clamped * LOG2_E + ROUND;
    let n = rounded - ROUND;
    let r = (clamped - n * LN2_HIGH) - n * LN2_LOW;
    let series = 1.0 / 6.0 + r * (1.0 / 24.0 + r * (1.0 / 120.0 + r * (1.0 / 720.0)));
    let power = 1.0 + r + r * r * (0.5 + r * series);
    // The integer lies in the low bits of the rounded sum; it becomes the exponent of a power of two.
    let scale = f32::from_bits((rounded.to_bits() << 23).wrapping_add(127 << 23));
    if x < -87.0 { 0.0 } else { power * scale }
}

/// Small random numbers: SplitMix64.
#[derive(Clone, Debug)]
pub(super) struct Random(pub u64);

impl Random {
    /// Uniform in [0, 1).
    pub fn unit(&mut self) -> f64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^= z >> 31;
        (z >> 11) as f64 * (1.0 / (1u64 << 53) as f64)
    }
}

/// The natural logarithm of the sum of the exponentials of a row of logits. Not part of sampling: it may differ in
/// the last bits between platforms. Minus infinity for an empty row, NaN if any logit is.
pub fn log_sum_exp(logits: &[f32]) -> f64 {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    if max.is_infinite() && !logits.iter().any(|l| l.is_nan()) {
        return f64::from(max);
    }
    let max = f64::from(max);
    max + logits.iter().map(|&logit| (f64::from(logit) - max).exp()).sum::<f64>().ln()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_exponential_is_close_and_exact_at_zero() {
        assert_eq!(exp(0.0), 1.0);
        assert_eq!((exp(-88.0), exp(f32::NEG_INFINITY)), (0.0, 0.0));
        for i in 0..870_000 {
            let x = -(i as f32) / 1e4;
            let want = f64::from(x).exp();
            assert!((f64::from(exp(x)) - want).abs() <= 3e-7 * want, "exp({x})");
        }
    }

    #[test]
    fn random_numbers_are_the_published_ones() {
        let mut random = Random(1234567);
        let first = (random.unit() * (1u64 << 53) as f64) as u64;
        assert_eq!(first, 6457827717110365317 >> 11);
        let mean = (0..10_000).map(|_| random.unit()).sum::<f64>() / 1e4;
        assert!((mean - 0.5).abs() < 0.01);
    }

    #[test]
    fn log_sum_exp_of_plain_and_odd_rows() {
        assert!((log_sum_exp(&[3.0, 2.0, 1.0, 0.0]) - 3.440_189_7).abs() < 1e-6);
        assert!((log_sum_exp(&[1e30, 1e30]) - 1e30).abs() < 1e24);
        assert_eq!(log_sum_exp(&[]), f64::NEG_INFINITY);
        assert_eq!(log_sum_exp(&[f32::NEG_INFINITY; 3]), f64::NEG_INFINITY);
        assert_eq!(log_sum_exp(&[0.0, f32::INFINITY]), f64::INFINITY);
        assert!(log_sum_exp(&[0.0, f32::NAN]).is_nan());
    }
}
