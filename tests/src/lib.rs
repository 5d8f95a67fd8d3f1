//! What the tests of neuropil share.
//!
//! Nothing here uses the engine: these are the yardsticks that it is held against.

pub mod codec;
pub mod counting_alloc;
pub mod device_fixture;
pub mod gguf_writer;
pub mod mock;
pub mod plugins;
pub mod real;
pub mod reference;
pub mod reference_device;
pub mod temp;
pub mod toy;
