//! The CPU as a device: a pool of threads that runs every job to its end before `submit` returns.
//!
//! A job takes its working memory from a scratch that keeps its size, so a decode step allocates nothing. Two
//! callers at once do not wait for each other: the second takes another scratch (and finds the pool busy, so it
//! computes on its own thread). Idle scratches wait on a small stack.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use neuropil_device::{
    ClusterJob, DType, Device, DeviceError, DeviceId, DeviceInfo, MAX_PRODUCTS, MatmulJob, Matrix, OpShape,
    OutOfMemory, PreparedWeight, Submission, Support, WeightSource,
};

use crate::arch::{DOWN_TYPES, Isa};
use crate::crew::{Crew, PackFailure, Work};
use crate::kernels::{Activations, Input, MOST_COLS, Panels};
use crate::mem::Columns;
use crate::pack::{GROUP_ROWS, PackError, Packed, group_bytes};
use crate::sparse::{down_types, gate_type};

/// Idle scratches kept: as many as callers are likely to work at once.
const MOST_IDLE: usize = 8;

/// Bytes by which packing may make any weight larger.
const SMALL_PADDING: usize = 16 << 20;

/// A weight in the layout of the kernels.
pub(crate) enum Weight {
    /// For a matmul.
    Matrix(Packed),
    /// For a cluster.
    Neurons { gate: Packed, up: Packed, down: Packed },
}

/// Working memory of one job.
pub(crate) struct Scratch {
    /// The input, quantised.
    pub input: Activations,
    /// The hidden values of a cluster, quantised.
    pub hidden: Activations,
    /// Room to expand weights.
    pub panels: Panels,
    /// Gate values, then hidden values, of a block.
    pub gate: Vec<f32>,
    /// Up values of a cluster.
    pub up: Vec<f32>,
    /// Hidden values of the neurons of a cluster that are active, and which these are.
    pub hidden_active: Vec<f32>,
    pub active: Vec<u32>,
}

impl Scratch {
    fn new() -> Result<Scratch, OutOfMemory> {
        let (input, hidden) = (Activations::new()?, Activations::new()?);
        let (gate, up) = (Vec::new(), Vec::new());
        let panels = Panels::new();
        Ok(Scratch { input, hidden, panels, gate, up, hidden_active: Vec::new(), active: Vec::new() })
    }
}

/// The CPU. Made by [`crate::CpuBackend`].
///
/// It packs weights 16 rows side by side and fills the last 16 up, and refuses a weight that this would make larger by
/// over 16 MiB and over a quarter: a file of a few megabytes must not take a gigabyte.
pub struct CpuDevice {
    id: DeviceId,
    info: DeviceInfo,
    pub(crate) crew: Crew,
    idle: Mutex<Vec<Scratch>>,
}

impl CpuDevice {
    pub(crate) fn new(info: DeviceInfo, crew: Crew) -> CpuDevice {
        CpuDevice { id: DeviceId::new(), info, crew, idle: Mutex::new(Vec::with_capacity(MOST_IDLE)) }
    }

    /// Calls `job` with working memory that nobody else uses meanwhile.
    pub(crate) fn with_scratch(
        &self,
        job: impl FnOnce(&mut Scratch) -> Result<(), DeviceError>,
    ) -> Result<(), DeviceError> {
        let idle = self.idle().pop();
        let mut scratch = match idle {
            Some(scratch) => scratch,
            None => Scratch::new().map_err(|error| self.out_of_memory(error))?,
        };
        let result = job(&mut scratch);
        let mut idle = self.idle();
        if idle.len() < MOST_IDLE {
            idle.push(scratch);
        }
        result
    }

    fn idle(&self) -> MutexGuard<'_, Vec<Scratch>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn out_of_memory(&self, error: OutOfMemory) -> DeviceError {
        DeviceError::OutOfMemory { device: self.info.name.clone(), bytes: error.0 }
    }

    /// Quantises `x[tokens, cols]`.
    pub(crate) fn quantize(
        &self,
        activations: &mut Activations,
        x: &[f32],
        tokens: usize,
        cols: usize,
    ) -> Result<(), DeviceError> {
        self.crew.quantize(activations, x, tokens, cols).map_err(|error| self.out_of_memory(error))
    }

    /// Makes room on every thread to expand rows of `cols` columns.
    pub(crate) fn reserve_panels(&self, panels: &mut Panels, cols: usize) -> Result<(), DeviceError> {
        panels.reserve(self.crew.pool.threads(), cols).map_err(|error| self.out_of_memory(error))
    }

    /// The device's own form of a weight.
    pub(crate) fn own<'a>(&self, weight: &'a PreparedWeight) -> Result<&'a Weight, DeviceError> {
        weight.downcast(self.id, &self.info.name)
    }

    fn pack(&self, matrix: &Matrix<'_>, recycle: Option<Packed>) -> Result<Packed, DeviceError> {
        matrix.check()?;
        check_size(matrix.dtype, matrix.rows, matrix.cols).map_err(|what| self.unsupported(&what))?;
        self.crew.pack(matrix, recycle).map_err(|error| match error {
            PackFailure::Source(error) => error,
            PackFailure::Pack(PackError::OutOfMemory(error)) => self.out_of_memory(error),
            PackFailure::Pack(_) => DeviceError::Shape {
                dtype: matrix.dtype,
                rows: matrix.rows,
                cols: matrix.cols,
                bytes: matrix.data.len(),
            },
        })
    }

    fn matrix<'a>(&self, weight: &'a PreparedWeight) -> Result<&'a Packed, DeviceError> {
        match self.own(weight)? {
            Weight::Matrix(packed) => Ok(packed),
            Weight::Neurons { .. } => Err(self.unsupported("a block of neurons as the weight of a matmul")),
        }
    }

    fn matmul(&self, job: &mut MatmulJob) -> Result<(), DeviceError> {
        let tokens = job.tokens;
        let mut cols = None;
        let (mut quantized, mut expanded_cols) = (false, 0);
        for product in job.products() {
            let weight = self.matrix(&product.weight)?;
            let width = *cols.get_or_insert(weight.cols());
            if weight.cols() != width {
                let (needed, found) = (width, weight.cols());
                return Err(DeviceError::Mismatch { what: "columns of a weight", needed, found });
            }
            check_len("values of y", tokens, weight.rows(), product.y.slice::<f32>().len())?;
            quantized |= weight.dtype().quantizes_activations();
            expanded_cols = expanded_cols.max(cols_to_expand(weight));
        }
        let Some(cols) = cols else { return Ok(()) };
        let (x, products) = job.parts_mut();
        let x = x.slice::<f32>();
        let x = &x[..check_len("values of x", tokens, cols, x.len())?];
        self.with_scratch(|scratch| {
            if quantized {
                self.quantize(&mut scratch.input, x, tokens, cols)?;
            }
            self.reserve_panels(&mut scratch.panels, expanded_cols)?;
            let mut work = [const { None }; MAX_PRODUCTS];
            for (product, place) in products.zip(&mut work) {
                let weight = self.matrix(&product.weight)?;
                let y = Columns::new(product.y.slice_mut(), tokens, weight.rows(), weight.rows());
                let input = input_for(weight.dtype(), x, &scratch.input, &scratch.panels);
                *place = Some(Work { weight, input, y, accumulate: product.accumulate });
            }
            self.crew.multiply(&work, tokens);
            Ok(())
        })
    }
}

/// Columns for which a product with the weight needs room to expand.
pub(crate) fn cols_to_expand(weight: &Packed) -> usize {
    if weight.dtype().is_expanded() { weight.cols() } else { 0 }
}

/// What a weight of that type multiplies.
pub(crate) fn input_for<'a>(
    dtype: DType,
    x: &'a [f32],
    quantized: &'a Activations,
    panels: &'a Panels,
) -> Input<'a> {
    if dtype.quantizes_activations() {
        Input::Quantized(quantized)
    } else if dtype.is_expanded() {
        Input::Expanded(x, panels)
    } else {
        Input::Floats(x)
    }
}

/// Whether packing leaves a weight near its size, and expanding it takes little memory; or else why not.
fn check_size(dtype: DType, rows: usize, cols: usize) -> Result<(), String> {
    if dtype.is_expanded() && cols > MOST_COLS {
        return Err(format!("{cols} columns of type {dtype}: the most it takes of that type is {MOST_COLS}"));
    }
    let packed = group_bytes(dtype, cols).and_then(|group| group.checked_mul(rows.div_ceil(GROUP_ROWS)));
    let (Some(packed), Some(bytes)) = (packed, dtype.matrix_bytes(rows, cols)) else {
        return Err(format!("a {rows} x {cols} weight, which no memory holds"));
    };
    let more = packed.saturating_sub(bytes);
    if more > SMALL_PADDING && more > bytes / 4 {
        return Err(format!(
            "a {rows} x {cols} weight of type {dtype}: with its rows filled up to a multiple of {GROUP_ROWS} it takes \
             {packed} bytes instead of {bytes}"
        ));
    }
    Ok(())
}

/// The length that a job needs of a buffer, if the buffer is long enough.
pub(crate) fn check_len(
    what: &'static str,
    tokens: usize,
    width: usize,
    found: usize,
) -> Result<usize, DeviceError> {
    let needed = tokens.saturating_mul(width);
    if needed > found { Err(DeviceError::Mismatch { what, needed, found }) } else { Ok(needed) }
}

impl Device for CpuDevice {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn supports(&self, op: &OpShape) -> Support {
        let whole_blocks = |dtype: DType, cols: usize| match dtype.row_bytes(cols) {
            Some(_) => Ok(()),
            None => Err(format!("{cols} columns are not whole blocks of {dtype}")),
        };
        let fits = |dtype: DType, rows: usize, cols: usize| {
            whole_blocks(dtype, cols).and_then(|()| check_size(dtype, rows, cols))
        };
        let expanded = match *op {
            OpShape::Matmul { dtype, .. } => dtype.is_expanded(),
            OpShape::Cluster { dtype, down_dtype, .. } => dtype.is_expanded() || down_dtype.is_expanded(),
            _ => false,
        };
        let answer = match *op {
            OpShape::Matmul { dtype, rows, cols, .. } => fits(dtype, rows, cols),
            OpShape::Cluster { bundles: true, stage, dtype, down_dtype, width, .. } => {
                if stage.reads_x() && dtype.is_expanded() {
                    Err(gate_type(dtype))
                } else if stage.has_down() && !DOWN_TYPES.contains(&down_dtype) {
                    Err(down_types(down_dtype))
                } else {
                    whole_blocks(dtype, width).and_then(|()| whole_blocks(down_dtype, width))
                }
            }
            OpShape::Cluster { dtype, down_dtype, neurons, width, .. } => {
                fits(dtype, neurons, width).and_then(|()| fits(down_dtype, width, neurons))
            }
            OpShape::Block => Err("the CPU computes a transformer block by its parts".into()),
            _ => Err("the CPU backend does not know this operation".into()),
        };
        match answer {
            Err(why) => Support::No(why),
            Ok(()) if expanded || self.crew.isa == Isa::Scalar => Support::Emulated,
            Ok(()) => Support::Native,
        }
    }

    fn prepare(
        &self,
        weight: WeightSource<'_>,
        recycle: Option<PreparedWeight>,
    ) -> Result<PreparedWeight, DeviceError> {
        let shape = weight.shape()?;
        let recycle = recycle.and_then(|old| old.into_inner::<Weight>(self.id));
        let weight = match weight {
            WeightSource::Matrix(matrix) => {
                let old = match recycle {
                    Some(Weight::Matrix(old)) => Some(old),
                    _ => None,
                };
                Weight::Matrix(self.pack(&matrix, old)?)
            }
            WeightSource::Neurons { gate, up, down } => {
                let [old_gate, old_up, old_down] = match recycle {
                    Some(Weight::Neurons { gate, up, down }) => [Some(gate), Some(up), Some(down)],
                    _ => [None, None, None],
                };
                Weight::Neurons {
                    gate: self.pack(&gate, old_gate)?,
                    up: self.pack(&up, old_up)?,
                    down: self.pack(&down, old_down)?,
                }
            }
        };
        let bytes = match &weight {
            Weight::Matrix(packed) => packed.bytes().len(),
            Weight::Neurons { gate, up, down } => [gate, up, down].iter().map(|p| p.bytes().len()).sum(),
        };
        Ok(PreparedWeight::new(self.id, shape, bytes, Arc::new(weight)))
    }

    fn submit_matmul(&self, mut submission: Submission<MatmulJob>) {
        let result = self.matmul(submission.job_mut());
        submission.finish(result);
    }

    fn submit_clusters(&self, batch: &mut Vec<Submission<ClusterJob>>) {
        for mut submission in batch.drain(..) {
            let result = self.cluster(submission.job_mut());
            submission.finish(result);
        }
    }
}

/// The first `len` values of a buffer that grows when it must.
pub(crate) fn room(buffer: &mut Vec<f32>, len: usize) -> Result<&mut [f32], OutOfMemory> {
    if buffer.len() < len {
        buffer.try_reserve_exact(len - buffer.len()).map_err(|_| OutOfMemory(len.saturating_mul(4)))?;
        buffer.resize(len, 0.0);
    }
    Ok(&mut buffer[..len])
}
