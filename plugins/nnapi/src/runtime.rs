//! NNAPI with owners and lengths: what is made is freed, after everything that was made of it.
//!
//! NNAPI frees nothing that is still used, and does not say so either: a model must outlive its compilations, these
//! their bursts and executions, and memory all of them. So each object here holds those that it needs.

use std::ffi::{CStr, CString, c_char};
use std::ptr;
use std::sync::Arc;

use neuropil_plugin_sdk::Error;

use crate::codes::{Operation, TOKEN_BYTES, Type, check};
use crate::library::{ChannelScales, Opaque, OperandType, Runtime};
use crate::memory::{DriverMemory, Place};

/// An object of NNAPI, freed when it is dropped.
pub(crate) struct Owned {
    object: Opaque,
    runtime: Arc<Runtime>,
    free: unsafe extern "C" fn(Opaque),
}

// SAFETY: NNAPI ties no object to a thread.
unsafe impl Send for Owned {}
// SAFETY: through a shared reference only functions are called that NNAPI allows at once: those that use a finished model
// or compilation. What changes an object takes it mutably.
unsafe impl Sync for Owned {}

impl Owned {
    /// Runs `make`, which writes a new object to its argument.
    pub fn new(
        runtime: &Arc<Runtime>,
        what: &str,
        free: unsafe extern "C" fn(Opaque),
        make: impl FnOnce(*mut Opaque) -> i32,
    ) -> Result<Owned, Error> {
        let mut object = ptr::null_mut();
        check(make(&mut object), what)?;
        if object.is_null() {
            return Err(Error::internal(format!("NNAPI gave nothing when asked to {what}")));
        }
        Ok(Owned { object, runtime: runtime.clone(), free })
    }

    pub fn object(&self) -> Opaque {
        self.object
    }
}

impl Drop for Owned {
    fn drop(&mut self) {
        // SAFETY: the object was made by the runtime, is freed by its own function, and once.
        unsafe { (self.free)(self.object) }
    }
}

/// A device. NNAPI keeps it for as long as the process lives.
#[derive(Clone, Debug)]
pub(crate) struct Device {
    handle: Opaque,
    pub name: String,
    /// The version of its driver.
    pub version: String,
    /// One of `DEVICE_*`, or another number.
    pub kind: i32,
    /// The feature level of its driver.
    pub level: i64,
}

// SAFETY: a device is only named by its handle, and never changed.
unsafe impl Send for Device {}
// SAFETY: as above.
unsafe impl Sync for Device {}

/// The devices that there are.
pub(crate) fn devices(runtime: &Runtime) -> Result<Vec<Device>, Error> {
    let functions = &runtime.functions;
    let mut count = 0;
    // SAFETY: the function writes a number.
    check(unsafe { (functions.device_count)(&mut count) }, "count its devices")?;
    let mut devices = Vec::new();
    for index in 0..count {
        let what = "describe a device";
        let (mut handle, mut kind, mut level) = (ptr::null_mut(), 0, 0);
        // SAFETY: each function writes what its argument is for.
        unsafe {
            check((functions.device)(index, &mut handle), what)?;
            if handle.is_null() {
                return Err(Error::internal(format!("NNAPI has no device {index} of {count}")));
            }
            check((functions.device_type)(handle, &mut kind), what)?;
            check((functions.device_level)(handle, &mut level), what)?;
        }
        let (name, version) = (text(handle, functions.device_name)?, text(handle, functions.device_version)?);
        devices.push(Device { handle, name, version, kind, level });
    }
    Ok(devices)
}

/// Waits until a device that was lost is there again, if NNAPI offers that.
pub(crate) fn wait_for(runtime: &Runtime, device: &Device) -> Result<(), Error> {
    let Some(wait) = runtime.functions.device_wait else { return Ok(()) };
    // SAFETY: the handle is that of a device.
    check(unsafe { wait(device.handle) }, "wait for the device")
}

/// A text of a device.
fn text(
    device: Opaque,
    ask: unsafe extern "C" fn(Opaque, *mut *const c_char) -> i32,
) -> Result<String, Error> {
    let mut text = ptr::null();
    // SAFETY: the function writes a pointer to a text that lives as long as the device.
    unsafe {
        check(ask(device, &mut text), "describe a device")?;
        if text.is_null() {
            return Ok(String::new());
        }
        Ok(CStr::from_ptr(text).to_string_lossy().into_owned())
    }
}

/// The number of an operand in its model.
#[derive(Clone, Copy)]
pub(crate) struct Operand(u32);

/// A graph. It is built by one thread, and does not change after `finish`.
pub(crate) struct Model {
    model: Owned,
    operands: u32,
    operations: usize,
    /// Constants lie in them. After the model, so that they are freed later.
    memories: Vec<Arc<DriverMemory>>,
}

impl Model {
    /// An empty graph.
    pub fn new(runtime: &Arc<Runtime>) -> Result<Model, Error> {
        let functions = &runtime.functions;
        // SAFETY: the function writes a new model.
        let model = Owned::new(runtime, "make a graph", functions.model_free, |model| unsafe {
            (functions.model_create)(model)
        })?;
        Ok(Model { model, operands: 0, operations: 0, memories: Vec::new() })
    }

    /// A tensor, or a scalar when there are no dimensions. `scale` and `zero` are 0 for types without.
    pub fn operand(
        &mut self,
        kind: Type,
        dimensions: &[u32],
        scale: f32,
        zero: i32,
    ) -> Result<Operand, Error> {
        let dimension_count = dimensions.len() as u32;
        let dimensions = if dimensions.is_empty() { ptr::null() } else { dimensions.as_ptr() };
        let kind = kind as i32;
        let operand = OperandType { kind, dimension_count, dimensions, scale, zero_point: zero };
        // SAFETY: the function copies the type with its dimensions.
        let result = unsafe { (self.model.runtime.functions.add_operand)(self.model.object, &operand) };
        check(result, "add an operand")?;
        self.operands += 1;
        Ok(Operand(self.operands - 1))
    }

    /// A constant number.
    pub fn number(&mut self, value: i32) -> Result<Operand, Error> {
        let operand = self.operand(Type::Int32, &[], 0.0, 0)?;
        let index = operand.0 as i32;
        // SAFETY: values as short as this are copied.
        let result = unsafe {
            let set = self.model.runtime.functions.set_value;
            set(self.model.object, index, (&raw const value).cast(), size_of_val(&value))
        };
        check(result, "set a number")?;
        Ok(operand)
    }

    /// Gives an operand the bytes of a place, which must not change any more.
    pub fn set_constant(&mut self, operand: Operand, place: &Place) -> Result<(), Error> {
        let (offset, bytes) = place.range();
        let (index, memory) = (operand.0 as i32, place.memory.object());
        // SAFETY: the place lies in the memory, which the model holds from here on.
        let result = unsafe {
            let set = self.model.runtime.functions.set_value_from_memory;
            set(self.model.object, index, memory, offset, bytes)
        };
        self.memories.push(place.memory.clone());
        check(result, "set a constant")
    }

    /// Gives an operand a scale for each index of its first dimension.
    pub fn set_channel_scales(&mut self, operand: Operand, scales: &[f32]) -> Result<(), Error> {
        let scales = ChannelScales { dimension: 0, count: scales.len() as u32, scales: scales.as_ptr() };
        // SAFETY: the function copies the scales.
        let result = unsafe {
            (self.model.runtime.functions.set_channel_scales)(self.model.object, operand.0 as i32, &scales)
        };
        check(result, "set the scales of channels")
    }

    /// Adds an operation of one output.
    pub fn operation(&mut self, what: Operation, inputs: &[Operand], output: Operand) -> Result<(), Error> {
        let inputs: Vec<u32> = inputs.iter().map(|input| input.0).collect();
        // SAFETY: the function copies the lists, which have as many numbers.
        let result = unsafe {
            let add = self.model.runtime.functions.add_operation;
            add(self.model.object, what as i32, inputs.len() as u32, inputs.as_ptr(), 1, &output.0)
        };
        self.operations += 1;
        check(result, "add an operation")
    }

    /// Ends the graph, which has one input and one output. `relaxed`: F32 may be computed as F16.
    pub fn finish(&mut self, input: Operand, output: Operand, relaxed: bool) -> Result<(), Error> {
        let functions = &self.model.runtime.functions;
        // SAFETY: the functions copy what they are given.
        unsafe {
            let result = (functions.set_inputs_and_outputs)(self.model.object, 1, &input.0, 1, &output.0);
            check(result, "name input and output")?;
            if relaxed {
                check((functions.set_relaxed)(self.model.object, true), "relax the arithmetic")?;
            }
            check((functions.model_finish)(self.model.object), "finish the graph")
        }
    }

    /// Whether the device takes every operation of a finished graph.
    pub fn runs_on(&self, device: &Device) -> Result<bool, Error> {
        let mut answers = vec![0u8; self.operations];
        // SAFETY: the list has one device, and the answers have room for one byte per operation.
        let result = unsafe {
            let ask = self.model.runtime.functions.supported;
            ask(self.model.object, &device.handle, 1, answers.as_mut_ptr())
        };
        check(result, "ask the driver")?;
        Ok(answers.iter().all(|answer| *answer != 0))
    }
}

/// Where a compiled graph may be kept for the next time.
pub(crate) struct Cache {
    pub folder: CString,
    /// Equal for equal graphs only.
    pub token: [u8; TOKEN_BYTES],
}

/// A graph that a driver has compiled.
pub(crate) struct Compilation {
    compilation: Owned,
    /// After the compilation, so that it is freed later.
    _model: Model,
}

impl Compilation {
    /// Compiles a finished graph for a device.
    pub fn new(
        model: Model,
        device: &Device,
        preference: i32,
        cache: Option<&Cache>,
    ) -> Result<Arc<Compilation>, Error> {
        let runtime = model.model.runtime.clone();
        let functions = &runtime.functions;
        // SAFETY: the list has one device; the function writes a new compilation.
        let compilation =
            Owned::new(&runtime, "begin to compile", functions.compilation_free, |compilation| unsafe {
                (functions.compilation_create)(model.model.object, &device.handle, 1, compilation)
            })?;
        // SAFETY: the functions copy what they are given; the token has the length that NNAPI wants.
        unsafe {
            let object = compilation.object;
            check((functions.set_preference)(object, preference), "set a preference")?;
            if let Some(cache) = cache {
                let result = (functions.set_caching)(object, cache.folder.as_ptr(), cache.token.as_ptr());
                check(result, "use the cache")?;
            }
            check((functions.compilation_finish)(object), "compile the graph")?;
        }
        Ok(Arc::new(Compilation { compilation, _model: model }))
    }
}

/// What keeps the driver ready for executions of one compiled graph, one at a time.
pub(crate) struct Burst {
    burst: Owned,
    /// After the burst, so that it is freed later.
    _compilation: Arc<Compilation>,
}

impl Burst {
    pub fn new(compilation: &Arc<Compilation>) -> Result<Burst, Error> {
        let runtime = &compilation.compilation.runtime;
        let functions = &runtime.functions;
        // SAFETY: the function writes a new burst.
        let burst = Owned::new(runtime, "begin a burst", functions.burst_free, |burst| unsafe {
            (functions.burst_create)(compilation.compilation.object, burst)
        })?;
        Ok(Burst { burst, _compilation: compilation.clone() })
    }
}

/// One run of a graph over given memory; or many, when it is reusable.
pub(crate) struct Execution {
    execution: Owned,
    /// After the execution, so that they are freed later.
    _compilation: Arc<Compilation>,
    _memories: [Arc<DriverMemory>; 2],
}

impl Execution {
    /// `timeout` in nanoseconds is a hint to the driver. Drivers and runtimes before feature level 30 take none.
    pub fn new(
        compilation: &Arc<Compilation>,
        x: &Place,
        y: &Place,
        timeout: Option<u64>,
        reusable: bool,
    ) -> Result<Execution, Error> {
        let runtime = &compilation.compilation.runtime;
        let functions = &runtime.functions;
        // SAFETY: the function writes a new execution.
        let execution = Owned::new(runtime, "prepare a run", functions.execution_free, |execution| unsafe {
            (functions.execution_create)(compilation.compilation.object, execution)
        })?;
        let object = execution.object;
        let ((x_offset, x_bytes), (y_offset, y_bytes)) = (x.range(), y.range());
        // SAFETY: the places lie in their memories, which the execution holds; without a type the lengths must be those
        // of the graph, which NNAPI checks.
        unsafe {
            if let Some(set_reusable) = functions.set_reusable.filter(|_| reusable) {
                check(set_reusable(object, true), "prepare many runs")?;
            }
            if let (Some(set_timeout), Some(timeout)) = (functions.set_timeout, timeout) {
                check(set_timeout(object, timeout), "set a deadline")?;
            }
            let result = (functions.set_input)(object, 0, ptr::null(), x.memory.object(), x_offset, x_bytes);
            check(result, "take the input")?;
            let result = (functions.set_output)(object, 0, ptr::null(), y.memory.object(), y_offset, y_bytes);
            check(result, "take the output")?;
        }
        let memories = [x.memory.clone(), y.memory.clone()];
        Ok(Execution { execution, _compilation: compilation.clone(), _memories: memories })
    }

    /// Runs the graph. When this returns, however it does, the driver is done with the memory.
    pub fn run(&mut self, burst: &mut Burst) -> Result<(), Error> {
        // SAFETY: both are of one compilation, and borrowed by nobody else.
        let result = unsafe {
            let compute = self.execution.runtime.functions.burst_compute;
            compute(self.execution.object, burst.burst.object)
        };
        check(result, "run the graph")
    }
}
