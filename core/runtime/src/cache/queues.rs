//! Queues of slots, in the order in which they were pushed: what eviction policies are made of.
//!
//! A queue is a log. Pushing a slot writes its number to the end of the log and the place to a table; whatever the log
//! says of the slot elsewhere is then void. So moving a slot to the end, or out, touches one place of the table and no
//! neighbours, as a linked list would. Void entries are passed over when the front is taken, and squeezed out when a log
//! is full, which is rare enough to cost nothing per push.

use std::collections::TryReserveError;

/// The place of a slot that is in no queue.
const NOWHERE: u32 = u32::MAX;

/// Bits of a place that tell the index in the log; the rest tell the queue, where 15 is none.
const INDEX_BITS: u32 = 28;

/// The most slots: a log has up to four times as many entries, and some to spare.
pub(super) const MOST_SLOTS: usize = 1 << (INDEX_BITS - 3);

/// Some queues; a slot is in one of them or in none.
pub(super) struct Queues {
    places: Vec<u32>,
    logs: Vec<Log>,
}

struct Log {
    entries: Vec<u32>,
    /// Entries before are void.
    begin: usize,
    /// Slots in the queue.
    len: usize,
}

impl Queues {
    /// So many empty queues, up to 15.
    pub(super) fn new(queues: usize) -> Queues {
        let log = |_| Log { entries: Vec::new(), begin: 0, len: 0 };
        Queues { places: Vec::new(), logs: (0..queues.min(15)).map(log).collect() }
    }

    /// Makes room for slots numbered below `slots`.
    pub(super) fn reserve(&mut self, slots: usize) -> Result<(), TryReserveError> {
        let more = slots.saturating_sub(self.places.len());
        self.places.try_reserve_exact(more)?;
        self.places.resize(self.places.len() + more, NOWHERE);
        Ok(())
    }

    /// Slots in a queue.
    pub(super) fn len(&self, queue: usize) -> usize {
        self.logs[queue].len
    }

    /// The queue that a slot is in.
    #[inline]
    pub(super) fn queue_of(&self, slot: u32) -> Option<usize> {
        let place = self.places[slot as usize];
        (place != NOWHERE).then_some((place >> INDEX_BITS) as usize)
    }

    /// Puts a slot at the end of a queue, from wherever it is.
    #[inline]
    pub(super) fn push(&mut self, queue: usize, slot: u32) {
        self.push_reversed(queue, &[slot]);
    }

    /// Puts slots at the end of a queue, the last of them first.
    #[inline]
    pub(super) fn push_reversed(&mut self, queue: usize, slots: &[u32]) {
        let entries = &self.logs[queue].entries;
        if entries.capacity() - entries.len() < slots.len() {
            self.squeeze(queue, slots.len());
        }
        for slot in slots.iter().rev() {
            let place = &mut self.places[*slot as usize];
            let before = (*place >> INDEX_BITS) as usize;
            *place = (queue as u32) << INDEX_BITS | self.logs[queue].entries.len() as u32;
            self.logs[queue].entries.push(*slot);
            if before != queue {
                self.logs[queue].len += 1;
                if let Some(log) = self.logs.get_mut(before) {
                    log.len -= 1;
                }
            }
        }
    }

    /// Takes a slot out of its queue.
    #[inline]
    pub(super) fn remove(&mut self, slot: u32) {
        if let Some(queue) = self.queue_of(slot) {
            self.logs[queue].len -= 1;
            self.places[slot as usize] = NOWHERE;
        }
    }

    /// The slot at the front of a queue.
    #[inline]
    pub(super) fn front(&mut self, queue: usize) -> Option<u32> {
        let log = &mut self.logs[queue];
        while let Some(slot) = log.entries.get(log.begin) {
            let place = (queue as u32) << INDEX_BITS | log.begin as u32;
            if self.places[*slot as usize] == place {
                return Some(*slot);
            }
            log.begin += 1;
        }
        None
    }

    /// Takes void entries out of a log, and makes it grow where that gives too little room.
    #[cold]
    fn squeeze(&mut self, queue: usize, wanted: usize) {
        let log = &mut self.logs[queue];
        let mut kept = 0;
        for index in log.begin..log.entries.len() {
            let slot = log.entries[index];
            let place = &mut self.places[slot as usize];
            if *place == (queue as u32) << INDEX_BITS | index as u32 {
                *place = (queue as u32) << INDEX_BITS | kept as u32;
                log.entries[kept] = slot;
                kept += 1;
            }
        }
        log.entries.truncate(kept);
        log.begin = 0;
        // Room for three times as many pushes as there are slots, before this is done again.
        log.entries.reserve_exact(3 * log.len.max(wanted) + 64);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_leave_in_the_order_of_their_last_push() {
        let mut queues = Queues::new(2);
        queues.reserve(10).unwrap();
        (0..10).for_each(|slot| queues.push(0, slot));
        queues.push(0, 0);
        queues.push(1, 1);
        queues.remove(2);
        // Often enough for logs to be squeezed.
        (0..5000).for_each(|i| queues.push(0, 3 + i % 2));
        let mut drain = |queue| {
            let mut all = Vec::new();
            while let Some(slot) = queues.front(queue) {
                assert_eq!(queues.queue_of(slot), Some(queue));
                queues.remove(slot);
                all.push(slot);
            }
            assert_eq!(queues.len(queue), 0);
            all
        };
        assert_eq!(drain(0), [5, 6, 7, 8, 9, 0, 3, 4]);
        assert_eq!(drain(1), [1]);
    }

    #[test]
    fn a_log_stays_within_four_times_its_slots() {
        let mut queues = Queues::new(1);
        queues.reserve(1000).unwrap();
        (0..100_000).for_each(|i| queues.push(0, i * 7 % 1000));
        assert_eq!(queues.len(0), 1000);
        assert!(queues.logs[0].entries.capacity() <= 4 * 1000 + 64);
    }
}
