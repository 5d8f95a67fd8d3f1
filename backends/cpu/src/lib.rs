//! The CPU backend of neuropil.

mod arch;
pub mod kernels;
mod mem;
pub mod pack;

pub use arch::Isa;
pub use mem::{AlignedBytes, Claims, ColumnRange, Columns};
