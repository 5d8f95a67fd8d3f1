//! The CPU's host operations give the bits of the scalar bodies, for every instruction set and number of threads.

use std::sync::Arc;

use half::f16;
use neuropil_cpu::{CpuBackend, CpuOptions, Isa};
use neuropil_device::{
    Attention, AttentionRow, Backend, HostOps, KV_BLOCK, KV_PAGE, KvPage, KvPages, Rope, ScalarOps,
};
use proptest::prelude::*;

/// Every instruction set, on one thread and on three.
fn all_ops() -> Vec<(String, Arc<dyn HostOps>)> {
    let each = |isa: Isa, threads| {
        let backend = CpuBackend::new(CpuOptions { threads: Some(threads), isa: Some(isa) }).unwrap();
        (format!("{} with {threads} threads", isa.name()), backend.host_ops().unwrap())
    };
    Isa::all_available().into_iter().flat_map(|isa| [1, 3].map(|threads| each(isa, threads))).collect()
}

/// Numbers of both signs and several magnitudes, the same for the same seed.
fn numbers(seed: u64, count: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1 << 24) as f32
    };
    (0..count).map(|_| (next() - 0.5) * [0.1, 1.0, 6.0][(next() * 3.0) as usize]).collect()
}

fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|v| if v.is_nan() { f32::NAN.to_bits() } else { v.to_bits() }).collect()
}

/// Element types of a cache.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    F16,
    F32,
    Q8_0,
}

const KINDS: [Kind; 3] = [Kind::F16, Kind::F32, Kind::Q8_0];

/// The keys and values of a page in every type; each type is a cache of its own.
struct Page {
    f32: [Vec<f32>; 2],
    f16: [Vec<f16>; 2],
    codes: [Vec<i8>; 2],
    scales: [Vec<f16>; 2],
}

impl Page {
    fn new(seed: u64, kv_heads: usize, head_dim: usize) -> Page {
        let elements = kv_heads * KV_PAGE * head_dim;
        let f32 = [2 * seed, 2 * seed + 1].map(|seed| numbers(seed, elements));
        let narrow = |x: &Vec<f32>| x.iter().map(|v| f16::from_f32(*v)).collect::<Vec<_>>();
        let scale = |i: usize| f16::from_f32(0.000_1 * (1 + (i * 31 + seed as usize % 7) % 97) as f32);
        let scales = kv_heads * head_dim.div_ceil(KV_BLOCK) * KV_PAGE;
        Page {
            f16: [narrow(&f32[0]), narrow(&f32[1])],
            codes: f32.clone().map(|x| x.iter().map(|x| (x * 40.0) as i8).collect()),
            scales: [0, 1].map(|which| (0..scales).map(|i| scale(i + which)).collect()),
            f32,
        }
    }
}

/// Pages of several sequences.
struct Cache {
    kind: Kind,
    pages: Vec<Vec<Page>>,
}

impl Cache {
    fn new(seed: u64, kind: Kind, sequences: usize, pages: usize, kv_heads: usize, head_dim: usize) -> Cache {
        let page = |s: usize, p: usize| Page::new(seed ^ (1000 * s + p + 1) as u64, kv_heads, head_dim);
        let pages = (0..sequences).map(|s| (0..pages).map(|p| page(s, p)).collect()).collect();
        Cache { kind, pages }
    }
}

impl KvPages for Cache {
    fn page(&self, sequence: usize, index: usize) -> KvPage<'_> {
        let Page { f32, f16, codes, scales } = &self.pages[sequence][index];
        match self.kind {
            Kind::F16 => KvPage::F16 { k: &f16[0], v: &f16[1] },
            Kind::F32 => KvPage::F32 { k: &f32[0], v: &f32[1] },
            Kind::Q8_0 => {
                KvPage::Q8_0 { k: &codes[0], k_scales: &scales[0], v: &codes[1], v_scales: &scales[1] }
            }
        }
    }
}

#[derive(Clone, Debug)]
struct Shape {
    kv_heads: usize,
    group: usize,
    head_dim: usize,
    window: Option<usize>,
    kind: Kind,
    rows: Vec<AttentionRow>,
    seed: u64,
}

const SEQUENCES: usize = 3;
const PAGES: usize = 4;

fn shape() -> impl Strategy<Value = Shape> {
    let dims = prop::sample::select(vec![64usize, 80, 128, 96, 16, 7, 40, 144]);
    // Runs of tokens of one sequence, as a prefill or a batch of decodes has them.
    let run = (0..SEQUENCES, 0..PAGES * KV_PAGE, 1usize..70);
    let window = prop::option::of(prop::sample::select(vec![0usize, 1, 5, 63, 64, 100]));
    let rows = prop::collection::vec(run, 1..4);
    (1usize..4, 1usize..9, dims, window, prop::sample::select(&KINDS[..]), rows, any::<u64>()).prop_map(
        |(kv_heads, group, head_dim, window, kind, runs, seed)| {
            let rows = rows_of(&runs, PAGES);
            Shape { kv_heads, group, head_dim, window, kind, rows, seed }
        },
    )
}

/// Rows of runs of (sequence, first position, tokens), within so many pages.
fn rows_of(runs: &[(usize, usize, usize)], pages: usize) -> Vec<AttentionRow> {
    let tokens = |&(sequence, first, count): &(usize, usize, usize)| {
        let positions = first..(first + count).min(pages * KV_PAGE);
        positions.map(move |position| AttentionRow { sequence, position })
    };
    runs.iter().flat_map(tokens).collect()
}

fn check_attention(shape: &Shape, ops: &[(String, Arc<dyn HostOps>)], spoil: Option<f32>) {
    let Shape { kv_heads, group, head_dim, window, kind, ref rows, seed } = *shape;
    let heads = kv_heads * group;
    let pages = rows.iter().map(|row| row.position / KV_PAGE + 1).max().unwrap_or(0).max(2);
    let mut cache = Cache::new(seed, kind, SEQUENCES, pages, kv_heads, head_dim);
    let mut q = numbers(!seed, rows.len() * heads * head_dim);
    if let Some(spoil) = spoil {
        let at = q.len() / 2;
        q[at] = spoil;
        cache.pages[0][0].f32[0][3] = spoil;
        cache.pages[1][1].f32[1][2] = spoil;
        cache.pages[0][0].f16[1][5] = f16::from_f32(spoil);
        cache.pages[0][1].scales[0][5] = f16::from_f32(spoil);
    }
    let scale = 1.0 / (head_dim as f32).sqrt();
    let job = Attention { q: &q, rows, kv: &cache, heads, kv_heads, head_dim, scale, window };
    let mut want = vec![f32::NAN; q.len()];
    ScalarOps.attention(&job, &mut want);
    for (name, ops) in ops {
        let mut out = vec![f32::NAN; q.len()];
        ops.attention(&job, &mut out);
        assert!(bits(&out) == bits(&want), "{name}: {shape:?}");
    }
}

fn cases(cases: u32) -> proptest::test_runner::TestRunner {
    let config = ProptestConfig { cases, failure_persistence: None, ..ProptestConfig::default() };
    proptest::test_runner::TestRunner::new(config)
}

#[test]
fn attention_has_the_bits_of_the_scalar_body() {
    let ops = all_ops();
    let test = |shape: Shape| {
        check_attention(&shape, &ops, None);
        Ok(())
    };
    cases(48).run(&shape(), test).unwrap();
}

#[test]
fn a_long_context_has_the_bits_of_the_scalar_body() {
    // Few rows, which threads share by spans of 512 positions, and some more, which they do not.
    const PAGES: usize = 28;
    let ops = all_ops();
    let run = (0..SEQUENCES, 400..PAGES * KV_PAGE, prop::sample::select(vec![1usize, 1, 2, 9]));
    let window = prop::option::of(prop::sample::select(vec![0usize, 100, 512, 700]));
    let shapes = (
        1usize..3,
        prop::sample::select(vec![1usize, 3, 4]),
        prop::sample::select(vec![16usize, 40, 7]),
        window,
        prop::sample::select(&KINDS[..]),
        prop::collection::vec(run, 1..4),
        any::<u64>(),
    );
    let test = |(kv_heads, group, head_dim, window, kind, runs, seed): (_, _, _, _, _, Vec<_>, _)| {
        let rows = rows_of(&runs, PAGES);
        check_attention(&Shape { kv_heads, group, head_dim, window, kind, rows, seed }, &ops, None);
        Ok(())
    };
    cases(24).run(&shapes, test).unwrap();
}

#[test]
fn attention_keeps_what_is_not_finite() {
    let ops = all_ops();
    for spoil in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 1e38] {
        for kind in KINDS {
            for (window, rows) in [
                (Some(70), rows_of(&[(0, 50, 40), (1, 50, 40)], 2)),
                (None, rows_of(&[(0, 1100, 1), (1, 1100, 1)], 20)),
                (None, rows_of(&[(0, 1000, 40), (1, 1100, 1)], 20)),
            ] {
                let shape = Shape { kv_heads: 2, group: 3, head_dim: 64, window, kind, rows, seed: 5 };
                check_attention(&shape, &ops, Some(spoil));
            }
        }
    }
}

#[test]
fn a_query_that_is_not_a_number_shows() {
    let rows: Vec<_> = (0..90).map(|position| AttentionRow { sequence: 0, position }).collect();
    let (heads, head_dim) = (3, 16);
    let cache = Cache::new(1, Kind::F16, 1, 2, 1, head_dim);
    let q = vec![f32::NAN; rows.len() * heads * head_dim];
    for (name, ops) in all_ops() {
        for rows in [&rows[..], &rows[70..71]] {
            let q = &q[..rows.len() * heads * head_dim];
            let job =
                Attention { q, rows, kv: &cache, heads, kv_heads: 1, head_dim, scale: 0.25, window: None };
            let mut out = vec![0.0; q.len()];
            ops.attention(&job, &mut out);
            assert!(out.iter().all(|o| o.is_nan()), "{name}");
        }
    }
}

#[test]
fn lengths_that_do_not_fit_panic_alike() {
    let mut all = all_ops();
    all.push(("the scalar bodies".into(), Arc::new(ScalarOps)));
    let cache = Cache::new(1, Kind::F32, 1, 1, 1, 8);
    let rows = [AttentionRow { sequence: 0, position: 0 }];
    let job = Attention {
        q: &[1.0; 16],
        rows: &rows,
        kv: &cache,
        heads: 2,
        kv_heads: 1,
        head_dim: 8,
        scale: 1.0,
        window: None,
    };
    let rope = Rope { table: &[[1.0, 0.0]; 8], pairs: 4, head_dim: 8, adjacent: true };
    for (name, ops) in all {
        let panics = |what: &str, call: &dyn Fn()| {
            let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(call));
            assert!(result.is_err(), "{name}: {what}");
        };
        ops.attention(&job, &mut [0.0; 16]);
        ops.rope(&rope, &mut [0.0; 32]);
        ops.rope(&Rope { pairs: 0, table: &[], ..rope }, &mut [0.0; 32]);
        panics("a norm without channels", &|| ops.rms_norm(&[1.0], &[], 1e-5, &mut [0.0]));
        panics("a norm of part of a row", &|| ops.rms_norm(&[1.0; 3], &[1.0; 2], 1e-5, &mut [0.0; 3]));
        panics("a norm with a short output", &|| ops.rms_norm(&[1.0; 4], &[1.0; 2], 1e-5, &mut [0.0; 2]));
        panics("fewer values to turn", &|| ops.rope(&rope, &mut [0.0; 24]));
        panics("a table without pairs", &|| ops.rope(&Rope { pairs: 0, ..rope }, &mut [0.0; 32]));
        panics("more pairs than channels", &|| ops.rope(&Rope { head_dim: 4, ..rope }, &mut [0.0; 32]));
        panics("no heads", &|| {
            ops.attention(&Attention { heads: 0, q: &[], ..job }, &mut []);
        });
        panics("no KV heads", &|| ops.attention(&Attention { kv_heads: 0, ..job }, &mut [0.0; 16]));
        panics("a short output", &|| ops.attention(&job, &mut [0.0; 15]));
        panics("a sum of unequal lengths", &|| ops.add(&mut [0.0; 2], &[0.0; 3]));
    }
}

#[test]
fn a_single_token_and_none() {
    let ops = all_ops();
    for rows in [vec![], vec![AttentionRow { sequence: 2, position: 200 }]] {
        let shape =
            Shape { kv_heads: 3, group: 3, head_dim: 64, window: None, kind: Kind::F16, rows, seed: 1 };
        check_attention(&shape, &ops, None);
    }
}

#[test]
fn norm_has_the_bits_of_the_scalar_body() {
    for (name, ops) in all_ops() {
        for (rows, width) in [(1, 576), (3, 1), (5, 67), (0, 64), (150, 576), (7, 8192)] {
            let (x, weight) = (numbers(3, rows * width), numbers(4, width));
            let (mut out, mut want) = (vec![0.0; x.len()], vec![0.0; x.len()]);
            ops.rms_norm(&x, &weight, 1e-5, &mut out);
            ScalarOps.rms_norm(&x, &weight, 1e-5, &mut want);
            assert_eq!(bits(&out), bits(&want), "{name}: {rows} x {width}");
        }
    }
}

#[test]
fn rotation_has_the_bits_of_the_scalar_body() {
    for (name, ops) in all_ops() {
        for (rows, heads, head_dim, pairs) in [(1, 9, 64, 32), (200, 9, 64, 32), (3, 2, 80, 16), (0, 1, 8, 4)]
        {
            for adjacent in [false, true] {
                let angles = numbers(7, rows * pairs);
                let table: Vec<[f32; 2]> = angles.iter().map(|a| [a.cos(), a.sin()]).collect();
                let rope = Rope { table: &table, pairs, head_dim, adjacent };
                let mut x = numbers(8, rows * heads * head_dim);
                let mut want = x.clone();
                ops.rope(&rope, &mut x);
                ScalarOps.rope(&rope, &mut want);
                assert_eq!(bits(&x), bits(&want), "{name}: {rows} rows, adjacent {adjacent}");
            }
        }
    }
}

#[test]
fn addition_has_the_bits_of_the_scalar_body() {
    for (name, ops) in all_ops() {
        for len in [0, 1, 576, 100_003] {
            let (mut x, y) = (numbers(1, len), numbers(2, len));
            let mut want = x.clone();
            ops.add(&mut x, &y);
            ScalarOps.add(&mut want, &y);
            assert_eq!(bits(&x), bits(&want), "{name}: {len}");
        }
    }
}
