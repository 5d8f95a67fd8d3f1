//! The policy of the paper: the neuron goes that was not asked for the longest.

use std::collections::TryReserveError;

use super::queues::Queues;
use super::{Eviction, Held};

/// Least recently used, by neuron.
///
/// Of neurons asked for at once, the one that fires least counts as the oldest. A neuron found in use where a victim is
/// looked for counts as used now.
pub struct Lru {
    queue: Queues,
}

impl Default for Lru {
    fn default() -> Lru {
        Lru { queue: Queues::new(1) }
    }
}

impl Eviction for Lru {
    fn name(&self) -> &'static str {
        "lru"
    }

    fn reserve(&mut self, slots: usize, _neurons: usize) -> Result<(), TryReserveError> {
        self.queue.reserve(slots)
    }

    fn insert(&mut self, slots: &[u32], _neurons: &[u32]) {
        self.queue.push_reversed(0, slots);
    }

    fn asked(&mut self, slots: &[u32]) {
        self.queue.push_reversed(0, slots);
    }

    fn remove(&mut self, slots: &[u32]) {
        slots.iter().for_each(|slot| self.queue.remove(*slot));
    }

    fn evict(&mut self, count: usize, held: &Held<'_>, out: &mut Vec<u32>) {
        let mut wanted = count;
        for _ in 0..self.queue.len(0) {
            let Some(slot) = self.queue.front(0).filter(|_| wanted > 0) else { break };
            if held.contains(slot) {
                self.queue.push(0, slot);
            } else {
                self.queue.remove(slot);
                out.push(slot);
                wanted -= 1;
            }
        }
    }
}
