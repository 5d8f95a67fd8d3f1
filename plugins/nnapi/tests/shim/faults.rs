//! What goes wrong in a driver: the host gets an error of the right kind, nothing leaks, and the next job works.

use std::time::{Duration, Instant};

use neuropil_plugin_abi::{self as abi, AbiStruct, NpMatmulJob, NpProduct};
use neuropil_plugin_conformance::raw::{Device, Failure, Weight, buffer};
use neuropil_plugin_conformance::sample::{Random, Sample, relative_error};

use crate::kit::{Shim, plugin};

const ROWS: usize = 48;
const COLS: usize = 64;

fn sample() -> Sample {
    Sample::random(abi::NP_SCHEME_F32, ROWS, COLS, 1)
}

/// One token with a deadline; 0 for none.
fn run(device: &Device, weight: &Weight<'_>, deadline: Duration) -> Result<Vec<f32>, Failure> {
    let mut x = Random::new(2).values(COLS);
    let mut found = vec![0.0; ROWS];
    let (x, y) = (buffer(&mut x), buffer(&mut found));
    let product = NpProduct { weight: weight.handle(), y: &y, ..NpProduct::new() };
    let products = [&raw const product];
    device.matmul_job(&NpMatmulJob {
        tokens: 1,
        deadline_ns: deadline.as_nanos() as u64,
        x: &x,
        products: products.as_ptr(),
        product_count: 1,
        ..NpMatmulJob::new()
    })?;
    Ok(found)
}

/// Whether a product is right.
fn is_right(found: &[f32]) -> bool {
    let x: Vec<f64> = Random::new(2).values(COLS).iter().map(|x| f64::from(*x)).collect();
    relative_error(found, &sample().product(&x)) < 1e-5
}

const OPTIONS: [(&str, &str); 3] = [("tokens", "1+4"), ("precision", "f32"), ("int8", "on")];

/// The codes of the border for those of NNAPI.
const CODES: [(i32, i32); 14] = [
    (1, abi::NP_OUT_OF_MEMORY),
    (2, abi::NP_INTERNAL),
    (3, abi::NP_INTERNAL),
    (4, abi::NP_INTERNAL),
    (5, abi::NP_INTERNAL),
    (6, abi::NP_INTERNAL),
    (7, abi::NP_INTERNAL),
    (8, abi::NP_INTERNAL),
    (9, abi::NP_LOST),
    (10, abi::NP_TIMEOUT),
    (11, abi::NP_TIMEOUT),
    (12, abi::NP_OUT_OF_MEMORY),
    (13, abi::NP_OUT_OF_MEMORY),
    (14, abi::NP_LOST),
];

#[test]
fn each_function_may_fail_when_a_unit_is_opened() {
    let shim = Shim::new();
    for function in [
        "_getDeviceCount",
        "_getDevice",
        "Device_getName",
        "Device_getType",
        "Device_getVersion",
        "Device_getFeatureLevel",
        "Device_wait",
    ] {
        shim.set("fail", &format!("{function} 5"));
        let failure = shim.open(&OPTIONS).err().unwrap_or_else(|| panic!("{function}"));
        assert_eq!(failure.code, abi::NP_INTERNAL, "{function}");
        assert!(failure.text.contains("the operation failed (result 5)"), "{}", failure.text);
    }
    shim.open(&OPTIONS).unwrap();
    let path = shim.path.to_str().unwrap();
    shim.set("fail", "_getDeviceCount 12");
    assert_eq!(plugin().probe(&[("library", path)]).unwrap_err().code, abi::NP_OUT_OF_MEMORY);
    shim.is_clean();
}

#[test]
fn each_function_may_fail_when_a_weight_is_prepared() {
    let shim = Shim::new();
    let codes8 = Sample::random(abi::NP_SCHEME_CHANNEL8, ROWS, COLS, 1);
    let float = sample();
    let of_both = [
        "Memory_createFromFd",
        "Model_create",
        "Model_addOperand",
        "Model_setOperandValue",
        "Model_setOperandValueFromMemory",
        "Model_addOperation",
        "Model_identifyInputsAndOutputs",
        "Model_finish",
        "Model_getSupportedOperationsForDevices",
        "Compilation_createForDevices",
        "Compilation_setPreference",
        "Compilation_finish",
        "Burst_create",
    ];
    let functions = of_both.map(|function| (function, &float)).into_iter().chain([
        ("Model_setOperandSymmPerChannelQuantParams", &codes8),
        ("Model_addOperand", &codes8),
        ("Model_setOperandValue", &codes8),
    ]);
    for (function, sample) in functions {
        // The first pass, and one of the second graph.
        for when in ["once", "at=2"] {
            let device = shim.open(&OPTIONS).unwrap();
            shim.set("fail", "off");
            shim.set("fail", &format!("{function} 12 {when}"));
            let failure = device.prepare(&[sample]).err();
            if function == "Memory_createFromFd" && when == "at=2" {
                assert_eq!(failure, None, "one memory for all graphs");
                continue;
            }
            let failure = failure.unwrap_or_else(|| panic!("{function} {when}"));
            assert_eq!(failure.code, abi::NP_OUT_OF_MEMORY, "{function}: {}", failure.text);
            drop(device.prepare(&[sample]).unwrap());
        }
    }
    shim.set("fail", "off");
    let device = shim.open(&[("tokens", "1")]).unwrap();
    shim.set("fail", "Model_relaxComputationFloat32toFloat16 4");
    assert_eq!(device.prepare(&[&float]).err().map(|failure| failure.code), Some(abi::NP_INTERNAL));
    drop(device);
    shim.is_clean();
}

#[test]
fn each_function_may_fail_when_a_job_runs() {
    let shim = Shim::new();
    for function in [
        "Memory_createFromFd",
        "Execution_create",
        "Execution_setReusable",
        "Execution_setTimeout",
        "Execution_setInputFromMemory",
        "Execution_setOutputFromMemory",
        "Execution_burstCompute",
    ] {
        let device = shim.open(&OPTIONS).unwrap();
        let weight = device.prepare(&[&sample()]).unwrap();
        let minute = Duration::from_secs(60);
        shim.set("fail", &format!("{function} 5"));
        let failure = run(&device, &weight, minute).unwrap_err();
        assert_eq!((failure.code, failure.text.contains("result 5")), (abi::NP_INTERNAL, true), "{function}");
        assert!(is_right(&run(&device, &weight, minute).unwrap()), "{function}");
        assert!(is_right(&run(&device, &weight, minute).unwrap()), "{function}");
    }
    shim.is_clean();
}

#[test]
fn each_result_is_an_error_of_its_kind_and_a_lost_device_stays_lost() {
    let shim = Shim::new();
    for (result, code) in CODES {
        let device = shim.open(&OPTIONS).unwrap();
        let weight = device.prepare(&[&sample()]).unwrap();
        assert!(is_right(&run(&device, &weight, Duration::ZERO).unwrap()));
        shim.set("fail", &format!("Execution_burstCompute {result}"));
        let failure = run(&device, &weight, Duration::ZERO).unwrap_err();
        assert_eq!(failure.code, code, "{}", failure.text);
        assert!(failure.text.contains(&format!("(result {result})")), "{}", failure.text);
        let after = run(&device, &weight, Duration::ZERO);
        match code {
            abi::NP_LOST => assert_eq!(after.unwrap_err().code, abi::NP_LOST),
            _ => assert!(is_right(&after.unwrap())),
        }
    }
    shim.is_clean();
}

#[test]
fn a_dead_device_is_lost_and_can_be_opened_anew() {
    let shim = Shim::new();
    let device = shim.open(&OPTIONS).unwrap();
    let weight = device.prepare(&[&sample()]).unwrap();
    shim.set("dead_object", "at=2");
    assert!(is_right(&run(&device, &weight, Duration::ZERO).unwrap()));
    for _ in 0..3 {
        let failure = run(&device, &weight, Duration::ZERO).unwrap_err();
        assert_eq!(
            (failure.code, failure.text.contains("dead object")),
            (abi::NP_LOST, true),
            "{}",
            failure.text
        );
    }
    let again = shim.open(&OPTIONS).unwrap();
    let anew = again.prepare(&[&sample()]).unwrap();
    assert!(is_right(&run(&again, &anew, Duration::ZERO).unwrap()));
    drop((weight, anew));
    drop((device, again));
    shim.is_clean();
}

#[test]
fn a_device_that_is_unavailable_is_lost() {
    let shim = Shim::new();
    let device = shim.open(&OPTIONS).unwrap();
    shim.set("unavailable", "shim-accelerator");
    let failure = device.prepare(&[&sample()]).err().unwrap();
    assert_eq!(failure.code, abi::NP_LOST, "{}", failure.text);
    drop(device);
    shim.is_clean();
}

#[test]
fn deadlines_end_jobs() {
    let shim = Shim::new();
    let device = shim.open(&OPTIONS).unwrap();
    let weight = device.prepare(&[&sample()]).unwrap();
    let code = |deadline| run(&device, &weight, deadline).err().map(|failure| failure.code);
    assert_eq!(code(Duration::from_nanos(1)), Some(abi::NP_TIMEOUT));
    assert_eq!(code(Duration::from_secs(60)), None);
    // The driver keeps the deadline.
    shim.set("hang_ms", "20000 once");
    let start = Instant::now();
    assert_eq!(code(Duration::from_millis(50)), Some(abi::NP_TIMEOUT));
    assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
    assert_eq!(code(Duration::from_secs(60)), None);
    // It says that it cannot.
    shim.set("missed_deadline", "once");
    assert_eq!(code(Duration::from_secs(60)), Some(abi::NP_TIMEOUT));
    assert_eq!(code(Duration::ZERO), None);
    // It takes its time without a deadline.
    shim.set("hang_ms", "30 once");
    assert_eq!(code(Duration::ZERO), None);
    drop(weight);
    drop(device);
    // A driver that knows no deadlines is late, which is said all the same.
    shim.set("devices", "old:accelerator:29");
    let device = shim.open(&OPTIONS).unwrap();
    let weight = device.prepare(&[&sample()]).unwrap();
    shim.set("hang_ms", "60 once");
    let late = run(&device, &weight, Duration::from_millis(20)).unwrap_err();
    assert_eq!(late.code, abi::NP_TIMEOUT, "{}", late.text);
    assert!(is_right(&run(&device, &weight, Duration::from_secs(60)).unwrap()));
    drop(weight);
    drop(device);
    shim.is_clean();
}

#[test]
fn compiling_may_take_long() {
    let shim = Shim::new();
    let device = shim.open(&OPTIONS).unwrap();
    shim.set("compile_hang_ms", "40 always");
    let start = Instant::now();
    let weight = device.prepare(&[&sample()]).unwrap();
    assert!(start.elapsed() >= Duration::from_millis(80));
    assert!(is_right(&run(&device, &weight, Duration::ZERO).unwrap()));
    drop(weight);
    drop(device);
    shim.is_clean();
}

#[test]
fn wrong_outputs_are_passed_on_for_the_host_to_find() {
    let shim = Shim::new();
    let device = shim.open(&OPTIONS).unwrap();
    let weight = device.prepare(&[&sample()]).unwrap();
    shim.set("nan_outputs", "once");
    assert!(run(&device, &weight, Duration::ZERO).unwrap().iter().any(|value| value.is_nan()));
    shim.set("wrong_tile", "once");
    assert!(!is_right(&run(&device, &weight, Duration::ZERO).unwrap()));
    assert!(is_right(&run(&device, &weight, Duration::ZERO).unwrap()));
    drop(weight);
    drop(device);
    shim.is_clean();
}

#[test]
fn weights_run_at_once_and_one_weight_in_turns() {
    let shim = Shim::new();
    let device = shim.open(&OPTIONS).unwrap();
    let weights = [device.prepare(&[&sample()]).unwrap(), device.prepare(&[&sample()]).unwrap()];
    shim.set("hang_ms", "60 always");
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let (device, weight) = (&device, &weights[thread % 2]);
            scope.spawn(move || assert!(is_right(&run(device, weight, Duration::ZERO).unwrap())));
        }
    });
    assert_eq!(shim.get("executions.peak"), 2);
    drop(weights);
    drop(device);
    shim.is_clean();
}
