//! What reads and the cache did, for reports.

use std::time::Duration;

use crate::cache::{Counters, Found, Segment};

/// What came of the storage so far.
#[derive(Clone, Debug, Default)]
pub struct StorageReport {
    /// The read engine.
    pub engine: String,
    /// Hits, joined and missed neurons, by segment.
    pub counters: Counters,
    /// Reads.
    pub reads: u64,
    /// Bytes that were read.
    pub bytes: u64,
    /// Time in which nothing could be computed because reads had not arrived.
    pub waited: Duration,
}

impl StorageReport {
    /// What came after an earlier report of the same storage.
    pub fn since(&self, earlier: &StorageReport) -> StorageReport {
        let found = |now: &Found, then: &Found| Found {
            hits: now.hits - then.hits,
            joined: now.joined - then.joined,
            misses: now.misses - then.misses,
        };
        let segment = |now: &Segment, then: &Segment| Segment {
            taken: found(&now.taken, &then.taken),
            upgraded: found(&now.upgraded, &then.upgraded),
            evictions: now.evictions - then.evictions,
        };
        let (now, then) = (&self.counters, &earlier.counters);
        StorageReport {
            engine: self.engine.clone(),
            counters: Counters {
                hot: segment(&now.hot, &then.hot),
                cold: segment(&now.cold, &then.cold),
                ..*now
            },
            reads: self.reads - earlier.reads,
            bytes: self.bytes - earlier.bytes,
            waited: self.waited - earlier.waited,
        }
    }
}
