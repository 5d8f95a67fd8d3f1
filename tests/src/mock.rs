//! A device that misbehaves on demand, around one that works.
//!
//! Submissions are counted from 0, a cluster as one; which of them go wrong, and how, is set before use. So a test
//! names the very call that fails and sweeps it over a whole run.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use neuropil_device::{
    ClusterJob, Device, DeviceError, DeviceInfo, MatmulJob, OpShape, PreparedWeight, Submission, Support,
    WeightSource,
};

/// What goes wrong in a submission.
#[derive(Clone, Debug, PartialEq)]
pub enum Fault {
    /// It finishes with this error and leaves its output alone.
    Error(DeviceError),
    /// It finishes well, with this value all over its output: NaN, or zeros that no check of finiteness sees.
    Fill(f32),
    /// It is dropped, as by a driver that forgets it.
    Drop,
}

/// See the module.
pub struct FaultyDevice {
    inner: Arc<dyn Device>,
    faults: Vec<(Range<u64>, Fault)>,
    delay: Duration,
    threaded: bool,
    refuses: fn(&OpShape) -> bool,
    room: u64,
    submissions: AtomicU64,
    weights: AtomicU64,
}

impl FaultyDevice {
    /// A wrapper that changes nothing yet.
    pub fn around(inner: Arc<dyn Device>) -> FaultyDevice {
        FaultyDevice {
            inner,
            faults: Vec::new(),
            delay: Duration::ZERO,
            threaded: false,
            refuses: |_| false,
            room: u64::MAX,
            submissions: AtomicU64::new(0),
            weights: AtomicU64::new(0),
        }
    }

    /// Submission `call` goes wrong.
    pub fn at(self, call: u64, fault: Fault) -> Self {
        self.during(call..call + 1, fault)
    }

    /// Submissions `call` and all later ones go wrong: a lost device.
    pub fn from(self, call: u64, fault: Fault) -> Self {
        self.during(call..u64::MAX, fault)
    }

    /// Some submissions go wrong; of faults that overlap the first one set counts.
    pub fn during(mut self, calls: Range<u64>, fault: Fault) -> Self {
        self.faults.push((calls, fault));
        self
    }

    /// Every submission takes this much longer.
    pub fn delayed(mut self, delay: Duration) -> Self {
        self.delay = delay;
        self
    }

    /// Every submission is worked on and finished by a thread of its own, after `submit` has returned.
    pub fn threaded(mut self) -> Self {
        self.threaded = true;
        self
    }

    /// `supports` says no to these operations.
    pub fn refusing(mut self, refuses: fn(&OpShape) -> bool) -> Self {
        self.refuses = refuses;
        self
    }

    /// Memory for this many weights; preparing another is [`DeviceError::OutOfMemory`].
    pub fn with_room_for(mut self, weights: u64) -> Self {
        self.room = weights;
        self
    }

    /// Submissions so far.
    pub fn submissions(&self) -> u64 {
        self.submissions.load(Ordering::SeqCst)
    }

    fn submit<J: Output>(&self, mut submission: Submission<J>, run: fn(&dyn Device, Submission<J>)) {
        let call = self.submissions.fetch_add(1, Ordering::SeqCst);
        let fault = self.faults.iter().find(|(calls, _)| calls.contains(&call)).map(|(_, f)| f.clone());
        let (inner, delay) = (self.inner.clone(), self.delay);
        let work = move || {
            std::thread::sleep(delay);
            match fault {
                None => run(&*inner, submission),
                Some(Fault::Error(error)) => submission.finish(Err(error)),
                Some(Fault::Drop) => drop(submission),
                Some(Fault::Fill(value)) => {
                    submission.job_mut().fill(value);
                    submission.finish(Ok(()));
                }
            }
        };
        if self.threaded {
            std::thread::spawn(work);
        } else {
            work();
        }
    }
}

/// A job whose output can be spoiled.
trait Output: Send + 'static {
    fn fill(&mut self, value: f32);
}

impl Output for MatmulJob {
    fn fill(&mut self, value: f32) {
        self.parts_mut().1.for_each(|product| product.y.slice_mut::<f32>().fill(value));
    }
}

impl Output for ClusterJob {
    fn fill(&mut self, value: f32) {
        let output = self.y.as_mut().or(self.hidden.as_mut());
        output.expect("a cluster job has an output").slice_mut::<f32>().fill(value);
    }
}

impl Device for FaultyDevice {
    fn info(&self) -> &DeviceInfo {
        self.inner.info()
    }

    fn supports(&self, op: &OpShape) -> Support {
        if (self.refuses)(op) { Support::No("told to refuse".into()) } else { self.inner.supports(op) }
    }

    fn prepare(
        &self,
        weight: WeightSource<'_>,
        recycle: Option<PreparedWeight>,
    ) -> Result<PreparedWeight, DeviceError> {
        if self.weights.fetch_add(1, Ordering::SeqCst) >= self.room {
            return Err(DeviceError::OutOfMemory { device: self.info().name.clone(), bytes: 1 });
        }
        self.inner.prepare(weight, recycle)
    }

    fn submit_matmul(&self, submission: Submission<MatmulJob>) {
        self.submit(submission, |inner, submission| inner.submit_matmul(submission));
    }

    fn submit_clusters(&self, batch: &mut Vec<Submission<ClusterJob>>) {
        for submission in batch.drain(..) {
            self.submit(submission, |inner, submission| inner.submit_clusters(&mut vec![submission]));
        }
    }

    fn help(&self) -> bool {
        self.inner.help()
    }
}
