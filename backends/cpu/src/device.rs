//! The CPU as a device: a pool of threads that runs every job to its end before `submit` returns.
//!
//! A job takes its working memory from a scratch that keeps its size, so a decode step allocates nothing. Two
//! callers at once do not wait for each other: the second brings a scratch of its own (and finds the pool busy, so it
//! computes on its own thread).

use std::sync::{Arc, Mutex, TryLockError};

use neuropil_device::{
    ClusterJob, Device, DeviceError, DeviceInfo, MAX_PRODUCTS, MatmulJob, Matrix, OpShape, PreparedWeight,
    Submission, Support, WeightShape, WeightSource,
};

use crate::arch::Isa;
use crate::crew::{Crew, PackFailure, Work};
use crate::kernels::{Activations, Input};
use crate::mem::{Columns, OutOfMemory};
use crate::pack::{PackError, Packed};

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
    /// Gate values, then hidden values, of a cluster.
    pub gate: Vec<f32>,
    /// Up values of a cluster.
    pub up: Vec<f32>,
}

impl Scratch {
    fn new() -> Result<Scratch, OutOfMemory> {
        let (input, hidden) = (Activations::new()?, Activations::new()?);
        Ok(Scratch { input, hidden, gate: Vec::new(), up: Vec::new() })
    }
}

/// The CPU. Made by [`crate::CpuBackend`].
pub struct CpuDevice {
    info: DeviceInfo,
    pub(crate) crew: Crew,
    scratch: Mutex<Scratch>,
}

impl CpuDevice {
    pub(crate) fn new(info: DeviceInfo, crew: Crew) -> Result<CpuDevice, OutOfMemory> {
        Ok(CpuDevice { info, crew, scratch: Mutex::new(Scratch::new()?) })
    }

    /// Calls `job` with working memory.
    pub(crate) fn with_scratch(
        &self,
        job: impl FnOnce(&mut Scratch) -> Result<(), OutOfMemory>,
    ) -> Result<(), DeviceError> {
        let result = match self.scratch.try_lock() {
            Ok(mut scratch) => job(&mut scratch),
            // Its contents mean nothing between jobs, so a job that panicked has done no harm.
            Err(TryLockError::Poisoned(scratch)) => job(&mut scratch.into_inner()),
            Err(TryLockError::WouldBlock) => Scratch::new().and_then(|mut scratch| job(&mut scratch)),
        };
        result.map_err(|error| self.out_of_memory(error))
    }

    fn out_of_memory(&self, error: OutOfMemory) -> DeviceError {
        DeviceError::OutOfMemory { device: self.info.name.clone(), bytes: error.0 }
    }

    fn pack(&self, matrix: &Matrix<'_>, recycle: Option<Packed>) -> Result<Packed, DeviceError> {
        matrix.check()?;
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
        match weight.downcast::<Weight>(&self.info.name)? {
            Weight::Matrix(packed) => Ok(packed),
            Weight::Neurons { .. } => Err(self.unsupported("a block of neurons as the weight of a matmul")),
        }
    }

    fn matmul(&self, job: &mut MatmulJob) -> Result<(), DeviceError> {
        let tokens = job.tokens;
        let mut cols = None;
        let mut quantized = false;
        for product in job.products() {
            let weight = self.matrix(&product.weight)?;
            let width = *cols.get_or_insert(weight.cols());
            if weight.cols() != width {
                let (needed, found) = (width, weight.cols());
                return Err(DeviceError::Mismatch { what: "columns of a weight", needed, found });
            }
            check_len("values of y", tokens, weight.rows(), product.y.slice::<f32>().len())?;
            quantized |= weight.dtype().is_quantized();
        }
        let Some(cols) = cols else { return Ok(()) };
        let (x, products) = job.parts_mut();
        let x = x.slice::<f32>();
        let x = &x[..check_len("values of x", tokens, cols, x.len())?];
        self.with_scratch(|scratch| {
            if quantized {
                self.crew.quantize(&mut scratch.input, x, tokens, cols)?;
            }
            let mut work = [const { None }; MAX_PRODUCTS];
            for (product, place) in products.zip(&mut work) {
                // Checked above; the products have not changed since.
                let Ok(weight) = self.matrix(&product.weight) else { continue };
                let y = Columns::new(product.y.slice_mut(), tokens, weight.rows(), weight.rows());
                let input = input_for(weight, x, &scratch.input);
                *place = Some(Work { weight, input, y, accumulate: product.accumulate });
            }
            self.crew.multiply(&work, tokens);
            Ok(())
        })
    }
}

/// What a weight of that type multiplies.
pub(crate) fn input_for<'a>(weight: &Packed, x: &'a [f32], quantized: &'a Activations) -> Input<'a> {
    if weight.dtype().is_quantized() { Input::Quantized(quantized) } else { Input::Floats(x) }
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
        let fits = |dtype: neuropil_device::DType, cols: usize| {
            let odd = || format!("{cols} columns are not whole blocks of {dtype}");
            if dtype.row_bytes(cols).is_some() { Ok(()) } else { Err(odd()) }
        };
        let answer = match *op {
            OpShape::Matmul { dtype, cols, .. } => fits(dtype, cols),
            OpShape::Cluster { bundles: true, .. } => {
                Err("the CPU computes prepared blocks of neurons only".into())
            }
            OpShape::Cluster { dtype, down_dtype, neurons, width, .. } => {
                fits(dtype, width).and_then(|()| fits(down_dtype, neurons))
            }
            OpShape::Block => Err("the CPU computes a transformer block by its parts".into()),
        };
        match answer {
            Err(why) => Support::No(why),
            Ok(()) if self.crew.isa == Isa::Scalar => Support::Emulated,
            Ok(()) => Support::Native,
        }
    }

    fn prepare(
        &self,
        weight: WeightSource<'_>,
        recycle: Option<PreparedWeight>,
    ) -> Result<PreparedWeight, DeviceError> {
        let shape = weight.shape()?;
        let recycle = recycle.and_then(PreparedWeight::into_inner::<Weight>);
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
        debug_assert!(matches!(
            (&weight, shape),
            (Weight::Matrix(_), WeightShape::Matrix { .. })
                | (Weight::Neurons { .. }, WeightShape::Neurons { .. })
        ));
        Ok(PreparedWeight::new(shape, bytes, Arc::new(weight)))
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
