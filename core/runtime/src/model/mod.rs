//! Models: what a file describes, and how a step of it is computed.
//!
//! One file per architecture, no graph in between. To add one, write its file and name it in [`load_model`].

pub mod chat;
mod error;
mod kv;
mod llama;
mod load;
mod rope;
pub mod sampler;
mod spec;
pub mod stream;
pub mod tokenizer;

use std::sync::Arc;

use neuropil_device::{AttentionRow, Device, HostOps};

use crate::engine::EngineError;
use crate::gguf::Gguf;
use crate::pipeline::{Scratch, ScratchShape};

pub use error::ModelError;
pub use kv::{KvCache, KvShape, KvType};
pub use load::Progress;
pub use rope::{RopeScaling, RopeTable};
pub use spec::ModelSpec;

pub(crate) use kv::Sequences;
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
}

/// An architecture with its weights.
pub(crate) trait Model: Send + Sync {
    fn spec(&self) -> &ModelSpec;

    /// What a step needs.
    fn scratch_shape(&self) -> ScratchShape;

    /// Computes one step. After an error the caches hold nothing new.
    fn forward(&self, step: &mut Step<'_>, scratch: &mut Scratch) -> Result<(), EngineError>;
}

/// A loaded model and what it takes.
pub(crate) struct Loaded {
    pub model: Box<dyn Model>,
    pub weight_bytes: u64,
}

/// Loads the model of a file.
pub(crate) fn load_model(
    gguf: &Arc<Gguf>,
    devices: &[Arc<dyn Device>],
    ops: &Arc<dyn HostOps>,
    exact: bool,
    vocab: usize,
    progress: &mut Progress<'_>,
) -> Result<Loaded, ModelError> {
    let architecture = gguf.metadata().require_str("general.architecture")?;
    if !ARCHITECTURES.contains(&architecture) {
        return Err(ModelError::Architecture {
            found: architecture.into(),
            supported: ARCHITECTURES.join(" "),
        });
    }
    let spec = ModelSpec::read(gguf.metadata(), architecture, vocab)?;
    let mut loader = Loader::new(gguf, devices, exact, progress);
    let model = Llama::load(spec, gguf.clone(), ops.clone(), &mut loader)?;
    let weight_bytes = loader.weight_bytes;
    loader.finish(architecture)?;
    Ok(Loaded { model: Box::new(model), weight_bytes })
}
