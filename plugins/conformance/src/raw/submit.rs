//! Jobs that are submitted, and the tellings of their ends.
//!
//! A plugin may tell late, twice or never. So what it tells to is leaked, and what it writes is too when the end was not
//! told.

use std::ffi::c_void;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use neuropil_plugin_abi::{
    AbiStruct, NpBuffer, NpClusterJob, NpCompletion, NpMatmulJob, NpProduct, NpReport, NpStatus,
};

use super::{Device, Failure, Guarded, Padded, Weight, call, ended};

/// How long the end of a job may take.
const LONG: Duration = Duration::from_secs(30);

/// What was told.
#[derive(Default)]
struct Told {
    results: Mutex<Vec<Result<(), Failure>>>,
    changed: Condvar,
}

impl Told {
    fn results(&self) -> MutexGuard<'_, Vec<Result<(), Failure>>> {
        self.results.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

unsafe extern "C" fn done(context: *mut c_void, status: *const NpStatus, report: *const NpReport) {
    // SAFETY: the context is one of those below, which live long enough; the plugin vouches for its structs.
    let (told, result) = unsafe {
        let result = match (NpStatus::read(status), report.is_null()) {
            (None, _) => Err(Failure::breach("the end of a job is told without a status")),
            (_, true) => Err(Failure::breach("the end of a job is told without a report")),
            (Some(status), false) => {
                let text = match status.text_bytes {
                    bytes if bytes > 1 << 20 || status.text.is_null() => &[][..],
                    bytes => std::slice::from_raw_parts(status.text.cast(), bytes as usize),
                };
                ended(status.code, &status, text)
            }
        };
        (&*context.cast::<Told>(), result)
    };
    told.results().push(result);
    told.changed.notify_all();
}

/// What a job works on, in one place that does not move.
struct Work {
    told: &'static Told,
    completion: Padded<NpCompletion>,
    x: Guarded,
    x_given: Vec<f32>,
    /// Outputs; of a cluster hidden and y.
    outputs: Vec<Guarded>,
    x_buffer: NpBuffer,
    buffers: Vec<NpBuffer>,
    products: Vec<NpProduct>,
    pointers: Vec<*const NpProduct>,
    matmul: NpMatmulJob,
    cluster: NpClusterJob,
}

/// A job that was submitted.
pub struct Submitted(Option<Box<Work>>);

impl Work {
    fn new(x: &[f32], mut outputs: Vec<Guarded>) -> Box<Work> {
        let mut input = Guarded::new(x);
        let buffers = outputs.iter_mut().map(Guarded::buffer).collect();
        let x_buffer = input.buffer();
        let mut work = Box::new(Work {
            told: Box::leak(Box::default()),
            completion: Padded::new(NpCompletion { done: Some(done), ..NpCompletion::new() }),
            x: input,
            x_given: x.to_vec(),
            outputs,
            x_buffer,
            buffers,
            products: Vec::new(),
            pointers: Vec::new(),
            matmul: NpMatmulJob::new(),
            cluster: NpClusterJob::new(),
        });
        work.completion.known.context = (&raw const *work.told).cast_mut().cast();
        work
    }
}

impl Device {
    /// Whether jobs of a kind can be submitted.
    pub fn has_submit(&self, clusters: bool) -> bool {
        if clusters { self.table.submit_cluster.is_some() } else { self.table.submit_matmul.is_some() }
    }

    /// Submits a product of some weights.
    ///
    /// # Errors
    /// What the plugin says at once, or that it told of the end of a job that it did not take.
    pub fn submit_matmul(
        &self,
        weights: &[&Weight<'_>],
        x: &[f32],
        tokens: usize,
        deadline_ns: u64,
    ) -> Result<Submitted, Failure> {
        let submit = self.table.submit_matmul.ok_or_else(|| Failure::unsupported("no jobs are submitted"))?;
        let mut work = Work::new(x, weights.iter().map(|w| Guarded::nan(tokens * w.rows)).collect());
        let products = weights.iter().zip(&work.buffers);
        work.products = products
            .map(|(weight, y)| NpProduct { weight: weight.handle(), y, ..NpProduct::new() })
            .collect();
        work.pointers = work.products.iter().map(|product| &raw const *product).collect();
        work.matmul = NpMatmulJob {
            tokens: tokens as u64,
            deadline_ns,
            x: &work.x_buffer,
            products: work.pointers.as_ptr(),
            product_count: work.pointers.len() as u64,
            ..NpMatmulJob::new()
        };
        let (job, completion) = (&raw const work.matmul, work.completion.pointer());
        // SAFETY: the job and what it names live until its end is told, or for ever.
        let submitted = call(|status| unsafe { submit(self.handle, job, completion, status) });
        Submitted(Some(work)).taken(submitted)
    }

    /// Submits a stage; `job` has all but the weight and the buffers.
    ///
    /// # Errors
    /// As for [`Device::submit_matmul`].
    pub fn submit_cluster(
        &self,
        weight: &Weight<'_>,
        job: &NpClusterJob,
        x: &[f32],
        hidden: &[f32],
        y: usize,
    ) -> Result<Submitted, Failure> {
        let submit =
            self.table.submit_cluster.ok_or_else(|| Failure::unsupported("no jobs are submitted"))?;
        let mut work = Work::new(x, vec![Guarded::new(hidden), Guarded::nan(y)]);
        let pointer = |b: &NpBuffer| if b.bytes == 0 { std::ptr::null() } else { &raw const *b };
        work.cluster = NpClusterJob {
            weight: weight.handle(),
            x: pointer(&work.x_buffer),
            hidden: pointer(&work.buffers[0]),
            y: pointer(&work.buffers[1]),
            ..*job
        };
        let (job, completion) = (&raw const work.cluster, work.completion.pointer());
        // SAFETY: as for a matmul.
        let submitted = call(|status| unsafe { submit(self.handle, job, completion, status) });
        Submitted(Some(work)).taken(submitted)
    }
}

impl Submitted {
    /// What submit answered; after a refusal nothing may be told.
    fn taken(mut self, submitted: Result<(), Failure>) -> Result<Submitted, Failure> {
        if let Err(failure) = submitted {
            std::thread::sleep(Duration::from_millis(5));
            let work = self.0.take();
            if work.as_ref().is_some_and(|work| !work.told.results().is_empty()) {
                return Err(Failure::breach(format!("submit answers {failure}, but the end is told too")));
            }
            // Whoever tells late must find something to tell to.
            work.map(Box::leak);
            return Err(failure);
        }
        Ok(self)
    }

    /// How often the end was told.
    pub fn told(&self) -> usize {
        self.0.as_ref().map_or(0, |work| work.told.results().len())
    }

    /// Waits for the end, which must be told once, and gives the outputs.
    ///
    /// # Errors
    /// How the job ended, or a breach.
    pub fn wait(mut self) -> Result<Vec<Vec<f32>>, Failure> {
        let Some(work) = self.0.take() else { return Err(Failure::breach("there is no job")) };
        let began = Instant::now();
        let told = work.told;
        let mut results = told.results();
        while results.is_empty() && began.elapsed() < LONG {
            let waited = told.changed.wait_timeout(results, LONG);
            results = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        let result = results.first().cloned();
        drop(results);
        // Whoever tells twice does so soon.
        std::thread::sleep(Duration::from_millis(1));
        let times = told.results().len();
        match result {
            Some(result) if times == 1 => {
                result?;
                let Work { x, x_given, outputs, .. } = *work;
                x.unchanged(&x_given, "x")?;
                outputs.into_iter().map(Guarded::open).collect()
            }
            Some(_) => Err(Failure::breach(format!("the end of a job was told {times} times"))),
            None => {
                Box::leak(work);
                Err(Failure::breach(format!("the end of a job was not told within {LONG:?}")))
            }
        }
    }
}

impl Drop for Submitted {
    fn drop(&mut self) {
        // A job that nobody waited for may be under way.
        self.0.take().map(Box::leak);
    }
}
