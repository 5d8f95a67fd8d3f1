//! What an eviction policy has to do.

use std::collections::TryReserveError;

use super::slot::Slot;

/// Says which slots may not be given up: those in use, and those being read.
pub struct Held<'a>(pub(super) &'a [Slot]);

impl Held<'_> {
    /// Whether the slot must stay.
    #[inline]
    pub fn contains(&self, slot: u32) -> bool {
        self.0[slot as usize].is_held()
    }
}

/// Which of the cold neurons goes when a slot is needed.
///
/// It is told of slots in lists, a cluster at a time, in ascending order of position: the neurons that fire most come
/// first. It holds the slots that it was told to [`insert`](Eviction::insert) until it gives them up or is told to
/// [`remove`](Eviction::remove) them; a slot is inserted once. Calls come from one thread at a time, under the cache's
/// lock, so each should cost a few nanoseconds per slot and allocate nothing once warm.
pub trait Eviction: Send {
    /// Its name on the command line and in reports.
    fn name(&self) -> &'static str;

    /// Makes room for its tables: slots and neurons are numbered below these. Called first, and when slots are added.
    ///
    /// # Errors
    /// Those of the allocator; nothing has changed then.
    fn reserve(&mut self, slots: usize, neurons: usize) -> Result<(), TryReserveError>;

    /// These slots now hold these neurons (numbered over all units), which says nothing of their use.
    fn insert(&mut self, slots: &[u32], neurons: &[u32]);

    /// The neurons in these slots were asked for: those that were there, and those just inserted.
    fn asked(&mut self, slots: &[u32]);

    /// These slots are no longer its concern: hot now, or free.
    fn remove(&mut self, slots: &[u32]);

    /// Chooses `count` slots to give up among those it holds that are not held, removes them from itself and pushes them
    /// to `out`; fewer if there are no more.
    fn evict(&mut self, count: usize, held: &Held<'_>, out: &mut Vec<u32>);

    /// A step ended. A policy that lets go of neurons by age does so here, as in [`evict`](Eviction::evict).
    fn tick(&mut self, held: &Held<'_>, out: &mut Vec<u32>) {
        _ = (held, out);
    }
}
