//! Faults strike where and when they are set, and nowhere else.

use std::ptr::null_mut;
use std::time::{Duration, Instant};

use neuropil_nnapi_shim::c::{compilation::*, device::*, execution::*, model::*};
use neuropil_nnapi_shim::codes::*;
use neuropil_nnapi_shim::control::{neuropil_nnapi_shim_control, neuropil_nnapi_shim_last_violation};

use crate::kit::*;

const DEADLINE: i32 = MISSED_DEADLINE_TRANSIENT;

/// The codes of some runs.
fn runs(net: &Net, n: usize) -> Vec<i32> {
    let x = bytes_of(&noise(3, 16));
    (0..n).map(|_| net.run(&x, 24).0).collect()
}

#[test]
fn a_function_fails_at_the_call_that_was_asked_for() {
    let _one = alone();
    let net = linear(2, 8, 3, 0).compile();
    control("fail", "ANeuralNetworksExecution_compute 5 at=2");
    control("fail", "Execution_create 12 after=5");
    assert_eq!(runs(&net, 5), [0, 5, 0, 0, 0]);
    let mut slot = net.model;
    // SAFETY: a slot.
    assert_eq!(unsafe { ANeuralNetworksExecution_create(net.compilation, &mut slot) }, 12);
    // SAFETY: as before.
    assert_eq!(unsafe { ANeuralNetworksExecution_create(net.compilation, &mut slot) }, 12);
    control("fail", "off");
    assert_eq!(runs(&net, 1), [0]);
    assert_eq!(query("calls.ANeuralNetworksExecution_compute"), 6);
    // A run that fails is a run: the execution has seen it.
    control("fail", "Execution_compute 5");
    let (run, mut y) = (net.execution(), vec![0; 24]);
    assert_eq!(run.input(&bytes_of(&noise(3, 16))), NO_ERROR);
    assert_eq!(run.output(&mut y), NO_ERROR);
    assert_eq!([run.compute(), run.compute()], [5, BAD_STATE]);
    assert_eq!(y, [0; 24]);
    assert_eq!(query("refused.Execution_create"), 2);
    assert_eq!(query("refused.12"), 2);
    assert_eq!(query("violations"), 0);
}

#[test]
fn every_function_with_a_code_can_fail() {
    let _one = alone();
    let mut slot = null_mut();
    let mut count = 0;
    for code in [1, 4, 6, 9, 13, 14] {
        control("fail", &format!("Model_create {code}"));
        control("fail", &format!("_getDeviceCount {code}"));
        // SAFETY: slots.
        unsafe {
            assert_eq!(ANeuralNetworksModel_create(&mut slot), code);
            assert_eq!(ANeuralNetworks_getDeviceCount(&mut count), code);
        }
    }
    assert_eq!(query("live"), 0);
    assert_eq!(query("nothing"), -1);
    assert_eq!(query("calls.Nothing"), -1);
    // SAFETY: texts.
    unsafe {
        assert_eq!(neuropil_nnapi_shim_control(c"fail".as_ptr(), c"Nothing 3".as_ptr()), -1);
        assert_eq!(neuropil_nnapi_shim_control(c"fly".as_ptr(), c"once".as_ptr()), -1);
        assert_eq!(neuropil_nnapi_shim_control(c"fail".as_ptr(), std::ptr::null()), -1);
    }
}

#[test]
fn outputs_are_spoilt_when_asked() {
    let _one = alone();
    let net = linear(2, 8, 100, 0).compile();
    let x = bytes_of(&noise(3, 16));
    let (_, good) = net.run(&x, 800);
    control("nan_outputs", "once");
    let (code, y) = net.run(&x, 800);
    assert!(code == NO_ERROR && floats(&y).iter().all(|v| v.is_nan()));
    control("wrong_tile", "at=2");
    assert_eq!(net.run(&x, 800), (NO_ERROR, good.clone()));
    let (code, y) = net.run(&x, 800);
    assert_eq!((code, &y[..136 * 4]), (NO_ERROR, &good[..136 * 4]));
    for (bad, good) in floats(&y).iter().zip(floats(&good)).skip(136) {
        assert!(bad.is_finite() && (bad - good).abs() > 0.5 * good.abs(), "{bad} {good}");
    }
    assert_eq!(net.run(&x, 800), (NO_ERROR, good));
}

#[test]
fn a_dead_device_stays_dead_until_it_is_waited_for() {
    let _one = alone();
    let net = linear(2, 8, 3, 0).compile();
    control("dead_object", "after=2");
    assert_eq!(runs(&net, 4), [0, 0, DEAD_OBJECT, DEAD_OBJECT]);
    let mut more = linear(2, 8, 3, 0);
    assert_eq!(more.finish(), NO_ERROR);
    assert_eq!(more.try_compile(), DEAD_OBJECT);
    let mut slot = null_mut();
    // SAFETY: handles and slots.
    unsafe {
        assert_eq!(ANeuralNetworksExecution_create(more.compilation, &mut slot), BAD_DATA, "it is no good");
        assert_eq!(ANeuralNetworksBurst_create(more.compilation, &mut slot), BAD_DATA);
        assert_eq!(ANeuralNetworksDevice_wait(device(0)), NO_ERROR);
    }
    assert_eq!(runs(&net, 2), [0, 0]);
}

#[test]
fn deadlines_are_missed() {
    let _one = alone();
    let net = linear(2, 8, 3, 0).compile();
    control("missed_deadline", "once");
    assert_eq!(runs(&net, 2), [DEADLINE, 0]);
    // A device that hangs is left when the client's time is over, or else when it is done.
    let (x, mut y) = (bytes_of(&noise(3, 16)), vec![0; 24]);
    for (limit, code, least, most) in [(20_000_000, DEADLINE, 20, 5_000), (0, NO_ERROR, 60, 60_000)] {
        control("hang_ms", if limit > 0 { "6000" } else { "60" });
        let run = net.execution();
        // SAFETY: a handle.
        assert_eq!(unsafe { ANeuralNetworksExecution_setTimeout(run.0, limit) }, NO_ERROR);
        assert_eq!(run.input(&x), NO_ERROR);
        assert_eq!(run.output(&mut y), NO_ERROR);
        let start = Instant::now();
        assert_eq!(run.compute(), code);
        let took = start.elapsed();
        assert!(took >= Duration::from_millis(least) && took < Duration::from_millis(most), "{took:?}");
    }
    control("hang_ms", "off");
    // An old device does not know deadlines.
    control("devices", "old-accelerator:accelerator:29");
    control("hang_ms", "100 once");
    let net = linear(2, 8, 3, 0).compile();
    let run = net.execution();
    // SAFETY: a handle.
    assert_eq!(unsafe { ANeuralNetworksExecution_setTimeout(run.0, 1) }, NO_ERROR);
    assert_eq!(run.input(&x), NO_ERROR);
    assert_eq!(run.output(&mut y), NO_ERROR);
    assert_eq!(run.compute(), NO_ERROR);
}

#[test]
fn compilations_hang_and_miss_their_deadline() {
    let _one = alone();
    for (limit, code) in [(1_000_000, DEADLINE), (0, NO_ERROR), (0, 12)] {
        control("compile_hang_ms", "60 once");
        if code == 12 {
            control("fail", "Compilation_finish 12");
        }
        let mut net = linear(2, 8, 3, 0);
        assert_eq!(net.finish(), NO_ERROR);
        let c = net.open_compilation();
        let start = Instant::now();
        // SAFETY: a handle.
        unsafe {
            assert_eq!(ANeuralNetworksCompilation_setTimeout(c, limit), NO_ERROR);
            assert_eq!(ANeuralNetworksCompilation_finish(c), code);
            assert_eq!(ANeuralNetworksCompilation_finish(c), BAD_STATE, "there is one try");
        }
        assert!(code != NO_ERROR || start.elapsed() >= Duration::from_millis(60));
    }
}

#[test]
fn a_device_goes_away() {
    let _one = alone();
    let net = linear(2, 8, 3, 0).compile();
    control("unavailable", "shim-accelerator");
    assert_eq!(runs(&net, 1), [UNAVAILABLE_DEVICE]);
    let mut more = linear(2, 8, 3, 0);
    assert_eq!(more.finish(), NO_ERROR);
    assert_eq!(more.try_compile(), UNAVAILABLE_DEVICE);
    control("unavailable", "");
    assert_eq!(runs(&net, 1), [NO_ERROR]);
}

#[test]
fn the_last_violation_is_told_in_words() {
    let _one = alone();
    // SAFETY: a stale handle, and a buffer of this length.
    unsafe {
        assert_eq!(ANeuralNetworksModel_finish(std::ptr::without_provenance_mut(64)), BAD_STATE);
        let mut text = [1u8; 16];
        let len = neuropil_nnapi_shim_last_violation(text.as_mut_ptr().cast(), text.len());
        assert!(len > 16);
        assert_eq!(&text, b"stale_handle: 0\0");
    }
}

#[test]
fn times_are_measured_when_asked() {
    let _one = alone();
    let net = linear(2, 8, 3, 0).compile();
    let (x, mut y, mut nanos) = (bytes_of(&noise(3, 16)), vec![0; 24], 0);
    for measure in [0u8, 1] {
        control("hang_ms", "5 once");
        let run = net.execution();
        assert_eq!(run.input(&x), NO_ERROR);
        assert_eq!(run.output(&mut y), NO_ERROR);
        // SAFETY: a handle and a place.
        unsafe {
            assert_eq!(ANeuralNetworksExecution_setMeasureTiming(run.0, measure), NO_ERROR);
            assert_eq!(ANeuralNetworksExecution_getDuration(run.0, 0, &mut nanos), BAD_STATE);
            assert_eq!(run.compute(), NO_ERROR);
            assert_eq!(ANeuralNetworksExecution_getDuration(run.0, 0, &mut nanos), NO_ERROR);
        }
        assert!(if measure == 0 { nanos == u64::MAX } else { (5_000_000..5_000_000_000).contains(&nanos) });
    }
}
