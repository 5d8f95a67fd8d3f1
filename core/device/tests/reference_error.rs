//! The reference matmul stays close to the exact product of the dequantised weights.
//!
//! The bound: quantising an activation errs by at most half a step, `amax / 254` of its block, plus a rounding;
//! every f32 operation errs by 2⁻²⁴ of a partial sum, which is at most the sum of the magnitudes.

use neuropil_device::DType;
use neuropil_device::quant::{ACT_BLOCK, dequantize_row, quantize_row, reference};
use proptest::prelude::*;

/// Exact product of a row with x, and how far the reference may be from it.
fn exact_and_bound(dtype: DType, w: &[f32], x: &[f32]) -> (f64, f64) {
    let (mut exact, mut step, mut magnitude) = (0.0, 0.0, 0.0);
    for (w, x) in w.chunks(ACT_BLOCK).zip(x.chunks(ACT_BLOCK)) {
        let amax = f64::from(x.iter().fold(0.0f32, |m, x| m.max(x.abs())));
        for (w, x) in w.iter().zip(x) {
            let (w, x) = (f64::from(*w), f64::from(*x));
            exact += w * x;
            step += w.abs() * amax / 254.0;
            // A format with a minimum adds two parts that may cancel; both are at most the range of the block.
            magnitude += w.abs() * x.abs().max(amax);
        }
    }
    let roundings = (w.len() + 8) as f64 * f64::from(f32::EPSILON);
    let quantized = if dtype.quantizes_activations() { 1.001 * step } else { 0.0 };
    (exact, quantized + 8.0 * roundings * magnitude + 1e-30)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn the_reference_is_close_to_f64(
        dtype in prop::sample::select(&DType::ALL[..]),
        rows in 1usize..4,
        blocks in 1usize..6,
        tokens in 1usize..3,
        scale in prop::sample::select(vec![1e-4f32, 1.0, 3e3]),
        seed in prop::collection::vec(-1.0f32..1.0, 997),
    ) {
        let cols = 256 * blocks;
        let noise = |i: usize| seed[i * 31 % seed.len()] * seed[i / 7 % seed.len()];
        let row_bytes = dtype.row_bytes(cols).unwrap();
        let mut bytes = vec![0; rows * row_bytes];
        for (r, row) in bytes.chunks_mut(row_bytes).enumerate() {
            let w: Vec<f32> = (0..cols).map(|k| noise(r * cols + k) * 0.1).collect();
            quantize_row(dtype, &w, row);
        }
        let x: Vec<f32> = (0..tokens * cols).map(|i| noise(i + 12345) * scale).collect();
        let mut y = vec![0.5; tokens * rows];
        reference::matmul(dtype, &bytes, rows, cols, tokens, &x, &mut y, false);
        let mut added = vec![0.5; tokens * rows];
        reference::matmul(dtype, &bytes, rows, cols, tokens, &x, &mut added, true);
        let mut w = vec![0.0; cols];
        for (r, row) in bytes.chunks(row_bytes).enumerate() {
            dequantize_row(dtype, row, &mut w);
            for t in 0..tokens {
                let (exact, bound) = exact_and_bound(dtype, &w, &x[t * cols..][..cols]);
                let got = y[t * rows + r];
                prop_assert!((f64::from(got) - exact).abs() <= bound, "{dtype}: {got} {exact} {bound}");
                prop_assert_eq!(added[t * rows + r].to_bits(), (0.5 + got).to_bits());
            }
        }
    }
}

#[test]
fn a_nan_activation_reaches_every_row_of_its_token() {
    for dtype in DType::ALL {
        let cols = 512;
        let mut bytes = vec![0; 2 * dtype.row_bytes(cols).unwrap()];
        for row in bytes.chunks_mut(dtype.row_bytes(cols).unwrap()) {
            quantize_row(dtype, &vec![0.25; cols], row);
        }
        let mut x = vec![1.0; 2 * cols];
        x[300] = f32::NAN;
        let mut y = [0.0; 4];
        reference::matmul(dtype, &bytes, 2, cols, 2, &x, &mut y, false);
        assert!(y[0].is_nan() && y[1].is_nan() && y[2].is_finite() && y[3].is_finite(), "{dtype}: {y:?}");
    }
}

#[test]
fn large_activations_give_a_finite_product() {
    for dtype in DType::ALL {
        let mut bytes = vec![0; dtype.row_bytes(256).unwrap()];
        quantize_row(dtype, &[1.0; 256], &mut bytes);
        let mut y = [0.0];
        reference::matmul(dtype, &bytes, 1, 256, 1, &[3000.0; 256], &mut y, false);
        assert!((y[0] - 768_000.0).abs() < 12_000.0, "{dtype}: {}", y[0]);
    }
}
