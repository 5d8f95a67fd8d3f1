//! The Llama family: Llama 2 and 3, Mistral, Mixtral, SmolLM2; and with other non-linearities ReLU-Llama, ProSparse,
//! Bamboo and the TurboSparse models.
//!
//! Grouped-query attention with rotary embedding, a gated feed-forward of one piece or of experts, RMS norms, an
//! output matrix that may be the embedding. [`Llama::forward`] reads top to bottom.

use std::sync::Arc;

use neuropil_device::HostOps;

use crate::engine::EngineError;
use crate::gguf::Gguf;
use crate::pipeline::{FfnInput, Lap, Scratch, ScratchShape};

use super::feed_forward::FeedForward;
use super::frame::{Frame, SelfAttention};
use super::load::Loader;
use super::{Model, ModelError, ModelSpec, Step};

/// A model of the Llama family, its weights on devices.
pub(crate) struct Llama {
    frame: Frame,
    layers: Vec<Layer>,
}

struct Layer {
    attention: SelfAttention,
    ffn_norm: Vec<f32>,
    ffn: FeedForward,
}

impl Llama {
    /// Loads the weights of a file whose tensors were checked.
    pub(crate) fn load(
        spec: ModelSpec,
        gguf: Arc<Gguf>,
        ops: Arc<dyn HostOps>,
        loader: &mut Loader<'_>,
    ) -> Result<Llama, ModelError> {
        let frame = Frame::load(spec, gguf, ops, loader)?;
        let mut layers = Vec::new();
        for index in 0..frame.spec.layers {
            layers.push(Layer {
                attention: frame.load_attention(index, loader)?,
                ffn_norm: loader.vector(&format!("blk.{index}.ffn_norm.weight"))?,
                ffn: FeedForward::load(&frame.spec, index, loader)?,
            });
        }
        Ok(Llama { frame, layers })
    }
}

impl Model for Llama {
    fn spec(&self) -> &ModelSpec {
        &self.frame.spec
    }

    fn scratch_shape(&self) -> ScratchShape {
        self.frame.scratch_shape()
    }

    fn forward(&self, step: &mut Step<'_>, scratch: &mut Scratch) -> Result<(), EngineError> {
        let tokens = step.tokens.len();
        let mut lap = Lap::start();
        self.frame.embed(step, scratch, &mut lap)?;
        for (index, layer) in self.layers.iter().enumerate() {
            if step.sequences.cancelled() {
                return Err(EngineError::Cancelled);
            }
            self.frame.attend(&layer.attention, index, step, scratch, &mut lap)?;

            // The feed-forward of the normed stream, added to the stream.
            self.frame.norm(&layer.ffn_norm, tokens, scratch, &mut lap)?;
            let input = FfnInput::of_stream(tokens, step.predict, scratch);
            let next = self.layers.get(index + 1).map(|layer| &layer.ffn);
            layer.ffn.forward(next, self.frame.spec.activation, &input, scratch)?;
            lap.add_to(&mut scratch.times.ffn);
        }
        self.frame.logits(step, scratch, &mut lap)
    }
}
