//! Submits jobs and waits for them: what everything that uses a unit does.

use std::sync::Arc;

use neuropil_device::{
    ClusterJob, ClusterWeights, CompletionQueue, Device, DeviceError, MatmulJob, PreparedWeight, Submission,
    WeightShape,
};

use crate::pipeline::{Lane, Span, Trace};

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
    /// Of the job that runs beside the others.
    beside: Arc<CompletionQueue>,
    clusters: Vec<Submission<ClusterJob>>,
    /// Where jobs are recorded, from submission to completion.
    pub(crate) trace: Option<JobTrace>,
}

/// A trace, and the units in the order of their lanes.
#[derive(Clone)]
pub(crate) struct JobTrace {
    pub trace: Arc<Trace>,
    pub devices: Arc<[Arc<dyn Device>]>,
}

impl Jobs {
    /// Submits a matmul and waits for it, lending the device a hand.
    ///
    /// # Errors
    /// The device's.
    pub fn matmul(&mut self, device: &dyn Device, job: MatmulJob) -> Result<(), DeviceError> {
        let _span = span(&self.trace, device, "matmul", job.tokens);
        device.submit_matmul(Submission::new(job, self.queue.completion(0)));
        self.wait(device)
    }

    /// Submits one cluster and waits for it.
    ///
    /// # Errors
    /// The device's.
    pub fn cluster(&mut self, device: &dyn Device, job: ClusterJob) -> Result<(), DeviceError> {
        let _span = span(&self.trace, device, job.stage.name(), neurons(&job));
        self.clusters.push(Submission::new(job, self.queue.completion(0)));
        device.submit_clusters(&mut self.clusters);
        // A device that left the job behind must not hang us: dropping it reports it.
        self.clusters.clear();
        self.wait(device)
    }

    /// Submits one cluster that runs while others are submitted and waited for.
    pub(crate) fn begin(&mut self, device: &dyn Device, job: ClusterJob) {
        self.clusters.push(Submission::new(job, self.beside.completion(0)));
        device.submit_clusters(&mut self.clusters);
        self.clusters.clear();
    }

    /// Waits for what [`Jobs::begin`] submitted.
    ///
    /// # Errors
    /// The device's.
    pub(crate) fn end(&mut self, device: &dyn Device) -> Result<(), DeviceError> {
        let _span = span(&self.trace, device, "hot", 1);
        self.beside.wait(|| device.help()).1
    }

    fn wait(&self, device: &dyn Device) -> Result<(), DeviceError> {
        self.queue.wait(|| device.help()).1
    }
}

/// A span in the lane of the device.
fn span<'a>(
    jobs: &'a Option<JobTrace>,
    device: &dyn Device,
    name: &'static str,
    count: usize,
) -> Option<Span<'a>> {
    let JobTrace { trace, devices } = jobs.as_ref()?;
    let index = devices.iter().position(|one| std::ptr::addr_eq(Arc::as_ptr(one), device))?;
    Some(trace.span(Lane::Device(u16::try_from(index).ok()?), name, count))
}

/// How many neurons a job is about.
fn neurons(job: &ClusterJob) -> usize {
    match &job.weights {
        ClusterWeights::Bundles { slots, .. } => slots.len(),
        ClusterWeights::Block(weight) => match weight.shape() {
            WeightShape::Neurons { neurons, .. } => neurons,
            WeightShape::Matrix { .. } => 0,
        },
    }
}
