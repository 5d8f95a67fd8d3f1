//! From a file's tensors to weights on devices.
//!
//! Every tensor that a model uses is asked for by name and shape; at the end, a tensor that nobody asked for is an
//! error, because a model that runs without one of its tensors gives wrong answers, not fewer. Weights are read by
//! positioned reads, piece by piece, into the device's own layout: a file that changes under a map cannot hurt them,
//! and no second copy is ever in memory (`exact` excepted, which expands each weight to F32 first).

use std::collections::HashSet;
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

/// Several matrices that share an input, on one device.
pub(crate) struct PlacedGroup<const N: usize> {
    pub device: Arc<dyn Device>,
    pub weights: [PreparedWeight; N],
}

/// Told how many of how many bytes are loaded.
pub type Progress<'a> = dyn FnMut(u64, u64) + 'a;

/// Loads the tensors of one file onto devices.
pub(crate) struct Loader<'a> {
    gguf: &'a Gguf,
    devices: &'a [Arc<dyn Device>],
    exact: bool,
    used: HashSet<String>,
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
        Loader { gguf, devices, exact, used: HashSet::new(), loaded: 0, total, weight_bytes: 0, progress }
    }

    /// Whether the file has the tensor.
    pub(crate) fn has(&self, name: &str) -> bool {
        self.gguf.tensor(name).is_some()
    }

    /// Declares a tensor used without loading it (the embedding stays in the map).
    pub(crate) fn keep(&mut self, name: &str, shape: &[usize]) -> Result<&'a TensorInfo, ModelError> {
        let tensor = self.gguf.require(name)?;
        if tensor.dims.iter().map(|d| *d as usize).ne(shape.iter().copied()) {
            return Err(ModelError::Shape {
                name: name.into(),
                found: format!("{:?}", &tensor.dims[..]),
                wanted: format!("{shape:?}"),
            });
        }
        self.used.insert(name.into());
        Ok(tensor)
    }

    /// A small tensor as numbers: a norm's weight, rotary factors.
    pub(crate) fn vector(&mut self, name: &str, len: usize) -> Result<Vec<f32>, ModelError> {
        let tensor = self.keep(name, &[len])?;
        let values = self.numbers(tensor)?;
        self.advance(tensor.bytes);
        Ok(values)
    }

    /// One matrix.
    pub(crate) fn matrix(&mut self, name: &str, rows: usize, cols: usize) -> Result<Placed, ModelError> {
        let PlacedGroup { device, weights: [weight] } = self.group([(name, rows)], cols)?;
        Ok(Placed { device, weight })
    }

    /// Matrices that share an input of `cols` channels, on the first device that can run all of them.
    pub(crate) fn group<const N: usize>(
        &mut self,
        matrices: [(&str, usize); N],
        cols: usize,
    ) -> Result<PlacedGroup<N>, ModelError> {
        let mut tensors = [None; N];
        for (slot, (name, rows)) in tensors.iter_mut().zip(matrices) {
            *slot = Some((self.keep(name, &[cols, rows])?, rows));
        }
        let tensors = tensors.map(|t| t.expect("every slot was filled"));
        let device = self.choose(
            matrices[0].0,
            &tensors.map(|(t, rows)| OpShape::Matmul { dtype: self.dtype(t), rows, cols, tokens: 1 }),
        )?;
        let mut weights = Vec::with_capacity(N);
        for (tensor, rows) in tensors {
            let weight = self.with_rows(tensor, |dtype, data| {
                device.prepare(WeightSource::Matrix(Matrix { dtype, rows, cols, data }), None)
            })?;
            weights.push(self.count(weight));
            self.advance(tensor.bytes);
        }
        let weights = weights.try_into().unwrap_or_else(|_| unreachable!("one weight per matrix"));
        Ok(PlacedGroup { device, weights })
    }

    /// All neurons of a feed-forward layer as one block.
    pub(crate) fn neurons(
        &mut self,
        names: [&str; 3],
        neurons: usize,
        width: usize,
    ) -> Result<Placed, ModelError> {
        let gate = self.keep(names[0], &[width, neurons])?;
        let up = self.keep(names[1], &[width, neurons])?;
        let down = self.keep(names[2], &[neurons, width])?;
        let op = OpShape::Cluster {
            stage: Stage::Fused,
            dtype: self.dtype(gate),
            down_dtype: self.dtype(down),
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
        let weight = self.count(weight);
        self.advance(gate.bytes + up.bytes + down.bytes);
        Ok(Placed { device, weight })
    }

    /// Refuses a file with tensors that the model did not ask for.
    pub(crate) fn finish(self, architecture: &str) -> Result<(), ModelError> {
        match self.gguf.tensors().iter().find(|t| !self.used.contains(&t.name)) {
            None => Ok(()),
            Some(t) => {
                Err(ModelError::UnusedTensor { name: t.name.clone(), architecture: architecture.into() })
            }
        }
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

    fn dtype(&self, tensor: &TensorInfo) -> DType {
        if self.exact { DType::F32 } else { file_type(tensor) }
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
        quant::dequantize_row(file_type(tensor), &raw, &mut values);
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
            use_rows(file_type(tensor), &FileRows { gguf: self.gguf, tensor })
        };
        result.map_err(|source| ModelError::Weight { name: tensor.name.clone(), source })
    }

    fn count(&mut self, weight: PreparedWeight) -> PreparedWeight {
        self.weight_bytes += weight.bytes() as u64;
        weight
    }

    fn advance(&mut self, bytes: u64) {
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

fn file_type(tensor: &TensorInfo) -> DType {
    tensor.dtype.expect("an opened file has only types that are known")
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
