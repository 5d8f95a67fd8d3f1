//! Why a calibration did not succeed.

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
