//! An embeddable engine for language models that do not fit in memory.
//!
//! neuropil runs a model on whatever compute units an app hands it, and in the memory that it is given: of a neuron
//! store that is larger, a part is in memory and the rest is read as it is needed. It opens no sockets, reads no
//! environment variables and keeps no global state. Its only thread reads from storage, where there is something to read,
//! and ends with the engine; worker threads and SIMD live in backends, such as `neuropil-cpu`.
//!
//! ```text
//!   Engine ── Session ── Session ── …          engine:   what an app sees
//!      │         │ tokens, KV cache, logits
//!      ▼         ▼
//!   Model::forward, one readable file           model:    spec, llama, experts, kv, tokenizer, …
//!      │ jobs                │ norms, attention
//!      ▼                     ▼
//!   dyn Device            dyn HostOps           pipeline: submit, lend a hand, go on
//!      ▲                     ▲                     │ which neurons are here, and reads of the others
//!      └── neuropil-cpu, a GPU, a plugin           ▼
//!          (neuropil-device is the contract)     cache, io
//!   Gguf: header, extents, splits               gguf:     untrusted bytes become checked numbers
//! ```
//!
//! # First steps
//!
//! ```no_run
#![doc = include_str!("../examples/embed.rs")]
//! ```
//!
//! # What holds
//!
//! - A model file, a prompt or a template is untrusted input: it gives a typed error or an answer, never a panic.
//! - The same tokens for every number of threads, every instruction set, and every neighbour in a batch: the order
//!   of every sum is fixed ([`neuropil_device::quant`] states it).
//! - What is in memory and what comes from storage changes no token.
//! - An error in a step leaves the session as it was before that step.

#![deny(unsafe_code)]

pub mod cache;
pub mod calibrate;
pub mod engine;
pub mod gguf;
pub mod io;
pub mod model;
pub mod pipeline;
pub mod predict;
pub mod sched;
mod shown;
pub mod store;
pub mod submit;
mod sync;
pub mod synth;
pub mod system;

pub use engine::{
    Engine, EngineBuilder, EngineError, FinishReason, GenerateOptions, Generation, Piece, Session,
    SessionOptions,
};
pub use model::{KvType, ModelSpec};
pub use pipeline::{CancelToken, StepTimes};
