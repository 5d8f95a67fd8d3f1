//! A cache that several threads ask, and others fill: who waits for what, and who wakes whom.
//!
//! ```text
//!   conductor                        I/O thread                another conductor
//!   ─────────                        ──────────                ─────────────────
//!   acquire: load n  ──── read n ──►                           acquire: joined n
//!   settle ┄┄┄┄┄┄┄┄┐                                           settle ┄┄┄┄┄┄┄┄┄┐
//!      computes    └┄◄─── wakes ──── loaded n ── wakes ─────────────────────►┄┄┘ computes
//!   release ── wakes who waits for a slot
//! ```
//!
//! Nobody waits for a thread, only for a state: a part that is there, one that is not being read, a slot that is free.
//! Every change to such a state wakes all who wait, and they look again under the lock. So no wake-up is lost.
//!
//! Two rules keep threads from waiting for each other in a circle, and they are the caller's to keep. Who holds slots
//! does not wait for more of them: [`acquire`](Shared::acquire) is for who holds none. And who was told to read has to
//! hand the read on before it waits.
//!
//! `tests/loom` tries this in every order in which threads can run:
//! `cargo test --release --manifest-path tests/loom/Cargo.toml --target-dir target/loom`

use std::sync::PoisonError;

use crate::sync::{Condvar, Mutex, MutexGuard};

use super::{Acquired, Cache, Parts};

/// A cache behind a lock.
pub struct Shared {
    cache: Mutex<Cache>,
    changed: Condvar,
}

/// Slots whose reads ended one way or the other.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Settled {
    /// All parts that were waited for are there.
    pub ready: Vec<u32>,
    /// A part is not there, and nobody is reading it. Who holds the slot may [`upgrade`](Shared::upgrade) it, and is
    /// then told to read what is missing, or give up.
    pub failed: Vec<u32>,
}

impl Shared {
    /// Shares a cache.
    pub fn new(cache: Cache) -> Shared {
        Shared { cache: Mutex::new(cache), changed: Condvar::new() }
    }

    /// The cache itself, for what nobody waits for: counters, hot neurons, the end of a step. Locked while the guard
    /// lives.
    pub fn lock(&self) -> MutexGuard<'_, Cache> {
        self.cache.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// [`Cache::acquire`], which may take none.
    pub fn try_acquire(&self, unit: usize, positions: &[u32], parts: Parts, out: &mut Acquired) -> usize {
        self.lock().acquire(unit, positions, parts, out)
    }

    /// [`Cache::acquire`], which waits until at least one neuron was taken. For callers that hold no slot, or they
    /// would wait for each other.
    pub fn acquire(&self, unit: usize, positions: &[u32], parts: Parts, out: &mut Acquired) -> usize {
        let mut cache = self.lock();
        loop {
            let taken = cache.acquire(unit, positions, parts, out);
            if taken > 0 || positions.is_empty() {
                return taken;
            }
            cache = self.wait(cache);
        }
    }

    /// [`Cache::upgrade`].
    pub fn upgrade(&self, slots: &[u32], parts: Parts, out: &mut Acquired) {
        self.lock().upgrade(slots, parts, out);
    }

    /// Reports reads that ended, and wakes who waits.
    pub fn loaded(&self, reads: &[(u32, Parts)], ok: bool) {
        let mut cache = self.lock();
        reads.iter().for_each(|(slot, parts)| cache.loaded(*slot, *parts, ok));
        drop(cache);
        self.changed.notify_all();
    }

    /// Waits until at least one of `slots`, all held by the caller, has all of `parts` or will not get them; moves those
    /// from `slots` to `settled`, which is emptied first. Does not wait when there are no slots.
    pub fn settle(&self, slots: &mut Vec<u32>, parts: Parts, settled: &mut Settled) {
        settled.ready.clear();
        settled.failed.clear();
        let mut cache = self.lock();
        while !slots.is_empty() {
            slots.retain(|slot| {
                let (ready, loading) = cache.state(*slot);
                if ready.contains(parts) {
                    settled.ready.push(*slot);
                } else if !(ready | loading).contains(parts) {
                    settled.failed.push(*slot);
                } else {
                    return true;
                }
                false
            });
            if !(settled.ready.is_empty() && settled.failed.is_empty()) {
                return;
            }
            cache = self.wait(cache);
        }
    }

    /// [`Cache::release`]; wakes who waits for slots.
    pub fn release(&self, slots: &[u32]) {
        self.lock().release(slots);
        self.changed.notify_all();
    }

    fn wait<'a>(&'a self, cache: MutexGuard<'a, Cache>) -> MutexGuard<'a, Cache> {
        self.changed.wait(cache).unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::Lru;

    #[test]
    fn a_thread_that_waits_gets_what_another_reads_and_what_another_releases() {
        let shared = Shared::new(Cache::new(&[3], 1, Box::new(Lru::default())).unwrap());
        let mut out = Acquired::default();
        assert_eq!(shared.acquire(0, &[1], Parts::BOTH, &mut out), 1);
        let slot = out.slots[0];
        std::thread::scope(|scope| {
            let reader = scope.spawn(|| {
                let (mut slots, mut settled) = (vec![slot], Settled::default());
                shared.settle(&mut slots, Parts::BOTH, &mut settled);
                (slots, settled.ready)
            });
            let next = scope.spawn(|| {
                let mut out = Acquired::default();
                assert_eq!(shared.try_acquire(0, &[2], Parts::BOTH, &mut out), 0);
                shared.acquire(0, &[2], Parts::BOTH, &mut out)
            });
            std::thread::sleep(std::time::Duration::from_millis(20));
            shared.loaded(&[(slot, Parts::BOTH)], true);
            assert_eq!(reader.join().unwrap(), (vec![], vec![slot]));
            shared.release(&[slot]);
            assert_eq!(next.join().unwrap(), 1);
        });
    }
}
