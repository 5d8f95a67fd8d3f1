//! Every wrong call is refused with the right code, and none is a violation.

use std::ffi::c_void;
use std::ptr::{null, null_mut};

use neuropil_nnapi_shim::c::{compilation::*, device::*, execution::*, memory::*, model::*};
use neuropil_nnapi_shim::codes::*;

use crate::kit::*;

const F32: Type = (TENSOR_FLOAT32, &[2, 8], 0.0, 0);

#[test]
fn null_is_refused_everywhere() {
    let _one = alone();
    let net = linear(2, 8, 3, 0).compile();
    let run = net.execution();
    let (model, compilation, execution) = (net.model, net.compilation, run.0);
    let (none, mut slot): (*mut c_void, *mut c_void) = (null_mut(), null_mut());
    let device = device(0);
    // SAFETY: NULL is what is tested; everything else is valid.
    let codes = unsafe {
        vec![
            ANeuralNetworks_getDeviceCount(null_mut()),
            ANeuralNetworks_getDevice(0, null_mut()),
            ANeuralNetworksDevice_getName(none, null_mut()),
            ANeuralNetworksDevice_getName(device, null_mut()),
            ANeuralNetworksDevice_getVersion(device, null_mut()),
            ANeuralNetworksDevice_getType(device, null_mut()),
            ANeuralNetworksDevice_getFeatureLevel(device, null_mut()),
            ANeuralNetworksDevice_wait(none),
            ANeuralNetworksMemory_createFromFd(1, 1, 0, 0, null_mut()),
            ANeuralNetworksMemory_copy(none, none),
            ANeuralNetworksMemoryDesc_create(null_mut()),
            ANeuralNetworksMemoryDesc_finish(none),
            ANeuralNetworksMemory_createFromDesc(none, &mut slot),
            ANeuralNetworksModel_create(null_mut()),
            ANeuralNetworksModel_finish(none),
            ANeuralNetworksModel_addOperand(none, &c_type(F32)),
            ANeuralNetworksModel_addOperand(model, null()),
            ANeuralNetworksModel_setOperandValue(none, 0, null(), 0),
            ANeuralNetworksModel_setOperandSymmPerChannelQuantParams(model, 0, null()),
            ANeuralNetworksModel_addOperation(none, ADD, 0, null(), 0, null()),
            ANeuralNetworksModel_addOperation(model, ADD, 1, null(), 0, null()),
            ANeuralNetworksModel_identifyInputsAndOutputs(model, 0, null(), 0, null()),
            ANeuralNetworksModel_relaxComputationFloat32toFloat16(none, 1),
            ANeuralNetworksModel_getSupportedOperationsForDevices(model, null(), 1, null_mut()),
            ANeuralNetworksCompilation_create(none, &mut slot),
            ANeuralNetworksCompilation_create(model, null_mut()),
            ANeuralNetworksCompilation_createForDevices(model, null(), 1, &mut slot),
            ANeuralNetworksCompilation_createForDevices(model, &none.cast_const(), 1, &mut slot),
            ANeuralNetworksCompilation_setPreference(none, 0),
            ANeuralNetworksCompilation_setCaching(compilation, null(), null()),
            ANeuralNetworksCompilation_setPriority(none, 90),
            ANeuralNetworksCompilation_setTimeout(none, 1),
            ANeuralNetworksCompilation_finish(none),
            ANeuralNetworksBurst_create(none, &mut slot),
            ANeuralNetworksBurst_create(compilation, null_mut()),
            ANeuralNetworksExecution_create(none, &mut slot),
            ANeuralNetworksExecution_create(compilation, null_mut()),
            ANeuralNetworksExecution_setInput(none, 0, null(), null(), 0),
            ANeuralNetworksExecution_setInput(execution, 0, null(), null(), 4),
            ANeuralNetworksExecution_setOutput(execution, 0, null(), null_mut(), 4),
            ANeuralNetworksExecution_setInputFromMemory(execution, 0, null(), none, 0, 4),
            ANeuralNetworksExecution_setOutputFromMemory(execution, 0, null(), none, 0, 4),
            ANeuralNetworksExecution_setTimeout(none, 1),
            ANeuralNetworksExecution_setReusable(none, 1),
            ANeuralNetworksExecution_compute(none),
            ANeuralNetworksExecution_startCompute(execution, null_mut()),
            ANeuralNetworksExecution_getOutputOperandRank(execution, 0, null_mut()),
            ANeuralNetworksExecution_getOutputOperandDimensions(execution, 0, null_mut()),
            ANeuralNetworksEvent_wait(none),
        ]
    };
    for (at, code) in codes.iter().enumerate() {
        assert_eq!(*code, UNEXPECTED_NULL, "call {at}");
    }
    // SAFETY: freeing NULL does nothing.
    unsafe {
        ANeuralNetworksModel_free(none);
        ANeuralNetworksCompilation_free(none);
        ANeuralNetworksExecution_free(none);
        ANeuralNetworksBurst_free(none);
        ANeuralNetworksEvent_free(none);
        ANeuralNetworksMemory_free(none);
        ANeuralNetworksMemoryDesc_free(none);
    }
    assert_eq!((query("violations"), query("refused")), (0, codes.len() as i64));
}

#[test]
fn a_finished_model_cannot_be_changed() {
    let _one = alone();
    let mut net = linear(2, 8, 3, 0);
    let mut slot = null_mut();
    // SAFETY: a slot.
    assert_eq!(unsafe { ANeuralNetworksCompilation_create(net.model, &mut slot) }, BAD_STATE, "not finished");
    assert!(slot.is_null());
    assert_eq!(net.finish(), NO_ERROR);
    assert_eq!(net.finish(), BAD_STATE);
    assert_eq!(net.try_operand(F32), BAD_STATE);
    assert_eq!(net.try_value(3, vec![0; 4]), BAD_STATE);
    assert_eq!(net.channels(1, 0, &[1.0]), BAD_STATE);
    assert_eq!(net.operation(FULLY_CONNECTED, &[0, 1, 2, 3], &[4]), BAD_STATE);
    assert_eq!(net.io(&[0], &[4]), BAD_STATE);
    // SAFETY: a handle.
    assert_eq!(unsafe { ANeuralNetworksModel_relaxComputationFloat32toFloat16(net.model, 1) }, BAD_STATE);
    assert_eq!(query("violations"), 0);
}

#[test]
fn a_compilation_is_set_before_and_used_after_its_end() {
    let _one = alone();
    let mut net = linear(2, 8, 3, 0);
    assert_eq!(net.finish(), NO_ERROR);
    let c = net.open_compilation();
    let (mut slot, token) = (null_mut(), [0u8; 32]);
    // SAFETY: handles, slots, a text and 32 bytes.
    unsafe {
        assert_eq!(ANeuralNetworksExecution_create(c, &mut slot), BAD_STATE);
        assert_eq!(ANeuralNetworksBurst_create(c, &mut slot), BAD_STATE);
        assert_eq!(ANeuralNetworksCompilation_setPreference(c, 2), NO_ERROR);
        assert_eq!(ANeuralNetworksCompilation_setPreference(c, 3), BAD_DATA);
        assert_eq!(ANeuralNetworksCompilation_setPriority(c, 90), NO_ERROR);
        assert_eq!(ANeuralNetworksCompilation_setPriority(c, 91), BAD_DATA);
        assert_eq!(ANeuralNetworksCompilation_setTimeout(c, 1_000_000_000), NO_ERROR);
        assert_eq!(ANeuralNetworksCompilation_finish(c), NO_ERROR);
        assert_eq!(ANeuralNetworksCompilation_finish(c), BAD_STATE);
        assert_eq!(ANeuralNetworksCompilation_setPreference(c, 1), BAD_STATE);
        assert_eq!(ANeuralNetworksCompilation_setPriority(c, 90), BAD_STATE);
        assert_eq!(ANeuralNetworksCompilation_setTimeout(c, 1), BAD_STATE);
        assert_eq!(ANeuralNetworksCompilation_setCaching(c, c"/".as_ptr(), token.as_ptr()), BAD_STATE);
    }
    let mut bytes = 0;
    // SAFETY: a handle and a place.
    unsafe {
        let (alignment, padding) = (
            ANeuralNetworksCompilation_getPreferredMemoryAlignmentForInput,
            ANeuralNetworksCompilation_getPreferredMemoryPaddingForOutput,
        );
        assert_eq!(alignment(c, 0, null_mut()), UNEXPECTED_NULL);
        assert_eq!(alignment(c, 1, &mut bytes), BAD_DATA);
        assert_eq!((alignment(c, 0, &mut bytes), bytes), (NO_ERROR, 64));
        assert_eq!((padding(c, 0, &mut bytes), bytes), (NO_ERROR, 32));
    }
    assert_eq!(query("violations"), 0);
}

#[test]
fn deadlines_need_one_chosen_device() {
    let _one = alone();
    let mut net = linear(2, 8, 3, 0);
    assert_eq!(net.finish(), NO_ERROR);
    let mut slot = null_mut();
    let two = [device(0).cast_const(), device(2).cast_const()];
    let same = [two[0], two[0]];
    // SAFETY: handles, lists and slots.
    unsafe {
        assert_eq!(
            ANeuralNetworksCompilation_createForDevices(net.model, two.as_ptr(), 0, &mut slot),
            BAD_DATA
        );
        assert_eq!(
            ANeuralNetworksCompilation_createForDevices(net.model, same.as_ptr(), 2, &mut slot),
            BAD_DATA
        );
        for chosen in [false, true] {
            let rc = match chosen {
                true => ANeuralNetworksCompilation_createForDevices(net.model, two.as_ptr(), 2, &mut slot),
                false => ANeuralNetworksCompilation_create(net.model, &mut slot),
            };
            assert_eq!(rc, NO_ERROR);
            assert_eq!(ANeuralNetworksCompilation_setTimeout(slot, 1), BAD_DATA);
            assert_eq!(ANeuralNetworksCompilation_finish(slot), NO_ERROR);
            let (c, mut e) = (slot, null_mut());
            assert_eq!(ANeuralNetworksExecution_create(c, &mut e), NO_ERROR);
            assert_eq!(ANeuralNetworksExecution_setTimeout(e, 1), BAD_DATA);
            assert_eq!(ANeuralNetworksExecution_setMeasureTiming(e, 1), BAD_DATA);
            ANeuralNetworksExecution_free(e);
            ANeuralNetworksCompilation_free(c);
        }
    }
    assert_eq!(query("violations"), 0);
}

#[test]
fn an_execution_runs_once_unless_it_is_reusable() {
    let _one = alone();
    let net = linear(2, 8, 3, 0).compile();
    let (x, mut y) = (bytes_of(&noise(3, 16)), vec![0; 24]);
    for reusable in [0u8, 1] {
        let run = net.execution();
        let mut rank = 0;
        // SAFETY: handles and places.
        unsafe {
            assert_eq!(ANeuralNetworksExecution_setReusable(run.0, 2), BAD_DATA);
            assert_eq!(ANeuralNetworksExecution_setReusable(run.0, reusable), NO_ERROR);
            assert_eq!(run.compute(), BAD_DATA, "nothing is bound");
            assert_eq!(run.input(&x), NO_ERROR);
            assert_eq!(run.compute(), BAD_DATA, "the output is not bound");
            assert_eq!(run.output(&mut y), NO_ERROR);
            assert_eq!(ANeuralNetworksExecution_getOutputOperandRank(run.0, 0, &mut rank), BAD_STATE);
            assert_eq!(run.compute(), NO_ERROR);
            assert_eq!(run.compute(), if reusable == 1 { NO_ERROR } else { BAD_STATE });
            assert_eq!(run.input(&x), BAD_STATE, "too late in both cases");
            assert_eq!(run.output(&mut y), BAD_STATE);
            assert_eq!(ANeuralNetworksExecution_setTimeout(run.0, 1), BAD_STATE);
            assert_eq!(ANeuralNetworksExecution_setReusable(run.0, 1), BAD_STATE);
            let mut dims = [0u32; 2];
            assert_eq!(ANeuralNetworksExecution_getOutputOperandRank(run.0, 1, &mut rank), BAD_DATA);
            assert_eq!(ANeuralNetworksExecution_getOutputOperandRank(run.0, 0, &mut rank), NO_ERROR);
            assert_eq!(
                ANeuralNetworksExecution_getOutputOperandDimensions(run.0, 0, dims.as_mut_ptr()),
                NO_ERROR
            );
            assert_eq!((rank, dims), (2, [2, 3]));
        }
    }
    assert_eq!((query("violations"), query("executions.run")), (0, 3));
}

#[test]
fn buffers_have_exactly_their_size() {
    let _one = alone();
    let net = linear(2, 8, 3, 0).compile();
    let run = net.execution();
    let x = bytes_of(&noise(3, 18));
    let mut y = vec![0u8; 32];
    for wrong in [0, 60, 68] {
        assert_eq!(run.input(&x[..wrong]), BAD_DATA);
    }
    for wrong in [0, 20, 28] {
        assert_eq!(run.output(&mut y[..wrong]), BAD_DATA);
    }
    // SAFETY: handles and buffers of these lengths; the address is never used.
    unsafe {
        let at = x.as_ptr().cast();
        for index in [-1, 1] {
            assert_eq!(ANeuralNetworksExecution_setInput(run.0, index, null(), at, 64), BAD_DATA);
        }
        for wrong in [
            (TENSOR_FLOAT16, &[2u32, 8][..], 0.0, 0),
            (TENSOR_FLOAT32, &[3, 8], 0.0, 0),
            (TENSOR_FLOAT32, &[16], 0.0, 0),
        ] {
            assert_eq!(ANeuralNetworksExecution_setInput(run.0, 0, &c_type(wrong), at, 64), BAD_DATA);
        }
        assert_eq!(ANeuralNetworksExecution_setInput(run.0, 0, &c_type(F32), at, 64), NO_ERROR);
        assert_eq!(ANeuralNetworksExecution_enableInputAndOutputPadding(run.0, 1), BAD_STATE, "too late");
    }
    let padded = net.execution();
    // SAFETY: a handle.
    assert_eq!(unsafe { ANeuralNetworksExecution_enableInputAndOutputPadding(padded.0, 1) }, NO_ERROR);
    assert_eq!(padded.input(&x[..60]), BAD_DATA);
    assert_eq!(padded.input(&x[..72]), NO_ERROR);
    assert_eq!(padded.output(&mut y), NO_ERROR);
    assert_eq!(padded.compute(), NO_ERROR);
    assert!(y[24..].iter().all(|b| *b == 0), "the padding of an output is not written");
    assert_eq!(query("violations"), 0);
}

#[test]
fn open_dimensions_are_known_when_it_runs() {
    let _one = alone();
    let mut net = Net::new();
    let x = net.operand((TENSOR_FLOAT32, &[0, 8], 0.0, 0));
    let w = net.constant((TENSOR_FLOAT32, &[3, 8], 0.0, 0), bytes_of(&noise(1, 24)));
    let b = net.constant((TENSOR_FLOAT32, &[3], 0.0, 0), bytes_of(&noise(2, 3)));
    let f = net.number(0);
    let y = net.operand((TENSOR_FLOAT32, &[0, 3], 0.0, 0));
    assert_eq!(net.operation(FULLY_CONNECTED, &[x, w, b, f], &[y]), NO_ERROR);
    assert_eq!(net.io(&[x], &[y]), NO_ERROR);
    let net = net.compile();
    let input = bytes_of(&noise(3, 4 * 8));
    for (room, code) in [(4 * 3 * 4 - 4, OUTPUT_INSUFFICIENT_SIZE), (4 * 3 * 4, NO_ERROR), (400, NO_ERROR)] {
        let run = net.execution();
        let mut out = vec![0u8; room];
        assert_eq!(run.input(&input), BAD_DATA, "its dimensions are open");
        let (at, given) = (input.as_ptr().cast(), c_type((TENSOR_FLOAT32, &[4, 8], 0.0, 0)));
        // SAFETY: a buffer of this length, and places.
        unsafe {
            assert_eq!(ANeuralNetworksExecution_setInput(run.0, 0, &given, at, input.len()), NO_ERROR);
            assert_eq!(run.output(&mut out), NO_ERROR);
            assert_eq!(run.compute(), code);
            let mut dims = [0u32; 2];
            assert_eq!(
                ANeuralNetworksExecution_getOutputOperandDimensions(run.0, 0, dims.as_mut_ptr()),
                code
            );
            assert!(code != NO_ERROR || dims == [4, 3]);
        }
    }
    assert_eq!(query("violations"), 0);
}

#[test]
fn operands_are_checked_when_they_are_added_and_set() {
    let _one = alone();
    let mut net = Net::new();
    for wrong in [
        (99, &[2u32][..], 0.0, 0),
        (TENSOR_FLOAT32, &[2], 1.0, 0),
        (TENSOR_QUANT8_ASYMM, &[2], 0.0, 0),
        (TENSOR_QUANT8_ASYMM, &[2], 0.1, 300),
        (TENSOR_QUANT8_ASYMM_SIGNED, &[2], -0.1, 0),
        (INT32, &[1], 0.0, 0),
        (TENSOR_FLOAT32, &[1 << 20, 1 << 20], 0.0, 0),
    ] {
        assert_eq!(net.try_operand(wrong), BAD_DATA, "{wrong:?}");
    }
    let w = net.operand((TENSOR_FLOAT32, &[2, 8], 0.0, 0));
    let open = net.operand((TENSOR_FLOAT32, &[0, 8], 0.0, 0));
    let c = net.operand((TENSOR_QUANT8_SYMM_PER_CHANNEL, &[2, 1, 1, 8], 0.0, 0));
    assert_eq!(net.try_value(w, vec![0; 60]), BAD_DATA);
    assert_eq!(net.try_value(w, vec![0; 68]), BAD_DATA);
    assert_eq!(net.try_value(open, vec![0; 32]), BAD_DATA);
    assert_eq!(net.try_value(7, vec![0; 4]), BAD_DATA);
    assert_eq!(net.channels(w, 0, &[1.0, 1.0]), BAD_DATA);
    assert_eq!(net.channels(c, 0, &[1.0]), BAD_DATA);
    assert_eq!(net.channels(c, 4, &[1.0, 1.0]), BAD_DATA);
    assert_eq!(net.channels(c, 0, &[1.0, 0.0]), BAD_DATA);
    assert_eq!(net.channels(c, 0, &[1.0, f32::NAN]), BAD_DATA);
    assert_eq!(net.channels(c, 0, &[1.0, 2.0]), NO_ERROR);
    assert_eq!(query("violations"), 0);
}

/// A fully connected operation of these types; the code of adding it.
fn added(x: Type, w: Type, b: Type, y: Type) -> i32 {
    let mut net = Net::new();
    let list = [net.operand(x), net.operand(w), net.operand(b), net.number(0), net.operand(y)];
    net.operation(FULLY_CONNECTED, &list[..4], &list[4..])
}

#[test]
fn an_operation_is_checked_when_it_is_added() {
    let _one = alone();
    let (q, s) = (TENSOR_QUANT8_ASYMM, TENSOR_QUANT8_ASYMM_SIGNED);
    let x: Type = (q, &[2, 8], 0.5, 3);
    let w: Type = (q, &[4, 8], 0.25, 3);
    let b: Type = (TENSOR_INT32, &[4], 0.125, 0);
    let y: Type = (q, &[2, 4], 1.0, 3);
    assert_eq!(added(x, w, b, y), NO_ERROR);
    for (what, code) in [
        ("bias scale", added(x, w, (TENSOR_INT32, &[4], 0.126, 0), y)),
        ("bias type", added(x, w, (TENSOR_FLOAT32, &[4], 0.0, 0), y)),
        ("bias rank", added(x, w, (TENSOR_INT32, &[1, 4], 0.125, 0), y)),
        ("weight sign", added(x, (s, &[4, 8], 0.25, 3), b, y)),
        ("weights per channel", added(x, (TENSOR_QUANT8_SYMM_PER_CHANNEL, &[4, 8], 0.0, 0), b, y)),
        ("weight rank", added(x, (q, &[4, 8, 1], 0.25, 3), b, y)),
        ("output type", added(x, w, b, (TENSOR_FLOAT32, &[2, 4], 0.0, 0))),
        ("input rank", added((q, &[8], 0.5, 3), w, b, y)),
        ("integers", added((TENSOR_INT32, &[2, 8], 0.0, 0), (TENSOR_INT32, &[4, 8], 0.0, 0), b, y)),
    ] {
        assert_eq!(code, BAD_DATA, "{what}");
    }
    let mut net = linear(2, 8, 3, 0);
    assert_eq!(net.operation(FULLY_CONNECTED, &[0, 1, 2], &[4]), BAD_DATA, "one input too few");
    assert_eq!(net.operation(FULLY_CONNECTED, &[0, 1, 2, 3], &[]), BAD_DATA, "no output");
    assert_eq!(net.operation(FULLY_CONNECTED, &[0, 1, 2, 99], &[4]), BAD_DATA, "no such operand");
    assert_eq!(net.operation(4000, &[0], &[4]), BAD_DATA, "no such operation");
    assert_eq!(query("violations"), 0);
}

/// Does one thing wrong to a model and gives the code.
type Wrong = fn(&mut Net) -> i32;

#[test]
fn a_model_is_checked_as_a_whole() {
    let _one = alone();
    let cases: [(&str, Wrong); 11] = [
        ("no inputs", |net| net.io(&[], &[4])),
        ("no outputs", |net| net.io(&[0], &[])),
        ("an input twice", |net| net.io(&[0, 0], &[4])),
        ("input and output", |net| net.io(&[0], &[0])),
        ("a constant as input", |net| net.io(&[1], &[4])),
        ("no such operand", |net| net.io(&[99], &[4])),
        ("a missing argument", |net| {
            // SAFETY: a handle; NULL and no bytes say that the operand is left out.
            assert_eq!(unsafe { ANeuralNetworksModel_setOperandValue(net.model, 2, null(), 0) }, NO_ERROR);
            net.finish()
        }),
        ("an unused operand", |net| {
            net.operand(F32);
            net.finish()
        }),
        ("an unused input", |net| {
            let more = net.operand(F32);
            assert_eq!(net.io(&[0, more], &[4]), NO_ERROR);
            net.finish()
        }),
        ("an operand with two sources", |net| {
            assert_eq!(net.operation(FULLY_CONNECTED, &[0, 1, 2, 3], &[4]), NO_ERROR);
            net.finish()
        }),
        ("a circle", |net| {
            let a = net.operand(F32);
            let b = net.operand(F32);
            assert_eq!(net.operation(LOGISTIC, &[a], &[b]), NO_ERROR);
            assert_eq!(net.operation(LOGISTIC, &[b], &[a]), NO_ERROR);
            net.finish()
        }),
    ];
    for (what, case) in cases {
        let mut net = linear(2, 8, 3, 0);
        assert_eq!(case(&mut net), BAD_DATA, "{what}");
    }
    for fuse in [-1, 4] {
        assert_eq!(linear(2, 8, 3, fuse).finish(), BAD_DATA, "fuse {fuse}");
    }
    let mut net = Net::new();
    let x = net.operand((TENSOR_FLOAT32, &[2, 9], 0.0, 0));
    let w = net.constant((TENSOR_FLOAT32, &[1, 8], 0.0, 0), vec![0; 32]);
    let b = net.constant((TENSOR_FLOAT32, &[1], 0.0, 0), vec![0; 4]);
    let f = net.number(0);
    let y = net.operand((TENSOR_FLOAT32, &[2, 1], 0.0, 0));
    assert_eq!(net.operation(FULLY_CONNECTED, &[x, w, b, f], &[y]), NO_ERROR);
    assert_eq!(net.io(&[x], &[y]), NO_ERROR);
    assert_eq!(net.finish(), BAD_DATA, "the input is wider than the weights");
    assert_eq!(net.finish(), BAD_STATE, "what failed once is not tried again");
    let mut slot = null_mut();
    // SAFETY: a slot.
    assert_eq!(unsafe { ANeuralNetworksCompilation_create(net.model, &mut slot) }, BAD_STATE);
    assert_eq!(query("violations"), 0);
}

#[test]
fn a_convolution_is_checked() {
    let _one = alone();
    // Padding, strides and fuse code; the dimension of the scales; the bias' scale.
    let conv = |list: [i32; 7], dimension: u32, bias: f32| {
        let mut net = Net::new();
        let x = net.operand((TENSOR_QUANT8_ASYMM, &[1, 2, 1, 4], 0.5, 0));
        let w = net.constant((TENSOR_QUANT8_SYMM_PER_CHANNEL, &[4, 1, 1, 4], 0.0, 0), vec![1; 16]);
        assert_eq!(net.channels(w, dimension, &[1.0; 4]), NO_ERROR);
        let b = net.constant((TENSOR_INT32, &[4], bias, 0), vec![0; 16]);
        let arguments: Vec<u32> = list.iter().map(|v| net.number(*v)).collect();
        let y = net.operand((TENSOR_QUANT8_ASYMM, &[1, 2, 1, 4], 1.0, 0));
        let rc = net.operation(CONV_2D, &[&[x, w, b], arguments.as_slice()].concat(), &[y]);
        if rc != NO_ERROR {
            return rc;
        }
        assert_eq!(net.io(&[x], &[y]), NO_ERROR);
        net.finish()
    };
    let plain = [0, 0, 0, 0, 1, 1, 0];
    assert_eq!(conv(plain, 0, 0.0), NO_ERROR);
    assert_eq!(conv(plain, 3, 0.0), BAD_DATA, "scales along the depth");
    assert_eq!(conv(plain, 0, 0.5), BAD_DATA, "a bias scale next to scales per channel");
    for wrong in [[-1, 0, 0, 0, 1, 1, 0], [0, 0, 0, 0, 0, 1, 0], [0, 0, 0, 0, 1, 1, 9], [0, 0, 5, 0, 1, 1, 0]]
    {
        assert_eq!(conv(wrong, 0, 0.0), BAD_DATA, "{wrong:?}");
    }
    let mut net = Net::new();
    let x = net.operand((TENSOR_QUANT8_ASYMM, &[1, 2, 1, 4], 0.5, 0));
    let w = net.constant((TENSOR_QUANT8_SYMM_PER_CHANNEL, &[4, 1, 1, 4], 0.0, 0), vec![1; 16]);
    let b = net.constant((TENSOR_INT32, &[4], 0.0, 0), vec![0; 16]);
    let arguments: Vec<u32> = plain.iter().map(|v| net.number(*v)).collect();
    let y = net.operand((TENSOR_QUANT8_ASYMM, &[1, 2, 1, 4], 1.0, 0));
    assert_eq!(net.operation(CONV_2D, &[&[x, w, b], arguments.as_slice()].concat(), &[y]), NO_ERROR);
    assert_eq!(net.io(&[x], &[y]), NO_ERROR);
    assert_eq!(net.finish(), BAD_DATA, "the scales were never set");
    assert_eq!(query("violations"), 0);
}
