//! The feed-forward of single neurons, from bundles in an arena, beside that of a dense block.
//!
//! `cargo bench -p neuropil-benches --bench sparse [-- THREADS]` computes layers of 14336 neurons of width 4096 as dense
//! blocks, and then 10 % of their neurons, chosen at random, from bundles, for 1 to 8 tokens. Dense and
//! sparse runs alternate, over several layers so that no cache holds one from run to run; figures are medians. With as
//! many bytes per second, a tenth of the neurons takes a tenth of the time.
//!
//! With `-- prefill [THREADS] [TOKENS...]` all neurons of a layer are computed from bundles, for many tokens (512 unless
//! told), beside a dense block, and beside one whose down matrix is F32: bundles multiply down rows as floats, so the
//! arithmetic of the last is theirs. What the down product takes is the rest that two gate products leave; beside it
//! stands the machine's peak of F32.

use std::sync::Arc;
use std::time::{Duration, Instant};

use neuropil_benches::roofline;
use neuropil_cpu::{CpuBackend, CpuOptions};
use neuropil_device::quant::{bundle_row, bundle_row_bytes, quantize_row};
use neuropil_device::{
    Activation, ActivationKind, Arena, Backend, Buffer, BundleLayout, ClusterJob, ClusterWeights,
    CompletionQueue, DType, Device, Matrix, PreparedWeight, Stage, Submission, WeightSource,
};

const WIDTH: usize = 4096;
const NEURONS: usize = 14336;
/// One neuron in so many is active.
const SHARE: usize = 10;
/// Layers that take turns.
const LAYERS: usize = 4;

/// A wave, quantised. All rows are the same, which no kernel can tell.
fn row(dtype: DType, cols: usize) -> Vec<u8> {
    let wave: Vec<f32> = (0..cols).map(|k| (k as f32 * 0.7).sin() * 0.1).collect();
    let mut row = vec![0; dtype.row_bytes(cols).expect("a valid width")];
    quantize_row(dtype, &wave, &mut row);
    row
}

struct Bench {
    device: Arc<dyn Device>,
    queue: Arc<CompletionQueue>,
    x: Buffer,
    y: Buffer,
    hidden: Buffer,
    positions: Buffer,
    listed: Vec<u32>,
}

impl Bench {
    fn new(device: &Arc<dyn Device>, tokens: usize, listed: Vec<u32>) -> Bench {
        let values: Vec<f32> = (0..tokens * WIDTH).map(|i| (i as f32 * 0.1).sin()).collect();
        let buffer = |values: usize| device.alloc(values * 4).expect("memory for a bench");
        let (x, y, positions) = (buffer(values.len()), buffer(values.len()), buffer(listed.len()));
        x.write().expect("a free buffer").slice_mut::<f32>().copy_from_slice(&values);
        positions.write().expect("a free buffer").slice_mut::<u32>().copy_from_slice(&listed);
        let (device, queue, hidden) = (device.clone(), CompletionQueue::new(), buffer(tokens * listed.len()));
        Bench { device, queue, x, y, hidden, positions, listed }
    }

    fn bundles(&self, layout: BundleLayout, arena: &Arena) -> ClusterWeights {
        let slots = arena.pin(self.listed.clone()).expect("free slots");
        ClusterWeights::Bundles { layout, slots, positions: self.positions.read().expect("a free buffer") }
    }

    /// Seconds of a job: of its gate product alone, or of all.
    fn seconds(&self, stage: Stage, tokens: usize, weights: ClusterWeights) -> f64 {
        let lease = |buffer: &Buffer| buffer.write().expect("a free buffer");
        let job = ClusterJob {
            stage,
            tokens,
            // No neuron is switched off: the list alone says what is computed.
            activation: Activation::new(ActivationKind::Silu),
            weights,
            x: self.x.read().expect("a free buffer"),
            hidden: stage.has_hidden().then(|| lease(&self.hidden)),
            y: stage.has_down().then(|| lease(&self.y)),
            accumulate: false,
        };
        let mut batch = vec![Submission::new(job, self.queue.completion(0))];
        let start = Instant::now();
        self.device.submit_clusters(&mut batch);
        let seconds = start.elapsed().as_secs_f64();
        self.queue.try_next().expect("the CPU completes before it returns").1.expect("the job fits");
        seconds
    }
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

/// The bundle of a neuron, and as many of them as a layer has.
fn layer(dtype: DType, down_dtype: DType, layers: usize) -> (BundleLayout, usize, Vec<Arena>) {
    let size = |dtype| bundle_row_bytes(dtype, WIDTH).expect("a valid width");
    let layout =
        BundleLayout { width: WIDTH, dtype, down_dtype, gate: 0, up: size(dtype), down: 2 * size(dtype) };
    let bundle_bytes = layout.down + size(down_dtype);
    let mut bundle = vec![0; bundle_bytes];
    let (gate_up, down) = bundle.split_at_mut(layout.down);
    for out in gate_up.chunks_exact_mut(layout.up) {
        bundle_row(dtype, WIDTH, &row(dtype, WIDTH), out);
    }
    bundle_row(down_dtype, WIDTH, &row(down_dtype, WIDTH), down);
    let arena = || {
        let arena = Arena::new(NEURONS, bundle_bytes, 64).expect("memory for a bench");
        for n in 0..NEURONS {
            arena.write(n).expect("a free slot").bytes_mut()[..bundle_bytes].copy_from_slice(&bundle);
        }
        arena
    };
    (layout, bundle_bytes, (0..layers).map(|_| arena()).collect())
}

/// The same layer as a dense block.
fn block(device: &Arc<dyn Device>, dtype: DType, down_dtype: DType) -> PreparedWeight {
    let rows = row(dtype, WIDTH).repeat(NEURONS);
    let down = row(down_dtype, NEURONS).repeat(WIDTH);
    let matrix = |dtype, rows, cols, data| Matrix { dtype, rows, cols, data };
    let source = WeightSource::Neurons {
        gate: matrix(dtype, NEURONS, WIDTH, &rows),
        up: matrix(dtype, NEURONS, WIDTH, &rows),
        down: matrix(down_dtype, WIDTH, NEURONS, &down),
    };
    device.prepare(source, None).expect("memory for a bench")
}

fn open(threads: usize) -> Arc<dyn Device> {
    let cpu = CpuBackend::new(CpuOptions { threads: Some(threads), isa: None }).expect("threads");
    cpu.open(0).expect("a CPU")
}

fn main() {
    let numbers: Vec<usize> = std::env::args().filter_map(|a| a.parse().ok()).collect();
    let threads = numbers.first().map_or(vec![1, 2], |threads| vec![*threads]);
    if std::env::args().any(|a| a == "prefill") {
        prefill(&threads, numbers.get(1..).filter(|tokens| !tokens.is_empty()).unwrap_or(&[512]));
    } else {
        decode(&threads);
    }
}

/// All neurons, for many tokens.
fn prefill(threads: &[usize], tokens: &[usize]) {
    println!(
        "type  down  threads tokens | GFLOP/s (ms): dense | dense, f32 down | bundles | ratios | down, f32 peak"
    );
    for (dtype, down_dtype) in [(DType::Q4_0, DType::Q4_0), (DType::Q4_0, DType::Q8_0)] {
        let (layout, _, arenas) = layer(dtype, down_dtype, 1);
        for &threads in threads {
            let device = open(threads);
            let peaks = roofline::arithmetic(&roofline::pool(threads), Some("f32"));
            let peak = peaks.iter().map(|limit| limit.speed.median).fold(0.0, f64::max);
            let blocks = [down_dtype, DType::F32].map(|down| block(&device, dtype, down));
            for &tokens in tokens {
                let bench = Bench::new(&device, tokens, (0..NEURONS as u32).collect());
                let mut times = [const { Vec::new() }; 4];
                let start = Instant::now();
                while times[2].len() < 3 || start.elapsed() < Duration::from_secs(4) {
                    for (times, block) in times.iter_mut().zip(&blocks) {
                        times.push(bench.seconds(Stage::Fused, tokens, ClusterWeights::Block(block.clone())));
                    }
                    for (times, stage) in times[2..].iter_mut().zip([Stage::Fused, Stage::Gate]) {
                        times.push(bench.seconds(stage, tokens, bench.bundles(layout, &arenas[0])));
                    }
                }
                let times = times.map(median);
                let speed =
                    |products: usize, time| (products * 2 * tokens * WIDTH * NEURONS) as f64 / time * 1e-9;
                let [dense, floats, bundles, _] =
                    times.map(|t| format!("{:.0} ({:.0})", speed(3, t), t * 1e3));
                let down = speed(1, times[2] - 2.0 * times[3]);
                println!(
                    "{:<5} {:<5} {threads:>7} {tokens:>6} | {dense} | {floats} | {bundles} | {:.2}, {:.2} | {down:.0}, {peak:.0}",
                    dtype.name(),
                    down_dtype.name(),
                    times[0] / times[2],
                    times[1] / times[2],
                );
            }
        }
    }
}

/// A tenth of the neurons, for few tokens.
fn decode(threads: &[usize]) {
    println!("type  threads tokens | dense GB/s  ms | sparse GB/s  ms | sparse / dense");
    for dtype in [DType::Q4_0, DType::Q8_0, DType::Q4_K, DType::F16] {
        let down_dtype = if dtype == DType::Q4_K { DType::Q4_0 } else { dtype };
        let (layout, bundle_bytes, arenas) = layer(dtype, down_dtype, LAYERS);
        let listed: Vec<u32> = {
            let mut state = 1u32;
            let mut chosen = |n: &u32| {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                *n < NEURONS as u32 && ((state >> 8) as usize).is_multiple_of(SHARE)
            };
            (0..NEURONS as u32).filter(&mut chosen).collect()
        };
        for &threads in threads {
            let device = open(threads);
            let blocks = [(); LAYERS].map(|()| block(&device, dtype, down_dtype));
            for tokens in [1, 2, 4, 8] {
                let bench = Bench::new(&device, tokens, listed.clone());
                let (mut dense, mut sparse) = (Vec::new(), Vec::new());
                let start = Instant::now();
                while dense.len() < 5 || start.elapsed() < Duration::from_secs(1) {
                    let (block, arena) = (&blocks[dense.len() % LAYERS], &arenas[dense.len() % LAYERS]);
                    dense.push(bench.seconds(Stage::Fused, tokens, ClusterWeights::Block(block.clone())));
                    sparse.push(bench.seconds(Stage::Fused, tokens, bench.bundles(layout, arena)));
                }
                let (dense, sparse) = (median(dense), median(sparse));
                let dense_speed = blocks[0].bytes() as f64 / dense * 1e-9;
                let sparse_speed = (bench.listed.len() * bundle_bytes) as f64 / sparse * 1e-9;
                println!(
                    "{:<5} {threads:>7} {tokens:>6} | {dense_speed:>10.1} {:>4.1} | {sparse_speed:>10.1} {:>4.2} | {:.2}",
                    dtype.name(),
                    dense * 1e3,
                    sparse * 1e3,
                    sparse_speed / dense_speed,
                );
            }
        }
    }
}
