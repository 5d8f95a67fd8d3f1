//! A layer whose neurons are all computed, in order, while long reads run some pieces ahead: prompts, and models without
//! sparsity (PowerInfer-2 section 4.1.1).

use neuropil_device::quant::SLICE;
use neuropil_device::{Buffer, ClusterJob, DeviceError, Stage};

use crate::io::Read;
use crate::predict::grow;
use crate::submit::Jobs;

use super::cold::{Call, ClusterRun};
use super::neuron_scratch::count_up;
use super::ring::{Key, PIECES};
use super::storage::Storage;
use super::trace::{Lane, span};

/// Lists and buffers, kept for the next layer.
pub(crate) struct StreamScratch {
    reads: Vec<Read>,
    /// The neurons that are in memory for good.
    hot: ClusterRun,
    positions: Buffer,
    part: Buffer,
}

impl StreamScratch {
    pub(crate) fn new() -> Result<StreamScratch, DeviceError> {
        let empty = Buffer::host(0)?;
        Ok(StreamScratch {
            reads: Vec::new(),
            hot: ClusterRun::new()?,
            positions: empty.clone(),
            part: empty,
        })
    }

    pub(crate) fn bytes(&self) -> usize {
        self.hot.bytes() + self.positions.len() + self.part.len()
    }
}

/// The pieces that come next, from one on.
fn following(storage: &Storage, first: Key) -> [Option<Key>; PIECES] {
    let mut keys = [None; PIECES];
    let ahead = if storage.options.pipeline { PIECES } else { 1 };
    let mut next = Some(first);
    for key in keys.iter_mut().take(ahead) {
        *key = next;
        next = next.and_then(|(unit, start)| {
            let start = start + storage.ring.len();
            if start < storage.unit(unit).layout.neurons {
                return Some((unit, start));
            }
            let next = storage.unit(unit).next?;
            let start = resident(storage, next);
            (start < storage.unit(next).layout.neurons).then_some((next, start))
        });
    }
    keys
}

/// The first neurons of a unit that are in memory for good, whole slices of them.
fn resident(storage: &Storage, unit: usize) -> usize {
    let hot = storage.cache.hot(unit);
    let all = storage.unit(unit).layout.neurons;
    if hot >= all { all } else { hot / SLICE * SLICE }
}

/// Computes the neurons of the list, or all if it is `None`; `gates` are known for those of a list, `[tokens, list]`.
pub(super) fn stream(
    call: &Call<'_>,
    chosen: Option<(&[u32], &Buffer)>,
    scratch: &mut StreamScratch,
    jobs: &mut Jobs,
) -> Result<(), DeviceError> {
    let storage = call.storage;
    let neurons = storage.unit(call.unit).layout.neurons;
    let mut user = Some(storage.ring.enter());
    storage.ring.forget_failures();
    let mut accumulate = false;
    // Where the gates are known for some neurons, the others' rows are not wanted, so all are taken from the ring.
    let start = if chosen.is_some() { 0 } else { resident(storage, call.unit) };
    if start < neurons {
        fetch(storage, (call.unit, start), &mut scratch.reads)?;
    }
    if start > 0 {
        let hot = &mut scratch.hot;
        hot.reset();
        hot.list.extend(0..start as u32);
        hot.begin(call)?;
        if !hot.is_whole() {
            // It may wait for neurons that others hold, and they may wait for the ring.
            user = None;
        }
        hot.finish(call, jobs)?;
        accumulate = true;
    }
    let _user = user.unwrap_or_else(|| storage.ring.enter());
    for first in (start..neurons).step_by(storage.ring.len()) {
        let piece = arrived(storage, (call.unit, first), &mut scratch.reads)?;
        let end = neurons.min(first + storage.ring.len());
        accumulate |= compute(call, (first, end), piece, chosen, accumulate, scratch, jobs)?;
    }
    if !accumulate {
        let len = call.input.tokens * storage.unit(call.unit).layout.width;
        call.input.y.write()?.slice_mut::<f32>()[..len].fill(0.0);
    }
    Ok(())
}

/// Starts reads of what comes from `key` on, as far as there is room.
fn fetch(storage: &Storage, key: Key, reads: &mut Vec<Read>) -> Result<(), DeviceError> {
    if storage.ring.is_broken() {
        return Err(storage.failure());
    }
    let wanted = following(storage, key);
    let list: [Key; PIECES] = wanted.map(|wanted| wanted.unwrap_or(key));
    for key in wanted.into_iter().flatten() {
        if storage.ring.find(key).is_some() {
            continue;
        }
        let Some(piece) = storage.ring.take(key, &list) else { break };
        let (unit, start) = key;
        let end = storage.unit(unit).layout.neurons.min(start + storage.ring.len());
        let begun = storage.load_run(unit, start..end, piece, reads);
        if begun.is_err() {
            storage.ring.abandon(piece);
        }
        begun?;
    }
    Ok(())
}

/// The piece that holds `key`, when it is complete; what comes after it is on its way then.
fn arrived(storage: &Storage, key: Key, reads: &mut Vec<Read>) -> Result<usize, DeviceError> {
    loop {
        fetch(storage, key, reads)?;
        match storage.ring.find(key) {
            Some(piece) if storage.wait(1, || storage.ring.wait(piece)) => return Ok(piece),
            Some(_) => return Err(storage.failure()),
            // All pieces are being filled with something else.
            None if storage.wait(1, || storage.ring.wait_any()) => {}
            None => return Err(storage.failure()),
        }
    }
}

/// Computes the neurons of a piece; whether there were any to compute.
fn compute(
    call: &Call<'_>,
    (first, end): (usize, usize),
    piece: usize,
    chosen: Option<(&[u32], &Buffer)>,
    accumulate: bool,
    scratch: &mut StreamScratch,
    jobs: &mut Jobs,
) -> Result<bool, DeviceError> {
    let storage = call.storage;
    let tokens = call.input.tokens;
    let slot = |position: usize| (storage.ring.slots(piece).start + position - first) as u32;
    let mut slots = storage.arena.take_list();
    let hidden = match chosen {
        None => {
            count_up(&mut scratch.positions, first..end)?;
            slots.extend((first..end).map(slot));
            None
        }
        Some((list, gates)) => {
            let of = list.partition_point(|p| (*p as usize) < first)
                ..list.partition_point(|p| (*p as usize) < end);
            if of.is_empty() {
                return Ok(false);
            }
            let part = grow(&mut scratch.part, tokens * of.len())?.clone();
            let positions = grow(&mut scratch.positions, end - first)?;
            let (mut positions, gates) = (positions.write()?, gates.read()?);
            positions.slice_mut::<u32>()[..of.len()].copy_from_slice(&list[of.clone()]);
            slots.extend(list[of.clone()].iter().map(|position| slot(*position as usize)));
            let mut to = part.write()?;
            let rows = to.slice_mut::<f32>().chunks_exact_mut(of.len());
            for (to, gates) in rows.zip(gates.slice::<f32>().chunks_exact(list.len().max(1))).take(tokens) {
                to.copy_from_slice(&gates[of.clone()]);
            }
            Some(part.clone())
        }
    };
    if slots.is_empty() {
        return Ok(false);
    }
    let stage = if hidden.is_some() { Stage::UpDown } else { Stage::Fused };
    let _span = span(&storage.trace, Lane::Conductor, stage.name(), slots.len());
    let job = ClusterJob {
        stage,
        tokens,
        activation: call.activation,
        weights: storage.weights(call.unit, slots, &scratch.positions)?,
        x: call.input.h.read()?,
        hidden: hidden.map(|part| part.write()).transpose()?,
        y: Some(call.input.y.write()?),
        accumulate,
    };
    jobs.cluster(call.device, job)?;
    Ok(true)
}
