//! What can go wrong between a vocabulary, a text and its ids.

/// An error of a tokenizer. Every variant names the key of the model file, or the byte of the text, at fault.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TokenizerError {
    /// A family of tokenizers that is not built in.
    #[error("tokenizer.ggml.model is '{model}', which is not supported; supported are {known}")]
    UnknownModel {
        /// The value in the file, shortened.
        model: String,
        /// The supported values.
        known: String,
    },
    /// Splitting rules that are not built in. Guessing would give other ids than the model was trained with.
    #[error("tokenizer.ggml.pre is '{pre}', whose splitting rules are not known; known are {known}")]
    UnknownPre {
        /// The value in the file, shortened.
        pre: String,
        /// The known names.
        known: String,
    },
    /// The vocabulary has no tokens.
    #[error("tokenizer.ggml.tokens is empty; the file holds no vocabulary")]
    Empty,
    /// A list that must have one entry per token has fewer.
    #[error("{key} has {found} entries for {tokens} tokens; convert the model again")]
    Length {
        /// The key in the file.
        key: &'static str,
        /// Entries found.
        found: usize,
        /// Tokens of the vocabulary.
        tokens: usize,
    },
    /// A key that this family of tokenizers cannot do without.
    #[error("{key} is missing; {why}")]
    Missing {
        /// The key in the file.
        key: &'static str,
        /// What it is needed for.
        why: &'static str,
    },
    /// The id of a special token lies outside the vocabulary.
    #[error("{key} is {id}, but the vocabulary has {tokens} tokens")]
    SpecialId {
        /// The key in the file.
        key: &'static str,
        /// The id in the file.
        id: u32,
        /// Tokens of the vocabulary.
        tokens: usize,
    },
    /// A merge that is not two texts with a space between.
    #[error(
        "entry {index} of tokenizer.ggml.merges is not two texts separated by a space; convert the model again"
    )]
    Merge {
        /// Which entry, from 0.
        index: usize,
    },
    /// A score that orders nothing.
    #[error("entry {index} of tokenizer.ggml.scores is not a number; convert the model again")]
    Score {
        /// Which entry, from 0.
        index: usize,
    },
    /// No token can stand for a byte of the text, and the vocabulary has no unknown token.
    #[error(
        "the vocabulary has no token for byte 0x{byte:02X} and no unknown token; remove it from the text"
    )]
    NoToken {
        /// The byte.
        byte: u8,
    },
    /// Longer than 32-bit offsets reach.
    #[error("{what} of {bytes} bytes is too long; the limit is 1 GiB")]
    TooLong {
        /// What is too long: the text, or the vocabulary.
        what: &'static str,
        /// Its length.
        bytes: usize,
    },
    /// Memory for a text or a vocabulary could not be had.
    #[error("out of memory: {bytes} bytes were needed for {what}")]
    OutOfMemory {
        /// What the memory was for.
        what: &'static str,
        /// Bytes asked for.
        bytes: usize,
    },
}

/// Makes room for `more` entries, or says what the room was for.
pub(super) fn reserve<T>(list: &mut Vec<T>, more: usize, what: &'static str) -> Result<(), TokenizerError> {
    list.try_reserve(more)
        .map_err(|_| TokenizerError::OutOfMemory { what, bytes: more.saturating_mul(size_of::<T>()) })
}
