//! Fork-join on the caller's thread and a few workers.
//!
//! A token costs some hundred joins of a few ten microseconds each, so a fork must cost next to nothing, and one
//! core that another process takes must not stop the others. Hence no barrier: chunks are claimed one by one, the
//! join waits for *claimed chunks to finish* and never for a worker to arrive. The caller alone can do everything.
//!
//! **The invariant.** `remaining` counts the chunks of the current job that nobody has claimed; a claim is a
//! compare-and-swap from `r > 0` to `r - 1`. `unfinished` counts the chunks that have not been reported; the caller
//! returns, and only then may the job's memory go, when it is 0. So
//!
//! 1. whoever has claimed a chunk and has not reported it may use the job: `unfinished` is positive because of it;
//! 2. the job pointer is read *after* the claim, so it cannot be that of an older job: the next job is stored only
//!    after the claim was reported;
//! 3. a worker that comes late finds `remaining == 0`, or claims a chunk of whatever job is current by then. It holds
//!    nothing of the job that it missed, so no epoch is needed and no old value of the word can do harm.
//!
//! Every shared field is an atomic. The one unsafe block of this module uses the job, whose lifetime is erased; 1 and
//! 2 justify it.

mod idle;
#[cfg(test)]
mod tests;

use std::any::Any;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Instant;

use neuropil_device::Timeline;

pub use idle::Patience;
use idle::{Backoff, Seats};

/// Value of `remaining` that ends the workers.
const STOP: u32 = u32::MAX;

/// Chunks per thread that a job is cut into where its size allows: a thread that loses its core for a while then
/// holds up a quarter of its share and not all of it.
const CHUNKS_PER_THREAD: usize = 4;

/// A job as the workers see it; lives on the caller's stack until the join.
struct Job<'a> {
    name: &'static str,
    task: &'a (dyn Fn(usize) + Sync),
    chunks: u32,
}

/// Keeps a field on cache lines of its own (two: the prefetcher pairs them).
#[repr(align(128))]
#[derive(Default)]
struct Line<T>(T);

struct Shared {
    /// Chunks of the current job that nobody has claimed, or [`STOP`].
    remaining: Line<AtomicU32>,
    /// Chunks of the current job that have not been reported.
    unfinished: Line<AtomicU32>,
    /// The current job; valid while `unfinished > 0`.
    job: AtomicPtr<Job<'static>>,
    /// Whether a caller is between fork and join.
    running: AtomicBool,
    /// The first panic of the current job.
    panic: Mutex<Option<Box<dyn Any + Send>>>,
    panicked: AtomicBool,
    seats: Seats,
    patience: Patience,
    /// Told which thread works when.
    timeline: Option<Arc<dyn Timeline>>,
}

/// The caller plus `threads - 1` workers. Dropping it ends the workers.
pub struct Pool {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
}

impl Pool {
    /// A pool of `threads` threads, the caller's included, for a machine on which it may use `cpus`.
    ///
    /// With a thread for every CPU, worker `i` is pinned to `cpus[i]`, which leaves the first CPU to the caller;
    /// with fewer, the workers may move within `cpus`; with more, they go where they like and never spin. The
    /// caller's thread belongs to the application and is never pinned.
    ///
    /// # Errors
    /// When the system refuses a thread.
    pub fn new(threads: usize, cpus: &[usize]) -> io::Result<Pool> {
        Pool::traced(threads, cpus, None)
    }

    /// As [`Pool::new`], and tells `timeline` which thread works when. The caller is thread 0; each thread's first span
    /// is its start, so that one which never comes in time for a share is known too. Work that falls to a caller
    /// because the pool is busy is not told.
    ///
    /// # Errors
    /// As [`Pool::new`].
    pub fn traced(threads: usize, cpus: &[usize], timeline: Option<Arc<dyn Timeline>>) -> io::Result<Pool> {
        let patience = if threads <= cpus.len().max(1) { Patience::SPIN } else { Patience::NONE };
        Pool::with_patience(threads, cpus, patience, cpus.len().max(2) - 1, timeline)
    }

    /// As [`Pool::traced`], with a say in how idle threads wait and in how many workers a fork wakes at most.
    pub(crate) fn with_patience(
        threads: usize,
        cpus: &[usize],
        patience: Patience,
        wakes: usize,
        timeline: Option<Arc<dyn Timeline>>,
    ) -> io::Result<Pool> {
        let workers = threads.saturating_sub(1);
        let shared = Arc::new(Shared {
            remaining: Line::default(),
            unfinished: Line::default(),
            job: AtomicPtr::default(),
            running: AtomicBool::new(false),
            panic: Mutex::default(),
            panicked: AtomicBool::new(false),
            seats: Seats::new(workers, wakes),
            patience,
            timeline,
        });
        let begun = shared.begin();
        shared.end(0, "start", begun);
        let mut pool = Pool { shared, workers: Vec::with_capacity(workers) };
        for seat in 0..workers {
            let shared = pool.shared.clone();
            let cpus = match threads.cmp(&cpus.len()) {
                std::cmp::Ordering::Less => cpus.to_vec(),
                std::cmp::Ordering::Equal => vec![cpus[seat + 1]],
                std::cmp::Ordering::Greater => Vec::new(),
            };
            let body = move || {
                idle::allow_only(&cpus);
                shared.serve(seat);
            };
            let begun = pool.shared.begin();
            pool.workers.push(std::thread::Builder::new().name(format!("neuropil-{seat}")).spawn(body)?);
            pool.shared.end(seat + 1, "start", begun);
        }
        Ok(pool)
    }

    /// Threads that work on one job, the caller's included.
    pub fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Items per chunk for a job of `items`: some chunks per thread, but at least `least` items in each.
    pub fn chunk_len(&self, items: usize, least: usize) -> usize {
        match self.threads() {
            1 => items.max(1),
            threads => items.div_ceil(threads * CHUNKS_PER_THREAD).max(least).max(1),
        }
    }

    /// Calls `task` once with each number below `chunks`, on the caller and the workers, and returns when all calls
    /// have. `name` is for the timeline. Allocates nothing.
    ///
    /// While another thread is in a `run`, and inside of one, the chunks run on the calling thread alone, in order. So
    /// do those of a pool of one thread.
    ///
    /// # Panics
    /// With the first panic of a chunk. Where the chunks are shared out, all others are done first; where they run on
    /// the calling thread alone, those after it are not begun. The pool stays usable.
    pub fn run(&self, name: &'static str, chunks: usize, task: &(dyn Fn(usize) + Sync)) {
        if chunks <= 1 || chunks >= STOP as usize || self.workers.is_empty() {
            let begun = self.shared.begin();
            (0..chunks).for_each(task);
            return self.shared.end(0, name, begun);
        }
        if self.shared.running.swap(true, Ordering::Acquire) {
            return (0..chunks).for_each(task);
        }
        self.shared.fork_join(&Job { name, task, chunks: chunks as u32 });
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.remaining.0.store(STOP, Ordering::SeqCst);
        for worker in self.workers.drain(..) {
            worker.thread().unpark();
            // A worker catches the panics of its chunks, so there is no other outcome to report.
            let _ = worker.join();
        }
    }
}

impl Shared {
    /// Runs one job; the caller has set `running`.
    fn fork_join(&self, job: &Job<'_>) {
        self.job.store((&raw const *job).cast_mut().cast(), Ordering::Relaxed);
        self.unfinished.0.store(job.chunks, Ordering::Relaxed);
        // Release: who claims a chunk sees the job. Sequentially consistent: see `Seats::sleep`.
        self.remaining.0.store(job.chunks, Ordering::SeqCst);
        self.seats.wake(job.chunks as usize - 1);
        self.work(0);
        let mut backoff = Backoff::new(self.patience);
        while self.unfinished.0.load(Ordering::Acquire) != 0 {
            backoff.wait();
        }
        let panic =
            if self.panicked.swap(false, Ordering::Relaxed) { self.lock_panic().take() } else { None };
        self.running.store(false, Ordering::Release);
        if let Some(panic) = panic {
            resume_unwind(panic);
        }
    }

    /// Claims and runs chunks until none is left, as this thread; never unwinds. All are of one job, since the next
    /// one begins after the report.
    fn work(&self, thread: usize) {
        let mut done = 0;
        let mut span = ("", None);
        while let Some(remaining) = self.claim() {
            // SAFETY: this thread has claimed a chunk that it reports only below, so the job lives and this is it
            // (the invariant, 1 and 2). The reference ends with this turn of the loop.
            let job = unsafe { &*self.job.load(Ordering::Relaxed) };
            let chunk = (job.chunks - remaining) as usize;
            if done == 0 {
                span = (job.name, self.begin());
            }
            if let Err(panic) = catch_unwind(AssertUnwindSafe(|| (job.task)(chunk))) {
                self.keep(panic);
            }
            done += 1;
        }
        if done > 0 {
            // Before the report: when a job is over, the timeline has all of it.
            if let Err(panic) = catch_unwind(AssertUnwindSafe(|| self.end(thread, span.0, span.1))) {
                self.keep(panic);
            }
            self.unfinished.0.fetch_sub(done, Ordering::Release);
        }
    }

    /// Claims a chunk: the number of chunks that were left, this one included.
    fn claim(&self) -> Option<u32> {
        let mut remaining = self.remaining.0.load(Ordering::Relaxed);
        while remaining != 0 && remaining != STOP {
            match self.remaining.0.compare_exchange_weak(
                remaining,
                remaining - 1,
                Ordering::Acquire,
                Ordering::Relaxed,
            ) {
                Ok(_) => return Some(remaining),
                Err(now) => remaining = now,
            }
        }
        None
    }

    /// The time, if somebody wants to know it.
    fn begin(&self) -> Option<Instant> {
        self.timeline.as_ref().map(|_| Instant::now())
    }

    /// Tells the timeline what a thread did since `begun`.
    fn end(&self, thread: usize, name: &'static str, begun: Option<Instant>) {
        if let (Some(timeline), Some(begun)) = (&self.timeline, begun) {
            timeline.span(thread, name, begun, Instant::now());
        }
    }

    fn keep(&self, panic: Box<dyn Any + Send>) {
        let mut first = self.lock_panic();
        if first.is_none() {
            *first = Some(panic);
        } else {
            // Dropping a payload may panic again; a second panic is not worth that.
            std::mem::forget(panic);
        }
        self.panicked.store(true, Ordering::Relaxed);
    }

    fn lock_panic(&self) -> std::sync::MutexGuard<'_, Option<Box<dyn Any + Send>>> {
        self.panic.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The life of a worker.
    fn serve(&self, seat: usize) {
        self.seats.take(seat);
        loop {
            self.work(seat + 1);
            let mut backoff = Backoff::new(self.patience);
            while self.remaining.0.load(Ordering::Relaxed) == 0 {
                if !backoff.wait() {
                    self.seats.sleep(seat, || self.remaining.0.load(Ordering::SeqCst) == 0);
                }
            }
            if self.remaining.0.load(Ordering::Relaxed) == STOP {
                return;
            }
        }
    }
}
