//! The bytes of weights in a model's file, to be read as often as somebody needs them.
//!
//! Weights are read by positioned reads, piece by piece, into the device's own layout: a file that changes under a map
//! cannot hurt them, and no second copy is ever in memory (`exact` excepted, which expands each weight to F32 first).
//! What is read for one unit when a model is loaded may be read again for another one, when the first is taken out.

use std::sync::Arc;

use neuropil_device::{DType, Device, DeviceError, Matrix, PreparedWeight, RowSource, WeightSource, quant};

use crate::gguf::{Gguf, TensorInfo};

use super::ModelError;

/// A tensor, or what one expert has of a tensor that holds the matrices of all experts.
#[derive(Clone)]
pub(crate) struct Part {
    gguf: Arc<Gguf>,
    tensor: TensorInfo,
    /// Which of how many equal parts: whole rows each.
    index: u64,
    of: u64,
    /// Widened to F32.
    exact: bool,
}

impl Part {
    /// All of a tensor, or part `index` of `of`.
    ///
    /// # Errors
    /// When the file has no such tensor.
    pub fn new(
        gguf: &Arc<Gguf>,
        name: &str,
        (index, of): (usize, usize),
        exact: bool,
    ) -> Result<Part, ModelError> {
        let tensor = gguf.require(name)?.clone();
        Ok(Part { gguf: gguf.clone(), tensor, index: index as u64, of: of as u64, exact })
    }

    /// Bytes in the file.
    pub fn bytes(&self) -> u64 {
        self.tensor.bytes / self.of
    }

    /// The type that it is multiplied in.
    ///
    /// # Errors
    /// [`ModelError::Type`].
    pub fn dtype(&self) -> Result<DType, ModelError> {
        if self.exact { Ok(DType::F32) } else { file_type(&self.tensor) }
    }

    /// As numbers.
    ///
    /// # Errors
    /// When they cannot be read, or there is no memory for them.
    pub fn numbers(&self) -> Result<Vec<f32>, ModelError> {
        let out_of_memory = |bytes: u64| ModelError::OutOfMemory { what: self.tensor.name.clone(), bytes };
        let elements = (self.tensor.elements() / self.of) as usize;
        let mut raw = Vec::new();
        raw.try_reserve_exact(self.bytes() as usize).map_err(|_| out_of_memory(self.bytes()))?;
        raw.resize(self.bytes() as usize, 0);
        self.gguf.read_part(&self.tensor, self.index * self.bytes(), &mut raw)?;
        let mut values = Vec::new();
        values.try_reserve_exact(elements).map_err(|_| out_of_memory(4 * elements as u64))?;
        values.resize(elements, 0.0);
        quant::dequantize_row(file_type(&self.tensor)?, &raw, &mut values);
        Ok(values)
    }

    /// Calls `use_rows` with the type and the bytes.
    ///
    /// # Errors
    /// Those of `use_rows`, with the tensor's name.
    pub fn with_rows<R>(
        &self,
        use_rows: impl FnOnce(DType, &dyn RowSource) -> Result<R, DeviceError>,
    ) -> Result<R, ModelError> {
        let result = if self.exact {
            let values = self.numbers()?;
            use_rows(DType::F32, &bytemuck::cast_slice::<f32, u8>(&values))
        } else {
            use_rows(file_type(&self.tensor)?, self)
        };
        result.map_err(|source| ModelError::Weight { name: self.tensor.name.clone(), source })
    }

    /// The matrix, prepared by a device.
    ///
    /// # Errors
    /// The device's, with the tensor's name.
    pub fn matrix(
        &self,
        device: &dyn Device,
        rows: usize,
        cols: usize,
    ) -> Result<PreparedWeight, ModelError> {
        self.with_rows(|dtype, data| {
            device.prepare(WeightSource::Matrix(Matrix { dtype, rows, cols, data }), None)
        })
    }
}

impl RowSource for Part {
    fn len(&self) -> usize {
        self.bytes() as usize
    }

    fn read(&self, offset: usize, out: &mut [u8]) -> Result<(), DeviceError> {
        let inside = offset.checked_add(out.len()).is_some_and(|end| end <= self.len());
        if !inside {
            return Err(DeviceError::Source { reason: "the weight is too short".into() });
        }
        self.gguf
            .read_part(&self.tensor, self.index * self.bytes() + offset as u64, out)
            .map_err(|error| DeviceError::Source { reason: error.to_string() })
    }
}

/// Gate, up and down as one block of neurons, prepared by a device.
///
/// # Errors
/// The device's, with a tensor's name.
pub(crate) fn block(
    [gate, up, down]: &[Part; 3],
    device: &dyn Device,
    neurons: usize,
    width: usize,
) -> Result<PreparedWeight, ModelError> {
    gate.with_rows(|gate_type, gate_rows| {
        up.with_rows(|up_type, up_rows| {
            down.with_rows(|down_type, down_rows| {
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
    })
}

/// A device's error keeps its kind, and another one its sentence.
pub(crate) fn into_device_error(error: ModelError) -> DeviceError {
    match error {
        ModelError::Weight { source, .. } => source,
        other => DeviceError::Source { reason: other.to_string() },
    }
}

/// The type of a tensor in the file.
pub(crate) fn file_type(tensor: &TensorInfo) -> Result<DType, ModelError> {
    tensor
        .dtype
        .ok_or_else(|| ModelError::Type { name: tensor.name.clone(), found: tensor.type_name().into() })
}
