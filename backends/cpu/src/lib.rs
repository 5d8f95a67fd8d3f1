//! The CPU backend of neuropil.

#![deny(unsafe_code)]

#[allow(unsafe_code)]
mod arch;
mod backend;
mod cluster;
mod crew;
mod device;
mod host_ops;
pub mod kernels;
#[allow(unsafe_code)]
mod mem;
pub mod pack;
#[allow(unsafe_code)]
mod pool;
mod topology;

pub use arch::Isa;
pub use backend::{CpuBackend, CpuError, CpuOptions, MOST_THREADS};
pub use device::CpuDevice;
pub use host_ops::CpuOps;
pub use mem::{AlignedBytes, Claims, ColumnRange, Columns};
pub use pool::Pool;
pub use topology::Topology;
