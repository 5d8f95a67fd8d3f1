//! The one activation format: blocks of 32 with an f32 scale and the sum of the codes; blocks that stand out twice.
//!
//! The scale stays f32 and the sum an integer because an f16 sum overflows: 32 activations of 3000 sum to 96000.
//!
//! The error of a block grows with its largest value, and a few blocks of a row hold values far above the others: the
//! outlier channels of language models. Those few make most of the error, so what their codes leave over is quantised
//! again. On SmolLM2 that is one block in twenty, and it halves the error of the logits.

/// Activations in one block.
pub const ACT_BLOCK: usize = 32;

/// A block is refined when its largest magnitude is over this many times the root mean square of those of its row.
pub const OUTLIER: f32 = 2.0;

/// Codes, scales and sums of one row of activations.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct QuantizedRow {
    /// Codes, -127 to 127; one per activation.
    pub q: Vec<i8>,
    /// Scales, one per block. Of a row's refinement: 0 where a block is not refined.
    pub d: Vec<f32>,
    /// Sums of the codes, one per block.
    pub sum: Vec<i32>,
}

impl QuantizedRow {
    fn zeroed(cols: usize) -> QuantizedRow {
        let blocks = cols / ACT_BLOCK;
        QuantizedRow { q: vec![0; cols], d: vec![0.0; blocks], sum: vec![0; blocks] }
    }

    fn set(&mut self, block: usize, (q, d, sum): ([i8; ACT_BLOCK], f32, i32)) {
        self.q[block * ACT_BLOCK..][..ACT_BLOCK].copy_from_slice(&q);
        (self.d[block], self.sum[block]) = (d, sum);
    }
}

/// Quantises one row of activations to 8 bits in blocks of 32. Returns the row and its refinement.
///
/// With `amax` the largest magnitude of a block: `d = amax / 127`, `id = 127 / amax`, or 0 where that is not
/// finite (an all-zero block, or one below 4e-37), `q = x · id` rounded half to even, and `sum = Σ q`. A block
/// that holds a value that is not finite gets `d = NaN`, `q = 0`, `sum = 0`: the NaN shows in the result.
///
/// A block is refined when [`is_outlier`] says so. What is left, `r = fma(-d, q, x)`, is then quantised with
/// `d' = d / 254` and `id' = 254 / d`.
///
/// # Panics
/// When the length is no multiple of 32.
pub fn quantize_activations(x: &[f32]) -> (QuantizedRow, QuantizedRow) {
    let (blocks, rest) = x.as_chunks::<ACT_BLOCK>();
    assert!(rest.is_empty(), "activations come in blocks of {ACT_BLOCK}");
    let (mut row, mut fine) = (QuantizedRow::zeroed(x.len()), QuantizedRow::zeroed(x.len()));
    let energy = blocks.iter().fold(0.0, |energy, x| add_energy(energy, max_magnitude(x)));
    for (block, x) in blocks.iter().enumerate() {
        let amax = max_magnitude(x);
        if !amax.is_finite() {
            row.d[block] = f32::NAN;
            continue;
        }
        let d = amax / 127.0;
        let (q, sum) = codes(x, 127.0 / amax);
        row.set(block, (q, d, sum));
        if is_outlier(amax, energy, blocks.len()) {
            let mut left = *x;
            left.iter_mut().zip(q).for_each(|(x, q)| *x = (-d).mul_add(f32::from(q), *x));
            let (q, sum) = codes(&left, 254.0 / d);
            fine.set(block, (q, d / 254.0, sum));
        }
    }
    (row, fine)
}

/// One more block in a row's energy, the sum of the squares of its blocks' largest magnitudes, taken in order.
#[inline(always)]
pub fn add_energy(energy: f32, amax: f32) -> f32 {
    amax.mul_add(amax, energy)
}

/// Whether a block is refined: `amax² · blocks > OUTLIER² · energy`. A row whose energy is not finite has none.
#[inline(always)]
pub fn is_outlier(amax: f32, energy: f32, blocks: usize) -> bool {
    amax * amax * blocks as f32 > OUTLIER * OUTLIER * energy
}

fn max_magnitude(x: &[f32; ACT_BLOCK]) -> f32 {
    // Magnitudes of floats order like their bits, with infinity and NaN on top.
    f32::from_bits(x.iter().map(|x| x.to_bits() & 0x7fff_ffff).fold(0, u32::max))
}

fn codes(x: &[f32; ACT_BLOCK], id: f32) -> ([i8; ACT_BLOCK], i32) {
    let id = if id.is_finite() { id } else { 0.0 };
    let q = x.map(|x| (x * id).round_ties_even() as i8);
    (q, q.iter().map(|q| i32::from(*q)).sum())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one(x: [f32; 32]) -> ([i8; 32], f32, i32) {
        let (row, fine) = quantize_activations(&x);
        assert_eq!(fine, QuantizedRow::zeroed(32), "a block alone does not stand out");
        (row.q.try_into().unwrap(), row.d[0], row.sum[0])
    }

    #[test]
    fn what_stands_out_is_quantised_twice() {
        let mut x: Vec<f32> = (0..320).map(|i| (i as f32 * 0.7).sin()).collect();
        x[70] = 40.0;
        let (row, fine) = quantize_activations(&x);
        let refined: Vec<usize> = (0..10).filter(|block| fine.d[*block] != 0.0).collect();
        assert_eq!(refined, [2]);
        for (i, x) in x.iter().enumerate().skip(64).take(32) {
            let both = row.d[2] * f32::from(row.q[i]) + fine.d[2] * f32::from(fine.q[i]);
            assert!((both - x).abs() <= 40.0 / 127.0 / 254.0 * 0.51, "{i}");
        }
        x[5] = f32::NAN;
        assert!(quantize_activations(&x).1.d.iter().all(|d| *d == 0.0));
    }

    #[test]
    fn large_equal_activations_stay_finite() {
        let (q, d, sum) = one([3000.0; 32]);
        assert_eq!(q, [127; 32]);
        assert_eq!(sum, 32 * 127);
        assert!((d * sum as f32 - 96000.0).abs() < 0.1);
    }

    #[test]
    fn a_block_with_a_nan_or_infinity_has_scale_nan() {
        for bad in [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut x = [1.0; 32];
            x[7] = bad;
            let (q, d, sum) = one(x);
            assert!(d.is_nan());
            assert_eq!((q, sum), ([0; 32], 0));
        }
    }

    #[test]
    fn zeros_and_tiny_values_have_code_zero() {
        for x in [0.0, -0.0, 1e-45, -3e-37] {
            let (q, d, sum) = one([x; 32]);
            assert_eq!((q, sum), ([0; 32], 0));
            assert!((0.0..1e-38).contains(&d));
        }
        assert_eq!(one([f32::MAX; 32]).0, [127; 32]);
        assert_eq!(one([f32::MIN; 32]).0, [-127; 32]);
    }

    #[test]
    fn ties_round_to_even() {
        let mut x = [0.0; 32];
        x[0] = 127.0;
        x[1] = 0.5;
        x[2] = 1.5;
        x[3] = -2.5;
        let (q, d, _) = one(x);
        assert_eq!(d, 1.0);
        assert_eq!(q[..4], [127, 0, 2, -2]);
    }
}
