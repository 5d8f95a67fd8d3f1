//! The feed-forward of one layer, or of one expert of it: the normed stream in, the neurons' sum out.
//!
//! Architectures call [`Ffn::forward`] and do not know how the weights lie: as one block on a device, or as single
//! neurons of which only those that may fire are computed.

use neuropil_device::{Activation, ClusterJob, ClusterWeights, Stage};

use crate::engine::EngineError;
use crate::pipeline::{FfnInput, Neurons, Scratch};
use crate::submit::Placed;

/// The neurons of a layer or an expert.
pub(crate) enum Ffn {
    /// All of them as one block.
    Block(Placed),
    /// One by one, out of a neuron store.
    Neurons(Box<Neurons>),
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
                Ok(scratch.jobs.cluster(&*block.device, job)?)
            }
            Ffn::Neurons(neurons) => Ok(neurons.forward(activation, input, scratch)?),
        }
    }
}
