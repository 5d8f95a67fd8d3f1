//! The first neurons of a store's layer as a block of three matrices, on a unit that takes blocks.
//!
//! In a store a neuron's down weights are a row of their own; in a block they are a column. They are widened to F32 on the
//! way, because quantised blocks lie along rows, and the unit's driver chooses how to keep them.

use bytemuck::cast_slice;
use neuropil_device::{
    DType, Device, DeviceError, Matrix, OpShape, PreparedWeight, Stage, WeightSource, quant,
};

use crate::gguf::{Gguf, TensorInfo};
use crate::predict::Prediction;
use crate::sched::{Asked, HotBlock, Recipe};
use crate::store::Layout;

use super::ModelError;
use super::load::{Loader, not_placed};
use super::load_neurons::{Place, StoreView};
use super::load_storage;
use super::source::into_device_error;

/// Bytes of bundles that are read at a time.
const CHUNK: usize = 1 << 20;

/// Hot neurons are a multiple of it: the columns of their down matrix are whole groups of every scheme.
const HOT_STEP: usize = 32;

impl Loader<'_> {
    /// The neurons that fire most as a block on another unit, if there is one that takes them.
    pub(super) fn hot_block(
        &mut self,
        view: &StoreView,
        (layer, expert): Place,
        bundles: &TensorInfo,
    ) -> Result<Option<HotBlock>, ModelError> {
        // Constants stand in for neurons that thresholds leave out, which a block knows nothing of.
        if self.units.home() == 0 || view.prediction() == Prediction::Threshold {
            return Ok(None);
        }
        let Some(of) = view.store.layers.get(layer) else { return Ok(None) };
        let (layout, exact) = (of.layout, self.exact);
        let count = match view.prediction() {
            Prediction::Off | Prediction::Auto => layout.neurons,
            _ => load_storage::often(self.gguf, of, (layer, expert.unwrap_or(0)))?
                .max(view.hot().min(layout.neurons)),
        };
        let count = count / HOT_STEP * HOT_STEP;
        if count == 0 {
            return Ok(None);
        }
        let width = layout.width;
        let dtype = if exact { DType::F32 } else { layout.gate_type };
        let shape = OpShape::Cluster {
            stage: Stage::Fused,
            dtype,
            down_dtype: DType::F32,
            neurons: count,
            width,
            tokens: 1,
            bundles: false,
        };
        let (gguf, tensor) = (self.gguf.clone(), bundles.clone());
        let recipe: Recipe = Box::new(move |device| {
            let block = HotRows::read(&gguf, &tensor, &layout, count, dtype).map_err(into_device_error)?;
            Ok(vec![block.prepare(device)?])
        });
        let asked = Asked { op: "hot neurons", dtype, shapes: &[shape] };
        let placed = HotBlock::place(&self.units, (count, width), &asked, &recipe);
        let placed = placed.map_err(|refused| not_placed(refused, &bundles.name, dtype))?;
        if let Some(block) = &placed {
            self.count(block.bytes(), 0);
            self.extra_bytes = self.extra_bytes.saturating_add(block.bytes());
            self.has_hot_blocks = true;
        }
        Ok(placed)
    }
}

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
