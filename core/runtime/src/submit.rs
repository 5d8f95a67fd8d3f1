//! Submits jobs and waits for them: what everything that uses a unit does.

use std::sync::Arc;

use neuropil_device::{
    ClusterJob, CompletionQueue, Device, DeviceError, MatmulJob, PreparedWeight, Submission,
};

/// A weight and the device that holds it.
pub struct Placed {
    /// The device.
    pub device: Arc<dyn Device>,
    /// The weight, prepared by it.
    pub weight: PreparedWeight,
}

/// The caller's end of the jobs: one queue of completions, kept from job to job.
#[derive(Default)]
pub struct Jobs {
    queue: Arc<CompletionQueue>,
    clusters: Vec<Submission<ClusterJob>>,
}

impl Jobs {
    /// Submits a matmul and waits for it, lending the device a hand.
    ///
    /// # Errors
    /// The device's.
    pub fn matmul(&mut self, device: &dyn Device, job: MatmulJob) -> Result<(), DeviceError> {
        device.submit_matmul(Submission::new(job, self.queue.completion(0)));
        self.wait(device)
    }

    /// Submits one cluster and waits for it.
    ///
    /// # Errors
    /// The device's.
    pub fn cluster(&mut self, device: &dyn Device, job: ClusterJob) -> Result<(), DeviceError> {
        self.clusters.push(Submission::new(job, self.queue.completion(0)));
        device.submit_clusters(&mut self.clusters);
        // A device that left the job behind must not hang us: dropping it reports it.
        self.clusters.clear();
        self.wait(device)
    }

    fn wait(&self, device: &dyn Device) -> Result<(), DeviceError> {
        self.queue.wait(|| device.help()).1
    }
}
