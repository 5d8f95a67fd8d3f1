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
mod memory;
mod predictor;
mod relu;
mod samples;
mod shape;
mod smooth;
mod staging;
mod text;

use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use neuropil_device::DType;

use crate::engine::{Engine, EngineError, SessionOptions};
use crate::gguf::{Array, Gguf, NewTensor, Value, tensor_id};
use crate::predict::{GateObserver, Prediction, SharedObserver};
use crate::store::{Additions, BATCHES, ConvertOptions, Store, convert, keys};

use counts::LayerCounts;
use memory::room;
use shape::LayerShape;
use staging::Interim;
use text::Text;

pub use error::CalibrateError;
pub use predictor::Quality;

/// How far thresholds may go.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Target {
    /// Perplexity on held-out text may rise by this share.
    Loss(f64),
    /// This share of the neurons is to be left out, whatever it costs.
    Sparsity(f64),
}

/// The rank of predictors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rank {
    /// A quarter of the model's width.
    Auto,
    /// This one.
    Of(usize),
}

/// How a calibration is done.
#[derive(Clone, Copy, Debug)]
pub struct CalibrateOptions {
    /// How far thresholds may go.
    pub target: Target,
    /// Most chunks of 512 tokens to use of the text.
    pub chunks: usize,
    /// For a model of the ReLU family: also fit predictors of this rank.
    pub rank: Option<Rank>,
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
    /// How the result's neurons are chosen when nobody says how.
    pub prediction: Prediction,
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
/// itself, or anything else that [`convert`] takes.
///
/// # Errors
/// [`CalibrateError`]; then `out` is as it was, and nothing lies beside it.
pub fn calibrate(
    model: &Path,
    out: &Path,
    text: &[u8],
    options: &CalibrateOptions,
    open: &Open<'_>,
    progress: &mut CalibrateProgress<'_>,
) -> Result<CalibrateReport, CalibrateError> {
    let converted;
    // What cannot be read as a file of this kind is for the conversion to take or to refuse.
    let store = if Gguf::open_header(model).is_ok_and(|gguf| Store::is_store(&gguf)) {
        model
    } else {
        converted = Interim::beside(out)?;
        convert(model, converted.path(), &ConvertOptions::default(), &mut |done, total| {
            progress("converting", done, total)
        })?;
        converted.path()
    };
    let engine = open(store, Prediction::Gate)?;
    let relu = engine.spec().activation.is_off(-1.0);
    if options.rank.is_some() && !relu {
        return Err(CalibrateError::NothingToPredict);
    }
    let shapes = LayerShape::all(&Store::read(engine.gguf())?);
    let text = Text::new(&engine, text, options.chunks)?;
    let before = loss(&engine, &text.check, "measuring the dense model", progress)?;
    let tried = loss(&engine, &text.tries, "measuring the dense model", progress)?;
    let run = Run { text, shapes, options: *options, before, tried, open, progress };
    if relu { run.relu(engine, store, out) } else { run.smooth(engine, store, out) }
}

/// One calibration under way.
struct Run<'a, 'b> {
    text: Text,
    shapes: Vec<LayerShape>,
    options: CalibrateOptions,
    /// Loss per token of the held-out chunks, all neurons computed.
    before: f64,
    /// The same of the chunks that choices are tried on.
    tried: f64,
    open: &'a Open<'a>,
    progress: &'a mut CalibrateProgress<'b>,
}

impl Run<'_, '_> {
    /// How much the loss per token may rise, in nats.
    fn limit(&self) -> f64 {
        match self.options.target {
            Target::Sparsity(_) => f64::INFINITY,
            Target::Loss(target) => target.ln_1p(),
        }
    }

    /// Tokens that are learned from.
    fn learned(&self) -> usize {
        self.text.learn.iter().map(Vec::len).sum()
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

    /// Puts the counts among what is to be written.
    fn finish(&self, counts: &[Vec<LayerCounts>], additions: &mut Additions) -> Result<(), CalibrateError> {
        for (layer, (experts, shape)) in counts.iter().zip(&self.shapes).enumerate() {
            let mut bytes = room(4 * shape.neurons * BATCHES.len() * experts.len())?;
            for counts in experts {
                for batch in 0..BATCHES.len() {
                    for neuron in 0..shape.neurons {
                        bytes.extend_from_slice(&counts.frequency(batch, neuron).to_le_bytes());
                    }
                }
            }
            let mut dims = vec![shape.neurons as u64, BATCHES.len() as u64];
            if shape.numbered {
                dims.push(shape.experts as u64);
            }
            let tensor = NewTensor::new(format!("blk.{layer}.ffn_count"), tensor_id(DType::F32), dims);
            additions.tensors.push((tensor, bytes));
        }
        let overlaps: Vec<f32> = overlap(counts).map(|share| share as f32).collect();
        additions.pairs.set(keys::OVERLAP, floats(&overlaps));
        Ok(())
    }

    fn write(&mut self, from: &Path, to: &Path, additions: Additions) -> Result<(), CalibrateError> {
        let options = ConvertOptions { additions, ..ConvertOptions::default() };
        let progress = &mut *self.progress;
        convert(from, to, &options, &mut |done, total| progress("writing the store", done, total))?;
        Ok(())
    }

    fn report(&self, counts: &[Vec<LayerCounts>], prediction: Prediction, after: f64) -> CalibrateReport {
        CalibrateReport {
            tokens: [self.learned(), self.text.check.iter().map(Vec::len).sum()],
            before: self.before.exp(),
            after: after.exp(),
            prediction,
            active: counts.iter().map(|experts| active(experts)).collect(),
            overlap: overlap(counts).collect(),
            thresholds: None,
            cost: None,
            predictors: Vec::new(),
        }
    }
}

/// Refuses a text of which an expert saw nothing. `tokens` of what was collected by layer and expert.
fn all_seen<T>(layers: &[Vec<T>], tokens: impl Fn(&T) -> bool) -> Result<(), CalibrateError> {
    for (layer, experts) in layers.iter().enumerate() {
        if let Some(expert) = experts.iter().position(|expert| !tokens(expert)) {
            return Err(CalibrateError::Unseen { layer, expert });
        }
    }
    Ok(())
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
