//! The non-linearity between the two halves of a feed-forward layer.

use crate::math;

/// What a feed-forward layer computes from a neuron's gate and up value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ActivationKind {
    /// `silu(gate) * up`, as in Llama.
    Silu,
    /// `gelu(gate) * up` in the tanh form, as in Gemma.
    Gelu,
    /// `relu(gate) * up`.
    Relu,
    /// `relu(gate)² * up`.
    Relu2,
    /// `relu(gate) * relu(up)`, as in TurboSparse and Bamboo.
    Drelu,
    /// `gate * up`: for gates that were activated before, with what is off set to 0.
    Linear,
}

impl ActivationKind {
    /// Every kind with the name that model files use.
    pub const NAMES: [(&'static str, ActivationKind); 6] = [
        ("silu", ActivationKind::Silu),
        ("gelu", ActivationKind::Gelu),
        ("relu", ActivationKind::Relu),
        ("relu2", ActivationKind::Relu2),
        ("drelu", ActivationKind::Drelu),
        ("linear", ActivationKind::Linear),
    ];

    /// The kind of that name.
    pub fn from_name(name: &str) -> Option<ActivationKind> {
        Self::NAMES.iter().find(|(n, _)| *n == name).map(|(_, kind)| *kind)
    }

    /// The name of the kind.
    pub fn name(self) -> &'static str {
        Self::NAMES.iter().find(|(_, kind)| *kind == self).map_or("", |(n, _)| n)
    }
}

/// A non-linearity with its cut-off.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Activation {
    /// The function.
    pub kind: ActivationKind,
    /// FATReLU's cut (ReLU family only): a gate value at or below it counts as zero, and so does an up value of
    /// dReLU. 0 for plain ReLU.
    pub threshold: f32,
}

impl Activation {
    /// The function without a cut-off.
    pub const fn new(kind: ActivationKind) -> Activation {
        Activation { kind, threshold: 0.0 }
    }

    /// The hidden value of one neuron.
    #[inline(always)]
    pub fn apply(self, gate: f32, up: f32) -> f32 {
        match self.kind {
            ActivationKind::Silu => silu(gate) * up,
            ActivationKind::Gelu => math::gelu(gate) * up,
            ActivationKind::Relu => self.relu(gate) * up,
            ActivationKind::Relu2 => self.relu(gate) * self.relu(gate) * up,
            ActivationKind::Drelu => self.relu(gate) * self.relu(up),
            ActivationKind::Linear => gate * up,
        }
    }

    /// The part of the hidden value that the gate alone decides: [`Activation::apply`] with [`ActivationKind::Linear`]
    /// gives the same bits from it, dReLU's up value excepted.
    #[inline(always)]
    pub fn gate(self, gate: f32) -> f32 {
        match self.kind {
            ActivationKind::Silu => silu(gate),
            ActivationKind::Gelu => math::gelu(gate),
            ActivationKind::Relu | ActivationKind::Drelu => self.relu(gate),
            ActivationKind::Relu2 => self.relu(gate) * self.relu(gate),
            ActivationKind::Linear => gate,
        }
    }

    /// [`Activation::gate`] of each value, in place.
    #[inline(always)]
    pub fn gate_slice(self, values: &mut [f32]) {
        macro_rules! each {
            ($kind:ident) => {{
                let this = Activation { kind: ActivationKind::$kind, ..self };
                values.iter_mut().for_each(|value| *value = this.gate(*value));
            }};
        }
        match self.kind {
            ActivationKind::Silu => each!(Silu),
            ActivationKind::Gelu => each!(Gelu),
            ActivationKind::Relu | ActivationKind::Drelu => each!(Relu),
            ActivationKind::Relu2 => each!(Relu2),
            ActivationKind::Linear => {}
        }
    }

    /// Whether a gate value makes the hidden value 0 whatever up is, so that the neuron need not be computed further.
    #[inline(always)]
    pub fn is_off(self, gate: f32) -> bool {
        match self.kind {
            ActivationKind::Silu | ActivationKind::Gelu | ActivationKind::Linear => gate == 0.0,
            ActivationKind::Relu | ActivationKind::Relu2 | ActivationKind::Drelu => self.relu(gate) == 0.0,
        }
    }

    /// `hidden[i] = apply(gate[i], up[i])`, with the result written over `gate`.
    #[inline(always)]
    pub fn apply_slice(self, gate: &mut [f32], up: &[f32]) {
        // One loop per kind, so that each vectorises.
        macro_rules! each {
            ($kind:ident) => {{
                let this = Activation { kind: ActivationKind::$kind, ..self };
                gate.iter_mut().zip(up).for_each(|(g, u)| *g = this.apply(*g, *u));
            }};
        }
        match self.kind {
            ActivationKind::Silu => each!(Silu),
            ActivationKind::Gelu => each!(Gelu),
            ActivationKind::Relu => each!(Relu),
            ActivationKind::Relu2 => each!(Relu2),
            ActivationKind::Drelu => each!(Drelu),
            ActivationKind::Linear => each!(Linear),
        }
    }

    /// Keeps NaN, so that a broken input shows.
    #[inline(always)]
    fn relu(self, x: f32) -> f32 {
        if x <= self.threshold { 0.0 } else { x }
    }
}

#[inline(always)]
fn silu(x: f32) -> f32 {
    x / (1.0 + math::exp(-x))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_of_each_kind() {
        let at = |kind, threshold, g, u| Activation { kind, threshold }.apply(g, u);
        assert!((at(ActivationKind::Silu, 0.0, 2.0, 3.0) - 5.284_782_6).abs() < 1e-5);
        assert!((at(ActivationKind::Gelu, 0.0, -1.0, 2.0) + 0.317_616).abs() < 1e-5);
        assert_eq!(at(ActivationKind::Relu, 0.0, 2.0, -3.0), -6.0);
        assert_eq!(at(ActivationKind::Relu, 0.5, 0.5, 3.0), 0.0);
        assert_eq!(at(ActivationKind::Relu2, 0.0, 2.0, 3.0), 12.0);
        assert_eq!(at(ActivationKind::Drelu, 0.0, 2.0, -3.0), 0.0);
        assert_eq!(at(ActivationKind::Linear, 0.0, -2.0, 3.0), -6.0);
        assert!(at(ActivationKind::Relu, 0.0, f32::NAN, 1.0).is_nan());
    }

    #[test]
    fn a_gate_that_is_activated_first_gives_the_same_bits() {
        for (_, kind) in ActivationKind::NAMES {
            let act = Activation { kind, threshold: 0.25 };
            for (g, u) in [(0.7f32, 1.3f32), (-0.4, 2.1), (0.2, 0.9), (3.5, 0.3)] {
                let linear = Activation::new(ActivationKind::Linear).apply(act.gate(g), u);
                assert_eq!(linear.to_bits(), act.apply(g, u).to_bits(), "{kind:?} {g} {u}");
                let mut slice = [g];
                act.gate_slice(&mut slice);
                assert_eq!(slice[0].to_bits(), act.gate(g).to_bits());
            }
        }
    }

    #[test]
    fn a_slice_is_its_elements() {
        for (_, kind) in ActivationKind::NAMES {
            let act = Activation { kind, threshold: 0.25 };
            let up: Vec<f32> = (0..67).map(|i| (i as f32 * 0.37).sin()).collect();
            let mut gate: Vec<f32> = (0..67).map(|i| i as f32 * 0.3 - 10.0).collect();
            let want: Vec<u32> = gate.iter().zip(&up).map(|(g, u)| act.apply(*g, *u).to_bits()).collect();
            act.apply_slice(&mut gate, &up);
            assert_eq!(gate.iter().map(|v| v.to_bits()).collect::<Vec<_>>(), want);
        }
    }
}
