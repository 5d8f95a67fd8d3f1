//! The constant part of a layer as one matrix: M = Σ c_i d_i u_iᵀ.
//!
//! With the constants in the up rows it is a product of two matrices, which the device multiplies: as many floating-point
//! operations as a few thousand tokens of prefill.

use std::sync::Arc;

use neuropil_device::{Buffer, DType, Device, MatmulJob, Matrix, Product, WeightSource, quant};

use crate::gguf::{Gguf, TensorInfo};
use crate::store::Layout;
use crate::submit::Jobs;

use super::CalibrateError;
use super::memory::zeros;

/// Rows of the result that are computed at a time.
const ROWS: usize = 256;
/// Bytes of bundles that are read at a time.
const CHUNK: usize = 1 << 20;

/// The up and down rows of a layer or expert, `[neurons, width]` each.
pub(super) struct UpDown {
    layout: Layout,
    up: Vec<f32>,
    down: Vec<f32>,
}

impl UpDown {
    /// Reads and widens the rows.
    pub(super) fn read(gguf: &Gguf, bundles: &TensorInfo, layout: Layout) -> Result<UpDown, CalibrateError> {
        let [up, down] = [Row::Up, Row::Down].map(|row| rows(gguf, bundles, &layout, row));
        Ok(UpDown { layout, up: up?, down: down? })
    }

    /// What each neuron's gate is worth: the size of its down row times that of its up value for a normed input.
    pub(super) fn weight(&self) -> Vec<f32> {
        let size = |rows: &[f32]| rows.iter().map(|x| x * x).sum::<f32>().sqrt();
        let width = self.layout.width;
        self.up
            .chunks_exact(width)
            .zip(self.down.chunks_exact(width))
            .map(|(u, d)| size(u) * size(d))
            .collect()
    }

    /// M of these constants, row after row.
    pub(super) fn fold(
        mut self,
        device: &Arc<dyn Device>,
        center: &[f32],
    ) -> Result<Vec<f32>, CalibrateError> {
        let Layout { width, neurons, .. } = self.layout;
        for (row, center) in self.up.chunks_exact_mut(width).zip(center) {
            row.iter_mut().for_each(|u| *u *= center);
        }
        // The device multiplies rows with inputs: rows are those of M's columns' sums, Σ_i d_i[r] x[i].
        let down = transposed(&self.down, neurons, width)?;
        self.down = Vec::new();
        let rows: &[u8] = bytemuck::cast_slice(&down);
        let matrix = Matrix { dtype: DType::F32, rows: width, cols: neurons, data: &rows };
        let weight = device.prepare(WeightSource::Matrix(matrix), None)?;
        drop(down);
        let up = transposed(&self.up, neurons, width)?;
        self.up = Vec::new();
        let mut jobs = Jobs::default();
        let mut fold = zeros::<f32>(width * width)?;
        let (x, y) = (Buffer::host(4 * ROWS * neurons)?, Buffer::host(4 * ROWS * width)?);
        for (columns, start) in up.chunks(ROWS * neurons).zip((0..width).step_by(ROWS)) {
            let count = columns.len() / neurons;
            x.write()?.slice_mut::<f32>()[..columns.len()].copy_from_slice(columns);
            let product = Product { weight: weight.clone(), y: y.write()?, accumulate: false };
            jobs.matmul(&**device, MatmulJob::new(count, x.read()?).with(product))?;
            let y = y.read()?;
            for (column, values) in y.slice::<f32>().chunks_exact(width).take(count).enumerate() {
                values.iter().enumerate().for_each(|(row, v)| fold[row * width + start + column] = *v);
            }
        }
        Ok(fold)
    }
}

/// One of a neuron's rows.
#[derive(Clone, Copy)]
pub(super) enum Row {
    Gate,
    Up,
    Down,
}

/// Reads a row of each neuron of a layer or expert, widened, `[neurons, width]`.
pub(super) fn rows(
    gguf: &Gguf,
    bundles: &TensorInfo,
    layout: &Layout,
    row: Row,
) -> Result<Vec<f32>, CalibrateError> {
    let (dtype, at) = match row {
        Row::Gate => (layout.gate_type, 0),
        Row::Up => (layout.gate_type, layout.gate_bytes),
        Row::Down => (layout.down_type, layout.down_at),
    };
    let bytes = quant::bundle_row_bytes(dtype, layout.width).unwrap_or(0);
    let mut values = zeros::<f32>(layout.neurons * layout.width)?;
    let per_read = (CHUNK / layout.stride).clamp(1, layout.neurons.max(1));
    let mut chunk = zeros::<u8>(per_read * layout.stride)?;
    for (start, values) in
        (0..layout.neurons).step_by(per_read).zip(values.chunks_mut(per_read * layout.width))
    {
        let end = layout.neurons.min(start + per_read);
        let chunk = &mut chunk[..(end - start) * layout.stride];
        gguf.read_part(bundles, layout.run(start..end).start, chunk)?;
        let pairs = chunk.chunks_exact(layout.stride).zip(values.chunks_exact_mut(layout.width));
        pairs.for_each(|(bundle, out)| quant::dequantize_bundle_row(dtype, &bundle[at..][..bytes], out));
    }
    Ok(values)
}

/// `[rows, cols]` as `[cols, rows]`, in tiles that fit a cache.
fn transposed(from: &[f32], rows: usize, cols: usize) -> Result<Vec<f32>, CalibrateError> {
    const TILE: usize = 32;
    let mut to = zeros::<f32>(from.len())?;
    for top in (0..rows).step_by(TILE) {
        for left in (0..cols).step_by(TILE) {
            for row in top..rows.min(top + TILE) {
                for col in left..cols.min(left + TILE) {
                    to[col * rows + row] = from[row * cols + col];
                }
            }
        }
    }
    Ok(to)
}
