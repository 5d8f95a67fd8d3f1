//! The first neurons of a store's layer as three matrices, for a unit that takes blocks.
//!
//! In a store a neuron's down weights are a row of their own; in a block they are a column. They are widened to F32 on the
//! way, because quantised blocks lie along rows, and the unit's driver chooses how to keep them.

use bytemuck::cast_slice;
use neuropil_device::{DType, Device, DeviceError, Matrix, PreparedWeight, WeightSource, quant};

use crate::gguf::{Gguf, TensorInfo};
use crate::store::Layout;

use super::ModelError;

/// Bytes of bundles that are read at a time.
const CHUNK: usize = 1 << 20;

/// Gate and up rows in one type, and down as a matrix of F32.
pub(super) struct HotRows {
    neurons: usize,
    width: usize,
    dtype: DType,
    gate: Vec<u8>,
    up: Vec<u8>,
    /// `[width, neurons]`.
    down: Vec<f32>,
}

impl HotRows {
    /// Reads the first `neurons` of `bundles`; gate and up are kept as they are or, for [`DType::F32`], widened.
    ///
    /// # Errors
    /// When they cannot be read, or there is no memory for them.
    pub fn read(
        gguf: &Gguf,
        bundles: &TensorInfo,
        layout: &Layout,
        neurons: usize,
        dtype: DType,
    ) -> Result<HotRows, ModelError> {
        let Layout { width, gate_type, down_type, stride, .. } = *layout;
        let out_of_memory =
            |bytes: usize| ModelError::OutOfMemory { what: bundles.name.clone(), bytes: bytes as u64 };
        let zeros = |bytes: usize| {
            let mut list = Vec::new();
            list.try_reserve_exact(bytes).map_err(|_| out_of_memory(bytes))?;
            list.resize(bytes, 0u8);
            Ok::<_, ModelError>(list)
        };
        let row_bytes = dtype
            .row_bytes(width)
            .ok_or_else(|| ModelError::GateWidth { name: bundles.name.clone(), dtype: dtype.to_string() })?;
        let (mut gate, mut up) = (zeros(neurons * row_bytes)?, zeros(neurons * row_bytes)?);
        let mut down = Vec::new();
        down.try_reserve_exact(neurons * width).map_err(|_| out_of_memory(4 * neurons * width))?;
        down.resize(neurons * width, 0f32);
        let mut values = vec![0f32; width];
        let per_read = (CHUNK / stride).clamp(1, neurons);
        let mut chunk = zeros(per_read * stride)?;
        let gate_row = quant::bundle_row_bytes(gate_type, width).unwrap_or(0);
        let down_row = quant::bundle_row_bytes(down_type, width).unwrap_or(0);
        for start in (0..neurons).step_by(per_read) {
            let end = neurons.min(start + per_read);
            let chunk = &mut chunk[..(end - start) * stride];
            gguf.read_part(bundles, layout.run(start..end).start, chunk)?;
            for (bundle, neuron) in chunk.chunks_exact(stride).zip(start..) {
                for (at, to) in [(0, &mut gate), (layout.gate_bytes, &mut up)] {
                    let (row, out) = (&bundle[at..][..gate_row], &mut to[neuron * row_bytes..][..row_bytes]);
                    if dtype == gate_type {
                        quant::unbundle_row(dtype, width, row, out);
                    } else {
                        quant::dequantize_bundle_row(gate_type, row, &mut values);
                        out.copy_from_slice(cast_slice(&values));
                    }
                }
                quant::dequantize_bundle_row(down_type, &bundle[layout.down_at..][..down_row], &mut values);
                let column = down.iter_mut().skip(neuron).step_by(neurons);
                column.zip(&values).for_each(|(place, value)| *place = *value);
            }
        }
        Ok(HotRows { neurons, width, dtype, gate, up, down })
    }

    /// The block on a device.
    ///
    /// # Errors
    /// The device's.
    pub fn prepare(&self, device: &dyn Device) -> Result<PreparedWeight, DeviceError> {
        let HotRows { neurons, width, dtype, .. } = *self;
        let (gate, up): (&[u8], &[u8]) = (&self.gate, &self.up);
        let down: &[u8] = cast_slice(&self.down);
        device.prepare(
            WeightSource::Neurons {
                gate: Matrix { dtype, rows: neurons, cols: width, data: &gate },
                up: Matrix { dtype, rows: neurons, cols: width, data: &up },
                down: Matrix { dtype: DType::F32, rows: width, cols: neurons, data: &down },
            },
            None,
        )
    }
}
