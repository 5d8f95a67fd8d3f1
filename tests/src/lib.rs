//! What the tests of neuropil share.

pub mod gguf_writer;
