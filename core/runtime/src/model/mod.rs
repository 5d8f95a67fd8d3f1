//! Models: what a file describes, and how a step of it is computed.
//!
//! One file per architecture, no graph in between. To add one, write its file and name it in [`check()`] and `load_model`.

pub mod chat;
mod error;
mod ffn;
mod kv;
mod llama;
mod load;
mod rope;
pub mod sampler;
mod spec;
pub mod stream;
pub mod tokenizer;

use std::collections::HashSet;
use std::sync::Arc;

use neuropil_device::{AttentionRow, Device, HostOps};

use crate::engine::EngineError;
use crate::gguf::Gguf;
use crate::pipeline::{Scratch, ScratchShape};

pub use error::ModelError;
pub use kv::KvType;
pub use load::Progress;
pub use rope::RopeScaling;
pub use spec::ModelSpec;

pub(crate) use kv::{KvCache, KvShape, Sequences};
pub(crate) use llama::LOGIT_ROWS;
use llama::Llama;
use load::Loader;

/// Architectures that run, by `general.architecture`.
pub const ARCHITECTURES: [&str; 1] = ["llama"];

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

/// A tensor that an architecture needs.
pub(crate) struct TensorShape {
    pub name: String,
    /// Fastest first.
    pub dims: Vec<usize>,
}

/// What a file describes, and what a user should know about it.
#[derive(Clone, Debug, PartialEq)]
pub struct Checked {
    /// The model's numbers.
    pub spec: ModelSpec,
    /// Guesses that were made, things that are missing.
    pub notes: Vec<String>,
}

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
    for TensorShape { name, dims } in Llama::tensors(&spec, &|name| gguf.tensor(name).is_some()) {
        let tensor = gguf.require(&name)?;
        if tensor.dims.iter().map(|d| *d as usize).ne(dims.iter().copied()) {
            let (found, wanted) = (format!("{:?}", &tensor.dims[..]), format!("{dims:?}"));
            return Err(ModelError::Shape { name, found, wanted });
        }
        load::file_type(tensor)?;
        used.insert(name);
    }
    if let Some(tensor) = gguf.tensors().iter().find(|t| !used.contains(&t.name)) {
        let (name, architecture) = (tensor.name.clone(), architecture.into());
        return Err(ModelError::UnusedTensor { name, architecture });
    }
    let notes = rope::missing_factors(&spec, metadata, used.contains("rope_freqs.weight"));
    Ok(Checked { spec, notes: notes.into_iter().collect() })
}

/// A loaded model and what it takes.
pub(crate) struct Loaded {
    pub model: Box<dyn Model>,
    pub weight_bytes: u64,
    pub notes: Vec<String>,
}

/// Loads the model of a file.
pub(crate) fn load_model(
    gguf: &Arc<Gguf>,
    devices: &[Arc<dyn Device>],
    ops: &Arc<dyn HostOps>,
    exact: bool,
    progress: &mut Progress<'_>,
) -> Result<Loaded, ModelError> {
    let Checked { spec, notes } = check(gguf)?;
    let mut loader = Loader::new(gguf, devices, exact, progress);
    let model = Llama::load(spec, gguf.clone(), ops.clone(), &mut loader)?;
    Ok(Loaded { model: Box::new(model), weight_bytes: loader.weight_bytes, notes })
}
