//! What a job costs beside its arithmetic: submit to return, fork to first chunk, fork to join, and allocations.
//!
//! `cargo bench -p neuropil-benches --bench submit`

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use neuropil_cpu::{CpuBackend, CpuOptions, Pool, Topology};
use neuropil_device::{
    Activation, ActivationKind, Backend, Buffer, ClusterJob, ClusterWeights, CompletionQueue, DType, Device,
    MatmulJob, Matrix, PreparedWeight, Product, Stage, Submission, WeightSource,
};
use neuropil_tests::counting_alloc::{CountingAlloc, allocations};

#[global_allocator]
static ALLOCATOR: CountingAlloc = CountingAlloc;

const REPEATS: usize = 2001;

/// Median, 90th percentile and allocations per repeat of what `once` measures, in nanoseconds.
fn measure(name: &str, mut once: impl FnMut() -> u64) {
    let mut times = Vec::with_capacity(REPEATS);
    (0..100).for_each(|_| _ = once());
    let before = allocations();
    (0..REPEATS).for_each(|_| times.push(once()));
    let allocations = (allocations() - before) as f64 / REPEATS as f64;
    times.sort_unstable();
    let at = |share: usize| times[REPEATS * share / 100] as f64 / 1000.0;
    println!("{name:44} {:8.2} µs  {:8.2} µs  {allocations:6.2}", at(50), at(90));
}

fn nanoseconds(run: impl FnOnce()) -> u64 {
    let start = Instant::now();
    run();
    start.elapsed().as_nanos() as u64
}

fn fork(pool: &Pool, chunks: usize) {
    let name = |what: &str| format!("{what}, {} threads, {chunks} chunks", pool.threads());
    measure(&name("fork to join"), || nanoseconds(|| pool.run("bench", chunks, &|_| {})));
    // The caller holds its chunk until a worker has begun one.
    measure(&name("fork to a worker's first chunk"), || {
        let (start, caller) = (Instant::now(), std::thread::current().id());
        let first = AtomicU64::new(u64::MAX);
        pool.run("bench", chunks, &|_| {
            if std::thread::current().id() != caller {
                first.fetch_min(start.elapsed().as_nanos() as u64, Ordering::AcqRel);
            }
            let patience = Instant::now();
            while first.load(Ordering::Acquire) == u64::MAX && patience.elapsed().as_millis() < 1 {
                std::hint::spin_loop();
            }
        });
        first.into_inner().min(1_000_000)
    });
}

fn matrix(rows: usize, cols: usize, data: &Vec<u8>) -> Matrix<'_> {
    Matrix { dtype: DType::Q4_1, rows, cols, data }
}

fn zeros(rows: usize, cols: usize) -> Vec<u8> {
    vec![0; DType::Q4_1.matrix_bytes(rows, cols).unwrap_or(0)]
}

struct Bench {
    device: Arc<dyn Device>,
    queue: Arc<CompletionQueue>,
}

impl Bench {
    fn buffer(&self, values: usize) -> Buffer {
        self.device.alloc(values * 4).expect("memory for a bench")
    }

    fn prepare(&self, source: WeightSource<'_>) -> PreparedWeight {
        self.device.prepare(source, None).expect("a weight of zeros")
    }

    fn matmul(&self, rows: usize, cols: usize) {
        let weight = self.prepare(WeightSource::Matrix(matrix(rows, cols, &zeros(rows, cols))));
        let (x, y) = (self.buffer(cols), self.buffer(rows));
        measure(&format!("submit_matmul, q4_1 {rows} x {cols}"), || {
            let (x, y) = (x.read().expect("free"), y.write().expect("free"));
            let job = MatmulJob::new(1, x).with(Product { weight: weight.clone(), y, accumulate: false });
            let submission = Submission::new(job, self.queue.completion(0));
            let time = nanoseconds(|| self.device.submit_matmul(submission));
            assert_eq!(self.queue.try_next(), Some((0, Ok(()))));
            time
        });
    }

    fn cluster(&self, neurons: usize, width: usize) {
        let (rows, columns) = (zeros(neurons, width), zeros(width, neurons));
        let weight = self.prepare(WeightSource::Neurons {
            gate: matrix(neurons, width, &rows),
            up: matrix(neurons, width, &rows),
            down: matrix(width, neurons, &columns),
        });
        let (x, y) = (self.buffer(width), self.buffer(width));
        let mut batch = Vec::with_capacity(1);
        measure(&format!("submit_clusters, q4_1 {neurons} neurons x {width}"), || {
            let job = ClusterJob {
                stage: Stage::Fused,
                tokens: 1,
                activation: Activation::new(ActivationKind::Silu),
                weights: ClusterWeights::Block(weight.clone()),
                x: x.read().expect("free"),
                hidden: None,
                y: Some(y.write().expect("free")),
                accumulate: false,
            };
            batch.push(Submission::new(job, self.queue.completion(0)));
            let time = nanoseconds(|| self.device.submit_clusters(&mut batch));
            assert_eq!(self.queue.try_next(), Some((0, Ok(()))));
            time
        });
    }
}

fn main() {
    let topology = Topology::detect();
    let threads = topology.default_threads();
    println!("{:44} {:>11}  {:>11}  {:>6}", "", "median", "90 %", "allocs");
    let pool = Pool::new(threads, &topology.big_cpus()).expect("threads for a bench");
    fork(&pool, threads);
    fork(&pool, 4 * threads);
    drop(pool);
    // The second has far more threads than there are CPUs.
    for threads in [None, Some(64)] {
        let backend = CpuBackend::new(CpuOptions { threads, isa: None }).expect("a CPU");
        let device = backend.open(0).expect("the CPU is device 0");
        println!("{}", device.info().name);
        let bench = Bench { device, queue: CompletionQueue::new() };
        bench.matmul(16, 32);
        bench.matmul(576, 576);
        bench.cluster(1536, 576);
    }
}
