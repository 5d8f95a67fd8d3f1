//! What turns text into tokens, tokens into text, and logits into the next token.

pub mod chat;
pub mod sampler;
pub mod stream;
pub mod tokenizer;
