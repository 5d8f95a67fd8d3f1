//! QNN with owners and lengths: what is made is freed, and every length is checked here.
//!
//! The library checks little itself. Real releases take a static tensor or an input that is too short, and read past its
//! end; they add and finalise nodes that their own validation refuses. So [`Builder`] compares the bytes of each tensor
//! with its shape and has each node validated, and [`Graph::run`] compares the bytes of each input and output.

use std::ffi::{CString, c_char, c_void};
use std::ptr;
use std::sync::Arc;

use neuropil_plugin_sdk::Code::Unsupported;
use neuropil_plugin_sdk::Error;

use crate::abi::{self, Handle, Tensor};
use crate::graph::Graph;
use crate::library::{Backend, Vendor};
use crate::tensor::{Held, Kind, Spec, c_text};

/// The package of the operations that come with QNN.
const PACKAGE: &std::ffi::CStr = c"qti.aisw";

/// The level of a log: errors only.
const LOG_ERRORS: u32 = 1;

/// A log that forgets everything. The arguments of the message are a `va_list`, which is one pointer on all systems that
/// have QNN; it is not touched.
unsafe extern "C" fn silent(_format: *const c_char, _level: u32, _time: u64, _arguments: *mut c_void) {}

/// HTP backends whose struct for a SoC was tried: backend API 5.47 to 5.51.
const SOC_RELEASES: std::ops::RangeInclusive<u32> = 47..=51;

/// A backend that was started, with its device where it has one.
pub(crate) struct Session {
    vendor: Arc<Vendor>,
    log: Handle,
    backend: Handle,
    device: Handle,
}

// SAFETY: QNN ties no handle to a thread, and its functions may be called from any.
unsafe impl Send for Session {}
// SAFETY: as above; besides, calls go one at a time.
unsafe impl Sync for Session {}

impl Drop for Session {
    fn drop(&mut self) {
        // SAFETY: each handle was made by the library and is freed once, in reverse. Contexts hold the session.
        self.vendor.call(|functions| unsafe {
            if let (false, Some(free)) = (self.device.is_null(), functions.device_free) {
                free(self.device);
            }
            if !self.backend.is_null() {
                (functions.backend_free)(self.backend);
            }
            if let (false, Some(free)) = (self.log.is_null(), functions.log_free) {
                free(self.log);
            }
        });
    }
}

impl Session {
    /// Starts the backend. `soc` is a model number of QNN's, to prepare graphs for another chip than the one at hand.
    pub fn new(vendor: Arc<Vendor>, soc: Option<u32>) -> Result<Arc<Session>, Error> {
        let known = vendor.backend == Backend::Htp && SOC_RELEASES.contains(&vendor.versions[1].minor);
        if soc.is_some() && !known {
            let text = format!("option soc: how {} takes a SoC is not known here", vendor.describe());
            return Err(Error::unsupported(text));
        }
        vendor.settle(soc)?;
        let mut session =
            Session { vendor, log: ptr::null_mut(), backend: ptr::null_mut(), device: ptr::null_mut() };
        let vendor = session.vendor.clone();
        vendor.call(|functions| {
            let Some(create) = functions.log_create else { return };
            // Without a log that swallows them, messages go to the standard output. Errors are told by codes.
            // SAFETY: the function has the library's type, and stays as long as the process.
            let code = unsafe { create(silent as *const c_void, LOG_ERRORS, &mut session.log) };
            if code != 0 {
                session.log = ptr::null_mut();
            }
        });
        let log = session.log;
        // SAFETY: the function takes a log or NULL, no configuration, and writes a new handle.
        let code = vendor
            .call(|functions| unsafe { (functions.backend_create)(log, ptr::null(), &mut session.backend) });
        vendor.check(code, "start its backend")?;
        let soc = soc.map(|soc| abi::HtpSoc { option: 0, soc, soc_again: soc, rest: [0; 5] });
        let config = soc
            .as_ref()
            .map(|soc| abi::DeviceConfig { option: abi::CONFIG_CUSTOM, custom: ptr::from_ref(soc).cast() });
        let list: [*const c_void; 2] =
            [config.as_ref().map_or(ptr::null(), |config| ptr::from_ref(config).cast()), ptr::null()];
        let list = if config.is_some() { list.as_ptr() } else { ptr::null() };
        let code = vendor.call(|functions| {
            // SAFETY: the list ends with NULL, and all that it points to lives until the call returns.
            functions.device_create.map_or(0, |create| unsafe { create(log, list, &mut session.device) })
        });
        match vendor.backend {
            Backend::Htp => vendor.check(code, "open its device")?,
            // The CPU has no device to make, and says that with a code.
            Backend::Cpu if code != 0 => session.device = ptr::null_mut(),
            Backend::Cpu => {}
        }
        Ok(Arc::new(session))
    }

    /// The library.
    pub fn vendor(&self) -> &Arc<Vendor> {
        &self.vendor
    }

    /// A new context, which graphs are made in.
    pub fn context(self: &Arc<Session>) -> Result<Arc<Context>, Error> {
        let mut handle = ptr::null_mut();
        // SAFETY: the handles are those of this session; the function writes a new one.
        let code = self.vendor.call(|functions| unsafe {
            (functions.context_create)(self.backend, self.device, ptr::null(), &mut handle)
        });
        self.vendor.check(code, "make a context")?;
        Ok(Arc::new(Context { session: self.clone(), handle }))
    }

    /// The context that [`Context::save`] wrote.
    pub fn load(self: &Arc<Session>, bytes: &[u8]) -> Result<Arc<Context>, Error> {
        let mut handle = ptr::null_mut();
        // SAFETY: as above; the bytes are as many as it says.
        let code = self.vendor.call(|functions| unsafe {
            let (data, len) = (bytes.as_ptr().cast(), bytes.len() as u64);
            let load = functions.context_from_binary;
            load(self.backend, self.device, ptr::null(), data, len, &mut handle, ptr::null_mut())
        });
        self.vendor.check(code, "load a saved context")?;
        Ok(Arc::new(Context { session: self.clone(), handle }))
    }
}

/// A context: what graphs belong to, and what can be saved.
pub(crate) struct Context {
    session: Arc<Session>,
    handle: Handle,
}

// SAFETY: as for the session.
unsafe impl Send for Context {}
// SAFETY: as for the session.
unsafe impl Sync for Context {}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: the handle was made by the library and is freed once; its graphs hold the context.
        self.vendor().call(|functions| unsafe { (functions.context_free)(self.handle, ptr::null_mut()) });
    }
}

impl Context {
    fn vendor(&self) -> &Vendor {
        &self.session.vendor
    }

    /// The session of it.
    pub fn session(&self) -> &Arc<Session> {
        &self.session
    }

    /// The handle, for registering memory.
    pub fn handle(&self) -> Handle {
        self.handle
    }

    /// All finalised graphs as bytes.
    pub fn save(&self) -> Result<Vec<u8>, Error> {
        let (mut size, mut written) = (0, 0);
        // SAFETY: the function writes a number.
        let code = self.vendor().call(|functions| unsafe { (functions.binary_size)(self.handle, &mut size) });
        self.vendor().check(code, "measure a context")?;
        let mut bytes = Vec::new();
        let refuse =
            |_| Error::out_of_memory(format!("there is no memory for a saved context of {size} bytes"));
        let len = usize::try_from(size).unwrap_or(usize::MAX);
        bytes.try_reserve_exact(len).map_err(refuse)?;
        bytes.resize(len, 0);
        // SAFETY: there is room for as many bytes.
        let code = self.vendor().call(|functions| unsafe {
            (functions.binary)(self.handle, bytes.as_mut_ptr().cast(), size, &mut written)
        });
        self.vendor().check(code, "save a context")?;
        if written == 0 || written > size {
            return Err(Error::internal(format!("QNN says that it wrote {written} of {size} bytes")));
        }
        bytes.truncate(written as usize);
        Ok(bytes)
    }

    /// Begins a graph.
    pub fn graph(self: &Arc<Context>, name: &str) -> Result<Builder, Error> {
        let name = c_text(name)?;
        let mut graph = ptr::null_mut();
        // SAFETY: the function copies the name and writes a new handle.
        let code = self.vendor().call(|functions| unsafe {
            (functions.graph_create)(self.handle, name.as_ptr(), ptr::null(), &mut graph)
        });
        self.vendor().check(code, "make a graph")?;
        Ok(Builder { context: self.clone(), graph, tensors: Vec::new() })
    }

    /// A graph of a loaded context. Each of its ends says which number the tensor had.
    pub fn find(self: &Arc<Context>, name: &str, ends: Vec<(Spec, u32)>) -> Result<Graph, Error> {
        let name = c_text(name)?;
        let mut graph = ptr::null_mut();
        // SAFETY: as above.
        let code = self
            .vendor()
            .call(|functions| unsafe { (functions.retrieve)(self.handle, name.as_ptr(), &mut graph) });
        self.vendor().check(code, "find a graph in a saved context")?;
        let mut tensors = Vec::new();
        for (spec, id) in ends {
            let mut held = Held::new(spec, Vec::new())?;
            held.raw.id = id;
            tensors.push(held);
        }
        Graph::new(self.clone(), graph, tensors)
    }
}

/// A graph that is being made.
pub(crate) struct Builder {
    context: Arc<Context>,
    graph: Handle,
    tensors: Vec<Held>,
}

impl Builder {
    /// Adds a tensor and gives its number. The library may use the bytes of a static one until the graph is compiled, so
    /// they are kept here.
    pub fn tensor(&mut self, spec: Spec, data: Vec<u8>) -> Result<usize, Error> {
        let mut held = Held::new(spec, data)?;
        let vendor = self.context.vendor();
        // SAFETY: the struct and all that it points to are there; the bytes are as many as the shape needs.
        let code = vendor.call(|functions| unsafe { (functions.create_tensor)(self.graph, &mut held.raw) });
        vendor.check(code, &format!("make tensor {}", held.spec.name))?;
        self.tensors.push(held);
        Ok(self.tensors.len() - 1)
    }

    /// Adds a node, once the library has said that it can be. Parameters, inputs and outputs are numbers of tensors.
    pub fn node(
        &mut self,
        op: &str,
        params: &[(&str, usize)],
        inputs: &[usize],
        outputs: &[usize],
    ) -> Result<(), Error> {
        let raw = |index: &usize| {
            let held = self.tensors.get(*index);
            held.map(|held| held.raw).ok_or_else(|| Error::internal("a node names no tensor"))
        };
        let gather = |list: &[usize]| list.iter().map(raw).collect::<Result<Vec<Tensor>, Error>>();
        let (inputs, outputs) = (gather(inputs)?, gather(outputs)?);
        let (name, kind) = (c_text(&format!("{op}{}", self.tensors.len()))?, c_text(op)?);
        let names = params.iter().map(|(name, _)| c_text(name)).collect::<Result<Vec<CString>, Error>>()?;
        let mut list = Vec::new();
        for ((_, index), name) in params.iter().zip(&names) {
            let value = abi::ParamValue { tensor: raw(index)? };
            list.push(abi::Param { kind: abi::PARAM_TENSOR, name: name.as_ptr(), value });
        }
        let config = abi::OpConfig {
            version: 1,
            name: name.as_ptr(),
            package: PACKAGE.as_ptr(),
            op: kind.as_ptr(),
            param_count: list.len() as u32,
            params: list.as_ptr(),
            input_count: inputs.len() as u32,
            inputs: inputs.as_ptr(),
            output_count: outputs.len() as u32,
            outputs: outputs.as_ptr(),
        };
        let vendor = self.context.vendor();
        // SAFETY: the struct and all that it points to live until the call returns.
        let code =
            vendor.call(|functions| unsafe { (functions.validate)(self.context.session.backend, config) });
        if code != 0 {
            let error = vendor.check(code, &format!("do {op} of these types and shapes")).err();
            // Whatever the code: this is what the backend does not do.
            return Err(
                error.map_or_else(|| Error::unsupported(op), |error| Error { code: Unsupported, ..error })
            );
        }
        // SAFETY: as above.
        let code = vendor.call(|functions| unsafe { (functions.add_node)(self.graph, config) });
        vendor.check(code, &format!("add {op}"))
    }

    /// Compiles the graph.
    pub fn finish(self) -> Result<Graph, Error> {
        let vendor = self.context.vendor();
        // SAFETY: the handle is that of the graph; it is neither profiled nor signalled.
        let code = vendor
            .call(|functions| unsafe { (functions.finalize)(self.graph, ptr::null_mut(), ptr::null_mut()) });
        vendor.check(code, "compile a graph")?;
        let ends = self.tensors.into_iter().filter(|held| held.spec.kind != Kind::Static).collect();
        Graph::new(self.context, self.graph, ends)
    }
}
