//! SmallThinker: experts with ReLU gates, chosen before attention.
//!
//! It differs from the Llama family in two things. The router reads the layer's *input*, not normed and before
//! attention, so the choice is known while attention still runs: whoever keeps experts on storage can read them
//! meanwhile. And where the file names a window, every fourth layer, from the first on, sees all positions and does
//! not rotate; the others rotate and see the window.

use std::sync::Arc;

use neuropil_device::HostOps;

use crate::engine::EngineError;
use crate::gguf::Gguf;
use crate::pipeline::{FfnInput, Lap, Scratch, ScratchShape};

use super::experts::Experts;
use super::frame::{Frame, SelfAttention};
use super::load::Loader;
use super::spec::ExpertSpec;
use super::{Model, ModelError, ModelSpec, Step};

/// Of so many layers the first sees all positions.
pub(super) const FULL_EVERY: usize = 4;

/// A SmallThinker model, its weights on devices.
pub(crate) struct SmallThinker {
    frame: Frame,
    layers: Vec<Layer>,
}

struct Layer {
    attention: SelfAttention,
    ffn_norm: Vec<f32>,
    experts: Experts,
}

impl SmallThinker {
    /// Loads the weights of a file whose tensors were checked.
    pub(crate) fn load(
        spec: ModelSpec,
        experts: ExpertSpec,
        gguf: Arc<Gguf>,
        ops: Arc<dyn HostOps>,
        loader: &mut Loader<'_>,
    ) -> Result<SmallThinker, ModelError> {
        let frame = Frame::load(spec, gguf, ops, loader)?;
        let mut layers = Vec::new();
        for index in 0..frame.spec.layers {
            let mut attention = frame.load_attention(index, loader)?;
            if frame.spec.window.is_some() && index.is_multiple_of(FULL_EVERY) {
                (attention.rotates, attention.window) = (false, None);
            }
            layers.push(Layer {
                attention,
                ffn_norm: loader.vector(&format!("blk.{index}.ffn_norm.weight"))?,
                experts: Experts::load(experts, frame.spec.width, index, loader)?,
            });
        }
        Ok(SmallThinker { frame, layers })
    }
}

impl Model for SmallThinker {
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

            // The experts of this layer's tokens, from the stream as it comes in. From here on they are known.
            layer.experts.route(tokens, &scratch.x.clone(), scratch)?;
            layer.experts.fetch(tokens, scratch)?;
            lap.add_to(&mut scratch.times.ffn);

            self.frame.attend(&layer.attention, index, step, scratch, &mut lap)?;

            // The chosen experts on the normed stream, added to the stream.
            self.frame.norm(&layer.ffn_norm, tokens, scratch, &mut lap)?;
            let input = FfnInput::of_stream(tokens, step.predict, scratch);
            layer.experts.forward(self.frame.spec.activation, &input, scratch)?;
            lap.add_to(&mut scratch.times.ffn);
        }
        self.frame.logits(step, scratch, &mut lap)
    }
}
