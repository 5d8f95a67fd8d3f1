//! What a memory budget is spent on, decided before anything is loaded.
//!
//! First what every token needs: attention, norms, predictors, the output matrix; then buffers and the first page of
//! keys and values. What is left holds neurons. A budget that leaves too little is refused with the smallest that does.
//! Keys and values grow later, and neurons give way to them.

use neuropil_device::DType;
use neuropil_device::quant::SLICE;

use crate::gguf::{Gguf, TensorInfo};
use crate::pipeline::PIECES;
use crate::predict::Prediction;
use crate::store::{Layout, Store};

use super::load_neurons::StoreView;
use super::{KvShape, KvType, ModelError, ModelSpec};

/// The program itself, its stacks and tables.
const PROGRAM: u64 = 8 << 20;
/// What a token of a vocabulary takes in the tables of a tokenizer.
const PER_VOCABULARY_ENTRY: u64 = 160;
/// What the engine that reads takes.
const READING: u64 = 4 << 20;
/// Tokens of a prompt that go through the model together, if there is room.
pub(crate) const PREFILL_CHUNKS: [usize; 5] = [512, 256, 128, 64, 32];
/// Buffers take at most one part in so many of what the resident weights leave.
const BUFFER_SHARE: u64 = 8;
/// Slices of a piece of the ring, at most.
const MOST_SLICES: usize = 4;
/// Positions whose keys and values must fit if a model is to be held in memory as a whole and no context is asked for.
const USUAL_CONTEXT: usize = 4096;

/// What to keep where.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MemoryPlan {
    /// Bytes for the process.
    pub budget: u64,
    /// Bytes that are taken whatever comes, buffers included.
    pub fixed: u64,
    /// Tokens of a prompt that go through the model together.
    pub prefill_chunk: usize,
    /// Where neurons are not all in memory, how many are.
    pub neurons: Option<NeuronPlan>,
}

/// How the memory for neurons is divided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NeuronPlan {
    /// Bytes of a slot.
    pub slot_bytes: usize,
    /// Slots of the cache.
    pub cached: usize,
    /// The fewest slots with which a step can be computed.
    pub least: usize,
    /// Slots of a piece of the ring.
    pub piece: usize,
    /// Neurons that the cache knows as one.
    pub group: usize,
}

/// What a plan is made from.
pub(crate) struct PlanInputs<'a> {
    pub gguf: &'a Gguf,
    pub spec: &'a ModelSpec,
    /// The store, if the file is one.
    pub store: Option<&'a StoreView>,
    pub budget: u64,
    /// The longest context that will be asked for; `None` if nobody knows.
    pub context: Option<usize>,
    pub kv: KvType,
    pub exact: bool,
    /// Neurons in memory, instead of what the budget leaves.
    pub slots: Option<usize>,
}

/// Makes a plan.
///
/// # Errors
/// [`ModelError::Budget`].
pub(crate) fn plan(inputs: &PlanInputs<'_>) -> Result<MemoryPlan, ModelError> {
    let PlanInputs { gguf, spec, budget, exact, .. } = *inputs;
    let widen = |tensor: &TensorInfo| if exact { tensor.elements().saturating_mul(4) } else { tensor.bytes };
    let resident = gguf.tensors().iter().filter(|tensor| is_resident(inputs, tensor)).map(widen);
    let resident: u64 = resident.fold(0, u64::saturating_add);
    let resident = resident.saturating_add(inputs.store.map_or(0, gate_copies));
    let shape =
        KvShape { layers: spec.layers, kv_heads: spec.kv_heads, head_dim: spec.head_dim, kind: inputs.kv };
    let page = shape.page_bytes() as u64;
    let context = inputs.context.unwrap_or(USUAL_CONTEXT).min(spec.context);
    let keys = page * context.div_ceil(neuropil_device::KV_PAGE) as u64;
    let fixed = |tokens: usize, piece: usize| {
        let vocabulary = PER_VOCABULARY_ENTRY * spec.vocab as u64;
        resident + PROGRAM + READING + vocabulary + buffers(spec, tokens, piece)
    };

    let all = match inputs.store {
        Some(view) => view.store.layers.iter().map(|layer| {
            layer.bundles.len() as u64 * layer.layout.neurons as u64 * slot_bytes(&layer.layout, view) as u64
        }),
        None => return whole(inputs, fixed(PREFILL_CHUNKS[0], spec.neurons), page, keys),
    };
    let all = all.fold(0, u64::saturating_add);
    let in_memory = fixed(PREFILL_CHUNKS[0], spec.neurons).saturating_add(all);
    if exact || (inputs.slots.is_none() && in_memory.saturating_add(keys) <= budget) {
        return whole(inputs, in_memory, page, keys);
    }

    let Some(view) = inputs.store else { return whole(inputs, in_memory, page, keys) };
    let layouts = || view.store.layers.iter().map(|layer| &layer.layout);
    let slot = layouts().map(|layout| slot_bytes(layout, view)).max().unwrap_or(0).next_multiple_of(64);
    let most = layouts().map(|layout| layout.neurons).max().unwrap_or(0);
    let least_piece = SLICE.min(most);
    let ring = |piece: usize| (PIECES * piece * slot) as u64;
    // Two whole slices must fit: one that is computed and one that is read.
    let group = view.group();
    let least_slots = 2 * SLICE.min(most.next_multiple_of(group));
    if let Some(slots) = inputs.slots {
        let cached = slots.max(least_piece).next_multiple_of(group);
        let neurons = NeuronPlan { slot_bytes: slot, cached, least: cached, piece: least_piece, group };
        let prefill_chunk = PREFILL_CHUNKS[0];
        return Ok(MemoryPlan { budget, fixed: resident, prefill_chunk, neurons: Some(neurons) });
    }
    let least_cache = (least_slots * slot) as u64;
    let smallest_chunk = *PREFILL_CHUNKS.last().unwrap_or(&1);
    // Keys and values that are there from the start, or that somebody asks for.
    let needed = if inputs.context.is_some() { keys } else { page };
    let least = |tokens: usize, piece: usize| fixed(tokens, piece) + ring(piece) + least_cache;
    // A model of very few neurons may be smaller than the means to read them.
    let smallest = (least(smallest_chunk, least_piece) + needed).min(in_memory.saturating_add(keys));
    if budget < smallest {
        return Err(ModelError::Budget { budget, smallest, fix: "raise --memory" });
    }
    let share = budget.saturating_sub(resident) / BUFFER_SHARE;
    let piece = (1..=MOST_SLICES).rev().map(|slices| (slices * SLICE).min(most));
    let fits = |piece: &usize| ring(*piece) <= share && least(smallest_chunk, *piece) + keys <= budget;
    let piece = piece.clone().find(fits).unwrap_or(least_piece);
    let fits =
        |tokens: &usize| buffers(spec, *tokens, piece) <= share && least(*tokens, piece) + keys <= budget;
    let chunk = PREFILL_CHUNKS.into_iter().find(fits).unwrap_or(smallest_chunk);
    let fixed = fixed(chunk, piece) + ring(piece);
    let left = budget.saturating_sub(fixed + page);
    let units = view.store.layers.iter();
    let all =
        units.map(|layer| layer.bundles.len() * layer.layout.neurons.next_multiple_of(group)).sum::<usize>();
    let cached = ((left / slot as u64) as usize).min(all + most) / group * group;
    let neurons = Some(NeuronPlan { slot_bytes: slot, cached, least: least_slots, piece, group });
    Ok(MemoryPlan { budget, fixed, prefill_chunk: chunk, neurons })
}

/// The plan of a model that is in memory as a whole.
fn whole(inputs: &PlanInputs<'_>, fixed: u64, page: u64, keys: u64) -> Result<MemoryPlan, ModelError> {
    let smallest = fixed.saturating_add(if inputs.context.is_some() { keys } else { page });
    if inputs.budget < smallest {
        let fix = match inputs.store {
            Some(_) => "raise --memory, or leave --exact out",
            None => "raise --memory, or convert the model to a neuron store, of which a part is enough",
        };
        return Err(ModelError::Budget { budget: inputs.budget, smallest, fix });
    }
    Ok(MemoryPlan { budget: inputs.budget, fixed, prefill_chunk: PREFILL_CHUNKS[0], neurons: None })
}

/// Bytes of a slot of a layer.
pub(crate) fn slot_bytes(layout: &Layout, view: &StoreView) -> usize {
    layout.stride - if view.gate_apart() { layout.gate_bytes } else { 0 }
}

/// Bytes of the gates that lie in memory as a whole.
fn gate_copies(view: &StoreView) -> u64 {
    let dtype = |layout: &Layout| match view.prediction() {
        Prediction::Gate | Prediction::Threshold => Some(layout.gate_type),
        Prediction::Gate4 => Some(DType::Q4_0),
        _ => None,
    };
    let bytes = |layout: &Layout| {
        dtype(layout).and_then(|dtype| dtype.matrix_bytes(layout.neurons, layout.width)).unwrap_or(0)
    };
    let layers = view.store.layers.iter();
    layers.map(|layer| (bytes(&layer.layout) * layer.bundles.len()) as u64).sum()
}

/// Whether a tensor is loaded whatever the budget. The embedding stays in the file's map, of which a token touches a row.
fn is_resident(inputs: &PlanInputs<'_>, tensor: &TensorInfo) -> bool {
    let name = tensor.name.as_str();
    let of_layer = name.strip_prefix("blk.").and_then(|rest| rest.split_once('.')).map(|(_, part)| part);
    let prediction = inputs.store.map(StoreView::prediction);
    match of_layer {
        None => name != "token_embd.weight" || inputs.gguf.tensor("output.weight").is_none(),
        Some(part) if !Store::is_store(inputs.gguf) => !part.starts_with("fc"),
        Some(part) if part.starts_with("fc1") || part.starts_with("fc2") => {
            prediction == Some(Prediction::Model)
        }
        Some(part) if part.starts_with("ffn_center") || part.starts_with("ffn_fold") => {
            prediction == Some(Prediction::Threshold)
        }
        Some(part) => !["ffn_bundle", "ffn_perm", "ffn_count"].iter().any(|p| part.starts_with(p)),
    }
}

/// Bytes of a step's buffers for a prompt of so many tokens at a time.
fn buffers(spec: &ModelSpec, tokens: usize, piece: usize) -> u64 {
    let ModelSpec { width, heads, kv_heads, head_dim, vocab, .. } = *spec;
    let experts = if spec.experts.is_some() { 4 * width } else { 0 };
    // The stream, what attention needs, quantised copies; then the gates, up and hidden values of the neurons that are
    // computed together.
    let floats = 3 * width + 2 * heads * head_dim + 2 * kv_heads * head_dim + experts + 4 * piece;
    let quantised = 2 * (width + piece);
    (tokens * (4 * floats + quantised) + super::LOGIT_ROWS * vocab * 4) as u64
}
