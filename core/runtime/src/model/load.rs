//! From a file's tensors to weights on devices.
//!
//! The file's directory was checked before (see [`super::check`]), so what is left to go wrong is reading and memory.
//! Weights are read by positioned reads, piece by piece, into the device's own layout: a file that changes under a map
//! cannot hurt them, and no second copy is ever in memory (`exact` excepted, which expands each weight to F32 first).

use std::sync::Arc;

use neuropil_device::{
    DType, Device, DeviceError, HostOps, Matrix, OpShape, PreparedWeight, RowSource, Stage, Support,
    WeightSource, quant,
};

use crate::gguf::{Gguf, TensorInfo};
use crate::pipeline::Storage;
use crate::predict::{MakePredictor, Prediction};
use crate::submit::Placed;

use super::ModelError;
use super::ffn::Ffn;
use super::kv::KvType;
use super::load_neurons::StoreView;
use super::load_storage::StorageOptions;

/// Three matrices that share an input, on one device.
pub(crate) struct PlacedTrio {
    pub device: Arc<dyn Device>,
    pub weights: [PreparedWeight; 3],
}

/// A tensor, or what one expert has of a tensor that holds the matrices of all experts.
#[derive(Clone, Copy)]
struct Part<'t> {
    tensor: &'t TensorInfo,
    /// Which of how many equal parts: whole rows each.
    index: u64,
    of: u64,
}

impl<'t> Part<'t> {
    fn whole(tensor: &'t TensorInfo) -> Part<'t> {
        Part { tensor, index: 0, of: 1 }
    }

    fn bytes(&self) -> u64 {
        self.tensor.bytes / self.of
    }

    /// Where it begins in the tensor.
    fn start(&self) -> u64 {
        self.index * self.bytes()
    }
}

/// How a model is loaded.
#[derive(Clone, Default)]
pub(crate) struct LoadOptions {
    /// Weights widened to F32, activations not quantised.
    pub exact: bool,
    /// Who chooses neurons.
    pub prediction: Prediction,
    /// Makes the predictors of [`Prediction::Custom`].
    pub predictors: Option<MakePredictor>,
    /// Bytes that the process may take.
    pub memory: Option<u64>,
    /// The longest context that will be asked for, and the precision of its keys and values.
    pub context: Option<usize>,
    pub kv: KvType,
    /// Leave neurons in the file's map.
    pub mapped: bool,
    /// How neurons are kept that do not fit.
    pub storage: StorageOptions,
}

/// Told how many of how many bytes are loaded.
pub type Progress<'a> = dyn FnMut(u64, u64) + 'a;

/// Loads the tensors of one file onto devices.
pub(crate) struct Loader<'a> {
    pub(super) gguf: &'a Arc<Gguf>,
    devices: &'a [Arc<dyn Device>],
    pub(super) exact: bool,
    /// Whether neurons stay in the file's map.
    pub(super) mapped: bool,
    loaded: u64,
    total: u64,
    /// Bytes of prepared weights so far.
    pub weight_bytes: u64,
    progress: &'a mut Progress<'a>,
    /// The store that the file is, if it is one.
    store: Option<Arc<StoreView>>,
    /// Where its neurons are, if they are not all in memory.
    pub(super) storage: Option<Arc<Storage>>,
    /// Makes predictors that the app brings.
    pub(super) predictors: Option<MakePredictor>,
    pub(super) ops: Arc<dyn HostOps>,
}

impl<'a> Loader<'a> {
    pub(crate) fn new(
        gguf: &'a Arc<Gguf>,
        devices: &'a [Arc<dyn Device>],
        ops: &Arc<dyn HostOps>,
        options: &LoadOptions,
        store: Option<Arc<StoreView>>,
        storage: Option<Arc<Storage>>,
        progress: &'a mut Progress<'a>,
    ) -> Loader<'a> {
        let read = |tensor: &&TensorInfo| storage.is_none() || !tensor.name.contains(".ffn_bundle.");
        let total = gguf.tensors().iter().filter(read).map(|t| t.bytes).sum();
        Loader {
            gguf,
            devices,
            exact: options.exact,
            mapped: options.mapped,
            predictors: options.predictors.clone(),
            ops: ops.clone(),
            loaded: 0,
            total,
            weight_bytes: 0,
            progress,
            store,
            storage,
        }
    }

    /// A small tensor as numbers: a norm's weight, rotary factors.
    pub(crate) fn vector(&mut self, name: &str) -> Result<Vec<f32>, ModelError> {
        let tensor = self.gguf.require(name)?;
        self.loaded += tensor.bytes;
        self.numbers(Part::whole(tensor))
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

    /// The feed-forward of a layer, or of one of its experts, `expert` saying which of how many: out of the store, or
    /// the three matrices as one block. In a model file the matrices of all experts lie one after the other in each
    /// tensor.
    pub(crate) fn ffn(
        &mut self,
        layer: usize,
        expert: Option<(usize, usize)>,
        names: [&str; 3],
        neurons: usize,
        width: usize,
    ) -> Result<Ffn, ModelError> {
        match self.store.clone() {
            Some(view) => {
                let expert = expert.map(|(index, _)| index);
                Ok(Ffn::Neurons(Box::new(self.store_neurons(&view, layer, expert)?)))
            }
            None => Ok(Ffn::Block(self.neurons(expert.unwrap_or((0, 1)), names, neurons, width)?)),
        }
    }

    /// All neurons of a feed-forward layer as one block, or those of part `index` of `of`.
    fn neurons(
        &mut self,
        (index, of): (usize, usize),
        names: [&str; 3],
        neurons: usize,
        width: usize,
    ) -> Result<Placed, ModelError> {
        let [gate, up, down] = names;
        let part = |name| -> Result<Part<'a>, ModelError> {
            Ok(Part { tensor: self.gguf.require(name)?, index: index as u64, of: of as u64 })
        };
        let (gate, up, down) = (part(gate)?, part(up)?, part(down)?);
        let op = OpShape::Cluster {
            stage: Stage::Fused,
            dtype: self.dtype(gate.tensor)?,
            down_dtype: self.dtype(down.tensor)?,
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
        self.advance(&weight, gate.bytes() + up.bytes() + down.bytes());
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
        let weight = self.with_rows(Part::whole(tensor), |dtype, data| {
            device.prepare(WeightSource::Matrix(Matrix { dtype, rows, cols, data }), None)
        })?;
        self.advance(&weight, tensor.bytes);
        Ok(weight)
    }

    pub(super) fn choose(&self, name: &str, ops: &[OpShape]) -> Result<Arc<dyn Device>, ModelError> {
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

    fn numbers(&self, part: Part<'_>) -> Result<Vec<f32>, ModelError> {
        let out_of_memory = |bytes: u64| ModelError::OutOfMemory { what: part.tensor.name.clone(), bytes };
        let elements = (part.tensor.elements() / part.of) as usize;
        let mut raw = Vec::new();
        raw.try_reserve_exact(part.bytes() as usize).map_err(|_| out_of_memory(part.bytes()))?;
        raw.resize(part.bytes() as usize, 0);
        self.gguf.read_part(part.tensor, part.start(), &mut raw)?;
        let mut values = Vec::new();
        values.try_reserve_exact(elements).map_err(|_| out_of_memory(4 * elements as u64))?;
        values.resize(elements, 0.0);
        quant::dequantize_row(file_type(part.tensor)?, &raw, &mut values);
        Ok(values)
    }

    fn with_rows<R>(
        &self,
        part: Part<'_>,
        use_rows: impl FnOnce(DType, &dyn RowSource) -> Result<R, DeviceError>,
    ) -> Result<R, ModelError> {
        let result = if self.exact {
            let values = self.numbers(part)?;
            use_rows(DType::F32, &bytemuck::cast_slice::<f32, u8>(&values))
        } else {
            use_rows(file_type(part.tensor)?, &FileRows { gguf: self.gguf, part })
        };
        result.map_err(|source| ModelError::Weight { name: part.tensor.name.clone(), source })
    }

    fn advance(&mut self, weight: &PreparedWeight, bytes: u64) {
        self.count(weight.bytes() as u64, bytes);
    }

    /// Counts memory that was taken, and bytes of the file that were read.
    pub(super) fn count(&mut self, memory: u64, bytes: u64) {
        self.weight_bytes += memory;
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

/// The bytes of a tensor or of a part of it, read from the file as they are asked for.
struct FileRows<'a> {
    gguf: &'a Gguf,
    part: Part<'a>,
}

impl RowSource for FileRows<'_> {
    fn len(&self) -> usize {
        self.part.bytes() as usize
    }

    fn read(&self, offset: usize, out: &mut [u8]) -> Result<(), DeviceError> {
        let inside = offset.checked_add(out.len()).is_some_and(|end| end <= self.len());
        if !inside {
            return Err(DeviceError::Source { reason: "the weight is too short".into() });
        }
        self.gguf
            .read_part(self.part.tensor, self.part.start() + offset as u64, out)
            .map_err(|error| DeviceError::Source { reason: error.to_string() })
    }
}
