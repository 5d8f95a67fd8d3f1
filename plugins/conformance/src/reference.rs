//! What is right, in 64-bit floats, and how far a result is from it.

use neuropil_device::{ActivationKind, Stage};

use crate::bounds::{LEAST_SHARE, NOTHING};

/// Right outputs, `[tokens, rows]`.
#[derive(Clone, Debug, Default)]
pub struct Reference {
    /// The values.
    pub want: Vec<f64>,
    /// How large what was added up is: an error of a share of this is an error of that share.
    pub size: Vec<f64>,
    /// How far a value may be off in addition, where a small error of a gate decides whether a neuron is on.
    pub slack: Vec<f64>,
    /// The length, over all tokens, that an output has at least when it is compared.
    pub least: f64,
    /// Outputs of a token.
    pub rows: usize,
}

/// A matrix that is multiplied: its elements, row after row.
#[derive(Clone, Copy)]
pub struct Elements<'a> {
    /// `rows · cols` values.
    pub values: &'a [f64],
    /// Inputs.
    pub cols: usize,
}

impl Elements<'_> {
    /// `x · wᵀ`.
    pub fn product(&self, x: &[f64]) -> Reference {
        let rows = self.values.len() / self.cols.max(1);
        let mut out = Reference { rows, ..Reference::default() };
        for x in x.chunks_exact(self.cols) {
            for w in self.values.chunks_exact(self.cols) {
                let terms = w.iter().zip(x).map(|(w, x)| w * x);
                let (sum, squares) =
                    terms.fold((0.0, 0.0), |(sum, squares), term| (sum + term, squares + term * term));
                out.want.push(sum);
                out.size.push(squares.sqrt());
            }
        }
        out.slack = vec![0.0; out.want.len()];
        let squares = |values: &[f64]| values.iter().map(|value| value * value).sum::<f64>();
        let of_rows = self.values.chunks_exact(self.cols).map(squares).fold(0.0, f64::max);
        out.least = LEAST_SHARE * (of_rows * squares(x) / self.cols as f64).sqrt();
        out
    }

    /// The sum over neurons of hidden values that have errors of their own.
    fn sum(&self, hidden: &Reference) -> Reference {
        let mut out = self.product(&hidden.want);
        let places = hidden.size.chunks_exact(self.cols).zip(hidden.slack.chunks_exact(self.cols));
        for (token, (sizes, slacks)) in places.enumerate() {
            for (row, w) in self.values.chunks_exact(self.cols).enumerate() {
                let index = token * out.rows + row;
                let of_hidden: f64 = w.iter().zip(sizes).map(|(w, size)| (w * size).powi(2)).sum();
                out.size[index] = (out.size[index].powi(2) + of_hidden).sqrt();
                out.slack[index] = w.iter().zip(slacks).map(|(w, slack)| w.abs() * slack).sum();
            }
        }
        out
    }
}

/// The shares of a unit's rounding that a gate may be near its threshold without deciding either way.
const NEAR: f64 = 0.04;

/// A stage of a feed-forward.
pub struct Step<'a> {
    /// Which.
    pub stage: Stage,
    /// The non-linearity.
    pub activation: ActivationKind,
    /// Its cut.
    pub threshold: f64,
    /// `[tokens, width]`.
    pub x: &'a [f64],
    /// `[tokens, neurons]`: what an earlier stage left.
    pub left: &'a [f64],
}

/// What a stage leaves: in hidden, or in y if it has one.
pub fn feed_forward(gate: Elements<'_>, up: Elements<'_>, down: Elements<'_>, step: &Step<'_>) -> Reference {
    let neurons = down.cols;
    let exact = || Reference {
        want: step.left.to_vec(),
        size: vec![0.0; step.left.len()],
        slack: vec![0.0; step.left.len()],
        least: 0.0,
        rows: neurons,
    };
    let first = if step.stage.has_gate() { gate.product(step.x) } else { exact() };
    let hidden = if step.stage.has_up() { activate(&first, &up.product(step.x), step) } else { first };
    if step.stage.has_down() { down.sum(&hidden) } else { hidden }
}

/// `act(g, u)`, with the sizes and the slack that those of `g` and `u` become.
fn activate(gates: &Reference, ups: &Reference, step: &Step<'_>) -> Reference {
    let mut out = Reference { rows: gates.rows, ..Reference::default() };
    let places = gates.want.iter().zip(&gates.size).zip(ups.want.iter().zip(&ups.size));
    for ((g, g_size), (u, u_size)) in places {
        let (value, slope) = gate(step.activation, step.threshold, *g);
        let is_drelu = step.activation == ActivationKind::Drelu;
        let cut = |v: f64| if v <= step.threshold { 0.0 } else { v };
        let (second, second_slope) =
            if is_drelu { (cut(*u), f64::from(*u > step.threshold)) } else { (*u, 1.0) };
        out.want.push(value * second);
        let sizes = [slope * g_size * second, value * second_slope * u_size];
        out.size.push((sizes[0].powi(2) + sizes[1].powi(2)).sqrt());
        // On the other side of the cut there is another value.
        let mut slack = 0.0;
        if has_cut(step.activation) && (g - step.threshold).abs() <= NEAR * g_size {
            let other = if is_drelu { u.abs() } else { u.abs() * f64::max(1.0, step.threshold) };
            slack += (g.abs() + NEAR * g_size) * (other + NEAR * u_size);
        }
        if is_drelu && (u - step.threshold).abs() <= NEAR * u_size {
            slack += (g.abs() + NEAR * g_size) * (u.abs() + NEAR * u_size);
        }
        out.slack.push(slack);
    }
    out
}

/// Whether a non-linearity uses its threshold.
pub fn has_cut(kind: ActivationKind) -> bool {
    matches!(kind, ActivationKind::Relu | ActivationKind::Relu2 | ActivationKind::Drelu)
}

/// The part of the non-linearity that the gate decides, and its slope.
fn gate(kind: ActivationKind, threshold: f64, g: f64) -> (f64, f64) {
    let cut = if g <= threshold { 0.0 } else { g };
    let smooth = |f: &dyn Fn(f64) -> f64| (f(g), (f(g + 1e-4) - f(g - 1e-4)) / 2e-4);
    match kind {
        ActivationKind::Silu => smooth(&|g| g / (1.0 + (-g).exp())),
        ActivationKind::Gelu => smooth(&|g| {
            let inner = (2.0 / std::f64::consts::PI).sqrt() * (g + 0.044715 * g * g * g);
            0.5 * g * (1.0 + inner.tanh())
        }),
        ActivationKind::Relu | ActivationKind::Drelu => (cut, f64::from(g > threshold)),
        ActivationKind::Relu2 => (cut * cut, 2.0 * cut),
        ActivationKind::Linear => (g, 1.0),
    }
}

impl Reference {
    /// The error of the worst row: the length of what is wrong over that of what was added up, over all tokens. It is
    /// infinite when a value is no number, or one is missing.
    pub fn error(&self, found: &[f32]) -> f64 {
        if found.len() != self.want.len() || found.iter().any(|value| !value.is_finite()) {
            return f64::INFINITY;
        }
        let length = |row: usize, of: &dyn Fn(usize) -> f64| {
            let places = (row..self.want.len()).step_by(self.rows.max(1));
            places.map(|index| of(index).powi(2)).sum::<f64>().sqrt()
        };
        let sizes: Vec<f64> = (0..self.rows).map(|row| length(row, &|index| self.size[index])).collect();
        let greatest = sizes.iter().copied().fold(0.0, f64::max);
        let least = (LEAST_SHARE * greatest).max(self.least).max(NOTHING);
        let errors = sizes.iter().enumerate().map(|(row, size)| {
            let wrong = length(row, &|index| {
                { (f64::from(found[index]) - self.want[index]).abs() - self.slack[index].abs() }.max(0.0)
            });
            wrong / size.max(least)
        });
        errors.fold(0.0, f64::max)
    }

    /// Where the first value is that is no number, in words.
    pub fn not_a_number(&self, found: &[f32]) -> Option<String> {
        let index = found.iter().position(|value| !value.is_finite())?;
        let (token, row) = (index / self.rows.max(1), index % self.rows.max(1));
        Some(format!("the output of token {token}, row {row} is {}", found[index]))
    }

    /// The place of the greatest error, in words.
    pub fn worst_place(&self, found: &[f32]) -> String {
        let share = |index: usize| {
            let wrong = (f64::from(found[index]) - self.want[index]).abs() - self.slack[index];
            wrong / self.size[index].max(NOTHING)
        };
        let worst = (0..self.want.len().min(found.len())).max_by(|a, b| share(*a).total_cmp(&share(*b)));
        let Some(index) = worst else { return "there is no output".into() };
        let (token, row) = (index / self.rows.max(1), index % self.rows.max(1));
        format!("token {token}, row {row} is {:e} and should be {:e}", found[index], self.want[index])
    }
}

/// Wider values.
pub fn widen(values: &[f32]) -> Vec<f64> {
    values.iter().map(|value| f64::from(*value)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_worst_row_counts_and_nothing_else_than_numbers_will_do() {
        let elements = Elements { values: &[1.0, 0.0, 0.0, 2.0], cols: 2 };
        let right = elements.product(&[1.0, 1.0, 3.0, 4.0]);
        assert_eq!((&right.want[..], right.rows), (&[1.0, 2.0, 3.0, 8.0][..], 2));
        assert_eq!(right.error(&[1.0, 2.0, 3.0, 8.0]), 0.0);
        let wrong = right.error(&[1.0, 2.0, 3.0, 8.8]);
        assert!((wrong - 0.8 / 68f64.sqrt()).abs() < 1e-6, "{wrong}");
        let nothing = Elements { values: &[0.0, 4.0], cols: 2 }.product(&[2.0, 0.0]);
        let wrong = nothing.error(&[0.01]);
        assert!((wrong - 0.01 / (LEAST_SHARE * 32f64.sqrt())).abs() < 1e-6, "{wrong}");
        assert_eq!(right.error(&[1.0, 2.0, 3.0]), f64::INFINITY);
        assert_eq!(right.error(&[1.0, f32::NAN, 3.0, 8.0]), f64::INFINITY);
        assert_eq!(
            right.not_a_number(&[1.0, 2.0, f32::NAN, 8.0]).unwrap(),
            "the output of token 1, row 0 is NaN"
        );
        assert_eq!(right.worst_place(&[1.0, 2.0, 3.0, 9.0]), "token 1, row 1 is 9e0 and should be 8e0");
    }

    #[test]
    fn a_gate_at_its_threshold_may_go_either_way() {
        let elements = Elements { values: &[1.0], cols: 1 };
        for activation in [ActivationKind::Relu, ActivationKind::Relu2, ActivationKind::Drelu] {
            let step = Step { stage: Stage::GateUp, activation, threshold: 0.25, x: &[0.2501], left: &[] };
            let found = feed_forward(elements, elements, elements, &step);
            assert_eq!(found.error(&[0.0]), 0.0, "{activation:?}");
            let far = Step { x: &[0.5], ..step };
            assert!(feed_forward(elements, elements, elements, &far).error(&[0.0]) > 0.3, "{activation:?}");
        }
    }
}
