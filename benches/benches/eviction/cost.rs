//! What the cache costs per neuron, at the size of a model of 7 billion parameters.

use std::time::Instant;

use neuropil::cache::{Acquired, Cache, Eviction, Lru, Odds, Parts, S3Fifo};

use super::trace::Random;

const LAYERS: usize = 32;
const NEURONS: usize = 14336;
const SLOTS: usize = LAYERS * NEURONS / 2;

/// Neurons asked for at once.
const CLUSTER: usize = 64;

/// Prints nanoseconds per neuron acquired and released: when all are in memory, and when one in twenty is not.
pub fn print() {
    println!(
        "{LAYERS} layers of {NEURONS} neurons, {SLOTS} slots: nanoseconds per neuron acquired and released"
    );
    let policies: [fn() -> Box<dyn Eviction>; 3] =
        [|| Box::new(Lru::default()), || Box::new(S3Fifo::default()), || Box::new(Odds::new(&[]))];
    for policy in policies {
        let name = policy().name();
        println!("{name:24}{:6.1} hit {:6.1} one in 20 misses", once(policy(), 0), once(policy(), 20));
    }
}

fn once(policy: Box<dyn Eviction>, miss_one_in: u64) -> f64 {
    let mut cache = Cache::new(&[NEURONS; LAYERS], SLOTS, policy).unwrap();
    for unit in 0..LAYERS {
        for position in (0..NEURONS as u32 / 2).rev() {
            let slot = cache.place(unit, position).unwrap();
            cache.loaded(slot, Parts::BOTH, true);
        }
    }
    let mut random = Random(1);
    let mut out = Acquired::default();
    let (mut neurons, mut best) = (0, f64::MAX);
    for step in 0..30 {
        let lists: Vec<Vec<u32>> = (0..LAYERS)
            .map(|_| {
                let mut list: Vec<u32> = (0..NEURONS as u32 / 10)
                    .map(|_| {
                        let behind = miss_one_in > 0 && random.next().is_multiple_of(miss_one_in);
                        (random.next() % (NEURONS as u64 / 2)) as u32
                            + if behind { NEURONS as u32 / 2 } else { 0 }
                    })
                    .collect();
                list.sort_unstable();
                list.dedup();
                list
            })
            .collect();
        let start = Instant::now();
        for (unit, list) in lists.iter().enumerate() {
            for cluster in list.chunks(CLUSTER) {
                cache.acquire(unit, cluster, Parts::BOTH, &mut out);
                for (index, parts) in &out.load {
                    cache.loaded(out.slots[*index as usize], *parts, true);
                }
                cache.release(&out.slots);
            }
        }
        cache.end_step();
        let asked: usize = lists.iter().map(Vec::len).sum();
        neurons += asked;
        if step >= 10 {
            best = best.min(start.elapsed().as_nanos() as f64 / asked as f64);
        }
    }
    assert!(neurons > 0);
    best
}
