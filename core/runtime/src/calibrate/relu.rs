//! Calibration of a model whose gate switches neurons off: they are counted, and predictors of the gate are fitted.
//!
//! The exact gate changes nothing and is always there to fall back to. So the result is opened as a user would open it;
//! if the prediction that is cheapest costs more than it may, the store says that the gate is to decide.

use std::path::Path;

use crate::engine::Engine;
use crate::gguf::{NewTensor, tensor_id};
use crate::predict::Prediction;
use crate::store::{Additions, Store, keys};

use super::counts::Counts;
use super::fold::{Row, rows};
use super::predictor::{Fit, Judged};
use super::samples::Samples;
use super::staging::Interim;
use super::{
    CalibrateError, CalibrateReport, PredictorReport, Quality, RECALLS, Rank, Run, all_seen, floats, loss,
};

/// Memory for samples of all layers.
const SAMPLE_BYTES: usize = 1 << 30;

impl Run<'_, '_> {
    /// Counts, fits, writes, and looks at the result.
    pub(super) fn relu(
        mut self,
        engine: Engine,
        store: &Path,
        out: &Path,
    ) -> Result<CalibrateReport, CalibrateError> {
        let rank = self.rank(&engine)?;
        let activation = engine.spec().activation;
        let share = engine.spec().experts.map_or(1.0, |experts| experts.used as f64 / experts.count as f64);
        let fires = Box::new(move |_: usize, _: usize, _: usize, gate: f32| !activation.is_off(gate));
        let samples = Samples::new(SAMPLE_BYTES, &self.shapes, self.learned(), share)?;
        let both = (Counts::new(fires, &self.shapes)?, samples);
        let (counts, samples) = self.watch(&engine, both, "counting what fires")?;
        let counts = counts.layers;
        all_seen(&samples.layers, |samples| samples.tokens > 0)?;
        let mut additions = Additions::default();
        let predictors = self.predictors(&engine, &samples, rank, share, &mut additions)?;
        if engine.gguf().metadata().get(keys::PREDICT).is_some() {
            // What an earlier calibration said does not hold for this one.
            additions.pairs.set(keys::PREDICT, Prediction::Auto.name());
        }
        drop((engine, samples));
        self.finish(&counts, &mut additions)?;
        let staged = Interim::beside(out)?;
        self.write(store, staged.path(), additions)?;
        let (prediction, after) = self.judge(staged.path())?;
        let after = match after {
            Some(after) => {
                staged.rename(out)?;
                after
            }
            None => {
                let mut last = Additions::default();
                last.pairs.set(keys::PREDICT, prediction.name());
                self.write(staged.path(), out, last)?;
                self.before
            }
        };
        Ok(CalibrateReport { predictors, ..self.report(&counts, prediction, after) })
    }

    /// The rank of predictors, if some are to be fitted.
    fn rank(&self, engine: &Engine) -> Result<Option<usize>, CalibrateError> {
        let least = |shape: &super::LayerShape| shape.width.min(shape.neurons);
        let most = self.shapes.iter().map(least).min().unwrap_or(0);
        match self.options.rank {
            None => Ok(None),
            Some(Rank::Auto) => {
                let rank = (engine.spec().width / 4).next_multiple_of(32);
                Ok(Some(rank.min(most).max(1)))
            }
            Some(Rank::Of(rank)) if (1..=most).contains(&rank) => Ok(Some(rank)),
            Some(Rank::Of(rank)) => Err(CalibrateError::Rank { rank, most }),
        }
    }

    /// How the store's neurons are chosen when nobody says how, and the loss; no loss if that costs too much, and the gate
    /// has to be told to decide.
    fn judge(&mut self, staged: &Path) -> Result<(Prediction, Option<f64>), CalibrateError> {
        let engine = (self.open)(staged, Prediction::Auto)?;
        let chosen = engine.prediction();
        if chosen == Prediction::Gate {
            return Ok((chosen, Some(self.before)));
        }
        // Predictors that a model brings are a part of it, and no choice of ours.
        let own =
            chosen == Prediction::Model && engine.gguf().metadata().get(keys::PREDICTOR_ACTIVE).is_none();
        let limit = if own { f64::INFINITY } else { self.limit() };
        let tried = loss(&engine, &self.text.tries, "trying the prediction", self.progress)?;
        if tried - self.tried > limit {
            return Ok((Prediction::Gate, None));
        }
        let after = loss(&engine, &self.text.check, "measuring the result", self.progress)?;
        if after - self.before > limit {
            return Ok((Prediction::Gate, None));
        }
        Ok((chosen, Some(after)))
    }

    /// Fits predictors of all layers to the samples and puts them among what is to be written. `share` is that of the
    /// experts that a token uses.
    fn predictors(
        &mut self,
        engine: &Engine,
        samples: &Samples,
        rank: Option<usize>,
        share: f64,
        additions: &mut Additions,
    ) -> Result<Vec<PredictorReport>, CalibrateError> {
        let store = Store::read(engine.gguf())?;
        let device = engine.home();
        let activation = engine.spec().activation;
        let (mut four_bits, mut low_rank) = (Summary::default(), Summary::default());
        let total = self.shapes.len() as u64;
        for (layer, (of, shape)) in store.layers.iter().zip(&self.shapes).enumerate() {
            let (width, neurons) = (shape.width, shape.neurons);
            let (mut of_gate, mut of_factors, mut bytes) = (Judged::default(), Judged::default(), 0);
            for (expert, bundles) in of.bundles.iter().enumerate() {
                if !(self.progress)("fitting predictors", layer as u64, total) {
                    return Err(CalibrateError::Cancelled);
                }
                let Some(samples) = samples.layers.get(layer).and_then(|experts| experts.get(expert)) else {
                    return Err(CalibrateError::Unseen { layer, expert });
                };
                let gate = rows(engine.gguf(), bundles, &of.layout, Row::Gate)?;
                let fit = Fit { device, activation, width, neurons, gate: &gate, samples };
                if four_bits_fit(width) {
                    fit.four_bits(&mut of_gate)?;
                }
                let Some(rank) = rank else { continue };
                let seed = self.options.seed ^ (layer as u64) << 16 ^ expert as u64;
                let factors = fit.low_rank(rank, seed, &mut of_factors)?;
                bytes += factors.iter().map(|factor| factor.bytes.len()).sum::<usize>();
                for (name, factor) in ["fc1", "fc2"].into_iter().zip(factors) {
                    let dims = vec![factor.cols as u64, factor.rows as u64];
                    let name = format!("blk.{layer}.{name}{}.weight", shape.suffix(expert));
                    additions
                        .tensors
                        .push((NewTensor::new(name, tensor_id(factor.dtype), dims), factor.bytes));
                }
            }
            if four_bits_fit(width) {
                let bytes = (of.bundles.len() * neurons * width) as f64 * 9.0 / 16.0;
                four_bits.add(bytes * share, of_gate)?;
            }
            if rank.is_some() {
                low_rank.add(bytes as f64 * share, of_factors)?;
            }
        }
        let mut reports = Vec::new();
        if self.shapes.iter().all(|shape| four_bits_fit(shape.width)) {
            additions.pairs.set(keys::GATE4_THRESHOLD, floats(&four_bits.cuts(2)));
            additions.pairs.set(keys::GATE4_ACTIVE, floats(&four_bits.evaluated(2)));
            reports.push(four_bits.report("gate in 4 bits".into()));
        }
        if let Some(rank) = rank {
            additions.pairs.set(keys::PREDICTOR_INPUT, "normed");
            additions.pairs.set(keys::PREDICTOR_ACTIVATION, "linear");
            additions.pairs.set(keys::PREDICTOR_THRESHOLD, floats(&low_rank.cuts(1)));
            additions.pairs.set(keys::PREDICTOR_ACTIVE, floats(&low_rank.evaluated(1)));
            reports.push(low_rank.report(format!("rank {rank}")));
        }
        Ok(reports)
    }
}

/// Whether rows of this width can be in 4 bits: they are whole blocks.
fn four_bits_fit(width: usize) -> bool {
    width.is_multiple_of(32)
}

/// What predictors of one kind are worth, layer by layer.
#[derive(Default)]
struct Summary {
    bytes: f64,
    layers: Vec<Vec<Quality>>,
}

impl Summary {
    fn add(&mut self, bytes: f64, judged: Judged) -> Result<(), CalibrateError> {
        let qualities = judged.qualities(&RECALLS);
        if qualities.iter().any(|quality| !quality.threshold.is_finite()) {
            return Err(CalibrateError::NotANumber);
        }
        self.bytes += bytes;
        self.layers.push(qualities);
        Ok(())
    }

    /// A figure of each layer.
    fn each(&self, recall: usize) -> impl Iterator<Item = &Quality> {
        self.layers.iter().filter_map(move |qualities| qualities.get(recall))
    }

    fn cuts(&self, recall: usize) -> Vec<f32> {
        self.each(recall).map(|quality| quality.threshold).collect()
    }

    fn evaluated(&self, recall: usize) -> Vec<f32> {
        self.each(recall).map(|quality| quality.evaluated as f32).collect()
    }

    fn report(&self, name: String) -> PredictorReport {
        let mean = |of: fn(&Quality) -> f64, recall: usize| {
            self.each(recall).map(of).sum::<f64>() / self.layers.len().max(1) as f64
        };
        let quality = |recall: usize| Quality {
            threshold: mean(|q| f64::from(q.threshold), recall) as f32,
            recall: mean(|q| q.recall, recall),
            evaluated: mean(|q| q.evaluated, recall),
            precision: mean(|q| q.precision, recall),
        };
        PredictorReport { name, bytes: self.bytes as u64, quality: (0..RECALLS.len()).map(quality).collect() }
    }
}
