//! The numeric law as scalar code: slow, short, and what every kernel must equal bit by bit.

use super::{
    BlockQ4_0, BlockQ4_1, BlockQ4K, BlockQ5_0, BlockQ5_1, BlockQ5K, BlockQ6K, BlockQ8_0, GROUP, Group,
    QuantBlock, QuantizedRow, dequantize_row, quantize_activations,
};
use crate::DType;

/// Elements of K that share one accumulator.
pub const SLICE: usize = 512;

/// `y[tokens, rows] = x[tokens, cols] · wᵀ`, or `y += …` with `accumulate`, by the law of [`super`].
///
/// `weights` are `rows` rows of `cols` elements in the layout of a file.
///
/// # Panics
/// When a length does not match its shape.
#[expect(clippy::too_many_arguments, reason = "a matmul is its shape and its three matrices")]
pub fn matmul(
    dtype: DType,
    weights: &[u8],
    rows: usize,
    cols: usize,
    tokens: usize,
    x: &[f32],
    y: &mut [f32],
    accumulate: bool,
) {
    assert_eq!(dtype.matrix_bytes(rows, cols), Some(weights.len()), "{rows} x {cols} weights of {dtype}");
    assert_eq!(x.len(), tokens * cols, "x is tokens x cols");
    assert_eq!(y.len(), tokens * rows, "y is tokens x rows");
    if rows == 0 || tokens == 0 {
        return;
    }
    let row_bytes = weights.len() / rows;
    for t in 0..tokens {
        let input = Input::new(&x[t * cols..][..cols], dtype.quantizes_activations());
        for r in 0..rows {
            let total = dot(dtype, &weights[r * row_bytes..][..row_bytes], &input);
            let y = &mut y[t * rows + r];
            *y = if accumulate { *y + total } else { total };
        }
    }
}

/// The activations of one token: as they came, and quantised where the weights are.
struct Input<'a> {
    x: &'a [f32],
    row: QuantizedRow,
    fine: QuantizedRow,
}

impl<'a> Input<'a> {
    fn new(x: &'a [f32], quantized: bool) -> Self {
        let (row, fine) = quantize_activations(if quantized { x } else { &[] });
        Input { x, row, fine }
    }
}

fn dot(dtype: DType, row: &[u8], input: &Input<'_>) -> f32 {
    match dtype {
        DType::F32 | DType::F16 | DType::BF16 => dot_float(dtype, row, input.x),
        DType::Q4_0 => dot_quantized::<BlockQ4_0>(row, input),
        DType::Q4_1 => dot_quantized::<BlockQ4_1>(row, input),
        DType::Q5_0 => dot_quantized::<BlockQ5_0>(row, input),
        DType::Q5_1 => dot_quantized::<BlockQ5_1>(row, input),
        DType::Q8_0 => dot_quantized::<BlockQ8_0>(row, input),
        DType::Q4_K => dot_quantized::<BlockQ4K>(row, input),
        DType::Q5_K => dot_quantized::<BlockQ5K>(row, input),
        DType::Q6_K => dot_quantized::<BlockQ6K>(row, input),
        DType::Q2_K | DType::Q3_K | DType::IQ4_NL | DType::IQ4_XS | DType::MXFP4 => {
            dot_float(dtype, row, input.x)
        }
    }
}

fn dot_float(dtype: DType, row: &[u8], x: &[f32]) -> f32 {
    let mut w = vec![0.0; x.len()];
    dequantize_row(dtype, row, &mut w);
    let mut total = 0.0f32;
    for (w, x) in w.chunks(SLICE).zip(x.chunks(SLICE)) {
        let mut acc = 0.0f32;
        for (w, x) in w.iter().zip(x) {
            acc = w.mul_add(*x, acc);
        }
        total += acc;
    }
    total
}

fn dot_quantized<B: QuantBlock>(row: &[u8], input: &Input<'_>) -> f32 {
    let blocks: &[B] = bytemuck::cast_slice(row);
    let groups = input.row.d.len();
    let mut total = 0.0f32;
    for slice in (0..groups).step_by(SLICE / GROUP) {
        let mut acc = 0.0f32;
        for g in slice..groups.min(slice + SLICE / GROUP) {
            let w = blocks[g / B::GROUPS].group(g % B::GROUPS);
            acc = add_group(acc, &w, &input.row, g);
            if input.fine.d[g] != 0.0 {
                acc = add_group(acc, &w, &input.fine, g);
            }
        }
        total += acc;
    }
    total
}

/// The terms of one group of weights.
fn add_group(acc: f32, w: &Group, input: &QuantizedRow, g: usize) -> f32 {
    let (d, sum) = (input.d[g], input.sum[g]);
    let mut i = 0;
    for (k, (code, q)) in w.codes.iter().zip(&input.q[g * GROUP..]).enumerate() {
        i += w.scales[k / 16] * (i32::from(*code) - w.offset) * i32::from(*q);
    }
    let acc = (w.dw * d).mul_add(i as f32, acc);
    match w.mw {
        Some(mw) => mw.mul_add(d * sum as f32, acc),
        None => acc,
    }
}
