//! What a sampler refuses.

/// An error of a sampler. Each names the option or the logit at fault.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum SamplerError {
    /// An option outside its range.
    #[error("{option} is {value}; it must be {range}")]
    Option {
        /// Name of the option.
        option: &'static str,
        /// What was given.
        value: f64,
        /// What is allowed.
        range: &'static str,
    },
    /// A bias for a token that does not exist.
    #[error("logit_bias names token {id}, but the vocabulary has {n_vocab} tokens")]
    BiasToken {
        /// The token.
        id: u32,
        /// Tokens of the vocabulary.
        n_vocab: usize,
    },
    /// A row of logits of another length than the vocabulary.
    #[error("got {found} logits for a vocabulary of {n_vocab} tokens")]
    Length {
        /// Logits given.
        found: usize,
        /// Tokens of the vocabulary.
        n_vocab: usize,
    },
    /// The model computed no number.
    #[error("the logit of token {id} is NaN; the model's weights or a device are broken")]
    NotANumber {
        /// The first such token.
        id: u32,
    },
    /// Every token is forbidden.
    #[error("no token can be drawn: all logits are minus infinity; a logit bias may forbid too much")]
    NothingLeft,
}
