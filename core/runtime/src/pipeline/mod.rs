//! How a step's work gets to the units and back.
//!
//! The caller's thread conducts: it submits a job, lends its hands to the device while it waits, and goes on when the
//! job is done. No thread of its own, one owner for the step's memory.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use neuropil_device::{Buffer, DeviceError};

use crate::predict::SharedObserver;
use crate::submit::Jobs;

mod activity;
mod beside;
mod blocks;
mod cold;
mod experts;
mod io_thread;
mod neuron_scratch;
mod neurons;
mod report;
mod residency;
mod ring;
mod storage;
mod stream;
mod trace;

pub use activity::Activity;
pub(crate) use experts::{Choice, ExpertScratch, ExpertShape};
pub(crate) use neuron_scratch::{FfnInput, NeuronScratch};
pub(crate) use neurons::{Decided, Decision, NeuronWeights, Neurons};
pub use report::StorageReport;
pub(crate) use ring::PIECES;
pub use storage::PipelineOptions;
pub(crate) use storage::{Storage, StorageParts, Unit};
pub(crate) use trace::Span;
pub use trace::{Lane, Trace};

/// Asks a generation to stop; clones are the same switch. Seen within one layer.
#[derive(Clone, Debug, Default)]
pub struct CancelToken(Arc<AtomicBool>);

impl CancelToken {
    /// Asks for the stop. From any thread.
    pub fn cancel(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    /// Whether a stop was asked for.
    pub fn is_cancelled(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    /// Takes the request back, for the next generation.
    pub fn reset(&self) {
        self.0.store(false, Ordering::Relaxed);
    }
}

/// Where the time of some steps went.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepTimes {
    /// Products with the Q, K, V and output matrices.
    pub projections: Duration,
    /// Rotation, cache and attention itself.
    pub attention: Duration,
    /// Feed-forward layers.
    pub ffn: Duration,
    /// Final norm and product with the output matrix.
    pub head: Duration,
    /// Embedding and norms.
    pub other: Duration,
}

impl StepTimes {
    /// All of it.
    pub fn total(&self) -> Duration {
        self.projections + self.attention + self.ffn + self.head + self.other
    }
}

impl std::ops::AddAssign for StepTimes {
    fn add_assign(&mut self, other: StepTimes) {
        self.projections += other.projections;
        self.attention += other.attention;
        self.ffn += other.ffn;
        self.head += other.head;
        self.other += other.other;
    }
}

/// A stop-watch that gives the time since it last gave it.
pub(crate) struct Lap(Instant);

impl Lap {
    pub(crate) fn start() -> Lap {
        Lap(Instant::now())
    }

    pub(crate) fn add_to(&mut self, total: &mut Duration) {
        let now = Instant::now();
        *total += now - self.0;
        self.0 = now;
    }
}

/// Lengths of a step's buffers, in F32 elements per token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ScratchShape {
    pub width: usize,
    pub q: usize,
    pub kv: usize,
    pub vocab: usize,
    /// What a layer of experts needs besides.
    pub experts: ExpertShape,
}

/// The memory of one step, kept from step to step so that a token allocates nothing.
pub(crate) struct Scratch {
    shape: ScratchShape,
    tokens: usize,
    logit_rows: usize,
    /// To run jobs with.
    pub jobs: Jobs,
    /// For single neurons.
    pub neurons: NeuronScratch,
    /// How many neurons the step computed.
    pub activity: Activity,
    /// Told of the gates' values.
    pub observer: Option<SharedObserver>,
    /// Told what happens when.
    pub trace: Option<Arc<Trace>>,
    /// Whether the step ends with a look whether the model's files are as they were.
    pub check_files: bool,
    /// A row of the embedding.
    pub row: Vec<u8>,
    /// (cos, sin) of each row and pair.
    pub rope: Vec<[f32; 2]>,
    /// Where the time of the step went.
    pub times: StepTimes,
    /// Residual stream `[tokens, width]`.
    pub x: Buffer,
    /// Normed input of a matmul `[tokens, width]`.
    pub h: Buffer,
    /// Queries `[tokens, q]`.
    pub q: Buffer,
    /// Keys `[tokens, kv]`.
    pub k: Buffer,
    /// Values `[tokens, kv]`.
    pub v: Buffer,
    /// Result of attention `[tokens, q]`.
    pub attn: Buffer,
    /// Logits `[logit_rows, vocab]`.
    pub logits: Buffer,
    /// What a layer of experts needs besides.
    pub experts: ExpertScratch,
}

impl Scratch {
    pub(crate) fn new(shape: ScratchShape) -> Result<Scratch, DeviceError> {
        let empty = Buffer::host(0)?;
        Ok(Scratch {
            shape,
            tokens: 0,
            logit_rows: 0,
            jobs: Jobs::default(),
            neurons: NeuronScratch::new()?,
            activity: Activity::default(),
            observer: None,
            trace: None,
            check_files: true,
            row: Vec::new(),
            rope: Vec::new(),
            times: StepTimes::default(),
            x: empty.clone(),
            h: empty.clone(),
            q: empty.clone(),
            k: empty.clone(),
            v: empty.clone(),
            attn: empty.clone(),
            logits: empty,
            experts: ExpertScratch::new(shape.experts)?,
        })
    }

    /// Makes room for a step of `tokens` tokens with `logit_rows` rows of logits at a time.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`].
    pub(crate) fn reserve(&mut self, tokens: usize, logit_rows: usize) -> Result<(), DeviceError> {
        let floats = |rows: usize, len: usize| Buffer::host(rows.saturating_mul(len).saturating_mul(4));
        if self.tokens < tokens {
            let ScratchShape { width, q, kv, .. } = self.shape;
            self.x = floats(tokens, width)?;
            self.h = floats(tokens, width)?;
            self.q = floats(tokens, q)?;
            self.k = floats(tokens, kv)?;
            self.v = floats(tokens, kv)?;
            self.attn = floats(tokens, q)?;
            self.experts.reserve(tokens, width)?;
            self.tokens = tokens;
        }
        if self.logit_rows < logit_rows {
            self.logits = floats(logit_rows, self.shape.vocab)?;
            self.logit_rows = logit_rows;
        }
        Ok(())
    }

    /// Bytes of the buffers.
    pub(crate) fn bytes(&self) -> usize {
        let buffers = [&self.x, &self.h, &self.q, &self.k, &self.v, &self.attn, &self.logits];
        let own = buffers.iter().map(|b| b.len()).sum::<usize>();
        own + self.neurons.bytes() + self.experts.bytes()
    }
}
