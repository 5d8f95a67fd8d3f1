//! The one activation format: blocks of 32 with an f32 scale and the sum of the codes.
//!
//! The scale stays f32 and the sum an integer because an f16 sum overflows: 32 activations of 3000 sum to 96000.

/// Activations in one block.
pub const ACT_BLOCK: usize = 32;

/// Quantises activations to 8 bits, in blocks of 32.
///
/// With `amax` the largest magnitude of a block: `d = amax / 127`, `id = 127 / amax`, or 0 where that is not
/// finite (an all-zero block, or one below 4e-37), `q = x · id` rounded half to even, and `sum = Σ q`. A block
/// that holds a value that is not finite gets `d = NaN`, `q = 0`, `sum = 0`: the NaN shows in the result.
///
/// `x` and `q` have the same length, a multiple of 32; `d` and `sum` have one element per block.
///
/// # Panics
/// When the lengths do not match.
pub fn quantize_activations(x: &[f32], q: &mut [i8], d: &mut [f32], sum: &mut [i32]) {
    let (x, rest) = x.as_chunks::<ACT_BLOCK>();
    let (q, q_rest) = q.as_chunks_mut::<ACT_BLOCK>();
    assert!(rest.is_empty() && q_rest.is_empty(), "activations come in blocks of {ACT_BLOCK}");
    assert!(q.len() == x.len() && d.len() == x.len() && sum.len() == x.len(), "one scale and sum per block");
    for (((x, q), d), sum) in x.iter().zip(q).zip(d).zip(sum) {
        (*d, *sum) = quantize_block(x, q);
    }
}

/// Quantises one block; returns its scale and the sum of its codes.
fn quantize_block(x: &[f32; ACT_BLOCK], q: &mut [i8; ACT_BLOCK]) -> (f32, i32) {
    // Magnitudes of floats order like their bits, with infinity and NaN on top.
    let bits = x.iter().map(|x| x.to_bits() & 0x7fff_ffff).fold(0, u32::max);
    let amax = f32::from_bits(bits);
    if !amax.is_finite() {
        *q = [0; ACT_BLOCK];
        return (f32::NAN, 0);
    }
    let id = 127.0 / amax;
    let id = if id.is_finite() { id } else { 0.0 };
    let mut sum = 0;
    for (q, x) in q.iter_mut().zip(x) {
        *q = (x * id).round_ties_even() as i8;
        sum += i32::from(*q);
    }
    (amax / 127.0, sum)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one(x: [f32; 32]) -> ([i8; 32], f32, i32) {
        let (mut q, mut d, mut sum) = ([9; 32], [9.0], [9]);
        quantize_activations(&x, &mut q, &mut d, &mut sum);
        (q, d[0], sum[0])
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
