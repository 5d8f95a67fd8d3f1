//! Models as Hugging Face has them: a folder with `config.json`, weights in safetensors files, and `tokenizer.json`.
//!
//! Names, shapes and keys become those of GGUF. Weights keep their type; norms are widened to F32, as GGUF wants them,
//! and the rows of Q and K are put in the order of `llama` files, where the two channels that turn together are
//! neighbours. What has no place in a GGUF file of these architectures is refused by name.

mod config;
mod files;
mod header;
mod names;
mod tokenizer;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use neuropil_device::{DType, quant};
use serde_json::Value;

use super::plan::layer_of;
use super::source::{Blob, Bytes, Content, Down, Layer, MAX_NEURONS, Neurons, Resident, Rows, Source};
use super::{ConvertError, buffer};
use crate::shown::shown;
use config::Config;
use files::{Entry, Files};
use names::{Place, place};

/// Ids of GGUF types.
const F32: u32 = 0;

/// The folder of a model, if `path` is one or a file in one.
pub(super) fn folder(path: &Path) -> Option<PathBuf> {
    if path.is_dir() {
        return Some(path.into());
    }
    let inside = path.extension().is_some_and(|e| e == "safetensors") || path.ends_with("config.json");
    inside.then(|| path.parent().map(Path::to_path_buf)).flatten()
}

/// Opens the model in a folder.
pub(super) fn open(folder: &Path) -> Result<Source, ConvertError> {
    let config_path = folder.join("config.json");
    let config = Config::read(&files::json(&config_path, 4 << 20)?, &config_path)?;
    let files = Files::open(folder)?;
    let mut pairs = config.pairs.clone();
    tokenizer::read(folder, &mut pairs, &config)?;
    let mut parts = Parts { files: &files, config: &config, resident: Vec::new(), neurons: BTreeMap::new() };
    for (index, entry) in files.entries.iter().enumerate() {
        parts.take(index, entry)?;
    }
    let mut resident = std::mem::take(&mut parts.resident);
    let layers = parts.layers(folder)?;
    if let Some(divisors) = &config.rope_divisors {
        let bytes = divisors.iter().flat_map(|d| d.to_le_bytes()).collect();
        resident.push(owned("rope_freqs.weight", divisors.len() as u64, bytes));
    }
    resident.sort_by(|a, b| order_of(&a.name).cmp(&order_of(&b.name)));
    let width = config.width as usize;
    Ok(Source { path: folder.into(), bytes: Box::new(files), pairs, width, resident, layers, sha256: None })
}

/// By layer, then by name with numbers as numbers would be: the files' own order depends on how they were saved.
fn order_of(name: &str) -> (usize, &str) {
    (layer_of(name).map_or(0, |layer| layer + 1), name)
}

fn owned(name: &str, len: u64, bytes: Vec<u8>) -> Resident {
    Resident { name: name.into(), type_id: F32, dims: vec![len], content: Content::Owned(bytes) }
}

/// The matrices of one expert, as they are found.
type Found = [Option<usize>; 3];

/// Sorts the tensors of the files into their places.
struct Parts<'a> {
    files: &'a Files,
    config: &'a Config,
    resident: Vec<Resident>,
    /// By layer and expert.
    neurons: BTreeMap<(usize, Option<usize>), Found>,
}

impl Parts<'_> {
    fn take(&mut self, index: usize, entry: &Entry) -> Result<(), ConvertError> {
        let refused = |reason: String| self.files.wrong(entry, reason);
        let Some(place) = place(&entry.name) else {
            return Err(refused(
                "has no place in a file of this architecture; only plain llama, mistral, mixtral and bamboo models are converted"
                    .into(),
            ));
        };
        let layers = self.config.layers;
        let layer = match &place {
            Place::Neurons { layer, .. } => Some(*layer),
            Place::Vector(name) | Place::Matrix(name) | Place::Heads { name, .. } => layer_of(name),
            Place::Nowhere => None,
        };
        if layer.is_some_and(|layer| layer as u64 >= layers) {
            return Err(refused(format!("is in no layer of the {layers} that config.json says there are")));
        }
        match place {
            Place::Nowhere => {}
            Place::Vector(name) => {
                let bytes = self.widened(index, entry)?;
                let len = (bytes.len() / 4) as u64;
                self.resident.push(owned(&name, len, bytes));
            }
            Place::Matrix(name) if name == "output.weight" && self.config.tied => {}
            Place::Matrix(name) => self.matrix(name, index, entry, None)?,
            Place::Heads { name, keys } => {
                let heads = if keys { self.config.kv_heads } else { self.config.heads };
                self.matrix(name, index, entry, Some(heads))?;
            }
            Place::Neurons { layer, expert, part } => {
                let experts = self.config.experts;
                if expert.map_or(experts > 0, |expert| expert as u64 >= experts) {
                    return Err(refused(format!("does not go with the {experts} experts of config.json")));
                }
                let found = self.neurons.entry((layer, expert)).or_default();
                if let Some(slot) = found.get_mut(part)
                    && slot.replace(index).is_some()
                {
                    return Err(refused("has the place of another tensor".into()));
                }
            }
        }
        Ok(())
    }

    fn matrix(
        &mut self,
        name: String,
        index: usize,
        entry: &Entry,
        heads: Option<u64>,
    ) -> Result<(), ConvertError> {
        let [rows, cols] = entry.shape[..] else {
            return Err(self
                .files
                .wrong(entry, format!("has the shape {:?}, where a matrix is needed", entry.shape)));
        };
        let blob = Blob { tensor: index, at: 0, bytes: entry.bytes };
        let content = match heads {
            None => Content::Blob(blob),
            Some(heads) => {
                let per_head = rows.checked_div(heads).unwrap_or(0);
                if per_head * heads != rows || per_head % 2 != 0 || per_head == 0 {
                    let reason = format!("has {rows} rows, which {heads} heads cannot share evenly");
                    return Err(self.files.wrong(entry, reason));
                }
                Content::Turning { blob, rows: rows as usize, heads: heads as usize }
            }
        };
        self.resident.push(Resident { name, type_id: entry.type_id(), dims: vec![cols, rows], content });
        Ok(())
    }

    /// A vector as F32.
    fn widened(&self, index: usize, entry: &Entry) -> Result<Vec<u8>, ConvertError> {
        let [len] = entry.shape[..] else {
            return Err(self
                .files
                .wrong(entry, format!("has the shape {:?}, where a vector is needed", entry.shape)));
        };
        if len > super::source::MAX_WIDTH {
            return Err(self.files.wrong(entry, format!("has {len} elements, which is too many")));
        }
        let mut bytes = buffer(entry.bytes)?;
        self.files.read(Blob { tensor: index, at: 0, bytes: entry.bytes }, 0, &mut bytes)?;
        let mut wide = vec![0.0; len as usize];
        quant::dequantize_row(entry.dtype, &bytes, &mut wide);
        Ok(wide.iter().flat_map(|x| x.to_le_bytes()).collect())
    }

    fn layers(&self, folder: &Path) -> Result<Vec<Layer>, ConvertError> {
        let refused = |reason: String| ConvertError::Source { file: folder.into(), reason };
        let mut layers = Vec::new();
        for layer in 0..self.config.layers as usize {
            let mut experts = Vec::new();
            let mut neurons = None;
            let has_experts = self.config.experts > 0;
            for expert in 0..self.config.experts.max(1) as usize {
                let key = (layer, has_experts.then_some(expert));
                let Some([Some(gate), Some(up), Some(down)]) = self.neurons.get(&key).copied() else {
                    let of = key.1.map_or(String::new(), |expert| format!(" of expert {expert}"));
                    return Err(refused(format!("layer {layer} lacks the gate, up or down matrix{of}")));
                };
                let count = self.rows(gate);
                let count = *neurons.get_or_insert(count);
                experts.push(self.expert([gate, up, down], count)?);
            }
            let neurons = neurons.unwrap_or(0) as usize;
            layers.push(Layer { neurons, has_experts, experts, original: None });
        }
        Ok(layers)
    }

    fn rows(&self, index: usize) -> u64 {
        self.files.entries.get(index).and_then(|entry| entry.shape.first()).copied().unwrap_or(0)
    }

    fn expert(&self, [gate, up, down]: [usize; 3], neurons: u64) -> Result<Neurons, ConvertError> {
        let width = self.config.width;
        let blob = |index: usize, shape: [u64; 2]| -> Result<(Blob, DType), ConvertError> {
            let Some(entry) = self.files.entries.get(index) else {
                return Err(ConvertError::Source {
                    file: self.files.folder.clone(),
                    reason: "it has changed".into(),
                });
            };
            if entry.shape != shape || neurons == 0 || neurons > MAX_NEURONS {
                let reason = format!("has the shape {:?}, where {shape:?} is needed", entry.shape);
                return Err(self.files.wrong(entry, reason));
            }
            Ok((Blob { tensor: index, at: 0, bytes: entry.bytes }, entry.dtype))
        };
        let rows = |index: usize| -> Result<Rows, ConvertError> {
            let (blob, dtype) = blob(index, [neurons, width])?;
            Ok(Rows { blob, dtype, at: 0, stride: (blob.bytes / neurons) as usize, bundled: false })
        };
        let (columns, dtype) = blob(down, [width, neurons])?;
        Ok(Neurons { gate: rows(gate)?, up: rows(up)?, down: Down::Columns { blob: columns, dtype } })
    }
}

/// A whole number of a JSON object.
fn whole(object: &Value, key: &str) -> Option<u64> {
    object.get(key).and_then(Value::as_u64)
}

/// What JSON shows of a value, fit for a message.
fn shown_value(value: Option<&Value>) -> String {
    value.map_or("missing".into(), |value| shown(&value.to_string()))
}
