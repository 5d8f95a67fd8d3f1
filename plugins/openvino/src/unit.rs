//! A device of OpenVINO as a unit of neuropil.
//!
//! A weight is one compiled graph per token count of the unit, or one for all counts. The CPU device takes any count;
//! NPUs need graphs of fixed shape, and compile for seconds, so theirs are made when a weight is prepared and may be
//! saved.

use std::sync::Arc;
use std::time::Instant;

use neuropil_plugin_sdk::{
    DeviceInfo, DeviceKind, Error, MatmulJob, Matrices, Offers, PluginDevice, Prepared, Query, Report,
    Scheme, Shape, Support, WeightSource,
};

use crate::graph;
use crate::plan;
use crate::runtime::{Core, Model};
use crate::settings::Settings;

/// Token counts of graphs for an NPU, unless the user says others.
const NPU_TOKENS: [u64; 3] = [1, 32, 128];

/// Widest matrix that a graph is made for.
const MOST_ELEMENTS: usize = 1 << 33;

/// An open device.
pub struct Unit {
    core: Core,
    /// OpenVINO's name of it.
    device: String,
    info: DeviceInfo,
}

/// A prepared weight: a graph per token count, in the order of the unit's counts, or one for all counts.
pub struct Weight {
    models: Vec<Model>,
    /// OpenVINO does not read again what it writes of a graph that it has read.
    loaded: bool,
}

impl Unit {
    /// Opens the device that the settings ask for; without a name an NPU, and the CPU where there is none.
    pub(crate) fn open(settings: &Settings) -> Result<Unit, Error> {
        let core = Core::new(settings.library.as_deref())?;
        let devices = core.devices()?;
        let listed = |name: &str| devices.iter().any(|device| device == name);
        let device = match &settings.device {
            Some(name) if listed(name) => name.clone(),
            Some(name) => {
                let there = devices.join(", ");
                return Err(Error::invalid(format!("OpenVINO has no device {name} here, but {there}")));
            }
            None if listed("NPU") => "NPU".into(),
            None if listed("CPU") => "CPU".into(),
            None => return Err(Error::unsupported("OpenVINO has neither an NPU nor a CPU here")),
        };
        let kind = match device.get(..3) {
            Some("NPU") => DeviceKind::Npu,
            Some("CPU") => DeviceKind::Cpu,
            Some("GPU") => DeviceKind::Gpu,
            _ => DeviceKind::Other,
        };
        let exact = settings.exact.unwrap_or(kind == DeviceKind::Cpu);
        let mut properties = vec![("PERFORMANCE_HINT", "LATENCY".to_string())];
        if exact {
            // Without these a CPU computes in bfloat16 where it can, and rounds inputs to 8 bits for weights of codes.
            properties.push(("INFERENCE_PRECISION_HINT", "f32".into()));
            properties.push(("DYNAMIC_QUANTIZATION_GROUP_SIZE", "0".into()));
        }
        if settings.threads > 0 {
            properties.push(("INFERENCE_NUM_THREADS", settings.threads.to_string()));
        }
        for (key, value) in &properties {
            core.set_property(&device, key, value)?;
        }
        // This loads the device, which then sees what was set.
        let name = core.property(&device, "FULL_DEVICE_NAME")?;
        let token_buckets = match &settings.tokens {
            Some(tokens) => tokens.clone(),
            None if kind == DeviceKind::Npu => NPU_TOKENS.to_vec(),
            None => Vec::new(),
        };
        let version = core.version().to_string();
        let info = DeviceInfo {
            name: format!("{} ({device})", name.trim()),
            vendor: "Intel".into(),
            driver: format!("OpenVINO {version}"),
            // Empty: hosts keep no plans. A product of a real model's size came out wrong after its graph was loaded.
            compatibility: String::new(),
            kind,
            token_buckets,
            ..Default::default()
        };
        Ok(Unit { core, device, info })
    }

    /// Compiles the graph of a matrix. Gives the bytes that it takes, about: the constants and the device's own copy.
    fn compile(&self, source: &WeightSource<'_>, tokens: Option<u64>) -> Result<(Model, u64), Error> {
        let Matrices::One(matrix) = &source.matrices else {
            return Err(Error::unsupported("this plugin has no neuron clusters"));
        };
        if matrix.outliers.is_some() {
            return Err(Error::unsupported("this plugin has no outlier columns"));
        }
        let graph = graph::product(matrix, tokens)?;
        let constants = Arc::new(graph.constants);
        let model = self.core.compile(&self.device, &graph.text, &constants)?;
        // The CPU device multiplies halves as floats.
        let copy = if matrix.scheme == Scheme::F16 { 2 * constants.len() } else { constants.len() };
        Ok((model, (constants.len() + copy) as u64))
    }
}

impl PluginDevice for Unit {
    type Weight = Weight;

    const OFFERS: Offers = Offers { plans: plan::OFFERED, ..Offers::NONE };

    fn info(&self) -> DeviceInfo {
        self.info.clone()
    }

    fn query(&self, query: &Query) -> Result<Support, Error> {
        let Query::Matmul { scheme, rows, cols, .. } = *query else {
            return Err(Error::unsupported("this plugin has no neuron clusters"));
        };
        let elements = rows.checked_mul(cols).filter(|elements| (1..=MOST_ELEMENTS).contains(elements));
        if scheme.bytes(rows, cols).is_none() || elements.is_none() {
            return Err(Error::unsupported(format!(
                "there is no {rows} x {cols} matrix of {}",
                scheme.name()
            )));
        }
        Ok(Support::NATIVE)
    }

    fn prepare(&self, source: &WeightSource<'_>) -> Result<Prepared<Weight>, Error> {
        let counts = match &self.info.token_buckets[..] {
            [] => vec![None],
            buckets => buckets.iter().map(|tokens| Some(*tokens)).collect(),
        };
        let (mut models, mut bytes) = (Vec::new(), 0);
        for tokens in counts {
            let (model, taken) = self.compile(source, tokens)?;
            models.push(model);
            bytes += taken;
        }
        Ok(Prepared { weight: Weight { models, loaded: false }, bytes })
    }

    fn matmul(&self, job: &mut MatmulJob<'_, Weight>) -> Result<Report, Error> {
        let start = Instant::now();
        let buckets = &self.info.token_buckets;
        let index = match buckets.is_empty() {
            true => 0,
            false => buckets.iter().position(|tokens| *tokens == job.tokens as u64).unwrap_or(usize::MAX),
        };
        for product in &mut job.products {
            let model = product.weight.models.get(index);
            let model = model.ok_or_else(|| Error::invalid("there is no graph for so many tokens"))?;
            model.run(job.tokens, job.x.values, product.y.values, job.deadline)?;
        }
        // The CPU device reads and writes tensors in place; others copy ordinary memory.
        let in_place = self.info.kind == DeviceKind::Cpu;
        Ok(Report { zero_copy_input: in_place, zero_copy_output: in_place, device_time: start.elapsed() })
    }

    fn save_plan(
        &self,
        weight: &Weight,
        write: &mut dyn FnMut(&[u8]) -> Result<(), Error>,
    ) -> Result<(), Error> {
        if weight.loaded {
            return Err(Error::unsupported("a weight that was loaded from a plan: keep that plan"));
        }
        for model in &weight.models {
            let bytes = plan::export(model)?;
            write(&(bytes.len() as u64).to_le_bytes())?;
            write(&bytes)?;
        }
        Ok(())
    }

    fn load_plan(&self, mut plan: &[u8], _shape: Shape) -> Result<Prepared<Weight>, Error> {
        let damaged = || Error::invalid("the saved plan does not fit this unit");
        let (mut models, mut bytes) = (Vec::new(), 0);
        for _ in 0..self.info.token_buckets.len().max(1) {
            let (len, rest) = plan.split_first_chunk::<8>().ok_or_else(damaged)?;
            let len = usize::try_from(u64::from_le_bytes(*len)).map_err(|_| damaged())?;
            let (model, rest) = rest.split_at_checked(len).ok_or_else(damaged)?;
            models.push(self.core.import(&self.device, model)?);
            bytes += 2 * len as u64;
            plan = rest;
        }
        if !plan.is_empty() {
            return Err(damaged());
        }
        Ok(Prepared { weight: Weight { models, loaded: true }, bytes })
    }
}
