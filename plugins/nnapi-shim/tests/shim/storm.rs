//! Calls in any order on any handle: whatever a client does, it gets codes, never a crash or a fault of the stand-in.

use std::ffi::c_void;
use std::ptr::{null, null_mut};

use neuropil_nnapi_shim::c::{compilation::*, device::*, execution::*, memory::*, model::*};
use neuropil_nnapi_shim::codes::*;

use crate::kit::*;

/// Numbers that look random.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: usize) -> usize {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 33) as usize % sides
    }
}

#[test]
fn calls_in_any_order_are_answered() {
    let _one = alone();
    // One model that works, so that runs happen too.
    let net = linear(2, 8, 3, 0).compile();
    let mut handles =
        vec![null_mut(), net.model, net.compilation, device(0), std::ptr::without_provenance_mut(48)];
    let mut dice = Dice(7);
    let mut buffers = vec![vec![0u8; 64]; 8];
    let dims = [2u32, 8, 0, 3];
    let token = [1u8; 32];
    let mut execution = null_mut();
    for _ in 0..60_000 {
        // Two of three handles are of the last ones, so that things get somewhere.
        let recent = handles.len().saturating_sub(8);
        let near = recent + dice.roll(handles.len() - recent);
        let far = dice.roll(handles.len());
        let h: *mut c_void = handles[if dice.roll(3) > 0 { near } else { far }];
        let g: *mut c_void = handles[dice.roll(handles.len())];
        let len = [0, 4, 24, 64][dice.roll(4)];
        let index = dice.roll(4) as i32 - 1;
        let at = dice.roll(8);
        let buffer = buffers[at].as_mut_ptr();
        let kind = OperandType {
            kind: dice.roll(16) as i32,
            dimension_count: dice.roll(4) as u32,
            dimensions: dims.as_ptr(),
            scale: [0.0, 0.5][dice.roll(2)],
            zero_point: 0,
        };
        let list: Vec<u32> = (0..5).map(|_| dice.roll(6) as u32).collect();
        let scales = ChannelScales { dimension: 0, count: 2, scales: [0.5f32, 0.25].as_ptr() };
        let n = list.len() as u32 - 1;
        let mut slot = null_mut();
        let (mut rank, mut nanos) = (0u32, 0u64);
        let live = query("live.executions");
        let mut many = [0u32; 8];
        let mut bools = [0u8; 64];
        // SAFETY: handles may be anything; buffers live and have room.
        unsafe {
            let what = dice.roll(37);
            let h = if (17..=26).contains(&what) && dice.roll(3) > 0 { execution } else { h };
            match what {
                0 => ANeuralNetworksModel_create(&mut slot),
                1 | 2 => ANeuralNetworksModel_addOperand(h, &kind),
                3 => ANeuralNetworksModel_setOperandValue(h, index, buffer.cast(), len),
                4 => ANeuralNetworksModel_setOperandSymmPerChannelQuantParams(h, index, &scales),
                5 => {
                    let kind = [ADD, CONV_2D, FULLY_CONNECTED, LOGISTIC, MUL, 102][dice.roll(6)];
                    ANeuralNetworksModel_addOperation(h, kind, n, list.as_ptr(), 1, list[4..].as_ptr())
                }
                6 => {
                    ANeuralNetworksModel_identifyInputsAndOutputs(h, 1, list.as_ptr(), 1, list[1..].as_ptr())
                }
                7 => ANeuralNetworksModel_finish(h),
                8 => ANeuralNetworksModel_getSupportedOperationsForDevices(
                    net.model,
                    &h.cast_const(),
                    1,
                    bools.as_mut_ptr(),
                ),
                9 => ANeuralNetworksCompilation_create(if at > 3 { net.model } else { h }, &mut slot),
                10 => ANeuralNetworksCompilation_createForDevices(net.model, &g.cast_const(), 1, &mut slot),
                11 => ANeuralNetworksCompilation_setTimeout(h, 1000),
                12 => ANeuralNetworksCompilation_setCaching(h, c"/nonexistent".as_ptr(), token.as_ptr()),
                13 => ANeuralNetworksCompilation_finish(h),
                14 | 15 => {
                    ANeuralNetworksExecution_create(if at > 3 { net.compilation } else { h }, &mut slot)
                }
                16 => ANeuralNetworksBurst_create(if at > 3 { net.compilation } else { h }, &mut slot),
                17..=19 => ANeuralNetworksExecution_setInput(h, index.min(0), null(), buffer.cast(), len),
                20..=22 => ANeuralNetworksExecution_setOutput(h, index.min(0), null(), buffer.cast(), len),
                23 => ANeuralNetworksExecution_setReusable(h, at as u8),
                24..=26 => ANeuralNetworksExecution_compute(h),
                27 => ANeuralNetworksExecution_burstCompute(h, g),
                28 => ANeuralNetworksExecution_getOutputOperandRank(h, index, &mut rank),
                29 => ANeuralNetworksExecution_getOutputOperandDimensions(h, index, many.as_mut_ptr()),
                30 => ANeuralNetworksExecution_getDuration(h, index, &mut nanos),
                31 => ANeuralNetworksMemoryDesc_create(&mut slot),
                32 => ANeuralNetworksMemoryDesc_addInputRole(h, net.compilation, 0, 1.0),
                33 => ANeuralNetworksMemoryDesc_finish(h),
                34 => ANeuralNetworksMemory_createFromDesc(h, &mut slot),
                35 => ANeuralNetworksExecution_setInputFromMemory(h, 0, null(), g, 0, len),
                _ if h == net.model || h == net.compilation => NO_ERROR,
                _ => {
                    match dice.roll(6) {
                        0 => ANeuralNetworksModel_free(h),
                        1 => ANeuralNetworksCompilation_free(h),
                        2 => ANeuralNetworksExecution_free(h),
                        3 => ANeuralNetworksBurst_free(h),
                        4 => ANeuralNetworksMemory_free(h),
                        _ => ANeuralNetworksMemoryDesc_free(h),
                    }
                    NO_ERROR
                }
            };
        }
        if !slot.is_null() {
            execution = if query("live.executions") > live { slot } else { execution };
            handles.push(slot);
        }
    }
    assert!(
        query("executions.run") > 50 && query("violations.stale_handle") > 50,
        "the storm reached everything"
    );
    assert_eq!((query("violations.panic"), query("violations.client_memory")), (0, 0));
    let (code, y) = net.run(&bytes_of(&[0.0; 16]), 24);
    assert_eq!((code, &y[..12]), (NO_ERROR, &bytes_of(&noise(2, 3))[..]));
}
