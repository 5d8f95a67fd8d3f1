//! Older and newer libraries and drivers.

use std::path::PathBuf;

use neuropil_nnapi_shim::symbols::old_library;
use neuropil_plugin_abi as abi;
use neuropil_plugin_conformance::checks;
use neuropil_plugin_conformance::sample::{Random, Sample};

use crate::kit::{Shim, library, plugin};

/// A copy of the stand-in without the functions above a level.
fn old(level: i64) -> PathBuf {
    let path =
        PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("nnapi-{level}-{}.so", std::process::id()));
    old_library(&library(), &path, level).unwrap();
    path
}

fn bound(scheme: u32) -> f64 {
    if scheme == abi::NP_SCHEME_CHANNEL8 { 0.025 } else { 1.5e-3 }
}

#[test]
fn a_library_without_a_choice_of_devices_is_too_old() {
    let path = old(28);
    let failure = plugin().probe(&[("library", path.to_str().unwrap())]).unwrap_err();
    assert_eq!(failure.code, abi::NP_UNSUPPORTED);
    assert!(failure.text.contains("feature level 29 (Android 10) or newer is needed"), "{}", failure.text);
    std::fs::remove_file(path).unwrap();
    let shim = Shim::new();
    shim.set("runtime_level", "28");
    let failure = shim.open(&[]).err().unwrap();
    assert_eq!(failure.text, "NNAPI of feature level 28 is too old: 29 (Android 10) or newer is needed");
}

#[test]
fn libraries_of_each_level_compute_the_same() {
    for level in [29, 30] {
        let path = old(level);
        let shim = Shim::at(&path);
        let device = shim.open(&[("tokens", "1+4"), ("int8", "on")]).unwrap();
        let driver = device.info().driver;
        assert!(driver.starts_with(&format!("NNAPI of feature level {level}")), "{driver}");
        assert_eq!(checks::products(&device, bound).len(), 3);
        checks::threads(&device);
        let executions = shim.get("executions.run");
        assert_eq!(shim.get("calls.Execution_create"), executions, "one execution for each run");
        drop(device);
        shim.is_clean();
        std::fs::remove_file(path).unwrap();
    }
}

#[test]
fn drivers_of_each_level_compute_the_same() {
    let shim = Shim::new();
    for (driver, runtime) in [(29, 31), (30, 31), (31, 1_000_006)] {
        shim.set("devices", &format!("npu:accelerator:{driver}"));
        shim.set("runtime_level", &runtime.to_string());
        let device = shim.open(&[("tokens", "1+4"), ("int8", "on")]).unwrap();
        assert_eq!(checks::products(&device, bound).len(), 3);
    }
    shim.is_clean();
}

#[test]
fn executions_of_few_bytes_run_again() {
    let shim = Shim::new();
    let device = shim.open(&[("tokens", "1+128")]).unwrap();
    let sample = Sample::random(abi::NP_SCHEME_F32, 256, 128, 1);
    let weight = device.prepare(&[&sample]).unwrap();
    let before = (shim.get("calls.Execution_create"), shim.get("executions.burst"));
    for tokens in [1, 128] {
        let x = Random::new(2).values(tokens * 128);
        let first = device.matmul(&[&weight], &x, tokens).unwrap();
        for _ in 0..4 {
            assert_eq!(device.matmul(&[&weight], &x, tokens).unwrap(), first);
        }
    }
    let made = shim.get("calls.Execution_create") - before.0;
    assert_eq!((made, shim.get("executions.burst") - before.1), (1 + 5, 10));
    drop(weight);
    drop(device);
    shim.is_clean();
}
