//! From a file's tensors to weights on devices.
//!
//! The file's directory was checked before (see [`super::check`]), so what is left to go wrong is reading and memory.
//! Weights are read by positioned reads, piece by piece, into the device's own layout: a file that changes under a map
//! cannot hurt them, and no second copy is ever in memory (`exact` excepted, which expands each weight to F32 first).

use std::sync::Arc;

use neuropil_device::{
    DType, Device, DeviceError, Matrix, OpShape, PreparedWeight, RowSource, Stage, Support, WeightSource,
    quant,
};

use crate::gguf::{Gguf, TensorInfo};

use super::ModelError;

/// A weight and the device that holds it.
pub(crate) struct Placed {
    pub device: Arc<dyn Device>,
    pub weight: PreparedWeight,
}

/// Three matrices that share an input, on one device.
pub(crate) struct PlacedTrio {
    pub device: Arc<dyn Device>,
    pub weights: [PreparedWeight; 3],
}

/// Told how many of how many bytes are loaded.
pub type Progress<'a> = dyn FnMut(u64, u64) + 'a;

/// Loads the tensors of one file onto devices.
pub(crate) struct Loader<'a> {
    gguf: &'a Gguf,
    devices: &'a [Arc<dyn Device>],
    exact: bool,
    loaded: u64,
    total: u64,
    /// Bytes of prepared weights so far.
    pub weight_bytes: u64,
    progress: &'a mut Progress<'a>,
}

impl<'a> Loader<'a> {
    pub(crate) fn new(
        gguf: &'a Gguf,
        devices: &'a [Arc<dyn Device>],
        exact: bool,
        progress: &'a mut Progress<'a>,
    ) -> Loader<'a> {
        let total = gguf.tensors().iter().map(|t| t.bytes).sum();
        Loader { gguf, devices, exact, loaded: 0, total, weight_bytes: 0, progress }
    }

    /// A small tensor as numbers: a norm's weight, rotary factors.
    pub(crate) fn vector(&mut self, name: &str) -> Result<Vec<f32>, ModelError> {
        let tensor = self.gguf.require(name)?;
        self.loaded += tensor.bytes;
        self.numbers(tensor)
    }

    /// One matrix.
    pub(crate) fn matrix(&mut self, name: &str, rows: usize, cols: usize) -> Result<Placed, ModelError> {
        let device = self.choose(name, &[self.matmul(name, rows, cols)?])?;
        let weight = self.prepare(&*device, name, rows, cols)?;
        Ok(Placed { device, weight })
    }

    /// Three matrices that share an input of `cols` channels, on the first device that can run all of them.
    pub(crate) fn trio(
        &mut self,
        matrices: [(&str, usize); 3],
        cols: usize,
    ) -> Result<PlacedTrio, ModelError> {
        let [a, b, c] = matrices;
        let ops = [self.matmul(a.0, a.1, cols)?, self.matmul(b.0, b.1, cols)?, self.matmul(c.0, c.1, cols)?];
        let device = self.choose(a.0, &ops)?;
        let weights = [
            self.prepare(&*device, a.0, a.1, cols)?,
            self.prepare(&*device, b.0, b.1, cols)?,
            self.prepare(&*device, c.0, c.1, cols)?,
        ];
        Ok(PlacedTrio { device, weights })
    }

    /// All neurons of a feed-forward layer as one block.
    pub(crate) fn neurons(
        &mut self,
        names: [&str; 3],
        neurons: usize,
        width: usize,
    ) -> Result<Placed, ModelError> {
        let [gate, up, down] = names;
        let (gate, up, down) = (self.gguf.require(gate)?, self.gguf.require(up)?, self.gguf.require(down)?);
        let op = OpShape::Cluster {
            stage: Stage::Fused,
            dtype: self.dtype(gate)?,
            down_dtype: self.dtype(down)?,
            neurons,
            width,
            tokens: 1,
            bundles: false,
        };
        let device = self.choose(names[0], &[op])?;
        let weight = self.with_rows(gate, |gate_type, gate_rows| {
            self.with_rows(up, |up_type, up_rows| {
                self.with_rows(down, |down_type, down_rows| {
                    let matrix = |dtype, rows, cols, data| Matrix { dtype, rows, cols, data };
                    device.prepare(
                        WeightSource::Neurons {
                            gate: matrix(gate_type, neurons, width, gate_rows),
                            up: matrix(up_type, neurons, width, up_rows),
                            down: matrix(down_type, width, neurons, down_rows),
                        },
                        None,
                    )
                })
                .map_err(into_device_error)
            })
            .map_err(into_device_error)
        })?;
        self.advance(&weight, gate.bytes + up.bytes + down.bytes);
        Ok(Placed { device, weight })
    }

    fn matmul(&self, name: &str, rows: usize, cols: usize) -> Result<OpShape, ModelError> {
        Ok(OpShape::Matmul { dtype: self.dtype(self.gguf.require(name)?)?, rows, cols, tokens: 1 })
    }

    fn prepare(
        &mut self,
        device: &dyn Device,
        name: &str,
        rows: usize,
        cols: usize,
    ) -> Result<PreparedWeight, ModelError> {
        let tensor = self.gguf.require(name)?;
        let weight = self.with_rows(tensor, |dtype, data| {
            device.prepare(WeightSource::Matrix(Matrix { dtype, rows, cols, data }), None)
        })?;
        self.advance(&weight, tensor.bytes);
        Ok(weight)
    }

    fn choose(&self, name: &str, ops: &[OpShape]) -> Result<Arc<dyn Device>, ModelError> {
        let mut reasons = Vec::new();
        for device in self.devices {
            let refusal = ops.iter().find_map(|op| match device.supports(op) {
                Support::No(reason) => Some(reason),
                Support::Native | Support::Emulated => None,
            });
            match refusal {
                None => return Ok(device.clone()),
                Some(reason) => reasons.push(format!("{}: {reason}", device.info().name)),
            }
        }
        let dtype = match ops.first() {
            Some(OpShape::Matmul { dtype, .. } | OpShape::Cluster { dtype, .. }) => dtype.to_string(),
            _ => String::new(),
        };
        Err(ModelError::NoDevice { name: name.into(), dtype, reasons: reasons.join("; ") })
    }

    /// The type that a weight is multiplied in.
    fn dtype(&self, tensor: &TensorInfo) -> Result<DType, ModelError> {
        if self.exact { Ok(DType::F32) } else { file_type(tensor) }
    }

    fn numbers(&self, tensor: &TensorInfo) -> Result<Vec<f32>, ModelError> {
        let out_of_memory = |bytes: u64| ModelError::OutOfMemory { what: tensor.name.clone(), bytes };
        let elements = tensor.elements() as usize;
        let mut raw = Vec::new();
        raw.try_reserve_exact(tensor.bytes as usize).map_err(|_| out_of_memory(tensor.bytes))?;
        raw.resize(tensor.bytes as usize, 0);
        self.gguf.read_into(tensor, &mut raw)?;
        let mut values = Vec::new();
        values.try_reserve_exact(elements).map_err(|_| out_of_memory(4 * elements as u64))?;
        values.resize(elements, 0.0);
        quant::dequantize_row(file_type(tensor)?, &raw, &mut values);
        Ok(values)
    }

    fn with_rows<R>(
        &self,
        tensor: &TensorInfo,
        use_rows: impl FnOnce(DType, &dyn RowSource) -> Result<R, DeviceError>,
    ) -> Result<R, ModelError> {
        let result = if self.exact {
            let values = self.numbers(tensor)?;
            use_rows(DType::F32, &bytemuck::cast_slice::<f32, u8>(&values))
        } else {
            use_rows(file_type(tensor)?, &FileRows { gguf: self.gguf, tensor })
        };
        result.map_err(|source| ModelError::Weight { name: tensor.name.clone(), source })
    }

    fn advance(&mut self, weight: &PreparedWeight, bytes: u64) {
        self.weight_bytes += weight.bytes() as u64;
        self.loaded += bytes;
        (self.progress)(self.loaded, self.total);
    }
}

/// The error of a nested source keeps its sentence.
fn into_device_error(error: ModelError) -> DeviceError {
    match error {
        ModelError::Weight { source, .. } => source,
        other => DeviceError::Source { reason: other.to_string() },
    }
}

/// The type of a tensor in the file.
pub(super) fn file_type(tensor: &TensorInfo) -> Result<DType, ModelError> {
    tensor
        .dtype
        .ok_or_else(|| ModelError::Type { name: tensor.name.clone(), found: tensor.type_name().into() })
}

/// A tensor's bytes, read from the file as they are asked for.
struct FileRows<'a> {
    gguf: &'a Gguf,
    tensor: &'a TensorInfo,
}

impl RowSource for FileRows<'_> {
    fn len(&self) -> usize {
        self.tensor.bytes as usize
    }

    fn read(&self, offset: usize, out: &mut [u8]) -> Result<(), DeviceError> {
        self.gguf
            .read_part(self.tensor, offset as u64, out)
            .map_err(|error| DeviceError::Source { reason: error.to_string() })
    }
}
