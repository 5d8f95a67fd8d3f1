//! In which order neurons lie: those that fire most first.

use std::path::Path;

use super::source::{Layer, Source};
use super::{Additions, ConvertError};
use crate::gguf::{Gguf, TensorInfo};
use crate::shown::shown;
use crate::store::{StoreError, keys};

/// The name of the tensor that tells the position of each neuron of the source.
pub(super) fn perm_name(layer: usize) -> String {
    format!("blk.{layer}.ffn_perm")
}

fn count_name(layer: usize) -> String {
    format!("blk.{layer}.ffn_count")
}

/// For each expert of a layer, which neuron of the source lies at each position.
#[derive(Clone, Debug)]
pub(super) struct Order {
    /// Position to position in the source; none when nothing moves.
    pub from: Option<Vec<Vec<u32>>>,
    /// Original index to position, expert after expert: what `ffn_perm` holds.
    pub perm: Vec<u8>,
}

/// The orders of all layers.
pub(super) fn orders(
    source: &Source,
    counts: Option<&Path>,
    additions: &Additions,
) -> Result<Vec<Order>, ConvertError> {
    let counts = counts.map(Gguf::open_header).transpose()?;
    let always = match additions.pairs.get(keys::HOT_COUNT).or(source.pairs.get(keys::HOT_COUNT)) {
        Some(value) => value.unsigned().unwrap_or(0) as usize,
        None => 0,
    };
    let of = |(index, layer): (usize, &Layer)| {
        let counts = match &counts {
            Some(gguf) => Some(by_original(gguf, index, layer)?),
            None => added(source, additions, index, layer)?,
        };
        Ok(order(layer, counts, always))
    };
    source.layers.iter().enumerate().map(of).collect()
}

/// Sorts the neurons of a layer. `counts` has those of each expert by original index.
fn order(layer: &Layer, counts: Option<Vec<Vec<f32>>>, always: usize) -> Order {
    let identity: Vec<u32> = (0..layer.neurons as u32).collect();
    let mut from = Vec::new();
    let mut perm = Vec::new();
    for expert in 0..layer.experts.len() {
        let original = layer.original.as_ref().and_then(|all| all.get(expert)).unwrap_or(&identity);
        let mut order = identity.clone();
        let original_of = |position: u32| original.get(position as usize).copied().unwrap_or(0) as usize;
        if let Some(counts) = counts.as_ref().and_then(|all| all.get(expert)) {
            let count = |position: &u32| {
                let neuron = original_of(*position);
                let count = counts.get(neuron).copied().filter(|count| !count.is_nan());
                if neuron < always { f32::INFINITY } else { count.unwrap_or(0.0) }
            };
            // By original index first, so that equal counts lie as in the file that the model came from.
            order.sort_by_key(|position| original_of(*position));
            order.sort_by(|a, b| count(b).total_cmp(&count(a)));
        }
        let mut positions = vec![0u32; layer.neurons];
        for (position, neuron) in order.iter().map(|position| original_of(*position)).enumerate() {
            if let Some(slot) = positions.get_mut(neuron) {
                *slot = position as u32;
            }
        }
        perm.extend(positions.iter().flat_map(|position| position.to_le_bytes()));
        from.push(order);
    }
    let moved = from.iter().any(|order| *order != identity);
    Order { from: moved.then_some(from), perm }
}

/// For each expert, the original index of the neuron at each position of a store; none when it does not say.
pub(super) fn original(
    gguf: &Gguf,
    layer: usize,
    neurons: usize,
    experts: usize,
) -> Result<Option<Vec<Vec<u32>>>, ConvertError> {
    let Some(tensor) = gguf.tensor(&perm_name(layer)) else { return Ok(None) };
    let wrong = |reason: String| {
        let (file, tensor) = (gguf.shard_path(tensor).to_path_buf(), shown(&tensor.name));
        StoreError::Tensor { file, tensor, reason }
    };
    if tensor.type_name() != "I32" || tensor.elements() != neurons as u64 * experts as u64 {
        let (kind, dims) = (tensor.type_name(), &tensor.dims[..]);
        return Err(wrong(format!("is {kind} {dims:?}, where I32 [{neurons}, {experts}] is needed")).into());
    }
    let bytes = read(gguf, tensor)?;
    let mut all = Vec::new();
    for positions in bytes.as_chunks::<4>().0.chunks(neurons.max(1)) {
        let mut original = vec![u32::MAX; neurons];
        for (neuron, position) in positions.iter().enumerate() {
            let position = u32::from_le_bytes(*position) as usize;
            match original.get_mut(position).filter(|slot| **slot == u32::MAX) {
                Some(slot) => *slot = neuron as u32,
                None => {
                    return Err(wrong(format!(
                        "gives two neurons the position {position}, or one that is none"
                    ))
                    .into());
                }
            }
        }
        all.push(original);
    }
    Ok(Some(all))
}

/// The counts in a file, by original index: those in batches of one token.
fn by_original(gguf: &Gguf, index: usize, layer: &Layer) -> Result<Vec<Vec<f32>>, ConvertError> {
    let tensor = gguf.require(&count_name(index))?;
    let experts = layer.experts.len();
    let counts =
        first_column(&read(gguf, tensor)?, layer, tensor.type_name(), &tensor.dims).map_err(|reason| {
            let file = gguf.shard_path(tensor).to_path_buf();
            ConvertError::Tensor { file, tensor: shown(&tensor.name), reason }
        })?;
    let original = original(gguf, index, layer.neurons, experts)?;
    Ok(match original {
        None => counts,
        Some(original) => {
            counts.iter().zip(&original).map(|(counts, original)| scatter(counts, original)).collect()
        }
    })
}

/// The counts that are being added to a store, which are in the order of the source.
fn added(
    source: &Source,
    additions: &Additions,
    index: usize,
    layer: &Layer,
) -> Result<Option<Vec<Vec<f32>>>, ConvertError> {
    let name = count_name(index);
    let Some((tensor, bytes)) = additions.tensors.iter().find(|(tensor, _)| tensor.name == name) else {
        return Ok(None);
    };
    let kind = if tensor.type_id == 0 { "F32" } else { "another type" };
    let counts = first_column(bytes, layer, kind, &tensor.dims).map_err(|reason| ConvertError::Tensor {
        file: source.path.clone(),
        tensor: shown(&name),
        reason,
    })?;
    Ok(Some(match &layer.original {
        None => counts,
        Some(original) => {
            counts.iter().zip(original).map(|(counts, original)| scatter(counts, original)).collect()
        }
    }))
}

/// From the order of positions to that of original indices.
fn scatter(counts: &[f32], original: &[u32]) -> Vec<f32> {
    let mut out = vec![0.0; counts.len()];
    for (count, neuron) in counts.iter().zip(original) {
        if let Some(slot) = out.get_mut(*neuron as usize) {
            *slot = *count;
        }
    }
    out
}

/// Of each expert, the first of its rows of counts: those in batches of one token.
fn first_column(bytes: &[u8], layer: &Layer, kind: &str, dims: &[u64]) -> Result<Vec<Vec<f32>>, String> {
    let (neurons, experts) = (layer.neurons, layer.experts.len());
    let batches = dims.get(1).copied().unwrap_or(1) as usize;
    let elements = neurons.checked_mul(batches).and_then(|n| n.checked_mul(experts));
    let fits = kind == "F32" && dims.first() == Some(&(neurons as u64)) && elements == Some(bytes.len() / 4);
    if !fits || batches == 0 {
        return Err(format!("is {kind} {dims:?}, where F32 [{neurons}, 4, {experts}] is needed"));
    }
    let values = bytes.as_chunks::<4>().0;
    let of = |expert: usize| {
        let rows = values.iter().skip(expert * neurons * batches);
        rows.take(neurons).map(|value| f32::from_le_bytes(*value)).collect()
    };
    Ok((0..experts).map(of).collect())
}

fn read(gguf: &Gguf, tensor: &TensorInfo) -> Result<Vec<u8>, ConvertError> {
    let mut bytes = super::buffer(tensor.bytes)?;
    gguf.read_into(tensor, &mut bytes)?;
    Ok(bytes)
}
