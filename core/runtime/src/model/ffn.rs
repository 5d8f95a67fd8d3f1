//! The feed-forward of one layer, or of one expert of it: the normed stream in, the neurons' sum out.
//!
//! Architectures call [`Ffn::forward`] and do not know how the weights lie: as one block on a device, or as single
//! neurons of which only those that may fire are computed.

use neuropil_device::{Activation, ClusterJob, ClusterWeights, Stage};

use crate::engine::EngineError;
use crate::pipeline::{Decided, FfnInput, Neurons, Scratch};
use crate::sched::Weights;

/// The neurons of a layer or an expert.
pub(crate) enum Ffn {
    /// All of them as one block.
    Block(Weights),
    /// One by one, out of a neuron store.
    Neurons(Box<Neurons>),
}

impl Ffn {
    /// Whether it may have to read from storage.
    pub(crate) fn reads(&self) -> bool {
        matches!(self, Ffn::Neurons(neurons) if neurons.reads())
    }

    /// Starts to read the neurons that it will probably need, of what the layer before it reads.
    pub(crate) fn look_ahead(&self, input: &FfnInput<'_>, scratch: &mut Scratch) -> Result<(), EngineError> {
        match self {
            Ffn::Block(_) => Ok(()),
            Ffn::Neurons(neurons) => Ok(neurons.look_ahead(input, scratch)?),
        }
    }

    /// Starts to read what it needs for so many tokens, where that is known without a look at them.
    pub(crate) fn fetch(&self, tokens: usize, scratch: &mut Scratch) -> Result<(), EngineError> {
        match self {
            Ffn::Block(_) => Ok(()),
            Ffn::Neurons(neurons) => Ok(neurons.fetch(tokens, scratch)?),
        }
    }

    /// Gives up what was decided and will not be computed.
    pub(crate) fn abandon(&self, decided: Option<Decided>, scratch: &mut Scratch) {
        if let (Ffn::Neurons(neurons), Some(decided)) = (self, decided) {
            neurons.abandon(decided, scratch);
        }
    }

    /// Decides which neurons are computed and starts to read those that are not in memory; nothing of a block.
    pub(crate) fn begin(
        &self,
        activation: Activation,
        input: &FfnInput<'_>,
        scratch: &mut Scratch,
    ) -> Result<Option<Decided>, EngineError> {
        match self {
            Ffn::Block(_) => Ok(None),
            Ffn::Neurons(neurons) => Ok(Some(neurons.begin(activation, input, scratch)?)),
        }
    }

    /// Computes the layer; `decided` is what [`Ffn::begin`] returned, if it was called.
    pub(crate) fn finish(
        &self,
        decided: Option<Decided>,
        activation: Activation,
        input: &FfnInput<'_>,
        scratch: &mut Scratch,
    ) -> Result<(), EngineError> {
        match (self, decided) {
            (Ffn::Neurons(neurons), Some(decided)) => Ok(neurons.finish(decided, input, scratch)?),
            _ => self.forward(activation, input, scratch),
        }
    }

    /// Computes the layer.
    pub(crate) fn forward(
        &self,
        activation: Activation,
        input: &FfnInput<'_>,
        scratch: &mut Scratch,
    ) -> Result<(), EngineError> {
        match self {
            Ffn::Block(block) => {
                let output = (&input.y, input.accumulate);
                Ok(block.cluster(input.tokens, &mut scratch.jobs, output, |weights, y, accumulate| {
                    Ok(ClusterJob {
                        stage: Stage::Fused,
                        tokens: input.tokens,
                        activation,
                        weights: ClusterWeights::Block(weights[0].clone()),
                        x: input.h.read()?,
                        hidden: None,
                        y: Some(y.write()?),
                        accumulate,
                    })
                })?)
            }
            Ffn::Neurons(neurons) => Ok(neurons.forward(activation, input, scratch)?),
        }
    }
}
