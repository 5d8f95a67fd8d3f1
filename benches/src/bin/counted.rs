//! Runs every kernel once between two marks, for a tool that counts instructions: `.ci/instructions`.
//!
//! Speed differs from machine to machine and from minute to minute; the number of instructions does not, so that it
//! can guard a kernel where nothing can be timed. All inputs are the same in every run.
//!
//! `counted [ISA]` prints `begin NAME` before and `end NAME BLOCKS` after each kernel, where a block is 32 weights,
//! 32 activations or 32 values of the KV cache. A kernel has run once before, so nothing is counted that only its
//! first call does.

use half::f16;
use neuropil_benches::products::{Product, Quantise, weight};
use neuropil_benches::roofline::pool;
use neuropil_cpu::{CpuBackend, CpuOptions, Isa};
use neuropil_device::{Attention, AttentionRow, Backend, DType, HostOps, KV_PAGE, KvPage, KvPages};

const ROWS: usize = 64;
const COLS: usize = 1024;
const HEADS: usize = 8;
const KV_HEADS: usize = 2;
const HEAD_DIM: usize = 64;

/// The tool counts within this function, which it knows by name.
#[inline(never)]
fn counted_region(run: &mut dyn FnMut()) {
    run();
}

fn count(name: &str, blocks: usize, mut run: impl FnMut()) {
    run();
    println!("begin {name}");
    counted_region(std::hint::black_box(&mut run));
    println!("end {name} {blocks}");
}

struct Cache(Vec<f16>);

impl KvPages for Cache {
    fn page(&self, _: usize, _: usize) -> KvPage<'_> {
        KvPage::F16 { k: &self.0, v: &self.0 }
    }
}

/// Attention of the last tokens of `positions`, which read `positions` keys and values each at most.
fn attention(ops: &dyn HostOps, tokens: usize, positions: usize) {
    let values = (0..KV_HEADS * HEAD_DIM * KV_PAGE).map(|i| f16::from_f32((i % 31) as f32 * 0.03 - 0.45));
    let cache = Cache(values.collect());
    let q = vec![0.25f32; tokens * HEADS * HEAD_DIM];
    let mut out = vec![0.0; q.len()];
    let rows: Vec<_> =
        (positions - tokens..positions).map(|position| AttentionRow { sequence: 0, position }).collect();
    let read: usize = rows.iter().map(|row| (row.position + 1) * HEADS * HEAD_DIM * 2).sum();
    let job = Attention {
        q: &q,
        rows: &rows,
        kv: &cache,
        heads: HEADS,
        kv_heads: KV_HEADS,
        head_dim: HEAD_DIM,
        scale: 0.125,
        window: None,
    };
    count(&format!("attention {tokens}"), read / 32, || ops.attention(&job, &mut out));
}

fn main() {
    let wanted = std::env::args().nth(1);
    let all = Isa::all_available();
    let isa = match &wanted {
        None => Isa::detect(),
        Some(name) => match all.iter().find(|isa| isa.name() == name) {
            Some(isa) => *isa,
            None => {
                eprintln!(
                    "this machine has no {name}, only {:?}",
                    all.iter().map(|i| i.name()).collect::<Vec<_>>()
                );
                std::process::exit(3);
            }
        },
    };
    println!("isa {}", isa.name());
    let pool = pool(1);
    count("nothing 0", 1, || {});
    for dtype in DType::ALL {
        let weight = weight(dtype, ROWS, COLS);
        for tokens in [1, 8] {
            let mut product = Product::new(isa, &weight, tokens, false);
            count(&format!("{} {tokens}", dtype.name()), ROWS * COLS / 32, || product.run(&pool));
        }
    }
    for tokens in [1, 8] {
        let mut quantise = Quantise::new(isa, tokens, COLS, false);
        count(&format!("quantise {tokens}"), tokens * COLS / 32, || quantise.run(&pool));
    }
    let backend = CpuBackend::new(CpuOptions { threads: Some(1), isa: Some(isa) }).expect("a CPU");
    let ops = backend.host_ops().expect("host operations of the CPU");
    for tokens in [1, 16] {
        attention(&*ops, tokens, 256);
    }
}
