//! What a model offers to be converted, whatever kind of file it is in.
//!
//! Three kinds of GGUF files come down to one form: a stock file has the three matrices of a layer, a file of
//! PowerInfer has down with its rows and columns exchanged, a neuron store has rows in bundles. Models in safetensors
//! files are brought to the same form in [`super::safetensors`].

use std::path::{Path, PathBuf};

use neuropil_device::{DType, quant};

use super::ConvertError;
use crate::gguf::{CHECKSUM_KEY, Gguf, Pairs, TensorInfo};
use crate::shown::shown;
use crate::store::{Store, keys};

/// The most neurons and columns of a layer: far above any model, and they bound the memory of a conversion.
pub(super) const MAX_NEURONS: u64 = 1 << 17;
pub(super) const MAX_WIDTH: u64 = 1 << 18;
/// The most layers.
pub(super) const MAX_LAYERS: u32 = 1 << 16;
/// The most experts of a layer.
pub(super) const MAX_EXPERTS: u64 = 1 << 12;

/// Where the bytes of a source come from. Any number of threads may read.
pub(super) trait Bytes: Sync {
    /// Reads the bytes of a piece from its byte `from` on.
    fn read(&self, blob: Blob, from: u64, out: &mut [u8]) -> Result<(), ConvertError>;
    /// The files of the source, in order.
    fn paths(&self) -> Vec<PathBuf>;
}

/// A piece of a tensor of the source: a tensor by its number, and where in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Blob {
    pub tensor: usize,
    pub at: u64,
    pub bytes: u64,
}

/// The rows of all neurons, at a fixed distance.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rows {
    pub blob: Blob,
    pub dtype: DType,
    /// Where the row of the first neuron begins, and from one to the next.
    pub at: usize,
    pub stride: usize,
    /// Whether they are sorted as in a bundle, or as in a file.
    pub bundled: bool,
}

/// The down matrix.
#[derive(Clone, Copy, Debug)]
pub(super) enum Down {
    /// A neuron is a column, of `width` rows.
    Columns { blob: Blob, dtype: DType },
    /// A neuron is a row.
    Rows(Rows),
}

/// The neurons of one expert, or of a layer without experts.
#[derive(Clone, Copy, Debug)]
pub(super) struct Neurons {
    pub gate: Rows,
    pub up: Rows,
    pub down: Down,
}

/// The feed-forward of one layer.
#[derive(Clone, Debug)]
pub(super) struct Layer {
    pub neurons: usize,
    /// Whether bundle tensors are numbered by expert.
    pub has_experts: bool,
    pub experts: Vec<Neurons>,
    /// Of each expert, the original index of the neuron at each position; none when positions are original indices.
    pub original: Option<Vec<Vec<u32>>>,
}

/// A tensor that is not cut into neurons.
#[derive(Clone, Debug)]
pub(super) struct Resident {
    pub name: String,
    pub type_id: u32,
    pub dims: Vec<u64>,
    pub content: Content,
}

/// The bytes of such a tensor.
#[derive(Clone, Debug)]
pub(super) enum Content {
    Blob(Blob),
    Owned(Vec<u8>),
    /// A matrix whose rows become those of `llama` files: in each head, the channels that turn together are halves of
    /// it, and come to lie side by side.
    Turning {
        blob: Blob,
        rows: usize,
        heads: usize,
    },
}

impl Content {
    /// The size of the tensor.
    pub(super) fn bytes(&self) -> u64 {
        match self {
            Content::Owned(bytes) => bytes.len() as u64,
            Content::Blob(blob) | Content::Turning { blob, .. } => blob.bytes,
        }
    }
}

/// A model to be converted.
pub(super) struct Source {
    pub path: PathBuf,
    pub bytes: Box<dyn Bytes>,
    /// What the result says too.
    pub pairs: Pairs,
    pub width: usize,
    pub resident: Vec<Resident>,
    pub layers: Vec<Layer>,
    /// The digest of the file that a store was made from.
    pub sha256: Option<String>,
}

impl Source {
    /// Opens a model.
    pub(super) fn open(path: &Path) -> Result<Source, ConvertError> {
        if let Some(folder) = super::safetensors::folder(path) {
            return super::safetensors::open(&folder);
        }
        let gguf = Gguf::open_header(path)?;
        let metadata = gguf.metadata();
        let architecture = metadata.require_str("general.architecture")?.to_owned();
        let width = metadata.require_u64(&format!("{architecture}.embedding_length"))?;
        let layers = metadata.require_u32(&format!("{architecture}.block_count"))?;
        let refused = |reason: String| ConvertError::Source { file: path.into(), reason };
        if width == 0 || width > MAX_WIDTH || layers == 0 || layers > MAX_LAYERS {
            let reason = format!(
                "it says that it has {layers} layers of width {width}; 1 to {MAX_LAYERS} layers of width 1 to {MAX_WIDTH} can be converted"
            );
            return Err(refused(reason));
        }
        let mut pairs = Pairs::from(metadata);
        // What says something of the file and not of the model. It comes back at the end, so that the same model gives the
        // same bytes.
        let of_file = ["general.alignment", CHECKSUM_KEY, keys::SOURCE_SHA256];
        pairs.retain(|key| !key.starts_with("split.") && !keys::is_layout(key) && !of_file.contains(&key));
        let known = if Store::is_store(&gguf) { metadata.str(keys::SOURCE_SHA256)? } else { None };
        let sha256 = known.map(str::to_owned);
        let finder = Finder { gguf: &gguf, width, taken: Default::default() };
        let (layers, taken) = if Store::is_store(&gguf) {
            finder.store()?
        } else {
            if gguf.is_powerinfer() {
                super::powerinfer::rename_keys(&mut pairs, &architecture, layers as usize);
            }
            finder.matrices(layers as usize)?
        };
        let mut resident = Vec::new();
        for (index, tensor) in gguf.tensors().iter().enumerate() {
            if taken.contains(&index) {
                continue;
            }
            if tensor.bytes == 0 {
                let reason = format!("has type {}, of which nothing is known", tensor.type_id);
                return Err(wrong(&gguf, tensor, reason));
            }
            resident.push(Resident {
                name: tensor.name.clone(),
                type_id: tensor.type_id,
                dims: tensor.dims.to_vec(),
                content: Content::Blob(Blob { tensor: index, at: 0, bytes: tensor.bytes }),
            });
        }
        let width = width as usize;
        Ok(Source { path: path.into(), bytes: Box::new(gguf), pairs, width, resident, layers, sha256 })
    }
}

impl Bytes for Gguf {
    fn read(&self, blob: Blob, from: u64, out: &mut [u8]) -> Result<(), ConvertError> {
        let refused = || ConvertError::Source {
            file: self.path().into(),
            reason: "its directory does not hold what it did; convert it again".into(),
        };
        let tensor = self.tensors().get(blob.tensor).ok_or_else(refused)?;
        Ok(self.read_part(tensor, blob.at.saturating_add(from), out)?)
    }

    fn paths(&self) -> Vec<PathBuf> {
        Gguf::paths(self).map(Path::to_path_buf).collect()
    }
}

fn wrong(gguf: &Gguf, tensor: &TensorInfo, reason: String) -> ConvertError {
    let file = gguf.shard_path(tensor).to_path_buf();
    ConvertError::Tensor { file, tensor: shown(&tensor.name), reason }
}

type Found = (Vec<Layer>, std::collections::BTreeSet<usize>);

/// Finds the matrices of the layers by their names.
struct Finder<'a> {
    gguf: &'a Gguf,
    width: u64,
    /// Tensors that belong to neurons.
    taken: std::collections::BTreeSet<usize>,
}

impl Finder<'_> {
    /// The layers of a stock file or one of PowerInfer.
    fn matrices(mut self, count: usize) -> Result<Found, ConvertError> {
        let mut layers = Vec::new();
        for layer in 0..count {
            layers.push(self.layer(layer)?);
        }
        Ok((layers, self.taken))
    }

    fn layer(&mut self, layer: usize) -> Result<Layer, ConvertError> {
        let name = |part: &str| format!("blk.{layer}.ffn_{part}.weight");
        let merged = self.gguf.tensor(&name("gate_exps")).is_some();
        let single = self.gguf.tensor(&name("gate.0")).is_some();
        if !merged && !single && self.gguf.tensor(&name("gate")).is_none() {
            let reason = format!(
                "layer {layer} has no {}, so its neurons cannot be told apart; only gated feed-forward layers are converted",
                name("gate")
            );
            return Err(ConvertError::Source { file: self.gguf.path().into(), reason });
        }
        if merged {
            let gate = self.take(&name("gate_exps"))?;
            let experts = gate.dims.get(2).copied().unwrap_or(1);
            let neurons = self.neurons(&gate)?;
            if experts > MAX_EXPERTS {
                return Err(wrong(
                    self.gguf,
                    &gate,
                    format!("has {experts} experts; {MAX_EXPERTS} can be converted"),
                ));
            }
            let parts = [gate, self.take(&name("up_exps"))?, self.take(&name("down_exps"))?];
            let experts: Result<Vec<Neurons>, ConvertError> =
                (0..experts).map(|expert| self.expert(&parts, neurons, (expert, experts), false)).collect();
            return Ok(Layer {
                neurons: neurons as usize,
                has_experts: true,
                experts: experts?,
                original: None,
            });
        }
        let mut experts = Vec::new();
        let mut count = None;
        for expert in 0..if single { MAX_EXPERTS } else { 1 } {
            let part = |part: &str| if single { name(&format!("{part}.{expert}")) } else { name(part) };
            if single && self.gguf.tensor(&part("gate")).is_none() {
                break;
            }
            let gate = self.take(&part("gate"))?;
            let neurons = *count.get_or_insert(self.neurons(&gate)?);
            let turned = self.gguf.tensor(&part("down_t")).is_some();
            let down = self.take(&part(if turned { "down_t" } else { "down" }))?;
            let parts = [gate, self.take(&part("up"))?, down];
            experts.push(self.expert(&parts, neurons, (0, 1), turned)?);
        }
        let neurons = count.unwrap_or(0) as usize;
        Ok(Layer { neurons, has_experts: single, experts, original: None })
    }

    /// The tensor of this name, which will not be in the result.
    fn take(&mut self, name: &str) -> Result<TensorInfo, ConvertError> {
        let tensor = self.gguf.require(name)?.clone();
        if tensor.dtype.is_none() {
            let reason = format!("has type {}, which cannot be cut into neurons", tensor.type_name());
            return Err(wrong(self.gguf, &tensor, reason));
        }
        self.taken.insert(self.index(&tensor));
        Ok(tensor)
    }

    fn index(&self, tensor: &TensorInfo) -> usize {
        self.gguf.index(&tensor.name).unwrap_or(usize::MAX)
    }

    fn neurons(&self, gate: &TensorInfo) -> Result<u64, ConvertError> {
        let neurons = gate.dims.get(1).copied().unwrap_or(1);
        if gate.dims.first() != Some(&self.width) || neurons > MAX_NEURONS {
            let (dims, width) = (&gate.dims[..], self.width);
            let reason = format!("is {dims:?}, where [{width}, up to {MAX_NEURONS}] is needed");
            return Err(wrong(self.gguf, gate, reason));
        }
        Ok(neurons)
    }

    /// Expert `expert` of `experts` in the matrices gate, up and down.
    fn expert(
        &self,
        parts: &[TensorInfo; 3],
        neurons: u64,
        (expert, experts): (u64, u64),
        turned: bool,
    ) -> Result<Neurons, ConvertError> {
        let [gate, up, down] = parts;
        let across = if turned { [self.width, neurons] } else { [neurons, self.width] };
        for (tensor, [cols, rows]) in
            [(gate, [self.width, neurons]), (up, [self.width, neurons]), (down, across)]
        {
            let dims = [cols, rows, experts];
            let found = |i: usize| tensor.dims.get(i).copied().unwrap_or(1);
            if (0..4).any(|i| found(i) != dims.get(i).copied().unwrap_or(1)) {
                let reason = format!("is {:?}, where {dims:?} is needed", &tensor.dims[..]);
                return Err(wrong(self.gguf, tensor, reason));
            }
        }
        let blob = |tensor: &TensorInfo| {
            // Rows are whole blocks, so the experts have equal bytes.
            let bytes = tensor.bytes / experts;
            Blob { tensor: self.index(tensor), at: bytes * expert, bytes }
        };
        let rows = |tensor: &TensorInfo| {
            let dtype = tensor.dtype.unwrap_or(DType::F32);
            let blob = blob(tensor);
            let stride = (blob.bytes / neurons) as usize;
            Rows { blob, dtype, at: 0, stride, bundled: false }
        };
        let down = match turned {
            true => Down::Rows(rows(down)),
            false => Down::Columns { blob: blob(down), dtype: down.dtype.unwrap_or(DType::F32) },
        };
        Ok(Neurons { gate: rows(gate), up: rows(up), down })
    }

    /// The layers of a neuron store.
    fn store(mut self) -> Result<Found, ConvertError> {
        let store = Store::read(self.gguf)?;
        let mut layers = Vec::new();
        for (index, layer) in store.layers.iter().enumerate() {
            let layout = layer.layout;
            if layout.neurons as u64 > MAX_NEURONS {
                let reason =
                    format!("layer {index} has {} neurons; {MAX_NEURONS} can be converted", layout.neurons);
                return Err(ConvertError::Source { file: self.gguf.path().into(), reason });
            }
            let mut experts = Vec::new();
            for tensor in &layer.bundles {
                let tensor = self.index(tensor);
                self.taken.insert(tensor);
                let blob = Blob { tensor, at: 0, bytes: layout.bytes() };
                let rows = |at, dtype| Rows { blob, dtype, at, stride: layout.stride, bundled: true };
                experts.push(Neurons {
                    gate: rows(0, layout.gate_type),
                    up: rows(layout.gate_bytes, layout.gate_type),
                    down: Down::Rows(rows(layout.down_at, layout.down_type)),
                });
            }
            let original = super::order::original(self.gguf, index, layout.neurons, experts.len())?;
            if let Some(perm) = self.gguf.tensor(&super::order::perm_name(index)) {
                self.taken.insert(self.index(perm));
            }
            layers.push(Layer { neurons: layout.neurons, has_experts: layer.numbered, experts, original });
        }
        Ok((layers, self.taken))
    }
}

/// Bytes of a row of neurons, in the form that it has.
pub(super) fn row_bytes(rows: &Rows, width: usize) -> usize {
    let bytes = match rows.bundled {
        true => quant::bundle_row_bytes(rows.dtype, width),
        false => rows.dtype.row_bytes(width),
    };
    bytes.unwrap_or(0)
}
