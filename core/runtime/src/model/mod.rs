//! Models: what a file describes, and how a step of it is computed.
//!
//! One file per architecture, no graph in between. To add one, name it in [`ARCHITECTURES`], say in `spec` what it means
//! without keys and in `tensors` what a file of it holds; if its layers differ, write its file and name it in
//! `load_model`.

pub mod chat;
mod error;
mod experts;
mod feed_forward;
mod ffn;
mod frame;
mod kv;
mod llama;
mod load;
mod load_neurons;
mod rope;
pub mod sampler;
mod smallthinker;
mod spec;
pub mod stream;
mod tensors;
pub mod tokenizer;

use std::collections::HashSet;
use std::sync::Arc;

use neuropil_device::{AttentionRow, Device, HostOps};

use crate::engine::EngineError;
use crate::gguf::{Gguf, TensorInfo};
use crate::pipeline::{Scratch, ScratchShape};
use crate::predict::{Prediction, Thresholds};
use crate::store::Store;

pub use error::ModelError;
pub use kv::KvType;
pub use load::Progress;
pub use rope::RopeScaling;
pub use spec::{ExpertSpec, Gating, ModelSpec};

pub(crate) use frame::LOGIT_ROWS;
pub(crate) use kv::{KvCache, KvShape, Sequences};
use llama::Llama;
pub(crate) use load::LoadOptions;
use load::Loader;
use load_neurons::StoreView;
use smallthinker::SmallThinker;
use tensors::TensorShape;

/// Architectures that run, by `general.architecture`.
pub const ARCHITECTURES: [&str; 4] = ["llama", "bamboo", "turbosparsemixtral", "smallthinker"];

/// One step: some tokens of some sequences through the whole model.
pub(crate) struct Step<'a> {
    /// The tokens, each below the vocabulary's size.
    pub tokens: &'a [u32],
    /// Each token's sequence and position; a sequence's tokens stand in ascending order.
    pub rows: &'a [AttentionRow],
    /// The sequences, with room reserved in their caches for the positions. They take the logits.
    pub sequences: &'a mut dyn Sequences,
    /// Rows whose logits are wanted, ascending.
    pub outputs: &'a [usize],
    /// For each token, whether neurons may be left out that are only predicted to be silent.
    pub predict: &'a [bool],
}

/// An architecture with its weights.
pub(crate) trait Model: Send + Sync {
    fn spec(&self) -> &ModelSpec;

    /// What a step needs.
    fn scratch_shape(&self) -> ScratchShape;

    /// Computes one step. After an error the caches hold nothing new.
    fn forward(&self, step: &mut Step<'_>, scratch: &mut Scratch) -> Result<(), EngineError>;
}

/// What a file describes, and what a user should know about it.
#[derive(Clone, Debug, PartialEq)]
pub struct Checked {
    /// The model's numbers.
    pub spec: ModelSpec,
    /// Guesses that were made, things that are missing.
    pub notes: Vec<String>,
}

/// What to say about a file that could do more.
const UNUSED_PREDICTORS: &str = "the file has predictors of firing neurons (fc1, fc2), which are not used; convert the file to use its predictors";

/// Checks whether a file is a model that can run, without loading it: its keys, and that its tensors are those of its
/// architecture, no more and no fewer. A model that runs without one of its tensors gives wrong answers, not fewer, so
/// a tensor that nobody would use is an error.
///
/// # Errors
/// [`ModelError`], naming the key or tensor.
pub fn check(gguf: &Gguf) -> Result<Checked, ModelError> {
    let metadata = gguf.metadata();
    let architecture = metadata.require_str("general.architecture")?;
    if !ARCHITECTURES.contains(&architecture) {
        return Err(ModelError::Architecture {
            found: architecture.into(),
            supported: ARCHITECTURES.join(" "),
        });
    }
    let spec = ModelSpec::read(metadata, architecture)?;
    let mut used = HashSet::new();
    let store = Store::is_store(gguf).then(|| Store::read(gguf)).transpose()?;
    for shape in tensors::tensors(&spec, gguf, store.is_some()) {
        load::file_type(check_shape(gguf, &shape)?)?;
        used.insert(shape.name);
    }
    if let Some(store) = &store {
        for shape in load_neurons::store_tensors(&spec, store, gguf)? {
            check_shape(gguf, &shape)?;
            used.insert(shape.name);
        }
    }
    if let Some(tensor) = gguf.tensors().iter().find(|t| !used.contains(&t.name)) {
        let (name, architecture) = (tensor.name.clone(), architecture.into());
        return Err(ModelError::UnusedTensor { name, architecture });
    }
    let factors = rope::missing_factors(&spec, metadata, used.contains("rope_freqs.weight"));
    let unused = store.is_none() && tensors::has_predictors(gguf);
    let predictors = unused.then(|| UNUSED_PREDICTORS.into());
    Ok(Checked { spec, notes: factors.into_iter().chain(predictors).collect() })
}

/// The tensor of that name, if its dimensions are those.
fn check_shape<'a>(gguf: &'a Gguf, shape: &TensorShape) -> Result<&'a TensorInfo, ModelError> {
    let TensorShape { name, dims } = shape;
    let tensor = gguf.require(name)?;
    if tensor.dims.iter().map(|d| *d as usize).ne(dims.iter().copied()) {
        let (found, wanted) = (format!("{:?}", &tensor.dims[..]), format!("{dims:?}"));
        return Err(ModelError::Shape { name: name.clone(), found, wanted });
    }
    Ok(tensor)
}

/// A loaded model and what it takes.
pub(crate) struct Loaded {
    pub model: Box<dyn Model>,
    pub weight_bytes: u64,
    pub notes: Vec<String>,
    /// How neurons are chosen; `Off` for a file that is no store.
    pub prediction: Prediction,
    /// The cuts of the centred thresholds; none without them.
    pub thresholds: Thresholds,
}

/// Loads the model of a file.
pub(crate) fn load_model(
    gguf: &Arc<Gguf>,
    devices: &[Arc<dyn Device>],
    ops: &Arc<dyn HostOps>,
    options: &LoadOptions,
    progress: &mut Progress<'_>,
) -> Result<Loaded, ModelError> {
    let Checked { spec, notes } = check(gguf)?;
    let store = StoreView::new(gguf, spec.activation, options.prediction)?;
    let prediction = store.as_ref().map_or(Prediction::Off, StoreView::prediction);
    let thresholds = store.as_ref().map(|store| store.thresholds().clone()).unwrap_or_default();
    let mut loader = Loader::new(gguf, devices, ops, options, store, progress);
    let model: Box<dyn Model> = match (spec.architecture.as_str(), spec.experts) {
        ("smallthinker", Some(experts)) => {
            Box::new(SmallThinker::load(spec, experts, gguf.clone(), ops.clone(), &mut loader)?)
        }
        _ => Box::new(Llama::load(spec, gguf.clone(), ops.clone(), &mut loader)?),
    };
    Ok(Loaded { model, weight_bytes: loader.weight_bytes, notes, prediction, thresholds })
}
