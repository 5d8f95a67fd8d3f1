//! Why a calibration did not succeed.

use std::path::PathBuf;

use neuropil_device::DeviceError;

use crate::engine::EngineError;
use crate::gguf::GgufError;
use crate::store::{ConvertError, StoreError};

/// An error of a calibration. What was at the output's path is as it was.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CalibrateError {
    /// The model cannot be loaded or run.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// The file itself.
    #[error(transparent)]
    Gguf(#[from] GgufError),
    /// The store.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The result cannot be written.
    #[error(transparent)]
    Convert(#[from] ConvertError),
    /// A unit failed.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// Too little text.
    #[error("the text has {tokens} tokens, and calibration needs at least {needed}; give a longer one")]
    ShortText {
        /// Tokens of the text.
        tokens: usize,
        /// Tokens that it takes.
        needed: usize,
    },
    /// The model sees too little at once.
    #[error("the model's context is {context} tokens, and calibration needs one of at least {needed}")]
    ShortContext {
        /// Tokens that the model sees.
        context: usize,
        /// Tokens that it takes.
        needed: usize,
    },
    /// No matrix of that rank can be of use.
    #[error("predictors of rank {rank} cannot be fitted; for this model it must be 1 to {most}")]
    Rank {
        /// What was asked for.
        rank: usize,
        /// The lesser of width and neurons.
        most: usize,
    },
    /// Predictors were asked for, and there is nothing that they could say.
    #[error(
        "predictors are for models whose gate can be zero, and this model's never is; leave --predictors out"
    )]
    NothingToPredict,
    /// The file that becomes the result cannot be made.
    #[error("{}: cannot be made: {source}", file.display())]
    Stage {
        /// The file.
        file: PathBuf,
        /// What the system says.
        source: std::io::Error,
    },
    /// No token of the text went to an expert.
    #[error(
        "no token of the text chose expert {expert} of layer {layer}; give a longer or a more varied text"
    )]
    Unseen {
        /// The layer.
        layer: usize,
        /// The expert.
        expert: usize,
    },
    /// The text cannot be predicted at all.
    #[error("the model's logits for the text are not numbers; check it with `neuropil verify`")]
    NotANumber,
    /// A stop was asked for.
    #[error("calibration was stopped; nothing was written")]
    Cancelled,
}
