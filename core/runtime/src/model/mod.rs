//! Models: what a file describes, and how a step of it is computed.
//!
//! One file per architecture, no graph in between. To add one, name it in [`ARCHITECTURES`], say in `spec` what it means
//! without keys and in `tensors` what a file of it holds; if its layers differ, write its file and name it in
//! `load_model`.

mod budget;
pub mod chat;
mod error;
mod experts;
mod feed_forward;
mod ffn;
mod frame;
mod hot_rows;
mod kv;
mod llama;
mod load;
mod load_neurons;
mod load_storage;
mod room;
mod rope;
pub mod sampler;
mod smallthinker;
mod source;
mod spec;
pub mod stream;
mod tensors;
pub mod tokenizer;

use std::collections::HashSet;
use std::sync::Arc;

use neuropil_device::{AttentionRow, HostOps};

use crate::engine::EngineError;
use crate::gguf::{Gguf, TensorInfo};
use crate::pipeline::{Scratch, ScratchShape, Storage};
use crate::predict::{Prediction, Thresholds};
use crate::sched::Units;
use crate::store::Store;

pub(crate) use budget::MemoryPlan;
use budget::PlanInputs;
pub use error::ModelError;
pub use kv::KvType;
pub use load::Progress;
pub(crate) use room::{Room, Taken};
pub use rope::RopeScaling;
pub use spec::{ExpertSpec, Gating, ModelSpec};

pub(crate) use frame::LOGIT_ROWS;
pub(crate) use kv::{KvCache, KvShape, Sequences};
use llama::Llama;
pub(crate) use load::LoadOptions;

use load::Loader;
use load_neurons::StoreView;
use load_storage::StorageOptions;
pub use load_storage::{MakeEviction, MakeIo};
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
        source::file_type(check_shape(gguf, &shape)?)?;
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
    /// Of them, what units hold beside what the budget was planned with.
    pub extra_bytes: u64,
    pub notes: Vec<String>,
    /// How neurons are chosen; `Off` for a file that is no store.
    pub prediction: Prediction,
    /// The cuts of the centred thresholds; none without them.
    pub thresholds: Thresholds,
    /// What the budget is spent on, if there is one.
    pub memory: Option<MemoryPlan>,
    /// Where neurons are that are not all in memory.
    pub storage: Option<Arc<Storage>>,
}

/// Loads the model of a file.
pub(crate) fn load_model(
    gguf: &Arc<Gguf>,
    units: &Arc<Units>,
    ops: &Arc<dyn HostOps>,
    options: &LoadOptions,
    progress: &mut Progress<'_>,
) -> Result<Loaded, ModelError> {
    let Checked { spec, notes } = check(gguf)?;
    let auto = options.prediction == Prediction::Auto;
    let (store, memory) = match planned(gguf, &spec, options, options.prediction) {
        // What decides may itself be too large: then nobody decides, which costs time and changes no bit of a ReLU model.
        Err(ModelError::Budget { .. }) if auto => planned(gguf, &spec, options, Prediction::Off)?,
        // Gates of experts that few tokens use would take the room of whole experts that many do.
        Ok((Some(store), Some(memory))) if auto && store.keeps_idle_gates() && memory.neurons.is_some() => {
            planned(gguf, &spec, options, Prediction::Off)?
        }
        planned => planned?,
    };
    let prediction = store.as_ref().map_or(Prediction::Off, |store| store.prediction());
    let thresholds = store.as_ref().map(|store| store.thresholds().clone()).unwrap_or_default();
    let mut frequencies = Default::default();
    let storage = match (&store, memory.and_then(|plan| plan.neurons)) {
        (Some(view), Some(neurons)) => {
            frequencies = load_storage::frequencies(gguf, &view.store.layers, neurons.group)?;
            Some(load_storage::storage(gguf, view, &neurons, &frequencies, &options.storage)?)
        }
        _ => None,
    };
    let mut loader = Loader::new(gguf, units, ops, options, store.clone(), storage.clone(), &mut *progress);
    let model: Box<dyn Model> = match (spec.architecture.as_str(), spec.experts) {
        ("smallthinker", Some(experts)) => {
            Box::new(SmallThinker::load(spec, experts, gguf.clone(), ops.clone(), &mut loader)?)
        }
        _ => Box::new(Llama::load(spec, gguf.clone(), ops.clone(), &mut loader)?),
    };
    let (weight_bytes, extra_bytes) = (loader.weight_bytes, loader.extra_bytes);
    // Neurons that another unit computes need not stay here: the cache keeps what is asked for.
    let hot_share = options.storage.hot_share.or(loader.has_hot_blocks.then_some(0.0));
    if let (Some(storage), Some(view)) = (&storage, &store) {
        let options = StorageOptions { hot_share, ..options.storage.clone() };
        load_storage::fill(storage, view, frequencies, &options, progress)?;
    }
    Ok(Loaded { model, weight_bytes, extra_bytes, notes, prediction, thresholds, memory, storage })
}

/// The store that a file is, if it is one, and what the memory budget is spent on, if there is one.
fn planned(
    gguf: &Gguf,
    spec: &ModelSpec,
    options: &LoadOptions,
    prediction: Prediction,
) -> Result<(Option<Arc<StoreView>>, Option<MemoryPlan>), ModelError> {
    let store = StoreView::new(gguf, spec.activation, prediction)?.map(Arc::new);
    let slots = options.storage.slots.filter(|_| store.is_some());
    let budget = options.memory.or(slots.map(|_| u64::MAX)).filter(|_| !options.mapped);
    let plan = |budget| {
        budget::plan(&PlanInputs {
            gguf,
            spec,
            store: store.as_deref(),
            budget,
            context: options.context,
            kv: options.kv,
            exact: options.exact,
            slots,
        })
    };
    let memory = budget.map(plan).transpose()?;
    Ok((store, memory))
}
