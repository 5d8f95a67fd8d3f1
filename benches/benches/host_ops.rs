//! Time of the host operations on the sizes of a small model.
//!
//! `cargo bench -p neuropil-benches --bench host_ops`

use std::time::Instant;

use half::f16;
use neuropil_cpu::{CpuBackend, CpuOptions};
use neuropil_device::{Attention, AttentionRow, Backend, HostOps, KV_PAGE, KvPage, KvPages, Rope};

const HEADS: usize = 9;
const KV_HEADS: usize = 3;
const HEAD_DIM: usize = 64;
const WIDTH: usize = HEADS * HEAD_DIM;

struct Cache {
    page: Vec<f16>,
}

impl KvPages for Cache {
    fn page(&self, _: usize, _: usize) -> KvPage<'_> {
        KvPage::F16 { k: &self.page, v: &self.page }
    }
}

/// Median time of a call in microseconds.
fn measure(name: &str, repeats: usize, mut once: impl FnMut()) {
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

fn attention(ops: &dyn HostOps, cache: &Cache, tokens: usize, position: usize) {
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
    measure(&format!("attention, {tokens} tokens from {position}"), 51, || ops.attention(&job, &mut out));
}

fn main() {
    for threads in [1, 2] {
        let backend = CpuBackend::new(CpuOptions { threads: Some(threads), isa: None }).expect("a CPU");
        let ops = backend.host_ops().expect("host operations of the CPU");
        println!("{}", backend.probe()[0].name);
        let values = (0..KV_HEADS * HEAD_DIM * KV_PAGE).map(|i| f16::from_f32((i % 31) as f32 * 0.03 - 0.45));
        let cache = Cache { page: values.collect() };
        attention(&*ops, &cache, 512, 0);
        attention(&*ops, &cache, 1, 100);
        attention(&*ops, &cache, 1, 4000);
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
