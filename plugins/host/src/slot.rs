//! Who waits for a task: a submission, or a thread. Each is told once, by the worker or by the watchdog, whoever comes
//! first.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};

use neuropil_device::{DeviceError, Submission};

/// Somebody who waits, and who must not wait for ever.
pub(crate) trait Abandon: Send + Sync {
    /// Tells them that nothing comes any more.
    fn abandon(&self, error: &DeviceError);
}

/// A submission on its way through the worker. Its leases are free when it is told.
pub(crate) struct Slot<J>(Mutex<Option<Submission<J>>>);

impl<J> Slot<J> {
    pub fn new(submission: Submission<J>) -> Arc<Slot<J>> {
        Arc::new(Slot(Mutex::new(Some(submission))))
    }

    /// Looks at the job; `None` when it was abandoned.
    pub fn with<T>(&self, look: impl FnOnce(&J) -> T) -> Option<T> {
        let submission = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        submission.as_ref().map(|submission| look(submission.job()))
    }

    /// Writes the results and tells, unless the job was abandoned.
    pub fn finish(&self, write: impl FnOnce(&mut J) -> Result<(), DeviceError>) {
        let submission = self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(mut submission) = submission {
            let result = write(submission.job_mut());
            submission.finish(result);
        }
    }
}

impl<J: Send> Abandon for Slot<J> {
    fn abandon(&self, error: &DeviceError) {
        self.finish(|_| Err(error.clone()));
    }
}

type Answer<T> = Result<T, DeviceError>;

/// The waiting side of a call.
pub(crate) struct Reply<T>(Mutex<Option<Sender<Answer<T>>>>);

impl<T> Reply<T> {
    pub fn new() -> (Arc<Reply<T>>, Receiver<Answer<T>>) {
        let (sender, receiver) = channel();
        (Arc::new(Reply(Mutex::new(Some(sender)))), receiver)
    }

    /// Answers, unless the call was abandoned.
    pub fn send(&self, answer: Answer<T>) {
        if let Some(sender) = self.0.lock().unwrap_or_else(PoisonError::into_inner).take() {
            // Who asked may be gone.
            let _ = sender.send(answer);
        }
    }
}

impl<T: Send> Abandon for Reply<T> {
    fn abandon(&self, error: &DeviceError) {
        self.send(Err(error.clone()));
    }
}

/// Nobody waits.
pub(crate) struct Nobody;

impl Abandon for Nobody {
    fn abandon(&self, _: &DeviceError) {}
}
