//! A compute unit and the family it belongs to.
//!
//! Two traits of a few methods each, object-safe, most with defaults. Nothing in neuropil is generic over a
//! backend: a job is large and a virtual call is nothing beside it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::{
    BlockJob, Buffer, ClusterJob, DType, DeviceError, HostOps, HostRegion, MatmulJob, PreparedWeight, Stage,
    Submission, WeightSource,
};

/// One compute unit. Every method may be called from any thread.
pub trait Device: Send + Sync + 'static {
    /// What the unit is.
    fn info(&self) -> &DeviceInfo;

    /// Whether and how it runs an operation. Pure: the same answer for the life of the device.
    fn supports(&self, op: &OpShape) -> Support;

    /// Memory for inputs and outputs, zeroed.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`], [`DeviceError::Lost`].
    fn alloc(&self, bytes: usize) -> Result<Buffer, DeviceError> {
        Buffer::host(bytes)
    }

    /// Reaches host memory without a copy.
    ///
    /// # Errors
    /// [`DeviceError::Unsupported`] by default; then a copy inside the job is the way.
    fn import(&self, region: HostRegion) -> Result<Buffer, DeviceError> {
        let _ = region;
        Err(self.unsupported("importing host memory"))
    }

    /// Packs, uploads or compiles a weight. `recycle` hands back one whose memory may be reused: prefill streams
    /// layers through two or three of these.
    ///
    /// # Errors
    /// [`DeviceError::Shape`], [`DeviceError::Unsupported`], [`DeviceError::OutOfMemory`], [`DeviceError::Lost`].
    fn prepare(
        &self,
        weight: WeightSource<'_>,
        recycle: Option<PreparedWeight>,
    ) -> Result<PreparedWeight, DeviceError>;

    /// Multiplies. Never blocks for another device; finishes the submission exactly once, on any thread, possibly
    /// before returning.
    fn submit_matmul(&self, submission: Submission<MatmulJob>);

    /// Takes all clusters out of `batch`. Blocks are computed by the whole unit; of bundles one worker takes one
    /// cluster and completes it asynchronously, so that reads go on meanwhile.
    fn submit_clusters(&self, batch: &mut Vec<Submission<ClusterJob>>) {
        for submission in batch.drain(..) {
            submission.finish(Err(self.unsupported("neuron clusters")));
        }
    }

    /// Runs a whole transformer block.
    fn submit_block(&self, submission: Submission<BlockJob>) {
        submission.finish(Err(self.unsupported("whole blocks")));
    }

    /// Lets a waiting caller do one piece of this device's work; false when there is none.
    fn help(&self) -> bool {
        false
    }

    /// The error for what the device does not offer.
    fn unsupported(&self, what: &str) -> DeviceError {
        DeviceError::Unsupported { device: self.info().name.clone(), what: what.into() }
    }
}

/// Finds and opens the devices of one family. In-tree backends and loaded plugins look the same.
pub trait Backend: Send + Sync + 'static {
    /// The name that `--device` takes.
    fn name(&self) -> &str;

    /// The units that are there, in the order of their index.
    fn probe(&self) -> Vec<DeviceInfo>;

    /// Opens one of them.
    ///
    /// # Errors
    /// [`DeviceError::NoSuchDevice`], [`DeviceError::Lost`] when the unit is gone, or what the driver says.
    fn open(&self, index: usize) -> Result<Arc<dyn Device>, DeviceError>;

    /// Host operations on the same threads as the family's devices; `None` leaves them to [`crate::ScalarOps`].
    fn host_ops(&self) -> Option<Arc<dyn HostOps>> {
        None
    }
}

/// Which device made a handle, among all that this process has opened. A device takes one when it is opened and puts
/// it into what it hands out (see [`PreparedWeight`]); so no device takes the handle of another one of its type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct DeviceId(u64);

impl DeviceId {
    /// An id that no other device of the process has.
    #[expect(clippy::new_without_default, reason = "two ids made alike are never equal")]
    pub fn new() -> DeviceId {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        DeviceId(NEXT.fetch_add(1, Ordering::Relaxed))
    }
}

/// What a unit is. Made by [`DeviceInfo::new`]; then set the fields that differ.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeviceInfo {
    /// A name for people: the product and what matters of it.
    pub name: String,
    /// Who makes it.
    pub vendor: String,
    /// The kind of unit.
    pub kind: DeviceKind,
    /// Memory that its weights and buffers can take; 0 when unknown.
    pub memory_bytes: u64,
    /// Threads that work on one job; 1 for a unit with a queue of its own.
    pub threads: usize,
    /// Alignment in bytes that [`Device::import`] needs; 0 when it cannot import.
    pub import_alignment: usize,
    /// Token counts that a static graph exists for, ascending; empty when any count will do.
    pub token_buckets: Vec<usize>,
}

impl DeviceInfo {
    /// A unit of one thread, about which nothing else is known.
    pub fn new(name: impl Into<String>, kind: DeviceKind) -> DeviceInfo {
        DeviceInfo {
            name: name.into(),
            vendor: String::new(),
            kind,
            memory_bytes: 0,
            threads: 1,
            import_alignment: 0,
            token_buckets: Vec::new(),
        }
    }
}

/// The kind of a unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum DeviceKind {
    /// A pool of CPU threads.
    Cpu,
    /// A graphics processor.
    Gpu,
    /// A neural processor.
    Npu,
}

impl DeviceKind {
    /// `cpu`, `gpu` or `npu`.
    pub fn name(self) -> &'static str {
        match self {
            DeviceKind::Cpu => "cpu",
            DeviceKind::Gpu => "gpu",
            DeviceKind::Npu => "npu",
        }
    }
}

/// An operation, as far as a device must know it to say whether it can. A device says no to one it does not know.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum OpShape {
    /// A [`MatmulJob`] with one product.
    Matmul {
        /// Type of the weight.
        dtype: DType,
        /// Outputs.
        rows: usize,
        /// Inputs.
        cols: usize,
        /// Tokens.
        tokens: usize,
    },
    /// A [`ClusterJob`].
    Cluster {
        /// The part of the layer.
        stage: Stage,
        /// Type of gate and up.
        dtype: DType,
        /// Type of down.
        down_dtype: DType,
        /// Neurons in the cluster.
        neurons: usize,
        /// Width of the model.
        width: usize,
        /// Tokens.
        tokens: usize,
        /// Whether the weights are bundles in an arena rather than a prepared block.
        bundles: bool,
    },
    /// A [`BlockJob`].
    Block,
}

/// A device's answer to [`Device::supports`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Support {
    /// The unit has a kernel for it.
    Native,
    /// It works, by a detour that costs time.
    Emulated,
    /// It does not, and why.
    No(String),
}
