//! Which neurons lie in memory: the cache of single neurons, in segments (PowerInfer-2 section 4.2).
//!
//! ```text
//!   neuron ──► slot ──► neuron        two dense tables: nothing is hashed, nothing is searched
//!                │
//!                ├─ parts: what is there, what is being read
//!                └─ holds: how many are using it
//!
//!   hot:  the first neurons of each unit, which fire most; they stay
//!   cold: the rest; an eviction policy says who goes
//! ```
//!
//! The cache knows neither weights nor files. A slot is a number; what lies at that number of an arena, and how it gets
//! there, is for others. So all of its rules can be tried in microseconds, against a model and under a model checker.
//!
//! The caller is told to read what is missing, and reports when that is done. Whoever asks meanwhile is told that
//! somebody else is reading, so a neuron is never read twice. A neuron in use or being read is never evicted.
//!
//! Neurons come in clusters, and so does every call: the cost is that of a few loads and stores per neuron, and once all
//! lists have grown nothing is allocated.

mod error;
mod eviction;
mod lru;
mod odds;
mod parts;
mod queues;
mod s3fifo;
mod segmented;
mod shared;
mod slot;
mod window;

pub use error::CacheError;
pub use eviction::{Eviction, Held};
pub use lru::Lru;
pub use odds::Odds;
pub use parts::Parts;
pub use s3fifo::S3Fifo;
pub use segmented::Cache;
pub use shared::Shared;
pub use window::Window;

/// The answer to a question for neurons. Indices are into the list that was asked for, ascending.
///
/// Kept by the caller from call to call, so that its lists are allocated once.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Acquired {
    /// The slot of each neuron that was taken.
    pub slots: Vec<u32>,
    /// Those with all the parts that were asked for.
    pub ready: Vec<u32>,
    /// Those with parts that somebody else is reading.
    pub joined: Vec<u32>,
    /// Those with parts that the caller must read now, and which. A neuron may be in `joined` as well, for another part.
    pub load: Vec<(u32, Parts)>,
}

impl Acquired {
    /// Empties the lists, and keeps their memory.
    pub fn clear(&mut self) {
        self.slots.clear();
        self.ready.clear();
        self.joined.clear();
        self.load.clear();
    }
}

/// How neurons were found that were asked for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Found {
    /// With all parts in memory.
    pub hits: u64,
    /// With nothing to read, but somebody else was reading.
    pub joined: u64,
    /// With something to read.
    pub misses: u64,
}

impl Found {
    /// Neurons asked for.
    pub fn asked(&self) -> u64 {
        self.hits + self.joined + self.misses
    }
}

/// What happened in one segment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Segment {
    /// Neurons taken into use.
    pub taken: Found,
    /// Neurons in use that more parts were asked of.
    pub upgraded: Found,
    /// Neurons that lost their slot to others.
    pub evictions: u64,
}

/// What happened since the cache was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// The neurons that were hot at that time.
    pub hot: Segment,
    /// The others.
    pub cold: Segment,
    /// Slots that hold a neuron now.
    pub in_use: usize,
    /// Slots that there are now.
    pub slots: usize,
}
