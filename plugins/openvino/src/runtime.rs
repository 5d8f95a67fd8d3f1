//! OpenVINO with owners and lengths: what is made is freed, and a tensor over memory has as many values as the memory.
//!
//! Objects of OpenVINO hold what they need of each other, so the order in which they are freed does not matter. Its core
//! may be used by many threads at once; an infer request by one at a time, hence the lock around it.

use std::ffi::{CStr, CString};
use std::ptr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use neuropil_plugin_sdk::{Deadline, Error};

use crate::library::{DeviceNames, ElementType, Opaque, Runtime, Shape};

/// `RESULT_NOT_READY` of `ov_status_e`.
const NOT_READY: i32 = -9;

/// An object of OpenVINO, freed when it is dropped.
struct Owned {
    object: Opaque,
    runtime: Arc<Runtime>,
    free: unsafe extern "C" fn(Opaque),
}

// SAFETY: OpenVINO ties no object to a thread.
unsafe impl Send for Owned {}
// SAFETY: through a shared reference only functions are called that OpenVINO allows at once: those of a core, and the
// making of requests of a compiled model. Requests are behind a lock.
unsafe impl Sync for Owned {}

impl Owned {
    /// Runs `make`, which writes a new object to its argument.
    fn new(
        runtime: &Arc<Runtime>,
        what: &str,
        free: unsafe extern "C" fn(Opaque),
        make: impl FnOnce(*mut Opaque) -> i32,
    ) -> Result<Owned, Error> {
        let mut object = ptr::null_mut();
        check(runtime, make(&mut object), what)?;
        if object.is_null() {
            return Err(Error::internal(format!("OpenVINO: {what} gave nothing")));
        }
        Ok(Owned { object, runtime: runtime.clone(), free })
    }
}

impl Drop for Owned {
    fn drop(&mut self) {
        // SAFETY: the object was made by the runtime, is freed by its own function, and once.
        unsafe { (self.free)(self.object) }
    }
}

/// Turns a status into an error with the text that OpenVINO has for it.
fn check(runtime: &Runtime, status: i32, what: &str) -> Result<(), Error> {
    if status == 0 {
        return Ok(());
    }
    // SAFETY: the function gives NULL or a text of its own, which we free.
    let said = unsafe {
        let text = (runtime.functions.last_error)();
        match text.is_null() {
            true => String::new(),
            false => {
                let said = CStr::from_ptr(text).to_string_lossy().into_owned();
                (runtime.functions.free)(text);
                said
            }
        }
    };
    // Traces of source lines come first; what went wrong comes last.
    let said = said.lines().rev().map(str::trim).find(|line| !line.is_empty()).unwrap_or("no reason given");
    let text = format!("OpenVINO cannot {what}: {said}");
    let error = match said.contains("alloc") {
        true => Error::out_of_memory(text),
        false => Error::internal(text),
    };
    Err(error.with_vendor_code(i64::from(status)))
}

fn c_text(text: &str) -> Result<CString, Error> {
    CString::new(text).map_err(|_| Error::invalid(format!("{text:?} has a zero byte")))
}

/// The entry to OpenVINO.
pub(crate) struct Core {
    core: Owned,
}

impl Core {
    /// Loads a runtime (see [`Runtime::load`]) and starts it.
    pub fn new(library: Option<&str>) -> Result<Core, Error> {
        let runtime = Runtime::load(library)?;
        let functions = &runtime.functions;
        // SAFETY: the function writes a new core.
        let core = Owned::new(&runtime, "start", functions.core_free, |core| unsafe {
            (functions.core_create)(core)
        })?;
        Ok(Core { core })
    }

    fn runtime(&self) -> &Runtime {
        &self.core.runtime
    }

    /// The version of the runtime.
    pub fn version(&self) -> &str {
        &self.runtime().version
    }

    /// The devices that there are: `CPU`, `NPU`, `GPU.0`.
    pub fn devices(&self) -> Result<Vec<String>, Error> {
        let mut names = DeviceNames { names: ptr::null_mut(), count: 0 };
        // SAFETY: the function fills the list with texts that live until it is freed.
        unsafe {
            let functions = &self.runtime().functions;
            check(self.runtime(), (functions.get_devices)(self.core.object, &mut names), "list devices")?;
            let mut list = Vec::new();
            for index in 0..names.count {
                list.push(CStr::from_ptr(names.names.add(index).read()).to_string_lossy().into_owned());
            }
            (functions.devices_free)(&mut names);
            Ok(list)
        }
    }

    /// A property of a device.
    pub fn property(&self, device: &str, key: &str) -> Result<String, Error> {
        let (device, name) = (c_text(device)?, c_text(key)?);
        let mut value = ptr::null_mut();
        // SAFETY: the function writes a text that we free.
        unsafe {
            let functions = &self.runtime().functions;
            let status =
                (functions.get_property)(self.core.object, device.as_ptr(), name.as_ptr(), &mut value);
            check(self.runtime(), status, &format!("tell {key}"))?;
            if value.is_null() {
                return Err(Error::internal(format!("OpenVINO tells no {key}")));
            }
            let text = CStr::from_ptr(value).to_string_lossy().into_owned();
            (functions.free)(value);
            Ok(text)
        }
    }

    /// Sets a property of a device for every model after this. A wrong one is told by a later call.
    pub fn set_property(&self, device: &str, key: &str, value: &str) -> Result<(), Error> {
        let what = format!("set {key}={value}");
        let (device, key, value) = (c_text(device)?, c_text(key)?, c_text(value)?);
        // SAFETY: the function takes one key and one value after the device.
        let status = unsafe {
            (self.runtime().functions.set_property)(
                self.core.object,
                device.as_ptr(),
                key.as_ptr(),
                value.as_ptr(),
            )
        };
        check(self.runtime(), status, &what)
    }

    /// Compiles a graph with its weights, which live as long as the model.
    pub fn compile(&self, device: &str, graph: &str, weights: &Arc<Vec<u8>>) -> Result<Model, Error> {
        let runtime = &self.core.runtime;
        let functions = &runtime.functions;
        let (graph, device) = (c_text(graph)?, c_text(device)?);
        // OpenVINO only reads weights, although the type of the pointer is one that can be written.
        let tensor = tensor(runtime, ElementType::U8, weights.as_ptr().cast_mut().cast(), &[weights.len()])?;
        // SAFETY: the graph has as many bytes, and the tensor lives until the model is there.
        let model = Owned::new(runtime, "read the graph", functions.model_free, |model| unsafe {
            let bytes = graph.as_bytes().len();
            (functions.read_model)(self.core.object, graph.as_ptr(), bytes, tensor.object, model)
        })?;
        // SAFETY: no properties follow.
        let compiled =
            Owned::new(runtime, "compile the graph", functions.compiled_free, |compiled| unsafe {
                (functions.compile)(self.core.object, model.object, device.as_ptr(), 0, compiled)
            })?;
        Model::new(compiled, Some(weights.clone()))
    }

    /// A model from what [`Model::export`] wrote.
    pub fn import(&self, device: &str, bytes: &[u8]) -> Result<Model, Error> {
        let device = c_text(device)?;
        let functions = &self.runtime().functions;
        // SAFETY: the bytes are as many as it says.
        let compiled =
            Owned::new(&self.core.runtime, "load the plan", functions.compiled_free, |compiled| unsafe {
                let content = bytes.as_ptr().cast();
                (functions.import)(self.core.object, content, bytes.len(), device.as_ptr(), compiled)
            })?;
        Model::new(compiled, None)
    }
}

/// A tensor over memory of the caller, who keeps it alive and in place for as long as OpenVINO may use it.
fn tensor(
    runtime: &Arc<Runtime>,
    element: ElementType,
    data: *mut std::ffi::c_void,
    dims: &[usize],
) -> Result<Owned, Error> {
    let mut dims: Vec<i64> = dims.iter().map(|dim| *dim as i64).collect();
    let functions = &runtime.functions;
    // SAFETY: the function copies the dimensions, and does not touch the memory yet.
    Owned::new(runtime, "make a tensor", functions.tensor_free, |tensor| unsafe {
        let shape = Shape { rank: dims.len() as i64, dims: dims.as_mut_ptr() };
        (functions.tensor_of)(element as u32, shape, data, tensor)
    })
}

/// A compiled graph of one input and one output, both F32 of two dimensions.
pub(crate) struct Model {
    request: Mutex<Owned>,
    compiled: Owned,
    /// The graph may point into them.
    _weights: Option<Arc<Vec<u8>>>,
}

impl Model {
    fn new(compiled: Owned, weights: Option<Arc<Vec<u8>>>) -> Result<Model, Error> {
        let functions = &compiled.runtime.functions;
        // SAFETY: the function writes a new request.
        let request =
            Owned::new(&compiled.runtime, "make a request", functions.request_free, |request| unsafe {
                (functions.create_request)(compiled.object, request)
            })?;
        Ok(Model { request: Mutex::new(request), compiled, _weights: weights })
    }

    /// Runs the graph for `tokens` rows of input and output, which it reads and writes in place. When this returns,
    /// however it does, OpenVINO is done with both.
    pub fn run(&self, tokens: usize, x: &[f32], y: &mut [f32], deadline: Deadline) -> Result<(), Error> {
        if tokens == 0 || !x.len().is_multiple_of(tokens) || !y.len().is_multiple_of(tokens) {
            return Err(Error::invalid("the values of a job are no whole rows"));
        }
        let runtime = &self.compiled.runtime;
        let functions = &runtime.functions;
        // A request that a panic interrupted gets new tensors before it runs again.
        let request = self.request.lock().unwrap_or_else(PoisonError::into_inner);
        // OpenVINO only reads inputs, although the type of the pointer is one that can be written.
        let x_dims = [tokens, x.len() / tokens];
        let x = tensor(runtime, ElementType::F32, x.as_ptr().cast_mut().cast(), &x_dims)?;
        let y_dims = [tokens, y.len() / tokens];
        let y = tensor(runtime, ElementType::F32, y.as_mut_ptr().cast(), &y_dims)?;
        let request = request.object;
        // SAFETY: the tensors have the memory of `x` and `y` with their lengths; OpenVINO compares the shapes with those
        // of the graph. It touches them only between start and the end of the request, and each way out waits for that.
        unsafe {
            check(runtime, (functions.set_input)(request, 0, x.object), "take the input")?;
            check(runtime, (functions.set_output)(request, 0, y.object), "take the output")?;
            let Some(left) = deadline.remaining() else {
                return check(runtime, (functions.infer)(request), "run the graph");
            };
            if left.is_zero() {
                return Err(Error::timeout("the deadline passed before the graph ran"));
            }
            check(runtime, (functions.start)(request), "start the graph")?;
            let milliseconds = left.max(Duration::from_millis(1)).as_millis();
            match (functions.wait_for)(request, i64::try_from(milliseconds).unwrap_or(i64::MAX)) {
                NOT_READY => {
                    (functions.cancel)(request);
                    (functions.wait)(request);
                    Err(Error::timeout("the deadline passed while the graph ran"))
                }
                status => {
                    let ended = check(runtime, status, "run the graph");
                    if ended.is_err() {
                        (functions.wait)(request);
                    }
                    ended
                }
            }
        }
    }

    /// Writes the compiled graph to a file.
    pub fn export(&self, path: &str) -> Result<(), Error> {
        let runtime = &self.compiled.runtime;
        let path = c_text(path)?;
        // SAFETY: the path is a text.
        let status = unsafe { (runtime.functions.export)(self.compiled.object, path.as_ptr()) };
        check(runtime, status, "save a plan")
    }
}
