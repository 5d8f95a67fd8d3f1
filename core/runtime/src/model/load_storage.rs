//! Neurons that stay in storage: the engine that reads them, the cache for some, and which are there from the start.

use std::sync::Arc;

use neuropil_device::quant::SLICE;
use neuropil_device::{Arena, DType};

use crate::cache::{Cache, Eviction, Odds, Window};
use crate::gguf::{Gguf, GgufError, TensorInfo};
use crate::io::{Files, IoChoice, IoEngine, open_files};
use crate::pipeline::{PIECES, PipelineOptions, Storage, StorageParts, Trace, Unit};
use crate::predict::Prediction;
use crate::store::{BATCHES, StoreLayer};

use super::ModelError;
use super::budget::NeuronPlan;
use super::load::Progress;
use super::load_neurons::StoreView;

/// Makes an eviction policy; it is given the frequency with which each neuron (or each group of neurons that the cache
/// knows as one) fires, over all units, or nothing where the file has none.
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

/// Largest part of the slots that hold neurons for good.
const MOST_HOT: f32 = 0.7;

/// Part of the slots that hold neurons for good, those that fire most, when so large a part of all neurons is in memory.
///
/// What stays need not be read when a prompt passes by. It costs hits where slots are few, and next to none where they
/// are half of the neurons or more (`benches/benches/eviction.rs`).
fn hot_share(slots: usize, neurons: usize) -> f32 {
    let part = slots as f32 / neurons.max(1) as f32;
    (1.75 * (part - 0.1)).clamp(0.0, MOST_HOT)
}

/// The storage of a store whose neurons are not all in memory, empty yet; `frequencies` are those of [`frequencies`].
pub(super) fn storage(
    gguf: &Gguf,
    view: &StoreView,
    plan: &NeuronPlan,
    frequencies: &Frequencies,
    options: &StorageOptions,
) -> Result<Arc<Storage>, ModelError> {
    let paths: Vec<_> = gguf.paths().collect();
    let engine = match &options.make_io {
        Some(make) => make(&paths)?,
        None => {
            let files = Files::open(&paths)?;
            same(gguf, &files)?;
            open_files(&options.io, Arc::new(files))?
        }
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
    let groups: Vec<usize> = units.iter().map(|unit| unit.layout.neurons.div_ceil(plan.group)).collect();
    let policy: Box<dyn Eviction> = match &options.eviction {
        _ if !options.pipeline.cache => Box::new(Window::new(0)),
        Some(make) => make(&frequencies[0]),
        None => Box::new(Odds::new(&frequencies[0])),
    };
    let cache = Cache::new(&groups, plan.cached / plan.group, policy)?;
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
        group: plan.group,
        trace: options.trace.clone(),
    };
    let failed = |source| ModelError::Weight { name: "neurons".into(), source };
    let storage = Storage::new(parts).map_err(failed)?;
    Ok(Arc::new(storage))
}

/// Files are opened by path a second time, for reads past the page cache: they must be those whose header was read.
fn same(gguf: &Gguf, files: &Files) -> Result<(), GgufError> {
    let mut both = gguf.paths().zip(gguf.stamps().zip(files.stamps()));
    match both.find(|(_, (header, data))| header != data) {
        Some((file, _)) => Err(GgufError::Changed { file: file.into() }),
        None => Ok(()),
    }
}

/// Reads the neurons that are there from the start: those that fire most, as many as there is room for.
pub(super) fn fill(
    storage: &Storage,
    view: &StoreView,
    frequencies: Frequencies,
    options: &StorageOptions,
    progress: &mut Progress<'_>,
) -> Result<(), ModelError> {
    if options.cold || !options.pipeline.cache {
        return Ok(());
    }
    let group = storage.group();
    let layers = view.store.layers.iter();
    let groups: Vec<usize> =
        layers.flat_map(|layer| layer.bundles.iter().map(|_| layer.layout.neurons.div_ceil(group))).collect();
    let room = storage.room() / group;
    let (first, hot) = if passes_by(view) {
        let first = slices_of_each(&groups, room);
        (first.clone(), vec![first; BATCHES.len()])
    } else if group > 1 {
        // Which experts a text needs, it shows itself; none stays for good.
        (most_frequent(&groups, &frequencies[0], room), Vec::new())
    } else {
        let share = options.hot_share.unwrap_or_else(|| hot_share(room, groups.iter().sum()));
        let hot = hot_sizes(&groups, &frequencies, room, share);
        (most_frequent(&groups, &frequencies[0], room), hot)
    };
    // Their memory is for neurons now.
    drop(frequencies);
    let failed = |source| ModelError::Weight { name: "neurons".into(), source };
    storage.fill(&first, hot, progress).map_err(failed)
}

/// How many neurons of each unit stay, for each batch size: a part `share` of the room for single tokens; for more of
/// them all that fire at least as often as those, and at most [`MOST_HOT`] of the room.
fn hot_sizes(neurons: &[usize], frequencies: &Frequencies, room: usize, share: f32) -> Vec<Vec<usize>> {
    let part = |share: f32| (room as f32 * share) as usize;
    let single = most_frequent(neurons, &frequencies[0], part(share));
    let starts = neurons.iter().scan(0, |start, count| {
        *start += count;
        Some(*start - count)
    });
    let rarest = starts.zip(&single).filter(|(_, hot)| **hot > 0);
    let rarest = rarest.filter_map(|(start, hot)| frequencies[0].get(start + hot - 1).copied());
    let Some(cut) = rarest.reduce(f32::min) else { return vec![single; BATCHES.len()] };
    let sizes = frequencies.iter().enumerate().map(|(batch, of)| {
        let often = of.iter().filter(|frequency| **frequency >= cut).count();
        let most = part(share.max(MOST_HOT));
        if batch == 0 { single.clone() } else { most_frequent(neurons, of, often.min(most)) }
    });
    sizes.collect()
}

/// Whether each token takes all neurons of each layer, in order.
fn passes_by(view: &StoreView) -> bool {
    view.prediction() == Prediction::Off && view.store.layers.iter().all(|layer| layer.bundles.len() == 1)
}

/// How often the neurons of a layer fire, as the file has it: for each expert a row per batch size.
struct Counts<'a> {
    gguf: &'a Gguf,
    tensor: &'a TensorInfo,
    /// Of a row.
    bytes: usize,
    per_expert: u64,
}

impl<'a> Counts<'a> {
    /// Those of layer `index`; `None` if the file does not say.
    fn of(gguf: &'a Gguf, index: usize, layer: &StoreLayer) -> Option<Counts<'a>> {
        let tensor = gguf.tensor(&format!("blk.{index}.ffn_count"))?;
        let per_expert = tensor.bytes / layer.bundles.len().max(1) as u64;
        let bytes = 4 * layer.layout.neurons;
        (tensor.dtype == Some(DType::F32)).then_some(Counts { gguf, tensor, bytes, per_expert })
    }

    fn out_of_memory(&self) -> ModelError {
        ModelError::OutOfMemory { what: self.tensor.name.clone(), bytes: self.bytes as u64 }
    }

    /// Room for a row.
    fn row(&self) -> Result<Vec<u8>, ModelError> {
        let mut row = Vec::new();
        row.try_reserve_exact(self.bytes).map_err(|_| self.out_of_memory())?;
        row.resize(self.bytes, 0);
        Ok(row)
    }

    /// The numbers of one row.
    fn read<'r>(
        &self,
        expert: usize,
        batch: usize,
        row: &'r mut [u8],
    ) -> Result<impl Iterator<Item = f32> + use<'r>, ModelError> {
        let from = expert as u64 * self.per_expert + (batch * self.bytes) as u64;
        self.gguf.read_part(self.tensor, from, row)?;
        Ok(row.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)))
    }
}

/// How often each neuron fires, unit after unit, in steps of each of [`BATCHES`]; empty if the file does not say.
pub(super) type Frequencies = [Vec<f32>; BATCHES.len()];

/// The frequencies that a file has. Those of groups are the mean over the unit: an expert's neurons are used together.
pub(super) fn frequencies(
    gguf: &Gguf,
    layers: &[StoreLayer],
    group: usize,
) -> Result<Frequencies, ModelError> {
    let mut all = Frequencies::default();
    for (index, layer) in layers.iter().enumerate() {
        let Some(counts) = Counts::of(gguf, index, layer) else { return Ok(Frequencies::default()) };
        let neurons = layer.layout.neurons;
        let mut row = counts.row()?;
        for expert in 0..layer.bundles.len() {
            for (batch, of) in all.iter_mut().enumerate() {
                let values = counts.read(expert, batch, &mut row)?;
                of.try_reserve(neurons).map_err(|_| counts.out_of_memory())?;
                if group > 1 {
                    let mean = values.sum::<f32>() / neurons.max(1) as f32;
                    of.extend((0..neurons.div_ceil(group)).map(|_| mean));
                } else {
                    // Neurons lie in the order of the first row; the others may stray from it.
                    of.extend(values.scan(f32::INFINITY, |least, value| {
                        *least = least.min(value);
                        Some(*least)
                    }));
                }
            }
        }
    }
    Ok(all)
}

/// How many of the first neurons of a layer or an expert fire for at least every second token; none if the file does not
/// say.
pub(super) fn often(
    gguf: &Gguf,
    of: &StoreLayer,
    (layer, expert): (usize, usize),
) -> Result<usize, ModelError> {
    let Some(counts) = Counts::of(gguf, layer, of) else { return Ok(0) };
    let mut row = counts.row()?;
    let values = counts.read(expert, 0, &mut row)?;
    Ok(values.take_while(|frequency| *frequency >= 0.5).count())
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
    fn neurons_are_read_from_the_file_whose_header_was_read() {
        let path = std::env::temp_dir().join(format!("neuropil-same-{}.gguf", std::process::id()));
        // A header of version 3 that announces nothing.
        let empty = [&b"GGUF\x03\0\0\0"[..], &[0; 24]].concat();
        std::fs::write(&path, &empty).unwrap();
        let gguf = Gguf::open_header(&path).unwrap();
        assert!(same(&gguf, &Files::open(&[&path]).unwrap()).is_ok());
        let other = path.with_extension("other");
        std::fs::write(&other, &empty).unwrap();
        std::fs::rename(&other, &path).unwrap();
        let error = same(&gguf, &Files::open(&[&path]).unwrap());
        assert!(matches!(error, Err(GgufError::Changed { file }) if file == path));
        // The one that is open has only lost its name.
        assert!(gguf.unchanged().is_ok());
        std::fs::remove_file(&path).unwrap();
    }

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
