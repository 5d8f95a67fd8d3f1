//! The contract between neuropil and a compute unit.

mod dtype;
mod error;
pub mod quant;

pub use dtype::DType;
pub use error::DeviceError;
