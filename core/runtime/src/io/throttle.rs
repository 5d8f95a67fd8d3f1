//! Imitates the storage of a profile on top of another engine, so that a phone's balance of compute and I/O can be had
//! on a desk.
//!
//! A phone's storage has one command queue. So reads are served in the order of their submission: each occupies the
//! storage for its length over the bandwidth that the profile has for its size and for how the recent reads lay, and
//! ends no sooner than the profile's latency after it was submitted. Both ends are known when a read is submitted. The
//! engine below reads at its own speed, and what it has is held back until then. A slower disk cannot be made faster.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::profile::StorageProfile;
use super::waker::Bell;
use super::{Done, IoEngine, IoInfo, IoWaker, Read};

/// Reads whose places tell the span.
const RECENT: usize = 64;

/// An engine that is as slow as a profile's storage.
pub struct Throttle {
    info: IoInfo,
    inner: Box<dyn IoEngine>,
    storage: Storage,
    /// When the storage's clock began.
    start: Instant,
    bell: Arc<SleepBell>,
    /// Reads under way in the order in which they end.
    order: VecDeque<Order>,
    /// What the inner engine has done, by number.
    held: HashMap<u64, Done>,
    next: u64,
    /// For what the inner engine reports.
    reaped: Vec<Done>,
}

struct Order {
    number: u64,
    tag: u64,
    ends: Duration,
}

/// The imitated device: when it is free, and where it read last. Has no clock, so that it can be tested.
struct Storage {
    profile: StorageProfile,
    free: Duration,
    last: Option<(usize, u64)>,
    recent: VecDeque<(usize, u64)>,
}

impl Storage {
    fn new(profile: StorageProfile) -> Storage {
        Storage { profile, free: Duration::ZERO, last: None, recent: VecDeque::with_capacity(RECENT) }
    }

    /// When a read that is submitted at `now` ends.
    fn serve(&mut self, now: Duration, file: usize, offset: u64, len: usize) -> Duration {
        let in_sequence =
            self.last.replace((file, offset.saturating_add(len as u64))) == Some((file, offset));
        let span = (!in_sequence).then(|| self.span(file, offset));
        self.free = self.free.max(now) + self.profile.busy(len, span);
        self.free.max(now + self.profile.latency)
    }

    /// Distance between the ends of where recent random reads lay. Files lie far apart.
    fn span(&mut self, file: usize, offset: u64) -> u64 {
        if self.recent.len() == RECENT {
            self.recent.pop_front();
        }
        self.recent.push_back((file, offset));
        let offsets = self.recent.iter().filter(|(other, _)| *other == file).map(|(_, offset)| *offset);
        let (low, high) = offsets.fold((offset, offset), |(low, high), at| (low.min(at), high.max(at)));
        if self.recent.iter().any(|(other, _)| *other != file) { u64::MAX } else { high - low }
    }
}

/// Rings for the wait of this engine, and for that of the one below.
struct SleepBell {
    woken: Mutex<bool>,
    rung: Condvar,
    inner: IoWaker,
}

impl SleepBell {
    fn lock(&self) -> MutexGuard<'_, bool> {
        self.woken.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sleeps at most `time`, or until it rings.
    fn sleep(&self, time: Duration) {
        let slept = self.rung.wait_timeout_while(self.lock(), time, |woken| !*woken);
        drop(slept);
    }
}

impl Bell for SleepBell {
    fn ring(&self) {
        *self.lock() = true;
        self.rung.notify_one();
        self.inner.wake();
    }
}

impl Throttle {
    /// Imitates `profile` on top of `inner`.
    pub fn new(inner: Box<dyn IoEngine>, profile: StorageProfile) -> Throttle {
        let name = format!("throttle:{} over {}", profile.name, inner.info().name);
        let bell = SleepBell { woken: Mutex::new(false), rung: Condvar::new(), inner: inner.waker() };
        // A line through the costs of two small reads, and no read is cheaper than the smaller one.
        let least_read = profile.random.last().map_or(&profile.sequential, |(_, curve)| curve).smallest();
        let cost = |bytes: usize| profile.busy(bytes, Some(u64::MAX)).as_nanos() as f64;
        let per_byte = (cost(8192) - cost(4096)) / 4096.0;
        let read_cost = [cost(4096) - 4096.0 * per_byte, per_byte];
        Throttle {
            info: IoInfo { name, read_cost, least_read, ..inner.info().clone() },
            inner,
            storage: Storage::new(profile),
            start: Instant::now(),
            bell: Arc::new(bell),
            order: VecDeque::new(),
            held: HashMap::new(),
            next: 0,
            reaped: Vec::new(),
        }
    }

    fn reap_inner(&mut self, wait: bool) {
        self.inner.reap(wait, &mut self.reaped);
        self.held.extend(self.reaped.drain(..).map(|done| (done.tag, done)));
    }

    /// Hands out what has ended in both worlds; returns what the next read waits for.
    fn hand_out(&mut self, done: &mut Vec<Done>) -> Wait {
        while let Some(Order { number, tag, ends }) = self.order.front() {
            let left = ends.saturating_sub(self.start.elapsed());
            if !left.is_zero() {
                return Wait::Time(left);
            }
            let Some(mut ended) = self.held.remove(number) else { return Wait::Inner };
            ended.tag = *tag;
            done.push(ended);
            self.order.pop_front();
        }
        Wait::Inner
    }
}

enum Wait {
    /// The engine below: it has not read it yet, or there is nothing to read.
    Inner,
    /// The imitated device.
    Time(Duration),
}

impl IoEngine for Throttle {
    fn info(&self) -> &IoInfo {
        &self.info
    }

    fn submit(&mut self, reads: &mut Vec<Read>) {
        let now = self.start.elapsed();
        for read in reads.iter_mut() {
            // A read that the engine below refuses does not get as far as the storage.
            let fits = read.check(usize::MAX).is_ok();
            let ends = if fits { self.storage.serve(now, read.file, read.offset, read.len) } else { now };
            self.order.push_back(Order { number: self.next, tag: read.tag, ends });
            read.tag = self.next;
            self.next += 1;
        }
        self.inner.submit(reads);
    }

    fn reap(&mut self, wait: bool, done: &mut Vec<Done>) {
        let had = done.len();
        loop {
            self.reap_inner(false);
            let next = self.hand_out(done);
            if !wait {
                return;
            }
            // A wake that comes with something done is used up by it.
            let woken = std::mem::take(&mut *self.bell.lock());
            if woken || done.len() > had {
                return;
            }
            match next {
                Wait::Inner => self.reap_inner(true),
                Wait::Time(left) => self.bell.sleep(left),
            }
        }
    }

    fn waker(&self) -> IoWaker {
        IoWaker::new(self.bell.clone())
    }
}
