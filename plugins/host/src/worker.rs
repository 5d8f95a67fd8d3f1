//! One thread per unit makes all calls of it, and a second one, the watchdog, looks at the clock.
//!
//! A call that takes too long cannot be ended from outside. So it is given up: the unit is lost, everybody who waits is
//! told, and what the call uses (weights, copies of inputs and outputs) stays the worker's until the call returns. A
//! call that never returns costs a thread, and never memory that somebody else owns.
//!
//! The watchdog counts in small ticks that it lives through itself, so a process that was stopped for an hour, or a
//! machine that slept, is not taken for a driver that hangs.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::{self, ThreadId};
use std::time::{Duration, Instant};

use neuropil_device::DeviceError;

use crate::border::{Canceller, Library, WeightHandle};
use crate::options::Options;
use crate::session::Session;
use crate::slot::{Abandon, Nobody, Reply};

/// How long the last user of a unit waits for it to be closed.
const LAST_WAIT: Duration = Duration::from_secs(2);

type Job = Box<dyn FnOnce(&mut Session) + Send>;

enum Work {
    Job(Job),
    Free(WeightHandle),
}

struct Task {
    work: Work,
    waits: Arc<dyn Abandon>,
    limit: Duration,
}

/// The call under way.
struct Current {
    waits: Arc<dyn Abandon>,
    limit: Duration,
    spent: Duration,
    number: u64,
}

#[derive(Default)]
struct Queue {
    tasks: VecDeque<Task>,
    current: Option<Current>,
    /// Calls so far.
    calls: u64,
    /// Weights that the plugin has.
    weights: usize,
    /// Weights that somebody holds.
    held: usize,
    /// The unit's thread.
    thread: Option<ThreadId>,
    canceller: Option<Canceller>,
    /// The watchdog sleeps until a call begins.
    unwatched: bool,
    /// The device was dropped.
    closed: bool,
    /// The worker is gone.
    ended: bool,
}

/// What the worker, the watchdog and the device share.
pub(crate) struct Shared {
    /// The unit in errors.
    pub name: String,
    queue: Mutex<Queue>,
    arrived: Condvar,
    began: Condvar,
    finished: Condvar,
    lost: OnceLock<DeviceError>,
}

/// The way to a unit's thread. Dropping it closes the unit, as soon as its last weight is gone.
pub(crate) struct Worker {
    shared: Arc<Shared>,
    deadline: Duration,
    long_deadline: Duration,
}

impl Worker {
    /// Opens a unit on a thread of its own; `opened` looks at it there.
    pub fn start<T: Send + 'static>(
        library: &Arc<Library>,
        index: usize,
        options: &Arc<Options>,
        opened: impl FnOnce(&mut Session) -> T + Send + 'static,
    ) -> Result<(Worker, T), DeviceError> {
        let shared = Arc::new(Shared {
            name: format!("{} {index}", library.name),
            queue: Mutex::default(),
            arrived: Condvar::new(),
            began: Condvar::new(),
            finished: Condvar::new(),
            lost: OnceLock::new(),
        });
        let worker = Worker {
            shared: shared.clone(),
            deadline: options.deadline,
            long_deadline: options.long_deadline(),
        };
        let (reply, answer) = Reply::new();
        let no_thread = |error: std::io::Error| DeviceError::OutOfMemory {
            device: format!("host (no thread for {}: {error})", shared.name),
            bytes: 0,
        };
        let watched = shared.clone();
        let watchdog = thread::Builder::new().name("npu watchdog".into());
        watchdog.spawn(move || watched.watch()).map_err(no_thread)?;
        let (library, options, working) = (library.clone(), options.clone(), shared.clone());
        let spawned = thread::Builder::new()
            .name("npu worker".into())
            .spawn(move || working.work(&library, index, &options, &reply, opened));
        if let Err(error) = spawned {
            shared.end();
            return Err(no_thread(error));
        }
        match answer.recv() {
            Ok(answer) => answer.map(|value| (worker, value)),
            Err(_) => Err(worker.lost().unwrap_or(DeviceError::Dropped)),
        }
    }

    /// Why the unit is lost, if it is.
    pub fn lost(&self) -> Option<DeviceError> {
        self.shared.lost().cloned()
    }

    /// Hands a job over; `waits` is told when nothing comes of it.
    pub fn submit(&self, waits: Arc<dyn Abandon>, job: impl FnOnce(&mut Session) + Send + 'static) {
        self.shared.push(Task { work: Work::Job(Box::new(job)), waits, limit: self.deadline });
    }

    /// Runs `call` on the unit's thread and waits for it.
    pub fn call<T: Send + 'static>(
        &self,
        call: impl FnOnce(&mut Session) -> Result<T, DeviceError> + Send + 'static,
    ) -> Result<T, DeviceError> {
        let (reply, answer) = Reply::new();
        let waits = reply.clone();
        let job: Job = Box::new(move |session| reply.send(call(session)));
        self.shared.push(Task { work: Work::Job(job), waits, limit: self.long_deadline });
        answer.recv().unwrap_or_else(|_| Err(self.lost().unwrap_or(DeviceError::Dropped)))
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.shared.lock().closed = true;
        self.shared.arrived.notify_one();
        self.shared.settle();
    }
}

/// A weight of the plugin, which goes back when it is dropped.
pub(crate) struct Held {
    handle: Option<WeightHandle>,
    shared: Arc<Shared>,
}

impl Held {
    pub fn handle(&self) -> Option<&WeightHandle> {
        self.handle.as_ref()
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        if let Some(handle) = self.handle.take() {
            let limit = Duration::from_secs(60);
            self.shared.push(Task { work: Work::Free(handle), waits: Arc::new(Nobody), limit });
            self.shared.lock().held -= 1;
            self.shared.settle();
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Why the unit is lost, if it is.
    pub fn lost(&self) -> Option<&DeviceError> {
        self.lost.get()
    }

    /// Keeps a weight until its last user is gone.
    pub fn hold(self: &Arc<Self>, handle: WeightHandle) -> Held {
        {
            let mut queue = self.lock();
            queue.weights += 1;
            queue.held += 1;
        }
        Held { handle: Some(handle), shared: self.clone() }
    }

    /// Waits, but not for long, until the unit is closed, if nobody has anything of it any more: a process that ends while a
    /// driver's thread is in the driver may crash in what the driver's library does at the end.
    fn settle(&self) {
        let begin = Instant::now();
        let mut queue = self.lock();
        while queue.closed && queue.held == 0 && !queue.ended && self.lost.get().is_none() {
            let left = LAST_WAIT.saturating_sub(begin.elapsed());
            // The unit's own thread is the one that would be waited for.
            if left.is_zero() || queue.thread == Some(thread::current().id()) {
                return;
            }
            queue = self.finished.wait_timeout(queue, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Declares the unit lost and tells everybody who waits. Returns the error of every later call.
    pub fn lose(&self, reason: &str) -> DeviceError {
        let lost = || DeviceError::Lost { device: self.name.clone(), reason: reason.into() };
        let (error, current, jobs) = {
            let mut queue = self.lock();
            let error = self.lost.get_or_init(lost).clone();
            let current = queue.current.as_ref().map(|current| current.waits.clone());
            let (free, jobs) = queue.tasks.drain(..).partition(|task| matches!(task.work, Work::Free(_)));
            queue.tasks = free;
            let jobs: VecDeque<Task> = jobs;
            (error, current, jobs)
        };
        // Outside of the lock: a job that goes may hold the last of a weight, which then comes into the queue.
        let waiting = current.into_iter().chain(jobs.into_iter().map(|task| task.waits));
        waiting.for_each(|waits| waits.abandon(&error));
        error
    }

    fn push(&self, task: Task) {
        let mut queue = self.lock();
        let refused = match (&task.work, self.lost.get()) {
            (Work::Job(_), Some(lost)) => Some(lost.clone()),
            (Work::Job(_), None) if queue.ended => Some(DeviceError::Dropped),
            _ => None,
        };
        if let Some(error) = refused {
            drop(queue);
            return task.waits.abandon(&error);
        }
        queue.tasks.push_back(task);
        drop(queue);
        self.arrived.notify_one();
    }

    /// The watch over a call begins.
    fn begin(&self, queue: &mut Queue, waits: Arc<dyn Abandon>, limit: Duration) {
        queue.calls += 1;
        queue.current = Some(Current { waits, limit, spent: Duration::ZERO, number: queue.calls });
        if queue.unwatched {
            self.began.notify_one();
        }
    }

    /// The next task, watched from now on; `None` when no more will come.
    fn next(&self) -> Option<Work> {
        // Dropped after the lock, as in `lose`.
        let _done;
        let mut queue = self.lock();
        _done = queue.current.take();
        loop {
            if let Some(task) = queue.tasks.pop_front() {
                self.begin(&mut queue, task.waits, task.limit);
                return Some(task.work);
            }
            if queue.closed && queue.weights == 0 {
                return None;
            }
            queue = self.arrived.wait(queue).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// The worker is gone: the watchdog may go, and nobody must wait.
    fn end(&self) {
        let waiting: Vec<Task> = {
            let mut queue = self.lock();
            queue.ended = true;
            queue.current = None;
            queue.tasks.drain(..).collect()
        };
        waiting.iter().for_each(|task| task.waits.abandon(&DeviceError::Dropped));
        self.began.notify_one();
        self.finished.notify_all();
    }

    fn work<T>(
        self: &Arc<Self>,
        library: &Arc<Library>,
        index: usize,
        options: &Arc<Options>,
        reply: &Arc<Reply<T>>,
        opened: impl FnOnce(&mut Session) -> T,
    ) where
        T: Send + 'static,
    {
        /// Ends the unit, even when this thread panics.
        struct Ending<'a>(&'a Shared);
        impl Drop for Ending<'_> {
            fn drop(&mut self) {
                if thread::panicking() {
                    self.0.lose("the host made a mistake with it");
                }
                self.0.end();
            }
        }
        let _ending = Ending(self);
        self.lock().thread = Some(thread::current().id());
        if !library.begin_opening(options.long_deadline()) {
            return reply.send(Err(DeviceError::Plugin {
                plugin: library.name.clone(),
                code: 0,
                text: "an earlier call of probe or open has not returned".into(),
            }));
        }
        self.begin(&mut self.lock(), reply.clone(), options.long_deadline());
        let session = Session::open(library, index, options, self);
        library.end_opening();
        let mut session = match session {
            Ok(session) => session,
            Err(error) => return reply.send(Err(error)),
        };
        self.lock().canceller = Some(session.canceller());
        let value = opened(&mut session);
        reply.send(self.lost.get().map_or(Ok(value), |lost| Err(lost.clone())));
        while let Some(work) = self.next() {
            match work {
                Work::Job(job) => job(&mut session),
                Work::Free(handle) => {
                    session.free(handle);
                    self.lock().weights -= 1;
                }
            }
        }
    }

    /// Counts the time of each call, and gives up what takes too long.
    fn watch(&self) {
        let mut queue = self.lock();
        while !queue.ended {
            let Some(current) = &queue.current else {
                queue.unwatched = true;
                queue = self.began.wait(queue).unwrap_or_else(PoisonError::into_inner);
                queue.unwatched = false;
                continue;
            };
            let (number, limit) = (current.number, current.limit);
            let tick = (limit / 16).clamp(Duration::from_millis(1), Duration::from_secs(1));
            let before = Instant::now();
            queue = self.began.wait_timeout(queue, tick).unwrap_or_else(PoisonError::into_inner).0;
            let lived = before.elapsed().min(tick * 2);
            let Some(current) = queue.current.as_mut().filter(|current| current.number == number) else {
                continue;
            };
            let before = current.spent;
            current.spent += lived;
            if before <= limit && current.spent > limit {
                let canceller = queue.canceller.clone();
                drop(queue);
                self.lose(&format!("a call did not return within {limit:?}"));
                if let Some(canceller) = canceller {
                    canceller.cancel();
                }
                queue = self.lock();
            }
        }
    }
}
