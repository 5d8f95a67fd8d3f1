//! An open unit, its weights, and the calls that return when the work is done.

use std::ffi::c_void;
use std::mem::ManuallyDrop;
use std::ptr;

use neuropil_plugin_abi::{
    AbiStruct, NP_LIFETIME_CALL, NpBuffer, NpClusterJob, NpDevice, NpMatmulJob, NpMatrix, NpMemory, NpPlan,
    NpPlugin, NpPrepared, NpProduct, NpQuery, NpRegion, NpReport, NpStatus, NpSupport, NpWeight,
    NpWeightSource,
};

use super::{Failure, Guarded, Info, buffer, call, told};
use crate::sample::Sample;

/// An open unit.
pub struct Device {
    pub(super) table: NpPlugin,
    pub(super) handle: *mut NpDevice,
}

// SAFETY: calls come from many threads at once only where the unit says that it takes that.
unsafe impl Sync for Device {}
// SAFETY: a device may be called from any thread.
unsafe impl Send for Device {}

/// A prepared weight. It is given back when it is dropped.
pub struct Weight<'a> {
    device: &'a Device,
    handle: *mut NpWeight,
    /// Rows of the matrix, or neurons.
    pub rows: usize,
    /// Columns of the matrix, or the width.
    pub cols: usize,
    /// Bytes that the plugin says it takes.
    pub bytes: u64,
}

// SAFETY: as for the device.
unsafe impl Sync for Weight<'_> {}
// SAFETY: as for the device.
unsafe impl Send for Weight<'_> {}

impl Drop for Weight<'_> {
    fn drop(&mut self) {
        if let Some(free) = self.device.table.free_weight {
            // SAFETY: the handle is one of this device and given back once.
            unsafe { free(self.device.handle, self.handle) }
        }
    }
}

impl Weight<'_> {
    /// The handle, for jobs that are made by hand.
    pub fn handle(&self) -> *mut NpWeight {
        self.handle
    }
}

/// Imported memory. It is given back when it is dropped.
pub struct Memory<'a> {
    device: &'a Device,
    handle: *mut NpMemory,
}

impl Memory<'_> {
    /// The handle.
    pub fn handle(&self) -> *mut NpMemory {
        self.handle
    }
}

impl Drop for Memory<'_> {
    fn drop(&mut self) {
        if let Some(release) = self.device.table.release_memory {
            // SAFETY: the handle is one of this device and given back once.
            unsafe { release(self.device.handle, self.handle) }
        }
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        if let Some(close) = self.table.close {
            // SAFETY: the handle is given back once, after its weights and memory, which borrow it.
            unsafe { close(self.handle) }
        }
    }
}

/// What a cluster job leaves.
#[derive(Clone, Debug, PartialEq)]
pub struct Cluster {
    /// Hidden values; empty when the stage has none.
    pub hidden: Vec<f32>,
    /// Outputs; empty when the stage has none.
    pub y: Vec<f32>,
}

fn not_offered(what: &str) -> Failure {
    Failure::unsupported(format!("the plugin does not offer {what}"))
}

fn prepared_weight(prepared: NpPrepared) -> Result<NpPrepared, Failure> {
    match prepared.weight.is_null() {
        true => Err(Failure::breach("it answers NP_OK, but gives no weight")),
        false => Ok(prepared),
    }
}

impl Device {
    pub(super) fn new(table: NpPlugin, handle: *mut NpDevice) -> Device {
        Device { table, handle }
    }

    /// The functions of the same plugin without a device: what a host must never do.
    pub(crate) fn nobody(&self) -> ManuallyDrop<Device> {
        ManuallyDrop::new(Device { table: self.table, handle: ptr::null_mut() })
    }

    /// The table of its plugin.
    pub fn table(&self) -> &NpPlugin {
        &self.table
    }

    /// What the unit is.
    ///
    /// # Panics
    /// When it does not say.
    pub fn info(&self) -> Info {
        self.try_info().unwrap_or_else(|failure| panic!("info: {failure}"))
    }

    /// What the unit is.
    ///
    /// # Errors
    /// What the plugin says.
    pub fn try_info(&self) -> Result<Info, Failure> {
        let info = self.table.info.ok_or_else(|| not_offered("info"))?;
        // SAFETY: the function is that of the table, with what it asks for.
        let mut infos = told(|context, found, status| unsafe { info(self.handle, context, found, status) })?;
        match (infos.pop(), infos.is_empty()) {
            (Some(info), true) => Ok(info),
            _ => Err(Failure::breach("info does not tell of one unit")),
        }
    }

    /// Asks; the flags of the answer.
    ///
    /// # Errors
    /// What the plugin says.
    pub fn query(&self, query: &NpQuery) -> Result<u32, Failure> {
        let mut support = NpSupport::new();
        self.query_structs(query, &mut support)?;
        Ok(support.flags)
    }

    /// Asks with structs of any size.
    pub(crate) fn query_structs(
        &self,
        query: *const NpQuery,
        support: *mut NpSupport,
    ) -> Result<(), Failure> {
        let function = self.table.query.ok_or_else(|| not_offered("query"))?;
        // SAFETY: as above.
        call(|status| unsafe { function(self.handle, query, support, status) })
    }

    /// Asks with a status of any size.
    pub(crate) fn query_status(&self, query: &NpQuery, status: *mut NpStatus) -> i32 {
        let mut support = NpSupport::new();
        // SAFETY: as above.
        self.table.query.map_or(-1, |function| unsafe { function(self.handle, query, &mut support, status) })
    }

    /// Whether neuron clusters are offered at all.
    pub fn has_clusters(&self) -> bool {
        self.table.cluster.is_some()
    }

    /// Prepares what a source of the header says.
    ///
    /// # Errors
    /// What the plugin says.
    pub fn prepare_source(&self, source: &NpWeightSource) -> Result<NpPrepared, Failure> {
        let mut prepared = NpPrepared::new();
        self.prepare_structs(source, &mut prepared)?;
        prepared_weight(prepared)
    }

    /// Prepares with structs of any size.
    pub(crate) fn prepare_structs(
        &self,
        source: *const NpWeightSource,
        prepared: *mut NpPrepared,
    ) -> Result<(), Failure> {
        let prepare = self.table.prepare.ok_or_else(|| not_offered("prepare"))?;
        // SAFETY: as above.
        call(|status| unsafe { prepare(self.handle, source, prepared, status) })
    }

    /// A weight of this device that was made by hand.
    pub(crate) fn weight(&self, prepared: NpPrepared, shape: (usize, usize)) -> Result<Weight<'_>, Failure> {
        let NpPrepared { weight: handle, bytes, .. } = prepared_weight(prepared)?;
        Ok(Weight { device: self, handle, rows: shape.0, cols: shape.1, bytes })
    }

    /// Prepares one matrix, or gate, up and down.
    ///
    /// # Errors
    /// What the plugin says.
    ///
    /// # Panics
    /// When there are neither one nor three.
    pub fn prepare(&self, samples: &[&Sample]) -> Result<Weight<'_>, Failure> {
        self.prepare_for(NP_LIFETIME_CALL, samples)
    }

    /// The same, with a promise how long the bytes live.
    pub(crate) fn prepare_for(&self, lifetime: u32, samples: &[&Sample]) -> Result<Weight<'_>, Failure> {
        let matrices: Vec<NpMatrix> = samples.iter().map(|sample| sample.matrix()).collect();
        let mut source = NpWeightSource { lifetime, ..NpWeightSource::new() };
        match &matrices[..] {
            [one] => source.matrix = one,
            [gate, up, down] => (source.gate, source.up, source.down) = (gate, up, down),
            _ => panic!("one matrix or three"),
        }
        let prepared = self.prepare_source(&source)?;
        self.weight(prepared, (samples[0].rows, samples[0].cols))
    }

    /// Multiplies one input with some weights.
    ///
    /// # Errors
    /// What the plugin says, or that it wrote what it must not.
    pub fn matmul(
        &self,
        weights: &[&Weight<'_>],
        x: &[f32],
        tokens: usize,
    ) -> Result<Vec<Vec<f32>>, Failure> {
        self.matmul_within(weights, x, tokens, 0)
    }

    /// The same with a deadline.
    pub(crate) fn matmul_within(
        &self,
        weights: &[&Weight<'_>],
        x: &[f32],
        tokens: usize,
        deadline_ns: u64,
    ) -> Result<Vec<Vec<f32>>, Failure> {
        let mut outputs: Vec<Guarded> = weights.iter().map(|w| Guarded::nan(tokens * w.rows)).collect();
        let buffers: Vec<NpBuffer> = outputs.iter_mut().map(Guarded::buffer).collect();
        let products: Vec<NpProduct> = weights
            .iter()
            .zip(&buffers)
            .map(|(weight, y)| NpProduct { weight: weight.handle, y, ..NpProduct::new() })
            .collect();
        let products: Vec<*const NpProduct> = products.iter().map(|product| &raw const *product).collect();
        let mut input = Guarded::new(x);
        let x_buffer = input.buffer();
        let job = NpMatmulJob {
            tokens: tokens as u64,
            deadline_ns,
            x: &x_buffer,
            products: products.as_ptr(),
            product_count: products.len() as u64,
            ..NpMatmulJob::new()
        };
        self.matmul_job(&job)?;
        input.unchanged(x, "x")?;
        outputs.into_iter().map(Guarded::open).collect()
    }

    /// Runs a job of the header.
    ///
    /// # Errors
    /// What the plugin says.
    pub fn matmul_job(&self, job: &NpMatmulJob) -> Result<NpReport, Failure> {
        let mut report = NpReport::new();
        self.matmul_structs(job, &mut report)?;
        Ok(report)
    }

    /// Runs a job with structs of any size.
    pub(crate) fn matmul_structs(
        &self,
        job: *const NpMatmulJob,
        report: *mut NpReport,
    ) -> Result<(), Failure> {
        let matmul = self.table.matmul.ok_or_else(|| not_offered("matmul"))?;
        // SAFETY: the function is that of the table; what the job names outlives the call.
        call(|status| unsafe { matmul(self.handle, job, report, status) })
    }

    /// Multiplies into an output that lies in place, and says how it ran.
    ///
    /// # Errors
    /// What the plugin says.
    pub fn matmul_in_place(
        &self,
        weight: &Weight<'_>,
        x: &mut [f32],
        y: &mut [f32],
        tokens: usize,
    ) -> Result<NpReport, Failure> {
        let (x, y) = (buffer(x), buffer(y));
        let product = NpProduct { weight: weight.handle, y: &y, ..NpProduct::new() };
        let products = [&raw const product];
        let products = products.as_ptr();
        let tokens = tokens as u64;
        self.matmul_job(&NpMatmulJob { tokens, x: &x, products, product_count: 1, ..NpMatmulJob::new() })
    }

    /// Runs a stage; `job` has all but the weight and the buffers. Buffers that the stage does not need are NULL.
    ///
    /// # Errors
    /// What the plugin says, or that it wrote what it must not.
    pub fn cluster(
        &self,
        weight: &Weight<'_>,
        job: &NpClusterJob,
        x: &[f32],
        hidden: &[f32],
        y: usize,
    ) -> Result<Cluster, Failure> {
        let (mut hidden, mut y) = (Guarded::new(hidden), Guarded::nan(y));
        let mut input = Guarded::new(x);
        let buffers = [input.buffer(), hidden.buffer(), y.buffer()];
        let [x_given, h, o] =
            buffers.each_ref().map(|b| if b.bytes == 0 { ptr::null() } else { &raw const *b });
        let job = NpClusterJob { weight: weight.handle, x: x_given, hidden: h, y: o, ..*job };
        self.cluster_structs(&job, &mut NpReport::new())?;
        input.unchanged(x, "x")?;
        Ok(Cluster { hidden: hidden.open()?, y: y.open()? })
    }

    /// Runs a cluster job with structs of any size.
    pub(crate) fn cluster_structs(
        &self,
        job: *const NpClusterJob,
        report: *mut NpReport,
    ) -> Result<(), Failure> {
        let cluster = self.table.cluster.ok_or_else(|| not_offered("cluster"))?;
        // SAFETY: as for `matmul_structs`.
        call(|status| unsafe { cluster(self.handle, job, report, status) })
    }

    /// Saves a weight; `None` when the plugin has no plans.
    pub fn save_plan(&self, weight: &Weight<'_>) -> Option<Result<Vec<u8>, Failure>> {
        self.save_plan_until(weight, usize::MAX)
    }

    /// The same, but the writing stops when there are `most` bytes.
    pub(crate) fn save_plan_until(
        &self,
        weight: &Weight<'_>,
        most: usize,
    ) -> Option<Result<Vec<u8>, Failure>> {
        struct Saved {
            bytes: Vec<u8>,
            most: usize,
        }
        unsafe extern "C" fn write(context: *mut c_void, data: *const c_void, bytes: u64) -> i32 {
            // SAFETY: the context is that of the call below; the plugin passes bytes that can be read.
            unsafe {
                let saved = &mut *context.cast::<Saved>();
                if bytes > 0 && !data.is_null() {
                    let piece = std::slice::from_raw_parts(data.cast::<u8>(), bytes as usize);
                    saved.bytes.extend_from_slice(piece);
                }
                i32::from(saved.bytes.len() >= saved.most)
            }
        }
        let save = self.table.save_plan?;
        let mut plan = Saved { bytes: Vec::new(), most };
        let context = (&raw mut plan).cast();
        // SAFETY: as above.
        let saved = call(|status| unsafe { save(self.handle, weight.handle, context, Some(write), status) });
        Some(saved.map(|()| plan.bytes))
    }

    /// Loads what was saved of a weight of this shape.
    ///
    /// # Errors
    /// What the plugin says.
    pub fn load_plan(&self, plan: &[u8], rows: usize, cols: usize) -> Result<Weight<'_>, Failure> {
        let plan = NpPlan { data: plan.as_ptr().cast(), data_bytes: plan.len() as u64, ..NpPlan::new() };
        let mut prepared = NpPrepared::new();
        self.load_plan_structs(&plan, &mut prepared)?;
        self.weight(prepared, (rows, cols))
    }

    /// Loads with structs of any size.
    pub(crate) fn load_plan_structs(
        &self,
        plan: *const NpPlan,
        prepared: *mut NpPrepared,
    ) -> Result<(), Failure> {
        let load = self.table.load_plan.ok_or_else(|| not_offered("saved plans"))?;
        // SAFETY: as above.
        call(|status| unsafe { load(self.handle, plan, prepared, status) })
    }

    /// Imports memory that lives until what comes back is dropped.
    ///
    /// # Errors
    /// What the plugin says.
    pub(crate) fn import(&self, region: *const NpRegion) -> Result<Memory<'_>, Failure> {
        let import = self.table.import_memory.ok_or_else(|| not_offered("importing memory"))?;
        let mut handle = ptr::null_mut();
        // SAFETY: as above.
        call(|status| unsafe { import(self.handle, region, &mut handle, status) })?;
        if handle.is_null() {
            return Err(Failure::breach("import_memory answers NP_OK, but gives no memory"));
        }
        Ok(Memory { device: self, handle })
    }

    /// Cancels what is under way; false when that is not offered.
    pub fn cancel(&self) -> bool {
        // SAFETY: cancel may come at any time while the device is open.
        self.table.cancel.map(|cancel| unsafe { cancel(self.handle) }).is_some()
    }
}
