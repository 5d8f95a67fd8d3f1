//! Matmuls on packed weights, by the numeric law of [`neuropil_device::quant`].
//!
//! A call computes some row groups of the output for all tokens on the calling thread. Threads share an output by
//! claiming row groups from one [`Columns`](crate::Columns); every output has the same bits whoever computes it.

mod activations;
mod expand;
mod groups;

pub use activations::{ActivationParts, Activations};
pub(crate) use activations::{RECORD, TILE, codes_at, eights, field, tile_height};
pub use expand::Panels;
pub(crate) use expand::{MOST_COLS, expand};
pub(crate) use groups::Groups;

use crate::arch::{Isa, Job};
use crate::mem::ColumnRange;
use crate::pack::Packed;

/// The input of a matmul, `x[tokens, cols]`.
#[derive(Clone, Copy, Debug)]
pub enum Input<'a> {
    /// For weights of type F32, F16 and BF16.
    Floats(&'a [f32]),
    /// For weights of a type that [`is_expanded`](neuropil_device::DType::is_expanded), with room for a thread to do so.
    Expanded(&'a [f32], &'a Panels),
    /// For weights of a type that [`quantizes_activations`](neuropil_device::DType::quantizes_activations).
    Quantized(&'a Activations),
}

/// Computes the rows of `out` of `y = x · wᵀ`, or adds them to y with `accumulate`.
///
/// # Panics
/// When the input is of the wrong kind for the weight, shapes do not match, or there is no room to expand.
pub fn matmul_groups(isa: Isa, w: &Packed, input: Input<'_>, mut out: ColumnRange<'_>, accumulate: bool) {
    let (tokens, cols) = (out.tokens(), w.cols());
    assert!(out.rows().end <= w.rows(), "the output has {} rows, the weight {}", out.rows().end, w.rows());
    match input {
        Input::Floats(x) => {
            assert_eq!(w.dtype().block_elements(), 1, "a weight of type {} needs other input", w.dtype());
            assert_eq!(Some(x.len()), tokens.checked_mul(cols), "x is tokens x cols");
        }
        Input::Expanded(x, panels) => {
            assert!(w.dtype().is_expanded(), "a weight of type {} is not expanded", w.dtype());
            assert_eq!(Some(x.len()), tokens.checked_mul(cols), "x is tokens x cols");
            return expand::matmul(isa, w, x, panels, &mut out, accumulate);
        }
        Input::Quantized(acts) => {
            assert!(w.dtype().quantizes_activations(), "a weight of type {} needs float input", w.dtype());
            assert_eq!((acts.tokens(), acts.cols()), (tokens, cols), "activations are tokens x cols");
        }
    }
    isa.matmul(&mut Job { w: Groups::of(w), input, pitch: cols, out: &mut out, accumulate });
}

#[cfg(test)]
mod tests;
