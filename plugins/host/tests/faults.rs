//! A unit that fails, in every way and at every call: a typed error or the right result, never a crash or a hang.

mod common;

use std::time::{Duration, Instant};

use neuropil_device::{
    Activation, ActivationKind, Backend, CompletionQueue, DType, Device, DeviceError, MatmulJob, OpShape,
    Product, Stage, Submission, Support,
};
use neuropil_plugin_host::{PluginBackend, PluginDevice};

use common::{Block, Weights, buffer, cluster, matmul, noise, open, sim};

const SILU: Activation = Activation::new(ActivationKind::Silu);

/// Calls end within this: ten times the deadline for a weight, and time for a machine that is busy.
const SOON: Duration = Duration::from_secs(40);

/// One step of a unit's life; what it gives is compared with that of a unit without faults.
fn matmul_step(device: &PluginDevice) -> Result<Vec<f32>, DeviceError> {
    let weight = Weights::new(DType::Q8_0, 40, 96, 1).prepare(device)?;
    matmul(device, &weight, 40, &noise(3 * 96, 2), 3, false)
}

fn cluster_step(device: &PluginDevice) -> Result<Vec<f32>, DeviceError> {
    let weight = Block::new(DType::Q8_0, DType::Q8_0, 64, 96).prepare(device)?;
    let x = noise(3 * 96, 2);
    cluster(device, &weight, (Stage::Fused, SILU), &x, (&[0.0; 192], 96), 3).map(|(_, y)| y)
}

type Step = fn(&PluginDevice) -> Result<Vec<f32>, DeviceError>;

fn is_what(kind: &str, error: &DeviceError) -> bool {
    match kind {
        "error" => {
            matches!(error, DeviceError::Plugin { code: -1234, text, .. } if text.contains("asked for"))
        }
        "oom" => matches!(error, DeviceError::OutOfMemory { .. }),
        "lost" | "hang" => matches!(error, DeviceError::Lost { .. }),
        "panic" => matches!(error, DeviceError::Plugin { text, .. } if text.contains("panicked")),
        _ => matches!(error, DeviceError::Plugin { text, .. } if text.contains("not finite")),
    }
}

#[test]
fn a_fault_in_the_middle_is_a_typed_error_and_the_unit_goes_on_unless_it_is_lost() {
    let good = open("").unwrap();
    let steps: [(&str, Step, Vec<f32>); 2] = [
        ("matmul", matmul_step, matmul_step(&good).unwrap()),
        ("cluster", cluster_step, cluster_step(&good).unwrap()),
    ];
    for (function, step, want) in &steps {
        for at in ["prepare", *function] {
            for kind in ["error", "lost", "oom", "panic", "nan", "hang"] {
                if kind == "nan" && at == "prepare" {
                    continue;
                }
                // Only calls with 96 columns count: not those of the self-test.
                let fault = format!("fault={kind}@{at}&fault_columns=96&hang_ms=9000&deadline_ms=300");
                let began = Instant::now();
                let device = open(&fault).unwrap();
                let error = step(&device).expect_err(&fault);
                assert!(is_what(kind, &error), "{fault}: {error}");
                let again = step(&device);
                match kind {
                    "lost" | "hang" => {
                        assert_eq!(again, Err(error.clone()), "{fault}");
                        assert_eq!(device.lost(), Some(error));
                        let op = OpShape::Matmul { dtype: DType::F32, rows: 1, cols: 1, tokens: 1 };
                        assert!(matches!(device.supports(&op), Support::No(_)));
                    }
                    _ => assert_eq!(again.as_ref(), Ok(want), "{fault}"),
                }
                assert!(began.elapsed() < SOON, "{fault}: {:?}", began.elapsed());
            }
        }
    }
}

#[test]
fn a_wrong_tile_is_found_when_the_unit_is_opened() {
    for (fault, op) in
        [("tile@matmul", "matmul f32"), ("tile@cluster", "cluster f32"), ("nan@matmul:3", "matmul f16")]
    {
        let device = open(&format!("fault={fault}")).unwrap();
        let wrong: Vec<_> = device.describe().disabled.iter().filter(|no| no.failed).collect();
        assert_eq!(wrong.len(), 1, "{fault}: {}", device.describe());
        assert_eq!(wrong[0].op, op);
        assert!(matmul_step(&device).is_ok() && cluster_step(&device).is_ok());
    }
}

#[test]
fn faults_while_a_unit_is_found_opened_and_tested() {
    for kind in ["error", "lost", "oom", "panic", "hang"] {
        for at in ["probe", "open", "query", "prepare", "matmul", "cluster"] {
            let began = Instant::now();
            let options = format!("fault={kind}@{at}&hang_ms=9000&deadline_ms=300");
            let backend = PluginBackend::load(sim(), &options).unwrap();
            // Another backend of the same library would wait for the call that hangs.
            let result = match at {
                "probe" => backend.units().map(drop),
                _ => backend.open_unit(0).map(|device| {
                    assert!(device.describe().supports.len() >= 12, "{options}: {}", device.describe());
                    assert!(matmul_step(&device).is_ok() && cluster_step(&device).is_ok(), "{options}");
                }),
            };
            let ends = matches!(kind, "lost" | "hang") || matches!(at, "probe" | "open");
            assert_eq!(result.is_err(), ends, "{options}: {result:?}");
            if let Err(error) = result {
                let plain = at == "probe" && matches!(kind, "lost" | "oom");
                assert!(is_what(kind, &error) || plain, "{options}: {error}");
            }
            assert!(began.elapsed() < SOON, "{options}");
        }
    }
}

#[test]
fn after_a_hang_leases_are_free_at_once_and_everybody_is_told_once() {
    let options = "fault=hang@matmul&fault_columns=96&hang_ms=3000&deadline_ms=200";
    let device = open(options).unwrap();
    let weight = Weights::new(DType::Q8_0, 8, 96, 1).prepare(&device).unwrap();
    let x = buffer(&noise(96, 2));
    let outputs = [(); 5].map(|()| buffer(&[7.0; 8]));
    let queue = CompletionQueue::new();
    for (token, y) in outputs.iter().enumerate() {
        let product = Product { weight: weight.clone(), y: y.write().unwrap(), accumulate: false };
        let job = MatmulJob::new(1, x.read().unwrap()).with(product);
        device.submit_matmul(Submission::new(job, queue.completion(token as u64)));
    }
    // The jobs hold the last of the weight.
    drop(weight);
    let mut told: Vec<u64> = Vec::new();
    for _ in 0..5 {
        let (token, result) = queue.wait(|| false);
        let Err(DeviceError::Lost { reason, .. }) = result else { panic!("{token}: {result:?}") };
        assert!(reason.contains("did not return within 200ms"), "{reason}");
        told.push(token);
    }
    told.sort_unstable();
    assert_eq!(told, [0, 1, 2, 3, 4]);
    // The call has not returned; what it was given is no longer anybody's but the worker's.
    assert!(x.write().is_ok());
    for y in &outputs {
        y.write().unwrap().slice_mut::<f32>().fill(3.0);
    }
    drop(device);
    std::thread::sleep(Duration::from_millis(3500));
    assert!(outputs.iter().all(|y| common::values(y) == [3.0; 8]));
    assert_eq!(queue.try_next(), None);
}

#[test]
fn a_plugin_that_knows_no_such_option_or_unit_says_so() {
    let backend = PluginBackend::load(sim(), "color=red").unwrap();
    let text = backend.units().unwrap_err().to_string();
    assert!(text.contains("there is no option color: choose among units, buckets"), "{text}");
    assert!(backend.open(0).is_err());
    let backend = backend.with_options("units=2").unwrap();
    assert_eq!(backend.probe().len(), 2);
    assert!(matches!(backend.open(2), Err(DeviceError::NoSuchDevice { index: 2, .. })));
    assert_eq!(backend.open(1).unwrap().info().name, "software NPU 1");
    assert!(PluginBackend::load(sim(), "deadline_ms=never").is_err());
}
