//! The machine's own limits, with one thread and with many: reading memory and caches, and multiplying.
//!
//! `cargo bench -p neuropil-benches --bench roofline [-- [--threads N] [--memory] [--json]]` prints medians and the spread;
//! `--memory` leaves all but the memory out. It
//! needs up to 2 GiB of memory and takes about half a minute. `benches/compare.py` calls it for its own run.

use neuropil_benches::roofline::{self, Caches, Limit};
use neuropil_cpu::Topology;

fn json(limits: &[Limit]) -> String {
    let row = |l: &Limit| {
        format!(
            r#"{{"what":"{}","unit":"{}","threads":{},"how":"{}","median":{:.3},"least":{:.3},"most":{:.3}}}"#,
            l.what, l.unit, l.threads, l.how, l.speed.median, l.speed.least, l.speed.most
        )
    };
    format!("[{}]", limits.iter().map(row).collect::<Vec<_>>().join(",\n "))
}

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let has = |name: &str| args.iter().any(|a| a == name);
    let after = |name: &str| args.iter().position(|a| a == name).and_then(|at| args.get(at + 1));
    let many = match after("--threads").map(|n| n.parse()) {
        Some(Ok(n)) if n > 0 => n,
        Some(_) => panic!("--threads takes a number from 1 on"),
        None => Topology::detect().default_threads(),
    };
    let mut threads = vec![1, many];
    threads.dedup();
    let pools: Vec<_> = threads.into_iter().map(roofline::pool).collect();
    let caches = Caches::detect();

    let mut limits = roofline::memory(&pools, caches);
    if !has("--memory") {
        for pool in &pools {
            if caches.l3 > 0 {
                limits.push(roofline::last_cache(pool, caches));
            }
            limits.push(roofline::second_cache(pool, caches));
            limits.extend(roofline::arithmetic(pool, None));
        }
    }
    if has("--json") {
        println!("{}", json(&limits));
        return;
    }
    println!("{:12} {:>7} {:>9}  {:<24} loop", "limit", "threads", "median", "least to most");
    for l in limits {
        let spread = format!("{:.1} to {:.1} {}", l.speed.least, l.speed.most, l.unit);
        println!("{:12} {:>7} {:>9.1}  {:<24} {}", l.what, l.threads, l.speed.median, spread, l.how);
    }
}
