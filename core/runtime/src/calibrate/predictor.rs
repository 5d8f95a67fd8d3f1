//! Predictors of a ReLU model's gate, fitted to a text and judged by it.
//!
//! *In 4 bits*: the gate itself, requantised; only its cut is fitted. *Of low rank*: the gates of a text, G = H Wᵀ, lie near
//! the space of their first r singular vectors V, so V Vᵀ W predicts them best among all matrices of rank r for inputs
//! like these. V is found by multiplying a random start with GᵀG a few times.

use std::sync::Arc;

use neuropil_device::{
    Activation, Buffer, DType, Device, MatmulJob, Matrix, PreparedWeight, Product, WeightSource,
};

use crate::submit::Jobs;

use super::CalibrateError;
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
    pub(super) fn four_bits(rows: &[f32], cols: usize) -> Stored {
        let dtype = if cols.is_multiple_of(32) { DType::Q4_0 } else { DType::F16 };
        Stored { dtype, rows: rows.len() / cols.max(1), cols, bytes: super::quantized(dtype, cols, rows) }
    }

    fn prepare(&self, device: &dyn Device) -> Result<PreparedWeight, CalibrateError> {
        let data: &[u8] = &self.bytes;
        let matrix = Matrix { dtype: self.dtype, rows: self.rows, cols: self.cols, data: &data };
        Ok(device.prepare(WeightSource::Matrix(matrix), None)?)
    }
}

impl Fit<'_> {
    /// The gate in 4 bits at these recalls.
    pub(super) fn four_bits(&self, recalls: &[f64]) -> Result<Vec<Quality>, CalibrateError> {
        let gate = Stored::four_bits(self.gate, self.width).prepare(&**self.device)?;
        let judges = self.judges();
        let scores = self.multiply(&gate, &judges.0, self.neurons)?;
        Ok(self.qualities(&scores, &judges.1, recalls))
    }

    /// Factors of rank `rank`, and what they are worth at these recalls.
    pub(super) fn low_rank(
        &self,
        rank: usize,
        seed: u64,
        recalls: &[f64],
    ) -> Result<([Stored; 2], Vec<Quality>), CalibrateError> {
        let neurons = self.neurons;
        let gates = self.samples.gates();
        let fitted: Vec<&[f32]> =
            rows(&gates, neurons).filter(|(t, _)| t % JUDGES != 0).map(|(_, g)| g).collect();
        // The basis lies as `rank` rows of `neurons`.
        let mut basis = random(rank * neurons, seed);
        orthonormal(&mut basis, neurons);
        for _ in 0..POWERS {
            let mut next = vec![0.0; rank * neurons];
            for gate in &fitted {
                for (v, next) in basis.chunks_exact(neurons).zip(next.chunks_exact_mut(neurons)) {
                    let along = dot(v, gate);
                    next.iter_mut().zip(*gate).for_each(|(n, g)| *n += along * g);
                }
            }
            basis = next;
            orthonormal(&mut basis, neurons);
        }
        let mut first = vec![0.0; rank * self.width];
        for (v, row) in basis.chunks_exact(neurons).zip(first.chunks_exact_mut(self.width)) {
            for (v, gate) in v.iter().zip(self.gate.chunks_exact(self.width)) {
                row.iter_mut().zip(gate).for_each(|(r, g)| *r += v * g);
            }
        }
        let mut second = vec![0.0; rank * neurons];
        for (r, v) in basis.chunks_exact(neurons).enumerate() {
            v.iter().enumerate().for_each(|(n, v)| second[n * rank + r] = *v);
        }
        let factors = [Stored::four_bits(&first, self.width), Stored::four_bits(&second, rank)];
        let judges = self.judges();
        let hidden = self.multiply(&factors[0].prepare(&**self.device)?, &judges.0, rank)?;
        let scores = self.multiply(&factors[1].prepare(&**self.device)?, &hidden, neurons)?;
        let qualities = self.qualities(&scores, &judges.1, recalls);
        Ok((factors, qualities))
    }

    /// Inputs and gates of the samples that judge.
    fn judges(&self) -> (Vec<f32>, Vec<f32>) {
        let (inputs, gates) = (self.samples.inputs(), self.samples.gates());
        let of = |values: &[f32], len: usize| {
            rows(values, len).filter(|(t, _)| t % JUDGES == 0).flat_map(|(_, row)| row.to_vec()).collect()
        };
        (of(&inputs, self.width), of(&gates, self.neurons))
    }

    fn multiply(&self, weight: &PreparedWeight, x: &[f32], rows: usize) -> Result<Vec<f32>, CalibrateError> {
        let neuropil_device::WeightShape::Matrix { cols, .. } = weight.shape() else { return Ok(Vec::new()) };
        let tokens = x.len() / cols.max(1);
        let (input, y) = (Buffer::host(4 * x.len())?, Buffer::host(4 * tokens * rows)?);
        input.write()?.slice_mut::<f32>()[..x.len()].copy_from_slice(x);
        let product = Product { weight: weight.clone(), y: y.write()?, accumulate: false };
        Jobs::default().matmul(&**self.device, MatmulJob::new(tokens, input.read()?).with(product))?;
        let y = y.read()?;
        Ok(y.slice::<f32>()[..tokens * rows].to_vec())
    }

    /// What scores are worth at these recalls.
    fn qualities(&self, scores: &[f32], gates: &[f32], recalls: &[f64]) -> Vec<Quality> {
        let fires = |gate: &f32| !self.activation.is_off(*gate);
        let mut firing: Vec<f32> =
            scores.iter().zip(gates).filter(|(_, gate)| fires(gate)).map(|(score, _)| *score).collect();
        firing.sort_unstable_by(f32::total_cmp);
        let quality = |recall: &f64| {
            let missed = ((1.0 - recall) * firing.len() as f64) as usize;
            // Just below the score of the first that must be found.
            let threshold = firing.get(missed).map_or(0.0, |score| score.next_down());
            let found = firing.len() - firing.partition_point(|score| *score <= threshold);
            let evaluated = scores.iter().filter(|score| **score > threshold).count();
            Quality {
                threshold,
                recall: found as f64 / firing.len().max(1) as f64,
                evaluated: evaluated as f64 / scores.len().max(1) as f64,
                precision: found as f64 / evaluated.max(1) as f64,
            }
        };
        recalls.iter().map(quality).collect()
    }
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

/// Numbers from -1 to 1, the same for a seed everywhere (splitmix64).
fn random(count: usize, seed: u64) -> Vec<f32> {
    let value = |index: u64| {
        let mut z = seed.wrapping_add(index.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    };
    (1..=count as u64).map(value).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_basis_is_orthonormal_and_drops_what_depends() {
        let mut rows = random(3 * 40, 1);
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
}
