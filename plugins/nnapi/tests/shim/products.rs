//! What the unit computes, what it refuses, and on which device.

use neuropil_plugin_abi::{self as abi, AbiStruct, NpQuery};
use neuropil_plugin_conformance::checks;
use neuropil_plugin_conformance::sample::{Random, SCHEMES, Sample, group};

use crate::kit::{Shim, plugin};

/// Errors of 8-bit activations over rows that are as short as those of the checks.
const INT8: f64 = 0.025;
const F16: f64 = 1.5e-3;

fn query(scheme: u32) -> NpQuery {
    NpQuery {
        op: abi::NP_OP_MATMUL,
        scheme,
        rows: 64,
        cols: 64,
        group: group(scheme),
        tokens: 1,
        ..NpQuery::new()
    }
}

#[test]
fn without_nnapi_the_plugin_says_what_it_is() {
    let failure = plugin().probe(&[]).unwrap_err();
    assert_eq!(failure.code, abi::NP_UNSUPPORTED);
    assert!(failure.text.starts_with("there is no NNAPI, which is a part of Android 10"), "{}", failure.text);
    let failure = plugin().probe(&[("exact", "yes")]).unwrap_err();
    assert_eq!(
        (failure.code, failure.text.contains("choose among library, device")),
        (abi::NP_INVALID, true)
    );
}

#[test]
fn products_of_the_accelerator() {
    let shim = Shim::new();
    let device = shim.open(&[("tokens", "2+5+9"), ("int8", "on")]).unwrap();
    let info = device.info();
    assert_eq!((info.kind, &info.token_buckets[..]), (abi::NP_KIND_NPU, &[2, 5, 9][..]));
    assert_eq!(info.name, "shim-accelerator by NNAPI");
    assert_eq!(info.driver, "NNAPI of feature level 31, driver 1.0 of level 31");
    let errors =
        checks::products(&device, |scheme| if scheme == abi::NP_SCHEME_CHANNEL8 { INT8 } else { F16 });
    println!("{errors:?}");
    let offered: Vec<&str> = errors.iter().map(|(name, _)| *name).collect();
    assert_eq!(offered, ["f32", "f16", "channel8"]);
    checks::refusals(&device);
    checks::threads(&device);
    assert!(!device.has_clusters());
    drop(device);
    shim.is_clean();
}

#[test]
fn f32_is_exact_when_it_is_asked_for() {
    let shim = Shim::new();
    for options in [[("precision", "f32"), ("tokens", "1+3")], [("relaxed", "off"), ("tokens", "1+3")]] {
        let device = shim.open(&options).unwrap();
        let sample = Sample::random(abi::NP_SCHEME_F32, 40, 64, 1);
        let weight = device.prepare(&[&sample]).unwrap();
        let x = Random::new(2).values(3 * 64);
        let found = device.matmul(&[&weight], &x, 3).unwrap();
        let wide: Vec<f64> = x.iter().map(|x| f64::from(*x)).collect();
        let error = neuropil_plugin_conformance::sample::relative_error(&found[0], &sample.product(&wide));
        assert!(error < 1e-6, "{error}");
    }
    let device = shim.open(&[("precision", "f16"), ("tokens", "1+3")]).unwrap();
    assert_eq!(checks::products(&device, |_| F16).len(), 2);
    drop(device);
    shim.is_clean();
}

#[test]
fn with_widen_every_scheme_is_offered_as_floats() {
    let shim = Shim::new();
    let wide = [("widen", "on"), ("tokens", "1+3")];
    for (options, bound) in [(&[("precision", "f32")][..], 1e-6), (&[], 3e-3)] {
        let device = shim.open(&[&wide[..], options].concat()).unwrap();
        let errors = checks::products(&device, |_| bound);
        assert_eq!(errors.len(), SCHEMES.len(), "{errors:?}");
        for (scheme, _) in SCHEMES {
            let flags = device.query(&query(scheme)).unwrap();
            let emulated = !matches!(scheme, abi::NP_SCHEME_F32 | abi::NP_SCHEME_F16);
            assert_eq!(flags & abi::NP_SUPPORT_EMULATED != 0, emulated);
            assert_eq!(flags & abi::NP_SUPPORT_OUTLIERS != 0, emulated);
        }
    }
    shim.is_clean();
}

#[test]
fn a_no_has_a_reason() {
    let shim = Shim::new();
    let device = shim.open(&[]).unwrap();
    for (scheme, reason) in [
        (abi::NP_SCHEME_CHANNEL8, "8-bit activations only, which int8=on allows"),
        (abi::NP_SCHEME_GROUP8, "no scales per group of columns"),
        (abi::NP_SCHEME_GROUP4, "no type of 4 bits"),
        (abi::NP_SCHEME_GROUP4M, "no type of 4 bits"),
        (abi::NP_SCHEME_CHANNEL4, "no type of 4 bits"),
    ] {
        let failure = device.query(&query(scheme)).unwrap_err();
        assert_eq!(
            (failure.code, failure.text.contains(reason)),
            (abi::NP_UNSUPPORTED, true),
            "{}",
            failure.text
        );
    }
    let huge = NpQuery { rows: 1 << 20, cols: 1 << 20, ..query(abi::NP_SCHEME_F16) };
    assert!(device.query(&huge).unwrap_err().text.contains("too large"));
    let cluster = NpQuery { op: abi::NP_OP_CLUSTER, down_scheme: 1, stage: 6, activation: 1, ..query(1) };
    assert!(device.query(&cluster).unwrap_err().text.contains("no neuron clusters"));

    // The driver is asked once for each product, and its answer is the reason.
    let asked = || shim.get("calls.Model_getSupportedOperationsForDevices");
    shim.set("unsupported", "shim-accelerator/FULLY_CONNECTED/FLOAT16");
    let before = asked();
    for _ in 0..3 {
        let failure = device.query(&query(abi::NP_SCHEME_F16)).unwrap_err();
        assert_eq!(failure.code, abi::NP_UNSUPPORTED);
        assert!(
            failure.text.contains("the driver of shim-accelerator (1.0, feature level 31) does not take")
        );
        assert!(failure.text.contains("FULLY_CONNECTED of F16 with 64 rows"), "{}", failure.text);
        device.query(&query(abi::NP_SCHEME_F32)).unwrap();
    }
    assert_eq!(asked(), before + 2);
    let sample = Sample::random(abi::NP_SCHEME_F16, 64, 64, 1);
    let failure = device.prepare(&[&sample]).err().unwrap();
    assert_eq!((failure.code, failure.text.contains("does not take")), (abi::NP_UNSUPPORTED, true));
    drop(device);
    shim.is_clean();
}

#[test]
fn devices_are_chosen_by_kind_or_name() {
    let shim = Shim::new();
    let name = |options: &[(&str, &str)]| shim.open(options).map(|device| device.info().name);
    for (wish, want) in [
        ("auto", "shim-accelerator by NNAPI"),
        ("accelerator", "shim-accelerator by NNAPI"),
        ("gpu", "shim-gpu by NNAPI"),
        ("cpu", "nnapi-reference by NNAPI"),
        ("shim-gpu", "shim-gpu by NNAPI"),
    ] {
        assert_eq!(name(&[("device", wish)]).unwrap(), want);
    }
    let failure = name(&[("device", "hexagon")]).unwrap_err();
    assert_eq!(failure.code, abi::NP_INVALID);
    assert!(
        failure.text.contains("no device hexagon here, but shim-accelerator, shim-gpu"),
        "{}",
        failure.text
    );
    shim.set("devices", "odd:other:31,nnapi-reference:cpu:31");
    assert_eq!(name(&[]).unwrap(), "odd by NNAPI");
    assert!(name(&[("device", "gpu")]).unwrap_err().text.contains("no GPU"));
    shim.set("devices", "nnapi-reference:cpu:31");
    let failure = name(&[]).unwrap_err();
    assert_eq!(
        (failure.code, failure.text.contains("device=cpu")),
        (abi::NP_UNSUPPORTED, true),
        "{}",
        failure.text
    );
    shim.set("devices", "");
    assert!(name(&[]).unwrap_err().text.contains("none"));
    shim.is_clean();
}

#[test]
fn the_gpu_of_floats_and_the_cpu_compute_too() {
    let shim = Shim::new();
    let device = shim.open(&[("device", "gpu"), ("tokens", "1+3"), ("int8", "on")]).unwrap();
    assert_eq!(device.info().kind, abi::NP_KIND_GPU);
    let errors = checks::products(&device, |_| F16);
    assert_eq!(errors.len(), 2, "{errors:?}");
    let failure = device.query(&query(abi::NP_SCHEME_CHANNEL8)).unwrap_err();
    assert!(failure.text.contains("does not take CONV_2D of per-channel int8"), "{}", failure.text);
    let device = shim.open(&[("device", "cpu"), ("tokens", "1+3"), ("int8", "on")]).unwrap();
    let bound = |scheme| match scheme {
        abi::NP_SCHEME_F32 => 1e-6,
        abi::NP_SCHEME_F16 => F16,
        _ => INT8,
    };
    assert_eq!(checks::products(&device, bound).len(), 3);
    drop(device);
    shim.is_clean();
}
