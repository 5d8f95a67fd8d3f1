//! Reading weights from storage, many reads at a time, without a thread that waits for each.
//!
//! ```text
//!   pipeline ── submit(reads) ──► IoEngine ──► storage
//!      ▲                             │  owns each read's leases until it hands them back
//!      └───────── reap(done) ◄───────┘
//! ```
//!
//! One thread owns an engine. It submits reads, whose targets are leases on arena slots, and reaps what is done. Four
//! engines serve four needs and look alike from outside: `uring` is Linux's cheapest way to a deep queue, `pread` runs
//! everywhere, [`Throttle`] imitates slower storage, and [`Sim`] has a virtual clock for tests. [`Rows`] stands on any of
//! them and reads as if there were no bundles.
//!
//! Files are read past the page cache where the file system allows it: a cache of neurons is managed by the runtime,
//! and a second one in the system would take the memory that the budget counts.

mod choice;
mod error;
mod files;
mod pread;
mod profile;
mod progress;
mod read;
mod rows;
mod serve;
mod sim;
mod throttle;
#[cfg(target_os = "linux")]
mod uring;
mod waker;

pub use choice::{IoChoice, open, open_files};
pub use error::IoError;
pub use files::{Files, ReadAt};
pub use pread::Pread;
pub use profile::{Curve, StorageProfile};
pub use read::{Done, Read, Target, Targets};
pub use rows::{Bundles, Rows};
pub use sim::{Bytes, Faults, Faulty, Sim};
pub use throttle::Throttle;
#[cfg(target_os = "linux")]
pub use uring::Uring;
pub use waker::IoWaker;

/// What an engine is like.
#[derive(Clone, Debug, PartialEq)]
pub struct IoInfo {
    /// Its name, with what it stands on.
    pub name: String,
    /// A read whose offset, length and place in memory are multiples of this, and which has one target for all its
    /// bytes, goes straight into that target. Others are read into a buffer of the engine and copied.
    pub alignment: usize,
    /// Transfers that are under way at once; more are queued.
    pub depth: usize,
    /// Whether reads go past the system's page cache.
    pub direct: bool,
    /// What a random read takes among many, in nanoseconds: so much, and so much for each byte. Roughly; it decides
    /// whether two small reads are better than a large one.
    pub read_cost: [f64; 2],
    /// Reads of fewer bytes take as long as those of so many.
    pub least_read: usize,
}

impl IoInfo {
    /// What a random read of so many bytes takes among many, in nanoseconds.
    pub fn cost(&self, bytes: usize) -> f64 {
        self.read_cost[0] + self.read_cost[1] * bytes.max(self.least_read) as f64
    }
}

/// That of a disk which answers 90 000 reads a second and brings 2 GB: what a single NVMe disk of a server does.
pub(crate) const NVME_COST: [f64; 2] = [11_000.0, 0.5];
/// Its smallest block.
pub(crate) const NVME_BLOCK: usize = 512;

/// Something that reads files, many reads at a time.
///
/// An engine owns the targets of a read from `submit` until the read comes back, exactly once, by `reap`. Reads come
/// back in any order. Dropping an engine waits for what is under way and gives all targets up.
pub trait IoEngine: Send {
    /// What it is like.
    fn info(&self) -> &IoInfo;

    /// Takes all reads and leaves `reads` empty. Does not wait for storage; a read that cannot be right comes back with
    /// its error.
    fn submit(&mut self, reads: &mut Vec<Read>);

    /// Appends what is done to `done`. With `wait`, blocks until something is done or the waker fires, if anything is
    /// under way or not.
    fn reap(&mut self, wait: bool, done: &mut Vec<Done>);

    /// Ends a `reap` that waits, from another thread: the one that waits now, or the next one.
    fn waker(&self) -> IoWaker;
}
