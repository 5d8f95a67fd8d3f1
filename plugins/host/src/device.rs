//! A unit of a plugin as an ordinary device: checks jobs, and hands them to the unit's thread.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use neuropil_device::{
    ClusterJob, ClusterWeights, Device, DeviceError, DeviceId, DeviceInfo, MatmulJob, OpShape,
    PreparedWeight, Submission, Support, WeightShape, WeightSource, WriteLease,
};

use crate::backend::device_info;
use crate::border::Library;
use crate::plans::PlanFolder;
use crate::session::{Inputs, Session};
use crate::slot::Slot;
use crate::weight::{Part, Weight};
use crate::worker::Worker;
use crate::{Description, Options};

/// Answers to [`Device::supports`] that are kept.
const MOST_ANSWERS: usize = 4096;

/// One unit of a plugin. See [`crate`] for what it does with a job.
pub struct PluginDevice {
    id: DeviceId,
    info: DeviceInfo,
    pub(crate) worker: Worker,
    pub(crate) options: Arc<Options>,
    /// Where compiled weights are kept, if they are.
    pub(crate) plans: Option<PlanFolder>,
    description: Description,
    answers: Mutex<HashMap<OpShape, Support>>,
}

impl PluginDevice {
    pub(crate) fn open(
        library: &Arc<Library>,
        index: usize,
        options: &Arc<Options>,
    ) -> Result<PluginDevice, DeviceError> {
        let look = |session: &mut Session| (session.self_test(), session.info.clone(), session.has_plans());
        let (worker, (findings, unit, has_plans)) = Worker::start(library, index, options, look)?;
        let mut description = Description {
            plugin: library.name.clone(),
            version: library.version.clone(),
            abi: library.abi,
            path: library.path.clone(),
            name: unit.name.clone(),
            vendor: unit.vendor.clone(),
            driver: unit.driver.clone(),
            memory_bytes: unit.memory_bytes,
            token_buckets: unit.token_buckets.clone(),
            supports: Vec::new(),
            disabled: Vec::new(),
        };
        description.add(findings);
        let plans = PlanFolder::new(library, &unit, has_plans, options);
        let (id, info, options) = (DeviceId::new(), device_info(&unit), options.clone());
        Ok(PluginDevice { id, info, worker, options, plans, description, answers: Mutex::default() })
    }

    /// What the unit is and can do, as found when it was opened.
    pub fn describe(&self) -> &Description {
        &self.description
    }

    /// Why the unit is lost, if it is.
    pub fn lost(&self) -> Option<DeviceError> {
        self.worker.lost()
    }

    fn weight(&self, weight: &PreparedWeight) -> Result<Arc<Weight>, DeviceError> {
        weight.downcast::<Arc<Weight>>(self.id, &self.info.name).cloned()
    }

    fn check_matmul(&self, job: &MatmulJob) -> Result<Vec<Arc<Weight>>, DeviceError> {
        let mut weights = Vec::new();
        let mut width = None;
        for product in job.products() {
            let WeightShape::Matrix { rows, cols } = product.weight.shape() else {
                return Err(self.unsupported("a matmul with a block of neurons"));
            };
            let needed = *width.get_or_insert(cols);
            if needed != cols {
                return Err(DeviceError::Mismatch { what: "columns of a weight", needed, found: cols });
            }
            check_len("values of y", job.tokens, rows, product.y.slice::<f32>().len())?;
            weights.push(self.weight(&product.weight)?);
        }
        check_len("values of x", job.tokens, width.unwrap_or(0), job.x.slice::<f32>().len())?;
        Ok(weights)
    }

    fn check_cluster(&self, job: &ClusterJob) -> Result<(Arc<Weight>, usize, usize), DeviceError> {
        let ClusterWeights::Block(weight) = &job.weights else {
            return Err(self.unsupported("single neurons: it takes blocks that were prepared"));
        };
        let WeightShape::Neurons { neurons, width } = weight.shape() else {
            return Err(self.unsupported("a cluster with a matrix"));
        };
        let len = |lease: &Option<WriteLease>| lease.as_ref().map_or(0, |lease| lease.slice::<f32>().len());
        if job.stage.reads_x() {
            check_len("values of x", job.tokens, width, job.x.slice::<f32>().len())?;
        }
        if job.stage.has_hidden() {
            check_len("values of hidden", job.tokens, neurons, len(&job.hidden))?;
        }
        if job.stage.has_down() {
            check_len("values of y", job.tokens, width, len(&job.y))?;
        }
        Ok((self.weight(weight)?, neurons, width))
    }

    fn submit_cluster(&self, submission: Submission<ClusterJob>) {
        let checked = self.check_cluster(submission.job());
        let (weight, neurons, width) = match checked {
            Ok(checked) if submission.job().tokens > 0 => checked,
            other => return submission.finish(other.map(drop)),
        };
        let slot = Slot::new(submission);
        self.worker.submit(slot.clone(), move |session| {
            let inputs = slot.with(|job| -> Result<_, DeviceError> {
                let hidden = job.hidden.as_ref().filter(|_| job.stage.reads_hidden());
                let hidden = copy(hidden.map_or(&[][..], |h| h.slice()), job.tokens * neurons);
                let x = if job.stage.reads_x() { job.x.slice() } else { &[][..] };
                Ok((job.stage, job.activation, job.tokens, copy(x, job.tokens * width)?, hidden?))
            });
            // It was given up before its turn.
            let Some(inputs) = inputs else { return };
            let done = inputs.and_then(|(stage, activation, tokens, x, hidden)| {
                session.feed_forward(&weight, stage, activation, tokens, Inputs { x, hidden })
            });
            slot.finish(|job| {
                let done = done?;
                if let (Some(hidden), true) = (&mut job.hidden, job.stage.writes_hidden()) {
                    write(hidden, &done.hidden, false);
                }
                if let (Some(y), true) = (&mut job.y, job.stage.has_down()) {
                    write(y, &done.y, job.accumulate);
                }
                Ok(())
            });
        });
    }
}

impl Device for PluginDevice {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn supports(&self, op: &OpShape) -> Support {
        if let Some(lost) = self.worker.lost() {
            return Support::No(lost.to_string());
        }
        // The answer does not depend on the tokens: they are fitted to the buckets.
        let mut key = *op;
        if let OpShape::Matmul { tokens, .. } | OpShape::Cluster { tokens, .. } = &mut key {
            *tokens = 0;
        }
        let answers = || self.answers.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(answer) = answers().get(&key) {
            return answer.clone();
        }
        match self.worker.call(move |session| Ok(session.supports(&key))) {
            Ok(answer) => {
                let mut answers = answers();
                if answers.len() < MOST_ANSWERS {
                    answers.insert(key, answer.clone());
                }
                answer
            }
            Err(error) => Support::No(error.to_string()),
        }
    }

    fn prepare(
        &self,
        weight: WeightSource<'_>,
        recycle: Option<PreparedWeight>,
    ) -> Result<PreparedWeight, DeviceError> {
        let shape = weight.shape()?;
        // Its memory goes back before the new one is asked for.
        drop(recycle);
        let (weight, bytes) = self.make(&weight)?;
        Ok(PreparedWeight::new(self.id, shape, bytes, Arc::new(Arc::new(weight))))
    }

    fn submit_matmul(&self, submission: Submission<MatmulJob>) {
        let weights = match self.check_matmul(submission.job()) {
            Ok(weights) if submission.job().tokens > 0 && !weights.is_empty() => weights,
            other => return submission.finish(other.map(drop)),
        };
        let slot = Slot::new(submission);
        self.worker.submit(slot.clone(), move |session| {
            let input = slot.with(|job| -> Result<_, DeviceError> {
                let cols = job.products().next().map_or(0, |product| match product.weight.shape() {
                    WeightShape::Matrix { cols, .. } => cols,
                    WeightShape::Neurons { .. } => 0,
                });
                Ok((job.tokens, copy(job.x.slice(), job.tokens * cols)?))
            });
            // It was given up before its turn.
            let Some(input) = input else { return };
            let parts = weights.iter().filter_map(|weight| match &**weight {
                Weight::Matrix(part) => Some(part),
                _ => None,
            });
            let parts: Vec<&Part> = parts.collect();
            let done = input.and_then(|(tokens, x)| session.multiply(&parts, tokens, x));
            slot.finish(|job| {
                let (_, products) = job.parts_mut();
                for (product, y) in products.zip(done?) {
                    write(&mut product.y, &y, product.accumulate);
                }
                Ok(())
            });
        });
    }

    fn submit_clusters(&self, batch: &mut Vec<Submission<ClusterJob>>) {
        batch.drain(..).for_each(|submission| self.submit_cluster(submission));
    }
}

fn check_len(what: &'static str, tokens: usize, width: usize, found: usize) -> Result<(), DeviceError> {
    let needed = tokens.saturating_mul(width);
    if needed > found { Err(DeviceError::Mismatch { what, needed, found }) } else { Ok(()) }
}

/// The first `len` values of a buffer, which has as many or none.
fn copy(values: &[f32], len: usize) -> Result<Vec<f32>, DeviceError> {
    let values = &values[..len.min(values.len())];
    let mut out = Vec::new();
    let bytes = size_of_val(values);
    let refused = out.try_reserve_exact(values.len());
    refused.map_err(|_| DeviceError::OutOfMemory { device: "host".into(), bytes })?;
    out.extend_from_slice(values);
    Ok(out)
}

/// Writes values to the start of a buffer, or adds them to what is there.
fn write(to: &mut WriteLease, values: &[f32], accumulate: bool) {
    let places = to.slice_mut::<f32>().iter_mut().zip(values);
    match accumulate {
        false => places.for_each(|(place, value)| *place = *value),
        true => places.for_each(|(place, value)| *place += value),
    }
}
