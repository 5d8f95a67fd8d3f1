//! The contract between neuropil and a compute unit.
//!
//! A *device* is one unit that accepts jobs: a CPU pool, a GPU with memory of its own, an NPU behind a C ABI with
//! static shapes. A *backend* finds and opens the devices of one family. The runtime knows only what is in this
//! crate, and a backend or plugin implements only what is in this crate:
//!
//! ```text
//!   runtime                          device
//!     | prepare(WeightSource)          |   pack, upload or compile; the handle is the device's own
//!     | ------------------------------>|
//!     | submit(Submission<Job>)        |   the job owns leases on its input and output
//!     | ------------------------------>|
//!     |            Completion          |   exactly once, from any thread; leases are free by then
//!     | <------------------------------|
//! ```
//!
//! There are two kinds of work: [`MatmulJob`], one input times a few matrices, and [`ClusterJob`], the feed-forward
//! of a cluster of neurons. Everything else of a layer is [`HostOps`], with scalar default bodies.
//!
//! Start with [`Device`]; [`quant`] has the block formats and the numeric law that all kernels obey.

#![deny(unsafe_code)]

mod activation;
mod arena;
mod bytes;
mod completion;
mod device;
mod dtype;
mod error;
mod host_ops;
mod job;
mod kv;
pub mod math;
pub mod quant;
mod timeline;

pub use activation::{Activation, ActivationKind};
pub use arena::{ARENA_ALIGNMENT, Arena, Buffer, PinnedSlots, ReadLease, SLOT_ALIGNMENT, WriteLease};
pub use bytes::{AlignedBytes, OutOfMemory};
pub use completion::{Completion, CompletionQueue, CompletionSink, Submission};
pub use device::{Backend, Device, DeviceId, DeviceInfo, DeviceKind, OpShape, Support};
pub use dtype::DType;
pub use error::DeviceError;
pub use host_ops::{
    Attention, AttentionRow, HostOps, Joined, KV_SPAN, Rope, ScalarOps, Softmax, check_add, check_rms_norm,
    rope_rows,
};
pub use job::{
    BlockJob, BundleLayout, ClusterJob, ClusterWeights, HostRegion, MAX_PRODUCTS, MatmulJob, Matrix,
    PreparedWeight, Product, RowSource, Stage, WeightShape, WeightSource,
};
pub use kv::{KV_BLOCK, KV_PAGE, KvPage, KvPages, quantize_kv};
pub use timeline::Timeline;
