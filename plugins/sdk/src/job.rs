//! Work as it comes over the border, after every length was checked.

use std::any::Any;
use std::time::{Duration, Instant};

use neuropil_plugin_abi as abi;

/// Which part of a feed-forward a job computes; the header has the formulas.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u32)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the header describes them")]
pub enum Stage {
    Gate = abi::NP_STAGE_GATE,
    Up = abi::NP_STAGE_UP,
    Down = abi::NP_STAGE_DOWN,
    GateUp = abi::NP_STAGE_GATE_UP,
    UpDown = abi::NP_STAGE_UP_DOWN,
    Fused = abi::NP_STAGE_FUSED,
}

impl Stage {
    /// Every stage.
    pub const ALL: [Stage; 6] =
        [Stage::Gate, Stage::Up, Stage::Down, Stage::GateUp, Stage::UpDown, Stage::Fused];

    pub(crate) fn from_number(number: u32) -> Option<Stage> {
        Stage::ALL.into_iter().find(|stage| *stage as u32 == number)
    }

    /// Whether gate rows are multiplied.
    pub fn has_gate(self) -> bool {
        matches!(self, Stage::Gate | Stage::GateUp | Stage::Fused)
    }

    /// Whether up rows are multiplied, and the activation is applied.
    pub fn has_up(self) -> bool {
        matches!(self, Stage::Up | Stage::GateUp | Stage::UpDown | Stage::Fused)
    }

    /// Whether `y` is written.
    pub fn has_down(self) -> bool {
        matches!(self, Stage::Down | Stage::UpDown | Stage::Fused)
    }
}

/// The function of an [`Activation`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u32)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the header describes them")]
pub enum ActivationKind {
    Silu = abi::NP_ACT_SILU,
    Gelu = abi::NP_ACT_GELU,
    Relu = abi::NP_ACT_RELU,
    Relu2 = abi::NP_ACT_RELU2,
    Drelu = abi::NP_ACT_DRELU,
    Linear = abi::NP_ACT_LINEAR,
}

impl ActivationKind {
    /// Every kind.
    pub const ALL: [ActivationKind; 6] = [
        ActivationKind::Silu,
        ActivationKind::Gelu,
        ActivationKind::Relu,
        ActivationKind::Relu2,
        ActivationKind::Drelu,
        ActivationKind::Linear,
    ];

    pub(crate) fn from_number(number: u32) -> Option<ActivationKind> {
        ActivationKind::ALL.into_iter().find(|kind| *kind as u32 == number)
    }
}

/// The non-linearity of a feed-forward.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Activation {
    /// The function.
    pub kind: ActivationKind,
    /// What does not lie above it counts as 0, in the ReLU family.
    pub threshold: f32,
}

impl Activation {
    /// The hidden value of one neuron.
    pub fn apply(self, gate: f32, up: f32) -> f32 {
        let cut = |v: f32| if v <= self.threshold { 0.0 } else { v };
        match self.kind {
            ActivationKind::Silu => gate / (1.0 + (-gate).exp()) * up,
            ActivationKind::Gelu => {
                let inner = 0.797_884_6 * (gate + 0.044_715 * gate * gate * gate);
                0.5 * gate * (1.0 + inner.tanh()) * up
            }
            ActivationKind::Relu => cut(gate) * up,
            ActivationKind::Relu2 => cut(gate) * cut(gate) * up,
            ActivationKind::Drelu => cut(gate) * cut(up),
            ActivationKind::Linear => gate * up,
        }
    }
}

/// When a job must be over.
#[derive(Clone, Copy, Debug)]
pub struct Deadline(Option<Instant>);

impl Deadline {
    /// `nanoseconds` from now; 0 for none.
    pub fn after(nanoseconds: u64) -> Deadline {
        let after = Some(Duration::from_nanos(nanoseconds)).filter(|after| !after.is_zero());
        Deadline(after.and_then(|after| Instant::now().checked_add(after)))
    }

    /// The time that is left, zero when it is over; `None` when there is no deadline.
    pub fn remaining(self) -> Option<Duration> {
        self.0.map(|at| at.saturating_duration_since(Instant::now()))
    }

    /// Whether it is over.
    pub fn passed(self) -> bool {
        self.remaining().is_some_and(|left| left.is_zero())
    }
}

/// Where a buffer lies in memory that [`crate::PluginDevice::import`] made.
#[derive(Clone, Copy)]
pub struct Placed<'a> {
    /// What `import` gave.
    pub memory: &'a (dyn Any + Send + Sync),
    /// Bytes from its start.
    pub offset: usize,
}

/// Values that a job reads.
#[derive(Clone, Copy)]
pub struct Input<'a> {
    /// The values, row after row.
    pub values: &'a [f32],
    /// Where they lie in imported memory, if they do.
    pub placed: Option<Placed<'a>>,
}

/// Values that a job writes.
pub struct Output<'a> {
    /// The values, row after row.
    pub values: &'a mut [f32],
    /// Where they lie in imported memory, if they do.
    pub placed: Option<Placed<'a>>,
}

/// One product of a [`MatmulJob`].
pub struct Product<'a, W> {
    /// The weight.
    pub weight: &'a W,
    /// Its outputs.
    pub rows: usize,
    /// `[tokens, rows]`, to be overwritten.
    pub y: Output<'a>,
}

/// `y[t, r] = Σ_c w[r, c] · x[t, c]` for one input and 1 to 4 weights that share it.
pub struct MatmulJob<'a, W> {
    /// Tokens, at least 1: one of the buckets, if there are any.
    pub tokens: usize,
    /// Inputs of every weight.
    pub cols: usize,
    /// Past it, answer [`crate::Code::Timeout`] if you can.
    pub deadline: Deadline,
    /// `[tokens, cols]`.
    pub x: Input<'a>,
    /// The products.
    pub products: Vec<Product<'a, W>>,
}

/// A stage of the feed-forward of a prepared block of neurons.
pub struct ClusterJob<'a, W> {
    /// Which part.
    pub stage: Stage,
    /// The non-linearity.
    pub activation: Activation,
    /// Tokens, at least 1: one of the buckets, if there are any.
    pub tokens: usize,
    /// Neurons of the block.
    pub neurons: usize,
    /// Width of the model.
    pub width: usize,
    /// Past it, answer [`crate::Code::Timeout`] if you can.
    pub deadline: Deadline,
    /// The block.
    pub weight: &'a W,
    /// `[tokens, width]`; `None` for [`Stage::Down`].
    pub x: Option<Input<'a>>,
    /// `[tokens, neurons]`; `None` for [`Stage::Fused`].
    pub hidden: Option<Output<'a>>,
    /// `[tokens, width]`, to be overwritten; `None` for a stage without a sum.
    pub y: Option<Output<'a>>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_of_each_activation() {
        let at = |kind, threshold, g, u| Activation { kind, threshold }.apply(g, u);
        assert!((at(ActivationKind::Silu, 0.0, 2.0, 3.0) - 5.284_782_6).abs() < 1e-5);
        assert!((at(ActivationKind::Gelu, 0.0, -1.0, 2.0) + 0.317_616).abs() < 1e-5);
        assert_eq!(at(ActivationKind::Relu, 0.5, 0.5, 3.0), 0.0);
        assert_eq!(at(ActivationKind::Relu2, 0.0, 2.0, 3.0), 12.0);
        assert_eq!(at(ActivationKind::Drelu, 0.0, 2.0, -3.0), 0.0);
        assert_eq!(at(ActivationKind::Linear, 0.0, -2.0, 3.0), -6.0);
    }

    #[test]
    fn a_deadline_of_nothing_never_comes() {
        assert_eq!(Deadline::after(0).remaining(), None);
        assert!(!Deadline::after(0).passed() && !Deadline::after(u64::MAX).passed());
        let soon = Deadline::after(1);
        std::thread::sleep(Duration::from_micros(1));
        assert!(soon.passed());
    }
}
