//! A cache in obvious code. It is told what the real one is told, predicts what can be predicted, and for the policy of
//! the paper that includes who goes.

use std::collections::{BTreeMap, BTreeSet};

use neuropil::cache::{Acquired, Cache, CacheError, Counters, Eviction, Parts};

/// Neurons of each unit.
pub const UNITS: [usize; 4] = [7, 0, 12, 5];

type Neuron = (usize, u32);

#[derive(Clone, Debug)]
struct Entry {
    slot: u32,
    holds: usize,
    ready: Parts,
    loading: Parts,
}

impl Entry {
    fn held(&self) -> bool {
        self.holds > 0 || !self.loading.is_empty()
    }
}

pub struct Twin {
    real: Cache,
    out: Acquired,
    entries: BTreeMap<Neuron, Entry>,
    slots: usize,
    hot: [usize; UNITS.len()],
    counters: Counters,
    /// What was acquired together and not yet released.
    groups: Vec<Vec<u32>>,
    /// Reads that somebody has to do.
    reads: Vec<(u32, Parts)>,
    /// Cold neurons in memory, the least recently used first; only for that policy.
    order: Option<Vec<Neuron>>,
    /// Neurons may go at the end of a step.
    window: bool,
}

impl Twin {
    pub fn new(policy: Box<dyn Eviction>, slots: usize) -> Twin {
        let (lru, window) = (policy.name() == "lru", policy.name() == "window");
        Twin {
            real: Cache::new(&UNITS, slots, policy).unwrap(),
            out: Acquired::default(),
            entries: BTreeMap::new(),
            slots,
            hot: [0; UNITS.len()],
            counters: Counters::default(),
            groups: Vec::new(),
            reads: Vec::new(),
            order: lru.then(Vec::new),
            window,
        }
    }

    fn is_hot(&self, neuron: Neuron) -> bool {
        (neuron.1 as usize) < self.hot[neuron.0]
    }

    fn neuron_in(&self, slot: u32) -> Neuron {
        *self.entries.iter().find(|(_, entry)| entry.slot == slot).unwrap().0
    }

    fn any_held(&self) -> bool {
        self.entries.values().any(Entry::held)
    }

    /// The neurons that the real cache no longer has, or has anew: of those nothing is there.
    fn gone(&self) -> Vec<Neuron> {
        let gone = |(neuron, entry): &(&Neuron, &Entry)| {
            let slot = self.real.slot(neuron.0, neuron.1);
            slot.is_none_or(|slot| !self.real.state(slot).0.contains(entry.ready))
        };
        self.entries.iter().filter(gone).map(|(neuron, _)| *neuron).collect()
    }

    /// Moves neurons to the end, those that fire most last.
    fn used(&mut self, neurons: &[Neuron]) {
        let cold: Vec<Neuron> = neurons.iter().rev().filter(|n| !self.is_hot(**n)).copied().collect();
        if let Some(order) = &mut self.order {
            order.retain(|neuron| !cold.contains(neuron));
            order.extend(cold);
        }
    }

    /// Who goes by the policy of the paper; what is held is passed over and counts as used.
    fn victims(&mut self, count: usize, keep: &[Neuron]) -> Vec<Neuron> {
        let (mut victims, mut passed) = (Vec::new(), Vec::new());
        let entries = &self.entries;
        if let Some(order) = &mut self.order {
            while victims.len() < count && !order.is_empty() {
                let neuron = order.remove(0);
                let kept = keep.contains(&neuron) || entries[&neuron].held();
                if kept { passed.push(neuron) } else { victims.push(neuron) }
            }
            order.extend(passed);
        }
        victims
    }

    pub fn acquire(&mut self, unit: usize, mask: u16, parts: Parts) {
        let all: Vec<u32> = (0..UNITS[unit] as u32).filter(|p| mask >> p & 1 == 1).collect();
        let neurons: Vec<Neuron> = all.iter().map(|p| (unit, *p)).collect();
        let present: Vec<Neuron> = neurons.iter().filter(|n| self.entries.contains_key(n)).copied().collect();
        let (absent, free) = (all.len() - present.len(), self.slots - self.entries.len());
        let first_absent = neurons.first().is_some_and(|first| !present.contains(first));
        let idle = |(n, entry): (&Neuron, &Entry)| !entry.held() && !self.is_hot(*n);
        let (idle_cold, nothing_held) = (self.entries.iter().any(idle), !self.any_held());

        let taken = self.real.acquire(unit, &all, parts, &mut self.out);
        assert_eq!(taken, self.out.slots.len());

        // Who went, and whether they might.
        let gone = self.gone();
        let wanted = absent.saturating_sub(free);
        let mut expected = self.victims(wanted, &present);
        if self.order.is_some() && free + expected.len() == 0 && first_absent {
            expected = self.victims(wanted, &[]);
        }
        let hot: Vec<&Neuron> = gone.iter().filter(|n| self.is_hot(**n)).collect();
        assert!(gone.iter().all(|neuron| !self.entries[neuron].held()), "a held neuron went");
        assert!(gone.len() <= wanted);
        if !hot.is_empty() {
            assert!(nothing_held && !idle_cold && free == 0, "hot neurons went without need");
        } else if self.order.is_some() {
            expected.sort_unstable();
            assert_eq!(gone, expected, "not the least recently used");
        }
        assert!(taken < all.len() || gone.len() == wanted, "too many went, or too few");
        if taken < all.len() {
            assert_eq!(
                free + gone.len(),
                neurons[..taken].iter().filter(|n| !present.contains(n) || gone.contains(n)).count()
            );
        }
        let stuck = free == 0 && !idle_cold && !nothing_held && first_absent;
        assert_eq!(taken == 0, all.is_empty() || stuck);
        self.forget(&gone);

        // How the others were found.
        let (mut ready, mut joined, mut load) = (Vec::new(), Vec::new(), Vec::new());
        for (index, neuron) in (0u32..).zip(&neurons[..taken]) {
            let slot = self.real.slot(neuron.0, neuron.1).unwrap();
            assert_eq!(slot, self.out.slots[index as usize]);
            let new = Entry { slot, holds: 0, ready: Parts::NONE, loading: Parts::NONE };
            let entry = self.entries.entry(*neuron).or_insert(new);
            assert_eq!(slot, entry.slot, "a neuron moved");
            entry.holds += 1;
            ask(entry, index, parts, [&mut ready, &mut joined], &mut load);
        }
        assert_eq!((&ready, &joined, &load), (&self.out.ready, &self.out.joined, &self.out.load));
        for (index, neuron) in (0u32..).zip(&neurons[..taken]) {
            let found = if self.is_hot(*neuron) {
                &mut self.counters.hot.taken
            } else {
                &mut self.counters.cold.taken
            };
            let miss = load.iter().any(|(i, _)| *i == index);
            match (ready.contains(&index), miss) {
                (true, _) => found.hits += 1,
                (_, true) => found.misses += 1,
                _ => found.joined += 1,
            }
        }
        self.used(&neurons[..taken]);
        self.reads.extend(load.iter().map(|(index, parts)| (self.out.slots[*index as usize], *parts)));
        self.groups.push(self.out.slots.clone());
    }

    /// Neurons lost their slots to others.
    fn forget(&mut self, gone: &[Neuron]) {
        for neuron in gone {
            if self.is_hot(*neuron) {
                self.counters.hot.evictions += 1;
            } else {
                self.counters.cold.evictions += 1;
            }
            self.drop(*neuron);
        }
    }

    fn drop(&mut self, neuron: Neuron) {
        self.entries.remove(&neuron);
        self.order.iter_mut().for_each(|order| order.retain(|other| *other != neuron));
    }

    pub fn upgrade(&mut self, group: usize, parts: Parts) {
        let Some(slots) = pick(&self.groups, group).map(|group| self.groups[group].clone()) else { return };
        self.real.upgrade(&slots, parts, &mut self.out);
        let (mut ready, mut joined, mut load) = (Vec::new(), Vec::new(), Vec::new());
        for (index, slot) in (0u32..).zip(&slots) {
            let neuron = self.neuron_in(*slot);
            let Some(entry) = self.entries.get_mut(&neuron) else { unreachable!() };
            ask(entry, index, parts, [&mut ready, &mut joined], &mut load);
            let hot = self.is_hot(neuron);
            let segment = if hot { &mut self.counters.hot } else { &mut self.counters.cold };
            let miss = load.last().is_some_and(|(i, _)| *i == index);
            match (ready.last() == Some(&index), miss) {
                (true, _) => segment.upgraded.hits += 1,
                (_, true) => segment.upgraded.misses += 1,
                _ => segment.upgraded.joined += 1,
            }
        }
        assert_eq!(self.out.slots, slots);
        assert_eq!((&ready, &joined, &load), (&self.out.ready, &self.out.joined, &self.out.load));
        self.reads.extend(load.iter().map(|(index, parts)| (slots[*index as usize], *parts)));
    }

    pub fn loaded(&mut self, read: usize, ok: bool) {
        let Some(read) = pick(&self.reads, read) else { return };
        let (slot, parts) = self.reads.swap_remove(read);
        let neuron = self.neuron_in(slot);
        self.real.loaded(slot, parts, ok);
        let Some(entry) = self.entries.get_mut(&neuron) else { unreachable!() };
        entry.loading = entry.loading.without(parts);
        if ok {
            entry.ready = entry.ready | parts;
        }
        self.drop_if_empty(neuron);
    }

    fn drop_if_empty(&mut self, neuron: Neuron) {
        if !self.entries[&neuron].held() && self.entries[&neuron].ready.is_empty() {
            self.drop(neuron);
        }
    }

    pub fn release(&mut self, group: usize) {
        let Some(group) = pick(&self.groups, group) else { return };
        let slots = self.groups.swap_remove(group);
        self.real.release(&slots);
        for slot in slots {
            let neuron = self.neuron_in(slot);
            self.entries.entry(neuron).and_modify(|entry| entry.holds -= 1);
            self.drop_if_empty(neuron);
        }
    }

    pub fn set_hot(&mut self, unit: usize, count: usize) {
        self.real.set_hot(unit, count);
        let (before, now) = (self.hot[unit], count.min(UNITS[unit]));
        self.hot[unit] = now;
        if now > before {
            self.order.iter_mut().for_each(|order| order.retain(|n| n.0 != unit || n.1 as usize >= now));
        }
        let there: Vec<Neuron> = self.entries.keys().copied().collect();
        let freed: Vec<Neuron> =
            there.into_iter().filter(|n| n.0 == unit && (now..before).contains(&(n.1 as usize))).collect();
        self.used(&freed);
    }

    pub fn place(&mut self, unit: usize, position: u32) {
        if position as usize >= UNITS[unit] {
            return;
        }
        let neuron = (unit, position);
        let possible = self.entries.len() < self.slots && !self.entries.contains_key(&neuron);
        let slot = self.real.place(unit, position);
        assert_eq!(slot.is_some(), possible);
        if let Some(slot) = slot {
            self.entries.insert(neuron, Entry { slot, holds: 0, ready: Parts::NONE, loading: Parts::BOTH });
            self.reads.push((slot, Parts::BOTH));
            self.used(&[neuron]);
        }
    }

    pub fn resize(&mut self, slots: usize) {
        let behind = |entry: &Entry| entry.slot as usize >= slots;
        let held = self.entries.values().filter(|e| behind(e) && e.held()).map(|e| e.slot).min();
        let expected = match (slots, held) {
            (0, _) => Err(CacheError::NoSlots),
            (_, Some(slot)) => Err(CacheError::Held { slot }),
            _ => Ok(()),
        };
        let result = self.real.resize(slots);
        assert_eq!(result, expected);
        if result.is_ok() {
            let gone: Vec<Neuron> = self.entries.iter().filter(|(_, e)| behind(e)).map(|(n, _)| *n).collect();
            assert_eq!(gone, self.gone());
            self.forget(&gone);
            self.slots = slots;
        }
    }

    pub fn end_step(&mut self) {
        self.real.end_step();
        let gone = self.gone();
        assert!(self.window || gone.is_empty());
        assert!(gone.iter().all(|neuron| !self.entries[neuron].held() && !self.is_hot(*neuron)));
        self.forget(&gone);
    }

    /// What must hold at any time.
    pub fn check(&self) {
        let mut slots = BTreeSet::new();
        for (unit, neurons) in UNITS.iter().enumerate() {
            let mut missing = Vec::new();
            for position in 0..*neurons as u32 {
                let slot = self.real.slot(unit, position);
                let entry = self.entries.get(&(unit, position));
                assert_eq!(slot, entry.map(|entry| entry.slot));
                match (slot, entry) {
                    (Some(slot), Some(entry)) => {
                        assert!(
                            (slot as usize) < self.slots && slots.insert(slot),
                            "slot {slot} is used twice"
                        );
                        assert_eq!(self.real.state(slot), (entry.ready, entry.loading));
                    }
                    _ if self.is_hot((unit, position)) => missing.push(position),
                    _ => {}
                }
            }
            let mut found = Vec::new();
            self.real.missing_hot(unit, &mut found);
            assert_eq!(found, missing);
        }
        let expected = Counters { in_use: slots.len(), slots: self.slots, ..self.counters };
        assert_eq!(self.real.counters(), expected);
    }

    /// Ends all reads and uses, after which any neuron can come.
    pub fn finish(&mut self) {
        while !self.reads.is_empty() {
            self.loaded(0, true);
        }
        while !self.groups.is_empty() {
            self.release(0);
        }
        self.check();
        assert!(!self.any_held());
        for (unit, neurons) in UNITS.iter().enumerate() {
            for position in 0..*neurons as u32 {
                assert_eq!(self.real.acquire(unit, &[position], Parts::BOTH, &mut self.out), 1);
                let slot = self.out.slots[0];
                self.out.load.iter().for_each(|(_, parts)| self.real.loaded(slot, *parts, true));
                self.real.release(&[slot]);
            }
        }
    }
}

fn pick<T>(list: &[T], index: usize) -> Option<usize> {
    (!list.is_empty()).then(|| index % list.len())
}

/// Asks one neuron for parts.
fn ask(entry: &mut Entry, index: u32, parts: Parts, found: [&mut Vec<u32>; 2], load: &mut Vec<(u32, Parts)>) {
    let [ready, joined] = found;
    let missing = parts.without(entry.ready);
    if missing.is_empty() {
        ready.push(index);
    }
    if !missing.common(entry.loading).is_empty() {
        joined.push(index);
    }
    let read = missing.without(entry.loading);
    if !read.is_empty() {
        load.push((index, read));
        entry.loading = entry.loading | read;
    }
}
