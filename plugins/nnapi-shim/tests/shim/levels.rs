//! Devices, what each can do, and old libraries.

use std::ffi::{CStr, c_char};
use std::path::PathBuf;
use std::ptr::null;

use libloading::Library;
use neuropil_nnapi_shim::c::device::*;
use neuropil_nnapi_shim::codes::*;
use neuropil_nnapi_shim::symbols::{FUNCTIONS, old_library};

use crate::kit::*;

/// Which operations of a finished model a device can do.
fn supported(net: &Net, index: u32) -> Vec<u8> {
    let mut yes = vec![9u8; 2];
    // SAFETY: a list of one, and room for two operations.
    let rc = unsafe {
        ANeuralNetworksModel_getSupportedOperationsForDevices(
            net.model,
            &device(index).cast_const(),
            1,
            yes.as_mut_ptr(),
        )
    };
    assert_eq!(rc, NO_ERROR);
    yes.retain(|y| *y < 2);
    yes
}

#[test]
fn devices_tell_who_they_are() {
    let _one = alone();
    control("devices", "a-npu:accelerator:30:7.1,b-cpu:cpu:31");
    let mut seen = Vec::new();
    let mut count = 0;
    // SAFETY: places for the answers.
    unsafe {
        assert_eq!(ANeuralNetworks_getDeviceCount(&mut count), NO_ERROR);
        for index in 0..count {
            let d = device(index);
            assert_eq!(d, device(index), "the same each time");
            let (mut name, mut version, mut kind, mut level) = (null(), null(), 0, 0);
            assert_eq!(ANeuralNetworksDevice_getName(d, &mut name), NO_ERROR);
            assert_eq!(ANeuralNetworksDevice_getVersion(d, &mut version), NO_ERROR);
            assert_eq!(ANeuralNetworksDevice_getType(d, &mut kind), NO_ERROR);
            assert_eq!(ANeuralNetworksDevice_getFeatureLevel(d, &mut level), NO_ERROR);
            let text = |t: *const c_char| CStr::from_ptr(t).to_str().unwrap();
            seen.push((text(name), text(version), kind, level));
        }
        let mut none = device(0);
        assert_eq!(ANeuralNetworks_getDevice(2, &mut none), BAD_DATA);
        assert!(none.is_null());
    }
    assert_eq!(seen, [("a-npu", "7.1", 4, 30), ("b-cpu", "1.0", 2, 31)]);
    assert_eq!(ANeuralNetworks_getRuntimeFeatureLevel(), 31);
    control("devices", "");
    // SAFETY: a place.
    assert_eq!(unsafe { ANeuralNetworks_getDeviceCount(&mut count) }, NO_ERROR);
    assert_eq!((count, query("violations")), (0, 0));
}

/// A product of quantised tensors, finished.
fn bytes_product(kind: i32) -> Net {
    let mut net = Net::new();
    let x = net.operand((kind, &[2, 8], 0.5, 0));
    let w = net.constant((kind, &[4, 8], 0.25, 0), vec![0; 32]);
    let b = net.constant((TENSOR_INT32, &[4], 0.125, 0), vec![0; 16]);
    let f = net.number(0);
    let y = net.operand((kind, &[2, 4], 1.0, 0));
    assert_eq!(net.operation(FULLY_CONNECTED, &[x, w, b, f], &[y]), NO_ERROR);
    assert_eq!(net.io(&[x], &[y]), NO_ERROR);
    assert_eq!(net.finish(), NO_ERROR);
    net
}

#[test]
fn each_device_says_what_it_can_do() {
    let _one = alone();
    control("devices", "new:accelerator:31,gpu:gpu:31,old:accelerator:29");
    let mut floats = linear(2, 8, 3, 0);
    assert_eq!(floats.finish(), NO_ERROR);
    let signed = bytes_product(TENSOR_QUANT8_ASYMM_SIGNED);
    let unsigned = bytes_product(TENSOR_QUANT8_ASYMM);
    let of = |net: &Net| [0, 1, 2].map(|d| supported(net, d));
    assert_eq!(of(&floats), [[1], [1], [1]]);
    assert_eq!(of(&unsigned), [[1], [0], [1]], "the GPU knows floats only");
    assert_eq!(of(&signed), [[1], [0], [0]], "signed bytes came with level 30");
    control("unsupported", "new/FULLY_CONNECTED/QUANT8_ASYMM");
    assert_eq!(of(&unsigned), [[0], [0], [1]]);
    assert_eq!(of(&signed), [[1], [0], [0]]);
    control("unsupported", "*/FULLY_CONNECTED/*");
    assert_eq!(of(&floats), [[0], [0], [0]]);
    assert_eq!(floats.try_compile(), BAD_DATA);
    control("unsupported", "off");
    assert_eq!(of(&floats), [[1], [1], [1]]);
}

#[test]
fn an_old_runtime_knows_less() {
    let _one = alone();
    control("runtime_level", "29");
    let mut net = Net::new();
    let t: Type = (TENSOR_QUANT8_ASYMM_SIGNED, &[2, 4], 1.0 / 256.0, -128);
    let (x, y) = (net.operand(t), net.operand(t));
    assert_eq!(net.operation(LOGISTIC, &[x], &[y]), BAD_DATA);
    control("symbols_level", "30");
    assert_eq!(query("violations"), 0);
    ANeuralNetworks_getRuntimeFeatureLevel();
    assert_eq!(query("violations.too_new"), 1);
}

/// The shared library beside the test's program.
fn library() -> PathBuf {
    let program = std::env::current_exe().unwrap();
    let name = format!("{}neuropil_nnapi_shim{}", std::env::consts::DLL_PREFIX, std::env::consts::DLL_SUFFIX);
    program.parent().unwrap().join(name)
}

#[test]
fn the_library_has_every_symbol_and_an_old_one_lacks_the_newer() {
    let path = library();
    let copy = std::env::temp_dir().join(format!("nnapi-shim-old-{}.so", std::process::id()));
    for level in [27, 28, 29, 30, 31] {
        old_library(&path, &copy, level).unwrap();
        // SAFETY: the library's start runs no code of its own.
        let library = unsafe { Library::new(&copy) }.unwrap();
        for (name, since) in FUNCTIONS {
            let symbol = format!("ANeuralNetworks{name}");
            // SAFETY: the symbol is only looked for.
            let there = unsafe { library.get::<*const ()>(symbol.as_bytes()) }.is_ok();
            assert_eq!(there, *since <= level, "{symbol} at {level}");
        }
        for name in ["neuropil_nnapi_shim_control", "neuropil_nnapi_shim_query"] {
            // SAFETY: the symbol is only looked for.
            assert!(unsafe { library.get::<*const ()>(name.as_bytes()) }.is_ok());
        }
        drop(library);
        std::fs::remove_file(&copy).unwrap();
    }
}
