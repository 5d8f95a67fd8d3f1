//! The feed-forward of one layer, or of one expert of it: the normed stream in, the neurons' sum out.
//!
//! Architectures call [`Ffn::forward`] and do not know how the weights lie: as one block on a device, or as single
//! neurons of which only those that may fire are computed.

use neuropil_device::{Activation, Buffer, ClusterJob, ClusterWeights, Stage};

use crate::engine::EngineError;
use crate::pipeline::Scratch;

use super::load::Placed;

/// What a feed-forward reads and writes, `[tokens, width]` each.
pub(crate) struct FfnInput<'a> {
    /// Rows of the buffers.
    pub tokens: usize,
    /// The normed stream.
    pub h: Buffer,
    /// The residual stream before the norm, for predictors that read it.
    pub x: Buffer,
    /// Takes the result; may be `x`.
    pub y: Buffer,
    /// Add to `y` instead of overwriting it.
    pub accumulate: bool,
    /// For each token, whether neurons may be left out that are only predicted to be silent.
    pub predict: &'a [bool],
}

/// The neurons of a layer or an expert.
pub(crate) enum Ffn {
    /// All of them as one block.
    Block(Placed),
}

impl Ffn {
    /// Computes the layer.
    pub(crate) fn forward(
        &self,
        activation: Activation,
        input: &FfnInput<'_>,
        scratch: &mut Scratch,
    ) -> Result<(), EngineError> {
        match self {
            Ffn::Block(block) => {
                let job = ClusterJob {
                    stage: Stage::Fused,
                    tokens: input.tokens,
                    activation,
                    weights: ClusterWeights::Block(block.weight.clone()),
                    x: input.h.read()?,
                    hidden: None,
                    y: Some(input.y.write()?),
                    accumulate: input.accumulate,
                };
                scratch.cluster(&*block.device, job)
            }
        }
    }
}
