//! The CPU backend of neuropil.
//!
//! Start at [`CpuBackend`], which starts the threads and makes one [`CpuDevice`] and one [`CpuOps`] on them. A tour
//! from the top down:
//!
//! - `backend`: options, the device's name, what can go wrong at the start;
//! - `device`: jobs in, results out: checks a job, takes working memory, runs it, finishes it; `cluster` is its part
//!   for feed-forward layers, [`host_ops`](CpuOps) everything of a layer that is no matrix product;
//! - `crew`: how a product is spread over threads;
//! - [`pool`](Pool): fork-join that never waits for a late thread; [`topology`](Topology): how many threads;
//! - [`kernels`]: the products themselves, for all instruction sets ([`Isa`]); [`pack`]: the layout they read;
//! - `mem`: aligned memory, and outputs that several threads write.
//!
//! Every result has the bits of the scalar reference in `neuropil-device`, for any instruction set and any number of
//! threads.

#![deny(unsafe_code)]

#[allow(unsafe_code)]
mod arch;
mod backend;
mod batch;
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
mod sparse;
mod topology;

pub use arch::Isa;
#[cfg(target_arch = "x86_64")]
pub use arch::{Avx2, Avx512Vnni};
#[cfg(target_arch = "aarch64")]
pub use arch::{Neon, NeonDot};
pub use backend::{CpuBackend, CpuError, CpuOptions, MOST_THREADS};
pub use device::CpuDevice;
pub use host_ops::CpuOps;
pub use mem::{Claims, ColumnRange, Columns};
pub use pool::Pool;
pub use topology::Topology;
