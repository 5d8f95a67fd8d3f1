//! The neuron-cluster pipeline (PowerInfer-2 section 4.3): some neurons of a feed-forward, from the moment that they are
//! known until they are summed, while those that are not in memory come from storage.
//!
//! There is no barrier between the matrices. What is here is brought up to its hidden value at once; what arrives
//! follows in small groups; a cluster, a run of whole slices of 512 positions, is summed as soon as *its* neurons are
//! there. Sums are taken in order of position, so nothing depends on what was in memory or came first.
//!
//! A run never waits while it holds a part of a cluster that it cannot complete, so runs of several sessions cannot block
//! each other however small the cache is.

use std::time::Instant;

use neuropil_device::quant::SLICE;
use neuropil_device::{Activation, Buffer, ClusterJob, Device, DeviceError, ReadLease, Stage};

use crate::cache::{Acquired, Parts};
use crate::io::Read;
use crate::predict::{Marks, grow};
use crate::submit::Jobs;

use super::neuron_scratch::FfnInput;
use super::storage::Storage;
use super::trace::{Lane, span};

/// Clusters of a feed-forward: a few, so that sums of the first are taken while neurons of the last are read.
const CLUSTERS: usize = 4;
/// Neurons of a cluster at least: less is not worth a job.
const FEW: usize = 64;
/// Neurons that are computed together at least when they arrive, unless they are the last: single ones are not worth a
/// fork.
const ARRIVALS: usize = 16;

/// A list is scattered if it has less than one in so many neurons.
const DENSE: usize = 4;

/// What a neuron of the list waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Its gate row.
    Gate,
    /// Its up and down row; its gate is known.
    UpDown,
    /// All of it.
    Bundle,
    /// Nothing: its hidden value is known.
    Done,
}

impl State {
    /// The parts that must have come.
    fn parts(self) -> Parts {
        match self {
            State::Gate => Parts::GATE,
            State::UpDown => Parts::UP_DOWN,
            State::Bundle | State::Done => Parts::BOTH,
        }
    }
}

/// What a run computes with, the same for all of its jobs.
#[derive(Clone, Copy)]
pub(super) struct Call<'a> {
    pub storage: &'a Storage,
    pub unit: usize,
    pub device: &'a dyn Device,
    pub activation: Activation,
    pub input: &'a FfnInput<'a>,
}

/// Lists and buffers of one run, kept for the next.
pub(crate) struct ClusterRun {
    /// Positions of the neurons, ascending.
    pub list: Vec<u32>,
    /// Says which of them each token may use, if it does not use all.
    pub marks: Option<Marks>,
    /// Their gates `[tokens, list]`, if they are known.
    pub gates: Option<Buffer>,
    /// Their slots, of those that were taken into use.
    slots: Vec<u32>,
    states: Vec<State>,
    /// Where the clusters end in the list.
    ends: Vec<usize>,
    /// Clusters that were taken into use, and those that were summed.
    taken: usize,
    summed: usize,
    /// Neurons that wait for reads.
    pending: Vec<u32>,
    /// Gate values, then hidden values `[tokens, list]`.
    hidden: Vec<f32>,
    acquired: Acquired,
    reads: Vec<Read>,
    /// Neurons of the next job, and the lists it is made of.
    batch: Vec<u32>,
    lists: [Vec<u32>; 2],
    positions: Buffer,
    part: Buffer,
    /// Whether gates are read first.
    gate_first: bool,
    /// How often neurons had been given back to the cache before it was last asked.
    seen: u64,
    /// Gates that turned out to be on, of those that were read first.
    counted: [usize; 2],
    /// Whether the output holds a sum already.
    accumulate: bool,
    /// Neurons that were not there.
    missed: usize,
}

impl ClusterRun {
    pub(crate) fn new() -> Result<ClusterRun, DeviceError> {
        let empty = Buffer::host(0)?;
        Ok(ClusterRun {
            list: Vec::new(),
            marks: None,
            gates: None,
            slots: Vec::new(),
            states: Vec::new(),
            ends: Vec::new(),
            taken: 0,
            summed: 0,
            pending: Vec::new(),
            hidden: Vec::new(),
            acquired: Acquired::default(),
            reads: Vec::new(),
            batch: Vec::new(),
            lists: [const { Vec::new() }; 2],
            positions: empty.clone(),
            part: empty,
            gate_first: false,
            seen: 0,
            counted: [0; 2],
            accumulate: false,
            missed: 0,
        })
    }

    /// Forgets what the last call was about.
    pub fn reset(&mut self) {
        self.list.clear();
        (self.marks, self.gates) = (None, None);
    }

    /// Whether all neurons of the list were taken into use.
    pub fn is_whole(&self) -> bool {
        self.taken == self.ends.len()
    }

    pub(crate) fn bytes(&self) -> usize {
        self.positions.len() + self.part.len() + 4 * self.hidden.capacity()
    }

    /// Takes the neurons of the list into use and starts to read those that are not here.
    ///
    /// # Errors
    /// Those of the device or of reading.
    pub(super) fn begin(&mut self, call: &Call<'_>) -> Result<(), DeviceError> {
        let (tokens, count) = (call.input.tokens, self.list.len());
        let _span = span(&call.storage.trace, Lane::Conductor, "acquire", count);
        // Neurons that lie close together are read in long runs, which parts would cut to pieces.
        let neurons = call.storage.unit(call.unit).layout.neurons;
        let scattered = DENSE * count < neurons;
        self.gate_first = self.gates.is_none() && scattered && call.storage.gate_first();
        self.counted = [0; 2];
        self.accumulate = false;
        self.missed = 0;
        (self.taken, self.summed) = (0, 0);
        self.slots.clear();
        self.pending.clear();
        self.states.clear();
        self.hidden.clear();
        self.hidden.resize(tokens * count, 0.0);
        if let Some(gates) = &self.gates {
            self.hidden.copy_from_slice(&gates.read()?.slice()[..tokens * count]);
        }
        self.cut();
        let taken = self.take(call);
        if taken.is_err() {
            self.abandon(call.storage);
        }
        taken
    }

    /// Cuts the list into clusters of whole slices.
    fn cut(&mut self) {
        self.ends.clear();
        let least = self.list.len().div_ceil(CLUSTERS).max(FEW);
        let mut start = 0;
        for (index, pair) in self.list.windows(2).enumerate() {
            if index + 1 - start >= least && pair[0] as usize / SLICE != pair[1] as usize / SLICE {
                self.ends.push(index + 1);
                start = index + 1;
            }
        }
        if !self.list.is_empty() {
            self.ends.push(self.list.len());
        }
    }

    /// Takes as many clusters into use as the cache has room for.
    fn take(&mut self, call: &Call<'_>) -> Result<(), DeviceError> {
        let storage = call.storage;
        let state = match (&self.gates, self.gate_first) {
            (Some(_), _) => State::UpDown,
            (None, true) => State::Gate,
            (None, false) => State::Bundle,
        };
        let first = state.parts();
        while let Some(end) = self.ends.get(self.taken).copied() {
            let start = self.slots.len();
            let wanted = &self.list[start..end];
            // All of a cluster or nothing, or two runs could wait for each other for ever.
            if let Err(seen) = storage.cache.acquire_all(call.unit, wanted, first, &mut self.acquired) {
                self.seen = seen;
                if self.shrink(start) {
                    continue;
                }
                return Ok(());
            }
            let loading = storage.load(call.unit, wanted, &self.acquired, &mut self.reads);
            if loading.is_err() {
                storage.cache.release(&self.acquired.slots);
            }
            loading?;
            self.missed += self.acquired.load.len() + self.acquired.joined.len();
            self.slots.extend_from_slice(&self.acquired.slots);
            self.states.resize(end, state);
            if state == State::Gate {
                // What is here as a whole needs no second phase.
                let states = &mut self.states[start..];
                storage.cache.complete(&self.acquired.slots, |index| states[index] = State::Bundle);
            }
            self.pending.extend(start as u32..end as u32);
            self.taken += 1;
        }
        Ok(())
    }

    /// Cuts the next cluster, which the cache has no room for, in two if it is more than a slice and nothing else is
    /// in use; whether it did.
    fn shrink(&mut self, start: usize) -> bool {
        let Some(end) = self.ends.get(self.taken).copied() else { return false };
        if self.summed < self.taken {
            return false;
        }
        let slice = |index: usize| self.list[index] as usize / SLICE;
        let cut = (start + 1..end).filter(|index| slice(*index) != slice(index - 1));
        let middle = start + (end - start) / 2;
        let Some(cut) = cut.min_by_key(|index| index.abs_diff(middle)) else { return false };
        self.ends.insert(self.taken, cut);
        true
    }

    /// Computes what was begun, to the end. Whatever happens, nothing stays in use.
    ///
    /// # Errors
    /// Those of the device or of reading.
    pub(super) fn finish(&mut self, call: &Call<'_>, jobs: &mut Jobs) -> Result<(), DeviceError> {
        let result = self.compute(call, jobs);
        if result.is_err() {
            self.abandon(call.storage);
        }
        call.storage.count_live(self.counted[0], self.counted[1]);
        result
    }

    /// Gives back what is in use and will not be computed.
    pub fn abandon(&mut self, storage: &Storage) {
        let summed = self.summed_to();
        storage.cache.release(&self.slots[summed..]);
        self.slots.truncate(summed);
    }

    /// Where the clusters that were summed end in the list.
    fn summed_to(&self) -> usize {
        self.summed.checked_sub(1).map_or(0, |last| self.ends[last])
    }

    fn compute(&mut self, call: &Call<'_>, jobs: &mut Jobs) -> Result<(), DeviceError> {
        if !call.storage.options.pipeline {
            self.arrive(call, usize::MAX)?;
        }
        let start = Instant::now();
        self.advance(call, jobs)?;
        call.storage.observe(self.missed, start.elapsed());
        loop {
            self.sum(call, jobs)?;
            if self.taken < self.ends.len() {
                self.take(call)?;
                if self.summed == self.taken {
                    // Others hold what is missing: they give it back when they are done.
                    if !call.storage.wait(0, || call.storage.cache.wait_released(self.seen)) {
                        return Err(call.storage.failure());
                    }
                    continue;
                }
            }
            if self.summed == self.ends.len() {
                break;
            }
            self.arrive(call, ARRIVALS)?;
            self.advance(call, jobs)?;
        }
        if !self.accumulate {
            let len = call.input.tokens * call.storage.unit(call.unit).layout.width;
            call.input.y.write()?.slice_mut::<f32>()[..len].fill(0.0);
        }
        Ok(())
    }

    /// Waits until some of the pending neurons can go on.
    fn arrive(&mut self, call: &Call<'_>, least: usize) -> Result<(), DeviceError> {
        let waiting = self.pending.iter().map(|index| {
            let index = *index as usize;
            (self.slots[index], self.states[index].parts())
        });
        let storage = call.storage;
        let ready = storage.wait(self.pending.len(), || storage.cache.wait_ready(waiting, least));
        if ready { Ok(()) } else { Err(storage.failure()) }
    }

    /// Takes each pending neuron whose rows are here as far as they allow.
    fn advance(&mut self, call: &Call<'_>, jobs: &mut Jobs) -> Result<(), DeviceError> {
        for (state, stage) in
            [(State::Bundle, Stage::GateUp), (State::Gate, Stage::Gate), (State::UpDown, Stage::Up)]
        {
            self.batch.clear();
            let (states, batch) = (&self.states, &mut self.batch);
            let slots = &self.slots;
            call.storage.cache.take_ready(&mut self.pending, batch, |index| {
                let index = index as usize;
                (states[index] == state).then(|| (slots[index], state.parts()))
            });
            if self.batch.is_empty() {
                continue;
            }
            self.batch.sort_unstable();
            let batch = std::mem::take(&mut self.batch);
            let computed = self.job(call, jobs, stage, &batch);
            self.batch = batch;
            computed?;
            match stage {
                Stage::Gate => self.live(call)?,
                _ => self.batch.iter().for_each(|index| self.states[*index as usize] = State::Done),
            }
        }
        Ok(())
    }

    /// After the gates of the batch: those that are on go on to their other rows.
    fn live(&mut self, call: &Call<'_>) -> Result<(), DeviceError> {
        let (tokens, count) = (call.input.tokens, self.list.len());
        let [wanted, slots] = &mut self.lists;
        wanted.clear();
        slots.clear();
        for index in &self.batch {
            let column = *index as usize;
            let on = (0..tokens).any(|t| !call.activation.is_off(self.hidden[t * count + column]));
            if on {
                wanted.push(*index);
                slots.push(self.slots[column]);
            } else {
                (0..tokens).for_each(|t| self.hidden[t * count + column] = 0.0);
                self.states[column] = State::Done;
            }
        }
        self.counted[0] += self.batch.len();
        self.counted[1] += wanted.len();
        call.storage.cache.upgrade(slots, Parts::UP_DOWN, &mut self.acquired);
        for index in wanted.iter() {
            self.states[*index as usize] = State::UpDown;
            self.pending.push(*index);
        }
        // The acquisition speaks of places in its own list.
        wanted.iter_mut().for_each(|index| *index = self.list[*index as usize]);
        call.storage.load(call.unit, wanted, &self.acquired, &mut self.reads)
    }

    /// Sums the clusters whose neurons are all there, in order.
    fn sum(&mut self, call: &Call<'_>, jobs: &mut Jobs) -> Result<(), DeviceError> {
        let (tokens, count) = (call.input.tokens, self.list.len());
        while self.summed < self.taken {
            let end = self.ends[self.summed];
            let start = self.summed_to();
            if self.states[start..end].iter().any(|state| *state != State::Done) {
                return Ok(());
            }
            self.batch.clear();
            let fires = |index: &u32| (0..tokens).any(|t| self.hidden[t * count + *index as usize] != 0.0);
            self.batch.extend((start as u32..end as u32).filter(fires));
            if !self.batch.is_empty() {
                let batch = std::mem::take(&mut self.batch);
                let computed = self.job(call, jobs, Stage::Down, &batch);
                self.batch = batch;
                computed?;
                self.accumulate = true;
            }
            self.summed += 1;
            call.storage.cache.release(&self.slots[start..end]);
        }
        Ok(())
    }

    /// One job over the neurons at these places of the list.
    fn job(
        &mut self,
        call: &Call<'_>,
        jobs: &mut Jobs,
        stage: Stage,
        batch: &[u32],
    ) -> Result<(), DeviceError> {
        let _span = span(&call.storage.trace, Lane::Conductor, stage.name(), batch.len());
        let (tokens, count) = (call.input.tokens, self.list.len());
        let positions = grow(&mut self.positions, batch.len().next_power_of_two())?.clone();
        let part = grow(&mut self.part, tokens * batch.len().next_power_of_two())?.clone();
        {
            let mut positions = positions.write()?;
            let places = positions.slice_mut::<u32>().iter_mut().zip(batch);
            places.for_each(|(position, index)| *position = self.list[*index as usize]);
        }
        if stage.reads_hidden() {
            let mut part = part.write()?;
            let rows = part.slice_mut::<f32>().chunks_exact_mut(batch.len());
            for (part, hidden) in rows.zip(self.hidden.chunks_exact(count)) {
                part.iter_mut().zip(batch).for_each(|(part, index)| *part = hidden[*index as usize]);
            }
        }
        let mut slots = call.storage.arena.take_list();
        slots.extend(batch.iter().map(|index| self.slots[*index as usize]));
        let down = stage == Stage::Down;
        let job = ClusterJob {
            stage,
            tokens,
            activation: call.activation,
            weights: call.storage.weights(call.unit, slots, &positions)?,
            x: call.input.h.read()?,
            hidden: Some(part.write()?),
            y: if down { Some(call.input.y.write()?) } else { None },
            accumulate: self.accumulate,
        };
        jobs.cluster(call.device, job)?;
        if !down {
            self.keep(stage, batch, &part.read()?);
        }
        Ok(())
    }

    /// Puts a job's results to their places; what a token did not mark is silent for it.
    fn keep(&mut self, stage: Stage, batch: &[u32], part: &ReadLease) {
        let count = self.list.len();
        let rows = part.slice::<f32>().chunks_exact(batch.len());
        for (token, (part, hidden)) in rows.zip(self.hidden.chunks_exact_mut(count)).enumerate() {
            for (value, index) in part.iter().zip(batch) {
                let index = *index as usize;
                let marked = |marks: &Marks| marks.is_marked(token, self.list[index] as usize);
                let silent = stage == Stage::GateUp || stage == Stage::Gate;
                hidden[index] = if silent && !self.marks.as_ref().is_none_or(marked) { 0.0 } else { *value };
            }
        }
    }
}
