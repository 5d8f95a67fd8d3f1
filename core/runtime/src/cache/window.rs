//! The policy of LLM in a Flash (Alizadeh and others, 2023), for comparison: what the last few tokens used stays, and
//! nothing else.

use std::collections::TryReserveError;

use super::queues::Queues;
use super::s3fifo::grow;
use super::{Eviction, Held};

/// Keeps the neurons that were asked for in the last steps, and drops the others at the end of a step, whether or not
/// their slots are needed. Where slots run out before, the oldest goes.
pub struct Window {
    steps: u32,
    step: u32,
    queue: Queues,
    /// The step in which each slot was last asked for, or filled.
    used: Vec<u32>,
}

impl Window {
    /// Keeps what so many steps used.
    pub fn new(steps: u32) -> Window {
        Window { steps, step: 0, queue: Queues::new(1), used: Vec::new() }
    }

    /// Lets the oldest go, up to `count` of them, that were last used before step `before`.
    fn drop_oldest(&mut self, count: usize, before: u32, held: &Held<'_>, out: &mut Vec<u32>) {
        let mut wanted = count;
        for _ in 0..self.queue.len(0) {
            let Some(slot) = self.queue.front(0).filter(|_| wanted > 0) else { break };
            if self.used[slot as usize] >= before {
                break;
            }
            if held.contains(slot) {
                self.asked(&[slot]);
            } else {
                self.queue.remove(slot);
                out.push(slot);
                wanted -= 1;
            }
        }
    }
}

impl Default for Window {
    fn default() -> Window {
        Window::new(5)
    }
}

impl Eviction for Window {
    fn name(&self) -> &'static str {
        "window"
    }

    fn reserve(&mut self, slots: usize, _neurons: usize) -> Result<(), TryReserveError> {
        self.queue.reserve(slots)?;
        grow(&mut self.used, slots, 0)
    }

    fn insert(&mut self, slots: &[u32], _neurons: &[u32]) {
        self.asked(slots);
    }

    fn asked(&mut self, slots: &[u32]) {
        slots.iter().for_each(|slot| self.used[*slot as usize] = self.step);
        self.queue.push_reversed(0, slots);
    }

    fn remove(&mut self, slots: &[u32]) {
        slots.iter().for_each(|slot| self.queue.remove(*slot));
    }

    fn evict(&mut self, count: usize, held: &Held<'_>, out: &mut Vec<u32>) {
        self.drop_oldest(count, u32::MAX, held, out);
    }

    fn tick(&mut self, held: &Held<'_>, out: &mut Vec<u32>) {
        self.step += 1;
        self.drop_oldest(usize::MAX, self.step.saturating_sub(self.steps), held, out);
    }
}
