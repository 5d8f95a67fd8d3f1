//! What the tests of neuropil share.

pub mod counting_alloc;
pub mod gguf_writer;
pub mod temp_dir;
