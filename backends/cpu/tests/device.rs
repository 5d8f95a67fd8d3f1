//! The CPU device gives the bits of the reference, whatever the instruction set and the number of threads, and
//! refuses jobs that do not fit together.

use std::sync::Arc;

use neuropil_cpu::Isa;
use neuropil_device::{
    Activation, ActivationKind, Buffer, ClusterJob, ClusterWeights, CompletionQueue, DType, Device,
    DeviceError, MatmulJob, Matrix, OpShape, PreparedWeight, Product, RowSource, Stage, Submission, Support,
    WeightSource,
};

mod common;
use common::{Weights, bits, buffer, device, numbers, run_cluster, to_bits};

fn devices() -> Vec<Arc<dyn Device>> {
    let all = |isa| [1, 2, 7].map(|threads| device(threads, isa));
    Isa::all_available().into_iter().flat_map(all).collect()
}

fn run_matmul(device: &dyn Device, job: MatmulJob) -> Result<(), DeviceError> {
    let queue = CompletionQueue::new();
    device.submit_matmul(Submission::new(job, queue.completion(1)));
    let (token, result) = queue.try_next().expect("the CPU completes before it returns");
    assert_eq!((token, queue.try_next()), (1, None));
    result
}

#[test]
fn products_of_one_input_have_the_bits_of_the_reference() {
    let shapes = [
        [(DType::Q4_1, 192), (DType::Q4_1, 64), (DType::Q8_0, 64)],
        [(DType::F16, 100), (DType::Q6_K, 5), (DType::F32, 17)],
        [(DType::Q4_K, 48), (DType::Q5_K, 33), (DType::BF16, 16)],
        [(DType::Q2_K, 48), (DType::Q3_K, 33), (DType::Q4_0, 5)],
        [(DType::IQ4_NL, 7), (DType::IQ4_XS, 100), (DType::MXFP4, 192)],
    ];
    for (number, shape) in shapes.into_iter().enumerate() {
        for tokens in [1, 3, 40] {
            let cols = 768;
            let weights: Vec<Weights> = shape
                .iter()
                .enumerate()
                .map(|(i, (dtype, rows))| Weights::new((number * 3 + i) as u32 + 1, *dtype, *rows, cols))
                .collect();
            let x = numbers(99, tokens * cols);
            let before: Vec<Vec<f32>> = weights.iter().map(|w| numbers(7, tokens * w.rows)).collect();
            let want: Vec<Vec<f32>> = weights
                .iter()
                .zip(&before)
                .enumerate()
                .map(|(i, (w, before))| {
                    let mut y = before.clone();
                    w.reference(&x, &mut y, i == 1);
                    y
                })
                .collect();
            for device in devices() {
                let x = buffer(&*device, &x);
                let ys: Vec<Buffer> = before.iter().map(|y| buffer(&*device, y)).collect();
                let mut job = MatmulJob::new(tokens, x.read().unwrap());
                for (i, (w, y)) in weights.iter().zip(&ys).enumerate() {
                    let weight = device.prepare(WeightSource::Matrix(w.matrix()), None).unwrap();
                    job = job.with(Product { weight, y: y.write().unwrap(), accumulate: i == 1 });
                }
                run_matmul(&*device, job).unwrap();
                for (y, want) in ys.iter().zip(&want) {
                    assert_eq!(bits(y), to_bits(want), "{} tokens {tokens}", device.info().name);
                }
            }
        }
    }
}

/// A feed-forward layer with its weights.
struct Ffn {
    gate: Weights,
    up: Weights,
    down: Weights,
    activation: Activation,
}

impl Ffn {
    fn new(dtype: DType, down: DType, neurons: usize, width: usize, activation: Activation) -> Ffn {
        Ffn {
            gate: Weights::new(1, dtype, neurons, width),
            up: Weights::new(2, dtype, neurons, width),
            down: Weights::new(3, down, width, neurons),
            activation,
        }
    }

    /// Gate values and output, by the reference.
    fn reference(&self, x: &[f32], y: &mut [f32], accumulate: bool) -> Vec<f32> {
        let tokens = x.len() / self.gate.cols;
        let mut gate = vec![0.0; tokens * self.gate.rows];
        let mut up = gate.clone();
        self.gate.reference(x, &mut gate, false);
        self.up.reference(x, &mut up, false);
        let hidden: Vec<f32> = gate.iter().zip(&up).map(|(g, u)| self.activation.apply(*g, *u)).collect();
        self.down.reference(&hidden, y, accumulate);
        gate
    }

    fn source(&self) -> WeightSource<'_> {
        WeightSource::Neurons { gate: self.gate.matrix(), up: self.up.matrix(), down: self.down.matrix() }
    }

    fn job(&self, weight: &PreparedWeight, tokens: usize, x: &Buffer) -> ClusterJob {
        ClusterJob {
            stage: Stage::Fused,
            tokens,
            activation: self.activation,
            weights: ClusterWeights::Block(weight.clone()),
            x: x.read().unwrap(),
            hidden: None,
            y: None,
            accumulate: false,
        }
    }
}

#[test]
fn a_block_of_neurons_has_the_bits_of_the_reference_in_one_stage_and_in_two() {
    let fat = Activation { kind: ActivationKind::Relu, threshold: 0.3 };
    let layers = [
        Ffn::new(DType::Q4_1, DType::Q4_1, 320, 192, Activation::new(ActivationKind::Silu)),
        Ffn::new(DType::Q4_K, DType::Q6_K, 512, 256, Activation::new(ActivationKind::Drelu)),
        Ffn::new(DType::F32, DType::Q8_0, 96, 37, fat),
        Ffn::new(DType::F16, DType::F16, 75, 50, Activation::new(ActivationKind::Gelu)),
        Ffn::new(DType::Q2_K, DType::Q3_K, 768, 256, Activation::new(ActivationKind::Silu)),
        Ffn::new(DType::Q4_0, DType::MXFP4, 320, 64, Activation::new(ActivationKind::Relu)),
    ];
    for ffn in layers {
        for (tokens, accumulate) in [(1, false), (2, true), (21, false)] {
            let (neurons, width) = (ffn.gate.rows, ffn.gate.cols);
            let (x, before) = (numbers(5, tokens * width), numbers(6, tokens * width));
            let mut want = before.clone();
            let gate = ffn.reference(&x, &mut want, accumulate);
            for device in devices() {
                let name = &device.info().name;
                let weight = device.prepare(ffn.source(), None).unwrap();
                let (x, y) = (buffer(&*device, &x), buffer(&*device, &before));
                let job = ffn.job(&weight, tokens, &x);
                let fused = ClusterJob { y: Some(y.write().unwrap()), accumulate, ..job };
                run_cluster(&*device, fused).unwrap();
                assert_eq!(bits(&y), to_bits(&want), "{name} fused, {tokens} tokens");

                let (hidden, y) = (device.alloc(tokens * neurons * 4).unwrap(), buffer(&*device, &before));
                let job = ffn.job(&weight, tokens, &x);
                let first = ClusterJob { stage: Stage::Gate, hidden: Some(hidden.write().unwrap()), ..job };
                run_cluster(&*device, first).unwrap();
                assert_eq!(bits(&hidden), to_bits(&gate), "{name} gate, {tokens} tokens");
                let job = ffn.job(&weight, tokens, &x);
                let (lease, y_lease) = (hidden.write().unwrap(), y.write().unwrap());
                let job = ClusterJob { hidden: Some(lease), y: Some(y_lease), accumulate, ..job };
                run_cluster(&*device, ClusterJob { stage: Stage::UpDown, ..job }).unwrap();
                assert_eq!(bits(&y), to_bits(&want), "{name} up and down, {tokens} tokens");
                assert_eq!(bits(&hidden), to_bits(&gate), "{name} leaves the gate values");

                for first in [Stage::Up, Stage::GateUp] {
                    let y = buffer(&*device, &before);
                    for stage in [first, Stage::Down] {
                        let job = ffn.job(&weight, tokens, &x);
                        let (lease, y) = (hidden.write().unwrap(), y.write().unwrap());
                        let job = ClusterJob { stage, hidden: Some(lease), y: Some(y), accumulate, ..job };
                        run_cluster(&*device, job).unwrap();
                    }
                    assert_eq!(bits(&y), to_bits(&want), "{name} {first:?} first, {tokens} tokens");
                }
            }
        }
    }
}

#[test]
fn a_recycled_weight_is_the_new_one() {
    let device = device(2, Isa::detect());
    let (old, new) = (Weights::new(1, DType::Q8_0, 320, 256), Weights::new(2, DType::Q4_0, 100, 64));
    let recycled = device.prepare(WeightSource::Matrix(old.matrix()), None).unwrap();
    let weight = device.prepare(WeightSource::Matrix(new.matrix()), Some(recycled)).unwrap();
    let x = numbers(3, 64);
    let mut want = vec![0.0; 100];
    new.reference(&x, &mut want, false);
    let (x, y) = (buffer(&*device, &x), device.alloc(400).unwrap());
    let job = MatmulJob::new(1, x.read().unwrap());
    run_matmul(&*device, job.with(Product { weight, y: y.write().unwrap(), accumulate: false })).unwrap();
    assert_eq!(bits(&y), to_bits(&want));
}

#[test]
fn callers_at_once_get_the_same_results() {
    let device = device(2, Isa::detect());
    let ffn = Ffn::new(DType::Q4_1, DType::Q4_1, 320, 192, Activation::new(ActivationKind::Silu));
    let weight = device.prepare(ffn.source(), None).unwrap();
    std::thread::scope(|scope| {
        for seed in 0..4 {
            let (device, ffn, weight) = (&device, &ffn, &weight);
            scope.spawn(move || {
                let x = numbers(seed + 10, 3 * 192);
                let mut want = vec![0.0; x.len()];
                ffn.reference(&x, &mut want, false);
                let (x, y) = (buffer(&**device, &x), device.alloc(x.len() * 4).unwrap());
                for _ in 0..20 {
                    let job = ffn.job(weight, 3, &x);
                    run_cluster(&**device, ClusterJob { y: Some(y.write().unwrap()), ..job }).unwrap();
                    assert_eq!(bits(&y), to_bits(&want));
                }
            });
        }
    });
}

#[test]
fn jobs_that_do_not_fit_together_are_errors() {
    let device = device(2, Isa::detect());
    let w = Weights::new(1, DType::Q8_0, 32, 64);
    let other = Weights::new(1, DType::Q8_0, 32, 96);
    let prepare = |w: &Weights| device.prepare(WeightSource::Matrix(w.matrix()), None).unwrap();
    let matmul = |tokens, x: usize, y: usize, weights: &[PreparedWeight]| {
        let x = device.alloc(x * 4).unwrap();
        let mut job = MatmulJob::new(tokens, x.read().unwrap());
        for weight in weights {
            let y = device.alloc(y * 4).unwrap().write().unwrap();
            job = job.with(Product { weight: weight.clone(), y, accumulate: false });
        }
        run_matmul(&*device, job)
    };
    let mismatch = |what, needed, found| Err(DeviceError::Mismatch { what, needed, found });
    assert_eq!(matmul(2, 128, 64, &[prepare(&w)]), Ok(()));
    assert_eq!(matmul(2, 127, 64, &[prepare(&w)]), mismatch("values of x", 128, 127));
    assert_eq!(matmul(2, 128, 63, &[prepare(&w)]), mismatch("values of y", 64, 63));
    assert_eq!(matmul(usize::MAX, 128, 64, &[prepare(&w)]), mismatch("values of y", usize::MAX, 64));
    let two = [prepare(&w), prepare(&other)];
    assert_eq!(matmul(1, 128, 64, &two), mismatch("columns of a weight", 64, 96));
    assert_eq!(matmul(0, 0, 0, &two[..1]), Ok(()));
    assert_eq!(matmul(1, 0, 0, &[]), Ok(()));

    let ffn = Ffn::new(DType::F32, DType::F32, 8, 4, Activation::new(ActivationKind::Silu));
    let block = device.prepare(ffn.source(), None).unwrap();
    assert!(matches!(matmul(1, 4, 8, std::slice::from_ref(&block)), Err(DeviceError::Unsupported { .. })));
    let x = device.alloc(16).unwrap();
    assert_eq!(run_cluster(&*device, ffn.job(&block, 1, &x)), mismatch("values of y", 4, 0));
    let gate = ClusterJob { stage: Stage::Gate, ..ffn.job(&block, 1, &x) };
    assert_eq!(run_cluster(&*device, gate), mismatch("values of hidden", 8, 0));
    let matrix = ClusterJob { weights: ClusterWeights::Block(prepare(&w)), ..ffn.job(&block, 1, &x) };
    assert!(matches!(run_cluster(&*device, matrix), Err(DeviceError::Unsupported { .. })));
    // Another device of the same kind.
    let foreign = self::device(2, Isa::detect()).prepare(ffn.source(), None).unwrap();
    let foreign = ClusterJob { weights: ClusterWeights::Block(foreign), ..ffn.job(&block, 1, &x) };
    assert!(matches!(run_cluster(&*device, foreign), Err(DeviceError::ForeignHandle { .. })));
    let short = Matrix { rows: 33, ..w.matrix() };
    assert!(matches!(device.prepare(WeightSource::Matrix(short), None), Err(DeviceError::Shape { .. })));
}

#[test]
fn a_weight_that_packing_would_blow_up_is_refused() {
    struct Nothing(usize);
    impl RowSource for Nothing {
        fn len(&self) -> usize {
            self.0
        }

        fn read(&self, _: usize, _: &mut [u8]) -> Result<(), DeviceError> {
            panic!("it is refused before a byte is read")
        }
    }
    let device = device(1, Isa::detect());
    let cols = 1 << 24;
    for rows in [1, 12] {
        let weight = Matrix { dtype: DType::Q4_0, rows, cols, data: &Nothing(rows * cols / 32 * 18) };
        let result = device.prepare(WeightSource::Matrix(weight), None);
        assert!(matches!(result, Err(DeviceError::Unsupported { .. })), "{result:?}");
    }
    let matmul = |rows| OpShape::Matmul { dtype: DType::Q4_0, rows, cols, tokens: 1 };
    assert!(matches!(device.supports(&matmul(1)), Support::No(_)));
    assert!(!matches!(device.supports(&matmul(15)), Support::No(_)));
    // Each thread would expand 16 rows of it.
    let wide = |cols| OpShape::Matmul { dtype: DType::IQ4_NL, rows: 64, cols, tokens: 1 };
    assert_eq!(device.supports(&wide(1 << 18)), Support::Emulated);
    assert!(matches!(device.supports(&wide(1 << 19)), Support::No(_)));
}

#[test]
fn it_says_what_it_supports() {
    let device = device(1, Isa::detect());
    for dtype in DType::ALL {
        let matmul = |cols| OpShape::Matmul { dtype, rows: 10, cols, tokens: 1 };
        assert_eq!(matches!(device.supports(&matmul(4544)), Support::No(_)), dtype.block_elements() == 256);
        let cluster = |stage, bundles| OpShape::Cluster {
            stage,
            dtype,
            down_dtype: dtype,
            neurons: 512,
            width: 256,
            tokens: 1,
            bundles,
        };
        let answer = if dtype.is_expanded() { Support::Emulated } else { Support::Native };
        assert_eq!(device.supports(&cluster(Stage::Fused, false)), answer);
        assert_eq!(device.supports(&matmul(1536)), answer);
        let native = |stage| device.supports(&cluster(stage, true)) == Support::Native;
        assert_eq!(native(Stage::Gate), !dtype.is_expanded(), "{dtype}");
        let down = ["f32", "f16", "bf16", "q4_0", "q4_1", "q8_0"].contains(&dtype.name());
        assert_eq!(native(Stage::Fused), down, "{dtype}");
        assert_eq!(native(Stage::GateUp), !dtype.is_expanded(), "{dtype}");
        assert_eq!(native(Stage::Down), down, "{dtype}");
    }
    assert!(matches!(device.supports(&OpShape::Block), Support::No(_)));
}
