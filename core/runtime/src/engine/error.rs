//! The one error type that an app sees, each sentence with its cure.

use neuropil_device::DeviceError;

use crate::gguf::GgufError;
use crate::model::ModelError;
use crate::model::chat::ChatError;
use crate::model::sampler::SamplerError;
use crate::model::tokenizer::TokenizerError;

/// An error of the engine.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EngineError {
    /// The file cannot be read as GGUF.
    #[error(transparent)]
    Gguf(GgufError),
    /// The file is no model that can run.
    #[error(transparent)]
    Model(ModelError),
    /// The vocabulary is broken, or a text cannot be encoded.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
    /// The chat template is missing, broken, or refused the messages.
    #[error(transparent)]
    Chat(#[from] ChatError),
    /// A sampling option is out of range, or the logits have no answer.
    #[error(transparent)]
    Sampler(#[from] SamplerError),
    /// A unit failed.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// The engine was built without any unit.
    #[error("no device: give the builder a device or a backend that has one")]
    NoDevice,
    /// The file has no vocabulary, and text was asked for.
    #[error("the file has no vocabulary; give token ids instead of text")]
    NoVocabulary,
    /// There is nothing to continue from.
    #[error("the prompt has no tokens, and the model adds none of its own; give at least one")]
    EmptyPrompt,
    /// The tokens do not fit the context.
    #[error(
        "the prompt has {tokens} tokens, but the context holds {context}; shorten it or raise the context"
    )]
    ContextFull {
        /// Tokens that the session would hold.
        tokens: usize,
        /// Tokens that it can hold.
        context: usize,
    },
    /// A context larger than the model was made for.
    #[error("a context of {asked} is more than the {context} positions the model was made for")]
    ContextTooLarge {
        /// The context asked for.
        asked: usize,
        /// The model's.
        context: usize,
    },
    /// A token id outside the vocabulary.
    #[error("token {token} is outside the vocabulary of {vocab}")]
    Token {
        /// The id.
        token: u32,
        /// Tokens in the vocabulary.
        vocab: usize,
    },
    /// A sequence that is outside the batch, of another engine, out of order, or without options.
    #[error("sequence {0} does not fit the batch: each must be of this engine and named once, in order")]
    Sequence(usize),
    /// The work was cancelled.
    #[error("cancelled")]
    Cancelled,
}

impl From<GgufError> for EngineError {
    fn from(error: GgufError) -> EngineError {
        EngineError::Gguf(error)
    }
}

impl From<ModelError> for EngineError {
    fn from(error: ModelError) -> EngineError {
        match error {
            ModelError::Gguf(error) => EngineError::Gguf(error),
            other => EngineError::Model(other),
        }
    }
}
