//! Time of the host operations on the sizes of a small model.
//!
//! `cargo bench -p neuropil-benches --bench host_ops`; with `-- NAME`, only those whose name has that in it.

use std::time::Instant;

use half::f16;
use neuropil_cpu::{CpuBackend, CpuOptions};
use neuropil_device::{Attention, AttentionRow, Backend, HostOps, KV_BLOCK, KV_PAGE, KvPage, KvPages, Rope};

const HEADS: usize = 9;
const KV_HEADS: usize = 3;
const HEAD_DIM: usize = 64;
const WIDTH: usize = HEADS * HEAD_DIM;

/// Pages in memory; more than a core's caches hold, so that a long context is read as it is from a model's cache.
const PAGES: usize = 64;

struct Cache {
    halves: Option<Vec<f16>>,
    codes: Vec<i8>,
    scales: Vec<f16>,
}

impl Cache {
    fn new(halves: bool) -> Cache {
        let elements = PAGES * KV_HEADS * HEAD_DIM * KV_PAGE;
        let half = |i: usize| f16::from_f32((i % 31) as f32 * 0.03 - 0.45);
        Cache {
            halves: halves.then(|| (0..elements).map(half).collect()),
            codes: (0..elements).map(|i| (i % 31) as i8 * 8 - 120).collect(),
            scales: vec![f16::from_f32(0.00375); elements / KV_BLOCK],
        }
    }
}

impl KvPages for Cache {
    fn page(&self, _: usize, index: usize) -> KvPage<'_> {
        let plane = KV_HEADS * HEAD_DIM * KV_PAGE;
        let at = |index: usize, plane: usize| index % PAGES * plane..(index % PAGES + 1) * plane;
        let (k, v) = (at(index, plane), at(index + PAGES / 2, plane));
        match &self.halves {
            Some(halves) => KvPage::F16 { k: &halves[k], v: &halves[v] },
            None => {
                let plane = plane / KV_BLOCK;
                KvPage::Q8_0 {
                    k: &self.codes[k],
                    k_scales: &self.scales[at(index, plane)],
                    v: &self.codes[v],
                    v_scales: &self.scales[at(index + PAGES / 2, plane)],
                }
            }
        }
    }
}

/// Median time of a call in microseconds.
fn measure(name: &str, repeats: usize, mut once: impl FnMut()) {
    let filter = std::env::args().skip(1).find(|arg| !arg.starts_with('-'));
    if filter.is_some_and(|filter| !name.contains(&filter)) {
        return;
    }
    once();
    let mut times: Vec<f64> = (0..repeats)
        .map(|_| {
            let start = Instant::now();
            once();
            start.elapsed().as_secs_f64() * 1e6
        })
        .collect();
    times.sort_by(f64::total_cmp);
    println!("{name:40} {:10.2} µs", times[repeats / 2]);
}

fn attention(ops: &dyn HostOps, kv: &str, cache: &Cache, tokens: usize, position: usize) {
    let q = vec![0.25f32; tokens * WIDTH];
    let mut out = vec![0.0; q.len()];
    let rows: Vec<_> =
        (position..position + tokens).map(|position| AttentionRow { sequence: 0, position }).collect();
    let job = Attention {
        q: &q,
        rows: &rows,
        kv: cache,
        heads: HEADS,
        kv_heads: KV_HEADS,
        head_dim: HEAD_DIM,
        scale: 0.125,
        window: None,
    };
    measure(&format!("attention {kv}, {tokens} tokens from {position}"), 51, || {
        ops.attention(&job, &mut out)
    });
}

fn main() {
    for threads in [1, 2] {
        let backend = CpuBackend::new(CpuOptions { threads: Some(threads), isa: None }).expect("a CPU");
        let ops = backend.host_ops().expect("host operations of the CPU");
        println!("{}", backend.probe()[0].name);
        for (kv, halves) in [("f16", true), ("q8_0", false)] {
            let cache = Cache::new(halves);
            for (tokens, position) in [(512, 0), (512, 2560), (1, 100), (1, 4000)] {
                attention(&*ops, kv, &cache, tokens, position);
            }
        }
        for tokens in [1, 512] {
            let (x, weight) = (vec![0.5f32; tokens * WIDTH], vec![1.0f32; WIDTH]);
            let mut out = x.clone();
            measure(&format!("rms_norm, {tokens} tokens"), 51, || ops.rms_norm(&x, &weight, 1e-5, &mut out));
            measure(&format!("add, {tokens} tokens"), 51, || ops.add(&mut out, &x));
            let table = vec![[0.6f32, 0.8]; tokens * HEAD_DIM / 2];
            let rope = Rope { table: &table, pairs: HEAD_DIM / 2, head_dim: HEAD_DIM, adjacent: true };
            measure(&format!("rope, {tokens} tokens"), 51, || ops.rope(&rope, &mut out));
        }
    }
}
