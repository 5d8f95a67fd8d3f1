//! An open unit: every call checks what goes over the border, and belongs to the thread that opened the unit.

use std::ptr::{null, null_mut};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use neuropil_device::{Activation, ActivationKind, Stage};
use neuropil_plugin_abi::{
    self as abi, AbiStruct, NpBuffer, NpClusterJob, NpDevice, NpMatmulJob, NpMatrix, NpPrepared, NpProduct,
    NpQuery, NpReport, NpSupport, NpWeight, NpWeightSource,
};

use super::library::with_options;
use super::{Failure, Found, Library, UnitInfo, call, found, not_offered};
use crate::{Encoded, Scheme};

/// A question about one shape.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Question {
    pub scheme: Scheme,
    /// Stage, activation and scheme of down; `None` for a matmul.
    pub cluster: Option<(Stage, ActivationKind, Scheme)>,
    /// Outputs, or neurons.
    pub rows: usize,
    /// Inputs, or the width of the model.
    pub cols: usize,
    pub tokens: usize,
}

/// Yes, and how.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Answer {
    pub emulated: bool,
    pub outliers: bool,
}

/// What `prepare` takes.
pub(crate) enum Parts<'a> {
    One(&'a Encoded),
    Neurons { gate: &'a Encoded, up: &'a Encoded, down: &'a Encoded },
}

/// A weight of the plugin. It is given back by [`Unit::free`] alone; one that is dropped stays in the plugin.
#[derive(Debug)]
pub(crate) struct WeightHandle {
    pub(super) weight: *mut NpWeight,
    /// Rows and columns, or neurons and width.
    pub shape: (usize, usize),
    pub block: bool,
    /// Memory that it takes, as the plugin says.
    pub bytes: usize,
}

impl WeightHandle {
    /// What the plugin made of these parts; `None` when it is no weight.
    pub(super) fn new(prepared: &NpPrepared, parts: &Parts<'_>) -> Option<WeightHandle> {
        let (shape, block) = match parts {
            Parts::One(matrix) => ((matrix.rows, matrix.cols), false),
            Parts::Neurons { gate, .. } => ((gate.rows, gate.cols), true),
        };
        let bytes = usize::try_from(prepared.bytes).unwrap_or(usize::MAX);
        let weight = prepared.weight;
        (!weight.is_null()).then_some(WeightHandle { weight, shape, block, bytes })
    }
}

// SAFETY: the header lets handles be used from any thread; it is never followed here.
unsafe impl Send for WeightHandle {}
// SAFETY: as above.
unsafe impl Sync for WeightHandle {}

/// A stage of a feed-forward. Buffers that the stage has not are `None`.
pub(crate) struct ClusterCall<'a> {
    pub stage: Stage,
    pub activation: Activation,
    pub tokens: usize,
    pub deadline: Duration,
    pub weight: &'a WeightHandle,
    pub x: Option<&'a [f32]>,
    pub hidden: Option<&'a mut [f32]>,
    pub y: Option<&'a mut [f32]>,
}

/// An open unit. Not `Send`: it stays on its thread.
pub(crate) struct Unit {
    pub(super) library: Arc<Library>,
    pub(super) device: *mut NpDevice,
    canceller: Canceller,
}

/// The way to call `cancel` from another thread, for as long as the unit is open.
#[derive(Clone)]
pub(crate) struct Canceller {
    library: Arc<Library>,
    open: Arc<Mutex<Option<OpenDevice>>>,
}

struct OpenDevice(*mut NpDevice);

// SAFETY: the header lets `cancel` come from any thread; the handle is used for nothing else.
unsafe impl Send for OpenDevice {}

impl Canceller {
    /// Asks jobs under way to end, if the plugin offers that.
    pub fn cancel(&self) {
        let open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        if let (Some(function), Some(open)) = (self.library.table.cancel, open.as_ref()) {
            // SAFETY: the unit is open: it is closed under the same lock.
            unsafe { function(open.0) };
        }
    }
}

impl Drop for Unit {
    fn drop(&mut self) {
        self.canceller.open.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(function) = self.library.table.close {
            // SAFETY: the unit is open and is not used after this.
            unsafe { function(self.device) };
        }
    }
}

impl Unit {
    /// Opens unit `index`.
    pub fn open(library: &Arc<Library>, index: usize, options: &[(String, String)]) -> Result<Unit, Failure> {
        let function = library.table.open.ok_or_else(|| not_offered("open"))?;
        let mut device = null_mut();
        let place = &raw mut device;
        with_options(options, |options| {
            // SAFETY: what is passed lives until the call returns.
            call(|status| unsafe { function(index as u64, options, place, status) })
        })?;
        if device.is_null() {
            return Err(Failure::new(abi::NP_INTERNAL, "open gave no device"));
        }
        let open = Arc::new(Mutex::new(Some(OpenDevice(device))));
        let canceller = Canceller { library: library.clone(), open };
        Ok(Unit { library: library.clone(), device, canceller })
    }

    pub fn canceller(&self) -> Canceller {
        self.canceller.clone()
    }

    pub fn has_clusters(&self) -> bool {
        self.library.table.cluster.is_some()
    }

    /// What the unit is.
    pub fn info(&self) -> Result<UnitInfo, Failure> {
        let function = self.library.table.info.ok_or_else(|| not_offered("info"))?;
        let units = Found::default();
        let context = (&raw const units).cast_mut().cast();
        // SAFETY: the unit is open, and the list lives until the call returns.
        call(|status| unsafe { function(self.device, context, Some(found), status) })?;
        let units = units.into_inner().unwrap_or_else(PoisonError::into_inner);
        units.into_iter().next().ok_or_else(|| Failure::new(abi::NP_INTERNAL, "info told of no device"))
    }

    /// Whether it can do something.
    pub fn query(&self, question: &Question) -> Result<Answer, Failure> {
        let function = self.library.table.query.ok_or_else(|| not_offered("query"))?;
        let mut query = NpQuery {
            op: abi::NP_OP_MATMUL,
            scheme: question.scheme.number(),
            rows: question.rows as u64,
            cols: question.cols as u64,
            group: question.scheme.group() as u64,
            tokens: question.tokens as u64,
            ..NpQuery::new()
        };
        if let Some((stage, activation, down)) = question.cluster {
            query.op = abi::NP_OP_CLUSTER;
            query.group = query.group.max(down.group() as u64);
            (query.stage, query.activation) = (stage_number(stage), activation_number(activation));
            query.down_scheme = down.number();
        }
        let mut support = NpSupport::new();
        // SAFETY: the unit is open, and the structs live until the call returns.
        call(|status| unsafe { function(self.device, &query, &mut support, status) })?;
        let has = |flag| support.flags & flag != 0;
        let (native, emulated) = (has(abi::NP_SUPPORT_NATIVE), has(abi::NP_SUPPORT_EMULATED));
        if !native && !emulated {
            return Err(Failure::new(abi::NP_UNSUPPORTED, "the plugin says neither yes nor no"));
        }
        Ok(Answer { emulated: !native, outliers: has(abi::NP_SUPPORT_OUTLIERS) })
    }

    /// Packs, uploads or compiles a weight.
    pub fn prepare(&self, parts: &Parts<'_>) -> Result<WeightHandle, Failure> {
        let function = self.library.table.prepare.ok_or_else(|| not_offered("prepare"))?;
        let mut source = NpWeightSource::new();
        let (block, first) = match parts {
            Parts::One(matrix) => (None, matrix),
            Parts::Neurons { gate, up, down } => (Some([*gate, *up, *down].map(matrix)), gate),
        };
        let one = matrix(first);
        match &block {
            None => source.matrix = &one,
            Some([gate, up, down]) => (source.gate, source.up, source.down) = (gate, up, down),
        }
        let mut prepared = NpPrepared::new();
        // SAFETY: the unit is open, and the matrices live until the call returns, as the source says.
        call(|status| unsafe { function(self.device, &source, &mut prepared, status) })?;
        WeightHandle::new(&prepared, parts)
            .ok_or_else(|| Failure::new(abi::NP_INTERNAL, "prepare gave no weight"))
    }

    /// Gives a weight of this unit back.
    pub fn free(&self, weight: WeightHandle) {
        if let Some(function) = self.library.table.free_weight {
            // SAFETY: the unit is open; nobody else has the handle, and no call is under way.
            unsafe { function(self.device, weight.weight) };
        }
    }

    /// Multiplies `x`, `[tokens, cols]`, with 1 to 4 weights of this unit; each output is `[tokens, rows]`.
    pub fn matmul(
        &self,
        tokens: usize,
        deadline: Duration,
        x: &[f32],
        products: &mut [(&WeightHandle, &mut [f32])],
    ) -> Result<(), Failure> {
        let function = self.library.table.matmul.ok_or_else(|| not_offered("matmul"))?;
        for (weight, y) in products.iter() {
            let fits = Some(y.len()) == tokens.checked_mul(weight.shape.0)
                && Some(x.len()) == tokens.checked_mul(weight.shape.1);
            if weight.block || !fits {
                return Err(Failure::new(abi::NP_INVALID, "the buffers of a matmul do not fit"));
            }
        }
        let x = input(x);
        let outputs: Vec<NpBuffer> = products.iter_mut().map(|(_, y)| output(y)).collect();
        let weights = products.iter().map(|(weight, _)| weight.weight);
        let items: Vec<NpProduct> =
            weights.zip(&outputs).map(|(weight, y)| NpProduct { weight, y, ..NpProduct::new() }).collect();
        let list: Vec<*const NpProduct> = items.iter().map(|item| &raw const *item).collect();
        let job = NpMatmulJob {
            tokens: tokens as u64,
            deadline_ns: nanoseconds(deadline),
            x: &x,
            products: list.as_ptr(),
            product_count: list.len() as u64,
            ..NpMatmulJob::new()
        };
        let mut report = NpReport::new();
        // SAFETY: the unit is open, the weights are its own, and everything lives until the call returns.
        call(|status| unsafe { function(self.device, &job, &mut report, status) })
    }

    /// Runs a stage of a feed-forward.
    pub fn cluster(&self, job: ClusterCall<'_>) -> Result<(), Failure> {
        let function = self.library.table.cluster.ok_or_else(|| not_offered("cluster"))?;
        let (neurons, width) = job.weight.shape;
        let fits = |len: Option<usize>, needed: bool, cols: usize| match len {
            Some(len) => needed && Some(len) == job.tokens.checked_mul(cols),
            None => !needed,
        };
        if !job.weight.block
            || !fits(job.x.map(<[f32]>::len), job.stage.reads_x(), width)
            || !fits(job.hidden.as_ref().map(|hidden| hidden.len()), job.stage.has_hidden(), neurons)
            || !fits(job.y.as_ref().map(|y| y.len()), job.stage.has_down(), width)
        {
            return Err(Failure::new(abi::NP_INVALID, "the buffers of a cluster do not fit"));
        }
        let (x, hidden, y) = (job.x.map(input), job.hidden.map(output), job.y.map(output));
        let place = |buffer: &Option<NpBuffer>| buffer.as_ref().map_or(null(), |buffer| &raw const *buffer);
        let call_job = NpClusterJob {
            stage: stage_number(job.stage),
            activation: activation_number(job.activation.kind),
            threshold: job.activation.threshold,
            tokens: job.tokens as u64,
            deadline_ns: nanoseconds(job.deadline),
            weight: job.weight.weight,
            x: place(&x),
            hidden: place(&hidden),
            y: place(&y),
            ..NpClusterJob::new()
        };
        let mut report = NpReport::new();
        // SAFETY: the unit is open, the weight is its own, and everything lives until the call returns.
        call(|status| unsafe { function(self.device, &call_job, &mut report, status) })
    }
}

fn input(values: &[f32]) -> NpBuffer {
    let bytes = size_of_val(values) as u64;
    NpBuffer { data: values.as_ptr().cast_mut().cast(), bytes, ..NpBuffer::new() }
}

fn output(values: &mut [f32]) -> NpBuffer {
    let bytes = size_of_val(values) as u64;
    NpBuffer { data: values.as_mut_ptr().cast(), bytes, ..NpBuffer::new() }
}

fn nanoseconds(time: Duration) -> u64 {
    time.as_nanos().try_into().unwrap_or(u64::MAX)
}

/// A matrix as the border has it; it borrows from `from`.
fn matrix(from: &Encoded) -> NpMatrix {
    let place = |bytes: &[u8]| if bytes.is_empty() { null() } else { bytes.as_ptr().cast() };
    let (data, scales, mins) = (from.data.as_ref(), from.scales.as_ref(), from.mins.as_ref());
    let mut matrix = NpMatrix {
        scheme: from.scheme.number(),
        rows: from.rows as u64,
        cols: from.cols as u64,
        group: from.scheme.group() as u64,
        data: place(data),
        data_bytes: data.len() as u64,
        scales: place(scales),
        scales_bytes: scales.len() as u64,
        mins: place(mins),
        mins_bytes: mins.len() as u64,
        ..NpMatrix::new()
    };
    if let Some(outliers) = &from.outliers {
        matrix.outlier_columns = outliers.columns.as_ptr();
        matrix.outlier_data = outliers.codes.as_ref().as_ptr().cast();
        matrix.outlier_scales = outliers.scales.as_ptr().cast();
        matrix.outlier_count = outliers.columns.len() as u64;
    }
    matrix
}

fn stage_number(stage: Stage) -> u32 {
    match stage {
        Stage::Gate => abi::NP_STAGE_GATE,
        Stage::Up => abi::NP_STAGE_UP,
        Stage::Down => abi::NP_STAGE_DOWN,
        Stage::GateUp => abi::NP_STAGE_GATE_UP,
        Stage::UpDown => abi::NP_STAGE_UP_DOWN,
        Stage::Fused => abi::NP_STAGE_FUSED,
    }
}

fn activation_number(kind: ActivationKind) -> u32 {
    match kind {
        ActivationKind::Silu => abi::NP_ACT_SILU,
        ActivationKind::Gelu => abi::NP_ACT_GELU,
        ActivationKind::Relu => abi::NP_ACT_RELU,
        ActivationKind::Relu2 => abi::NP_ACT_RELU2,
        ActivationKind::Drelu => abi::NP_ACT_DRELU,
        ActivationKind::Linear => abi::NP_ACT_LINEAR,
    }
}
