//! The dense twin of a store: the same weights as a stock file, so that any program can run them.
//!
//! Gate and up get their blocks back, with the same bits. Down rows become columns again; a block of them would run the
//! wrong way, so they are widened, which is exact.

use std::path::Path;

use neuropil_device::{DType, quant};

use super::plan::layer_of;
use super::{ConvertError, buffer};
use crate::gguf::{Gguf, GgufWriter, NewTensor, Pairs, TensorInfo, tensor_id};
use crate::store::{Store, StoreLayer, keys};

/// Bytes of the columns that are put together at once.
const COLUMNS: usize = 96 << 20;
/// Bytes that are read or written at once.
const PIECE: usize = 4 << 20;
/// The alignment of ordinary files.
const ALIGNMENT: u32 = 32;

/// Writes the dense twin of the store at `store` to `out`. `progress` is told the bytes written and their sum, and says
/// whether to go on. Returns the size of the file.
///
/// # Errors
/// [`ConvertError`]; nothing is left behind.
pub fn twin(
    store: &Path,
    out: &Path,
    progress: &mut dyn FnMut(u64, u64) -> bool,
) -> Result<u64, ConvertError> {
    let gguf = Gguf::open_header(store)?;
    let layers = Store::read(&gguf)?.layers;
    let mut pairs = Pairs::from(gguf.metadata());
    pairs.retain(|key| !keys::of_store(key));
    let kept: Vec<&TensorInfo> =
        gguf.tensors().iter().filter(|tensor| !is_of_neurons(&tensor.name)).collect();
    let mut tensors: Vec<NewTensor> =
        kept.iter().map(|t| NewTensor::new(t.name.clone(), t.type_id, t.dims.to_vec())).collect();
    for (index, layer) in layers.iter().enumerate() {
        tensors.extend(matrices(index, layer));
    }
    let mut writer = GgufWriter::create(out, &pairs, ALIGNMENT, &tensors, false)?;
    let total = writer.file_bytes();
    let mut written = 0;
    let mut put = |writer: &mut GgufWriter, bytes: &[u8]| {
        for piece in bytes.chunks(PIECE) {
            writer.write(piece)?;
            written += piece.len() as u64;
            if !progress(written, total) {
                return Err(ConvertError::Cancelled);
            }
        }
        Ok(())
    };
    let mut piece = buffer(PIECE as u64)?;
    for tensor in kept {
        writer.begin(&tensor.name)?;
        let mut at = 0;
        while at < tensor.bytes {
            let take = (tensor.bytes - at).min(PIECE as u64);
            let piece = piece.get_mut(..take as usize).unwrap_or_default();
            gguf.read_part(tensor, at, piece)?;
            put(&mut writer, piece)?;
            at += take;
        }
    }
    for (index, layer) in layers.iter().enumerate() {
        let [gate, up, down] = matrices(index, layer);
        for (matrix, at) in [(gate, 0), (up, layer.layout.gate_bytes)] {
            writer.begin(&matrix.name)?;
            for bundles in &layer.bundles {
                rows(&gguf, layer, bundles, at, &mut |bytes| put(&mut writer, bytes))?;
            }
        }
        writer.begin(&down.name)?;
        for bundles in &layer.bundles {
            columns(&gguf, layer, bundles, &mut |bytes| put(&mut writer, bytes))?;
        }
    }
    Ok(writer.finish()?)
}

/// Whether a tensor holds neurons, or something about them that only a store has.
fn is_of_neurons(name: &str) -> bool {
    let part = layer_of(name).and_then(|_| name.splitn(3, '.').nth(2)).unwrap_or_default();
    let begins = ["ffn_bundle.", "ffn_perm", "ffn_count", "ffn_center", "ffn_fold.", "fc1.", "fc2."];
    begins.iter().any(|begin| part.starts_with(begin))
}

/// The type of the down matrix: what holds its rows exactly.
fn down_type(layer: &StoreLayer) -> DType {
    match layer.layout.down_type {
        float @ (DType::F16 | DType::BF16) => float,
        _ => DType::F32,
    }
}

/// The gate, up and down matrices of a layer.
fn matrices(index: usize, layer: &StoreLayer) -> [NewTensor; 3] {
    let layout = layer.layout;
    let (width, neurons) = (layout.width as u64, layout.neurons as u64);
    let matrix = |part: &str, dtype: DType, cols: u64, rows: u64| {
        let mut dims = vec![cols, rows];
        if layer.numbered {
            dims.push(layer.bundles.len() as u64);
        }
        let exps = if layer.numbered { "_exps" } else { "" };
        NewTensor::new(format!("blk.{index}.ffn_{part}{exps}.weight"), tensor_id(dtype), dims)
    };
    [
        matrix("gate", layout.gate_type, width, neurons),
        matrix("up", layout.gate_type, width, neurons),
        matrix("down", down_type(layer), neurons, width),
    ]
}

type Put<'a> = dyn FnMut(&[u8]) -> Result<(), ConvertError> + 'a;

/// Writes the rows that begin at `at` of each bundle, as a file has them.
fn rows(
    gguf: &Gguf,
    layer: &StoreLayer,
    bundles: &TensorInfo,
    at: usize,
    put: &mut Put<'_>,
) -> Result<(), ConvertError> {
    let layout = layer.layout;
    let (stride, dtype, width) = (layout.stride, layout.gate_type, layout.width);
    let bundled = quant::bundle_row_bytes(dtype, width).unwrap_or(0);
    let row_bytes = dtype.row_bytes(width).unwrap_or(0);
    let most = (PIECE / stride).max(1);
    let mut read = buffer((most * stride) as u64)?;
    let mut out = buffer((most * row_bytes) as u64)?;
    for start in (0..layout.neurons).step_by(most) {
        let count = most.min(layout.neurons - start);
        let piece = read.get_mut(..count * stride).unwrap_or_default();
        gguf.read_part(bundles, (start * stride) as u64, piece)?;
        for (bundle, out) in piece.chunks_exact(stride).zip(out.chunks_exact_mut(row_bytes)) {
            let Some(row) = bundle.get(at..at + bundled) else { break };
            quant::unbundle_row(dtype, width, row, out);
        }
        put(out.get(..count * row_bytes).unwrap_or_default())?;
    }
    Ok(())
}

/// Writes the down rows of all neurons as columns.
fn columns(
    gguf: &Gguf,
    layer: &StoreLayer,
    bundles: &TensorInfo,
    put: &mut Put<'_>,
) -> Result<(), ConvertError> {
    let layout = layer.layout;
    let (stride, width, neurons) = (layout.stride, layout.width, layout.neurons);
    let to = down_type(layer);
    let size = to.block_bytes();
    let row_bytes = quant::bundle_row_bytes(layout.down_type, width).unwrap_or(0);
    let most = (COLUMNS / (neurons * size)).clamp(1, width);
    let mut out = buffer((most * neurons * size) as u64)?;
    let per_read = (PIECE / stride).max(1);
    let mut read = buffer((per_read * stride) as u64)?;
    let mut wide = vec![0.0; width];
    let mut exact = buffer((width * size) as u64)?;
    for first in (0..width).step_by(most) {
        let count = most.min(width - first);
        for start in (0..neurons).step_by(per_read) {
            let take = per_read.min(neurons - start);
            let piece = read.get_mut(..take * stride).unwrap_or_default();
            gguf.read_part(bundles, (start * stride) as u64, piece)?;
            for (i, bundle) in piece.chunks_exact(stride).enumerate() {
                let Some(row) = bundle.get(layout.down_at..layout.down_at + row_bytes) else { break };
                if layout.down_type == to {
                    exact.copy_from_slice(row);
                } else {
                    quant::dequantize_bundle_row(layout.down_type, row, &mut wide);
                    quant::quantize_row(to, &wide, &mut exact);
                }
                let elements = exact.chunks_exact(size).skip(first).take(count);
                for (element, out) in elements.zip(out.chunks_exact_mut(neurons * size)) {
                    if let Some(out) = out.get_mut((start + i) * size..(start + i + 1) * size) {
                        out.copy_from_slice(element);
                    }
                }
            }
        }
        put(out.get(..count * neurons * size).unwrap_or_default())?;
    }
    Ok(())
}
