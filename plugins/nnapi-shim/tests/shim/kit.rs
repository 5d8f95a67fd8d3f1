//! A client that does everything right, so that tests can do one thing wrong.

use std::ffi::{CString, c_void};
use std::ptr::{null, null_mut};
use std::sync::{Mutex, MutexGuard, PoisonError};

use half::f16;
use neuropil_nnapi_shim::c::{compilation::*, device::*, execution::*, model::*};
use neuropil_nnapi_shim::codes::*;
use neuropil_nnapi_shim::control::{neuropil_nnapi_shim_control, neuropil_nnapi_shim_query};

static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// The world for one test alone, fresh.
pub fn alone() -> MutexGuard<'static, ()> {
    let guard = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    control("reset", "");
    guard
}

pub fn control(key: &str, value: &str) {
    let (k, v) = (CString::new(key).unwrap(), CString::new(value).unwrap());
    // SAFETY: both texts end.
    let rc = unsafe { neuropil_nnapi_shim_control(k.as_ptr(), v.as_ptr()) };
    assert_eq!(rc, 0, "{key} {value}");
}

pub fn query(key: &str) -> i64 {
    let key = CString::new(key).unwrap();
    // SAFETY: the text ends.
    unsafe { neuropil_nnapi_shim_query(key.as_ptr()) }
}

/// A type: code, dimensions, scale, zero point.
pub type Type<'a> = (i32, &'a [u32], f32, i32);

pub fn c_type(t: Type) -> OperandType {
    let dimensions = if t.1.is_empty() { null() } else { t.1.as_ptr() };
    OperandType { kind: t.0, dimension_count: t.1.len() as u32, dimensions, scale: t.2, zero_point: t.3 }
}

/// A model with the values it borrows, freed in order.
pub struct Net {
    pub model: *mut c_void,
    pub compilation: *mut c_void,
    pub values: Vec<Vec<u8>>,
    next: u32,
}

impl Net {
    pub fn new() -> Net {
        let mut model = null_mut();
        // SAFETY: a slot.
        assert_eq!(unsafe { ANeuralNetworksModel_create(&mut model) }, NO_ERROR);
        Net { model, compilation: null_mut(), values: Vec::new(), next: 0 }
    }

    pub fn try_operand(&mut self, t: Type) -> i32 {
        // SAFETY: a type.
        unsafe { ANeuralNetworksModel_addOperand(self.model, &c_type(t)) }
    }

    pub fn operand(&mut self, t: Type) -> u32 {
        assert_eq!(self.try_operand(t), NO_ERROR, "{t:?}");
        self.next += 1;
        self.next - 1
    }

    pub fn try_value(&mut self, index: u32, bytes: Vec<u8>) -> i32 {
        self.values.push(bytes);
        let bytes = self.values.last().unwrap();
        // SAFETY: the bytes live as long as the model.
        unsafe {
            ANeuralNetworksModel_setOperandValue(self.model, index as i32, bytes.as_ptr().cast(), bytes.len())
        }
    }

    pub fn constant(&mut self, t: Type, bytes: Vec<u8>) -> u32 {
        let index = self.operand(t);
        assert_eq!(self.try_value(index, bytes), NO_ERROR, "{t:?}");
        index
    }

    pub fn number(&mut self, value: i32) -> u32 {
        self.constant((INT32, &[], 0.0, 0), value.to_le_bytes().into())
    }

    pub fn channels(&mut self, index: u32, dimension: u32, scales: &[f32]) -> i32 {
        let c = ChannelScales { dimension, count: scales.len() as u32, scales: scales.as_ptr() };
        // SAFETY: scales.
        unsafe { ANeuralNetworksModel_setOperandSymmPerChannelQuantParams(self.model, index as i32, &c) }
    }

    pub fn operation(&mut self, kind: i32, inputs: &[u32], outputs: &[u32]) -> i32 {
        let (n, m) = (inputs.len() as u32, outputs.len() as u32);
        // SAFETY: lists.
        unsafe {
            ANeuralNetworksModel_addOperation(self.model, kind, n, inputs.as_ptr(), m, outputs.as_ptr())
        }
    }

    pub fn io(&mut self, inputs: &[u32], outputs: &[u32]) -> i32 {
        let (n, m) = (inputs.len() as u32, outputs.len() as u32);
        // SAFETY: lists.
        unsafe {
            ANeuralNetworksModel_identifyInputsAndOutputs(self.model, n, inputs.as_ptr(), m, outputs.as_ptr())
        }
    }

    pub fn relax(&mut self) {
        // SAFETY: a handle.
        assert_eq!(unsafe { ANeuralNetworksModel_relaxComputationFloat32toFloat16(self.model, 1) }, NO_ERROR);
    }

    pub fn finish(&mut self) -> i32 {
        // SAFETY: a handle.
        unsafe { ANeuralNetworksModel_finish(self.model) }
    }

    /// A compilation for the first device, not finished.
    pub fn open_compilation(&mut self) -> *mut c_void {
        let device = device(0);
        // SAFETY: a list of one, and a slot.
        let rc = unsafe {
            ANeuralNetworksCompilation_createForDevices(
                self.model,
                &device.cast_const(),
                1,
                &mut self.compilation,
            )
        };
        assert_eq!(rc, NO_ERROR);
        self.compilation
    }

    pub fn try_compile(&mut self) -> i32 {
        let compilation = self.open_compilation();
        // SAFETY: a handle.
        unsafe { ANeuralNetworksCompilation_finish(compilation) }
    }

    pub fn compile(mut self) -> Net {
        assert_eq!(self.finish(), NO_ERROR);
        assert_eq!(self.try_compile(), NO_ERROR);
        self
    }

    pub fn execution(&self) -> Run {
        let mut execution = null_mut();
        // SAFETY: a slot.
        assert_eq!(unsafe { ANeuralNetworksExecution_create(self.compilation, &mut execution) }, NO_ERROR);
        Run(execution)
    }

    /// One run with one input and one output.
    pub fn run(&self, input: &[u8], out: usize) -> (i32, Vec<u8>) {
        let (run, mut output) = (self.execution(), vec![0xAA; out]);
        assert_eq!(run.input(input), NO_ERROR);
        assert_eq!(run.output(&mut output), NO_ERROR);
        (run.compute(), output)
    }
}

impl Drop for Net {
    fn drop(&mut self) {
        // SAFETY: handles, or NULL.
        unsafe {
            ANeuralNetworksCompilation_free(self.compilation);
            ANeuralNetworksModel_free(self.model);
        }
    }
}

/// An execution.
pub struct Run(pub *mut c_void);

impl Run {
    pub fn input(&self, bytes: &[u8]) -> i32 {
        // SAFETY: bytes of this length.
        unsafe { ANeuralNetworksExecution_setInput(self.0, 0, null(), bytes.as_ptr().cast(), bytes.len()) }
    }

    pub fn output(&self, bytes: &mut [u8]) -> i32 {
        // SAFETY: bytes of this length.
        unsafe {
            ANeuralNetworksExecution_setOutput(self.0, 0, null(), bytes.as_mut_ptr().cast(), bytes.len())
        }
    }

    pub fn compute(&self) -> i32 {
        // SAFETY: a handle.
        unsafe { ANeuralNetworksExecution_compute(self.0) }
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        // SAFETY: a handle.
        unsafe { ANeuralNetworksExecution_free(self.0) };
    }
}

pub fn device(index: u32) -> *mut c_void {
    let mut device = null_mut();
    // SAFETY: a slot.
    assert_eq!(unsafe { ANeuralNetworks_getDevice(index, &mut device) }, NO_ERROR);
    device
}

pub fn bytes_of(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}

pub fn halves_of(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|v| f16::from_f32(*v).to_le_bytes()).collect()
}

pub fn words_of(values: &[i32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}

pub fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
}

pub fn halves(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks::<2>().0.iter().map(|b| f16::from_le_bytes(*b).to_f32()).collect()
}

/// Numbers that look random, the same each time.
pub fn noise(seed: u32, n: usize) -> Vec<f32> {
    let mut state = u64::from(seed) * 2 + 1;
    let mut next = || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..n).map(|_| next()).collect()
}

/// `y = fuse(x w + b)` in F32: `m` rows, `k` wide, `n` outputs; a model ready to finish.
pub fn linear(m: u32, k: u32, n: u32, fuse: i32) -> Net {
    let mut net = Net::new();
    let x = net.operand((TENSOR_FLOAT32, &[m, k], 0.0, 0));
    let w = net.constant((TENSOR_FLOAT32, &[n, k], 0.0, 0), bytes_of(&noise(1, (n * k) as usize)));
    let b = net.constant((TENSOR_FLOAT32, &[n], 0.0, 0), bytes_of(&noise(2, n as usize)));
    let f = net.number(fuse);
    let y = net.operand((TENSOR_FLOAT32, &[m, n], 0.0, 0));
    assert_eq!(net.operation(FULLY_CONNECTED, &[x, w, b, f], &[y]), NO_ERROR);
    assert_eq!(net.io(&[x], &[y]), NO_ERROR);
    net
}
