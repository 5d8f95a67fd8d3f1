//! How a job reports that it is done: exactly once, on any thread, possibly before `submit` returned.
//!
//! A [`Submission`] carries a job together with its [`Completion`], and finishing it releases the job's leases
//! *before* anybody is told, so whoever is told can use the results at once. A sink only enqueues; that makes
//! re-entrancy and lock order a non-question. A submission that is dropped reports [`DeviceError::Dropped`]: a
//! device that forgets a job cannot hang its caller.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use crate::DeviceError;

/// Where completions arrive. `complete` must only enqueue: no blocking, no work, no call into a device.
pub trait CompletionSink: Send + Sync {
    /// Job `token` is done.
    fn complete(&self, token: u64, result: Result<(), DeviceError>);
}

/// Fires exactly once: by [`Submission::finish`], or as [`DeviceError::Dropped`] when dropped.
pub struct Completion {
    sink: Option<Arc<dyn CompletionSink>>,
    token: u64,
}

impl Completion {
    /// A completion that reports `token` to `sink`.
    pub fn new(sink: Arc<dyn CompletionSink>, token: u64) -> Completion {
        Completion { sink: Some(sink), token }
    }

    fn fire(&mut self, result: Result<(), DeviceError>) {
        if let Some(sink) = self.sink.take() {
            sink.complete(self.token, result);
        }
    }
}

impl Drop for Completion {
    fn drop(&mut self) {
        self.fire(Err(DeviceError::Dropped));
    }
}

/// A job on its way to a device.
pub struct Submission<J> {
    // Declared before the completion: a dropped submission, too, releases the leases first.
    job: J,
    completion: Completion,
}

impl<J> Submission<J> {
    /// Pairs a job with its completion.
    pub fn new(job: J, completion: Completion) -> Self {
        Submission { job, completion }
    }

    /// The job.
    pub fn job(&self) -> &J {
        &self.job
    }

    /// The job, to write through its leases.
    pub fn job_mut(&mut self) -> &mut J {
        &mut self.job
    }

    /// Releases what the job holds, then reports.
    pub fn finish(self, result: Result<(), DeviceError>) {
        let Submission { job, mut completion } = self;
        drop(job);
        completion.fire(result);
    }
}

/// A sink that a thread waits on: results in the order in which they arrived, in memory that is kept.
#[derive(Default)]
pub struct CompletionQueue {
    done: Mutex<Done>,
    arrived: Condvar,
}

#[derive(Default)]
struct Done {
    results: VecDeque<(u64, Result<(), DeviceError>)>,
    /// Threads that sleep on `arrived`: nobody is woken when nobody sleeps.
    waiters: usize,
}

impl CompletionQueue {
    /// An empty queue.
    pub fn new() -> Arc<CompletionQueue> {
        Arc::default()
    }

    /// A completion that reports `token` here.
    pub fn completion(self: &Arc<Self>, token: u64) -> Completion {
        Completion::new(self.clone(), token)
    }

    /// The oldest result that has arrived, if any.
    pub fn try_next(&self) -> Option<(u64, Result<(), DeviceError>)> {
        self.lock().results.pop_front()
    }

    /// Waits for the next result. `help` is called while there is none (see [`crate::Device::help`]); when it has
    /// nothing to do either, the thread sleeps.
    pub fn wait(&self, mut help: impl FnMut() -> bool) -> (u64, Result<(), DeviceError>) {
        loop {
            if let Some(result) = self.try_next() {
                return result;
            }
            if help() {
                continue;
            }
            let mut done = self.lock();
            done.waiters += 1;
            while done.results.is_empty() {
                done = self.arrived.wait(done).unwrap_or_else(PoisonError::into_inner);
            }
            done.waiters -= 1;
        }
    }

    fn lock(&self) -> MutexGuard<'_, Done> {
        self.done.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl CompletionSink for CompletionQueue {
    fn complete(&self, token: u64, result: Result<(), DeviceError>) {
        let mut done = self.lock();
        done.results.push_back((token, result));
        let awaited = done.waiters > 0;
        drop(done);
        if awaited {
            self.arrived.notify_one();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Buffer;

    #[test]
    fn finishing_releases_the_leases_first_and_reports_once() {
        struct Probe(Buffer, Mutex<Vec<bool>>);
        impl CompletionSink for Probe {
            fn complete(&self, _: u64, _: Result<(), DeviceError>) {
                self.1.lock().unwrap().push(self.0.write().is_ok());
            }
        }
        let buffer = Buffer::host(4).unwrap();
        let probe = Arc::new(Probe(buffer.clone(), Mutex::default()));
        Submission::new(buffer.write().unwrap(), Completion::new(probe.clone(), 0)).finish(Ok(()));
        drop(Submission::new(buffer.write().unwrap(), Completion::new(probe.clone(), 1)));
        assert_eq!(*probe.1.lock().unwrap(), [true, true]);
    }

    #[test]
    fn a_dropped_job_is_reported() {
        let queue = CompletionQueue::new();
        drop(Submission::new((), queue.completion(7)));
        assert_eq!(queue.wait(|| false), (7, Err(DeviceError::Dropped)));
        assert_eq!(queue.try_next(), None);
    }

    #[test]
    fn results_come_in_the_order_of_their_arrival() {
        let queue = CompletionQueue::new();
        (0..3).for_each(|token| Submission::new((), queue.completion(token)).finish(Ok(())));
        let tokens = std::iter::from_fn(|| queue.try_next()).map(|(token, _)| token);
        assert_eq!(tokens.collect::<Vec<_>>(), [0, 1, 2]);
    }

    #[test]
    fn a_result_from_another_thread_wakes_the_waiter() {
        let queue = CompletionQueue::new();
        let submission = Submission::new((), queue.completion(3));
        std::thread::spawn(move || submission.finish(Ok(())));
        assert_eq!(queue.wait(|| false), (3, Ok(())));
    }
}
