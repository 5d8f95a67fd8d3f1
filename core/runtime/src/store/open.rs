//! From the keys and directory of a GGUF file to the layers of a store, checked.

use neuropil_device::DType;

use crate::gguf::{Gguf, TensorInfo, Value, tensor_type};

use super::layout::{DOWN_TYPES, gate_types};
use super::{Layout, StoreError, keys};

/// The version of the format that is written.
pub const VERSION: u32 = 1;

/// The batch sizes for which firing frequencies are kept.
pub const BATCHES: [usize; 4] = [1, 2, 4, 8];
/// Tensors start at multiples of it.
pub const ALIGNMENT: u32 = 4096;

/// The name of a matrix of the neurons of a layer, or of one expert of a layer that has them: `part` is `ffn_bundle`,
/// `ffn_fold`, `fc1` or `fc2`.
pub fn neuron_tensor_name(layer: usize, part: &str, expert: Option<usize>) -> String {
    match expert {
        None => format!("blk.{layer}.{part}.weight"),
        Some(expert) => format!("blk.{layer}.{part}.{expert}.weight"),
    }
}

/// The name of a bundle tensor, of a layer without experts or of one expert.
pub fn bundle_name(layer: usize, expert: Option<usize>) -> String {
    neuron_tensor_name(layer, "ffn_bundle", expert)
}

/// Layers that a store can have, and experts that a layer can have: far above any model.
const MAX_LAYERS: usize = 1 << 16;
const MAX_EXPERTS: usize = 1 << 12;

/// What a store's keys and directory say. The bytes are read through the [`Gguf`] that it was made from.
#[derive(Clone, Debug)]
pub struct Store {
    /// The layers, in order.
    pub layers: Vec<StoreLayer>,
}

/// The neurons of one layer.
#[derive(Clone, Debug)]
pub struct StoreLayer {
    /// How the bundles of each of its tensors lie.
    pub layout: Layout,
    /// The bundle tensor of each expert; of a layer without experts, one.
    pub bundles: Vec<TensorInfo>,
    /// Whether the names of its tensors have the number of an expert: a layer of experts may have only one.
    pub numbered: bool,
}

impl Store {
    /// Whether a file says that it is a neuron store.
    pub fn is_store(gguf: &Gguf) -> bool {
        gguf.metadata().get(keys::VERSION).is_some()
    }

    /// Reads the layers of a store, and checks every number against the others.
    ///
    /// # Errors
    /// [`StoreError`], naming the key or tensor.
    pub fn read(gguf: &Gguf) -> Result<Store, StoreError> {
        let metadata = gguf.metadata();
        let file = || gguf.path().to_path_buf();
        let version = metadata.require_u32(keys::VERSION)?;
        if version != VERSION {
            return Err(StoreError::Version { file: file(), found: version, known: VERSION });
        }
        let wrong = |key: &str, reason: String| StoreError::Key { file: file(), key: key.into(), reason };
        let group = metadata.require_u32(keys::GROUP)?;
        if group != 1 {
            return Err(wrong(keys::GROUP, format!("it is {group}, and only 1 is known")));
        }
        let architecture = metadata.require_str("general.architecture")?;
        let width = metadata.require_u64(&format!("{architecture}.embedding_length"))?;
        let width = usize::try_from(width).unwrap_or(usize::MAX);
        let read_unit = metadata.require_u32(keys::READ_UNIT)? as usize;
        let array = |key: &str| -> Result<&[u32], StoreError> {
            let missing = || wrong(key, "it is missing, or no array of u32".into());
            match metadata.get(key) {
                Some(Value::Array(_)) => Ok(metadata.u32s(key)?.ok_or_else(missing)?),
                _ => Err(missing()),
            }
        };
        let gate_ids = array(keys::GATE_TYPE)?;
        let down_ids = array(keys::DOWN_TYPE)?;
        let gate_bytes = array(keys::GATE_BYTES)?;
        let strides = array(keys::STRIDE)?;
        let count = gate_ids.len();
        if count == 0 || count > MAX_LAYERS {
            let reason = format!("it has {count} entries, and a store has 1 to {MAX_LAYERS} layers");
            return Err(wrong(keys::GATE_TYPE, reason));
        }
        let blocks = metadata.require_u64(&format!("{architecture}.block_count"))?;
        if blocks != count as u64 {
            let reason = format!("it has {count} entries, and the model has {blocks} layers");
            return Err(wrong(keys::GATE_TYPE, reason));
        }
        for (key, array) in
            [(keys::DOWN_TYPE, down_ids), (keys::GATE_BYTES, gate_bytes), (keys::STRIDE, strides)]
        {
            if array.len() != count {
                let reason = format!("it has {} entries for {count} layers", array.len());
                return Err(wrong(key, reason));
            }
        }
        let dtype = |key: &str, id: u32, among: &[DType]| {
            let known = tensor_type(id).and_then(|known| known.dtype);
            known
                .filter(|dtype| among.contains(dtype))
                .ok_or_else(|| wrong(key, format!("{id} is no type that these rows can have")))
        };
        let gate_types = gate_types();
        let mut layers = Vec::new();
        for index in 0..count {
            let (bundles, numbered) = bundles(gguf, index);
            let Some(first) = bundles.first() else {
                let tensor = bundle_name(index, None);
                return Err(StoreError::Tensor { file: file(), tensor, reason: "is missing".into() });
            };
            let neurons = first.dims.get(1).copied().unwrap_or(0) as usize;
            let layout = Layout::new(
                width,
                neurons,
                dtype(keys::GATE_TYPE, gate_ids[index], &gate_types)?,
                dtype(keys::DOWN_TYPE, down_ids[index], &DOWN_TYPES)?,
                read_unit,
            )?;
            for (key, found, wanted) in [
                (keys::GATE_BYTES, gate_bytes[index], layout.gate_bytes),
                (keys::STRIDE, strides[index], layout.stride),
            ] {
                if found as usize != wanted {
                    let reason = format!("layer {index} has {found} where its types and width give {wanted}");
                    return Err(wrong(key, reason));
                }
            }
            let dims = [layout.stride as u64, neurons as u64];
            for tensor in &bundles {
                if tensor.type_name() != "I8" || tensor.dims[..] != dims {
                    let (kind, shape) = (tensor.type_name(), &tensor.dims[..]);
                    let reason = format!("is {kind} {shape:?}, where bundles are I8 {dims:?}");
                    return Err(StoreError::Tensor { file: file(), tensor: tensor.name.clone(), reason });
                }
            }
            layers.push(StoreLayer { layout, bundles, numbered });
        }
        Ok(Store { layers })
    }

    /// Bytes of all bundles.
    pub fn bundle_bytes(&self) -> u64 {
        self.layers.iter().map(|layer| layer.layout.bytes() * layer.bundles.len() as u64).sum()
    }
}

/// Weights of a model: elements of its tensors, and of a bundle those of its three rows.
pub fn parameters(gguf: &Gguf) -> u64 {
    let store = if Store::is_store(gguf) { Store::read(gguf).ok() } else { None };
    let of_layer = |layer: &StoreLayer| {
        let Layout { width, neurons, .. } = layer.layout;
        let weights =
            (width as u64).saturating_mul(neurons as u64).saturating_mul(layer.bundles.len() as u64);
        weights.saturating_mul(3)
    };
    let bundles = store.iter().flat_map(|store| &store.layers).map(of_layer);
    // Lists and what calibration adds are no weights of the model.
    let added = |name: &str| {
        ["ffn_perm", "ffn_count", "ffn_center", "ffn_fold"].iter().any(|part| name.contains(part))
    };
    let weights = |tensor: &&TensorInfo| tensor.type_name() != "I8" && !added(&tensor.name);
    let others = gguf.tensors().iter().filter(|tensor| store.is_none() || weights(tensor));
    bundles.chain(others.map(TensorInfo::elements)).fold(0, u64::saturating_add)
}

/// The bundle tensors of a layer, expert after expert, and whether they are numbered.
fn bundles(gguf: &Gguf, layer: usize) -> (Vec<TensorInfo>, bool) {
    if let Some(tensor) = gguf.tensor(&bundle_name(layer, None)) {
        return (vec![tensor.clone()], false);
    }
    let of = |expert: usize| gguf.tensor(&bundle_name(layer, Some(expert))).cloned();
    ((0..MAX_EXPERTS).map_while(of).collect(), true)
}
