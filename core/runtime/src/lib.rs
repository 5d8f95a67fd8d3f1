//! Runtime.

pub mod gguf;
