//! Neurons that stay in storage: the engine that reads them, the cache for some, and which are there from the start.

use std::sync::Arc;

use neuropil_device::quant::SLICE;
use neuropil_device::{Arena, DType};

use crate::cache::{Cache, Eviction, Odds, Window};
use crate::gguf::Gguf;
use crate::io::{IoChoice, IoEngine, open};
use crate::pipeline::{PIECES, PipelineOptions, Storage, StorageParts, Trace, Unit};
use crate::predict::Prediction;
use crate::store::StoreLayer;

use super::ModelError;
use super::budget::NeuronPlan;
use super::load::Progress;
use super::load_neurons::StoreView;

/// Makes an eviction policy; it is given the frequency with which each neuron fires, over all units, or nothing where the
/// file has none.
pub type MakeEviction = Arc<dyn Fn(&[f32]) -> Box<dyn Eviction> + Send + Sync>;

/// Makes an engine that reads the store's files, which it is given.
pub type MakeIo =
    Arc<dyn Fn(&[&std::path::Path]) -> Result<Box<dyn IoEngine>, crate::io::IoError> + Send + Sync>;

/// How neurons are kept and read.
#[derive(Clone, Default)]
pub(crate) struct StorageOptions {
    pub io: IoChoice,
    /// Instead of `io`.
    pub make_io: Option<MakeIo>,
    pub pipeline: PipelineOptions,
    pub eviction: Option<MakeEviction>,
    /// Neurons in memory, instead of what a budget leaves.
    pub slots: Option<usize>,
    /// Begin with an empty cache.
    pub cold: bool,
    /// Part of the slots that hold neurons for good.
    pub hot_share: Option<f32>,
    pub trace: Option<Arc<Trace>>,
}

/// Part of the slots that hold neurons for good, those that fire most, when so large a part of all neurons is in memory.
///
/// What stays need not be read when a prompt passes by. It costs hits where slots are few, and next to none where they
/// are half of the neurons or more (`benches/benches/eviction.rs`).
fn hot_share(slots: usize, neurons: usize) -> f32 {
    let part = slots as f32 / neurons.max(1) as f32;
    (1.75 * (part - 0.1)).clamp(0.0, 0.7)
}

/// The storage of a store whose neurons are not all in memory, empty yet; `frequencies` are those of [`frequencies`].
pub(super) fn storage(
    gguf: &Gguf,
    view: &StoreView,
    plan: &NeuronPlan,
    frequencies: &[f32],
    options: &StorageOptions,
) -> Result<Arc<Storage>, ModelError> {
    let paths: Vec<_> = gguf.paths().collect();
    let engine = match &options.make_io {
        Some(make) => make(&paths)?,
        None => open(&options.io, &paths)?,
    };
    let all_pass = passes_by(view);
    let count = view.store.layers.len();
    let mut units = Vec::new();
    for (index, layer) in view.store.layers.iter().enumerate() {
        for tensor in &layer.bundles {
            // Of a layer without experts everybody knows what comes next; after the last one, only where the next token
            // begins anew.
            let next =
                (layer.bundles.len() == 1 && (all_pass || index + 1 < count)).then_some((index + 1) % count);
            units.push(Unit { file: tensor.shard, offset: tensor.offset, layout: layer.layout, next });
        }
    }
    let neurons: Vec<usize> = units.iter().map(|unit| unit.layout.neurons).collect();
    let policy: Box<dyn Eviction> = match &options.eviction {
        _ if !options.pipeline.cache => Box::new(Window::new(0)),
        Some(make) => make(frequencies),
        None => Box::new(Odds::new(frequencies)),
    };
    let cache = Cache::new(&neurons, plan.cached, policy)?;
    let slots = plan.cached + PIECES * plan.piece;
    let arena = Arena::new(slots, plan.slot_bytes, 64).map_err(|_| ModelError::OutOfMemory {
        what: "neurons".into(),
        bytes: (slots * plan.slot_bytes) as u64,
    })?;
    let parts = StorageParts {
        units,
        cache,
        arena,
        cached: plan.cached,
        engine,
        options: options.pipeline,
        gate_apart: view.gate_apart(),
        trace: options.trace.clone(),
    };
    let failed = |source| ModelError::Weight { name: "neurons".into(), source };
    let storage = Storage::new(parts).map_err(failed)?;
    Ok(Arc::new(storage))
}

/// Reads the neurons that are there from the start: those that fire most, as many as there is room for.
pub(super) fn fill(
    storage: &Storage,
    view: &StoreView,
    frequencies: &[f32],
    options: &StorageOptions,
    progress: &mut Progress<'_>,
) -> Result<(), ModelError> {
    if options.cold || !options.pipeline.cache {
        return Ok(());
    }
    let layers = view.store.layers.iter();
    let neurons: Vec<usize> =
        layers.flat_map(|layer| layer.bundles.iter().map(|_| layer.layout.neurons)).collect();
    let room = storage.room();
    let (first, hot) = if passes_by(view) {
        let first = slices_of_each(&neurons, room);
        (first.clone(), first)
    } else {
        let share = hot_share(room, neurons.iter().sum());
        // A slice of any unit must fit beside those that stay.
        let most = room.saturating_sub(SLICE.min(neurons.iter().copied().max().unwrap_or(0)));
        let hot = ((room as f32 * options.hot_share.unwrap_or(share)) as usize).min(most);
        (most_frequent(&neurons, frequencies, room), most_frequent(&neurons, frequencies, hot))
    };
    let failed = |source| ModelError::Weight { name: "neurons".into(), source };
    storage.fill(&first, &hot, progress).map_err(failed)
}

/// Whether each token takes all neurons of each layer, in order.
fn passes_by(view: &StoreView) -> bool {
    view.prediction() == Prediction::Off && view.store.layers.iter().all(|layer| layer.bundles.len() == 1)
}

/// How often each neuron fires, unit after unit; empty if the file does not say.
pub(super) fn frequencies(gguf: &Gguf, layers: &[StoreLayer]) -> Result<Vec<f32>, ModelError> {
    let mut all = Vec::new();
    for (index, layer) in layers.iter().enumerate() {
        let Some(tensor) = gguf.tensor(&format!("blk.{index}.ffn_count")) else { return Ok(Vec::new()) };
        if tensor.dtype != Some(DType::F32) {
            return Ok(Vec::new());
        }
        let neurons = layer.layout.neurons;
        let per_expert = tensor.bytes as usize / layer.bundles.len().max(1);
        for expert in 0..layer.bundles.len() {
            let bytes = 4 * neurons;
            let out_of_memory =
                |_| ModelError::OutOfMemory { what: tensor.name.clone(), bytes: bytes as u64 };
            let mut row = Vec::new();
            row.try_reserve_exact(bytes).map_err(out_of_memory)?;
            row.resize(bytes, 0);
            gguf.read_part(tensor, (expert * per_expert) as u64, &mut row)?;
            all.try_reserve(neurons).map_err(out_of_memory)?;
            all.extend(row.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)));
        }
    }
    Ok(all)
}

/// How many of the first neurons of each unit are among the `room` that fire most; without frequencies, the same share of
/// each.
fn most_frequent(neurons: &[usize], frequencies: &[f32], room: usize) -> Vec<usize> {
    let all: usize = neurons.iter().sum();
    if frequencies.len() != all {
        let share = |count: &usize| (*count as u128 * room.min(all) as u128 / all.max(1) as u128) as usize;
        return neurons.iter().map(share).collect();
    }
    let of_units = || {
        neurons.iter().scan(0, |start, count| {
            *start += count;
            frequencies.get(*start - count..*start)
        })
    };
    // Neurons lie in order of frequency, so a cut gives a first part of each unit. Bisection over the bits of a positive
    // float goes through all floats.
    let above = |cut: u32| of_units().map(move |unit| unit.partition_point(|f| f.max(0.0).to_bits() > cut));
    let (mut low, mut high) = (0, f32::INFINITY.to_bits());
    while low < high {
        let middle = low + (high - low) / 2;
        if above(middle).sum::<usize>() > room { low = middle + 1 } else { high = middle }
    }
    let mut counts: Vec<usize> = above(high).collect();
    // What is left goes to those that are just below the cut, unit by unit.
    let mut left = room.saturating_sub(counts.iter().sum());
    for (count, of) in counts.iter_mut().zip(neurons) {
        let more = left.min(of - *count);
        if high == 0 || more < *of {
            *count += more;
            left -= more;
        }
    }
    counts
}

/// Whole slices of each unit, the same number as far as that goes.
fn slices_of_each(neurons: &[usize], room: usize) -> Vec<usize> {
    let mut counts = vec![0; neurons.len()];
    let mut left = room;
    loop {
        let before = left;
        for (count, of) in counts.iter_mut().zip(neurons) {
            let more = SLICE.min(of - *count);
            if more <= left {
                *count += more;
                left -= more;
            }
        }
        if left == before {
            return counts;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_room_goes_to_those_that_fire_most() {
        let frequencies = [0.9, 0.5, 0.1, 0.0, 0.8, 0.7, 0.6, 0.2];
        assert_eq!(most_frequent(&[4, 4], &frequencies, 4), [1, 3]);
        assert_eq!(most_frequent(&[4, 4], &frequencies, 8), [4, 4]);
        assert_eq!(most_frequent(&[4, 4], &[], 4), [2, 2]);
        assert_eq!(most_frequent(&[4, 4], &frequencies, 100), [4, 4]);
        assert_eq!(most_frequent(&[4, 4], &[0.0; 8], 5).iter().sum::<usize>(), 5);
    }

    #[test]
    fn what_passes_by_is_kept_in_whole_slices() {
        assert_eq!(slices_of_each(&[2000, 2000], 2100), [1024, 1024]);
        assert_eq!(slices_of_each(&[600, 100], 650), [512, 100]);
        assert_eq!(slices_of_each(&[600, 100], 1000), [600, 100]);
    }
}
