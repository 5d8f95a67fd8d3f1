//! Speed of the matmul kernels per weight type, with one thread and with many, beside the machine's own limits.
//!
//! `cargo bench -p neuropil-benches --bench kernels [-- TYPE ISA]` prints, for a weight of over 100 MB, the bytes
//! read per second with 1 token (the bound is memory), and for one that stays in the cache the operations per second
//! with 8, 64 and 256 tokens; then those of a wide product, 512 tokens with a weight of 14336 x 4096; and how many
//! activations are quantised in a second. With one thread each type is also measured with some activations that stand
//! out in one block of 20, which are multiplied twice. Figures are medians; shares are of the best streaming read and
//! of the peak of int8 (for float weights: of f32), both measured in the same run.

use neuropil_benches::measure::{Spread, median, seconds};
use neuropil_benches::products::{Product, Quantise, timed_weight, weight};
use neuropil_benches::roofline::{self, Caches, Limit};
use neuropil_cpu::pack::Packed;
use neuropil_cpu::{Isa, Pool, Topology};
use neuropil_device::DType;

const COLS: usize = 4096;
const WIDE_ROWS: usize = 14336;
const WIDE_TOKENS: usize = 512;
const WIDE_REPEATS: usize = 3;

/// What one number of threads can do at most.
struct Roof {
    pool: Pool,
    memory: Limit,
    arithmetic: Vec<Limit>,
}

impl Roof {
    /// The peak of what a weight of this type is multiplied with.
    fn peak(&self, dtype: DType) -> Option<&Limit> {
        let values = if dtype.quantizes_activations() { "int8" } else { "f32" };
        let speed = |l: &&Limit| l.speed.median;
        self.arithmetic.iter().filter(|l| l.what == values).max_by(|a, b| speed(a).total_cmp(&speed(b)))
    }
}

fn roofs() -> Vec<Roof> {
    let mut threads = vec![1, Topology::detect().default_threads()];
    threads.dedup();
    let pools: Vec<Pool> = threads.into_iter().map(roofline::pool).collect();
    let memory = roofline::memory(&pools, Caches::detect());
    let both = pools.into_iter().zip(memory);
    both.map(|(pool, memory)| Roof { arithmetic: roofline::arithmetic(&pool, None), pool, memory }).collect()
}

/// The weights of one type that are measured.
struct Weights {
    large: Packed,
    small: Packed,
    wide: Packed,
    pack_speed: f64,
}

impl Weights {
    fn new(dtype: DType) -> Weights {
        let rows = (128 << 20) / dtype.row_bytes(COLS).expect("a valid width") / 16 * 16;
        let (large, pack_speed) = timed_weight(dtype, rows, COLS);
        Weights { large, pack_speed, small: weight(dtype, 512, COLS), wide: weight(dtype, WIDE_ROWS, COLS) }
    }
}

fn row(isa: Isa, w: &Weights, roof: &Roof, outliers: bool) {
    let (pool, dtype) = (&roof.pool, w.small.dtype());
    let time = |weight: &Packed, tokens: usize| {
        let mut product = Product::new(isa, weight, tokens, outliers);
        (median(|| product.run(pool)), product.operations() * 1e-9)
    };
    let stream = w.large.bytes().len() as f64 * 1e-9 / time(&w.large, 1).0;
    let gops = [8, 64, 256].map(|tokens| {
        let (time, operations) = time(&w.small, tokens);
        operations / time
    });
    let mut wide = Product::new(isa, &w.wide, WIDE_TOKENS, outliers);
    let wide_times = (0..WIDE_REPEATS).map(|_| seconds(|| wide.run(pool))).collect();
    let wide_speed = wide.operations() * 1e-9 / Spread::of(wide_times).median;
    let share = roof.peak(dtype).map_or(f64::NAN, |peak| 100.0 * wide_speed / peak.speed.median);
    let mut quantise = Quantise::new(isa, 64, COLS, outliers);
    let quantised = (64 * COLS) as f64 * 1e-9 / median(|| quantise.run(pool));
    println!(
        "{:<14} {:<5} {:>7} {:>9} {:>6.2} | {:>6.1} {:>4.0} % | {:>6.0} {:>6.0} {:>6.0} | {:>6.0} {:>4.0} % | {:>6.2}",
        isa.name(),
        dtype.name(),
        pool.threads(),
        if outliers { "5 %" } else { "none" },
        w.pack_speed * 1e-9,
        stream,
        100.0 * stream / roof.memory.speed.median,
        gops[0],
        gops[1],
        gops[2],
        wide_speed,
        share,
        quantised,
    );
}

fn main() {
    let wanted: Vec<String> = std::env::args().skip(1).filter(|a| !a.starts_with("--")).collect();
    let chosen = |name: &str| wanted.iter().any(|w| w == name);
    let any_of = |names: &[&str]| names.iter().any(|n| chosen(n));
    let isas: Vec<Isa> = Isa::all_available();
    let isa_names: Vec<&str> = isas.iter().map(|i| i.name()).collect();
    let type_names: Vec<&str> = DType::ALL.iter().map(|d| d.name()).collect();

    let roofs = roofs();
    for roof in &roofs {
        let of = |dtype| {
            roof.peak(dtype).map_or("unknown".into(), |l| format!("{:.0} GOP/s ({})", l.speed.median, l.how))
        };
        println!(
            "{} threads: read {:.1} GB/s ({}), int8 {}, f32 {}",
            roof.pool.threads(),
            roof.memory.speed.median,
            roof.memory.how,
            of(DType::Q4_0),
            of(DType::F32),
        );
    }
    println!(
        "{:<14} {:<5} {:>7} {:>9} {:>6} | {:>13} | {:>20} | {:>13} | {:>6}",
        "", "", "", "", "pack", "1 token", "GOP/s with tokens", "wide product", "quant"
    );
    println!(
        "{:<14} {:<5} {:>7} {:>9} {:>6} | {:>6} {:>6} | {:>6} {:>6} {:>6} | {:>6} {:>6} | {:>6}",
        "isa",
        "type",
        "threads",
        "stand out",
        "GB/s",
        "GB/s",
        "share",
        "8",
        "64",
        "256",
        "GOP/s",
        "share",
        "G/s"
    );
    for isa in isas {
        if if any_of(&isa_names) { !chosen(isa.name()) } else { isa != Isa::detect() } {
            continue;
        }
        for dtype in DType::ALL {
            if any_of(&type_names) && !chosen(dtype.name()) {
                continue;
            }
            let weights = Weights::new(dtype);
            for roof in &roofs {
                row(isa, &weights, roof, false);
            }
            if dtype.quantizes_activations() {
                row(isa, &weights, &roofs[0], true);
            }
        }
    }
}
