//! From a file and some units to an engine.

use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicU32;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use neuropil_device::{Backend, Device, HostOps, ScalarOps};

use crate::cache::Eviction;
use crate::gguf::Gguf;
use crate::io::{IoChoice, IoEngine, IoError};
use crate::model::tokenizer::{Tokenizer, Vocabulary};
use crate::model::{KvType, LoadOptions, ModelError, Progress, Room, load_model};
use crate::pipeline::{PipelineOptions, Trace};
use crate::predict::{Prediction, Predictor};
use crate::sched::{UnitEvent, Units};
use crate::submit::JobTrace;

use super::{Engine, EngineError, Inner};

/// Collects what an [`Engine`] is made of.
pub struct EngineBuilder<'a> {
    path: PathBuf,
    devices: Vec<Arc<dyn Device>>,
    /// The unit that takes what no other does: the one that brought the host operations, or the last.
    home: Option<usize>,
    strict: bool,
    cross_check: u32,
    missing: Vec<UnitEvent>,
    ops: Option<Arc<dyn HostOps>>,
    load: LoadOptions,
    verify_every: u32,
    progress: Box<Progress<'a>>,
}

impl<'a> EngineBuilder<'a> {
    pub(super) fn new(path: &Path) -> EngineBuilder<'a> {
        EngineBuilder {
            path: path.into(),
            devices: Vec::new(),
            home: None,
            strict: false,
            cross_check: 0,
            missing: Vec::new(),
            ops: None,
            load: LoadOptions::default(),
            verify_every: 1,
            progress: Box::new(|_, _| {}),
        }
    }

    /// Adds a unit. Each weight goes to the first unit, in the order added, that can run it; what is small, and what
    /// decode needs of attention, goes to the unit whose backend brought the host operations, or else to the last one.
    /// A unit that fails is taken out, and the next one does its work: see [`Engine::events`].
    pub fn device(mut self, device: Arc<dyn Device>) -> Self {
        self.devices.push(device);
        self
    }

    /// Runs norms, attention and the like here instead of in scalar code.
    pub fn host_ops(mut self, ops: Arc<dyn HostOps>) -> Self {
        self.ops = Some(ops);
        self
    }

    /// Adds a backend's first unit, and its host operations if none were given yet.
    ///
    /// # Errors
    /// What the backend says when it cannot open the unit.
    pub fn backend(mut self, backend: &dyn Backend) -> Result<Self, EngineError> {
        self.devices.push(backend.open(0)?);
        if let Some(ops) = backend.host_ops()
            && self.home.is_none()
        {
            self.home = Some(self.devices.len() - 1);
            self.ops.get_or_insert(ops);
        }
        Ok(self)
    }

    /// Names a unit that could not be had, and why, for [`Engine::events`].
    pub fn missing(mut self, unit: &str, reason: &str) -> Self {
        self.missing.push(UnitEvent { unit: unit.into(), reason: reason.into() });
        self
    }

    /// Whether a unit that refuses a weight or fails a job ends the run with its error, instead of giving the work to the
    /// next one.
    pub fn strict(mut self, strict: bool) -> Self {
        self.strict = strict;
        self
    }

    /// Expands the weights to F32 and leaves activations unquantised: slow and large (four bytes per weight), and as
    /// exact as the file. For tests and researchers.
    pub fn exact(mut self, exact: bool) -> Self {
        self.load.exact = exact;
        self
    }

    /// How the neurons of a neuron store are chosen in decode.
    pub fn prediction(mut self, prediction: Prediction) -> Self {
        self.load.prediction = prediction;
        self
    }

    /// Chooses the neurons of a neuron store by predictors of the app's own, one for each layer or expert of it, whose
    /// numbers `make` is given.
    pub fn predictors(
        mut self,
        make: impl Fn(usize, Option<usize>) -> Box<dyn Predictor> + Send + Sync + 'static,
    ) -> Self {
        self.load.prediction = Prediction::Custom;
        self.load.predictors = Some(Arc::new(make));
        self
    }

    /// Most bytes that the process may take: weights, buffers, keys and values. Of a neuron store that does not fit, a part
    /// of the neurons is in memory and the others are read as they are needed; another file that does not fit is an
    /// error. Without a budget everything is loaded.
    pub fn memory(mut self, bytes: impl Into<Option<u64>>) -> Self {
        self.load.memory = bytes.into();
        self
    }

    /// Leaves the neurons of a store in the file's memory map, so that the system's page cache decides what is in memory:
    /// what other engines do, for comparison. No budget is kept then, and the file must not become shorter.
    pub fn mapped(mut self, mapped: bool) -> Self {
        self.load.mapped = mapped;
        self
    }

    /// Keeps so many neurons of a store in memory and no more, whatever the budget; a step needs a slice of 512 at least, so
    /// no fewer are kept. For tests and experiments.
    pub fn neuron_slots(mut self, slots: usize) -> Self {
        self.load.storage.slots = Some(slots);
        self
    }

    /// Whether the cache is filled with the neurons that fire most before the first token.
    pub fn warm(mut self, warm: bool) -> Self {
        self.load.storage.cold = !warm;
        self
    }

    /// The share of the cache, 0 to 1, that the neurons which fire most have for good.
    pub fn hot_share(mut self, share: f32) -> Self {
        self.load.storage.hot_share = Some(share.clamp(0.0, 1.0));
        self
    }

    /// The longest context that sessions will ask for and the precision of its keys and values, so that a budget can be
    /// planned with them.
    pub fn context(mut self, tokens: Option<usize>, kv: KvType) -> Self {
        (self.load.context, self.load.kv) = (tokens, kv);
        self
    }

    /// How neurons are read that are not in memory.
    pub fn io(mut self, choice: IoChoice) -> Self {
        self.load.storage.io = choice;
        self
    }

    /// Reads neurons by an engine of the app's own, made from the paths of the file.
    pub fn io_engine(
        mut self,
        make: impl Fn(&[&Path]) -> Result<Box<dyn IoEngine>, IoError> + Send + Sync + 'static,
    ) -> Self {
        self.load.storage.make_io = Some(Arc::new(make));
        self
    }

    /// Which of the storage engine's means are used.
    pub fn pipeline(mut self, options: PipelineOptions) -> Self {
        self.load.storage.pipeline = options;
        self
    }

    /// Evicts neurons by a policy of the app's own. `make` is given how often each neuron fires, over all layers and
    /// experts, or nothing where the file does not say.
    pub fn eviction(mut self, make: impl Fn(&[f32]) -> Box<dyn Eviction> + Send + Sync + 'static) -> Self {
        self.load.storage.eviction = Some(Arc::new(make));
        self
    }

    /// Records what happens when. For lanes of its threads give the record to the backend too, which takes it as a
    /// [`Timeline`](neuropil_device::Timeline).
    pub fn trace(mut self, trace: Arc<Trace>) -> Self {
        self.load.storage.trace = Some(trace);
        self
    }

    /// After how many tokens that are decoded it is checked that nobody has written into the model's files; 1 if this is
    /// not called. A check takes a microsecond per file. With more, so many tokens may be wrong before the error comes.
    /// Prompts are checked anyway, and so is the end of each [`Session::generate`](super::Session::generate).
    pub fn verify_every(mut self, tokens: u32) -> Self {
        self.verify_every = tokens;
        self
    }

    /// Every so many blocks of neurons that a unit computed, the home computes one too. A result that is not the same within
    /// what arithmetic explains takes the unit out; the home's is used if every result before it was checked, and
    /// otherwise the run ends with [`DeviceError::Wrong`](neuropil_device::DeviceError::Wrong). 0, if this is not called,
    /// checks none; plugins' products are checked by other means.
    pub fn cross_check(mut self, blocks: u32) -> Self {
        self.cross_check = blocks;
        self
    }

    /// Told how many of how many bytes are loaded, once per tensor.
    pub fn on_progress(mut self, progress: impl FnMut(u64, u64) + 'a) -> Self {
        self.progress = Box::new(progress);
        self
    }

    /// Opens the file and loads the model.
    ///
    /// # Errors
    /// [`EngineError::NoDevice`], or what is wrong with the file or the units.
    pub fn build(mut self) -> Result<Engine, EngineError> {
        let start = Instant::now();
        if self.devices.is_empty() {
            return Err(EngineError::NoDevice);
        }
        let gguf = Arc::new(Gguf::open(&self.path)?);
        let ops = self.ops.unwrap_or_else(|| Arc::new(ScalarOps));
        let home = self.home.unwrap_or(self.devices.len() - 1);
        let units = Arc::new(
            Units::new(&self.devices, home, self.missing).strict(self.strict).cross_check(self.cross_check),
        );
        // The vocabulary takes a good part of a small model's load: it is built beside the weights where the system
        // gives a thread, which does not outlive this call.
        let read = || match Vocabulary::from_metadata(gguf.metadata())? {
            Some(vocabulary) => Ok::<_, EngineError>(Some(Tokenizer::new(vocabulary)?)),
            None => Ok(None),
        };
        let (loaded, tokenizer) = std::thread::scope(|scope| {
            let beside = std::thread::Builder::new().spawn_scoped(scope, read);
            let loaded = load_model(&gguf, &units, &ops, &self.load, &mut *self.progress);
            let tokenizer = match beside {
                Ok(thread) => thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)),
                Err(_) => read(),
            };
            (loaded, tokenizer)
        });
        // What went wrong may have done so because somebody wrote into the file.
        gguf.unchanged()?;
        let (loaded, tokenizer) = (loaded?, tokenizer?);
        let mut notes = loaded.notes;
        let devices = || self.devices.iter().cloned().collect();
        let trace = self.load.storage.trace.map(|trace| JobTrace { trace, devices: devices() });
        notes.extend(tokenizer.iter().flat_map(|tokenizer| tokenizer.notes().iter().cloned()));
        notes.extend(units.idle());
        let room = loaded.memory.map(|plan| Arc::new(Room::new(plan, loaded.storage.clone())));
        let of_units = Room::take(room.as_ref(), loaded.extra_bytes).map_err(|_| ModelError::UnitMemory {
            bytes: loaded.extra_bytes,
            budget: loaded.memory.map_or(0, |plan| plan.budget),
        })?;
        Ok(Engine {
            inner: Arc::new(Inner {
                gguf,
                model: loaded.model,
                memory: loaded.memory,
                room,
                _of_units: of_units,
                storage: loaded.storage,
                trace,
                verify_every: self.verify_every,
                unverified: AtomicU32::new(0),
                weight_bytes: loaded.weight_bytes,
                prediction: loaded.prediction,
                thresholds: loaded.thresholds,
                tokenizer,
                notes,
                devices: self.devices,
                units,
                scratch: Mutex::default(),
                load_time: start.elapsed(),
            }),
        })
    }
}
