//! Which neurons are in memory: those that are read at the start, those that stay, and how many there is room for.
//!
//! Which neurons stay depends on how many sequences decode together: what fires for one token in ten fires in more than
//! half of the steps of eight tokens (PowerInfer-2 section 4.1.3). So there is a number for each unit and each batch size,
//! and a step of another size changes them. That reads nothing and drops nothing; what becomes hot stays from then on.

use std::collections::VecDeque;
use std::sync::PoisonError;

use neuropil_device::DeviceError;
use neuropil_device::quant::SLICE;

use crate::cache::{Acquired, CacheError};
use crate::store::BATCHES;

use super::storage::Storage;

/// Neurons that are read together when the cache is filled, and how many such groups are under way.
const FILLED: usize = 512;
const FILLS_AHEAD: usize = 8;

/// How many of the first groups of each unit stay, by batch size.
#[derive(Default)]
pub(crate) struct HotSizes {
    /// One list for each of [`BATCHES`], or none.
    pub sizes: Vec<Vec<usize>>,
    /// The list that counts now.
    current: usize,
}

impl Storage {
    /// Slots of the cache.
    pub(crate) fn room(&self) -> usize {
        self.cache.counters().slots * self.group()
    }

    /// Neurons that stay in memory.
    pub(crate) fn hot(&self) -> usize {
        (0..self.units.len()).map(|unit| self.cache.hot(unit)).sum::<usize>() * self.group()
    }

    /// Changes how many slots the cache has, and gives the memory of the others back.
    ///
    /// # Errors
    /// When slots that would go are in use.
    pub(crate) fn resize(&self, slots: usize) -> Result<(), CacheError> {
        let (before, slots) = (self.room() / self.group(), slots / self.group());
        if slots == before {
            return Ok(());
        }
        if slots < before {
            self.keep_hot(slots);
        }
        self.cache.resize(slots)?;
        if slots > before {
            self.keep_hot(slots);
        } else {
            // A slot that cannot be given back now stays allocated: that costs memory, not answers.
            let _ = self.arena.discard(slots * self.group()..before * self.group());
        }
        Ok(())
    }

    /// Told that the next step decodes so many sequences.
    pub(crate) fn batch(&self, sequences: usize) {
        let class = BATCHES.iter().rposition(|batch| *batch <= sequences).unwrap_or(0);
        let mut sizes = self.hot_sizes.lock().unwrap_or_else(PoisonError::into_inner);
        if sizes.current != class && class < sizes.sizes.len() {
            sizes.current = class;
            drop(sizes);
            self.keep_hot(self.room() / self.group());
        }
    }

    /// Lets those stay that should at the current batch size, as far as `slots` of the cache allow.
    fn keep_hot(&self, slots: usize) {
        let sizes = self.hot_sizes.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(sizes) = sizes.sizes.get(sizes.current) else { return };
        // A slice of any unit must fit beside those that stay.
        let most = slots.saturating_sub(SLICE.div_ceil(self.group()));
        let hot: usize = sizes.iter().sum();
        for (unit, size) in sizes.iter().enumerate() {
            let size = if hot > most { size * most / hot } else { *size };
            if size != self.cache.hot(unit) {
                self.cache.set_hot(unit, size);
            }
        }
    }

    /// Reads the first groups of each unit, `first` of them; those stay that `hot` says for each batch size. Told how
    /// many bytes of how many are there.
    ///
    /// # Errors
    /// Those of reading.
    pub(crate) fn fill(
        &self,
        first: &[usize],
        hot: Vec<Vec<usize>>,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<(), DeviceError> {
        self.hot_sizes.lock().unwrap_or_else(PoisonError::into_inner).sizes = hot;
        self.keep_hot(self.room() / self.group());
        let per_group = |unit: usize| self.group() * self.units[unit].layout.stride;
        let bytes = |unit: usize, count: usize| (count * per_group(unit)) as u64;
        let total = first.iter().enumerate().map(|(unit, count)| bytes(unit, *count)).sum();
        let (mut acquired, mut reads, mut positions) = (Acquired::default(), Vec::new(), Vec::new());
        let (mut done, mut pending) = (0, VecDeque::new());
        for (unit, count) in first.iter().enumerate() {
            let per_read = (FILLED / self.group()).max(1);
            for start in (0..*count).step_by(per_read) {
                let end = (*count).min(start + per_read);
                positions.clear();
                positions.extend(start as u32..end as u32);
                let got = self.cache.acquire(unit, &positions, self.whole(), &mut acquired);
                self.load(unit, &positions[..got], &acquired, &mut reads)?;
                pending.push_back((acquired.slots.clone(), bytes(unit, got)));
                if pending.len() > FILLS_AHEAD {
                    done += self.filled(pending.pop_front())?;
                    progress(done, total);
                }
            }
        }
        while !pending.is_empty() {
            done += self.filled(pending.pop_front())?;
            progress(done, total);
        }
        let base = self.report();
        *self.base.lock().unwrap_or_else(PoisonError::into_inner) = base;
        Ok(())
    }

    /// Waits for what was acquired, and gives it back.
    fn filled(&self, pending: Option<(Vec<u32>, u64)>) -> Result<u64, DeviceError> {
        let Some((slots, bytes)) = pending else { return Ok(0) };
        let wanted = slots.iter().map(|slot| (*slot, self.whole()));
        let ready = self.cache.wait_ready(wanted, usize::MAX);
        self.cache.release(&slots);
        if ready { Ok(bytes) } else { Err(self.failure()) }
    }
}
