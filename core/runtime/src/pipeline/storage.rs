//! The neurons of a model that does not fit in memory: which are here, and how the others come.
//!
//! One service for all layers and all sessions (PowerInfer-2 sections 4.2 to 4.4): a cache over one arena of slots, one
//! thread that reads, and a ring of slots at the end of the arena through which long sequential reads pass. The thread
//! that computes asks by cluster, never by neuron; it submits reads and goes on with what is here.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use neuropil_device::{Arena, Buffer, BundleLayout, ClusterWeights, DeviceError};

use crate::cache::{Acquired, Cache, Parts, Shared};
use crate::io::{Bundles, IoEngine, IoError, IoInfo, Read, Rows, Target, Targets};
use crate::store::{Layout, Part};

use super::io_thread::{IoThread, Sink, Source};
use super::report::StorageReport;
use super::residency::HotSizes;
use super::ring::Ring;
use super::trace::{Lane, Trace, span};

/// Longest read of neurons that lie side by side.
const LONGEST: usize = 256 << 10;

/// What the storage engine does; switched off piece by piece to see what each is worth.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PipelineOptions {
    /// Read a neuron's three rows as one bundle.
    pub bundle: bool,
    /// Keep what was read for later tokens.
    pub cache: bool,
    /// Compute while reads are under way.
    pub pipeline: bool,
    /// Read the gate row first, and the other two only when the gate is on. Used where it is expected to pay.
    pub two_phase: bool,
}

impl Default for PipelineOptions {
    fn default() -> PipelineOptions {
        PipelineOptions { bundle: true, cache: true, pipeline: true, two_phase: true }
    }
}

/// A feed-forward in the store: of a layer, or of one expert of it.
#[derive(Clone, Debug)]
pub(crate) struct Unit {
    /// Which of the store's files.
    pub file: usize,
    /// Where its bundles begin in the file.
    pub offset: u64,
    /// How they lie.
    pub layout: Layout,
    /// Whose neurons come next when all are read in order, if that is known.
    pub next: Option<usize>,
}

impl Unit {
    /// Where the rows lie.
    fn bundles(&self) -> Bundles {
        let Layout { neurons, gate_bytes, down_at, stride, .. } = self.layout;
        let rows = [gate_bytes, down_at];
        Bundles { file: self.file, start: self.offset, stride, count: neurons, rows }
    }
}

/// Feed-forwards over which is averaged what they miss.
const AVERAGED: u64 = 64;
/// Slots that a cache must have for each neuron that is read ahead.
const LEAST_PREFETCH_SLOTS: usize = 8;

/// Lists for reading ahead, kept for the next time.
#[derive(Default)]
pub(crate) struct PrefetchScratch {
    absent: Vec<u32>,
    acquired: Acquired,
    reads: Vec<Read>,
}

/// Gates of which it is remembered how many were on, and of which it is supposed before any was seen.
const MOST_COUNTED: u64 = 1 << 16;
const SUPPOSED: u64 = 64;
/// After so many feed-forwards without a first phase, what was counted counts half.
const FORGET: u64 = 4096;

/// Neighbours of a unit that go to neighbouring slots.
struct Run {
    parts: Parts,
    /// Where they lie in the file.
    offset: u64,
    len: usize,
    slots: Range<usize>,
    /// Where the parts of the first go in its slot.
    at: usize,
    /// Whether they follow the run before in the file.
    joined: bool,
}

impl Run {
    fn end(&self) -> u64 {
        self.offset + self.len as u64
    }
}

/// See the module.
pub(crate) struct Storage {
    pub cache: Arc<Shared>,
    pub arena: Arena,
    /// For long sequential reads.
    pub ring: Ring,
    pub(super) units: Vec<Unit>,
    io: IoThread,
    /// Reads that there were besides those of the thread, because bundles were cut.
    more: Arc<AtomicU64>,
    pub options: PipelineOptions,
    /// Whether slots hold the part `UpDown` alone, because the gates lie apart.
    gate_apart: bool,
    /// Neurons that the cache knows as one.
    group: usize,
    /// What reads of a part and of a whole bundle cost.
    costs: ReadCosts,
    pub trace: Option<Arc<Trace>>,
    /// Neurons whose gate was read first, and those that turned out to be on.
    first: AtomicU64,
    live: AtomicU64,
    /// Feed-forwards for which it did not pay.
    unused: AtomicU64,
    /// Nanoseconds in which nothing could be computed.
    waited: AtomicU64,
    /// Sliding sums over some feed-forwards: neurons that had to be read, and nanoseconds for which the others kept the
    /// computation busy.
    missed: AtomicU64,
    ready: AtomicU64,
    /// Neurons that were read ahead and not yet counted.
    ahead: AtomicU64,
    /// What had been read when loading was done.
    pub(super) base: Mutex<StorageReport>,
    /// Which neurons stay.
    pub(super) hot_sizes: Mutex<HotSizes>,
}

/// What reads of the parts of a bundle take, in nanoseconds.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct ReadCosts {
    pub gate: f64,
    pub up_down: f64,
    pub both: f64,
}

impl ReadCosts {
    fn of(layout: &Layout, info: &IoInfo, bundle: bool) -> ReadCosts {
        let Layout { gate_bytes, down_at, stride, .. } = *layout;
        let gate = info.cost(gate_bytes);
        if bundle {
            return ReadCosts { gate, up_down: info.cost(stride - gate_bytes), both: info.cost(stride) };
        }
        let up_down = info.cost(down_at - gate_bytes) + info.cost(stride - down_at);
        ReadCosts { gate, up_down, both: gate + up_down }
    }
}

/// What a [`Storage`] is made of.
pub(crate) struct StorageParts {
    pub units: Vec<Unit>,
    pub cache: Cache,
    pub arena: Arena,
    /// Slots of the arena that the cache uses; the ring has the rest.
    pub cached: usize,
    pub engine: Box<dyn IoEngine>,
    pub options: PipelineOptions,
    pub gate_apart: bool,
    /// Neurons that the cache knows as one, a whole part of a slice: it has an entry for each such group, whose neurons
    /// lie in neighbouring slots. More than 1 only where slots hold whole bundles.
    pub group: usize,
    pub trace: Option<Arc<Trace>>,
}

impl Storage {
    pub(crate) fn new(parts: StorageParts) -> Result<Storage, DeviceError> {
        let StorageParts { units, cache, arena, cached, mut engine, options, gate_apart, group, trace } =
            parts;
        let costs = units.first().map(|unit| ReadCosts::of(&unit.layout, engine.info(), options.bundle));
        let mut more = Arc::default();
        if !options.bundle {
            let rows = Rows::new(engine, units.iter().map(Unit::bundles).collect())?;
            more = rows.more();
            engine = Box::new(rows);
        }
        let cache = Arc::new(Shared::new(cache));
        let ring = Ring::new(cached..arena.slots())?;
        let sink = Sink { cache: cache.clone(), group, ring: ring.arrivals() };
        Ok(Storage {
            cache,
            ring,
            io: IoThread::start(engine, sink, trace.clone())?,
            more,
            arena,
            units,
            options,
            gate_apart,
            group,
            costs: costs.unwrap_or_default(),
            trace,
            first: AtomicU64::new(0),
            live: AtomicU64::new(0),
            unused: AtomicU64::new(0),
            waited: AtomicU64::new(0),
            missed: AtomicU64::new(0),
            ready: AtomicU64::new(0),
            ahead: AtomicU64::new(0),
            base: Mutex::default(),
            hot_sizes: Mutex::default(),
        })
    }

    pub(crate) fn unit(&self, unit: usize) -> &Unit {
        &self.units[unit]
    }

    /// Neurons that the cache knows as one.
    pub(crate) fn group(&self) -> usize {
        self.group
    }

    /// Groups of a unit.
    pub(crate) fn groups(&self, unit: usize) -> usize {
        self.units[unit].layout.neurons.div_ceil(self.group)
    }

    /// The parts that a slot holds when it is complete.
    pub(crate) fn whole(&self) -> Parts {
        if self.gate_apart { Parts::UP_DOWN } else { Parts::BOTH }
    }

    /// The rows of a slot.
    pub(crate) fn slot(&self, unit: usize) -> BundleLayout {
        let layout = &self.units[unit].layout;
        let mut slot = layout.slot();
        if self.gate_apart {
            (slot.gate, slot.up, slot.down) = (0, 0, layout.down_at - layout.gate_bytes);
        }
        slot
    }

    /// What is in these slots, as weights of a job; `positions` are those of the neurons, U32.
    pub(super) fn weights(
        &self,
        unit: usize,
        slots: Vec<u32>,
        positions: &Buffer,
    ) -> Result<ClusterWeights, DeviceError> {
        let (slots, positions) = (self.arena.pin(slots)?, positions.read()?);
        Ok(ClusterWeights::Bundles { layout: self.slot(unit), slots, positions })
    }

    /// Whether gates are worth reading first: by what reads cost, and by how many turned out to be on so far. Where the
    /// computation hides the reads, to read less is worth nothing, and the second phase comes late.
    pub(crate) fn gate_first(&self) -> bool {
        let hidden = self.options.pipeline && !self.is_behind();
        if !self.options.two_phase || self.gate_apart || hidden {
            return false;
        }
        let (first, live) = (self.first.load(Ordering::Relaxed), self.live.load(Ordering::Relaxed));
        // Before anything is known, half of them.
        let on = (live + SUPPOSED / 2) as f64 / (first + SUPPOSED) as f64;
        let pays = self.costs.gate + on * self.costs.up_down < self.costs.both;
        if !pays && self.unused.fetch_add(1, Ordering::Relaxed) % FORGET == FORGET - 1 {
            // Nothing is counted while it is off, so what was counted is slowly forgotten, and it is tried again.
            self.first.store(first / 2, Ordering::Relaxed);
            self.live.store(live / 2, Ordering::Relaxed);
        }
        pays
    }

    /// Tells how many gates turned out to be on.
    pub(crate) fn count_live(&self, neurons: usize, live: usize) {
        let older = |of: &AtomicU64, more: usize, old: bool| {
            let sum = of.load(Ordering::Relaxed) + more as u64;
            of.store(if old { sum / 2 } else { sum }, Ordering::Relaxed);
        };
        let old = self.first.load(Ordering::Relaxed) > MOST_COUNTED;
        older(&self.first, neurons, old);
        older(&self.live, live, old);
    }

    /// Starts to read neurons, or groups, that will probably be needed; nobody waits for them.
    ///
    /// # Errors
    /// As [`Storage::load`].
    pub(crate) fn prefetch(
        &self,
        unit: usize,
        positions: &[u32],
        scratch: &mut PrefetchScratch,
    ) -> Result<(), DeviceError> {
        // A small cache would lose what it needs now.
        if LEAST_PREFETCH_SLOTS * positions.len() * self.group > self.arena.slots() {
            return Ok(());
        }
        let PrefetchScratch { absent, acquired, reads } = scratch;
        self.cache.prefetch(unit, positions, self.whole(), absent, acquired);
        self.ahead.fetch_add(absent.len() as u64, Ordering::Relaxed);
        self.load(unit, absent, acquired, reads)
    }

    /// Whether reads take longer than what can be computed meanwhile, so that they should begin earlier.
    pub(crate) fn is_behind(&self) -> bool {
        let missed = self.missed.load(Ordering::Relaxed) as f64 / AVERAGED as f64;
        let ready = self.ready.load(Ordering::Relaxed) as f64 / AVERAGED as f64;
        self.options.pipeline && missed * self.costs.both > ready
    }

    /// Told of a cluster pipeline: neurons that had to be read, and the time for which the others kept it busy.
    pub(super) fn observe(&self, missed: usize, ready: Duration) {
        let average = |of: &AtomicU64, value: u64| {
            let before = of.load(Ordering::Relaxed);
            of.store(before - before / AVERAGED + value, Ordering::Relaxed);
        };
        average(&self.missed, missed as u64 + self.ahead.swap(0, Ordering::Relaxed));
        average(&self.ready, ready.as_nanos() as u64);
    }

    /// Starts to read what an acquisition must load: `positions`, of neurons or groups, are those that it was made for.
    /// After an error nothing of it is being read.
    ///
    /// # Errors
    /// [`DeviceError::Leased`] when a slot that must be free is in use, which is a fault of the cache.
    pub(crate) fn load(
        &self,
        unit: usize,
        positions: &[u32],
        acquired: &Acquired,
        reads: &mut Vec<Read>,
    ) -> Result<(), DeviceError> {
        reads.clear();
        let listed = self.list(unit, positions, acquired, reads);
        if listed.is_err() {
            reads.clear();
            self.cache.not_read(acquired);
        }
        listed?;
        self.io.submit(reads);
        Ok(())
    }

    /// Lists the reads of [`Storage::load`].
    fn list(
        &self,
        unit: usize,
        positions: &[u32],
        acquired: &Acquired,
        reads: &mut Vec<Read>,
    ) -> Result<(), DeviceError> {
        let of = &self.units[unit];
        let mut run: Option<Run> = None;
        for (index, parts) in &acquired.load {
            let (position, slot) = (positions[*index as usize], acquired.slots[*index as usize]);
            let part = match *parts {
                Parts::GATE => Part::Gate,
                Parts::UP_DOWN => Part::UpDown,
                _ => Part::Both,
            };
            // A group is whole bundles, one after the other.
            let (first, slot) = (position as usize * self.group, slot as usize * self.group);
            let count = self.group.min(of.layout.neurons - first);
            let range = match part {
                Part::Both => of.layout.run(first..first + count),
                part => of.layout.bundle(first, part),
            };
            let at = if part == Part::UpDown && !self.gate_apart { of.layout.gate_bytes } else { 0 };
            let (offset, len) = (of.offset + range.start, (range.end - range.start) as usize);
            // Neurons that lie side by side are one read, and where their slots do too, it needs no copy.
            let follows = |run: &Run| run.parts == *parts && run.end() == offset && run.len + len <= LONGEST;
            match &mut run {
                Some(run) if follows(run) && run.slots.end == slot && len == count * self.arena.stride() => {
                    run.slots.end += count;
                    run.len += len;
                }
                last => {
                    let joined = last.as_ref().is_some_and(follows);
                    let next = Run { parts: *parts, offset, len, slots: slot..slot + count, at, joined };
                    if let Some(run) = last.replace(next) {
                        self.push(of, run, reads)?;
                    }
                }
            }
        }
        run.map_or(Ok(()), |run| self.push(of, run, reads))
    }

    /// Adds a run to the reads: to the targets of the last one if it joins it.
    fn push(&self, of: &Unit, run: Run, reads: &mut Vec<Read>) -> Result<(), DeviceError> {
        let Run { parts, offset, len, slots, at, joined } = run;
        let last = reads.last_mut().filter(|read| joined && read.len + len <= LONGEST);
        let from = last.as_ref().map_or(0, |read| read.len);
        let count = slots.len();
        let targets: Targets = if count == 1 {
            Target { to: self.arena.write(slots.start)?, at, from, len }.into()
        } else if len == count * self.arena.stride() {
            Target { to: self.arena.write_run(slots)?, at, from, len }.into()
        } else {
            // Slots are longer than these bundles.
            self.each(slots, from, 0..of.layout.stride)?
        };
        match last {
            Some(read) => {
                read.len += len;
                read.targets.append(targets);
            }
            None => {
                reads.push(Read { tag: Source::Neurons(parts).tag(), file: of.file, offset, len, targets })
            }
        }
        Ok(())
    }

    /// A target for each slot: the bytes `of` each bundle, which lie one after the other from byte `from` of the read on.
    fn each(&self, slots: Range<usize>, from: usize, of: Range<usize>) -> Result<Targets, DeviceError> {
        let mut targets = Vec::with_capacity(slots.len());
        for (index, slot) in slots.enumerate() {
            let to = self.arena.write(slot)?;
            targets.push(Target { to, at: 0, from: from + index * of.end + of.start, len: of.len() });
        }
        Ok(targets.into())
    }

    /// Starts to read the bundles at some positions into a piece of the ring, slot after slot.
    pub(crate) fn load_run(
        &self,
        unit: usize,
        positions: Range<usize>,
        piece: usize,
        reads: &mut Vec<Read>,
    ) -> Result<(), DeviceError> {
        reads.clear();
        let of = &self.units[unit];
        let first = self.ring.slots(piece).start;
        let stride = of.layout.stride;
        let per_read = (LONGEST / stride).clamp(1, positions.len().max(1));
        let from = if self.gate_apart { of.layout.gate_bytes } else { 0 };
        let straight = !self.gate_apart && self.arena.stride() == stride;
        for start in positions.clone().step_by(per_read) {
            let end = positions.end.min(start + per_read);
            let range = of.layout.run(start..end);
            let slot = first + start - positions.start;
            let len = (range.end - range.start) as usize;
            let slots = slot..slot + end - start;
            let targets = if straight {
                Target::whole(self.arena.write_run(slots)?, len).into()
            } else {
                self.each(slots, 0, from..stride)?
            };
            let offset = of.offset + range.start;
            reads.push(Read { tag: Source::Ring(piece).tag(), file: of.file, offset, len, targets });
        }
        self.ring.expect(piece, reads.len());
        self.io.submit(reads);
        Ok(())
    }

    /// The error of the last read that failed.
    pub(crate) fn failure(&self) -> DeviceError {
        self.io.failure()
    }

    /// Waits by `wait`, and counts the time.
    pub(super) fn wait<R>(&self, reads: usize, wait: impl FnOnce() -> R) -> R {
        let _span = span(&self.trace, Lane::Conductor, "wait for reads", reads);
        let start = Instant::now();
        let result = wait();
        self.waited.fetch_add(start.elapsed().as_nanos() as u64, Ordering::Relaxed);
        result
    }

    /// A step ended.
    pub(crate) fn end_step(&self) {
        self.cache.end_step();
    }

    /// The report without what loading did.
    pub(crate) fn since_load(&self) -> StorageReport {
        let base = self.base.lock().unwrap_or_else(PoisonError::into_inner);
        self.report().since(&base)
    }

    pub(crate) fn report(&self) -> StorageReport {
        let (reads, bytes) = self.io.counts();
        let waited = Duration::from_nanos(self.waited.load(Ordering::Relaxed));
        StorageReport {
            engine: self.io.engine().into(),
            counters: self.cache.counters(),
            reads: reads + self.more.load(Ordering::Relaxed),
            bytes,
            waited,
        }
    }
}

/// The sentence of a failed read as a device's error.
pub(super) fn source_error(error: &IoError) -> DeviceError {
    DeviceError::Source { reason: error.to_string() }
}
