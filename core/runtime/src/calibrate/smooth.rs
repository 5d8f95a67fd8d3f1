//! Calibration of a model whose gate never is zero: constants, then cuts, then counts.
//!
//! The cuts are found by trying: what each layer costs is measured once, which predicts what shares of neurons can be left
//! out for how much; a few tries on chunks that were not learned from set the prediction right.

use std::path::Path;

use neuropil_device::DType;

use crate::engine::Engine;
use crate::gguf::{NewTensor, tensor_id};
use crate::predict::Prediction;
use crate::store::{Additions, Store, keys};

use super::allocate::{PROBE, mean, predicted, price_of, shares, shares_of_mean};
use super::centre::{Centres, Curve};
use super::counts::Counts;
use super::divergence::Reference;
use super::fold::UpDown;
use super::gates::{Gates, Seen};
use super::predictor::quantized;
use super::staging::Interim;
use super::{CalibrateError, CalibrateReport, Run, Target, all_seen, floats, loss};

/// Chunks on which each layer is measured.
const PROBE_CHUNKS: usize = 1;
/// The least that a layer is taken to cost, as a share of the mean.
const LEAST_COST: f64 = 0.1;
/// Prices that are tried.
const TRIES: usize = 6;
/// A try that costs at least this share of what it may is near enough.
const NEAR: f64 = 0.9;

impl Run<'_, '_> {
    /// Finds constants, cuts and counts, and writes them.
    pub(super) fn smooth(
        mut self,
        engine: Engine,
        store: &Path,
        out: &Path,
    ) -> Result<CalibrateReport, CalibrateError> {
        let activation = engine.spec().activation;
        let gates = Gates::new(activation, &self.shapes, self.learned())?;
        let gates = self.watch(&engine, gates, "reading the gates")?.layers;
        all_seen(&gates, |seen| seen.tokens > 0)?;
        let (additions, centres) = self.constants(&engine, gates)?;
        drop(engine);
        let staged = Interim::beside(out)?;
        self.write(store, staged.path(), additions)?;
        let engine = (self.open)(staged.path(), Prediction::Threshold)?;
        let curves: Vec<Curve> = centres.iter().map(|experts| Curve::of(experts)).collect();
        let costs = self.probe(&engine, &curves)?;
        let shares = self.choose(&engine, &curves, &costs)?;
        let cuts = cuts(&curves, &shares);
        set(&engine, &cuts);
        let after = loss(&engine, &self.text.check, "measuring the result", self.progress)?;
        let fires = {
            let cuts = cuts.clone();
            move |layer: usize, expert: usize, neuron: usize, gate: f32| {
                let center = centres.get(layer).and_then(|experts| experts.get(expert)?.center.get(neuron));
                let cut = cuts.get(layer).copied().unwrap_or(0.0);
                center.is_none_or(|center| (activation.gate(gate) - center).abs() > cut)
            }
        };
        let counts = Counts::new(Box::new(fires), &self.shapes)?;
        let counts = self.watch(&engine, counts, "counting what fires")?.layers;
        all_seen(&counts, |counts| counts.batches[0] > 0)?;
        drop(engine);
        let mut additions = Additions::default();
        additions.pairs.set(keys::THRESHOLD, floats(&cuts));
        self.finish(&counts, &mut additions)?;
        self.write(staged.path(), out, additions)?;
        let report = self.report(&counts, Prediction::Threshold, after);
        Ok(CalibrateReport { thresholds: Some(cuts), cost: Some(costs), ..report })
    }

    /// The constants of all layers and experts, and what of them goes into the store.
    fn constants(
        &mut self,
        engine: &Engine,
        gates: Vec<Vec<Seen>>,
    ) -> Result<(Additions, Vec<Vec<Centres>>), CalibrateError> {
        let gguf = engine.gguf();
        let store = Store::read(gguf)?;
        let device = engine.home().clone();
        let mut additions = Additions::default();
        let mut all = Vec::new();
        let total = store.layers.len() as u64;
        for (layer, ((of, shape), seen)) in store.layers.iter().zip(&self.shapes).zip(gates).enumerate() {
            let mut experts = Vec::new();
            for (expert, (bundles, seen)) in of.bundles.iter().zip(seen).enumerate() {
                if !(self.progress)("folding the constants", layer as u64, total) {
                    return Err(CalibrateError::Cancelled);
                }
                let rows = UpDown::read(gguf, bundles, of.layout)?;
                let centres = Centres::new(&seen.gates, &rows.weight())?;
                drop(seen);
                let width = shape.width;
                let fold = rows.fold(&device, &centres.center)?;
                if fold.iter().any(|value| !value.is_finite()) {
                    return Err(CalibrateError::NotANumber);
                }
                let dtype = if width.is_multiple_of(32) { DType::Q8_0 } else { DType::F16 };
                let bytes = quantized(dtype, width, &fold)?;
                let suffix = shape.suffix(expert);
                let name = format!("blk.{layer}.ffn_fold{suffix}.weight");
                let dims = vec![width as u64, width as u64];
                additions.tensors.push((NewTensor::new(name, tensor_id(dtype), dims), bytes));
                let name = format!("blk.{layer}.ffn_center{suffix}");
                let dims = vec![shape.neurons as u64];
                let center = bytemuck::cast_slice(&centres.center).to_vec();
                additions.tensors.push((NewTensor::new(name, tensor_id(DType::F32), dims), center));
                experts.push(centres);
            }
            all.push(experts);
        }
        additions.pairs.set(keys::THRESHOLD, floats(&vec![0.0; all.len()]));
        Ok((additions, all))
    }

    /// What it costs to leave out the probe's share of each layer.
    fn probe(&mut self, engine: &Engine, curves: &[Curve]) -> Result<Vec<f64>, CalibrateError> {
        set(engine, &vec![-1.0; curves.len()]);
        let probe = self.text.tries.len().min(PROBE_CHUNKS);
        let reference = Reference::new(engine, &self.text.tries[..probe])?;
        let mut costs = Vec::new();
        for (layer, of) in curves.iter().enumerate() {
            engine.thresholds().set(layer, of.cut(PROBE));
            let what = format!("measuring layer {} of {}", layer + 1, curves.len());
            costs.push(reference.divergence(engine, &what, self.progress)?.max(0.0));
            engine.thresholds().set(layer, -1.0);
        }
        // A layer that seems to cost nothing is only measured badly.
        let typical = costs.iter().sum::<f64>() / costs.len().max(1) as f64;
        costs.iter_mut().for_each(|cost| *cost = cost.max(LEAST_COST * typical).max(1e-9));
        Ok(costs)
    }

    /// The share of neurons to leave out in each layer.
    fn choose(
        &mut self,
        engine: &Engine,
        curves: &[Curve],
        costs: &[f64],
    ) -> Result<Vec<f64>, CalibrateError> {
        if let Target::Sparsity(share) = self.options.target {
            return Ok(shares_of_mean(curves, costs, share));
        }
        let target = self.limit();
        let mut best = vec![0.0; curves.len()];
        // Losses of layers add up roughly; `off` is by how much the sum was wrong at the last try.
        let (mut low, mut high, mut off) = (0.0f64, f64::INFINITY, 1.0f64);
        for _ in 0..TRIES {
            let mut price = price_of(curves, costs, target / off);
            if price <= low || price >= high {
                price = if high.is_finite() { (low.max(high / 16.0) * high).sqrt() } else { 2.0 * low };
            }
            let shares = shares(curves, costs, price);
            set(engine, &cuts(curves, &shares));
            let what = format!("trying to leave out {:.0} %", 100.0 * mean(&shares));
            let rise = loss(engine, &self.text.tries, &what, self.progress)? - self.tried;
            if rise <= target {
                (best, low) = (shares.clone(), price);
                if rise >= NEAR * target {
                    break;
                }
            } else {
                high = price;
            }
            let expected = predicted(curves, costs, &shares);
            if expected > 0.0 {
                off = (rise / expected).clamp(0.05, 20.0);
            }
        }
        Ok(best)
    }
}

fn set(engine: &Engine, cuts: &[f32]) {
    cuts.iter().enumerate().for_each(|(layer, cut)| engine.thresholds().set(layer, *cut));
}

/// The cuts that leave out these shares; no share leaves out nothing, not even what equals its constant.
fn cuts(curves: &[Curve], shares: &[f64]) -> Vec<f32> {
    let cut = |(curve, share): (&Curve, &f64)| if *share > 0.0 { curve.cut(*share) } else { -1.0 };
    curves.iter().zip(shares).map(cut).collect()
}
