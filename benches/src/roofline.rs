//! The most that this machine can do: bytes read and operations per second.
//!
//! No single loop reads fastest on every machine, so several are tried and the best counts. What others do on the
//! machine at the time lowers a figure as it lowers those that are compared with it; measure both in one run.

use std::fs;

use neuropil_cpu::{Pool, Topology};
use neuropil_device::AlignedBytes;

use crate::loops::{self, Arithmetic, Order, READ_UNIT, Reader};
use crate::measure::{Spread, seconds};

/// Bytes of a chunk that a thread reads at a time.
const CHUNK: usize = 4 << 20;
/// Steps of a chunk of arithmetic: about a millisecond.
const STEPS: usize = 1 << 18;
/// Chunks per thread, so that a thread that loses its core for a while holds up little.
const CHUNKS_PER_THREAD: usize = 16;
/// Repeats of each measurement.
const REPEATS: usize = 9;

/// One limit of the machine.
#[derive(Clone, Debug)]
pub struct Limit {
    /// What is limited: `read memory`, `int8` and so on.
    pub what: &'static str,
    /// `GB/s` or `GOP/s`, where a multiplication and an addition are two operations.
    pub unit: &'static str,
    /// Threads that worked.
    pub threads: usize,
    /// The loop that was measured.
    pub how: String,
    /// What was measured, in that unit.
    pub speed: Spread,
}

/// Bytes of the caches of a CPU.
#[derive(Clone, Copy, Debug)]
pub struct Caches {
    /// Of one core.
    pub l2: usize,
    /// Of all; 0 without one.
    pub l3: usize,
}

impl Caches {
    /// Those of the first CPU; a guess where the system does not say.
    pub fn detect() -> Caches {
        let read = |index: usize, file: &str| {
            fs::read_to_string(format!("/sys/devices/system/cpu/cpu0/cache/index{index}/{file}")).ok()
        };
        let mut caches = Caches { l2: 0, l3: 0 };
        for index in 0..5 {
            let kib = read(index, "size").and_then(|s| s.trim().strip_suffix('K')?.parse::<usize>().ok());
            let bytes = kib.map_or(0, |kib| kib << 10);
            match read(index, "level").as_deref().map(str::trim) {
                Some("2") => caches.l2 = bytes,
                Some("3") => caches.l3 = bytes,
                _ => {}
            }
        }
        if caches.l2 == 0 { Caches { l2: 512 << 10, l3: 8 << 20 } } else { caches }
    }
}

/// A pool as the CPU backend would make it.
///
/// # Panics
/// When the system refuses a thread.
pub fn pool(threads: usize) -> Pool {
    let topology = Topology::detect();
    let big = topology.big_cpus();
    let cpus = if threads <= big.len() { big } else { topology.all_cpus() };
    Pool::new(threads, &cpus).expect("threads for a bench")
}

/// The fastest loops on memory far larger than the caches, first with `pools[0]`; each pool's best.
///
/// # Panics
/// When there is no such memory.
pub fn memory(pools: &[Pool], caches: Caches) -> Vec<Limit> {
    let size = (8 * caches.l3).clamp(1 << 30, 2 << 30).next_multiple_of(CHUNK);
    let buffer = filled(size);
    pools.iter().map(|pool| best_read("read memory", pool, &buffer, 1)).collect()
}

/// The fastest loop on memory that stays in the third cache, or in the second of each core where there is no third.
///
/// # Panics
/// When there is no memory.
pub fn last_cache(pool: &Pool, caches: Caches) -> Limit {
    // Chunks larger than the second cache, and together larger than all second caches.
    let size = (32 << 20).max(2 * caches.l2 * pool.threads()).min((caches.l3 / 2).max(CHUNK));
    best_read("read L3", pool, &filled(size.next_multiple_of(CHUNK)), 16)
}

/// The fastest loop on memory that stays in the second cache of each core.
///
/// # Panics
/// When there is no memory.
pub fn second_cache(pool: &Pool, caches: Caches) -> Limit {
    let size = (caches.l2 / 2).next_multiple_of(READ_UNIT);
    let buffers: Vec<AlignedBytes> = (0..4 * pool.threads()).map(|_| filled(size)).collect();
    let rounds = (64 << 20) / size;
    let bytes = buffers.len() * size * rounds;
    best_of("read L2", pool, bytes, &|reader, order, chunk| {
        let Some(buffer) = buffers.get(chunk) else { return false };
        (0..rounds).for_each(|_| reader.read(buffer.as_ref(), order));
        true
    })
}

/// Every kind of arithmetic of this machine, for numbers of one kind or all.
pub fn arithmetic(pool: &Pool, values: Option<&str>) -> Vec<Limit> {
    let wanted = |a: &Arithmetic| values.is_none_or(|v| v == a.values);
    loops::arithmetic().into_iter().filter(wanted).map(|kind| peak(pool, kind)).collect()
}

/// The fastest arithmetic on int8, of which kernels on quantised weights consist; `None` where nothing is known.
pub fn int8_peak(pool: &Pool) -> Option<Limit> {
    arithmetic(pool, Some("int8")).into_iter().max_by(|a, b| a.speed.median.total_cmp(&b.speed.median))
}

fn peak(pool: &Pool, kind: Arithmetic) -> Limit {
    let chunks = CHUNKS_PER_THREAD * pool.threads();
    let operations = (chunks * STEPS * kind.operations) as f64;
    let speed = || operations * 1e-9 / seconds(|| pool.run("bench", chunks, &|_| kind.run(STEPS)));
    speed();
    let speed = Spread::of((0..REPEATS).map(|_| speed()).collect());
    Limit { what: kind.values, unit: "GOP/s", threads: pool.threads(), how: kind.name.into(), speed }
}

/// Memory with something in it: untouched pages are all the same page.
fn filled(size: usize) -> AlignedBytes {
    let mut bytes = AlignedBytes::zeroed(size).expect("memory for a bench");
    bytes.as_mut().fill(0x55);
    bytes
}

/// The loops to try: all widths in plain order, and the widest in many orders.
fn candidates() -> Vec<(Reader, Order)> {
    let readers = loops::readers();
    let plain = Order { streams: 1, far: false, ahead: 0 };
    let mut all: Vec<_> = readers.iter().map(|reader| (*reader, plain)).collect();
    if let Some(widest) = readers.last().filter(|_| readers.len() > 1) {
        all.extend([512, 2048, 4096].map(|ahead| (*widest, Order { ahead, ..plain })));
        for streams in [2, 4, 8] {
            for (far, ahead) in [(false, 0), (false, 1024), (true, 0), (true, 1024)] {
                all.push((*widest, Order { streams, far, ahead }));
            }
        }
    }
    all
}

fn best_read(what: &'static str, pool: &Pool, buffer: &AlignedBytes, rounds: usize) -> Limit {
    let chunks = buffer.as_ref().len() / CHUNK;
    best_of(what, pool, buffer.as_ref().len() * rounds, &|reader, order, chunk| {
        if chunk >= chunks * rounds {
            return false;
        }
        reader.read(&buffer.as_ref()[chunk % chunks * CHUNK..][..CHUNK], order);
        true
    })
}

/// Tries all candidates twice, then repeats the three best in turn; the best median counts.
///
/// `read` reads a chunk, or returns false where there is no such chunk; all chunks are `bytes`.
fn best_of(
    what: &'static str,
    pool: &Pool,
    bytes: usize,
    read: &(dyn Fn(Reader, Order, usize) -> bool + Sync),
) -> Limit {
    let speed = |(reader, order): (Reader, Order)| {
        let next = std::sync::atomic::AtomicUsize::new(0);
        let take = || next.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let time = seconds(|| pool.run("bench", pool.threads(), &|_| while read(reader, order, take()) {}));
        bytes as f64 * 1e-9 / time
    };
    let mut tried: Vec<_> = candidates().into_iter().map(|c| (c, speed(c).max(speed(c)))).collect();
    tried.sort_by(|a, b| b.1.total_cmp(&a.1));
    tried.truncate(3);
    let mut speeds = vec![Vec::new(); tried.len()];
    for _ in 0..REPEATS {
        for ((candidate, _), speeds) in tried.iter().zip(&mut speeds) {
            speeds.push(speed(*candidate));
        }
    }
    let all = tried.iter().zip(speeds).map(|((candidate, _), speeds)| (*candidate, Spread::of(speeds)));
    let best = all.max_by(|a, b| a.1.median.total_cmp(&b.1.median)).expect("there is a plain loop");
    Limit { what, unit: "GB/s", threads: pool.threads(), how: describe(best.0), speed: best.1 }
}

fn describe((reader, order): (Reader, Order)) -> String {
    let streams = match (order.streams, order.far) {
        (1, _) => "in order".to_string(),
        (n, true) => format!("{n} streams far apart"),
        (n, false) => format!("{n} pages in turn"),
    };
    match order.ahead {
        0 => format!("{}, {streams}", reader.name),
        ahead => format!("{}, {streams}, prefetch {ahead}", reader.name),
    }
}
