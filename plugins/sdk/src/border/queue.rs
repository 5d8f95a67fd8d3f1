//! The thread of a device that takes jobs by submission: one job after the other, in the order of their arrival.

use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::thread;

use neuropil_plugin_abi::{AbiStruct, NpClusterJob, NpCompletion, NpMatmulJob, NpStatus};

use super::entry::{report_of, status_of, within};
use super::state::State;
use super::work;
use crate::{Error, PluginDevice, Report};

/// A job of the host.
#[derive(Clone, Copy)]
pub(crate) enum Task {
    Matmul(*const NpMatmulJob),
    Cluster(*const NpClusterJob),
}

struct Submitted(Task, NpCompletion);

// SAFETY: the host keeps the job, and what it names, alive until the completion is told, and takes it from any thread.
unsafe impl Send for Submitted {}

/// The way to the thread. It ends, after the jobs that it has, when this is dropped.
pub(crate) struct Queue<D: PluginDevice> {
    jobs: Sender<Submitted>,
    _device: std::marker::PhantomData<fn(D)>,
}

impl<D: PluginDevice> Queue<D> {
    /// Starts the thread.
    pub fn start(state: &Arc<State<D>>) -> Result<Queue<D>, Error> {
        let (jobs, arrived) = channel::<Submitted>();
        let state = state.clone();
        let thread = thread::Builder::new().name("neuropil plugin".into()).spawn(move || {
            for Submitted(task, completion) in arrived {
                // SAFETY: the host keeps the job alive until the completion is told, which is below.
                let result = within(|| unsafe {
                    match task {
                        Task::Matmul(job) => work::matmul(&state, job),
                        Task::Cluster(job) => work::cluster(&state, job),
                    }
                });
                tell(&completion, result);
            }
        });
        thread.map_err(|error| Error::out_of_memory(format!("the system gives no thread: {error}")))?;
        Ok(Queue { jobs, _device: std::marker::PhantomData })
    }

    /// Hands a job over.
    ///
    /// # Safety
    /// The job and what it names live until the completion is told.
    pub unsafe fn push(&self, task: Task, completion: NpCompletion) -> Result<(), Error> {
        self.jobs
            .send(Submitted(task, completion))
            .map_err(|_| Error::internal("the thread of the device is gone"))
    }
}

/// Tells the host that a job has ended.
fn tell(completion: &NpCompletion, result: Result<Report, Error>) {
    let Some(done) = completion.done else { return };
    let mut text = result.as_ref().err().map(|error| error.text.clone()).unwrap_or_default();
    let mut status: NpStatus = status_of(result.as_ref().err());
    (status.text, status.text_bytes) = (text.as_mut_ptr().cast(), text.len() as u64);
    status.text_capacity = status.text_bytes;
    let report = report_of(&result.unwrap_or_default());
    debug_assert_eq!(report.size(), 16);
    // SAFETY: the host's function and context; status and report live until it returns.
    unsafe { done(completion.context, &status, &report) };
}
