//! How the threads of a pool wait: spin, then yield, then sleep.
//!
//! Spinning makes a fork cheap and burns a core, so it is brief, and it is left out altogether where threads
//! outnumber CPUs: there a spinning thread holds the very core that the awaited one needs.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::Thread;
use std::time::{Duration, Instant};

/// How long an idle thread watches for work before it sleeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Patience {
    /// Time in a busy loop.
    pub spin: Duration,
    /// Time after that in which it offers its core to others and looks again.
    pub offer: Duration,
}

impl Patience {
    /// For threads that have a CPU each: longer than the gaps between the jobs of a layer.
    pub const SPIN: Patience = Patience { spin: Duration::from_micros(50), offer: Duration::from_micros(50) };
    /// For threads that share CPUs.
    pub const NONE: Patience = Patience { spin: Duration::ZERO, offer: Duration::ZERO };
}

/// Turns of the busy loop between two looks at the clock.
const TURNS: u32 = 32;

/// One wait, from its first moment.
pub(super) struct Backoff {
    patience: Patience,
    since: Option<Instant>,
    turns: u32,
}

impl Backoff {
    pub(super) fn new(patience: Patience) -> Backoff {
        Backoff { patience, since: None, turns: 0 }
    }

    /// Waits a moment; false when patience has run out (the core is then offered to others each time).
    pub(super) fn wait(&mut self) -> bool {
        if !self.patience.spin.is_zero() && !self.turns.is_multiple_of(TURNS) {
            self.turns += 1;
            std::hint::spin_loop();
            return true;
        }
        let waited = self.since.get_or_insert_with(Instant::now).elapsed();
        if waited < self.patience.spin {
            self.turns = 1;
            return true;
        }
        std::thread::yield_now();
        waited < self.patience.spin + self.patience.offer
    }
}

#[derive(Default)]
struct Seat {
    thread: OnceLock<Thread>,
    asleep: AtomicBool,
}

/// Where the workers sleep.
pub(super) struct Seats {
    seats: Box<[Seat]>,
    asleep: AtomicUsize,
    /// Workers that a fork wants awake at most: one per further CPU, since more would only take turns.
    useful: usize,
}

impl Seats {
    pub(super) fn new(seats: usize, useful: usize) -> Seats {
        Seats { seats: (0..seats).map(|_| Seat::default()).collect(), asleep: AtomicUsize::new(0), useful }
    }

    /// The calling thread is the worker of this seat.
    pub(super) fn take(&self, seat: usize) {
        let _ = self.seats[seat].thread.set(std::thread::current());
    }

    /// Sleeps while `idle` and until woken.
    ///
    /// No wake is lost: this thread counts itself asleep and then looks for work, a caller offers work and then
    /// looks at the count, both sequentially consistent; so one of the two sees the other.
    pub(super) fn sleep(&self, seat: usize, idle: impl Fn() -> bool) {
        let seat = &self.seats[seat];
        seat.asleep.store(true, Ordering::SeqCst);
        self.asleep.fetch_add(1, Ordering::SeqCst);
        while seat.asleep.load(Ordering::Acquire) && idle() {
            std::thread::park();
        }
        if seat.asleep.swap(false, Ordering::AcqRel) {
            self.asleep.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Sees to it that `wanted` workers are awake, as far as that is useful. A look at one atomic when they are.
    pub(super) fn wake(&self, wanted: usize) {
        let asleep = self.asleep.load(Ordering::SeqCst);
        let awake = self.seats.len().saturating_sub(asleep);
        let mut missing = wanted.min(self.useful).saturating_sub(awake).min(asleep);
        for seat in &self.seats {
            if missing == 0 {
                return;
            }
            if seat.asleep.load(Ordering::Relaxed) && seat.asleep.swap(false, Ordering::AcqRel) {
                self.asleep.fetch_sub(1, Ordering::Relaxed);
                if let Some(thread) = seat.thread.get() {
                    thread.unpark();
                }
                missing -= 1;
            }
        }
    }
}

/// Confines the calling thread to these CPUs; none means anywhere. Best effort: a refusal costs speed only.
#[cfg(any(target_os = "linux", target_os = "android"))]
pub(super) fn allow_only(cpus: &[usize]) {
    let mut set = rustix::thread::CpuSet::new();
    let fitting = cpus.iter().filter(|cpu| **cpu < rustix::thread::CpuSet::MAX_CPU);
    fitting.for_each(|cpu| set.set(*cpu));
    if set.count() > 0 {
        let _ = rustix::thread::sched_setaffinity(None, &set);
    }
}

/// Elsewhere the system places threads itself.
#[cfg(not(any(target_os = "linux", target_os = "android")))]
pub(super) fn allow_only(_: &[usize]) {}
