//! Matmuls on packed weights, by the numeric law of [`neuropil_device::quant`].
//!
//! A call computes some row groups of the output for all tokens on the calling thread. Threads share an output by
//! claiming row groups from one [`Columns`](crate::Columns); every output has the same bits whoever computes it.

mod activations;

pub use activations::{ActivationParts, Activations};
pub(crate) use activations::{RECORD, TILE, codes_at, eights, field, tile_height};

use crate::arch::{Isa, Job, Panel};
use crate::mem::ColumnRange;
use crate::pack::Packed;

/// The input of a matmul, `x[tokens, cols]`.
#[derive(Clone, Copy, Debug)]
pub enum Input<'a> {
    /// For weights of type F32, F16 and BF16.
    Floats(&'a [f32]),
    /// For quantised weights.
    Quantized(&'a Activations),
}

/// Computes the rows of `out` of `y = x · wᵀ`, or adds them to y with `accumulate`.
///
/// # Panics
/// When the input is of the wrong kind for the weight, or shapes do not match.
pub fn matmul_groups(isa: Isa, w: &Packed, input: Input<'_>, mut out: ColumnRange<'_>, accumulate: bool) {
    let (tokens, cols) = (out.tokens(), w.cols());
    assert!(out.rows().end <= w.rows(), "the output has {} rows, the weight {}", out.rows().end, w.rows());
    match input {
        Input::Floats(x) => {
            assert!(!w.dtype().is_quantized(), "a weight of type {} needs quantised input", w.dtype());
            assert_eq!(Some(x.len()), tokens.checked_mul(cols), "x is tokens x cols");
        }
        Input::Quantized(acts) => {
            assert!(w.dtype().is_quantized(), "a weight of type {} needs float input", w.dtype());
            assert_eq!((acts.tokens(), acts.cols()), (tokens, cols), "activations are tokens x cols");
        }
    }
    isa.matmul(&mut Job { w: Panel::whole(w), input, pitch: cols, out: &mut out, accumulate });
}

#[cfg(test)]
mod tests;
