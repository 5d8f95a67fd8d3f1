//! The tables of the cache, and the rules by which slots change hands.

use std::mem::take;

use super::parts::PartStates;
use super::queues::MOST_SLOTS;
use super::slot::{NONE, Slot};
use super::{Acquired, CacheError, Counters, Eviction, Found, Held, Parts, Segment};

/// The neurons of a feed-forward: one layer, or one expert of a layer.
struct Unit {
    /// Number of the first neuron, over all units.
    start: usize,
    neurons: usize,
    /// So many of the first are hot,
    hot: usize,
    /// and so many of those are in memory.
    hot_here: usize,
}

/// Which neurons lie in which slots.
///
/// It has one owner, who is asked a cluster at a time. Misuse, such as a position that the unit does not have or the
/// release of what is not held, panics.
pub struct Cache {
    units: Vec<Unit>,
    slot_of: Vec<u32>,
    slots: Vec<Slot>,
    free: Vec<u32>,
    policy: Box<dyn Eviction>,
    counters: Counters,
    /// Slots that are held.
    held: usize,
    /// Where hot neurons that must go were last looked for.
    hand: usize,
    lists: [Vec<u32>; 2],
}

impl Cache {
    /// An empty cache for `units` of so many neurons each, with so many `slots` in its arena.
    ///
    /// # Errors
    /// When there are no slots, or too many of anything for the tables.
    pub fn new(units: &[usize], slots: usize, policy: Box<dyn Eviction>) -> Result<Cache, CacheError> {
        let neurons = units.iter().fold(0usize, |sum, unit| sum.saturating_add(*unit));
        if neurons >= NONE as usize {
            return Err(CacheError::TooMany { what: "neurons", found: neurons, most: NONE as usize - 1 });
        }
        let out_of_memory = |source| CacheError::OutOfMemory { neurons, slots, source };
        let mut cache = Cache {
            units: Vec::new(),
            slot_of: Vec::new(),
            slots: Vec::new(),
            free: Vec::new(),
            policy,
            counters: Counters::default(),
            held: 0,
            hand: 0,
            lists: Default::default(),
        };
        cache.units.try_reserve_exact(units.len()).map_err(out_of_memory)?;
        let mut start = 0;
        for neurons in units {
            cache.units.push(Unit { start, neurons: *neurons, hot: 0, hot_here: 0 });
            start += neurons;
        }
        cache.slot_of.try_reserve_exact(neurons).map_err(out_of_memory)?;
        cache.slot_of.resize(neurons, NONE);
        cache.resize(slots)?;
        Ok(cache)
    }

    /// Takes the neurons at `positions` of a unit into use, in ascending order, each until it is released, and says what
    /// is to be read of them. What it says is to be read counts as being read from now on, until
    /// [`loaded`](Cache::loaded).
    ///
    /// Takes as many of the first as it can, and says how many: fewer than asked for where slots run out, and none
    /// only where others hold slots and each of the rest is hot. The caller then works in waves.
    pub fn acquire(&mut self, unit: usize, positions: &[u32], parts: Parts, out: &mut Acquired) -> usize {
        debug_assert!(positions.is_sorted_by(|a, b| a < b), "positions must ascend");
        let mut absent = self.take_present(unit, positions, parts, out);
        if !self.make_room(absent) {
            self.put_back(out);
            if self.fitting(unit, positions) == 0 {
                // What is there of the others must go for the sake of the first.
                self.make_room(absent);
                if self.free.is_empty() && self.held == 0 {
                    self.give_up_hot(absent);
                }
            }
            let fitting = self.fitting(unit, &positions[..out.slots.len()]);
            absent = self.take_present(unit, &positions[..fitting], parts, out);
        }
        self.begin(unit, positions, absent, out);
        out.slots.len()
    }

    /// The first half of [`acquire`](Cache::acquire): holds what is in memory, and lists what is not. Says how many
    /// have no slot.
    fn take_present(&mut self, unit: usize, positions: &[u32], parts: Parts, out: &mut Acquired) -> usize {
        out.clear();
        let mut absent = 0;
        let Unit { start, neurons, .. } = self.units[unit];
        let slot_of = &self.slot_of[start..start + neurons];
        out.slots.extend(positions.iter().map(|position| slot_of[*position as usize]));
        for (index, at) in (0u32..).zip(&out.slots) {
            if *at == NONE {
                absent += 1;
                out.load.push((index, parts));
                continue;
            }
            let slot = &mut self.slots[*at as usize];
            if slot.holds == u16::MAX {
                out.slots.truncate(index as usize);
                break;
            }
            self.held += usize::from(!slot.is_held());
            slot.holds += 1;
            if slot.parts.ready().contains(parts) {
                out.ready.push(index);
            } else {
                classify(index, slot, parts, &mut out.joined, &mut out.load);
            }
        }
        absent
    }

    /// Undoes [`take_present`](Cache::take_present).
    fn put_back(&mut self, out: &Acquired) {
        for at in out.slots.iter().filter(|at| **at != NONE) {
            let slot = &mut self.slots[*at as usize];
            slot.holds -= 1;
            self.held -= usize::from(!slot.is_held());
        }
    }

    /// How many of the first neurons find a slot now.
    fn fitting(&self, unit: usize, positions: &[u32]) -> usize {
        let mut free = self.free.len();
        let fits = |position: &&u32| {
            let there = self.slot_of[self.units[unit].start + **position as usize] != NONE;
            let fits = there || free > 0;
            free -= usize::from(!there && fits);
            fits
        };
        positions.iter().take_while(fits).count()
    }

    /// The second half of [`acquire`](Cache::acquire): gives slots to those that have none, marks what is to be read,
    /// and tells the policy.
    fn begin(&mut self, unit: usize, positions: &[u32], absent: usize, out: &mut Acquired) {
        let Unit { start, hot, .. } = self.units[unit];
        let taken = out.slots.len();
        let cold = positions[..taken].partition_point(|position| (*position as usize) < hot);

        if absent > 0 {
            let [mut new, mut neurons] = take(&mut self.lists);
            new.clear();
            neurons.clear();
            for (index, parts) in &out.load {
                let index = *index as usize;
                if out.slots[index] != NONE {
                    continue;
                }
                let Some(at) = self.free.pop() else { unreachable!("a slot was made free for each") };
                let neuron = (start + positions[index] as usize) as u32;
                let is_cold = index >= cold;
                out.slots[index] = at;
                self.slot_of[neuron as usize] = at;
                self.slots[at as usize] =
                    Slot { neuron, holds: 1, parts: PartStates::reading(*parts), cold: is_cold };
                if is_cold {
                    new.push(at);
                    neurons.push(neuron);
                } else {
                    self.units[unit].hot_here += 1;
                }
            }
            self.held += absent;
            self.policy.insert(&new, &neurons);
            self.lists = [new, neurons];
        }
        self.policy.asked(&out.slots[cold..]);
        self.mark(out);

        let hot_found = found(out, 0, cold);
        let cold_found = found(out, cold, taken);
        add(&mut self.counters.hot.taken, hot_found);
        add(&mut self.counters.cold.taken, cold_found);
    }

    /// Marks what the caller must read as being read.
    fn mark(&mut self, out: &Acquired) {
        for (index, parts) in &out.load {
            self.slots[out.slots[*index as usize] as usize].parts.begin(*parts);
        }
    }

    /// Asks for more parts of neurons that the caller holds, in the order of their slots in `slots`.
    pub fn upgrade(&mut self, slots: &[u32], parts: Parts, out: &mut Acquired) {
        out.clear();
        out.slots.extend_from_slice(slots);
        for (index, at) in slots.iter().enumerate() {
            let slot = &self.slots[*at as usize];
            debug_assert!(slot.holds > 0, "slot {at} is not held");
            let mut one = Found::default();
            let reads = out.load.len();
            if slot.parts.ready().contains(parts) {
                out.ready.push(index as u32);
                one.hits = 1;
            } else {
                classify(index as u32, slot, parts, &mut out.joined, &mut out.load);
                one.misses = (out.load.len() - reads) as u64;
                one.joined = 1 - one.misses;
            }
            let cold = slot.cold;
            add(&mut self.segment(cold).upgraded, one);
        }
        self.mark(out);
    }

    /// Reports that reading `parts` into a slot has ended. Where it was not `ok` they are neither there nor being read,
    /// so that whoever waits for them can read them.
    pub fn loaded(&mut self, slot: u32, parts: Parts, ok: bool) {
        let entry = &mut self.slots[slot as usize];
        let parts = parts.common(entry.parts.loading());
        if !parts.is_empty() {
            entry.parts.end(parts, ok);
            self.let_go(slot);
        }
    }

    /// Whether an acquisition of `parts` took a neuron that somebody else uses and of which parts were neither there nor
    /// being read, so that its slot must be written to while it is in use. Who asks for up and down alone never asks for
    /// the gate.
    pub(super) fn collides(&self, parts: Parts, out: &Acquired) -> bool {
        let shared = |at: u32| self.slots[at as usize].holds > 1;
        let whole = if parts == Parts::UP_DOWN { parts } else { Parts::BOTH };
        let half = |at: u32| {
            let states = self.slots[at as usize].parts;
            !(states.ready() | states.loading()).contains(whole)
        };
        out.load.iter().any(|(index, _)| shared(out.slots[*index as usize]))
            || out.slots.iter().any(|at| shared(*at) && half(*at))
    }

    /// The parts in a slot that are there, and those that are being read.
    pub fn state(&self, slot: u32) -> (Parts, Parts) {
        let parts = self.slots[slot as usize].parts;
        (parts.ready(), parts.loading())
    }

    /// Ends one use of each of these slots. A neuron of which nothing could be read loses its slot with its last use.
    pub fn release(&mut self, slots: &[u32]) {
        for slot in slots {
            let entry = &mut self.slots[*slot as usize];
            assert!(entry.holds > 0, "slot {slot} is released more often than it was acquired");
            entry.holds -= 1;
            self.let_go(*slot);
        }
    }

    /// After a use or a read of a slot ended: if that was the last one, it is no longer held.
    #[inline]
    fn let_go(&mut self, at: u32) {
        let slot = &self.slots[at as usize];
        if slot.is_held() {
            return;
        }
        self.held -= 1;
        if slot.parts.ready().is_empty() {
            if slot.cold {
                self.policy.remove(&[at]);
            }
            self.vacate(at);
        }
    }

    /// From now on the first `count` neurons of a unit are hot: no policy evicts them. Reads and drops nothing; see
    /// [`missing_hot`](Cache::missing_hot). What was hot and no longer is goes to the policy.
    ///
    /// A hot neuron goes only where all slots have hot ones and none is held, since a step must be able to go on.
    pub fn set_hot(&mut self, unit: usize, count: usize) {
        let Unit { start, neurons: all, hot: before, .. } = self.units[unit];
        let count = count.min(all);
        let changed = start + count.min(before)..start + count.max(before);
        let [mut slots, mut neurons] = take(&mut self.lists);
        slots.clear();
        neurons.clear();
        for neuron in changed {
            let at = self.slot_of[neuron];
            if at != NONE {
                slots.push(at);
                neurons.push(neuron as u32);
                self.slots[at as usize].cold = count < before;
            }
        }
        let unit = &mut self.units[unit];
        unit.hot = count;
        if count > before {
            unit.hot_here += slots.len();
            self.policy.remove(&slots);
        } else {
            unit.hot_here -= slots.len();
            self.policy.insert(&slots, &neurons);
        }
        self.lists = [slots, neurons];
    }

    /// How many of the first neurons of a unit are hot.
    pub fn hot(&self, unit: usize) -> usize {
        self.units[unit].hot
    }

    /// Lists the positions of hot neurons of a unit that are not in memory, ascending. Costs nothing where all are.
    pub fn missing_hot(&self, unit: usize, out: &mut Vec<u32>) {
        out.clear();
        let Unit { start, hot, hot_here, .. } = self.units[unit];
        if hot_here < hot {
            let slots = self.slot_of[start..start + hot].iter();
            out.extend((0u32..).zip(slots).filter(|(_, slot)| **slot == NONE).map(|(position, _)| position));
        }
    }

    /// Gives a neuron a free slot, for filling the arena at the start; all its parts count as being read until
    /// [`loaded`](Cache::loaded). None when no slot is free, or the neuron has one.
    ///
    /// Slots are given in ascending order. A unit's neurons placed one after the other are found together later, which
    /// makes questions twice as fast. `Lru` takes the neuron placed last for the one used last, so of a unit those that
    /// fire most should come last; `Odds` knows better than the order.
    pub fn place(&mut self, unit: usize, position: u32) -> Option<u32> {
        let Unit { start, hot, .. } = self.units[unit];
        let neuron = start + position as usize;
        if self.slot_of[neuron] != NONE {
            return None;
        }
        let at = self.free.pop()?;
        self.slot_of[neuron] = at;
        let (neuron, cold) = (neuron as u32, position as usize >= hot);
        self.slots[at as usize] = Slot { neuron, holds: 0, parts: PartStates::reading(Parts::BOTH), cold };
        self.held += 1;
        if cold {
            self.policy.insert(&[at], &[neuron]);
        } else {
            self.units[unit].hot_here += 1;
        }
        Some(at)
    }

    /// Makes the first `slots` of the arena the usable ones. Neurons in slots that go are dropped.
    ///
    /// # Errors
    /// When a slot that goes is held, when the new tables do not fit, and when nothing would be left; nothing has changed
    /// then.
    pub fn resize(&mut self, slots: usize) -> Result<(), CacheError> {
        if slots == 0 {
            return Err(CacheError::NoSlots);
        }
        if slots > MOST_SLOTS {
            return Err(CacheError::TooMany { what: "slots", found: slots, most: MOST_SLOTS });
        }
        let before = self.slots.len();
        if slots < before {
            if let Some(behind) = self.slots[slots..].iter().position(Slot::is_held) {
                return Err(CacheError::Held { slot: (slots + behind) as u32 });
            }
            for at in slots..before {
                self.drop_idle(at as u32);
            }
            self.free.retain(|at| (*at as usize) < slots);
            self.slots.truncate(slots);
            self.hand = 0;
        } else {
            let neurons = self.slot_of.len();
            let out_of_memory = |source| CacheError::OutOfMemory { neurons, slots, source };
            let more = slots - before;
            self.policy.reserve(slots, neurons).map_err(out_of_memory)?;
            self.slots.try_reserve_exact(more).map_err(out_of_memory)?;
            // All slots may be free at once.
            self.free.try_reserve_exact(slots - self.free.len()).map_err(out_of_memory)?;
            self.slots.resize(slots, Slot::free());
            self.free.extend((before as u32..slots as u32).rev());
        }
        Ok(())
    }

    /// A step ended: one token of each sequence. A policy may let go of old neurons now.
    pub fn end_step(&mut self) {
        let [mut victims, spare] = take(&mut self.lists);
        victims.clear();
        self.policy.tick(&Held(&self.slots), &mut victims);
        self.evicted(&victims);
        self.lists = [victims, spare];
    }

    /// What happened so far.
    pub fn counters(&self) -> Counters {
        let slots = self.slots.len();
        Counters { in_use: slots - self.free.len(), slots, ..self.counters }
    }

    /// How many slots are in use or being filled.
    pub fn held(&self) -> usize {
        self.held
    }

    /// The slot of a neuron that has one.
    pub fn slot(&self, unit: usize, position: u32) -> Option<u32> {
        let at = self.slot_of[self.units[unit].start + position as usize];
        (at != NONE).then_some(at)
    }

    /// The policy that says which cold neurons go.
    pub fn policy(&self) -> &dyn Eviction {
        self.policy.as_ref()
    }

    /// Frees slots until there are `wanted`; false where that cannot be.
    fn make_room(&mut self, wanted: usize) -> bool {
        if wanted > self.free.len() {
            let [mut victims, spare] = take(&mut self.lists);
            victims.clear();
            self.policy.evict(wanted - self.free.len(), &Held(&self.slots), &mut victims);
            self.evicted(&victims);
            self.lists = [victims, spare];
        }
        wanted <= self.free.len()
    }

    /// Frees what the policy gave up.
    fn evicted(&mut self, victims: &[u32]) {
        for at in victims {
            assert!(!self.slots[*at as usize].is_held(), "a policy gave up slot {at}, which is held");
            self.vacate(*at);
        }
        self.counters.cold.evictions += victims.len() as u64;
    }

    /// Frees up to `count` slots of hot neurons, where all are hot and none is held.
    fn give_up_hot(&mut self, count: usize) {
        for _ in 0..self.slots.len() {
            if self.free.len() >= count {
                break;
            }
            self.drop_idle(self.hand as u32);
            self.hand = (self.hand + 1) % self.slots.len();
        }
    }

    /// Frees a slot that is not held, whatever is in it.
    fn drop_idle(&mut self, at: u32) {
        let Slot { neuron, cold, .. } = self.slots[at as usize];
        if neuron == NONE {
            return;
        }
        if cold {
            self.policy.remove(&[at]);
        }
        self.segment(cold).evictions += 1;
        self.vacate(at);
    }

    /// Parts a slot that the policy does not have, or no longer, from its neuron.
    fn vacate(&mut self, at: u32) {
        let Slot { neuron, cold, .. } = self.slots[at as usize];
        if !cold {
            let unit = self.units.partition_point(|unit| unit.start <= neuron as usize) - 1;
            self.units[unit].hot_here -= 1;
        }
        self.slot_of[neuron as usize] = NONE;
        self.slots[at as usize] = Slot::free();
        self.free.push(at);
    }

    fn segment(&mut self, cold: bool) -> &mut Segment {
        if cold { &mut self.counters.cold } else { &mut self.counters.hot }
    }
}

/// Puts a neuron of which parts are missing in the lists where it belongs.
fn classify(index: u32, slot: &Slot, parts: Parts, joined: &mut Vec<u32>, load: &mut Vec<(u32, Parts)>) {
    let missing = parts.without(slot.parts.ready());
    if !missing.common(slot.parts.loading()).is_empty() {
        joined.push(index);
    }
    let mine = missing.without(slot.parts.loading());
    if !mine.is_empty() {
        load.push((index, mine));
    }
}

/// How the neurons with indices from `from` up to `to` were found.
fn found(out: &Acquired, from: usize, to: usize) -> Found {
    let within = |list: &[u32]| {
        let below = |end: usize| list.partition_point(|index| (*index as usize) < end);
        (below(to) - below(from)) as u64
    };
    let below = |end: usize| out.load.partition_point(|(index, _)| (*index as usize) < end);
    let (hits, misses) = (within(&out.ready), (below(to) - below(from)) as u64);
    Found { hits, misses, joined: (to - from) as u64 - hits - misses }
}

fn add(sum: &mut Found, found: Found) {
    sum.hits += found.hits;
    sum.joined += found.joined;
    sum.misses += found.misses;
}
