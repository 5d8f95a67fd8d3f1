//! `inspect`: what is in a file, and whether it runs here.
//!
//! It reads the header alone, so it is quick on any size, and it lists files that cannot run too. Names and texts come
//! out of the file: control characters in them are escaped before they reach a terminal.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use neuropil::engine::{EngineError, open_tokenizer};
use neuropil::gguf::{Array, Gguf, Value as Item};
use neuropil::model;
use neuropil::store::{self, BATCHES, COVERED, Firing, Store, StoreLayer, VERSION};
use neuropil_device::DType;
use serde_json::{Map, Value, json};

use crate::error::{CliError, message_line, one_line};
use crate::{memory, output};

/// Arrays up to this many elements are in the JSON document in full.
const FULL_ARRAY: usize = 1024;

/// Flags of `inspect`.
#[derive(clap::Args)]
#[command(after_help = "Example:
  neuropil inspect model.gguf --json | jq .architecture

In the JSON document an array of more than 1024 elements is {\"array\": TYPE, \"length\": N}; shapes have the fastest
dimension first; offsets count from the start of the tensor's file.")]
pub struct Args {
    /// A GGUF file; of a set of several, any one
    file: PathBuf,
    /// Print one JSON document
    #[arg(long)]
    json: bool,
}

/// Runs the verb.
pub fn run(args: &Args) -> Result<(), CliError> {
    let gguf = Gguf::open_header(&args.file)?;
    let report = Report::new(&gguf);
    if args.json { output::json(&report.json(&gguf)) } else { output::text(&report.text(&gguf)) }
}

struct Report {
    architecture: Option<String>,
    /// What a user should know about it; or why it does not run.
    notes: Result<Vec<String>, String>,
    parameters: u64,
    tensor_bytes: u64,
    /// Tensors and bytes per type.
    types: BTreeMap<String, (u64, u64)>,
    /// The layers, when it is a neuron store that holds together.
    store: Option<Store>,
}

impl Report {
    fn new(gguf: &Gguf) -> Report {
        let mut types = BTreeMap::new();
        for tensor in gguf.tensors() {
            let name = match tensor.type_name() {
                "unknown" => format!("unknown type {}", tensor.type_id),
                name => name.to_owned(),
            };
            let (count, bytes): &mut (u64, u64) = types.entry(name).or_default();
            *count += 1;
            *bytes = bytes.saturating_add(tensor.bytes);
        }
        Report {
            architecture: gguf.metadata().get("general.architecture").and_then(Item::text).map(str::to_owned),
            notes: notes(gguf),
            parameters: store::parameters(gguf),
            tensor_bytes: gguf.tensors().iter().fold(0, |sum, t| sum.saturating_add(t.bytes)),
            types,
            store: if Store::is_store(gguf) { Store::read(gguf).ok() } else { None },
        }
    }

    /// Bytes of what is not neurons.
    fn resident_bytes(&self, store: &Store) -> u64 {
        self.tensor_bytes.saturating_sub(store.bundle_bytes())
    }

    fn json(&self, gguf: &Gguf) -> Value {
        let metadata: Map<String, Value> =
            gguf.metadata().iter().map(|(key, value)| (key.to_owned(), item_json(value))).collect();
        let tensors: Vec<Value> = gguf
            .tensors()
            .iter()
            .map(|t| {
                json!({
                    "name": t.name,
                    "type": t.type_name(),
                    "type_id": t.type_id,
                    "shape": &t.dims[..],
                    "offset": t.offset,
                    "bytes": t.bytes,
                    "file": t.shard,
                })
            })
            .collect();
        let types: Map<String, Value> = self
            .types
            .iter()
            .map(|(name, (count, bytes))| (name.clone(), json!({ "tensors": count, "bytes": bytes })))
            .collect();
        let mut document = json!({
            "files": gguf.paths().map(|path| path.display().to_string()).collect::<Vec<_>>(),
            "file_bytes": gguf.file_bytes(),
            "version": gguf.version(),
            "architecture": self.architecture,
            "runs": self.notes.is_ok(),
        });
        if let Some(object) = document.as_object_mut() {
            match &self.notes {
                Ok(notes) if notes.is_empty() => None,
                Ok(notes) => object.insert("notes".into(), json!(notes)),
                Err(reason) => object.insert("reason".into(), json!(reason)),
            };
        }
        if let (Some(object), Some(store)) = (document.as_object_mut(), &self.store) {
            object.insert("store".into(), self.store_json(gguf, store));
        }
        let rest = json!({
            "parameters": self.parameters,
            "tensor_bytes": self.tensor_bytes,
            "types": types,
            "metadata": metadata,
            "tensors": tensors,
        });
        if let (Some(object), Value::Object(rest)) = (document.as_object_mut(), rest) {
            object.extend(rest);
        }
        document
    }

    /// What calibration found, mean of the layers.
    fn firing(gguf: &Gguf, store: &Store) -> Option<(Vec<Firing>, Option<f64>)> {
        let layers = Firing::read(gguf, store).ok().flatten()?;
        let overlap = gguf.metadata().f32s("neuropil.ffn_overlap").ok().flatten();
        let overlap = overlap.filter(|values| !values.is_empty());
        let overlap = overlap.map(|all| all.iter().map(|x| f64::from(*x)).sum::<f64>() / all.len() as f64);
        Some((layers, overlap))
    }

    fn store_json(&self, gguf: &Gguf, store: &Store) -> Value {
        let layer = |layer: &StoreLayer| {
            json!({
                "neurons": layer.layout.neurons,
                "experts": layer.bundles.len(),
                "gate_type": layer.layout.gate_type.name(),
                "down_type": layer.layout.down_type.name(),
                "gate_bytes": layer.layout.gate_bytes,
                "stride": layer.layout.stride,
            })
        };
        json!({
            "version": VERSION,
            "read_unit": store.layers.first().map(|layer| layer.layout.read_unit),
            "resident_bytes": self.resident_bytes(store),
            "bundle_bytes": store.bundle_bytes(),
            "counts": gguf.tensor("blk.0.ffn_count").is_some(),
            "layers": store.layers.iter().map(layer).collect::<Vec<_>>(),
            "firing": Report::firing(gguf, store).map(|(layers, overlap)| json!({
                "overlap": overlap,
                "batches": BATCHES,
                "covered": COVERED,
                "layers": layers.iter().map(|layer| json!({
                    "active": layer.active,
                    "cover": layer.cover,
                })).collect::<Vec<_>>(),
            })),
        })
    }

    fn store_text(&self, gguf: &Gguf, store: &Store) -> String {
        let [bundles, resident] = [store.bundle_bytes(), self.resident_bytes(store)].map(memory::shown);
        let distinct = |of: &dyn Fn(&StoreLayer) -> String| {
            store.layers.iter().map(of).collect::<BTreeSet<_>>().into_iter().collect::<Vec<_>>().join(" or ")
        };
        let neurons = distinct(&|layer| match layer.bundles.len() {
            1 => layer.layout.neurons.to_string(),
            experts => format!("{experts} x {}", layer.layout.neurons),
        });
        let gate = distinct(&|layer| layer.layout.gate_type.to_string());
        let down = distinct(&|layer| layer.layout.down_type.to_string());
        let stride = distinct(&|layer| layer.layout.stride.to_string());
        let unit = store.layers.first().map_or(0, |layer| layer.layout.read_unit);
        let order = if gguf.tensor("blk.0.ffn_count").is_some() { ", with firing counts" } else { "" };
        let firing = match Report::firing(gguf, store) {
            None => String::new(),
            Some((layers, overlap)) => {
                let mean = |of: &dyn Fn(&Firing) -> f64| {
                    100.0 * layers.iter().map(of).sum::<f64>() / layers.len().max(1) as f64
                };
                let [a, b, c] = [0, 1, 2].map(|i| mean(&|layer: &Firing| layer.cover[i]));
                let active = [0, 1, 2, 3].map(|i| format!("{:.1}", mean(&|layer: &Firing| layer.active[i])));
                let overlap = overlap.map_or(String::new(), |overlap| {
                    format!(
                        "\n  of the neurons that fire for a token {:.0} % fired for the one before",
                        100.0 * overlap
                    )
                });
                format!(
                    "\n  50, 80 and 90 % of firings fall on {a:.0}, {b:.0} and {c:.0} % of the neurons\n  {} % of the neurons \
                     fire in batches of 1, 2, 4, 8 tokens{overlap}",
                    active.join(", ")
                )
            }
        };
        format!(
            "neuron store  version {VERSION}: {bundles} of neurons, {resident} besides{order}\n  {} layers of {neurons} \
             neurons of {stride} bytes (gate and up {gate}, down {down}), read unit {unit}{firing}",
            store.layers.len()
        )
    }

    fn text(&self, gguf: &Gguf) -> String {
        let mut lines = Vec::new();
        for path in gguf.paths() {
            lines.push(format!("file          {}", one_line(&path.display().to_string())));
        }
        lines.push(format!("format        GGUF {}, {}", gguf.version(), memory::shown(gguf.file_bytes())));
        let architecture = self.architecture.as_deref().unwrap_or("not named");
        lines.push(format!("architecture  {}", one_line(architecture)));
        match &self.notes {
            Ok(notes) => {
                lines.push(format!("runs          yes, {}", how(gguf)));
                lines.extend(notes.iter().map(|note| format!("note          {}", one_line(note))));
            }
            Err(reason) => lines.push(format!("runs          no: {}", one_line(reason))),
        }
        lines.extend(self.store.as_ref().map(|store| self.store_text(gguf, store)));
        let (count, bytes) = (gguf.tensors().len(), memory::shown(self.tensor_bytes));
        lines.push(format!("tensors       {count} with {} parameters in {bytes}", self.parameters));
        for (name, (count, bytes)) in &self.types {
            lines.push(format!("  {name:<8} {count:>5} tensors, {}", memory::shown(*bytes)));
        }
        lines.push(format!("\nmetadata ({})", gguf.metadata().len()));
        for (key, value) in gguf.metadata().iter() {
            lines.push(format!("  {} = {}", one_line(key), shortened(&value.to_string())));
        }
        lines.push(format!("\ntensors ({count}): name, type, shape (fastest first), offset"));
        for t in gguf.tensors() {
            let (name, kind) = (one_line(&t.name), t.type_name());
            lines.push(format!("  {name:<32} {kind:<8} {:<20} {}", format!("{:?}", &t.dims[..]), t.offset));
        }
        lines.push(String::new());
        lines.join("\n")
    }
}

/// How the CPU runs the types of a file.
fn how(gguf: &Gguf) -> String {
    let expanded = gguf.tensors().iter().filter(|t| t.dtype.is_some_and(DType::is_expanded));
    let names: Vec<&str> = expanded.map(|t| t.type_name()).collect::<BTreeSet<_>>().into_iter().collect();
    match names[..] {
        [] => "all tensor types natively on the CPU".into(),
        _ => format!("on the CPU, which widens {} to F32 as it goes: that is slower", names.join(", ")),
    }
}

/// What is to be said about the file, or why it does not run, as far as its header tells.
fn notes(gguf: &Gguf) -> Result<Vec<String>, String> {
    if gguf.tensors().is_empty() {
        return Err("the file has no tensors".into());
    }
    let load = || -> Result<Vec<String>, EngineError> {
        let notes = model::check(&Gguf::open(gguf.path())?)?.notes;
        // A model without a vocabulary runs on token ids; one with a broken vocabulary does not load.
        match open_tokenizer(gguf.path()) {
            Ok(_) | Err(EngineError::NoVocabulary) => Ok(notes),
            Err(error) => Err(error),
        }
    };
    load().map_err(|error| message_line(&CliError::from(error).message))
}

fn shortened(text: &str) -> String {
    let mut shown: String = one_line(&text.chars().take(200).collect::<String>());
    if text.chars().nth(200).is_some() {
        shown.push('…');
    }
    shown
}

fn item_json(item: &Item) -> Value {
    match item {
        Item::U8(v) => json!(v),
        Item::I8(v) => json!(v),
        Item::U16(v) => json!(v),
        Item::I16(v) => json!(v),
        Item::U32(v) => json!(v),
        Item::I32(v) => json!(v),
        Item::U64(v) => json!(v),
        Item::I64(v) => json!(v),
        Item::F32(v) => json!(v),
        Item::F64(v) => json!(v),
        Item::Bool(v) => json!(v),
        Item::Str(v) => json!(String::from_utf8_lossy(v)),
        Item::Array(array) if array.len() > FULL_ARRAY => {
            let kind = array.type_name();
            json!({ "array": kind.strip_prefix("array of ").unwrap_or(kind), "length": array.len() })
        }
        Item::Array(array) => array_json(array),
    }
}

fn array_json(array: &Array) -> Value {
    match array {
        Array::U8(v) => json!(v),
        Array::I8(v) => json!(v),
        Array::U16(v) => json!(v),
        Array::I16(v) => json!(v),
        Array::U32(v) => json!(v),
        Array::I32(v) => json!(v),
        Array::U64(v) => json!(v),
        Array::I64(v) => json!(v),
        Array::F32(v) => json!(v),
        Array::F64(v) => json!(v),
        Array::Bool(v) => json!(v),
        Array::Str(v) => v.iter().map(|text| json!(String::from_utf8_lossy(text))).collect(),
    }
}
