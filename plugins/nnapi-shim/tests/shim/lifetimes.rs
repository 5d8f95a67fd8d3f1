//! What no code tells a client: lifetimes, order, shared use. Each breach is counted, and nothing crashes.

use std::ptr::{null, null_mut};

use neuropil_nnapi_shim::c::{compilation::*, execution::*, model::*};
use neuropil_nnapi_shim::codes::*;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use crate::kit::*;

/// The kinds that were counted, and no others.
fn violations(kinds: &[(&str, i64)]) {
    for (kind, count) in kinds {
        assert_eq!(query(&format!("violations.{kind}")), *count, "{kind}");
    }
    assert_eq!(query("violations"), kinds.iter().map(|(_, n)| n).sum::<i64>());
}

#[test]
fn stale_handles_are_counted() {
    let _one = alone();
    let mut model = null_mut();
    // SAFETY: handles, which may be stale.
    unsafe {
        assert_eq!(ANeuralNetworksModel_create(&mut model), NO_ERROR);
        ANeuralNetworksModel_free(model);
        violations(&[]);
        ANeuralNetworksModel_free(model);
        violations(&[("double_free", 1)]);
        assert_eq!(ANeuralNetworksModel_finish(model), BAD_STATE);
        assert_eq!(ANeuralNetworksCompilation_finish(model), BAD_STATE, "of another kind, too");
        assert_eq!(ANeuralNetworksExecution_compute(std::ptr::without_provenance_mut(8)), BAD_STATE);
        violations(&[("double_free", 1), ("stale_handle", 3)]);
    }
    assert_eq!(query("live"), 0);
}

#[test]
fn things_are_freed_in_order() {
    let _one = alone();
    let mut net = linear(2, 8, 3, 0).compile();
    let run = net.execution();
    let (mut burst, mut y) = (null_mut(), vec![0; 24]);
    let x = bytes_of(&noise(3, 16));
    assert_eq!(query("live"), 3);
    // SAFETY: handles and slots.
    unsafe {
        assert_eq!(ANeuralNetworksBurst_create(net.compilation, &mut burst), NO_ERROR);
        assert_eq!(query("live.bursts"), 1);
        ANeuralNetworksModel_free(net.model);
        violations(&[("order", 1)]);
        ANeuralNetworksCompilation_free(net.compilation);
        violations(&[("order", 3)]);
        // What is left refuses, and does not crash.
        assert_eq!(run.input(&x), NO_ERROR);
        assert_eq!(run.output(&mut y), NO_ERROR);
        assert_eq!(run.compute(), BAD_STATE);
        violations(&[("order", 4)]);
        ANeuralNetworksBurst_free(burst);
    }
    drop(run);
    (net.model, net.compilation) = (null_mut(), null_mut());
    drop(net);
    assert_eq!(query("live"), 0);
    violations(&[("order", 4)]);
}

#[test]
fn large_constants_stay_as_they_are() {
    let _one = alone();
    // Changed before the compilation is finished: refused.
    let mut net = linear(2, 64, 3, 0);
    assert_eq!(net.finish(), NO_ERROR);
    net.values[0][5] ^= 1;
    assert_eq!(net.try_compile(), BAD_DATA);
    violations(&[("constant_changed", 1)]);
    net.values[0][5] ^= 1;
    drop(net);
    violations(&[("constant_changed", 1)]);
    // Changed later: counted when the model is freed, unless the test asks for less.
    for (rule, counted) in [("until_freed", 2), ("until_compiled", 2)] {
        control("constants", rule);
        let mut net = linear(2, 64, 3, 0).compile();
        net.values[0][5] ^= 1;
        drop(net);
        violations(&[("constant_changed", counted)]);
    }
    // Small ones were copied.
    let mut net = linear(2, 8, 3, 0);
    assert_eq!(net.finish(), NO_ERROR);
    net.values.iter_mut().for_each(|v| v.fill(0));
    assert_eq!(net.try_compile(), NO_ERROR);
    let (_, y) = net.run(&bytes_of(&[1.0; 16]), 24);
    assert_ne!(floats(&y), [0.0; 6]);
    violations(&[("constant_changed", 2)]);
}

#[test]
fn a_constant_that_is_gone_is_no_crash() {
    let _one = alone();
    let (k, n) = (64u32, 32u32);
    let len = (k * n * 4) as usize;
    let (protection, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE);
    let file = memfd_create("constant", MemfdFlags::empty()).unwrap();
    ftruncate(&file, len as u64).unwrap();
    // SAFETY: a new mapping, placed by the kernel.
    let at = unsafe { mmap(null_mut(), len, protection, flags, &file, 0) }.unwrap();
    let mut net = Net::new();
    let x = net.operand((TENSOR_FLOAT32, &[1, k], 0.0, 0));
    let w = net.operand((TENSOR_FLOAT32, &[n, k], 0.0, 0));
    // SAFETY: the mapping is that long.
    assert_eq!(unsafe { ANeuralNetworksModel_setOperandValue(net.model, w as i32, at, len) }, NO_ERROR);
    let b = net.constant((TENSOR_FLOAT32, &[n], 0.0, 0), bytes_of(&noise(2, n as usize)));
    let f = net.number(0);
    let y = net.operand((TENSOR_FLOAT32, &[1, n], 0.0, 0));
    assert_eq!(net.operation(FULLY_CONNECTED, &[x, w, b, f], &[y]), NO_ERROR);
    assert_eq!(net.io(&[x], &[y]), NO_ERROR);
    assert_eq!(net.finish(), NO_ERROR);
    // There is nothing behind the mapping any more, and nobody else gets its addresses meanwhile.
    ftruncate(&file, 0).unwrap();
    assert_eq!(net.try_compile(), BAD_DATA);
    violations(&[("constant_changed", 1)]);
    drop(net);
    violations(&[("constant_changed", 2)]);
    // SAFETY: the mapping of above.
    unsafe { munmap(at, len) }.unwrap();
}

#[test]
fn a_burst_takes_one_execution_at_a_time() {
    let _one = alone();
    let net = linear(2, 8, 3, 0).compile();
    let other = linear(2, 8, 3, 0).compile();
    let x = bytes_of(&noise(3, 16));
    let (mut y, mut z) = (vec![0; 24], vec![0; 24]);
    let (first, second) = (net.execution(), net.execution());
    for (run, out) in [(&first, &mut y), (&second, &mut z)] {
        assert_eq!(run.input(&x), NO_ERROR);
        assert_eq!(run.output(out), NO_ERROR);
    }
    let (mut burst, mut wrong) = (null_mut(), null_mut());
    // SAFETY: handles and slots.
    unsafe {
        assert_eq!(ANeuralNetworksBurst_create(net.compilation, &mut burst), NO_ERROR);
        assert_eq!(ANeuralNetworksBurst_create(other.compilation, &mut wrong), NO_ERROR);
        assert_eq!(ANeuralNetworksExecution_burstCompute(first.0, null_mut()), UNEXPECTED_NULL);
        assert_eq!(ANeuralNetworksExecution_burstCompute(first.0, wrong), BAD_DATA);
    }
    control("hang_ms", "1000 once");
    let (e, b) = (first.0.addr(), burst.addr());
    let thread = std::thread::spawn(move || {
        let (e, b) = (std::ptr::without_provenance_mut(e), std::ptr::without_provenance_mut(b));
        // SAFETY: handles.
        unsafe { ANeuralNetworksExecution_burstCompute(e, b) }
    });
    while query("executions.now") == 0 {
        std::thread::yield_now();
    }
    // SAFETY: handles.
    unsafe {
        assert_eq!(ANeuralNetworksExecution_burstCompute(second.0, burst), BAD_STATE);
        violations(&[("burst_concurrent", 1)]);
        assert_eq!(first.compute(), BAD_STATE);
        violations(&[("burst_concurrent", 1), ("execution_concurrent", 1)]);
        assert_eq!(second.compute(), NO_ERROR, "beside the burst it may run");
        ANeuralNetworksBurst_free(burst);
        violations(&[("burst_concurrent", 1), ("execution_concurrent", 1), ("in_use", 1)]);
        ANeuralNetworksBurst_free(wrong);
    }
    assert_eq!(thread.join().unwrap(), NO_ERROR);
    assert_eq!((query("executions.peak"), query("executions.now"), query("executions.burst")), (2, 0, 1));
    assert_eq!(y, z);
}

#[test]
fn events_are_waited_for() {
    let _one = alone();
    let net = linear(2, 8, 3, 0).compile();
    let x = bytes_of(&noise(3, 16));
    let mut y = vec![0; 24];
    let start = |run: &Run, y: &mut [u8]| {
        let mut event = null_mut();
        assert_eq!(run.input(&x), NO_ERROR);
        assert_eq!(run.output(y), NO_ERROR);
        // SAFETY: a slot.
        assert_eq!(unsafe { ANeuralNetworksExecution_startCompute(run.0, &mut event) }, NO_ERROR);
        event
    };
    let run = net.execution();
    let event = start(&run, &mut y);
    // SAFETY: handles.
    unsafe {
        assert_eq!(ANeuralNetworksEvent_wait(event), NO_ERROR);
        assert_eq!(ANeuralNetworksEvent_wait(event), NO_ERROR, "waiting again is allowed");
        ANeuralNetworksEvent_free(event);
    }
    assert_ne!(y, [0; 24]);
    violations(&[]);
    drop(run);
    control("hang_ms", "200 once");
    let run = net.execution();
    let event = start(&run, &mut y);
    // SAFETY: handles.
    unsafe { ANeuralNetworksEvent_free(event) };
    violations(&[("not_waited", 1)]);
    drop(run);
    control("hang_ms", "200 once");
    let run = net.execution();
    let event = start(&run, &mut y);
    drop(run);
    violations(&[("not_waited", 1), ("in_use", 1)]);
    // SAFETY: handles.
    unsafe {
        assert_eq!(ANeuralNetworksEvent_wait(event), NO_ERROR);
        ANeuralNetworksEvent_free(event);
    }
    drop(net);
    assert_eq!(query("live"), 0);
}

#[test]
fn outputs_lie_over_nothing() {
    let _one = alone();
    let net = linear(2, 8, 4, 0).compile();
    let run = net.execution();
    let mut both = bytes_of(&noise(3, 16));
    assert_eq!(run.input(&both), NO_ERROR);
    assert_eq!(run.output(&mut both[32..]), NO_ERROR);
    assert_eq!(run.compute(), BAD_DATA);
    violations(&[("overlap", 1)]);
}

#[test]
fn buffers_that_are_gone_are_no_crash() {
    let _one = alone();
    let net = linear(2, 8, 3, 0).compile();
    let (x, mut y) = (bytes_of(&noise(3, 16)), vec![0; 24]);
    let nowhere = std::ptr::without_provenance_mut(4096);
    let [first, second] = [net.execution(), net.execution()];
    // SAFETY: the addresses are never followed without a look.
    unsafe {
        assert_eq!(ANeuralNetworksExecution_setInput(first.0, 0, null(), nowhere, 64), NO_ERROR);
        assert_eq!(first.output(&mut y), NO_ERROR);
        assert_eq!(first.compute(), UNMAPPABLE);
        assert_eq!(second.input(&x), NO_ERROR);
        assert_eq!(ANeuralNetworksExecution_setOutput(second.0, 0, null(), nowhere, 24), NO_ERROR);
        assert_eq!(second.compute(), UNMAPPABLE);
    }
    violations(&[("client_memory", 2)]);
}
