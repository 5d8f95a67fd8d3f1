//! Two conductors ask a tiny cache for overlapping neurons, and one I/O thread reads.

use std::collections::VecDeque;

use loom::sync::{Arc, Condvar, Mutex};
use loom::thread;

use neuropil_loom::cache::{Acquired, Cache, Lru, Parts, Settled, Shared};

/// A read that the I/O thread is to do, or the end of a conductor.
enum Message {
    Read(u32, Parts),
    End,
}

/// A queue of reads.
#[derive(Default)]
struct Queue {
    messages: Mutex<VecDeque<Message>>,
    pushed: Condvar,
}

impl Queue {
    fn push(&self, messages: impl Iterator<Item = Message>) {
        self.messages.lock().unwrap().extend(messages);
        self.pushed.notify_one();
    }

    fn pop(&self) -> Message {
        let mut messages = self.messages.lock().unwrap();
        loop {
            match messages.pop_front() {
                Some(message) => return message,
                None => messages = self.pushed.wait(messages).unwrap(),
            }
        }
    }
}

/// What the threads share.
struct Case {
    shared: Shared,
    queue: Queue,
}

fn reads(out: &Acquired) -> impl Iterator<Item = Message> {
    out.load.iter().map(|(index, parts)| Message::Read(out.slots[*index as usize], *parts))
}

/// Works through `positions` in waves, as a step does. Says how many neurons it had and gave up.
fn conduct(case: &Case, positions: &[u32]) -> [usize; 2] {
    let (mut out, mut settled) = (Acquired::default(), Settled::default());
    let (mut done, mut had, mut gave_up) = (0, 0, 0);
    while done < positions.len() {
        let taken = case.shared.acquire(0, &positions[done..], Parts::BOTH, &mut out);
        done += taken;
        case.queue.push(reads(&out));
        let held = out.slots.clone();
        let mut waiting = held.clone();
        let mut tried = Vec::new();
        while !waiting.is_empty() {
            case.shared.settle(&mut waiting, Parts::BOTH, &mut settled);
            had += settled.ready.len();
            // Every failure may be tried once more, by whoever sees it first.
            let (again, never): (Vec<u32>, Vec<u32>) =
                settled.failed.iter().partition(|s| !tried.contains(*s));
            gave_up += never.len();
            if !again.is_empty() {
                case.shared.upgrade(&again, Parts::BOTH, &mut out);
                case.queue.push(reads(&out));
                tried.extend(&again);
                waiting.extend(again);
            }
        }
        case.shared.release(&held);
    }
    case.queue.push([Message::End].into_iter());
    [had, gave_up]
}

/// Reads until both conductors have ended. The first `failures` reads fail. Says how many reads there were.
fn serve(case: &Case, failures: usize) -> usize {
    let (mut ended, mut count) = (0, 0);
    while ended < 2 {
        match case.queue.pop() {
            Message::End => ended += 1,
            Message::Read(slot, parts) => {
                let (ready, loading) = case.shared.lock().state(slot);
                assert_eq!(
                    (ready, loading),
                    (Parts::NONE, parts),
                    "a read that nobody waits for, or a second one"
                );
                case.shared.loaded(&[(slot, parts)], count >= failures);
                count += 1;
            }
        }
    }
    count
}

fn check(slots: usize, wanted: [&'static [u32]; 2], failures: usize, most_reads: usize) {
    let mut model = loom::model::Builder::new();
    // Reads that fail make long runs.
    model.preemption_bound = Some(if failures > 1 { 1 } else { 2 });
    model.check(move || {
        let cache = Cache::new(&[3], slots, Box::new(Lru::default())).unwrap();
        let case = Arc::new(Case { shared: Shared::new(cache), queue: Queue::default() });
        let conductors = wanted.map(|positions| {
            let case = case.clone();
            thread::spawn(move || conduct(&case, positions))
        });
        let reads = serve(&case, failures);
        let mut all = [0; 2];
        for (conductor, positions) in conductors.into_iter().zip(wanted) {
            let [had, gave_up] = conductor.join().unwrap();
            assert_eq!(had + gave_up, positions.len());
            all = [all[0] + had, all[1] + gave_up];
        }
        assert!(reads <= most_reads, "{reads} reads");
        assert!(failures > 1 || all[1] == 0, "one failure is made good by the second try");
        // Nothing is held or lost at the end.
        let mut cache = case.shared.lock();
        cache.resize(1).unwrap();
        assert_eq!(cache.acquire(0, &[0], Parts::BOTH, &mut Acquired::default()), 1);
    });
}

#[test]
fn neurons_that_both_want_are_read_once() {
    check(3, [&[0, 1], &[1, 2]], 0, 3);
}

#[test]
fn one_slot_for_two_conductors() {
    check(1, [&[0, 1], &[1]], 0, 3);
}

#[test]
fn two_slots_for_three_neurons() {
    check(2, [&[0, 1], &[1, 2]], 0, 4);
}

#[test]
fn a_failure_wakes_who_joined_and_is_tried_again() {
    check(3, [&[0, 1], &[1]], 1, 3);
}

#[test]
fn failures_end_in_giving_up() {
    check(2, [&[1], &[1]], 4, 4);
}
