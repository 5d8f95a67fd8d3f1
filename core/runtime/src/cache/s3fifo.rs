//! S3-FIFO (Yang and others, SOSP 2023): most of what is asked for once is not asked for again soon, so it must prove
//! itself in a small queue before it may take a place in the large one.

use std::collections::TryReserveError;

use super::queues::Queues;
use super::{Eviction, Held};

const SMALL: usize = 0;
const MAIN: usize = 1;

/// More questions than this do not count.
const MOST_HITS: u8 = 4;

/// Who was asked for more often than this may stay: once is what brought it here.
const PROOF: u8 = 2;

/// One slot in so many is for the small queue.
const SMALL_SHARE: usize = 10;

/// Three queues: a small one for what is new, the main one, and one of the numbers of neurons that left the small one
/// without a hit. Who is in the last one when it comes again goes to the main queue at once.
pub struct S3Fifo {
    queues: Queues,
    hits: Vec<u8>,
    neurons: Vec<u32>,
    /// For each neuron, how many had left the small queue when it last did; 0 if it never did.
    left: Vec<u32>,
    leaving: u32,
}

impl Default for S3Fifo {
    fn default() -> S3Fifo {
        S3Fifo { queues: Queues::new(2), hits: Vec::new(), neurons: Vec::new(), left: Vec::new(), leaving: 0 }
    }
}

impl S3Fifo {
    fn held(&self) -> usize {
        self.queues.len(SMALL) + self.queues.len(MAIN)
    }

    /// Whether a neuron left the small queue so recently that it is still remembered.
    fn is_ghost(&self, neuron: u32) -> bool {
        let left = self.left[neuron as usize];
        left != 0 && ((self.leaving.wrapping_sub(left)) as usize) < self.queues.len(MAIN)
    }

    /// The next to go from the small queue; those with hits move on.
    fn leave_small(&mut self, held: &Held<'_>) -> Option<u32> {
        for _ in 0..self.queues.len(SMALL) {
            let slot = self.queues.front(SMALL)?;
            let hits = &mut self.hits[slot as usize];
            if held.contains(slot) {
                self.queues.push(SMALL, slot);
            } else if *hits > PROOF {
                *hits = 0;
                self.queues.push(MAIN, slot);
            } else {
                self.queues.remove(slot);
                self.leaving = self.leaving.wrapping_add(1).max(1);
                self.left[self.neurons[slot as usize] as usize] = self.leaving;
                return Some(slot);
            }
        }
        None
    }

    /// The next to go from the main queue; a hit is a stay.
    fn leave_main(&mut self, held: &Held<'_>) -> Option<u32> {
        for _ in 0..self.queues.len(MAIN) * (usize::from(MOST_HITS) + 1) {
            let slot = self.queues.front(MAIN)?;
            let hits = &mut self.hits[slot as usize];
            if held.contains(slot) {
                self.queues.push(MAIN, slot);
            } else if *hits > 0 {
                *hits -= 1;
                self.queues.push(MAIN, slot);
            } else {
                self.queues.remove(slot);
                return Some(slot);
            }
        }
        None
    }
}

impl Eviction for S3Fifo {
    fn name(&self) -> &'static str {
        "s3-fifo"
    }

    fn reserve(&mut self, slots: usize, neurons: usize) -> Result<(), TryReserveError> {
        self.queues.reserve(slots)?;
        grow(&mut self.hits, slots, 0)?;
        grow(&mut self.neurons, slots, 0)?;
        grow(&mut self.left, neurons, 0)
    }

    fn insert(&mut self, slots: &[u32], neurons: &[u32]) {
        for (slot, neuron) in slots.iter().zip(neurons).rev() {
            let queue = if self.is_ghost(*neuron) { MAIN } else { SMALL };
            self.hits[*slot as usize] = 0;
            self.neurons[*slot as usize] = *neuron;
            self.queues.push(queue, *slot);
        }
    }

    fn asked(&mut self, slots: &[u32]) {
        for slot in slots {
            let hits = &mut self.hits[*slot as usize];
            *hits = (*hits + 1).min(MOST_HITS);
        }
    }

    fn remove(&mut self, slots: &[u32]) {
        slots.iter().for_each(|slot| self.queues.remove(*slot));
    }

    fn evict(&mut self, count: usize, held: &Held<'_>, out: &mut Vec<u32>) {
        for _ in 0..count {
            let small_first = self.queues.len(SMALL) * SMALL_SHARE > self.held();
            let victim = if small_first { None } else { self.leave_main(held) };
            // The small queue may pass all that it has on to the main one.
            let victim = victim.or_else(|| self.leave_small(held)).or_else(|| self.leave_main(held));
            let Some(victim) = victim else { break };
            out.push(victim);
        }
    }
}

/// Makes a table as long as `len`.
pub(super) fn grow<T: Copy>(table: &mut Vec<T>, len: usize, value: T) -> Result<(), TryReserveError> {
    let more = len.saturating_sub(table.len());
    table.try_reserve_exact(more)?;
    table.resize(table.len() + more, value);
    Ok(())
}
