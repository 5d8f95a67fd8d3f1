//! The tensors of a synthetic model in the order of its file, and the bytes of each row.
//!
//! Rows are made where they are needed, by all threads, a piece of a tensor at a time: a model of any size takes some
//! megabytes of memory.

use neuropil_device::DType;

use crate::gguf::{GgufWriter, I8, I32, NewTensor, Pairs, Value, tensor_id};
use crate::pipeline::CancelToken;
use crate::store::{BATCHES, Layout, VERSION, bundle_name, keys, neuron_tensor_name};

use super::row::Row;
use super::weights::{Part, Projection, Weights};
use super::{SynthError, vocabulary};

/// Bytes of a tensor that are made at a time.
const PIECE: usize = 32 << 20;

/// What a file is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// A neuron store.
    Store(Layout),
    /// Matrices, as any program reads them.
    Matrices,
}

/// One tensor.
#[derive(Clone, Copy, Debug)]
enum Tensor {
    Embedding,
    Output,
    Norm,
    Attention(Projection, usize),
    Router(usize),
    Order(usize),
    Counts(usize),
    First,
    Second(usize, usize),
    Bundles(usize, usize),
    /// Gates or ups of all experts.
    Neurons(Part, usize),
    Downs(usize),
}

struct Entry {
    tensor: Tensor,
    name: String,
    dtype: DType,
    dims: Vec<usize>,
    /// Bytes of a row, and rows.
    row_bytes: usize,
    rows: usize,
}

/// A file to be written.
pub(super) struct ModelFile<'a> {
    weights: &'a Weights,
    dtype: DType,
    kind: Kind,
    entries: Vec<Entry>,
}

impl<'a> ModelFile<'a> {
    /// The file of these weights, big matrices in `dtype`.
    pub(super) fn new(weights: &'a Weights, dtype: DType, kind: Kind) -> ModelFile<'a> {
        let mut file = ModelFile { weights, dtype, kind, entries: Vec::new() };
        file.list();
        file
    }

    fn list(&mut self) {
        let shape = self.weights.shape;
        let (width, q, kv) = (shape.width, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim);
        let (neurons, experts) = (shape.neurons, shape.expert_count());
        let several = if shape.experts.is_some() { vec![experts] } else { Vec::new() };
        self.matrix(Tensor::Embedding, "token_embd.weight".into(), width, shape.vocab);
        self.matrix(Tensor::Output, "output.weight".into(), width, shape.vocab);
        self.vector(Tensor::Norm, "output_norm.weight".into(), width);
        for layer in 0..shape.layers {
            let name = |part: &str| format!("blk.{layer}.{part}.weight");
            let attention = |projection| Tensor::Attention(projection, layer);
            self.vector(Tensor::Norm, name("attn_norm"), width);
            self.matrix(attention(Projection::Query), name("attn_q"), width, q);
            self.matrix(attention(Projection::Key), name("attn_k"), width, kv);
            self.matrix(attention(Projection::Value), name("attn_v"), width, kv);
            self.matrix(attention(Projection::Output), name("attn_output"), q, width);
            self.vector(Tensor::Norm, name("ffn_norm"), width);
            if shape.experts.is_some() {
                let dims = vec![width, experts];
                self.add(Tensor::Router(layer), name("ffn_gate_inp"), DType::F32, dims);
            }
            match self.kind {
                Kind::Store(_) => {
                    let rows = |first: &[usize]| [first, &several].concat();
                    let name = |part: &str| format!("blk.{layer}.{part}");
                    self.add(Tensor::Order(layer), name("ffn_perm"), DType::F32, rows(&[neurons]));
                    let counts = rows(&[neurons, BATCHES.len()]);
                    self.add(Tensor::Counts(layer), name("ffn_count"), DType::F32, counts);
                    if let Some(predictor) = self.weights.predictor {
                        for expert in 0..experts {
                            let name = |part| neuron_tensor_name(layer, part, shape.experts.map(|_| expert));
                            self.matrix(Tensor::First, name("fc1"), width, predictor.rank);
                            self.matrix(Tensor::Second(layer, expert), name("fc2"), predictor.rank, neurons);
                        }
                    }
                }
                Kind::Matrices => {
                    let suffix = if shape.experts.is_some() { "_exps" } else { "" };
                    for (part, what) in [(Part::Gate, "ffn_gate"), (Part::Up, "ffn_up")] {
                        let dims = [&[width, neurons][..], &several].concat();
                        let name = format!("blk.{layer}.{what}{suffix}.weight");
                        self.add(Tensor::Neurons(part, layer), name, self.dtype, dims);
                    }
                    let dims = [&[neurons, width][..], &several].concat();
                    let name = format!("blk.{layer}.ffn_down{suffix}.weight");
                    self.add(Tensor::Downs(layer), name, self.dtype, dims);
                }
            }
        }
        if let Kind::Store(layout) = self.kind {
            for layer in 0..shape.layers {
                for expert in 0..experts {
                    let name = bundle_name(layer, shape.experts.map(|_| expert));
                    self.entries.push(Entry {
                        tensor: Tensor::Bundles(layer, expert),
                        name,
                        dtype: self.dtype,
                        dims: vec![layout.stride, neurons],
                        row_bytes: layout.stride,
                        rows: neurons,
                    });
                }
            }
        }
    }

    fn matrix(&mut self, tensor: Tensor, name: String, cols: usize, rows: usize) {
        self.add(tensor, name, self.dtype, vec![cols, rows]);
    }

    fn vector(&mut self, tensor: Tensor, name: String, cols: usize) {
        self.add(tensor, name, DType::F32, vec![cols]);
    }

    fn add(&mut self, tensor: Tensor, name: String, dtype: DType, dims: Vec<usize>) {
        let (cols, rows) = (dims[0], dims[1..].iter().product());
        let row_bytes = dtype.row_bytes(cols).unwrap_or(0);
        self.entries.push(Entry { tensor, name, dtype, dims, row_bytes, rows });
    }

    /// Bytes of all tensors, and a little more.
    pub(super) fn bytes(&self) -> u64 {
        let bytes = |entry: &Entry| (entry.row_bytes * entry.rows).next_multiple_of(4096) as u64;
        self.entries.iter().map(bytes).sum::<u64>() + (16 << 20)
    }

    /// Writes the tensors.
    pub(super) fn write(
        &self,
        path: &std::path::Path,
        pairs: &Pairs,
        cancel: &CancelToken,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<u64, SynthError> {
        let store = matches!(self.kind, Kind::Store(_));
        let tensors: Vec<NewTensor> = self.entries.iter().map(Entry::declared).collect();
        let alignment = if store { 4096 } else { 32 };
        let mut writer = GgufWriter::create(path, pairs, alignment, &tensors, store)?;
        let total = writer.file_bytes();
        let (mut done, mut piece) = (0, Vec::new());
        for entry in &self.entries {
            writer.begin(&entry.name)?;
            let at_a_time = (PIECE / entry.row_bytes.max(1)).max(1);
            for first in (0..entry.rows).step_by(at_a_time) {
                if cancel.is_cancelled() {
                    return Err(SynthError::Cancelled);
                }
                let rows = at_a_time.min(entry.rows - first);
                piece.clear();
                piece.resize(rows * entry.row_bytes, 0);
                self.fill(entry, first, &mut piece);
                writer.write(&piece)?;
                done += piece.len() as u64;
                progress(done, total);
            }
        }
        Ok(writer.finish()?)
    }

    /// Makes some rows, by all threads.
    fn fill(&self, entry: &Entry, first: usize, out: &mut [u8]) {
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        let rows = out.len() / entry.row_bytes;
        let each = rows.div_ceil(threads).max(1);
        std::thread::scope(|scope| {
            for (part, out) in out.chunks_mut(each * entry.row_bytes).enumerate() {
                scope.spawn(move || {
                    let mut row = Row::new(0);
                    for (index, out) in out.chunks_exact_mut(entry.row_bytes).enumerate() {
                        self.row(entry, first + part * each + index, &mut row, out);
                    }
                });
            }
        });
    }

    /// The bytes of one row.
    fn row(&self, entry: &Entry, index: usize, row: &mut Row, out: &mut [u8]) {
        let weights = self.weights;
        let neurons = weights.shape.neurons;
        match entry.tensor {
            Tensor::Embedding => weights.embedding(index, row),
            Tensor::Output => weights.output(index, row),
            Tensor::Norm => {
                out.chunks_exact_mut(4).for_each(|out| out.copy_from_slice(&1f32.to_le_bytes()));
                return;
            }
            Tensor::Attention(projection, layer) => weights.attention(projection, layer, index, row),
            Tensor::Router(layer) => weights.router(layer, index, row),
            Tensor::Order(layer) => {
                out.copy_from_slice(bytemuck::cast_slice(&weights.order(layer, index)));
                return;
            }
            Tensor::Counts(layer) => {
                let batch = BATCHES[index % BATCHES.len()];
                out.copy_from_slice(bytemuck::cast_slice(&weights.counts(layer, batch)));
                return;
            }
            Tensor::First => weights.predictor_first(index, row),
            Tensor::Second(layer, expert) => weights.predictor_second(layer, expert, index, row),
            Tensor::Bundles(layer, expert) => {
                self.bundle(layer, expert, index, row, out);
                return;
            }
            Tensor::Neurons(part, layer) => {
                weights.neuron(part, layer, index / neurons, index % neurons, row);
            }
            Tensor::Downs(layer) => {
                let width = weights.shape.width;
                weights.down_channel(layer, index / width, index % width, row);
            }
        }
        row.write(entry.dtype, out);
    }

    fn bundle(&self, layer: usize, expert: usize, position: usize, row: &mut Row, out: &mut [u8]) {
        let Kind::Store(layout) = self.kind else { return };
        let bytes = neuropil_device::quant::bundle_row_bytes(self.dtype, layout.width).unwrap_or(0);
        for (part, at) in [(Part::Gate, 0), (Part::Up, layout.gate_bytes), (Part::Down, layout.down_at)] {
            self.weights.neuron(part, layer, expert, position, row);
            row.write_bundled(self.dtype, &mut out[at..at + bytes]);
        }
    }
}

impl Entry {
    fn declared(&self) -> NewTensor {
        let dims: Vec<u64> = self.dims.iter().map(|dim| *dim as u64).collect();
        let id = match self.tensor {
            Tensor::Bundles(..) => I8,
            Tensor::Order(_) => I32,
            _ => tensor_id(self.dtype),
        };
        NewTensor::new(&*self.name, id, dims)
    }
}

/// The keys of a file.
pub(super) fn pairs(weights: &Weights, dtype: DType, kind: Kind, made_by: &str) -> Pairs {
    let shape = weights.shape;
    let architecture = match kind {
        Kind::Store(_) => shape.architecture,
        Kind::Matrices => shape.twin_architecture(),
    };
    let mut pairs = Pairs::new();
    pairs.set("general.architecture", architecture);
    pairs.set("general.name", format!("synthetic {}", shape.name));
    let key = |name: &str| format!("{architecture}.{name}");
    for (name, number) in [
        ("block_count", shape.layers),
        ("context_length", shape.context),
        ("embedding_length", shape.width),
        ("feed_forward_length", shape.neurons),
        ("attention.head_count", shape.heads),
        ("attention.head_count_kv", shape.kv_heads),
        ("attention.key_length", shape.head_dim),
        ("attention.value_length", shape.head_dim),
        ("rope.dimension_count", shape.head_dim),
        ("vocab_size", shape.vocab),
    ] {
        pairs.set(&key(name), number as u32);
    }
    pairs.set(&key("attention.layer_norm_rms_epsilon"), 1e-5f32);
    pairs.set(&key("rope.freq_base"), shape.rope_base);
    if let Some(window) = shape.window {
        pairs.set(&key("attention.sliding_window"), window as u32);
    }
    if let Some(experts) = shape.experts {
        pairs.set(&key("expert_count"), experts.count as u32);
        pairs.set(&key("expert_used_count"), experts.used as u32);
        pairs.set(&key("expert_feed_forward_length"), shape.neurons as u32);
        // Softmax.
        pairs.set(&key("expert_gating_func"), 1u32);
    }
    pairs.set(keys::ACTIVATION, shape.activation.kind.name());
    pairs.set(keys::ACTIVATION_THRESHOLD, shape.activation.threshold);
    pairs.set("neuropil.synth", made_by);
    if let Kind::Store(layout) = kind {
        let each = |value: usize| Value::from(vec![value as u32; shape.layers]);
        pairs.set(keys::VERSION, VERSION);
        pairs.set(keys::READ_UNIT, layout.read_unit as u32);
        pairs.set(keys::GROUP, 1u32);
        pairs.set(keys::GATE_TYPE, each(tensor_id(dtype) as usize));
        pairs.set(keys::DOWN_TYPE, each(tensor_id(dtype) as usize));
        pairs.set(keys::GATE_BYTES, each(layout.gate_bytes));
        pairs.set(keys::STRIDE, each(layout.stride));
        if weights.predictor.is_some() {
            pairs.set(keys::PREDICTOR_INPUT, keys::RESIDUAL);
            pairs.set(keys::PREDICTOR_THRESHOLD, vec![0f32; shape.layers]);
        }
    }
    vocabulary::add(shape.vocab, &mut pairs);
    pairs
}
