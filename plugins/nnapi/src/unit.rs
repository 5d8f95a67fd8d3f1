//! A device of NNAPI as a unit of neuropil.
//!
//! A weight is one compiled graph per token count of the unit, over one copy of its elements that the driver maps. What
//! the unit takes the driver is asked, by a graph of the same shape over zeros that take no room.

use std::any::Any;
use std::collections::BTreeMap;
use std::ffi::CString;
use std::sync::{Arc, Mutex, PoisonError};

use neuropil_plugin_sdk::{
    Code, DeviceInfo, DeviceKind, Error, MatmulJob, Matrices, Offers, Placed, PluginDevice, Prepared,
    Product, Query, Region, Report, Support, WeightSource,
};
use sha2::{Digest, Sha256};

use crate::codes::{DEVICE_ACCELERATOR, DEVICE_CPU, DEVICE_GPU, LEVEL_REUSABLE, TOKEN_BYTES};
use crate::form::{self, Form};
use crate::graph::{Graph, Shelf, Side};
use crate::library::Runtime;
use crate::memory::{DriverMemory, Place, Shared};
use crate::pack::{RowScales, pack};
use crate::rows::{Codes, Floats, Halves};
use crate::runtime::{Cache, Compilation, Device, devices, wait_for};
use crate::settings::{Settings, Wish};

/// Kinds of memory, as the header numbers them.
const MEMORY_DMA_BUF: u32 = 2;
const MEMORY_HARDWARE_BUFFER: u32 = 4;

/// An open device.
pub struct Unit {
    runtime: Arc<Runtime>,
    device: Device,
    settings: Settings,
    relaxed: bool,
    info: DeviceInfo,
    shelf: Arc<Shelf>,
    /// What the driver said of products.
    answers: Mutex<BTreeMap<form::Product, Result<(), Error>>>,
}

/// A prepared weight.
pub struct Weight {
    form: Form,
    /// For codes only.
    rows: RowScales,
    /// One per token count of the unit, in their order; those that the driver takes.
    graphs: Vec<Option<Graph>>,
    /// The elements, as the driver has them mapped.
    constants: Shared,
}

impl Unit {
    /// Opens the device that the settings ask for.
    pub(crate) fn open(settings: Settings) -> Result<Unit, Error> {
        let runtime = Runtime::load(&settings.library)?;
        let device = choose(devices(&runtime)?, &settings.device)?;
        let kind = match device.kind {
            DEVICE_CPU => DeviceKind::Cpu,
            DEVICE_GPU => DeviceKind::Gpu,
            DEVICE_ACCELERATOR => DeviceKind::Npu,
            _ => DeviceKind::Other,
        };
        // Who asks for F32 gets it; without a word, accelerators of halves take F32 weights too.
        let relaxed = settings.relaxed.unwrap_or(settings.precision.is_none() && kind != DeviceKind::Cpu);
        let buffers = runtime.functions.memory_from_buffer.map_or(0, |_| MEMORY_HARDWARE_BUFFER);
        let info = DeviceInfo {
            name: format!("{} by NNAPI", device.name),
            vendor: device.name.split(['-', '.', '_']).next().unwrap_or_default().to_string(),
            driver: format!(
                "NNAPI of feature level {}, driver {} of level {}",
                runtime.level, device.version, device.level
            ),
            kind,
            // Each graph has its own lock.
            parallel: true,
            memory_kinds: MEMORY_DMA_BUF | buffers,
            // Floats are 4 bytes.
            memory_alignment: 4,
            token_buckets: settings.tokens.clone(),
            ..Default::default()
        };
        let shelf = Arc::new(Shelf::new(&runtime));
        Ok(Unit { runtime, device, settings, relaxed, info, shelf, answers: Mutex::default() })
    }

    /// Waits for a device whose driver is just starting anew.
    pub(crate) fn wait(&self) -> Result<(), Error> {
        wait_for(&self.runtime, &self.device)
    }

    /// Asks the driver for a product, once.
    fn ask(&self, product: form::Product) -> Result<(), Error> {
        let mut answers = self.answers.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(answer) = answers.get(&product) {
            return answer.clone();
        }
        let ask = || {
            let layout = product.layout()?;
            let blank = DriverMemory::blank(&self.runtime, layout.bytes)?;
            let scales = match product.form {
                Form::Int8 { .. } => vec![1.0; product.rows],
                _ => Vec::new(),
            };
            self.agree(&product.model(&self.runtime, &blank, &scales, self.relaxed)?, product)
        };
        let answer = ask();
        // The driver may have more memory another time, and a lost one is gone for good.
        let passing = |code| matches!(code, Code::OutOfMemory | Code::Timeout);
        if !answer.as_ref().is_err_and(|error| passing(error.code)) {
            answers.insert(product, answer.clone());
        }
        answer
    }

    /// Whether the driver takes the graph of a product.
    fn agree(&self, model: &crate::runtime::Model, product: form::Product) -> Result<(), Error> {
        if model.runs_on(&self.device)? {
            return Ok(());
        }
        let form::Product { form, rows, cols, tokens } = product;
        Err(Error::unsupported(format!(
            "the driver of {} ({}, feature level {}) does not take {} with {rows} rows, {cols} columns and {tokens} tokens",
            self.device.name,
            self.device.version,
            self.device.level,
            form.name(),
        )))
    }

    /// The cache of a product, if the user wants one. The token covers everything that makes a compiled graph another.
    fn cache(
        &self,
        product: &form::Product,
        scales: &RowScales,
        content: &[u8],
    ) -> Result<Option<Cache>, Error> {
        let Some(folder) = &self.settings.cache else { return Ok(None) };
        std::fs::create_dir_all(folder).map_err(|error| {
            Error::invalid(format!("option cache={folder} is no folder to write: {error}"))
        })?;
        let c_folder = CString::new(folder.as_str())
            .map_err(|_| Error::invalid(format!("option cache={folder:?} has a zero byte")))?;
        let mut hash = Sha256::new();
        let (device, preference) = (&self.device, self.settings.preference);
        hash.update(format!(
            "neuropil {} {:?} {:?} {} {} {product:?} {} {preference}\n",
            env!("CARGO_PKG_VERSION"),
            device.name,
            device.version,
            device.level,
            self.runtime.level,
            self.relaxed,
        ));
        hash.update(bytemuck::cast_slice::<f32, u8>(&scales.in_graph));
        hash.update(content);
        let mut token = [0; TOKEN_BYTES];
        token.copy_from_slice(&hash.finalize());
        Ok(Some(Cache { folder: c_folder, token }))
    }

    /// The graph of a product over its constants.
    fn compile(
        &self,
        product: form::Product,
        constants: &Shared,
        scales: &RowScales,
    ) -> Result<Graph, Error> {
        let form::Product { form, rows, cols, tokens } = product;
        let model = product.model(&self.runtime, &constants.memory, &scales.in_graph, self.relaxed)?;
        self.agree(&model, product)?;
        let cache = self.cache(&product, scales, constants.bytes())?;
        let compilation = Compilation::new(model, &self.device, self.settings.preference, cache.as_ref())?;
        let bytes = (tokens * cols * form.value_bytes(), tokens * rows * form.value_bytes());
        Graph::new(compilation, &self.shelf, bytes, self.runtime.level >= LEVEL_REUSABLE)
    }

    /// Runs one product of a job. Gives whether input and output were used where they lie, and the time that it ran.
    fn run(
        &self,
        job: &MatmulJob<'_, Weight>,
        index: usize,
        product: &mut Product<'_, Weight>,
    ) -> Result<Report, Error> {
        let weight = product.weight;
        let graph = weight.graphs.get(index).and_then(Option::as_ref);
        let graph =
            graph.ok_or_else(|| Error::unsupported("the driver takes no graph for so many tokens"))?;
        let (x, cols, deadline) = (job.x.values, job.cols, job.deadline);
        let y = &mut *product.y.values;
        let mut report = Report::default();
        match weight.form {
            Form::F32 => {
                let x_side = side(job.x.placed, size_of_val(x))?;
                let y_side = side(product.y.placed, size_of_val(y))?;
                report.zero_copy_input = matches!(x_side, Side::Placed(_));
                report.zero_copy_output = matches!(y_side, Side::Placed(_));
                let relaxed = self.relaxed && !report.zero_copy_input && !report.zero_copy_output;
                let mut values = Floats::new(x, cols, y, relaxed);
                report.device_time = graph.run(x_side, y_side, deadline, &mut values)?;
            }
            Form::F16 => {
                let mut values = Halves::new(x, cols, y);
                report.device_time = graph.run(Side::Copied, Side::Copied, deadline, &mut values)?;
            }
            Form::Int8 { signed } => {
                let codes = weight.constants.bytes().get(..weight.rows.factors.len() * cols);
                let codes =
                    codes.ok_or_else(|| Error::internal("a weight has other bytes than its graph"))?;
                let mut values = Codes::new(x, cols, y, (codes, &weight.rows), signed);
                report.device_time = graph.run(Side::Copied, Side::Copied, deadline, &mut values)?;
            }
        }
        Ok(report)
    }
}

/// The device of a wish.
fn choose(devices: Vec<Device>, wish: &Wish) -> Result<Device, Error> {
    let first = |kind: i32| devices.iter().find(|device| device.kind == kind);
    let found = match wish {
        Wish::Named(name) => devices.iter().find(|device| device.name == *name),
        Wish::Accelerator => first(DEVICE_ACCELERATOR),
        Wish::Gpu => first(DEVICE_GPU),
        Wish::Cpu => first(DEVICE_CPU),
        Wish::Auto => first(DEVICE_ACCELERATOR)
            .or_else(|| first(DEVICE_GPU))
            .or_else(|| devices.iter().find(|device| device.kind != DEVICE_CPU)),
    };
    found.cloned().ok_or_else(|| {
        let there: Vec<&str> = devices.iter().map(|device| device.name.as_str()).collect();
        let there = if there.is_empty() { "none".to_string() } else { there.join(", ") };
        match wish {
            Wish::Named(name) => Error::invalid(format!("NNAPI has no device {name} here, but {there}")),
            Wish::Accelerator => Error::unsupported(format!("NNAPI has no accelerator here, but {there}")),
            Wish::Gpu => Error::unsupported(format!("NNAPI has no GPU here, but {there}")),
            Wish::Cpu => Error::unsupported(format!("NNAPI has no CPU device here, but {there}")),
            Wish::Auto => Error::unsupported(format!(
                "NNAPI has nothing but the CPU here ({there}), which is its slow reference: device=cpu takes it all the same"
            )),
        }
    })
}

/// Where values of F32 lie for a graph.
fn side(placed: Option<Placed<'_>>, bytes: usize) -> Result<Side, Error> {
    // Values must lie at multiples of their size.
    let Some(placed) = placed.filter(|placed| placed.offset.is_multiple_of(4)) else {
        return Ok(Side::Copied);
    };
    let memory = placed.memory.downcast_ref::<Arc<DriverMemory>>();
    let memory = memory.ok_or_else(|| Error::invalid("the memory is of another plugin"))?;
    Ok(Side::Placed(Place::new(memory, placed.offset, bytes)?))
}

impl PluginDevice for Unit {
    type Weight = Weight;

    const OFFERS: Offers = Offers { import: true, ..Offers::NONE };

    fn info(&self) -> DeviceInfo {
        self.info.clone()
    }

    fn query(&self, query: &Query) -> Result<Support, Error> {
        let Query::Matmul { scheme, rows, cols, tokens } = *query else {
            return Err(Error::unsupported("this plugin has no neuron clusters"));
        };
        if scheme.bytes(rows, cols).is_none_or(|_| rows == 0 || cols == 0) {
            return Err(Error::unsupported(format!(
                "there is no {rows} x {cols} matrix of {}",
                scheme.name()
            )));
        }
        let (form, emulated) = Form::of(scheme, &self.settings, self.device.level)?;
        self.ask(form::Product { form, rows, cols, tokens })?;
        // Where codes are widened, those of outliers are too.
        Ok(Support { emulated, outliers: emulated })
    }

    fn prepare(&self, source: &WeightSource<'_>) -> Result<Prepared<Weight>, Error> {
        let Matrices::One(matrix) = &source.matrices else {
            return Err(Error::unsupported("this plugin has no neuron clusters"));
        };
        let (form, _) = Form::of(matrix.scheme, &self.settings, self.device.level)?;
        let product = |tokens| form::Product { form, rows: matrix.rows, cols: matrix.cols, tokens };
        let layout = product(1).layout()?;
        let mut constants = Shared::new(&self.runtime, layout.bytes)?;
        let scales = pack(matrix, form, constants.bytes_mut())?;
        let mut graphs = Vec::new();
        let mut refusal = None;
        for tokens in &self.settings.tokens {
            let product = product(usize::try_from(*tokens).unwrap_or(usize::MAX));
            match self.compile(product, &constants, &scales) {
                Ok(graph) => graphs.push(Some(graph)),
                Err(error) if error.code == Code::Unsupported => {
                    graphs.push(None);
                    refusal = Some(error);
                }
                Err(error) => return Err(error),
            }
        }
        let there = graphs.iter().flatten().count() as u64;
        if let (0, Some(refusal)) = (there, refusal) {
            return Err(refusal);
        }
        // Drivers commonly put weights into an order of their own; NNAPI does not say how much they take.
        let bytes = (layout.bytes as u64).saturating_mul(1 + there);
        Ok(Prepared { weight: Weight { form, rows: scales, graphs, constants }, bytes })
    }

    fn matmul(&self, job: &mut MatmulJob<'_, Weight>) -> Result<Report, Error> {
        let index = self.settings.tokens.iter().position(|tokens| *tokens == job.tokens as u64);
        let mut products = std::mem::take(&mut job.products);
        let mut whole = Report { zero_copy_input: true, zero_copy_output: true, ..Report::default() };
        for product in &mut products {
            let report = self.run(job, index.unwrap_or(usize::MAX), product)?;
            whole.zero_copy_input &= report.zero_copy_input;
            whole.zero_copy_output &= report.zero_copy_output;
            whole.device_time += report.device_time;
        }
        Ok(whole)
    }

    fn import(&self, region: &Region) -> Result<Box<dyn Any + Send + Sync>, Error> {
        let memory = match region.kind {
            MEMORY_HARDWARE_BUFFER if region.offset.is_multiple_of(4) => {
                DriverMemory::from_hardware_buffer(&self.runtime, region.native, region.offset, region.bytes)?
            }
            _ if !region.offset.is_multiple_of(4) => {
                return Err(Error::invalid("the region does not begin at a multiple of 4 bytes"));
            }
            _ if region.fd < 0 => return Err(Error::invalid("the region has no file descriptor")),
            _ => DriverMemory::from_fd(&self.runtime, region.fd, region.offset, region.bytes)?,
        };
        Ok(Box::new(memory))
    }
}
