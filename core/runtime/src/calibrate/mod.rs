//! Calibration: what a text tells of a model's neurons, written into its store.
//!
//! How often each neuron fires decides the order of the neurons and, later, what stays in memory. For models whose gate
//! never is zero it also finds the constants and cuts of the centred thresholds ([`crate::predict::Centred`]), so that the
//! loss on text that it did not learn from stays within a target. No weight is changed, and nothing is trained but what
//! predicts.

mod allocate;
mod centre;
mod counts;
mod divergence;
mod error;
mod fold;
mod gates;
mod histogram;
mod predictor;
mod samples;
mod text;

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use neuropil_device::{Activation, DType, quant};

use crate::engine::{Engine, EngineError, SessionOptions};
use crate::gguf::{Array, Gguf, NewTensor, Value, tensor_id};
use crate::predict::{GateObserver, Prediction, SharedObserver};
use crate::store::{Additions, BATCHES, ConvertOptions, Layout, Store, convert};

use allocate::{PROBE, mean, shares, shares_of_mean};
use centre::Centres;
use counts::{Counts, LayerCounts};
use divergence::Reference;
use fold::{Row, UpDown, rows};
use gates::Gates;
use predictor::Fit;
use samples::Samples;
use text::Text;

pub use error::CalibrateError;
pub use predictor::Quality;

/// Chunks on which each layer is measured.
const PROBE_CHUNKS: usize = 1;
/// Memory for samples of all layers.
const SAMPLE_BYTES: usize = 1 << 30;
/// The least that a layer is taken to cost, as a share of the mean.
const LEAST_COST: f64 = 0.1;

/// How far thresholds may go.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Target {
    /// Perplexity on held-out text may rise by this share.
    Loss(f64),
    /// This share of the neurons is to be left out, whatever it costs.
    Sparsity(f64),
}

/// How a calibration is done.
#[derive(Clone, Copy, Debug)]
pub struct CalibrateOptions {
    /// How far thresholds may go.
    pub target: Target,
    /// Most chunks of 512 tokens to use of the text.
    pub chunks: usize,
    /// For a model of the ReLU family: also fit predictors of this rank.
    pub rank: Option<usize>,
    /// Where random starts come from.
    pub seed: u64,
}

impl Default for CalibrateOptions {
    fn default() -> CalibrateOptions {
        CalibrateOptions { target: Target::Loss(0.01), chunks: 50, rank: None, seed: 0 }
    }
}

/// What a calibration found.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct CalibrateReport {
    /// Tokens that were learned from, and tokens of the held-out chunks.
    pub tokens: [usize; 2],
    /// Perplexity on the held-out chunks, all neurons computed.
    pub before: f64,
    /// The same with what was found.
    pub after: f64,
    /// Share of neurons that fire, layer by layer, on the text that was learned from.
    pub active: Vec<f64>,
    /// Of the neurons that fire for a token, the share that fired for the token before, layer by layer.
    pub overlap: Vec<f64>,
    /// The cuts, if the model's gate needs them.
    pub thresholds: Option<Vec<f32>>,
    /// What leaving 70 % of a layer's neurons out costs, as divergence of the predictions in nats, layer by layer.
    pub cost: Option<Vec<f64>>,
    /// What predictors of a ReLU model are worth at each of [`RECALLS`], mean of layers.
    pub predictors: Vec<PredictorReport>,
}

/// The shares of firing neurons that predictors are judged at; the store keeps the cut of the last for the gate in 4
/// bits, and that of the second for predictors of low rank.
pub const RECALLS: [f64; 3] = [0.9, 0.95, 0.98];

/// One kind of predictor.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct PredictorReport {
    /// What it is.
    pub name: String,
    /// Bytes of weights that a token's prediction reads, all layers.
    pub bytes: u64,
    /// At each of [`RECALLS`], mean of layers.
    pub quality: Vec<Quality>,
}

/// What is under way: a sentence, and how much of how much of it is done. False stops the calibration.
pub type CalibrateProgress<'a> = dyn FnMut(&str, u64, u64) -> bool + 'a;

/// Opens an engine on a store, with neurons chosen in a given way.
pub type Open<'a> = dyn Fn(&Path, Prediction) -> Result<Engine, EngineError> + 'a;

/// Calibrates a model on a text and writes the result, a neuron store, to `out`. `model` is a store, which may be `out`
/// itself, or any file that [`convert`] takes.
///
/// # Errors
/// [`CalibrateError`]; then `out` is as it was.
pub fn calibrate(
    model: &Path,
    out: &Path,
    text: &[u8],
    options: &CalibrateOptions,
    open: &Open<'_>,
    progress: &mut CalibrateProgress<'_>,
) -> Result<CalibrateReport, CalibrateError> {
    let converted;
    let store = if Store::is_store(&Gguf::open_header(model)?) {
        model
    } else {
        converted = Staged(staged_path(out, "converted"));
        convert(model, &converted.0, &ConvertOptions::default(), &mut |done, total| {
            progress("converting", done, total)
        })?;
        &converted.0
    };
    let engine = open(store, Prediction::Gate)?;
    let activation = engine.spec().activation;
    let text = Text::new(&engine, text, options.chunks)?;
    let before = loss(&engine, &text.check, "measuring the dense model", progress)?;
    let mut run = Run { text, options: *options, before, activation, open, progress };
    if activation.is_off(-1.0) { run.relu(engine, store, out) } else { run.smooth(engine, store, out) }
}

/// One calibration under way.
struct Run<'a, 'b> {
    text: Text,
    options: CalibrateOptions,
    /// Loss per token of the held-out chunks, all neurons computed.
    before: f64,
    activation: Activation,
    open: &'a Open<'a>,
    progress: &'a mut CalibrateProgress<'b>,
}

impl Run<'_, '_> {
    /// A model whose gate switches neurons off: its neurons are counted, and predictors of the gate are fitted.
    fn relu(&mut self, engine: Engine, store: &Path, out: &Path) -> Result<CalibrateReport, CalibrateError> {
        let activation = self.activation;
        let parts: usize = Store::read(engine.gguf())?.layers.iter().map(|layer| layer.bundles.len()).sum();
        let fires = Box::new(move |_: usize, _: usize, gate: f32| !activation.is_off(gate));
        let both = (Counts::new(fires), Samples::new(SAMPLE_BYTES, parts));
        let (counts, samples) = self.watch(&engine, both, "counting what fires")?;
        let mut additions = Additions::default();
        let predictors = self.predictors(&engine, &samples, &mut additions)?;
        drop((engine, samples));
        let counts = counts.layers;
        self.finish(&counts, &mut additions);
        self.write(store, out, additions)?;
        Ok(CalibrateReport { predictors, ..self.report(&counts, self.before) })
    }

    /// Fits predictors of all layers to the samples and puts them among what is to be written.
    fn predictors(
        &mut self,
        engine: &Engine,
        samples: &Samples,
        additions: &mut Additions,
    ) -> Result<Vec<PredictorReport>, CalibrateError> {
        let store = Store::read(engine.gguf())?;
        let device = engine.devices().first().ok_or(EngineError::NoDevice)?;
        let (mut four_bits, mut low_rank) = (Summary::default(), Summary::default());
        let total = store.layers.len() as u64;
        for (layer, of) in store.layers.iter().enumerate() {
            if !(self.progress)("fitting predictors", layer as u64, total) {
                return Err(CalibrateError::Cancelled);
            }
            let Layout { width, neurons, .. } = of.layout;
            for (expert, bundles) in of.bundles.iter().enumerate() {
                let Some(samples) = samples.layers.get(layer).and_then(|experts| experts.get(expert)) else {
                    return Err(CalibrateError::Unseen { layer, expert });
                };
                let gate = rows(engine.gguf(), bundles, &of.layout, Row::Gate)?;
                let fit = Fit { device, activation: self.activation, width, neurons, gate: &gate, samples };
                four_bits.add(layer, (neurons * width * 9 / 16) as u64, fit.four_bits(&RECALLS)?);
                let Some(rank) = self.options.rank else { continue };
                let seed = self.options.seed ^ (layer as u64) << 16 ^ expert as u64;
                let (factors, quality) = fit.low_rank(rank, seed, &RECALLS)?;
                low_rank.add(layer, factors.iter().map(|factor| factor.bytes.len() as u64).sum(), quality);
                let which = if of.bundles.len() > 1 { format!(".{expert}") } else { String::new() };
                for (name, factor) in ["fc1", "fc2"].into_iter().zip(factors) {
                    let dims = vec![factor.cols as u64, factor.rows as u64];
                    let name = format!("blk.{layer}.{name}{which}.weight");
                    additions
                        .tensors
                        .push((NewTensor::new(name, tensor_id(factor.dtype), dims), factor.bytes));
                }
            }
        }
        let cuts = |summary: &Summary, recall: usize| floats(&summary.cuts(recall));
        additions.pairs.set("neuropil.gate4_threshold", cuts(&four_bits, 2));
        additions.pairs.set("neuropil.gate4_active", floats(&four_bits.evaluated(2)));
        let mut reports = vec![four_bits.report("gate in 4 bits".into())];
        if let Some(rank) = self.options.rank {
            additions.pairs.set("neuropil.predictor.input", "normed");
            additions.pairs.set("neuropil.predictor.activation", "linear");
            additions.pairs.set("neuropil.predictor.threshold", cuts(&low_rank, 1));
            additions.pairs.set("neuropil.predictor.active", floats(&low_rank.evaluated(1)));
            reports.push(low_rank.report(format!("rank {rank}")));
        }
        Ok(reports)
    }

    /// A model whose gate never is zero: constants, then cuts, then counts.
    fn smooth(
        &mut self,
        engine: Engine,
        store: &Path,
        out: &Path,
    ) -> Result<CalibrateReport, CalibrateError> {
        let gates = self.watch(&engine, Gates::new(self.activation), "reading the gates")?.layers;
        let (additions, centres) = self.constants(&engine, gates)?;
        drop(engine);
        let staged = Staged(staged_path(out, "calibrating"));
        self.write(store, &staged.0, additions)?;
        let engine = (self.open)(&staged.0, Prediction::Threshold)?;
        let costs = self.probe(&engine, &centres)?;
        let shares = self.choose(&engine, &centres, &costs)?;
        let cuts: Vec<f32> = centres.iter().zip(&shares).map(|(layer, share)| cut(layer, *share)).collect();
        set(&engine, &cuts);
        let after = loss(&engine, &self.text.check, "measuring the result", self.progress)?;
        let fires = {
            let (cuts, activation) = (cuts.clone(), self.activation);
            let center: Vec<Vec<f32>> = centres.iter().map(|layer| layer.center.clone()).collect();
            move |layer: usize, neuron: usize, gate: f32| {
                (activation.gate(gate) - center[layer][neuron]).abs() > cuts[layer]
            }
        };
        let counts = self.count(&engine, Box::new(fires))?;
        drop(engine);
        let mut additions = Additions::default();
        additions.pairs.set("neuropil.ffn_threshold", floats(&cuts));
        self.finish(&counts, &mut additions);
        self.write(&staged.0, out, additions)?;
        Ok(CalibrateReport { thresholds: Some(cuts), cost: Some(costs), ..self.report(&counts, after) })
    }

    /// Runs the chunks to learn from past an observer.
    fn watch<O: GateObserver + 'static>(
        &mut self,
        engine: &Engine,
        observer: O,
        what: &str,
    ) -> Result<O, CalibrateError> {
        let observer = Arc::new(Mutex::new(observer));
        let shared: SharedObserver = observer.clone();
        let mut session =
            engine.session(SessionOptions { sparse_prompt: true, ..SessionOptions::default() })?;
        session.observe(Some(shared));
        let total = self.text.learn.len() as u64;
        for (done, chunk) in self.text.learn.iter().enumerate() {
            if !(self.progress)(what, done as u64, total) {
                return Err(CalibrateError::Cancelled);
            }
            session.truncate(0);
            session.prefill(chunk)?;
        }
        drop(session);
        // The session was the only other owner.
        let observer = Arc::into_inner(observer).ok_or(CalibrateError::Cancelled)?;
        Ok(observer.into_inner().unwrap_or_else(PoisonError::into_inner))
    }

    fn count(
        &mut self,
        engine: &Engine,
        fires: Box<counts::Fires>,
    ) -> Result<Vec<Vec<LayerCounts>>, CalibrateError> {
        Ok(self.watch(engine, Counts::new(fires), "counting what fires")?.layers)
    }

    /// The constants of all layers, and what of them goes into the store.
    fn constants(
        &mut self,
        engine: &Engine,
        gates: Vec<Vec<histogram::Histogram>>,
    ) -> Result<(Additions, Vec<Centres>), CalibrateError> {
        let gguf = engine.gguf();
        let store = Store::read(gguf)?;
        let device = engine.devices().first().ok_or(EngineError::NoDevice)?.clone();
        let mut additions = Additions::default();
        let mut all = Vec::new();
        let total = store.layers.len() as u64;
        for (layer, of) in store.layers.iter().enumerate() {
            if !(self.progress)("folding the constants", layer as u64, total) {
                return Err(CalibrateError::Cancelled);
            }
            let rows = UpDown::read(gguf, &of.bundles[0], of.layout)?;
            let Some(histogram) = gates.get(layer).and_then(|experts| experts.first()) else {
                return Err(CalibrateError::NotANumber);
            };
            let centres = Centres::new(histogram, &rows.weight());
            let width = of.layout.width;
            let fold = rows.fold(&device, &centres.center)?;
            if fold.iter().any(|value| !value.is_finite()) {
                return Err(CalibrateError::NotANumber);
            }
            let dtype = if width.is_multiple_of(32) { DType::Q8_0 } else { DType::F16 };
            let bytes = quantized(dtype, width, &fold);
            let name = format!("blk.{layer}.ffn_fold.weight");
            let dims = vec![width as u64, width as u64];
            additions.tensors.push((NewTensor::new(name, tensor_id(dtype), dims), bytes));
            let dims = vec![of.layout.neurons as u64];
            let center = bytemuck::cast_slice(&centres.center).to_vec();
            let name = format!("blk.{layer}.ffn_center");
            additions.tensors.push((NewTensor::new(name, tensor_id(DType::F32), dims), center));
            all.push(centres);
        }
        additions.pairs.set("neuropil.ffn_threshold", floats(&vec![0.0; all.len()]));
        Ok((additions, all))
    }

    /// What it costs to leave out the probe's share of each layer.
    fn probe(&mut self, engine: &Engine, centres: &[Centres]) -> Result<Vec<f64>, CalibrateError> {
        set(engine, &vec![-1.0; centres.len()]);
        let probe = self.text.check.len().min(PROBE_CHUNKS);
        let reference = Reference::new(engine, &self.text.check[..probe])?;
        let mut costs = Vec::new();
        for (layer, of) in centres.iter().enumerate() {
            engine.thresholds().set(layer, of.cut(PROBE));
            let what = format!("measuring layer {} of {}", layer + 1, centres.len());
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
        centres: &[Centres],
        costs: &[f64],
    ) -> Result<Vec<f64>, CalibrateError> {
        let target = match self.options.target {
            Target::Sparsity(share) => return Ok(shares_of_mean(centres, costs, share)),
            Target::Loss(target) => target.ln_1p(),
        };
        // Losses of layers add up roughly; the sum is measured, and the price moved until it fits.
        let (mut best, mut low, mut high) = (vec![0.0; centres.len()], 1e-6f64, 10.0f64);
        for _ in 0..8 {
            let price = (low * high).sqrt();
            let shares = shares(centres, costs, price);
            let cuts: Vec<f32> =
                centres.iter().zip(&shares).map(|(layer, share)| cut(layer, *share)).collect();
            set(engine, &cuts);
            let what = format!("trying to leave out {:.0} %", 100.0 * mean(&shares));
            if loss(engine, &self.text.check, &what, self.progress)? - self.before <= target {
                (best, low) = (shares, price);
            } else {
                high = price;
            }
        }
        Ok(best)
    }

    /// Puts the counts among what is to be written.
    fn finish(&self, counts: &[Vec<LayerCounts>], additions: &mut Additions) {
        for (layer, experts) in counts.iter().enumerate() {
            let neurons = experts.first().map_or(0, |counts| counts.fired[0].len());
            let mut values = Vec::with_capacity(experts.len() * neurons * BATCHES.len());
            for counts in experts {
                for batch in 0..BATCHES.len() {
                    values.extend((0..neurons).map(|neuron| counts.frequency(batch, neuron)));
                }
            }
            let mut dims = vec![neurons as u64, BATCHES.len() as u64];
            if experts.len() > 1 {
                dims.push(experts.len() as u64);
            }
            let tensor = NewTensor::new(format!("blk.{layer}.ffn_count"), tensor_id(DType::F32), dims);
            additions.tensors.push((tensor, bytemuck::cast_slice(&values).to_vec()));
        }
        additions
            .pairs
            .set("neuropil.ffn_overlap", floats(&overlap(counts).map(|x| x as f32).collect::<Vec<_>>()));
    }

    fn write(&mut self, from: &Path, to: &Path, additions: Additions) -> Result<(), CalibrateError> {
        let options = ConvertOptions { additions, ..ConvertOptions::default() };
        let progress = &mut *self.progress;
        convert(from, to, &options, &mut |done, total| progress("writing the store", done, total))?;
        Ok(())
    }

    fn report(&self, counts: &[Vec<LayerCounts>], after: f64) -> CalibrateReport {
        let tokens = |chunks: &[Vec<u32>]| chunks.iter().map(Vec::len).sum();
        CalibrateReport {
            tokens: [tokens(&self.text.learn), tokens(&self.text.check)],
            before: self.before.exp(),
            after: after.exp(),
            active: counts.iter().map(|experts| active(experts)).collect(),
            overlap: overlap(counts).collect(),
            thresholds: None,
            cost: None,
            predictors: Vec::new(),
        }
    }
}

/// What predictors are worth, layer by layer, experts after each other.
#[derive(Default)]
struct Summary {
    bytes: u64,
    qualities: Vec<(usize, Vec<Quality>)>,
}

impl Summary {
    fn add(&mut self, layer: usize, bytes: u64, qualities: Vec<Quality>) {
        self.bytes += bytes;
        self.qualities.push((layer, qualities));
    }

    /// The mean of a figure over a layer's experts, layer by layer.
    fn per_layer(&self, of: impl Fn(&Quality) -> f64, recall: usize) -> Vec<f32> {
        let same = |a: &(usize, Vec<Quality>), b: &(usize, Vec<Quality>)| a.0 == b.0;
        let mean_of = |experts: &[(usize, Vec<Quality>)]| {
            let sum: f64 = experts.iter().filter_map(|(_, all)| all.get(recall)).map(&of).sum();
            (sum / experts.len().max(1) as f64) as f32
        };
        self.qualities.chunk_by(same).map(mean_of).collect()
    }

    fn cuts(&self, recall: usize) -> Vec<f32> {
        self.per_layer(|quality| f64::from(quality.threshold), recall)
    }

    fn evaluated(&self, recall: usize) -> Vec<f32> {
        self.per_layer(|quality| quality.evaluated, recall)
    }

    fn report(&self, name: String) -> PredictorReport {
        let mean = |of: fn(&Quality) -> f64, recall: usize| {
            let all = self.qualities.iter().filter_map(|(_, all)| all.get(recall));
            all.map(of).sum::<f64>() / self.qualities.len().max(1) as f64
        };
        let quality = |recall: usize| Quality {
            threshold: mean(|q| f64::from(q.threshold), recall) as f32,
            recall: mean(|q| q.recall, recall),
            evaluated: mean(|q| q.evaluated, recall),
            precision: mean(|q| q.precision, recall),
        };
        PredictorReport { name, bytes: self.bytes, quality: (0..RECALLS.len()).map(quality).collect() }
    }
}

/// The mean loss per scored token of some chunks.
fn loss(
    engine: &Engine,
    chunks: &[Vec<u32>],
    what: &str,
    progress: &mut CalibrateProgress<'_>,
) -> Result<f64, CalibrateError> {
    let mut session = engine.session(SessionOptions { sparse_prompt: true, ..SessionOptions::default() })?;
    let (mut sum, mut scored) = (0.0, 0);
    for (done, chunk) in chunks.iter().enumerate() {
        if !progress(what, done as u64, chunks.len() as u64) {
            return Err(CalibrateError::Cancelled);
        }
        sum += session.loss(chunk)?;
        scored += chunk.len() - 1 - chunk.len() / 2;
    }
    let loss = sum / scored.max(1) as f64;
    if loss.is_finite() { Ok(loss) } else { Err(CalibrateError::NotANumber) }
}

fn set(engine: &Engine, cuts: &[f32]) {
    cuts.iter().enumerate().for_each(|(layer, cut)| engine.thresholds().set(layer, *cut));
}

/// The cut that leaves out a share; no share leaves out nothing, not even what equals its constant.
fn cut(layer: &Centres, share: f64) -> f32 {
    if share > 0.0 { layer.cut(share) } else { -1.0 }
}

fn active(experts: &[LayerCounts]) -> f64 {
    let fired: u64 = experts.iter().flat_map(|counts| &counts.fired[0]).map(|n| u64::from(*n)).sum();
    let looked: u64 = experts.iter().map(|counts| counts.batches[0] * counts.fired[0].len() as u64).sum();
    fired as f64 / looked.max(1) as f64
}

fn overlap(counts: &[Vec<LayerCounts>]) -> impl Iterator<Item = f64> {
    counts.iter().map(|experts| {
        let sum = |index: usize| experts.iter().map(|counts| counts.adjacent[index]).sum::<u64>();
        sum(0) as f64 / sum(1).max(1) as f64
    })
}

fn floats(values: &[f32]) -> Value {
    Value::Array(Array::F32(values.into()))
}

fn quantized(dtype: DType, width: usize, rows: &[f32]) -> Vec<u8> {
    let row_bytes = dtype.row_bytes(width).unwrap_or(0);
    let mut bytes = vec![0; row_bytes * (rows.len() / width.max(1))];
    let pairs = rows.chunks_exact(width.max(1)).zip(bytes.chunks_exact_mut(row_bytes.max(1)));
    pairs.for_each(|(row, out)| quant::quantize_row(dtype, row, out));
    bytes
}

/// A store on the way to the result; it goes when the calibration does.
struct Staged(PathBuf);

impl Drop for Staged {
    fn drop(&mut self) {
        // It is no harm if it stays: the next calibration writes it anew.
        let _ = std::fs::remove_file(&self.0);
    }
}

fn staged_path(out: &Path, stage: &str) -> PathBuf {
    let mut name = out.file_name().unwrap_or_default().to_os_string();
    name.push(format!(".{stage}"));
    out.with_file_name(name)
}
