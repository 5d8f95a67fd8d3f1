//! Predictors of a ReLU model's gate, fitted to a text and judged by it.
//!
//! *In 4 bits*: the gate itself, requantised; only its cut is fitted. *Of low rank*: the gates of a text, G = H Wᵀ, lie near
//! the space of their first r singular vectors V, so V Vᵀ W predicts them best among all matrices of rank r for inputs
//! like these. V is found by multiplying a random start with GᵀG a few times.

use std::sync::Arc;

use neuropil_device::{
    Activation, Buffer, DType, Device, MatmulJob, Matrix, PreparedWeight, Product, WeightSource, quant,
};

use crate::submit::Jobs;

use super::CalibrateError;
use super::memory::{reserve, zeros};
use super::samples::LayerSamples;

/// Multiplications with GᵀG.
const POWERS: usize = 3;
/// Of the samples, every so many judge and are not fitted to.
const JUDGES: usize = 4;

/// How much must be computed for a share of the neurons that fire.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Quality {
    /// Scores above it count as firing.
    pub threshold: f32,
    /// Share of the firing neurons that are found.
    pub recall: f64,
    /// Share of all neurons that count as firing.
    pub evaluated: f64,
    /// Share of those that do fire.
    pub precision: f64,
}

/// The samples of a layer with its gate rows.
pub(super) struct Fit<'a> {
    pub device: &'a Arc<dyn Device>,
    pub activation: Activation,
    pub width: usize,
    pub neurons: usize,
    /// The gate, `[neurons, width]`.
    pub gate: &'a [f32],
    pub samples: &'a LayerSamples,
}

/// A matrix as a file holds it.
pub(super) struct Stored {
    pub dtype: DType,
    pub rows: usize,
    pub cols: usize,
    pub bytes: Vec<u8>,
}

impl Stored {
    /// Quantises rows of `cols` values: to 4 bits where they are whole blocks.
    pub(super) fn four_bits(rows: &[f32], cols: usize) -> Result<Stored, CalibrateError> {
        let dtype = if cols.is_multiple_of(32) { DType::Q4_0 } else { DType::F16 };
        Ok(Stored { dtype, rows: rows.len() / cols.max(1), cols, bytes: quantized(dtype, cols, rows)? })
    }

    fn prepare(&self, device: &dyn Device) -> Result<PreparedWeight, CalibrateError> {
        let data: &[u8] = &self.bytes;
        let matrix = Matrix { dtype: self.dtype, rows: self.rows, cols: self.cols, data: &data };
        Ok(device.prepare(WeightSource::Matrix(matrix), None)?)
    }
}

impl Fit<'_> {
    /// Judges the gate in 4 bits.
    pub(super) fn four_bits(&self, judged: &mut Judged) -> Result<(), CalibrateError> {
        let gate = Stored::four_bits(self.gate, self.width)?.prepare(&**self.device)?;
        let judges = self.judges()?;
        let scores = self.multiply(&gate, &judges.0, self.neurons)?;
        judged.add(self.activation, &scores, &judges.1)
    }

    /// Factors of rank `rank`, judged.
    pub(super) fn low_rank(
        &self,
        rank: usize,
        seed: u64,
        judged: &mut Judged,
    ) -> Result<[Stored; 2], CalibrateError> {
        let neurons = self.neurons;
        let gates = self.samples.gates()?;
        let fitted: Vec<&[f32]> =
            rows(&gates, neurons).filter(|(t, _)| t % JUDGES != 0).map(|(_, g)| g).collect();
        // The basis lies as `rank` rows of `neurons`.
        let mut basis = zeros(rank * neurons)?;
        random(&mut basis, seed);
        orthonormal(&mut basis, neurons);
        for _ in 0..POWERS {
            let mut next = zeros(rank * neurons)?;
            for gate in &fitted {
                for (v, next) in basis.chunks_exact(neurons).zip(next.chunks_exact_mut(neurons)) {
                    let along = dot(v, gate);
                    next.iter_mut().zip(*gate).for_each(|(n, g)| *n += along * g);
                }
            }
            basis = next;
            orthonormal(&mut basis, neurons);
        }
        let mut first = zeros::<f32>(rank * self.width)?;
        for (v, row) in basis.chunks_exact(neurons).zip(first.chunks_exact_mut(self.width)) {
            for (v, gate) in v.iter().zip(self.gate.chunks_exact(self.width)) {
                row.iter_mut().zip(gate).for_each(|(r, g)| *r += v * g);
            }
        }
        let mut second = zeros::<f32>(rank * neurons)?;
        for (r, v) in basis.chunks_exact(neurons).enumerate() {
            v.iter().enumerate().for_each(|(n, v)| second[n * rank + r] = *v);
        }
        let factors = [Stored::four_bits(&first, self.width)?, Stored::four_bits(&second, rank)?];
        let judges = self.judges()?;
        let hidden = self.multiply(&factors[0].prepare(&**self.device)?, &judges.0, rank)?;
        let scores = self.multiply(&factors[1].prepare(&**self.device)?, &hidden, neurons)?;
        judged.add(self.activation, &scores, &judges.1)?;
        Ok(factors)
    }

    /// Inputs and gates of the samples that judge.
    fn judges(&self) -> Result<(Vec<f32>, Vec<f32>), CalibrateError> {
        let of = |values: Vec<f32>, len: usize| {
            let mut judges = Vec::new();
            for (_, row) in rows(&values, len).filter(|(t, _)| t % JUDGES == 0) {
                reserve(&mut judges, len)?;
                judges.extend_from_slice(row);
            }
            Ok::<Vec<f32>, CalibrateError>(judges)
        };
        Ok((of(self.samples.inputs()?, self.width)?, of(self.samples.gates()?, self.neurons)?))
    }

    fn multiply(&self, weight: &PreparedWeight, x: &[f32], rows: usize) -> Result<Vec<f32>, CalibrateError> {
        let neuropil_device::WeightShape::Matrix { cols, .. } = weight.shape() else { return Ok(Vec::new()) };
        let tokens = x.len() / cols.max(1);
        let (input, y) = (Buffer::host(4 * x.len())?, Buffer::host(4 * tokens * rows)?);
        input.write()?.slice_mut::<f32>()[..x.len()].copy_from_slice(x);
        let product = Product { weight: weight.clone(), y: y.write()?, accumulate: false };
        Jobs::default().matmul(&**self.device, MatmulJob::new(tokens, input.read()?).with(product))?;
        let y = y.read()?;
        let mut scores = zeros(tokens * rows)?;
        scores.copy_from_slice(&y.slice::<f32>()[..tokens * rows]);
        Ok(scores)
    }
}

/// The scores of a layer's neurons, its experts together, of tokens that judge.
#[derive(Debug, Default)]
pub(super) struct Judged {
    scores: Vec<f32>,
    /// Those of them that belong to neurons that fire.
    firing: Vec<f32>,
}

impl Judged {
    fn add(&mut self, activation: Activation, scores: &[f32], gates: &[f32]) -> Result<(), CalibrateError> {
        reserve(&mut self.scores, scores.len())?;
        self.scores.extend_from_slice(scores);
        let firing = || scores.iter().zip(gates).filter(|(_, gate)| !activation.is_off(**gate));
        reserve(&mut self.firing, firing().count())?;
        self.firing.extend(firing().map(|(score, _)| *score));
        Ok(())
    }

    /// The cuts at which these shares of the firing neurons are found, and what they are worth.
    pub(super) fn qualities(mut self, recalls: &[f64]) -> Vec<Quality> {
        self.scores.sort_unstable_by(f32::total_cmp);
        self.firing.sort_unstable_by(f32::total_cmp);
        let above = |sorted: &[f32], cut: f32| sorted.len() - sorted.partition_point(|score| *score <= cut);
        let quality = |recall: &f64| {
            let missed = ((1.0 - recall) * self.firing.len() as f64) as usize;
            // Just below the score of the first that must be found.
            let threshold = self.firing.get(missed).map_or(0.0, |score| score.next_down());
            let [found, evaluated] = [&self.firing, &self.scores].map(|sorted| above(sorted, threshold));
            Quality {
                threshold,
                recall: found as f64 / self.firing.len().max(1) as f64,
                evaluated: evaluated as f64 / self.scores.len().max(1) as f64,
                precision: found as f64 / evaluated.max(1) as f64,
            }
        };
        recalls.iter().map(quality).collect()
    }
}

/// Rows of `width` values, as a file holds them.
pub(super) fn quantized(dtype: DType, width: usize, rows: &[f32]) -> Result<Vec<u8>, CalibrateError> {
    let row_bytes = dtype.row_bytes(width).unwrap_or(0);
    let mut bytes = zeros(row_bytes * (rows.len() / width.max(1)))?;
    let pairs = rows.chunks_exact(width.max(1)).zip(bytes.chunks_exact_mut(row_bytes.max(1)));
    pairs.for_each(|(row, out)| quant::quantize_row(dtype, row, out));
    Ok(bytes)
}

fn rows(values: &[f32], len: usize) -> impl Iterator<Item = (usize, &[f32])> {
    values.chunks_exact(len.max(1)).enumerate()
}

/// In eight parts, so that it vectorises.
fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut sums = [0.0f32; 8];
    for (a, b) in a.as_chunks::<8>().0.iter().zip(b.as_chunks::<8>().0) {
        for i in 0..8 {
            sums[i] += a[i] * b[i];
        }
    }
    let rest = a.len() / 8 * 8;
    sums.iter().sum::<f32>() + a[rest..].iter().zip(&b[rest..]).map(|(a, b)| a * b).sum::<f32>()
}

/// Makes rows of `len` orthonormal, one after the other; one that depends on others becomes 0.
fn orthonormal(rows: &mut [f32], len: usize) {
    for at in 0..rows.len() / len {
        let (before, rest) = rows.split_at_mut(at * len);
        let row = &mut rest[..len];
        let size = dot(row, row).sqrt();
        for _ in 0..2 {
            for other in before.chunks_exact(len) {
                let along = dot(other, row);
                row.iter_mut().zip(other).for_each(|(r, o)| *r -= along * o);
            }
        }
        let left = dot(row, row).sqrt();
        let scale = if left > 1e-5 * size { 1.0 / left } else { 0.0 };
        row.iter_mut().for_each(|r| *r *= scale);
    }
}

/// Fills with numbers from -1 to 1, the same for a seed everywhere (splitmix64).
fn random(values: &mut [f32], seed: u64) {
    for (value, index) in values.iter_mut().zip(1u64..) {
        let mut z = seed.wrapping_add(index.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        *value = ((z ^ (z >> 31)) >> 40) as f32 / (1u64 << 23) as f32 - 1.0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_basis_is_orthonormal_and_drops_what_depends() {
        let mut rows = vec![0.0; 3 * 40];
        random(&mut rows, 1);
        rows.extend_from_within(..40);
        orthonormal(&mut rows, 40);
        for i in 0..3 {
            for j in 0..3 {
                let want = if i == j { 1.0 } else { 0.0 };
                assert!((dot(&rows[40 * i..][..40], &rows[40 * j..][..40]) - want).abs() < 1e-5);
            }
        }
        assert!(rows[120..].iter().all(|x| *x == 0.0));
    }

    #[test]
    fn experts_share_the_cut_of_all_their_scores() {
        let relu = Activation::new(neuropil_device::ActivationKind::Relu);
        let mut judged = Judged::default();
        judged.add(relu, &[0.1, 0.2, 0.3, 0.4], &[1.0; 4]).unwrap();
        judged.add(relu, &[5.0, 6.0, 7.0, 8.0, -1.0], &[1.0, 1.0, 1.0, 1.0, -1.0]).unwrap();
        let quality = judged.qualities(&[0.5])[0];
        assert_eq!((quality.threshold, quality.recall), (5f32.next_down(), 0.5));
        assert_eq!((quality.evaluated, quality.precision), (4.0 / 9.0, 1.0));
    }
}
