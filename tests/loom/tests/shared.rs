//! Conductors that share a cache too small for all that they want, and a thread that reads for them, in the protocol of
//! the pipeline: clusters that are taken whole or not at all, gates that are read first, reads that are begun ahead of
//! need, and reads that fail.
//!
//! Each slot is a cell of the model checker, which complains when a slot is read while it is written, whatever the parts:
//! an arena leases whole slots.

use loom::cell::UnsafeCell;
use loom::sync::{Arc, Condvar, Mutex};
use loom::thread;

use neuropil_loom::cache::{Acquired, Cache, Lru, Parts, Shared};

const NEURONS: usize = 4;

/// A read for the I/O thread: slot, parts, and the neuron that they are of.
type Read = (u32, Parts, u32);

/// Reads that the I/O thread has not seen, and conductors that have not ended.
struct Inbox {
    reads: Vec<Read>,
    busy: usize,
}

/// The gate and the rest of a slot: which neuron they are of.
type Bytes = UnsafeCell<[u32; 2]>;

/// What the threads share.
struct Case {
    shared: Shared,
    inbox: Mutex<Inbox>,
    arrived: Condvar,
    slots: Vec<Bytes>,
}

/// The parts' places in [`Bytes`].
fn places(parts: Parts) -> impl Iterator<Item = usize> {
    [Parts::GATE, Parts::UP_DOWN]
        .into_iter()
        .enumerate()
        .filter(move |(_, p)| parts.contains(*p))
        .map(|(i, _)| i)
}

impl Case {
    fn new(slots: usize, conductors: usize) -> Case {
        let cache = Cache::new(&[NEURONS], slots, Box::new(Lru::default())).unwrap();
        Case {
            shared: Shared::new(cache),
            inbox: Mutex::new(Inbox { reads: Vec::new(), busy: conductors }),
            arrived: Condvar::new(),
            slots: (0..slots).map(|_| UnsafeCell::new([u32::MAX; 2])).collect(),
        }
    }

    /// Hands the reads of an acquisition over.
    fn load(&self, positions: &[u32], out: &Acquired) {
        let read =
            |(index, parts): &(u32, Parts)| (out.slots[*index as usize], *parts, positions[*index as usize]);
        if !out.load.is_empty() {
            self.inbox.lock().unwrap().reads.extend(out.load.iter().map(read));
            self.arrived.notify_one();
        }
    }

    /// Computes with parts of a neuron.
    fn compute(&self, slot: u32, parts: Parts, neuron: u32) {
        // SAFETY: the model checker looks for writers.
        let found = self.slots[slot as usize].with(|bytes| unsafe { *bytes });
        places(parts).for_each(|place| assert_eq!(found[place], neuron, "slot {slot} holds another neuron"));
    }

    /// Reads until all conductors have ended, or gives up before it has read more than `most`. The first `failures` reads
    /// fail. Says how many reads there were.
    fn serve(&self, failures: usize, most: usize) -> usize {
        let (mut count, mut loaded) = (0, Vec::new());
        loop {
            let mut inbox = self.inbox.lock().unwrap();
            while inbox.reads.is_empty() && inbox.busy > 0 {
                inbox = self.arrived.wait(inbox).unwrap();
            }
            let reads = std::mem::take(&mut inbox.reads);
            drop(inbox);
            if reads.is_empty() {
                return count;
            }
            if count + reads.len() > most {
                self.shared.end();
                return count;
            }
            for (slot, parts, neuron) in reads {
                self.slots[slot as usize].with_mut(|bytes| {
                    // SAFETY: the model checker looks for others.
                    places(parts).for_each(|place| unsafe { (*bytes)[place] = neuron });
                });
                loaded.push((slot, parts, count >= failures));
                count += 1;
            }
            self.shared.loaded(&loaded);
            loaded.clear();
        }
    }

    fn end(&self) {
        self.inbox.lock().unwrap().busy -= 1;
        self.arrived.notify_one();
    }
}

/// What a conductor does.
#[derive(Clone, Copy, Default)]
struct Plan {
    /// What it takes and sums together, in this order.
    clusters: &'static [&'static [u32]],
    /// Neurons that it has read before it needs them.
    ahead: &'static [u32],
    /// Whether it reads gates first, and the rest of odd neurons only.
    gate_first: bool,
    /// Whether its first cluster is given up instead of read.
    gives_up: bool,
    /// The slots that it leaves the cache before it begins, and the neurons that are hot then.
    resize: Option<(usize, usize)>,
}

/// A run of a conductor through its clusters.
struct Run<'a> {
    case: &'a Case,
    plan: Plan,
    list: Vec<u32>,
    ends: Vec<usize>,
    slots: Vec<u32>,
    /// What each neuron waits for; no parts when it is done.
    wants: Vec<Parts>,
    pending: Vec<u32>,
    taken: usize,
    summed: usize,
    seen: u64,
    out: Acquired,
}

impl Run<'_> {
    /// Takes as many clusters as there is room for.
    fn take(&mut self) {
        let parts = if self.plan.gate_first { Parts::GATE } else { Parts::BOTH };
        while self.taken < self.ends.len() {
            let (start, end) = (self.slots.len(), self.ends[self.taken]);
            let wanted = &self.list[start..end];
            match self.case.shared.acquire_all(0, wanted, parts, &mut self.out) {
                Err(seen) => {
                    self.seen = seen;
                    return;
                }
                Ok(()) if std::mem::take(&mut self.plan.gives_up) => {
                    self.case.shared.not_read(&self.out);
                    self.case.shared.release(&self.out.slots);
                    continue;
                }
                Ok(()) => self.case.load(wanted, &self.out),
            }
            self.slots.extend_from_slice(&self.out.slots);
            self.wants.resize(end, parts);
            self.pending.extend(start as u32..end as u32);
            self.taken += 1;
        }
    }

    /// Computes what is there, as far as it goes.
    fn advance(&mut self) {
        let [mut ready, mut on] = [const { Vec::new() }; 2];
        let wants = |index: u32| Some((self.slots[index as usize], self.wants[index as usize]));
        self.case.shared.take_ready(&mut self.pending, &mut ready, wants);
        for index in ready {
            let at = index as usize;
            let (slot, neuron) = (self.slots[at], self.list[at]);
            self.case.compute(slot, self.wants[at], neuron);
            if self.wants[at] == Parts::GATE && neuron % 2 == 1 {
                self.wants[at] = Parts::UP_DOWN;
                on.push(index);
            } else {
                self.wants[at] = Parts::NONE;
            }
        }
        if !on.is_empty() {
            let slots: Vec<u32> = on.iter().map(|index| self.slots[*index as usize]).collect();
            let neurons: Vec<u32> = on.iter().map(|index| self.list[*index as usize]).collect();
            self.case.shared.upgrade(&slots, Parts::UP_DOWN, &mut self.out);
            self.case.load(&neurons, &self.out);
            self.pending.extend(on);
        }
    }

    /// Gives back the clusters that are done, in order.
    fn sum(&mut self) {
        while self.summed < self.taken {
            let start = if self.summed == 0 { 0 } else { self.ends[self.summed - 1] };
            let of = start..self.ends[self.summed];
            if self.wants[of.clone()].iter().any(|parts| *parts != Parts::NONE) {
                return;
            }
            self.case.shared.release(&self.slots[of]);
            self.summed += 1;
        }
    }

    /// Whether all was computed; nothing stays in use.
    fn finish(&mut self) -> bool {
        loop {
            self.advance();
            self.sum();
            if self.taken < self.ends.len() {
                self.take();
                if self.summed == self.taken {
                    if !self.case.shared.wait_released(self.seen) {
                        return self.abandon();
                    }
                    continue;
                }
            }
            if self.summed == self.ends.len() {
                return true;
            }
            let wants = self.pending.iter().map(|i| (self.slots[*i as usize], self.wants[*i as usize]));
            if !self.case.shared.wait_ready(wants, 1) {
                return self.abandon();
            }
        }
    }

    /// Gives back what will not be computed.
    fn abandon(&self) -> bool {
        let summed = if self.summed == 0 { 0 } else { self.ends[self.summed - 1] };
        self.case.shared.release(&self.slots[summed..]);
        false
    }
}

/// Carries a plan out. Whether all was computed.
fn conduct(case: &Case, plan: Plan) -> bool {
    let mut out = Acquired::default();
    if let Some((slots, hot)) = plan.resize {
        // Refused while one that would go is in use.
        let _ = case.shared.resize(slots);
        case.shared.set_hot(0, hot);
    }
    if !plan.ahead.is_empty() {
        let mut absent = Vec::new();
        case.shared.prefetch(0, plan.ahead, Parts::BOTH, &mut absent, &mut out);
        case.load(&absent, &out);
    }
    let mut end = 0;
    let ends = plan.clusters.iter().map(|cluster| {
        end += cluster.len();
        end
    });
    let mut run = Run {
        case,
        plan,
        list: plan.clusters.concat(),
        ends: ends.collect(),
        slots: Vec::new(),
        wants: Vec::new(),
        pending: Vec::new(),
        taken: 0,
        summed: 0,
        seen: 0,
        out,
    };
    run.take();
    let done = run.finish();
    case.end();
    done
}

/// Tries all orders. At most `most_reads` reads are needed; without failures all is computed.
fn check<const N: usize>(slots: usize, plans: [Plan; N], failures: usize, most_reads: usize) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(2);
    model.check(move || {
        let case = Arc::new(Case::new(slots, N));
        let conductors = plans.map(|plan| {
            let case = case.clone();
            thread::spawn(move || conduct(&case, plan))
        });
        let reads = case.serve(failures, usize::MAX);
        let done = conductors.map(|conductor| conductor.join().unwrap());
        assert!(failures > 0 || done == [true; N], "all is computed where no read fails");
        assert!(reads <= most_reads, "{reads} reads");
        // Nothing is held, and nothing counts as being read.
        case.shared.set_hot(0, 0);
        case.shared.resize(1).unwrap();
        let mut out = Acquired::default();
        for position in 0..NEURONS as u32 {
            case.shared.acquire_all(0, &[position], Parts::BOTH, &mut out).unwrap();
            assert!(out.joined.is_empty(), "neuron {position} is still being read");
            case.shared.not_read(&out);
            case.shared.release(&out.slots);
        }
    });
}

/// Clusters, and nothing else.
fn plain(clusters: &'static [&'static [u32]]) -> Plan {
    Plan { clusters, ..Plan::default() }
}

#[test]
fn neurons_that_both_want_are_read_once() {
    check(3, [plain(&[&[0, 1]]), plain(&[&[1, 2]])], 0, 3);
}

#[test]
fn one_slot_for_two_conductors() {
    check(1, [plain(&[&[0], &[1]]), plain(&[&[1]])], 0, 3);
}

#[test]
fn clusters_that_do_not_fit_together_wait_for_each_other() {
    check(2, [plain(&[&[0, 1]]), plain(&[&[1, 2]])], 0, 4);
}

#[test]
fn clusters_that_do_not_fit_beside_those_of_the_same_run() {
    check(3, [plain(&[&[0, 1], &[2, 3]]), plain(&[&[1, 3]])], 0, 6);
}

#[test]
fn who_joined_a_read_that_fails_gets_an_error_or_goes_on() {
    check(3, [plain(&[&[0, 1]]), plain(&[&[1]])], 1, 3);
}

#[test]
fn failures_leave_no_slot_taken_where_slots_are_short() {
    check(2, [plain(&[&[0, 1]]), plain(&[&[1], &[2]])], 2, 4);
}

#[test]
fn gates_are_read_first_and_what_is_off_no_further() {
    let gate_first = |clusters| Plan { gate_first: true, ..plain(clusters) };
    check(2, [gate_first(&[&[0, 1]]), gate_first(&[&[1]])], 0, 4);
}

#[test]
fn gates_first_beside_whole_neurons() {
    check(2, [Plan { gate_first: true, ..plain(&[&[1]]) }, plain(&[&[1], &[2]])], 0, 4);
}

#[test]
fn gates_first_and_reads_that_fail() {
    let gate_first = |clusters| Plan { gate_first: true, ..plain(clusters) };
    check(2, [gate_first(&[&[1]]), gate_first(&[&[1]])], 2, 5);
}

#[test]
fn what_is_given_up_can_be_had_by_others() {
    check(2, [Plan { gives_up: true, ..plain(&[&[0, 1]]) }, plain(&[&[1, 2]])], 0, 4);
}

#[test]
fn reads_ahead_that_fill_the_cache_keep_nobody_waiting_for_ever() {
    check(2, [Plan { ahead: &[2, 3], ..plain(&[&[0, 1]]) }, plain(&[&[3]])], 0, 7);
}

#[test]
fn reads_ahead_that_fail() {
    check(2, [Plan { ahead: &[0, 1], ..plain(&[&[0, 1]]) }, plain(&[&[1]])], 2, 6);
}

#[test]
fn a_cache_that_shrinks_between() {
    check(3, [plain(&[&[0, 1]]), Plan { resize: Some((2, 0)), ..plain(&[&[1, 2]]) }], 0, 5);
}

#[test]
fn neurons_that_turn_hot_between() {
    // A cluster must fit beside what is hot.
    check(3, [plain(&[&[0, 1]]), Plan { resize: Some((3, 1)), ..plain(&[&[2, 3]]) }], 0, 5);
}

#[test]
fn nobody_waits_for_a_reader_that_is_gone() {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(2);
    model.check(|| {
        let case = Arc::new(Case::new(2, 2));
        let plans = [plain(&[&[0, 1], &[2]]), Plan { gate_first: true, ..plain(&[&[1, 3]]) }];
        let conductors = plans.map(|plan| {
            let case = case.clone();
            thread::spawn(move || conduct(&case, plan))
        });
        case.serve(0, 2);
        let done = conductors.map(|conductor| conductor.join().unwrap());
        assert!(done != [true; 2], "more was to be read than there was");
    });
}
