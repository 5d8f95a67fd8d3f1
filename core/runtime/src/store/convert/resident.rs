//! Copies the tensors that are not bundles. Those over the neurons of a layer come out in the order of the store.

use super::order::Order;
use super::plan::layer_of;
use super::source::{Content, Resident, Source};
use super::{ConvertError, buffer};
use crate::gguf::GgufWriter;
use crate::shown::shown;

/// Bytes that are copied at once.
const PIECE: usize = 4 << 20;

/// Writes one tensor; `tick` is told the bytes of each piece.
pub(super) fn write(
    source: &Source,
    orders: &[Order],
    tensor: &Resident,
    writer: &mut GgufWriter,
    tick: &mut dyn FnMut(u64) -> Result<(), ConvertError>,
) -> Result<(), ConvertError> {
    writer.begin(&tensor.name)?;
    if let Some((layer, expert)) = over_neurons(&tensor.name)
        && let Some(from) = orders.get(layer).and_then(|order| order.from.as_ref())
    {
        let neurons = source.layers.get(layer).map_or(0, |layer| layer.neurons);
        let bytes = sorted(&all(source, tensor)?, &tensor.name, neurons, from, expert).ok_or_else(|| {
            let reason =
                format!("is {:?}, which does not fit the {neurons} neurons of its layer", tensor.dims);
            ConvertError::Tensor { file: source.path.clone(), tensor: shown(&tensor.name), reason }
        })?;
        writer.write(&bytes)?;
        return tick(bytes.len() as u64);
    }
    match &tensor.content {
        Content::Owned(bytes) => {
            writer.write(bytes)?;
            tick(bytes.len() as u64)
        }
        Content::Turning { rows, heads, .. } => {
            let bytes = turned(&all(source, tensor)?, *rows, *heads)?;
            writer.write(&bytes)?;
            tick(bytes.len() as u64)
        }
        Content::Blob(blob) => {
            let mut piece = buffer((PIECE as u64).min(blob.bytes))?;
            let mut at = 0;
            while at < blob.bytes {
                let take = (blob.bytes - at).min(PIECE as u64);
                let piece = piece.get_mut(..take as usize).unwrap_or_default();
                source.bytes.read(*blob, at, piece)?;
                writer.write(piece)?;
                at += take;
                tick(take)?;
            }
            Ok(())
        }
    }
}

fn all(source: &Source, tensor: &Resident) -> Result<Vec<u8>, ConvertError> {
    match &tensor.content {
        Content::Owned(bytes) => Ok(bytes.clone()),
        Content::Blob(blob) | Content::Turning { blob, .. } => {
            let mut bytes = buffer(blob.bytes)?;
            source.bytes.read(*blob, 0, &mut bytes)?;
            Ok(bytes)
        }
    }
}

/// The rows of each head: those of its first and its second half in turn.
fn turned(bytes: &[u8], rows: usize, heads: usize) -> Result<Vec<u8>, ConvertError> {
    let mut out = super::reserved(bytes.len())?;
    let (row, per_head) = (bytes.len() / rows, rows / heads);
    for head in bytes.chunks_exact(row * per_head) {
        let (first, second) = head.split_at(row * per_head / 2);
        for (a, b) in first.chunks_exact(row).zip(second.chunks_exact(row)) {
            out.extend_from_slice(a);
            out.extend_from_slice(b);
        }
    }
    Ok(out)
}

/// The layer of a tensor with an entry or a row for each neuron, and its expert if it is that of one.
fn over_neurons(name: &str) -> Option<(usize, Option<usize>)> {
    let layer = layer_of(name)?;
    let part = name.splitn(3, '.').nth(2)?;
    match part {
        "ffn_count" | "ffn_center" | "fc2.weight" => Some((layer, None)),
        _ => {
            let expert = match part.strip_prefix("ffn_center.") {
                Some(expert) => expert,
                None => part.strip_prefix("fc2.")?.strip_suffix(".weight")?,
            };
            Some((layer, Some(expert.parse().ok()?)))
        }
    }
}

/// The entries in the order `from` of each expert; `None` when they do not fit.
fn sorted(
    bytes: &[u8],
    name: &str,
    neurons: usize,
    from: &[Vec<u32>],
    expert: Option<usize>,
) -> Option<Vec<u8>> {
    // Rows of fc2 are of one neuron each; of the other tensors an entry is, and rows have one for each neuron.
    let rows = name.contains(".fc2.");
    let entry = if rows { bytes.len().checked_div(neurons)? } else { 4 };
    let sweep = entry.checked_mul(neurons).filter(|sweep| *sweep > 0)?;
    if !bytes.len().is_multiple_of(sweep) {
        return None;
    }
    let sweeps = bytes.len() / sweep;
    let experts = if expert.is_some() || rows { 1 } else { from.len() };
    if !sweeps.is_multiple_of(experts) {
        return None;
    }
    let mut out = Vec::new();
    out.try_reserve_exact(bytes.len()).ok()?;
    for (index, entries) in bytes.chunks_exact(sweep).enumerate() {
        let order = from.get(expert.unwrap_or(index / (sweeps / experts)))?;
        for position in order {
            out.extend_from_slice(entries.get(*position as usize * entry..)?.get(..entry)?);
        }
    }
    Some(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_and_rows_follow_their_neurons() {
        let from = [vec![2, 0, 1], vec![1, 2, 0]];
        let words = |values: &[u32]| values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>();
        let counts = words(&[1, 2, 3, 11, 12, 13, 4, 5, 6, 14, 15, 16]);
        let want = words(&[3, 1, 2, 13, 11, 12, 5, 6, 4, 15, 16, 14]);
        assert_eq!(sorted(&counts, "blk.0.ffn_count", 3, &from, None), Some(want));
        let rows: Vec<u8> = vec![1, 1, 2, 2, 3, 3];
        assert_eq!(sorted(&rows, "blk.0.fc2.1.weight", 3, &from, Some(1)), Some(vec![2, 2, 3, 3, 1, 1]));
        assert_eq!(sorted(&rows, "blk.0.ffn_center", 3, &from, None), None);
        assert_eq!(over_neurons("blk.3.fc2.7.weight"), Some((3, Some(7))));
        let centres = words(&[7, 8, 9]);
        let want = words(&[8, 9, 7]);
        assert_eq!(sorted(&centres, "blk.0.ffn_center.1", 3, &from, Some(1)), Some(want));
        assert_eq!(over_neurons("blk.3.ffn_center.7"), Some((3, Some(7))));
        assert_eq!(over_neurons("blk.3.ffn_center"), Some((3, None)));
        assert_eq!(over_neurons("blk.3.fc1.weight"), None);
        assert_eq!(over_neurons("output.weight"), None);
    }
}
