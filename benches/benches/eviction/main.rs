//! Which eviction policy misses least, how far that is from the best possible, how much of the cache should be hot, and
//! what the cache itself costs.
//!
//! `cargo bench -p neuropil-benches --bench eviction`

mod best;
mod cost;
mod replay;
mod trace;

use neuropil::cache::{Eviction, Lru, Odds, S3Fifo, Window};

use replay::{Misses, replay};
use trace::{KINDS, Trace, trace};

const LAYERS: usize = 6;
const NEURONS: usize = 2048;
const TOKENS: usize = 384;

/// Shares of neurons that have a slot.
const SIZES: [usize; 4] = [10, 25, 50, 75];

/// Shares of the slots whose neurons stay.
const HOT: [usize; 4] = [0, 50, 75, 90];

type Make = fn(&Trace) -> Box<dyn Eviction>;

const POLICIES: [Make; 4] = [
    |_| Box::new(Lru::default()),
    |_| Box::new(S3Fifo::default()),
    |_| Box::new(Window::default()),
    |trace| Box::new(Odds::new(&trace.prior)),
];

fn main() {
    cost::print();
    for kind in &KINDS {
        let trace = trace(kind, LAYERS, NEURONS, TOKENS);
        println!(
            "\n{}: overlap {:.2}; missed of 100 neurons asked for after the first 64 tokens (in those)",
            kind.name,
            trace.overlap()
        );
        let header = SIZES.map(|size| format!("{size:>9} %   "));
        println!("{:24}{}", "in memory:", header.concat());
        let slots = SIZES.map(|size| LAYERS * NEURONS * size / 100);
        row("best possible", slots.map(|slots| best::best(&trace, slots)));
        for make in POLICIES {
            let name = make(&trace).name();
            for hot in HOT {
                let name = if hot == 0 { name.into() } else { format!("{name}, {hot} % hot") };
                row(&name, slots.map(|slots| replay(&trace, slots, slots * hot / 100, make(&trace))));
            }
        }
    }
}

fn row(name: &str, misses: [Misses; SIZES.len()]) {
    let cells = misses.map(|m| format!("{:6.2} ({:5.2})", 100.0 * m.late, 100.0 * m.early));
    println!("{name:24}{}", cells.concat());
}
