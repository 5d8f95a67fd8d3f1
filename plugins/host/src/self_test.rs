//! Small products of every scheme against double precision, when a unit is opened.
//!
//! What a driver says of itself is not enough: there are real ones that take per-channel weights and use the first
//! channel's scale for all of them. What comes out wrong is switched off, with the figure as the reason.
//!
//! The reference takes the weights as the unit gets them, so only its arithmetic is measured. An error is relative to
//! the root of the sum of the squared terms, which does not vanish where a sum does. Rows have scales that differ
//! sixteenfold, and the worst row counts, so that a wrong channel or tile is not averaged away.

use neuropil_device::{Activation, ActivationKind, DType, DeviceError, Matrix, Stage};

use crate::border::Parts;
use crate::choose::Choice;
use crate::session::{Inputs, Session};
use crate::weight::Weight;
use crate::{Encoded, Scheme};

/// Shapes that are tried, in this order, until the unit takes one.
const SHAPES: [usize; 3] = [64, 256, 1024];

/// Tokens of a unit that takes any count, and most tokens of a test.
const ANY_TOKENS: usize = 3;
const MOST_TOKENS: usize = 128;

/// Largest error: F16 arithmetic and activations of 8 bits are well below, and a wrong scale or tile well above.
const MATMUL_BOUND: f64 = 0.05;
const CLUSTER_BOUND: f64 = 0.12;

/// What a test found.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Finding {
    /// It works, with this error; `None` when it was not tested.
    Works(Option<f64>),
    /// The unit does not take it, and why.
    Refused(String),
    /// It was switched off, and why.
    Wrong(String),
}

/// The findings of every scheme: for matmuls (false) and clusters (true).
pub(crate) type Findings = Vec<(bool, Scheme, Finding)>;

/// Numbers from -1 to 1 that look random.
struct Noise(u64);

impl Noise {
    fn next(&mut self) -> f32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 40) as f32 / 8_388_608.0 - 1.0
    }

    fn values(&mut self, count: usize) -> Vec<f32> {
        (0..count).map(|_| self.next()).collect()
    }

    /// A matrix in `scheme`; row scales differ by up to sixteen.
    fn matrix(
        &mut self,
        rows: usize,
        cols: usize,
        choice: &Choice,
        scheme: Scheme,
    ) -> Result<Encoded, DeviceError> {
        let mut data = Vec::with_capacity(rows * cols * 4);
        for row in 0..rows {
            let scale = 0.25 * f32::from(1u8 << (row % 5));
            (0..cols).for_each(|_| data.extend_from_slice(&(self.next() * scale).to_le_bytes()));
        }
        let matrix = Matrix { dtype: DType::F32, rows, cols, data: &data };
        Encoded::new(&matrix, scheme, if choice.outliers { 30 } else { 0 })
    }
}

impl Session {
    /// Tests every scheme, or only asks for it, and switches off what is wrong.
    pub(crate) fn self_test(&mut self) -> Findings {
        let mut findings = Findings::new();
        for clusters in [false, true] {
            for scheme in Scheme::ALL {
                let finding = self.find(clusters, scheme);
                match &finding {
                    Finding::Wrong(reason) => self.switch_off(clusters, scheme, reason.clone()),
                    Finding::Works(Some(error)) if !clusters => self.remember_error(scheme, *error),
                    _ => {}
                }
                findings.push((clusters, scheme, finding));
            }
        }
        findings
    }

    fn find(&mut self, clusters: bool, scheme: Scheme) -> Finding {
        let mut refused = String::new();
        for size in SHAPES {
            let choice = match clusters {
                false => self.choice(scheme, size, size),
                true => self.block_choice(Stage::Fused, (scheme, scheme), (size, size)),
            };
            let choice = match choice {
                Ok(choice) => choice,
                Err(reason) => {
                    if refused.is_empty() {
                        refused = reason;
                    }
                    continue;
                }
            };
            if !self.options.self_test {
                return Finding::Works(None);
            }
            let tested = match clusters {
                false => self.test_matmul(size, &choice),
                true => self.test_cluster(size, &choice, scheme),
            };
            let bound = if clusters { CLUSTER_BOUND } else { MATMUL_BOUND };
            return match tested {
                Ok(error) if error <= bound => Finding::Works(Some(error)),
                Ok(error) => Finding::Wrong(format!(
                    "its results are wrong: an error of {error:.3} in the self-test, where {bound} is allowed"
                )),
                Err(error) => Finding::Wrong(format!("the self-test failed: {error}")),
            };
        }
        Finding::Refused(refused)
    }

    /// The least and the greatest token count that are tested.
    fn test_tokens(choice: &Choice) -> Vec<usize> {
        let mut tokens = match choice.buckets.first() {
            None => vec![ANY_TOKENS],
            Some(least) => vec![*least],
        };
        tokens.extend(choice.buckets.iter().rev().find(|bucket| **bucket <= MOST_TOKENS));
        tokens.dedup();
        tokens
    }

    fn test_matmul(&self, size: usize, choice: &Choice) -> Result<f64, DeviceError> {
        let mut noise = Noise(7);
        let matrix = noise.matrix(size, size, choice, choice.scheme)?;
        let (mut part, _) = self.prepare(&Parts::One(&matrix), choice.buckets.clone(), None)?;
        // What is looked for here is the error itself.
        part.projection = None;
        let mut worst = 0f64;
        for tokens in Self::test_tokens(choice) {
            let x = noise.values(tokens * size);
            let (want, norms) = product(&matrix, &widen(&x));
            let got = self.multiply(&[&part], tokens, x)?.pop().unwrap_or_default();
            worst = worst.max(error(&got, &want, &norms, size));
        }
        Ok(worst)
    }

    /// Whether blocks of two schemes come out right: tested when the first is to be made, for there are many pairs. What
    /// cannot be tested works.
    pub(crate) fn pair_works(&mut self, scheme: Scheme, down: Scheme) -> bool {
        if scheme == down || !self.options.self_test {
            return true;
        }
        if let Some(works) = self.pairs.get(&(scheme, down)) {
            return *works;
        }
        let taken = SHAPES.into_iter().find_map(|size| {
            Some((size, self.block_choice(Stage::Fused, (scheme, down), (size, size)).ok()?))
        });
        let works = taken.is_none_or(|(size, choice)| {
            self.test_cluster(size, &choice, down).is_ok_and(|error| error <= CLUSTER_BOUND)
        });
        self.pairs.insert((scheme, down), works);
        works
    }

    fn test_cluster(&self, size: usize, choice: &Choice, down: Scheme) -> Result<f64, DeviceError> {
        let mut noise = Noise(11);
        let mut matrix = |scheme| noise.matrix(size, size, choice, scheme);
        let (gate, up, down) = (matrix(choice.scheme)?, matrix(choice.scheme)?, matrix(down)?);
        let parts = Parts::Neurons { gate: &gate, up: &up, down: &down };
        let weight = Weight::Block(self.prepare(&parts, choice.buckets.clone(), None)?.0);
        let mut worst = 0f64;
        for tokens in Self::test_tokens(choice) {
            let x: Vec<f32> = noise.values(tokens * size).iter().map(|x| x * 0.25).collect();
            let (gates, _) = product(&gate, &widen(&x));
            let (ups, _) = product(&up, &widen(&x));
            for (_, kind) in ActivationKind::NAMES {
                let activation = Activation::new(kind);
                let hidden = gates.iter().zip(&ups).map(|(g, u)| activate(kind, *g, *u)).collect::<Vec<_>>();
                let (want, norms) = product(&down, &hidden);
                let inputs = Inputs { x: x.clone(), hidden: Vec::new() };
                let got = self.feed_forward(&weight, Stage::Fused, activation, tokens, inputs)?;
                worst = worst.max(error(&got.y, &want, &norms, size));
            }
        }
        Ok(worst)
    }
}

fn widen(x: &[f32]) -> Vec<f64> {
    x.iter().map(|x| f64::from(*x)).collect()
}

/// `[tokens, rows]` products, and for each the sum of its squared terms.
fn product(matrix: &Encoded, x: &[f64]) -> (Vec<f64>, Vec<f64>) {
    let (rows, cols) = (matrix.rows, matrix.cols);
    let tokens = x.len() / cols;
    let (mut y, mut norms) = (vec![0.0; tokens * rows], vec![0.0; tokens * rows]);
    let mut wide = vec![0f32; cols];
    for row in 0..rows {
        matrix.widen_row(row, &mut wide);
        for (token, x) in x.chunks_exact(cols).enumerate() {
            let terms = wide.iter().zip(x).map(|(w, x)| f64::from(*w) * x);
            (y[token * rows + row], norms[token * rows + row]) =
                terms.fold((0.0, 0.0), |(sum, squares), term| (sum + term, squares + term * term));
        }
    }
    (y, norms)
}

/// The error of the worst row, over all tokens. What is not a number is an infinite error.
fn error(got: &[f32], want: &[f64], norms: &[f64], rows: usize) -> f64 {
    let mut worst = 0f64;
    for row in 0..rows {
        let of_row = |values: &[f64]| values.iter().skip(row).step_by(rows).copied().collect::<Vec<f64>>();
        let got = got.iter().skip(row).step_by(rows).map(|v| f64::from(*v));
        let squares: f64 = got.zip(of_row(want)).map(|(got, want)| (got - want) * (got - want)).sum();
        let norm: f64 = of_row(norms).iter().sum();
        let error = (squares / norm.max(f64::MIN_POSITIVE)).sqrt();
        if error.is_nan() {
            return f64::INFINITY;
        }
        worst = worst.max(error);
    }
    worst
}

/// The non-linearity in double precision.
fn activate(kind: ActivationKind, gate: f64, up: f64) -> f64 {
    let gate = match kind {
        ActivationKind::Silu => gate / (1.0 + (-gate).exp()),
        ActivationKind::Gelu => {
            let inner = (2.0 / std::f64::consts::PI).sqrt() * (gate + 0.044715 * gate * gate * gate);
            0.5 * gate * (1.0 + inner.tanh())
        }
        ActivationKind::Relu | ActivationKind::Drelu => gate.max(0.0),
        ActivationKind::Relu2 => gate.max(0.0) * gate.max(0.0),
        ActivationKind::Linear => gate,
    };
    gate * if kind == ActivationKind::Drelu { up.max(0.0) } else { up }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_worst_row_counts_and_nan_is_worst() {
        let want = [1.0, 2.0, 3.0, 4.0];
        let norms = [1.0; 4];
        assert_eq!(error(&[1.0, 2.0, 3.0, 4.0], &want, &norms, 2), 0.0);
        assert_eq!(error(&[1.0, 2.5, 3.0, 4.5], &want, &norms, 2), 0.5);
        assert_eq!(error(&[f32::NAN, 2.0, 3.0, 4.0], &want, &norms, 2), f64::INFINITY);
        assert_eq!(error(&[f32::NAN, 9.0, 3.0, 4.0], &want, &norms, 2), f64::INFINITY);
    }

    #[test]
    fn the_reference_has_the_values_of_the_contract() {
        for (_, kind) in ActivationKind::NAMES {
            for (gate, up) in [(0.7f32, -1.3f32), (-0.4, 2.0), (1.9, 0.1)] {
                let want = Activation::new(kind).apply(gate, up);
                let got = activate(kind, f64::from(gate), f64::from(up));
                assert!((got - f64::from(want)).abs() < 1e-5, "{kind:?} {gate} {up}: {got} {want}");
            }
        }
    }
}
