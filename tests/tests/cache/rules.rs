//! Single rules of the cache, as one reads about them.

use neuropil::cache::{Acquired, Cache, CacheError, Lru, Parts};

fn cache(units: &[usize], slots: usize) -> (Cache, Acquired) {
    (Cache::new(units, slots, Box::new(Lru::default())).unwrap(), Acquired::default())
}

/// Reads all that the last question asked for, and releases it.
fn read(cache: &mut Cache, out: &Acquired) {
    out.load.iter().for_each(|(index, parts)| cache.loaded(out.slots[*index as usize], *parts, true));
    cache.release(&out.slots);
}

#[test]
fn the_second_phase_reads_only_what_the_first_did_not() {
    let (mut cache, mut out) = cache(&[8], 4);
    assert_eq!(cache.acquire(0, &[2, 5], Parts::GATE, &mut out), 2);
    assert_eq!(out.load, [(0, Parts::GATE), (1, Parts::GATE)]);
    let slots = out.slots.clone();
    slots.iter().for_each(|slot| cache.loaded(*slot, Parts::GATE, true));
    cache.upgrade(&slots[1..], Parts::BOTH, &mut out);
    assert_eq!(out.load, [(0, Parts::UP_DOWN)]);
    // Meanwhile somebody else asks for the same.
    assert_eq!(cache.acquire(0, &[2, 5], Parts::BOTH, &mut out), 2);
    assert_eq!((&out.joined[..], &out.load[..]), (&[1][..], &[(0, Parts::UP_DOWN)][..]));
}

#[test]
fn a_read_that_fails_leaves_nothing_behind() {
    let (mut cache, mut out) = cache(&[8], 4);
    cache.acquire(0, &[1], Parts::BOTH, &mut out);
    cache.loaded(out.slots[0], Parts::BOTH, false);
    assert_eq!(cache.state(out.slots[0]), (Parts::NONE, Parts::NONE));
    assert_eq!(cache.counters().in_use, 1);
    cache.release(&out.slots);
    assert_eq!((cache.slot(0, 1), cache.counters().in_use), (None, 0));
}

#[test]
fn more_neurons_than_slots_come_in_waves() {
    let (mut cache, mut out) = cache(&[10], 3);
    let wanted: Vec<u32> = (0..10).collect();
    let (mut done, mut waves) = (0, Vec::new());
    while done < wanted.len() {
        let taken = cache.acquire(0, &wanted[done..], Parts::BOTH, &mut out);
        assert!(taken > 0);
        read(&mut cache, &out);
        done += taken;
        waves.push(taken);
    }
    assert_eq!(waves, [3, 3, 3, 1]);
    // Of what a wave cannot take nothing is dropped: 9 is there, and stays for the next.
    assert_eq!(cache.acquire(0, &[0, 1, 8, 9], Parts::BOTH, &mut out), 2);
    assert!(cache.slot(0, 9).is_some());
}

#[test]
fn hot_neurons_stay_until_nothing_else_is_left() {
    let (mut cache, mut out) = cache(&[10], 4);
    cache.set_hot(0, 3);
    let mut missing = Vec::new();
    cache.missing_hot(0, &mut missing);
    assert_eq!(missing, [0, 1, 2]);
    cache.acquire(0, &missing, Parts::BOTH, &mut out);
    read(&mut cache, &out);
    for position in 3..10 {
        assert_eq!(cache.acquire(0, &[position], Parts::BOTH, &mut out), 1);
        read(&mut cache, &out);
    }
    cache.missing_hot(0, &mut missing);
    assert!(missing.is_empty());
    cache.set_hot(0, 10);
    assert_eq!(cache.acquire(0, &[4], Parts::BOTH, &mut out), 1);
    assert_eq!(cache.counters().hot.evictions, 1);
}

#[test]
fn a_cache_that_cannot_be_is_refused() {
    let new = |units: &[usize], slots| Cache::new(units, slots, Box::new(Lru::default())).err();
    assert_eq!(new(&[4], 0), Some(CacheError::NoSlots));
    assert!(matches!(new(&[usize::MAX, 2], 1), Some(CacheError::TooMany { what: "neurons", .. })));
    assert!(matches!(new(&[4], usize::MAX), Some(CacheError::TooMany { what: "slots", .. })));
    let (mut cache, mut out) = cache(&[4], 4);
    cache.acquire(0, &[0, 1, 2, 3], Parts::BOTH, &mut out);
    assert_eq!(cache.resize(2), Err(CacheError::Held { slot: 2 }));
    read(&mut cache, &out);
    assert_eq!(cache.resize(2), Ok(()));
    assert_eq!(cache.counters().in_use, 2);
}
