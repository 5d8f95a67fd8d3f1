//! Block formats of quantised weights, and the numeric law that every kernel obeys.
//!
//! # The law
//!
//! A matmul is `y[t, r] = Σ_k w[r, k] · x[t, k]`. Floating-point sums depend on their order, so the order is
//! fixed here once, for every instruction set, tile height and thread count. Results are then equal bit for
//! bit, and a run does not change its tokens because it got another core or another neighbour in the batch.
//!
//! - K is cut in slices of [`SLICE`] elements (the last may be shorter). Each slice has one f32 accumulator
//!   per output, which starts at +0.0 and takes the elements in order. `total` starts at +0.0; after each
//!   slice `total += acc`. The result is `total`, or `y + total` when the job accumulates.
//! - F32, F16 and BF16 weights: `acc = fma(w as f32, x, acc)` for each element. The types of
//!   [`DType::is_expanded`] (Q2_K, Q3_K, IQ4_NL, IQ4_XS, MXFP4) are float weights too: `w` is what
//!   [`dequantize_row`] gives, and x stays F32.
//! - Other quantised weights: activations are quantised in blocks of 32 ([`quantize_activations`]) to codes `q`, a
//!   scale `dx` and the sum of the codes. A [`Group`] of 32 weights has integer codes, a scale `dw` and maybe
//!   a minimum `mw`. `I` is the exact integer dot product of both codes (for Q6_K each half of 16 is multiplied
//!   by its own integer scale). Then `acc = fma(dw · dx, I, acc)` with `dw · dx` rounded to f32, and for
//!   formats with a minimum `acc = fma(mw, dx · sum, acc)` with `dx · sum` rounded to f32. A block of activations that
//!   stands out of its row has a refinement, codes of what the first ones left over: the same terms once more with
//!   these.
//!
//! - The feed-forward of single neurons ([`crate::ClusterWeights::Bundles`]): gate and up are products as above. Down is
//!   that of F32 weights, with the neurons of the layer as K by position: `acc = fma(down as f32, hidden, acc)`. Neurons
//!   that are not listed, and those whose hidden value is 0 for every token, are left out, which changes nothing as long
//!   as weights are finite.
//!
//! Nothing is reassociated. NaN stays NaN; which NaN is not specified.
//!
//! [`mod@reference`] is the law as plain code. Everything faster is compared with it bit by bit.

mod activations;
mod blocks;
mod bundle;
mod expanded;
mod quantize;
mod quantize_expanded;
pub mod reference;

pub use activations::{ACT_BLOCK, OUTLIER, QuantizedRow, add_energy, is_outlier, quantize_activations};
pub use blocks::{
    BlockQ4_0, BlockQ4_1, BlockQ4K, BlockQ5_0, BlockQ5_1, BlockQ5K, BlockQ6K, BlockQ8_0, GROUP, Group, Half,
    QuantBlock, scale_min,
};
pub use bundle::{
    BundleRow, Parts, bundle_row, bundle_row_bytes, bundle_row_part, dequantize_bundle_row, unbundle_row,
};
pub use expanded::{
    BlockIq4Nl, BlockIq4Xs, BlockMxfp4, BlockQ2K, BlockQ3K, ExpandedBlock, IQ4_VALUES, MXFP4_VALUES,
};
pub use quantize::quantize_row;
pub use reference::SLICE;

use crate::DType;

/// Widens weights of type `dtype` to f32, with the same bits as ggml.
///
/// `bytes` holds exactly `out.len()` elements: `dtype.row_bytes(out.len())` bytes.
///
/// # Panics
/// When the lengths do not match.
pub fn dequantize_row(dtype: DType, bytes: &[u8], out: &mut [f32]) {
    assert_eq!(dtype.row_bytes(out.len()), Some(bytes.len()), "{} {dtype} weights", out.len());
    match dtype {
        DType::F32 => widen(bytes, out, f32::from_le_bytes),
        DType::F16 => widen(bytes, out, |b| Half(b).to_f32()),
        DType::BF16 => widen(bytes, out, |b| half::bf16::from_le_bytes(b).to_f32()),
        DType::Q4_0 => dequantize::<BlockQ4_0>(bytes, out),
        DType::Q4_1 => dequantize::<BlockQ4_1>(bytes, out),
        DType::Q5_0 => dequantize::<BlockQ5_0>(bytes, out),
        DType::Q5_1 => dequantize::<BlockQ5_1>(bytes, out),
        DType::Q8_0 => dequantize::<BlockQ8_0>(bytes, out),
        DType::Q4_K => dequantize::<BlockQ4K>(bytes, out),
        DType::Q5_K => dequantize::<BlockQ5K>(bytes, out),
        DType::Q6_K => dequantize::<BlockQ6K>(bytes, out),
        DType::Q2_K => expand::<BlockQ2K>(bytes, out),
        DType::Q3_K => expand::<BlockQ3K>(bytes, out),
        DType::IQ4_NL => expand::<BlockIq4Nl>(bytes, out),
        DType::IQ4_XS => expand::<BlockIq4Xs>(bytes, out),
        DType::MXFP4 => expand::<BlockMxfp4>(bytes, out),
    }
}

fn widen<const N: usize>(bytes: &[u8], out: &mut [f32], f: impl Fn([u8; N]) -> f32) {
    let (elements, _) = bytes.as_chunks::<N>();
    for (o, e) in out.iter_mut().zip(elements) {
        *o = f(*e);
    }
}

fn dequantize<B: QuantBlock>(bytes: &[u8], out: &mut [f32]) {
    let blocks: &[B] = bytemuck::cast_slice(bytes);
    let (out, _) = out.as_chunks_mut::<GROUP>();
    for (block, groups) in blocks.iter().zip(out.chunks_mut(B::GROUPS)) {
        for (i, out) in groups.iter_mut().enumerate() {
            block.group(i).dequantize(out);
        }
    }
}

fn expand<B: ExpandedBlock>(bytes: &[u8], out: &mut [f32]) {
    let blocks: &[B] = bytemuck::cast_slice(bytes);
    let (out, _) = out.as_chunks_mut::<GROUP>();
    for (block, groups) in blocks.iter().zip(out.chunks_mut(B::GROUPS)) {
        for (i, out) in groups.iter_mut().enumerate() {
            block.expand(i, out);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn q4_0_stores_low_nibbles_first() {
        let mut block = vec![0x00, 0x38];
        block.extend([0x1F; 16]);
        let mut out = [0.0; 32];
        dequantize_row(DType::Q4_0, &block, &mut out);
        assert_eq!(out[..16], [3.5; 16]);
        assert_eq!(out[16..], [-3.5; 16]);
    }

    #[test]
    fn block_structs_have_the_size_of_their_type() {
        fn check<B: QuantBlock>() {
            assert_eq!(size_of::<B>(), B::DTYPE.block_bytes());
            assert_eq!(align_of::<B>(), 1);
            assert_eq!(B::GROUPS * GROUP, B::DTYPE.block_elements());
        }
        check::<BlockQ4_0>();
        check::<BlockQ4_1>();
        check::<BlockQ5_0>();
        check::<BlockQ5_1>();
        check::<BlockQ8_0>();
        check::<BlockQ4K>();
        check::<BlockQ5K>();
        check::<BlockQ6K>();
        fn check_expanded<B: ExpandedBlock>() {
            assert_eq!((size_of::<B>(), align_of::<B>()), (B::DTYPE.block_bytes(), 1));
            assert_eq!(B::GROUPS * GROUP, B::DTYPE.block_elements());
            assert!(B::DTYPE.is_expanded());
        }
        check_expanded::<BlockQ2K>();
        check_expanded::<BlockQ3K>();
        check_expanded::<BlockIq4Nl>();
        check_expanded::<BlockIq4Xs>();
        check_expanded::<BlockMxfp4>();
    }

    #[test]
    fn a_nan_scale_shows_in_the_values() {
        let mut block = vec![0x00, 0x7E];
        block.extend([0x88; 16]);
        let mut out = [0.0; 32];
        dequantize_row(DType::Q4_0, &block, &mut out);
        assert!(out.iter().all(|x| x.is_nan()));
    }
}
