//! A cache that several threads ask, and another fills: who waits for what, and who wakes whom.
//!
//! ```text
//!   conductor                         I/O thread                another conductor
//!   ─────────                         ──────────                ─────────────────
//!   acquire_all: load n ─── read n ──►                          acquire_all: joined n
//!   wait_ready ┄┄┄┄┄┄┄┐                                         wait_ready ┄┄┄┄┄┄┄┐
//!     computes        └┄◄─ wakes ─── loaded n ─── wakes ──────────────────────►┄┄┄┘ computes
//!   release ──── wakes who is in wait_released, because there was no room
//! ```
//!
//! Nobody waits for a thread, only for a state: parts that are there, or slots that came free. Every change to such a
//! state wakes all who wait, and they look again under the lock; slots that come free are counted besides, so that who
//! was refused can tell whether any did since. So no wake-up is lost.
//!
//! Two rules keep threads from waiting for each other in a circle, and they are the caller's to keep. Who holds slots
//! does not wait for more of them: a cluster is taken as a whole or not at all, and who was refused waits only when it
//! holds none. And who was told to read has to hand the read on before it waits, or to
//! [give up](Shared::give_up).
//!
//! Every call is for a cluster or a batch of reads. `tests/loom` tries this in every order in which threads can run:
//! `cargo test --release --manifest-path tests/loom/Cargo.toml --target-dir target/loom`

use std::sync::PoisonError;

use crate::sync::{Condvar, Mutex, MutexGuard};

use super::{Acquired, Cache, CacheError, Counters, Parts};

struct Guarded {
    cache: Cache,
    /// How often slots came free, or may have.
    releases: u64,
    /// Nobody reads any more, so waiting for it would have no end.
    broken: bool,
    /// Threads that want to take slots away: until they have them, nobody takes neurons into use.
    resizing: usize,
    /// Threads that sleep on `changed`: nobody is woken when nobody sleeps.
    waiting: usize,
}

/// A cache behind a lock.
pub struct Shared {
    guarded: Mutex<Guarded>,
    changed: Condvar,
}

impl Shared {
    /// Shares a cache.
    pub fn new(cache: Cache) -> Shared {
        Shared {
            guarded: Mutex::new(Guarded { cache, releases: 0, broken: false, resizing: 0, waiting: 0 }),
            changed: Condvar::new(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Guarded> {
        self.guarded.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'a>(&self, mut guarded: MutexGuard<'a, Guarded>) -> MutexGuard<'a, Guarded> {
        guarded.waiting += 1;
        let mut guarded = self.changed.wait(guarded).unwrap_or_else(PoisonError::into_inner);
        guarded.waiting -= 1;
        guarded
    }

    fn tell(&self, guarded: MutexGuard<'_, Guarded>) {
        let waiting = guarded.waiting > 0;
        drop(guarded);
        if waiting {
            self.changed.notify_all();
        }
    }

    /// Changes something that makes room, and wakes who waits for it.
    fn freeing<R>(&self, change: impl FnOnce(&mut Cache) -> R) -> R {
        let mut guarded = self.lock();
        let result = change(&mut guarded.cache);
        guarded.releases += 1;
        self.tell(guarded);
        result
    }

    /// See [`Cache::acquire`]: takes as many of the neurons into use as there is room for, and may take none.
    pub fn acquire(&self, unit: usize, positions: &[u32], parts: Parts, out: &mut Acquired) -> usize {
        self.lock().cache.acquire(unit, positions, parts, out)
    }

    /// Takes all of the neurons into use, or none.
    ///
    /// A slot can be read by many or written by one. So a neuron that somebody else holds is shared only if all of it is
    /// there or being read; otherwise one would compute with its gate while the other reads the rest.
    ///
    /// # Errors
    /// When there is no room for all, or one of them cannot be shared: how often slots came free so far, for [`Shared::wait_released`].
    pub fn acquire_all(
        &self,
        unit: usize,
        positions: &[u32],
        parts: Parts,
        out: &mut Acquired,
    ) -> Result<(), u64> {
        let mut guarded = self.lock();
        if guarded.resizing > 0 {
            return Err(guarded.releases);
        }
        let taken = guarded.cache.acquire(unit, positions, parts, out);
        if taken == positions.len() && !guarded.cache.collides(parts, out) {
            return Ok(());
        }
        // Under the same lock, so nobody has seen it and nobody needs to be told.
        put_back(&mut guarded.cache, out);
        Err(guarded.releases)
    }

    /// Takes those of the neurons that are nowhere yet, as far as there is room, and lets go of them at once: they are
    /// being read from now on. `absent` takes their positions.
    pub fn prefetch(
        &self,
        unit: usize,
        positions: &[u32],
        parts: Parts,
        absent: &mut Vec<u32>,
        out: &mut Acquired,
    ) {
        let mut guarded = self.lock();
        absent.clear();
        absent.extend(positions.iter().filter(|position| guarded.cache.slot(unit, **position).is_none()));
        let taken = guarded.cache.acquire(unit, absent, parts, out);
        absent.truncate(taken);
        guarded.cache.release(&out.slots);
    }

    /// See [`Cache::upgrade`].
    pub fn upgrade(&self, slots: &[u32], parts: Parts, out: &mut Acquired) {
        self.lock().cache.upgrade(slots, parts, out);
    }

    /// Takes back that the parts which an acquisition or an upgrade must load are being read. The neurons stay in use.
    pub fn not_read(&self, acquired: &Acquired) {
        self.freeing(|cache| not_read(cache, acquired));
    }

    /// Nobody reads any more: who waits, now or later, is told that reads have failed.
    pub fn end(&self) {
        let mut guarded = self.lock();
        guarded.broken = true;
        self.tell(guarded);
    }

    /// Reports reads that ended: slot, parts, and whether they are there now.
    pub fn loaded(&self, reads: &[(u32, Parts, bool)]) {
        let mut guarded = self.lock();
        let held = guarded.cache.held();
        reads.iter().for_each(|(slot, parts, ok)| guarded.cache.loaded(*slot, *parts, *ok));
        // Nobody was using some of them, and nobody will release them.
        guarded.releases += u64::from(guarded.cache.held() < held);
        self.tell(guarded);
    }

    /// See [`Cache::release`].
    pub fn release(&self, slots: &[u32]) {
        self.freeing(|cache| cache.release(slots));
    }

    /// Waits until slots come free, if none did since the count was `seen`. For callers that hold no slot, or they
    /// would wait for each other. False when nobody reads any more.
    pub fn wait_released(&self, seen: u64) -> bool {
        let mut guarded = self.lock();
        while guarded.releases == seen && !guarded.broken {
            guarded = self.wait(guarded);
        }
        !guarded.broken
    }

    /// Waits until at least `least` of these slots, all held by the caller, or all of them have their parts and nothing
    /// else is read into them. False when
    /// parts of one are not there and nobody is reading them: a read has failed.
    pub fn wait_ready(&self, wanted: impl Iterator<Item = (u32, Parts)> + Clone, least: usize) -> bool {
        let mut guarded = self.lock();
        loop {
            let (mut ready, mut missing) = (0, 0);
            for (slot, parts) in wanted.clone() {
                let (have, loading) = guarded.cache.state(slot);
                if have.contains(parts) && loading.is_empty() {
                    ready += 1;
                } else if (have | loading).contains(parts) {
                    missing += 1;
                } else {
                    return false;
                }
            }
            if missing == 0 || ready >= least {
                return true;
            }
            if guarded.broken {
                return false;
            }
            guarded = self.wait(guarded);
        }
    }

    /// Tells which of these slots have all parts, with nothing being read into them.
    pub fn complete(&self, slots: &[u32], mut tell: impl FnMut(usize)) {
        let guarded = self.lock();
        let complete = |slot: &u32| guarded.cache.state(*slot) == (Parts::BOTH, Parts::NONE);
        slots.iter().enumerate().filter(|(_, slot)| complete(slot)).for_each(|(index, _)| tell(index));
    }

    /// Moves those entries of `pending` to `ready` whose slots have the parts that `wants` names, and into which
    /// nothing else is read; `None` leaves one alone.
    pub fn take_ready(
        &self,
        pending: &mut Vec<u32>,
        ready: &mut Vec<u32>,
        wants: impl Fn(u32) -> Option<(u32, Parts)>,
    ) {
        let guarded = self.lock();
        pending.retain(|index| {
            let there = wants(*index).is_some_and(|(slot, parts)| {
                let (have, loading) = guarded.cache.state(slot);
                have.contains(parts) && loading.is_empty()
            });
            if there {
                ready.push(*index);
            }
            !there
        });
    }

    /// See [`Cache::hot`].
    pub fn hot(&self, unit: usize) -> usize {
        self.lock().cache.hot(unit)
    }

    /// See [`Cache::set_hot`].
    pub fn set_hot(&self, unit: usize, count: usize) {
        self.freeing(|cache| cache.set_hot(unit, count));
    }

    /// See [`Cache::resize`]. Waits until slots that go are no longer in use, so the caller must use none.
    ///
    /// # Errors
    /// Those of [`Cache::resize`].
    pub fn resize(&self, slots: usize) -> Result<(), CacheError> {
        let mut guarded = self.lock();
        guarded.resizing += 1;
        let resized = loop {
            match guarded.cache.resize(slots) {
                Err(CacheError::Held { .. }) if !guarded.broken => guarded = self.wait(guarded),
                resized => break resized,
            }
        };
        guarded.resizing -= 1;
        guarded.releases += 1;
        self.tell(guarded);
        resized
    }

    /// See [`Cache::end_step`].
    pub fn end_step(&self) {
        self.lock().cache.end_step();
    }

    /// See [`Cache::counters`].
    pub fn counters(&self) -> Counters {
        self.lock().cache.counters()
    }
}

/// Takes back that parts are being read.
fn not_read(cache: &mut Cache, acquired: &Acquired) {
    for (index, parts) in &acquired.load {
        cache.loaded(acquired.slots[*index as usize], *parts, false);
    }
}

/// Takes an acquisition back.
fn put_back(cache: &mut Cache, acquired: &Acquired) {
    not_read(cache, acquired);
    cache.release(&acquired.slots);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::Lru;

    fn shared(slots: usize) -> Shared {
        Shared::new(Cache::new(&[4], slots, Box::new(Lru::default())).unwrap())
    }

    #[test]
    fn a_thread_that_waits_gets_what_another_reads_and_what_another_releases() {
        let shared = shared(1);
        let mut out = Acquired::default();
        shared.acquire_all(0, &[1], Parts::BOTH, &mut out).unwrap();
        let slot = out.slots[0];
        std::thread::scope(|scope| {
            let reader = scope.spawn(|| shared.wait_ready([(slot, Parts::BOTH)].into_iter(), 1));
            let next = scope.spawn(|| {
                let mut out = Acquired::default();
                while let Err(seen) = shared.acquire_all(0, &[2], Parts::BOTH, &mut out) {
                    shared.wait_released(seen);
                }
                out.slots.len()
            });
            std::thread::sleep(std::time::Duration::from_millis(20));
            shared.loaded(&[(slot, Parts::BOTH, true)]);
            assert!(reader.join().unwrap());
            shared.release(&[slot]);
            assert_eq!(next.join().unwrap(), 1);
        });
    }

    #[test]
    fn who_was_refused_hears_of_reads_that_nobody_waits_for() {
        let shared = shared(2);
        let (mut out, mut absent) = (Acquired::default(), Vec::new());
        shared.prefetch(0, &[0, 1, 2], Parts::BOTH, &mut absent, &mut out);
        assert_eq!((absent, out.slots.len()), (vec![0, 1], 2));
        let reads: Vec<_> = out.slots.iter().map(|slot| (*slot, Parts::BOTH, true)).collect();
        let seen = shared.acquire_all(0, &[2, 3], Parts::BOTH, &mut out).unwrap_err();
        std::thread::scope(|scope| {
            scope.spawn(|| assert!(shared.wait_released(seen)));
            shared.loaded(&reads);
        });
        shared.acquire_all(0, &[2, 3], Parts::BOTH, &mut out).unwrap();
        assert_eq!(out.load.len(), 2);
    }
}
