//! Host operations under an instruction set.
//!
//! Norm, rotation, addition, activation and the widening of weights are the bodies of the device crate, which vectorise
//! once they are compiled with the features enabled; only attention is written in vectors by hand. One value describes
//! any of them, so that an instruction set needs a single function with its features for all.

use neuropil_device::{Activation, DType, Rope, math, rope_rows};

use super::attention::AttentionParts;
use super::lanes::Lanes;
use crate::kernels::expand;

/// One operation, or the part of it that one thread does.
pub(crate) enum HostOp<'a> {
    /// `out = x / rms(x) * weight` for rows of `weight.len()`.
    RmsNorm { x: &'a [f32], weight: &'a [f32], eps: f32, out: &'a mut [f32] },
    /// Rotates rows in place.
    Rope { rope: Rope<'a>, x: &'a mut [f32] },
    /// `x += y`.
    Add { x: &'a mut [f32], y: &'a [f32] },
    /// `gate = act(gate, up)`.
    Activate { activation: Activation, gate: &'a mut [f32], up: &'a [f32] },
    /// `values = gate part of act(values)`.
    Gate { activation: Activation, values: &'a mut [f32] },
    /// Widens 16 rows of a type that is expanded.
    Expand { dtype: DType, rows: &'a [u8], panel: &'a mut [f32] },
    /// The next part of an attention.
    Attention(&'a AttentionParts<'a>),
}

impl HostOp<'_> {
    /// Runs it. `N` as for [`AttentionParts::compute_next`].
    ///
    /// # Safety
    /// The features of V are enabled.
    #[inline(always)]
    pub(super) unsafe fn run<V: Lanes, const N: usize>(self) {
        match self {
            HostOp::RmsNorm { x, weight, eps, out } => {
                let width = weight.len();
                for (x, out) in x.chunks_exact(width).zip(out.chunks_exact_mut(width)) {
                    math::rms_norm_row(x, weight, eps, out);
                }
            }
            HostOp::Rope { rope, x } => rope_rows(&rope, x),
            HostOp::Add { x, y } => x.iter_mut().zip(y).for_each(|(x, y)| *x += *y),
            HostOp::Activate { activation, gate, up } => activation.apply_slice(gate, up),
            HostOp::Gate { activation, values } => activation.gate_slice(values),
            HostOp::Expand { dtype, rows, panel } => expand(dtype, rows, panel),
            // SAFETY: as for this function.
            HostOp::Attention(parts) => unsafe { parts.compute_next::<V, N>() },
        }
    }
}
