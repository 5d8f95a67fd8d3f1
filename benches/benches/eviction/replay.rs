//! A trace through the real cache.

use neuropil::cache::{Acquired, Cache, Eviction, Parts};

use super::trace::Trace;

/// Tokens that count as the beginning.
pub const EARLY: usize = 64;

/// Shares of neurons that missed.
#[derive(Clone, Copy)]
pub struct Misses {
    /// In the first tokens.
    pub early: f64,
    /// In the others.
    pub late: f64,
}

/// What misses when the cache begins with the hottest neurons, of which the first `hot` stay.
pub fn replay(trace: &Trace, slots: usize, hot: usize, policy: Box<dyn Eviction>) -> Misses {
    let mut cache = Cache::new(&trace.units, slots, policy).unwrap();
    for (unit, count) in trace.hot_counts(hot).into_iter().enumerate() {
        cache.set_hot(unit, count);
    }
    let neurons = trace.units[0] as u32;
    for neuron in trace.hottest(slots).into_iter().rev() {
        let slot = cache.place((neuron / neurons) as usize, neuron % neurons).unwrap();
        cache.loaded(slot, Parts::BOTH, true);
    }
    let mut out = Acquired::default();
    let mut early = [0; 2];
    for (token, step) in trace.steps.iter().enumerate() {
        if token == EARLY {
            early = totals(&cache);
        }
        for (unit, positions) in step.iter().enumerate() {
            let mut done = 0;
            while done < positions.len() {
                done += cache.acquire(unit, &positions[done..], Parts::BOTH, &mut out);
                for (index, parts) in &out.load {
                    cache.loaded(out.slots[*index as usize], *parts, true);
                }
                cache.release(&out.slots);
            }
        }
        cache.end_step();
    }
    let all = totals(&cache);
    let share = |misses, asked| misses as f64 / asked as f64;
    Misses { early: share(early[0], early[1]), late: share(all[0] - early[0], all[1] - early[1]) }
}

fn totals(cache: &Cache) -> [u64; 2] {
    let counters = cache.counters();
    let [hot, cold] = [counters.hot.taken, counters.cold.taken];
    [hot.misses + cold.misses, hot.asked() + cold.asked()]
}
