//! From a file and some units to an engine.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use neuropil_device::{Backend, Device, HostOps, ScalarOps};

use crate::gguf::Gguf;
use crate::model::tokenizer::{Tokenizer, Vocabulary};
use crate::model::{LoadOptions, Progress, load_model};
use crate::predict::{Prediction, Predictor};

use super::{Engine, EngineError, Inner};

/// Collects what an [`Engine`] is made of.
pub struct EngineBuilder<'a> {
    path: PathBuf,
    devices: Vec<Arc<dyn Device>>,
    ops: Option<Arc<dyn HostOps>>,
    load: LoadOptions,
    progress: Box<Progress<'a>>,
}

impl<'a> EngineBuilder<'a> {
    pub(super) fn new(path: &Path) -> EngineBuilder<'a> {
        EngineBuilder {
            path: path.into(),
            devices: Vec::new(),
            ops: None,
            load: LoadOptions::default(),
            progress: Box::new(|_, _| {}),
        }
    }

    /// Adds a unit. Each weight goes to the first unit, in the order added, that can run it.
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
        self.ops = self.ops.or_else(|| backend.host_ops());
        Ok(self)
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
        // The vocabulary takes a good part of a small model's load: it is built beside the weights where the system
        // gives a thread, which does not outlive this call.
        let read = || match Vocabulary::from_metadata(gguf.metadata())? {
            Some(vocabulary) => Ok::<_, EngineError>(Some(Tokenizer::new(vocabulary)?)),
            None => Ok(None),
        };
        let (loaded, tokenizer) = std::thread::scope(|scope| {
            let beside = std::thread::Builder::new().spawn_scoped(scope, read);
            let loaded = load_model(&gguf, &self.devices, &ops, &self.load, &mut *self.progress);
            let tokenizer = match beside {
                Ok(thread) => thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)),
                Err(_) => read(),
            };
            (loaded, tokenizer)
        });
        let (loaded, tokenizer) = (loaded?, tokenizer?);
        let mut notes = loaded.notes;
        notes.extend(tokenizer.iter().flat_map(|tokenizer| tokenizer.notes().iter().cloned()));
        Ok(Engine {
            inner: Arc::new(Inner {
                gguf,
                model: loaded.model,
                weight_bytes: loaded.weight_bytes,
                prediction: loaded.prediction,
                thresholds: loaded.thresholds,
                tokenizer,
                notes,
                devices: self.devices,
                scratch: Mutex::default(),
                load_time: start.elapsed(),
            }),
        })
    }
}
