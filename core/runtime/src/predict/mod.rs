//! Which neurons of a layer may fire, said before they are computed (PowerInfer-2 section 3.1).
//!
//! A [`Predictor`] is all that a new idea has to implement: it reads one stream and marks neurons. The feed-forward
//! computes the marked ones and takes the others for silent. Predictors that models bring are in `low_rank`, a copy of
//! the gate matrix in 4 bits is in `gate4`. Two ways need no predictor, because the exact gate decides: that of ReLU
//! models, and the centred threshold in `centred`.

mod centred;
mod gate4;
mod low_rank;
mod marks;

use std::sync::{Arc, Mutex};

use neuropil_device::{Buffer, Device, DeviceError, MatmulJob, PreparedWeight, Product, ReadLease};

use crate::submit::Jobs;

pub use centred::{Centred, Thresholds};
pub use gate4::Gate4;
pub use low_rank::LowRank;
pub use marks::Marks;

/// How neurons are chosen in decode. A prompt is always computed with all of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Prediction {
    /// The model's predictors if it has them; else, for a ReLU model, what reads least of its exact gate and what
    /// calibration found good enough; else the calibrated threshold if there is one; else all neurons.
    #[default]
    Auto,
    /// All neurons, always.
    Off,
    /// The predictors that the model brings.
    Model,
    /// The exact gate stays in memory and decides. Changes no bit of a ReLU model.
    Gate,
    /// A copy of the gate in 4 bits stays in memory and decides by its sign.
    Gate4,
    /// The exact gate decides by its distance from the neuron's usual value, for SiLU and GELU models.
    Threshold,
    /// Predictors that the app brings ([`EngineBuilder::predictors`](crate::EngineBuilder::predictors)).
    Custom,
}

impl Prediction {
    /// Every choice with its name; the last is none of the command line.
    pub const NAMES: [(&'static str, Prediction); 7] = [
        ("auto", Prediction::Auto),
        ("off", Prediction::Off),
        ("model", Prediction::Model),
        ("gate", Prediction::Gate),
        ("gate4", Prediction::Gate4),
        ("threshold", Prediction::Threshold),
        ("custom", Prediction::Custom),
    ];

    /// Its name on the command line.
    pub fn name(self) -> &'static str {
        Self::NAMES.iter().find(|(_, choice)| *choice == self).map_or("", |(name, _)| name)
    }
}

/// The stream that a predictor reads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PredictorInput {
    /// The residual stream after attention, before the norm of the feed-forward, as PowerInfer's predictors do.
    Residual,
    /// The normed stream, which the neurons themselves read.
    #[default]
    Normed,
}

/// Says which neurons of one layer may fire. Shared by all sequences; what it needs while it works is lent to it.
pub trait Predictor: Send + Sync {
    /// The stream that it reads.
    fn input(&self) -> PredictorInput;

    /// Bytes of weights that the prediction for one token reads, to compare predictors by.
    fn bytes(&self) -> u64;

    /// Marks the neurons that may fire in each row of `call.input`. `marks` is clear, with a row per token.
    ///
    /// # Errors
    /// Those of the device it computes on.
    fn predict(&self, call: &mut PredictCall<'_>, marks: &mut Marks) -> Result<(), DeviceError>;
}

/// Told what goes into and comes out of each layer's gate, while a text runs through a model with
/// [`Prediction::Gate`]: what calibration reads.
pub trait GateObserver: Send {
    /// Told of some tokens in one layer, before the activation.
    fn gate(&mut self, seen: &GateSeen<'_>);
}

impl<A: GateObserver, B: GateObserver> GateObserver for (A, B) {
    fn gate(&mut self, seen: &GateSeen<'_>) {
        self.0.gate(seen);
        self.1.gate(seen);
    }
}

/// What goes into and comes out of the gate of a layer, or of one of its experts.
pub struct GateSeen<'a> {
    /// The layer.
    pub layer: usize,
    /// The expert; 0 in a layer without.
    pub expert: usize,
    /// Whether the layer has several, so that the tokens are those that chose this one.
    pub expert_of_many: bool,
    /// Elements of a row of `h`.
    pub width: usize,
    /// Elements of a row of `gate`.
    pub neurons: usize,
    /// The normed input, `[tokens, width]`.
    pub h: &'a [f32],
    /// The gate's values, `[tokens, neurons]`.
    pub gate: &'a [f32],
    /// For each token, whether it may be predicted; the attention sink may not.
    pub counted: &'a [bool],
}

/// An observer that a session hands to its steps.
pub type SharedObserver = Arc<Mutex<dyn GateObserver>>;

/// Makes the predictor of a layer, or of an expert of it.
pub type MakePredictor = Arc<dyn Fn(usize, Option<usize>) -> Box<dyn Predictor> + Send + Sync>;

/// What a predictor reads and works with.
pub struct PredictCall<'a> {
    /// Rows of the input.
    pub tokens: usize,
    /// F32 `[tokens, width]`.
    pub input: &'a Buffer,
    /// To run matmuls with.
    pub jobs: &'a mut Jobs,
    /// Memory for what lies between.
    pub memory: &'a mut PredictMemory,
}

impl PredictCall<'_> {
    /// Multiplies `input` with a matrix of one row per neuron, and marks the neurons whose score is above the threshold.
    ///
    /// # Errors
    /// The device's.
    pub fn mark_above(
        &mut self,
        device: &dyn Device,
        weight: &PreparedWeight,
        input: ReadLease,
        threshold: f32,
        marks: &mut Marks,
    ) -> Result<(), DeviceError> {
        let scores = self.memory.floats(1, self.tokens * marks.neurons())?.clone();
        let product = Product { weight: weight.clone(), y: scores.write()?, accumulate: false };
        self.jobs.matmul(device, MatmulJob::new(self.tokens, input).with(product))?;
        let scores = scores.read()?;
        let rows = scores.slice::<f32>().chunks_exact(marks.neurons().max(1));
        rows.take(self.tokens).enumerate().for_each(|(token, scores)| marks.above(token, scores, threshold));
        Ok(())
    }
}

/// Memory of a prediction, kept from call to call.
pub struct PredictMemory {
    buffers: [Buffer; 2],
}

impl PredictMemory {
    /// No memory yet.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`].
    pub fn new() -> Result<PredictMemory, DeviceError> {
        let empty = Buffer::host(0)?;
        Ok(PredictMemory { buffers: [empty.clone(), empty] })
    }

    /// The first or second buffer, with room for `len` F32 values; what it holds is left over.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`].
    pub fn floats(&mut self, index: usize, len: usize) -> Result<&Buffer, DeviceError> {
        grow(&mut self.buffers[index], len)
    }

    /// Bytes that it holds.
    pub fn bytes(&self) -> usize {
        self.buffers.iter().map(Buffer::len).sum()
    }
}

/// Makes `buffer` hold at least `len` values of 4 bytes.
pub(crate) fn grow(buffer: &mut Buffer, len: usize) -> Result<&Buffer, DeviceError> {
    if buffer.len() < len.saturating_mul(4) {
        *buffer = Buffer::host(len.saturating_mul(4))?;
    }
    Ok(buffer)
}
