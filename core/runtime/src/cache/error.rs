//! What a cache can refuse.

use std::collections::TryReserveError;

/// Why a cache cannot be made or resized.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum CacheError {
    /// More neurons or slots than the tables can number.
    #[error("{found} {what} are more than the {most} that a cache can number; use a smaller model or budget")]
    TooMany {
        /// Neurons or slots.
        what: &'static str,
        /// How many.
        found: usize,
        /// The most there may be.
        most: usize,
    },
    /// Without a slot nothing can ever be computed.
    #[error("a cache needs at least one slot; raise --memory")]
    NoSlots,
    /// The tables do not fit in memory.
    #[error(
        "the tables of a cache of {neurons} neurons in {slots} slots do not fit in memory; lower --memory"
    )]
    OutOfMemory {
        /// Neurons of the model.
        neurons: usize,
        /// Slots asked for.
        slots: usize,
        /// What the allocator said.
        source: TryReserveError,
    },
    /// Slots that would go are in use or being read.
    #[error("slot {slot} of the cache is in use and cannot be given up; try again after the step")]
    Held {
        /// The first such slot.
        slot: u32,
    },
}
