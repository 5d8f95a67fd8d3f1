//! A whole expert, from the moment that the router has named it until its neurons are summed (PowerInfer-2 section 4.3,
//! for experts whose neurons nobody chooses from).
//!
//! Where all neurons of an expert are computed, a table entry and a state per neuron would cost more than the arithmetic.
//! So the cache knows such experts by groups of neurons that lie side by side, and a slice of 512 positions is computed
//! in one job as soon as its groups are there. The gate still decides neuron by neuron, in the kernel.

use neuropil_device::quant::SLICE;
use neuropil_device::{Buffer, ClusterJob, DeviceError, Stage};

use crate::cache::Acquired;
use crate::io::Read;
use crate::submit::Jobs;

use super::cold::Call;
use super::neuron_scratch::count_up;
use super::storage::Storage;
use super::trace::{Lane, span};

/// Lists of one expert's run, kept for the next.
pub(crate) struct BlockRun {
    /// Groups in all, those that were taken into use, and those that were summed.
    groups: usize,
    summed: usize,
    /// Slots of the cache for the groups that were taken.
    slots: Vec<u32>,
    /// Whether some of them have to be read.
    missing: bool,
    /// How often slots had come free before the cache was last asked.
    seen: u64,
    wanted: Vec<u32>,
    acquired: Acquired,
    reads: Vec<Read>,
    positions: Buffer,
}

impl BlockRun {
    pub(crate) fn new() -> Result<BlockRun, DeviceError> {
        Ok(BlockRun {
            groups: 0,
            summed: 0,
            slots: Vec::new(),
            missing: false,
            seen: 0,
            wanted: Vec::new(),
            acquired: Acquired::default(),
            reads: Vec::new(),
            positions: Buffer::host(0)?,
        })
    }

    /// Whether all groups were taken into use.
    pub(crate) fn is_whole(&self) -> bool {
        self.slots.len() == self.groups
    }

    pub(crate) fn bytes(&self) -> usize {
        self.positions.len()
    }

    /// Takes the groups into use and starts to read those that are not here.
    ///
    /// # Errors
    /// Those of reading.
    pub(super) fn begin(&mut self, call: &Call<'_>) -> Result<(), DeviceError> {
        self.groups = call.storage.groups(call.unit);
        self.summed = 0;
        self.slots.clear();
        self.missing = false;
        let taken = self.take(call);
        if taken.is_err() {
            self.abandon(call.storage);
        }
        taken
    }

    /// Takes as many slices into use as the cache has room for: all groups of one or none, or two runs could wait for
    /// each other for ever.
    fn take(&mut self, call: &Call<'_>) -> Result<(), DeviceError> {
        let storage = call.storage;
        while !self.is_whole() {
            let start = self.slots.len();
            let end = self.groups.min(start + SLICE / storage.group());
            self.wanted.clear();
            self.wanted.extend(start as u32..end as u32);
            let whole = storage.whole();
            if let Err(seen) = storage.cache.acquire_all(call.unit, &self.wanted, whole, &mut self.acquired) {
                self.seen = seen;
                return Ok(());
            }
            let loading = storage.load(call.unit, &self.wanted, &self.acquired, &mut self.reads);
            if loading.is_err() {
                storage.cache.release(&self.acquired.slots);
            }
            loading?;
            self.missing |= !self.acquired.load.is_empty() || !self.acquired.joined.is_empty();
            self.slots.extend_from_slice(&self.acquired.slots);
        }
        Ok(())
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
        result
    }

    /// Gives back what is in use and will not be computed.
    pub(crate) fn abandon(&mut self, storage: &Storage) {
        storage.cache.release(&self.slots[self.summed..]);
        self.slots.truncate(self.summed);
    }

    fn compute(&mut self, call: &Call<'_>, jobs: &mut Jobs) -> Result<(), DeviceError> {
        let storage = call.storage;
        while self.summed < self.groups {
            if self.summed == self.slots.len() {
                self.take(call)?;
                if self.summed == self.slots.len() {
                    // Others hold what is missing: they give it back when they are done.
                    if !storage.wait(0, || storage.cache.wait_released(self.seen)) {
                        return Err(storage.failure());
                    }
                    continue;
                }
            }
            // What is all here is one job.
            let all = !self.missing || !storage.options.pipeline;
            let end = if all { self.slots.len() } else { self.summed + SLICE / storage.group() };
            let end = end.min(self.slots.len());
            if self.missing {
                let wanted = self.slots[self.summed..end].iter().map(|slot| (*slot, storage.whole()));
                if !storage.wait(wanted.len(), || storage.cache.wait_ready(wanted, usize::MAX)) {
                    return Err(storage.failure());
                }
            }
            self.job(call, jobs, end)?;
            storage.cache.release(&self.slots[self.summed..end]);
            self.summed = end;
        }
        Ok(())
    }

    /// Adds the groups from those that were summed up to `end`.
    fn job(&mut self, call: &Call<'_>, jobs: &mut Jobs, end: usize) -> Result<(), DeviceError> {
        let (storage, group) = (call.storage, call.storage.group());
        let first = self.summed * group;
        let last = storage.unit(call.unit).layout.neurons.min(end * group);
        let _span = span(&storage.trace, Lane::Conductor, Stage::Fused.name(), last - first);
        let positions = count_up(&mut self.positions, first..last)?;
        let mut slots = storage.arena.take_list();
        let of_group = |slot: &u32| *slot * group as u32..(*slot + 1) * group as u32;
        slots.extend(self.slots[self.summed..end].iter().flat_map(of_group).take(last - first));
        let job = ClusterJob {
            stage: Stage::Fused,
            tokens: call.input.tokens,
            activation: call.activation,
            weights: storage.weights(call.unit, slots, positions)?,
            x: call.input.h.read()?,
            hidden: None,
            y: Some(call.input.y.write()?),
            accumulate: self.summed > 0,
        };
        jobs.cluster(call.device, job)
    }
}
