//! Jobs on the software NPU against double precision.

mod common;

use neuropil_device::{
    Activation, ActivationKind, CompletionQueue, DType, Device, DeviceError, MatmulJob, OpShape, Product,
    Stage, Submission, Support,
};
use neuropil_plugin_host::PluginDevice;

use common::{Block, Weights, buffer, cluster, matmul, noise, open, values};

/// The worst error, relative to the size of the terms.
fn error(got: &[f32], (want, sizes): &(Vec<f64>, Vec<f64>)) -> f64 {
    assert_eq!(got.len(), want.len());
    let errors =
        got.iter().zip(want).zip(sizes).map(|((got, want), size)| (f64::from(*got) - want).abs() / size);
    errors.fold(0.0, f64::max)
}

#[test]
fn every_type_multiplies_at_every_count_of_tokens() {
    let device = open("buckets=1+4+16").unwrap();
    for dtype in DType::ALL {
        let weights = Weights::new(dtype, 9, 256, 3);
        let op = OpShape::Matmul { dtype, rows: 9, cols: 256, tokens: 5 };
        assert_eq!(device.supports(&op), Support::Native, "{dtype}");
        let weight = weights.prepare(&device).unwrap();
        for tokens in [1, 2, 5, 16, 23] {
            let x = noise(tokens * 256, 4);
            let want = weights.product(&x);
            let got = matmul(&device, &weight, 9, &x, tokens, false).unwrap();
            assert!(error(&got, &want) < 0.02, "{dtype} {tokens}: {}", error(&got, &want));
            let added = matmul(&device, &weight, 9, &x, tokens, true).unwrap();
            assert!(added.iter().zip(&got).all(|(added, got)| *added == 1.0 + got), "{dtype} {tokens}");
        }
    }
}

#[test]
fn weights_go_in_the_scheme_that_is_asked_for() {
    let weights = Weights::new(DType::Q4_0, 16, 64, 5);
    let x = noise(3 * 64, 6);
    let want = weights.product(&x);
    for (options, least, most) in [
        ("", 0.0, 1e-5),
        ("weights=f32", 0.0, 1e-5),
        ("weights=group8", 0.0, 1e-5),
        ("weights=f16", 1e-6, 2e-3),
        ("weights=channel8", 1e-5, 0.02),
        ("weights=channel8&activations=8", 1e-4, 0.04),
        ("weights=channel4", 0.01, 0.5),
        ("weights=channel4&outliers=500", 0.01, 0.4),
        ("schemes=channel8", 1e-5, 0.02),
    ] {
        let device = open(options).unwrap();
        let weight = weights.prepare(&device).unwrap();
        let error = error(&matmul(&device, &weight, 16, &x, 3, false).unwrap(), &want);
        assert!((least..most).contains(&error), "{options}: {error}");
    }
    let device = open("schemes=channel4").unwrap();
    let text = weights.prepare(&device).unwrap_err().to_string();
    assert!(text.contains("group4: weights of group int4: it takes per-channel int4"), "{text}");
}

#[test]
fn weights_of_one_job_share_its_input() {
    let device = open("").unwrap();
    let weights = [3, 16, 40].map(|rows| Weights::new(DType::Q8_0, rows, 64, rows as u64));
    let x = noise(20 * 64, 7);
    let (input, outputs) = (buffer(&x), weights.each_ref().map(|w| buffer(&vec![0.0; 20 * w.rows])));
    let mut job = MatmulJob::new(20, input.read().unwrap());
    for (weights, y) in weights.iter().zip(&outputs) {
        let weight = weights.prepare(&device).unwrap();
        job = job.with(Product { weight, y: y.write().unwrap(), accumulate: false });
    }
    let queue = CompletionQueue::new();
    device.submit_matmul(Submission::new(job, queue.completion(5)));
    assert_eq!(queue.wait(|| device.help()), (5, Ok(())));
    for (weights, y) in weights.iter().zip(&outputs) {
        assert!(error(&values(y), &weights.product(&x)) < 1e-5);
    }
}

/// Hidden and y of a block in double precision.
fn feed_forward(block: &Block, kind: ActivationKind, x: &[f32]) -> (Vec<f32>, (Vec<f64>, Vec<f64>)) {
    let (gates, ups) = (block.gate.product(x).0, block.up.product(x).0);
    let activation = Activation::new(kind);
    let hidden: Vec<f32> =
        gates.iter().zip(ups).map(|(g, u)| activation.apply(*g as f32, u as f32)).collect();
    let y = block.down.product(&hidden);
    (hidden, y)
}

fn stages(device: &PluginDevice, dtype: DType, down: DType) {
    let (neurons, width, tokens) = (96, 64, 5);
    let block = Block::new(dtype, down, neurons, width);
    let weight = block.prepare(device).unwrap();
    let x = noise(tokens * width, 8);
    let gates = block.gate.product(&x);
    let zeros = vec![0.0; tokens * neurons];
    for (name, kind) in ActivationKind::NAMES {
        let (hidden, y) = feed_forward(&block, kind, &x);
        let run = |stage, hidden: &[f32]| {
            cluster(device, &weight, (stage, Activation::new(kind)), &x, (hidden, width), tokens).unwrap()
        };
        assert!(error(&run(Stage::Fused, &zeros).1, &y) < 1e-3, "{name}");
        let after_gate = run(Stage::Gate, &zeros).0;
        assert!(error(&after_gate, &gates) < 1e-3, "{name}");
        let after_up = run(Stage::Up, &after_gate).0;
        let after_gate_up = run(Stage::GateUp, &zeros).0;
        for got in [&after_up, &after_gate_up] {
            assert!(
                got.iter().zip(&hidden).all(|(got, want)| (got - want).abs() < 1e-3 * (1.0 + want.abs())),
                "{name}"
            );
        }
        assert!(error(&run(Stage::Down, &after_up).1, &y) < 1e-3, "{name}");
        let (kept, summed) = run(Stage::UpDown, &after_gate);
        assert!(error(&summed, &y) < 1e-3 && kept == after_gate, "{name}");
    }
}

#[test]
fn blocks_of_neurons_run_in_every_stage() {
    for options in ["buckets=1+4", "clusters=off&buckets=1+4", "buckets=any", "buckets=32"] {
        let device = open(options).unwrap();
        let native = !options.contains("clusters=off");
        let want = if native { Support::Native } else { Support::Emulated };
        for stage in Stage::ALL {
            let op = |bundles| OpShape::Cluster {
                stage,
                dtype: DType::Q8_0,
                down_dtype: DType::Q4_0,
                neurons: 96,
                width: 64,
                tokens: 5,
                bundles,
            };
            assert_eq!(device.supports(&op(false)), want, "{options} {stage:?}");
            assert!(matches!(device.supports(&op(true)), Support::No(_)));
        }
        stages(&device, DType::Q8_0, DType::Q4_0);
        stages(&device, DType::F32, DType::Q4_1);
    }
}

#[test]
fn jobs_that_do_not_fit_are_refused() {
    let (device, other) = (open("").unwrap(), open("").unwrap());
    let weights = Weights::new(DType::Q8_0, 4, 32, 1);
    let weight = weights.prepare(&device).unwrap();
    let x = noise(64, 2);
    let foreign = matmul(&other, &weight, 4, &x, 1, false);
    assert!(matches!(foreign, Err(DeviceError::ForeignHandle { .. })), "{foreign:?}");
    let short = matmul(&device, &weight, 4, &x, 3, false);
    assert_eq!(short, Err(DeviceError::Mismatch { what: "values of x", needed: 96, found: 64 }));
    let short = matmul(&device, &weight, 3, &x, 2, false);
    assert_eq!(short, Err(DeviceError::Mismatch { what: "values of y", needed: 8, found: 6 }));
    assert_eq!(matmul(&device, &weight, 4, &x, 0, false), Ok(vec![]));
    let block = Block::new(DType::Q8_0, DType::Q8_0, 32, 32).prepare(&device).unwrap();
    assert!(matches!(matmul(&device, &block, 4, &x, 1, false), Err(DeviceError::Unsupported { .. })));
    let mut narrow = Weights::new(DType::F32, 4, 30, 1);
    narrow.cols = 31;
    assert!(matches!(narrow.prepare(&device), Err(DeviceError::Shape { .. })));
    // What is no number stays none: it is not the unit's fault.
    let mut x = noise(32, 2);
    x[3] = f32::INFINITY;
    assert!(matmul(&device, &weight, 4, &x, 1, false).unwrap().iter().all(|y| !y.is_finite()));
}

#[test]
fn memory_goes_back_with_the_last_weight() {
    // The self-test needs some; two weights do not fit.
    let device = open("memory=40000&weights=f32&self_test=off").unwrap();
    let weights = Weights::new(DType::F32, 64, 128, 1);
    let first = weights.prepare(&device).unwrap();
    assert_eq!(first.bytes(), 64 * 128 * 4);
    let second = weights.prepare(&device);
    assert!(matches!(second, Err(DeviceError::OutOfMemory { bytes: 32768, .. })), "{second:?}");
    let clone = first.clone();
    drop(first);
    assert!(weights.prepare(&device).is_err());
    drop(clone);
    let last = weights.prepare(&device).unwrap();
    // A device may go before its weights.
    drop(device);
    drop(last);
}

#[test]
fn what_a_unit_can_do_is_listed() {
    let device = open("schemes=f16+channel8&clusters=off").unwrap();
    let description = device.describe();
    assert_eq!((description.plugin.as_str(), description.abi), ("sim-npu", (1, 0)));
    assert_eq!(description.token_buckets, [1, 16, 128]);
    assert_eq!((description.supports.len(), description.disabled.len()), (2, 12), "{description}");
    assert!(description.supports[0].starts_with("matmul f16 (error "), "{description}");
    assert!(description.disabled.iter().all(|no| !no.failed), "{description}");
    let full = open("").unwrap();
    assert_eq!(full.describe().supports.len(), 14, "{}", full.describe());
}
