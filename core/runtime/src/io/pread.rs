//! The portable engine: a few threads take reads from a queue, each with one positioned read at a time.
//!
//! A queue of depth N costs N threads that sleep in the kernel. That is dearer than `uring` per read, but it needs
//! nothing but `pread`, so it is what runs where io_uring is refused, and the place where faults are put in for tests.

use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use neuropil_device::{Buffer, WriteLease};

use super::serve::serve;
use super::waker::Bell;
use super::{Done, IoEngine, IoError, IoInfo, IoWaker, NVME_BLOCK, NVME_COST, Read, ReadAt};

/// Bytes of each thread's buffer for reads that cannot go straight to their target.
const BOUNCE: usize = 128 << 10;

/// Threads, unless told otherwise.
pub(super) const THREADS: usize = 8;

/// The portable engine.
pub struct Pread {
    info: IoInfo,
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

#[derive(Default)]
struct Shared {
    queue: Mutex<Queue>,
    /// Something is in the queue, or it is closed.
    work: Condvar,
    results: Mutex<Results>,
    /// Something is done, or the waker fired.
    ready: Condvar,
}

#[derive(Default)]
struct Queue {
    reads: VecDeque<Read>,
    closed: bool,
}

#[derive(Default)]
struct Results {
    done: Vec<Done>,
    woken: bool,
}

/// A mutex whose holder panicked still guards a queue that is whole: nothing is half-done under these locks.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Pread {
    /// Starts `threads` threads, at least one, that read `source`.
    ///
    /// # Errors
    /// [`IoError::OutOfMemory`], or [`IoError::Unavailable`] when the system gives no more threads.
    pub fn new(source: Arc<dyn ReadAt>, threads: usize) -> Result<Pread, IoError> {
        let info = IoInfo {
            name: "pread".into(),
            alignment: source.alignment(),
            depth: threads.max(1),
            direct: source.direct(),
            read_cost: NVME_COST,
            least_read: NVME_BLOCK,
        };
        // Threads that were started end with this value, also when a later one does not start.
        let mut engine = Pread { info, shared: Arc::default(), threads: Vec::new() };
        for index in 0..engine.info.depth {
            let bounce = Buffer::host(BOUNCE).and_then(|buffer| buffer.write());
            let bounce = bounce.map_err(|_| IoError::OutOfMemory { bytes: BOUNCE })?;
            let (source, shared) = (source.clone(), engine.shared.clone());
            let refused =
                |error: io::Error| IoError::Unavailable { engine: "pread", reason: error.to_string() };
            let thread = std::thread::Builder::new()
                .name(format!("neuropil-io-{index}"))
                .spawn(move || shared.work_off(&*source, bounce))
                .map_err(refused)?;
            engine.threads.push(thread);
        }
        Ok(engine)
    }
}

impl Shared {
    fn work_off(&self, source: &dyn ReadAt, mut bounce: WriteLease) {
        while let Some(mut read) = self.next() {
            let result = serve(source, &mut read, bounce.bytes_mut());
            lock(&self.results).done.push(read.done(result));
            self.ready.notify_one();
        }
    }

    /// The next read, or `None` when the engine ends.
    fn next(&self) -> Option<Read> {
        let idle = |queue: &mut Queue| queue.reads.is_empty() && !queue.closed;
        let queue = self.work.wait_while(lock(&self.queue), idle);
        queue.unwrap_or_else(PoisonError::into_inner).reads.pop_front()
    }
}

impl Bell for Shared {
    fn ring(&self) {
        lock(&self.results).woken = true;
        self.ready.notify_one();
    }
}

impl IoEngine for Pread {
    fn info(&self) -> &IoInfo {
        &self.info
    }

    fn submit(&mut self, reads: &mut Vec<Read>) {
        let mut queue = lock(&self.shared.queue);
        let many = reads.len();
        queue.reads.extend(reads.drain(..));
        drop(queue);
        for _ in 0..many.min(self.threads.len()) {
            self.shared.work.notify_one();
        }
    }

    fn reap(&mut self, wait: bool, done: &mut Vec<Done>) {
        let mut results = lock(&self.shared.results);
        if wait {
            let idle = |results: &mut Results| results.done.is_empty() && !results.woken;
            let waited = self.shared.ready.wait_while(results, idle);
            results = waited.unwrap_or_else(PoisonError::into_inner);
            results.woken = false;
        }
        done.append(&mut results.done);
    }

    fn waker(&self) -> IoWaker {
        IoWaker::new(self.shared.clone())
    }
}

impl Drop for Pread {
    fn drop(&mut self) {
        let mut queue = lock(&self.shared.queue);
        queue.closed = true;
        let never_begun = std::mem::take(&mut queue.reads);
        drop(queue);
        drop(never_begun);
        self.shared.work.notify_all();
        for thread in self.threads.drain(..) {
            // A thread that panicked has nothing in hand any more.
            let _ = thread.join();
        }
        // Wakers may live on and keep what is shared; leases must not.
        lock(&self.shared.results).done.clear();
    }
}
