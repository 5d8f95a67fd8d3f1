//! The API an app sees: an [`Engine`] holds a model, a [`Session`] one sequence of tokens.
//!
//! There is no global state, and no thread but the one that reads neurons which are not in memory; it ends with the engine.
//! An engine is `Send + Sync` and cheap to clone; sessions of one
//! engine may run on different threads, or decode together as a batch ([`Engine::decode`]), and a session's tokens
//! are the same either way. One exception: where another unit than the processor computes, products of a step of more
//! than 8 tokens are its, so a token's bits may depend on how many go together, within that unit's rounding.

mod builder;
mod error;
mod generate;
mod session;

use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use neuropil_device::Device;

use crate::gguf::{Gguf, GgufError};
use crate::model::chat::ChatTemplate;
use crate::model::tokenizer::Tokenizer;
use crate::model::{LOGIT_ROWS, MemoryPlan, Model, ModelSpec, Room, Step, Taken};
use crate::pipeline::{Activity, Lane, Scratch, StepTimes, Storage, StorageReport, Trace};
use crate::predict::{Prediction, SharedObserver, Thresholds};
use crate::sched::{Placement, UnitEvent, Units};
use crate::submit::JobTrace;

pub use builder::EngineBuilder;
pub use error::EngineError;
pub use generate::{FinishReason, GenerateOptions, Generation, Piece};
pub use session::{Session, SessionOptions};

/// Tokens of a prompt that go through the model at a time, where memory is no question.
const PREFILL_CHUNK: usize = 512;

/// A loaded model with the units that run it. Clones share it.
#[derive(Clone)]
pub struct Engine {
    inner: Arc<Inner>,
}

struct Inner {
    gguf: Arc<Gguf>,
    model: Box<dyn Model>,
    weight_bytes: u64,
    prediction: Prediction,
    thresholds: Thresholds,
    tokenizer: Option<Tokenizer>,
    notes: Vec<String>,
    devices: Vec<Arc<dyn Device>>,
    /// Which of them are in, and what they were given.
    units: Arc<Units>,
    /// What the memory budget is spent on, if there is one.
    memory: Option<MemoryPlan>,
    /// What keys and values are counted with.
    room: Option<Arc<Room>>,
    /// What units hold of the budget.
    _of_units: Taken,
    /// Where neurons are that are not all in memory.
    storage: Option<Arc<Storage>>,
    trace: Option<JobTrace>,
    /// After how many steps of decode it is checked that the model's files are as they were.
    verify_every: u32,
    /// Steps since that was found.
    unverified: AtomicU32,
    /// Step memory that no step uses at the moment.
    scratch: Mutex<Vec<Scratch>>,
    load_time: Duration,
}

/// What a session's steps leave behind, and who watches them.
#[derive(Clone, Default)]
struct Record {
    times: StepTimes,
    activity: Activity,
    observer: Option<SharedObserver>,
}

/// Bytes that an engine holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryUse {
    /// Weights in the devices' layouts.
    pub weights: u64,
    /// Step buffers that are idle at the moment.
    pub buffers: u64,
    /// The budget, if there is one.
    pub budget: Option<u64>,
    /// Of the neurons that a cache holds, those that stay.
    pub hot: u64,
    /// Of the neurons that a cache holds, those that come and go.
    pub cold: u64,
}

impl Engine {
    /// Starts to build an engine for a GGUF file.
    pub fn builder<'a>(path: impl AsRef<Path>) -> EngineBuilder<'a> {
        EngineBuilder::new(path.as_ref())
    }

    /// The model's numbers.
    pub fn spec(&self) -> &ModelSpec {
        self.inner.model.spec()
    }

    /// The file.
    pub fn gguf(&self) -> &Gguf {
        &self.inner.gguf
    }

    /// The units, in order of preference.
    pub fn devices(&self) -> &[Arc<dyn Device>] {
        &self.inner.devices
    }

    /// The unit that takes what no other does: the processor, where there is one.
    pub fn home(&self) -> &Arc<dyn Device> {
        &self.inner.devices[self.inner.units.home()]
    }

    /// Where each kind of work goes, as decided when the model was loaded.
    pub fn placements(&self) -> Vec<Placement> {
        self.inner.units.placements()
    }

    /// Units that were taken out so far, and why.
    pub fn events(&self) -> Vec<UnitEvent> {
        self.inner.units.events()
    }

    /// The model's tokenizer.
    ///
    /// # Errors
    /// [`EngineError::NoVocabulary`] when the file has none.
    pub fn tokenizer(&self) -> Result<&Tokenizer, EngineError> {
        self.inner.tokenizer.as_ref().ok_or(EngineError::NoVocabulary)
    }

    /// The model's chat template, parsed now: a broken one stops chat, not the model.
    ///
    /// # Errors
    /// [`EngineError::Chat`] when there is none or it does not parse.
    pub fn chat_template(&self) -> Result<ChatTemplate, EngineError> {
        let tokenizer = self.tokenizer()?;
        let text = |id: Option<u32>| {
            let text = id.and_then(|id| tokenizer.token_text(id)).unwrap_or_default();
            String::from_utf8_lossy(text).into_owned()
        };
        let source = self.inner.gguf.metadata().str("tokenizer.chat_template")?;
        let template = ChatTemplate::new(source, &text(tokenizer.bos()), &text(tokenizer.eos()));
        template.check()?;
        Ok(template)
    }

    /// How neurons are chosen in decode; `Off` for a file that is no neuron store.
    pub fn prediction(&self) -> Prediction {
        self.inner.prediction
    }

    /// The cuts of [`Prediction::Threshold`], which may be moved: for calibration.
    pub fn thresholds(&self) -> &Thresholds {
        &self.inner.thresholds
    }

    /// What a user should know about the model: guesses that were made, things that are missing.
    pub fn notes(&self) -> &[String] {
        &self.inner.notes
    }

    /// What it holds. Sessions hold their own KV caches.
    pub fn memory(&self) -> MemoryUse {
        let buffers = self.idle_scratch().iter().map(|s| s.bytes() as u64).sum();
        let neurons = self.inner.memory.and_then(|plan| plan.neurons).zip(self.inner.storage.as_ref());
        let (hot, cold) = neurons.map_or((0, 0), |(plan, storage)| {
            let (all, hot) = (storage.room(), storage.hot());
            ((hot * plan.slot_bytes) as u64, ((all - hot.min(all)) * plan.slot_bytes) as u64)
        });
        let budget = self.inner.memory.map(|plan| plan.budget);
        MemoryUse { weights: self.inner.weight_bytes, buffers, budget, hot, cold }
    }

    /// What was read from storage since the model was loaded, and how the cache of neurons did; `None` when all neurons
    /// are in memory.
    pub fn storage(&self) -> Option<StorageReport> {
        self.inner.storage.as_ref().map(|storage| storage.since_load())
    }

    /// The record of what happened when, if one is made.
    pub fn trace(&self) -> Option<&Trace> {
        self.inner.trace.as_ref().map(|jobs| &*jobs.trace)
    }

    /// Tokens of a prompt that go through the model together.
    fn prefill_chunk(&self) -> usize {
        self.inner.memory.map_or(PREFILL_CHUNK, |plan| plan.prefill_chunk)
    }

    /// How long opening and loading took.
    pub fn load_time(&self) -> Duration {
        self.inner.load_time
    }

    /// An empty sequence.
    ///
    /// # Errors
    /// [`EngineError::ContextTooLarge`].
    pub fn session(&self, options: SessionOptions) -> Result<Session, EngineError> {
        Session::new(self.clone(), options)
    }

    /// Runs one step with memory that is kept for the next. Whether the model's files are as they were is checked with
    /// each step of a prompt, and with a step of decode when it is time.
    fn run(&self, mut step: Step<'_>, prompt: bool, record: &mut Record) -> Result<(), EngineError> {
        let vocab = self.spec().vocab;
        if let Some(token) = step.tokens.iter().find(|t| **t as usize >= vocab) {
            return Err(EngineError::Token { token: *token, vocab });
        }
        let idle = self.idle_scratch().pop();
        let mut scratch = match idle {
            Some(scratch) => scratch,
            None => Scratch::new(self.inner.model.scratch_shape())?,
        };
        scratch.times = Default::default();
        scratch.activity.clear();
        scratch.observer = record.observer.clone();
        let before = self.inner.unverified.fetch_add(1, Ordering::Relaxed);
        scratch.check_files = prompt || before.saturating_add(1) >= self.inner.verify_every;
        scratch.jobs.trace = self.inner.trace.clone();
        scratch.trace = self.inner.trace.as_ref().map(|jobs| jobs.trace.clone());
        let span = self.trace().map(|trace| trace.span(Lane::Conductor, "step", step.tokens.len()));
        let result = scratch
            .reserve(step.tokens.len(), step.outputs.len().min(LOGIT_ROWS))
            .map_err(EngineError::from)
            .and_then(|()| self.inner.model.forward(&mut step, &mut scratch));
        drop(span);
        record.times += scratch.times;
        record.activity.merge(&scratch.activity);
        scratch.observer = None;
        if let Some(storage) = &self.inner.storage {
            storage.end_step();
        }
        let checked = scratch.check_files;
        self.idle_scratch().push(scratch);
        match &result {
            Ok(()) if checked => self.inner.unverified.store(0, Ordering::Relaxed),
            // What could not be read may be missing because the file is not the same any more.
            Err(EngineError::Device(_) | EngineError::Gguf(_)) => self.inner.gguf.unchanged()?,
            _ => {}
        }
        result
    }

    /// Checks that the model's files are as they were, if there were steps since that was found.
    fn verify_rest(&self) -> Result<(), EngineError> {
        if self.inner.unverified.swap(0, Ordering::Relaxed) > 0 {
            self.inner.gguf.unchanged()?;
        }
        Ok(())
    }

    fn idle_scratch(&self) -> std::sync::MutexGuard<'_, Vec<Scratch>> {
        self.inner.scratch.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Reads a file's tokenizer without loading weights; works on files that hold a vocabulary alone.
///
/// # Errors
/// [`EngineError::NoVocabulary`], or what is wrong with the file.
pub fn open_tokenizer(path: &Path) -> Result<Tokenizer, EngineError> {
    let gguf = Gguf::open_header(path).map_err(|e: GgufError| EngineError::Gguf(e))?;
    let vocabulary = crate::model::tokenizer::Vocabulary::from_metadata(gguf.metadata())?;
    Ok(Tokenizer::new(vocabulary.ok_or(EngineError::NoVocabulary)?)?)
}
