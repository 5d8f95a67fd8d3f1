//! The feed-forward of a layer: one piece, or experts of which each token uses a few.

use neuropil_device::Activation;

use crate::engine::EngineError;
use crate::pipeline::{FfnInput, Scratch};

use super::experts::Experts;
use super::ffn::Ffn;
use super::load::Loader;
use super::{ModelError, ModelSpec};

/// What a layer does after attention.
pub(crate) enum FeedForward {
    /// All neurons for every token.
    One(Ffn),
    /// Those of the experts that the router chooses.
    Experts(Experts),
}

impl FeedForward {
    /// Loads that of layer `index`.
    pub(crate) fn load(
        spec: &ModelSpec,
        index: usize,
        loader: &mut Loader<'_>,
    ) -> Result<FeedForward, ModelError> {
        if let Some(experts) = spec.experts {
            return Ok(FeedForward::Experts(Experts::load(experts, spec.width, index, loader)?));
        }
        let [gate, up, down] = ["gate", "up", "down"].map(|part| format!("blk.{index}.ffn_{part}.weight"));
        Ok(FeedForward::One(loader.ffn(index, None, [&gate, &up, &down], spec.neurons, spec.width)?))
    }

    /// Computes it; a router reads the normed stream. `next` is that of the next layer, which may begin to read.
    pub(crate) fn forward(
        &self,
        next: Option<&FeedForward>,
        activation: Activation,
        input: &FfnInput<'_>,
        scratch: &mut Scratch,
    ) -> Result<(), EngineError> {
        match self {
            FeedForward::One(ffn) => {
                let decided = ffn.begin(activation, input, scratch)?;
                if let Some(FeedForward::One(next)) = next {
                    let begun = next.look_ahead(input, scratch);
                    if begun.is_err() {
                        ffn.abandon(decided, scratch);
                        return begun;
                    }
                }
                ffn.finish(decided, activation, input, scratch)
            }
            FeedForward::Experts(experts) => {
                experts.route(input.tokens, &input.h, scratch)?;
                experts.forward(activation, input, scratch)
            }
        }
    }
}
