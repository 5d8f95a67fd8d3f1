//! What the host asks for.

use std::sync::Arc;
use std::time::Instant;

use neuropil_plugin_sdk::{
    Deadline, DeviceInfo, DeviceKind, Error, Level, Log, MatmulJob, Matrices, Matrix, Offers, PluginDevice,
    Prepared, Product, Query, Report, Scheme, Shape, Support, WeightSource,
};

use crate::activations::{self, MOST_HALVINGS, Token};
use crate::cache::Cache;
use crate::graph::{Exchange, Graph};
use crate::library::{Backend, Vendor};
use crate::memory::{Buffers, RpcMemory};
use crate::plan;
use crate::power::Vote;
use crate::product::{self, Elements, Numbers, Part};
use crate::runtime::{Context, Session};
use crate::settings::Settings;

/// An open backend.
pub struct Unit {
    /// Before the session, so that it is taken back while there is one.
    _vote: Option<Vote>,
    session: Arc<Session>,
    settings: Settings,
    info: DeviceInfo,
    buffers: Buffers,
    cache: Option<Cache>,
    log: Log,
}

/// A prepared weight: a context with a graph per token count.
pub struct Weight {
    pub(crate) numbers: Numbers,
    pub(crate) rows: usize,
    pub(crate) parts: Vec<Part>,
    pub(crate) graphs: Vec<Graph>,
    pub(crate) context: Arc<Context>,
    /// Made from what was saved.
    pub(crate) loaded: bool,
}

/// What a library is, before anything of it is started.
pub(crate) fn describe(vendor: &Vendor, settings: &Settings) -> DeviceInfo {
    let simulated = cfg!(any(target_arch = "x86_64", target_arch = "x86"));
    let (name, kind) = match vendor.backend {
        Backend::Htp if simulated => ("Hexagon tensor processor, simulated", DeviceKind::Npu),
        Backend::Htp => ("Hexagon tensor processor", DeviceKind::Npu),
        Backend::Cpu => ("QNN's reference on the CPU", DeviceKind::Cpu),
    };
    let driver = vendor.describe();
    // The number of the chip, where the system tells it.
    let chip = match settings.soc {
        Some(soc) => format!("soc {soc}"),
        None => match std::fs::read_to_string("/sys/devices/soc0/soc_id") {
            Ok(id) => format!("chip {}", id.trim()),
            Err(_) => format!("no chip, {}", std::env::consts::ARCH),
        },
    };
    let plugin = env!("CARGO_PKG_VERSION");
    let what = format!("{:?} {:?} {:?} {plugin}", settings.precision, settings.op, settings.tokens);
    DeviceInfo {
        name: format!("{name} ({})", vendor.provider),
        vendor: "Qualcomm".into(),
        compatibility: format!("{driver}, {:?}, {chip}, {what}", vendor.backend),
        driver,
        kind,
        token_buckets: settings.tokens.clone(),
        ..Default::default()
    }
}

impl Unit {
    /// Starts the backend of a library.
    pub(crate) fn open(vendor: Arc<Vendor>, settings: Settings, log: Log) -> Result<Unit, Error> {
        if vendor.backend == Backend::Cpu && !matches!(settings.precision, None | Some(Numbers::F32)) {
            let text =
                "option precision: QNN's CPU backend computes in f32 only; its codes per channel are wrong";
            return Err(Error::unsupported(text));
        }
        if vendor.is_newer_than_tested() {
            log.write(Level::Warning, &format!("{} is newer than what was tested", vendor.describe()));
        }
        let info = describe(&vendor, &settings);
        let session = Session::new(vendor, settings.soc)?;
        let vote = Vote::new(session.vendor(), settings.power);
        if let Err(error) = &vote {
            log.write(Level::Warning, &error.text);
        }
        let rpc = (session.vendor().backend == Backend::Htp).then(RpcMemory::load).flatten();
        let cache = settings.cache.as_deref().map(Cache::new).transpose()?;
        let buffers = Buffers::new(rpc);
        Ok(Unit { session, settings, info, buffers, cache, log, _vote: vote.unwrap_or_default() })
    }

    /// How matrices of a scheme are multiplied.
    fn choose(&self, scheme: Scheme) -> Result<(Numbers, Support), Error> {
        let numbers = match (self.session.vendor().backend, self.settings.precision) {
            (Backend::Cpu, _) => Numbers::F32,
            (Backend::Htp, precision) => precision.unwrap_or(Numbers::A16),
        };
        let numbers = match (numbers, scheme) {
            (Numbers::A8 | Numbers::A16, Scheme::F16) => Numbers::F16,
            (Numbers::A8 | Numbers::A16, Scheme::F32) => {
                return Err(Error::unsupported(
                    "no 32-bit floats: choose 16-bit ones, codes per channel, or option precision=f32",
                ));
            }
            (Numbers::A8 | Numbers::A16, Scheme::Channel8 | Scheme::Channel4) => numbers,
            (Numbers::A8 | Numbers::A16, _) => {
                return Err(Error::unsupported(
                    "no scales of groups, whose form in QNN would round them: choose codes per channel, 16-bit floats, \
                     or option precision=f16",
                ));
            }
            _ => numbers,
        };
        let itself = matches!((numbers, scheme), (Numbers::F32, Scheme::F32) | (Numbers::F16, Scheme::F16));
        let emulated = !itself && !product::keeps_codes(scheme, numbers);
        Ok((numbers, Support { emulated, outliers: scheme == Scheme::Channel4 }))
    }

    fn build(&self, matrix: &Matrix<'_>, numbers: Numbers) -> Result<Prepared<Weight>, Error> {
        let parts = product::parts(matrix, numbers)?;
        let context = self.session.context()?;
        let mut graphs = Vec::new();
        for tokens in &self.settings.tokens {
            let op = self.settings.op;
            graphs.push(product::compile(&context, &parts, matrix.rows, *tokens, numbers, op)?);
        }
        // The library keeps codes of 4 bits two to a byte.
        let kept = |elements: &Elements| elements.bytes.len() >> u32::from(elements.narrow);
        let bytes: usize = parts.iter().map(|(_, elements)| kept(elements)).sum();
        let parts = parts.into_iter().map(|(part, _)| part).collect();
        let weight = Weight { numbers, rows: matrix.rows, parts, graphs, context, loaded: false };
        Ok(Prepared { weight, bytes: bytes as u64 * self.settings.tokens.len() as u64 })
    }

    /// Runs the graph of one product until no token leaves its range.
    fn multiply(
        &self,
        index: usize,
        product: &mut Product<'_, Weight>,
        (x, cols): (&[f32], usize),
        deadline: Deadline,
    ) -> Result<(), Error> {
        let Weight { numbers, parts, graphs, .. } = product.weight;
        let graph =
            graphs.get(index).ok_or_else(|| Error::invalid("there is no graph for so many tokens"))?;
        let tokens = x.len() / cols.max(1);
        let passing =
            |part| Passing { part, halvings: vec![0; tokens], tokens: Vec::new(), outside: Vec::new() };
        let y = &mut *product.y.values;
        let mut values = Values { numbers: *numbers, x, cols, y, parts: parts.iter().map(passing).collect() };
        loop {
            graph.run(&self.buffers, deadline, &mut values)?;
            if !values.halve()? {
                return Ok(());
            }
        }
    }
}

/// The values of a product on their way through a graph.
struct Values<'a> {
    numbers: Numbers,
    x: &'a [f32],
    cols: usize,
    y: &'a mut [f32],
    parts: Vec<Passing<'a>>,
}

/// What a part knows of the tokens.
struct Passing<'a> {
    part: &'a Part,
    /// How often each was made smaller.
    halvings: Vec<u32>,
    tokens: Vec<Token>,
    /// Those whose results left the range.
    outside: Vec<usize>,
}

impl Values<'_> {
    /// Makes tokens smaller whose results left the range; whether there were any. Codes fit in the end, whatever they are,
    /// if they are results at all; floats may be infinite.
    fn halve(&mut self) -> Result<bool, Error> {
        let mut any = false;
        for Passing { halvings, outside, .. } in &mut self.parts {
            for token in outside.drain(..) {
                match halvings.get_mut(token).filter(|halvings| **halvings < MOST_HALVINGS) {
                    Some(halvings) => {
                        *halvings += 1;
                        any = true;
                    }
                    None if self.numbers.bound().is_some() => {
                        return Err(Error::internal("the graph wrote no results, or some that cannot be"));
                    }
                    None => {}
                }
            }
        }
        Ok(any)
    }
}

impl Exchange for Values<'_> {
    fn write(&mut self, index: usize, bytes: &mut [u8]) {
        if let Some(Passing { part, halvings, tokens, .. }) = self.parts.get_mut(index) {
            *tokens = activations::write(part, self.x, self.cols, halvings, self.numbers, bytes);
        }
    }

    fn read(&mut self, index: usize, bytes: &[u8]) {
        if let Some(Passing { part, tokens, outside, .. }) = self.parts.get_mut(index) {
            *outside = activations::read(part, bytes, self.numbers, tokens, self.y, index > 0);
        }
    }
}

impl PluginDevice for Unit {
    type Weight = Weight;

    const OFFERS: Offers = Offers { plans: true, ..Offers::NONE };

    fn info(&self) -> DeviceInfo {
        self.info.clone()
    }

    fn query(&self, query: &Query) -> Result<Support, Error> {
        let Query::Matmul { scheme, rows, cols, tokens } = *query else {
            return Err(Error::unsupported("this plugin has no neuron clusters"));
        };
        let fits = |a: usize, b: usize| {
            a.checked_mul(b).and_then(|n| n.checked_mul(4)).is_some_and(|n| n > 0 && u32::try_from(n).is_ok())
        };
        if scheme.bytes(rows, cols).is_none()
            || !fits(rows, cols)
            || !fits(tokens, rows)
            || !fits(tokens, cols)
        {
            let text = format!("no {rows} x {cols} matrix of {}: a tensor has at most 4 GiB", scheme.name());
            return Err(Error::unsupported(text));
        }
        Ok(self.choose(scheme)?.1)
    }

    fn prepare(&self, source: &WeightSource<'_>) -> Result<Prepared<Weight>, Error> {
        let Matrices::One(matrix) = &source.matrices else {
            return Err(Error::unsupported("this plugin has no neuron clusters"));
        };
        let (numbers, _) = self.choose(matrix.scheme)?;
        let Some(cache) = &self.cache else { return self.build(matrix, numbers) };
        let key = cache.key(&self.info.compatibility, matrix);
        let shape = Shape::Matrix { rows: matrix.rows, cols: matrix.cols };
        match cache.read(&key).map(|saved| saved.and_then(|saved| self.load(&saved, shape, Some(&key)))) {
            Some(Ok(prepared)) => return Ok(prepared),
            Some(Err(error)) => {
                self.log.write(Level::Warning, &format!("{} is compiled anew: {}", source.name, error.text));
            }
            None => {}
        }
        let prepared = self.build(matrix, numbers)?;
        let saved = plan::write(&prepared.weight, &self.info.compatibility, &key);
        if let Err(error) = saved.and_then(|saved| cache.write(&key, &saved)) {
            self.log.write(Level::Warning, &format!("{} is not kept: {}", source.name, error.text));
        }
        Ok(prepared)
    }

    fn matmul(&self, job: &mut MatmulJob<'_, Weight>) -> Result<Report, Error> {
        let start = Instant::now();
        let position = self.settings.tokens.iter().position(|tokens| *tokens == job.tokens as u64);
        let index = position.ok_or_else(|| Error::invalid("there is no graph for so many tokens"))?;
        for product in &mut job.products {
            self.multiply(index, product, (job.x.values, job.cols), job.deadline)?;
        }
        // Values become codes or halves on the way, so they are always copied.
        Ok(Report { zero_copy_input: false, zero_copy_output: false, device_time: start.elapsed() })
    }

    fn save_plan(
        &self,
        weight: &Weight,
        write: &mut dyn FnMut(&[u8]) -> Result<(), Error>,
    ) -> Result<(), Error> {
        if weight.loaded {
            return Err(Error::unsupported("a weight that was loaded from a plan: keep that plan"));
        }
        write(&plan::write(weight, &self.info.compatibility, &[0; 32])?)
    }

    fn load_plan(&self, plan: &[u8], shape: Shape) -> Result<Prepared<Weight>, Error> {
        self.load(plan, shape, None)
    }
}

impl Unit {
    /// A weight from what was saved, here or by the host. `key` is that of the weight, where it is known.
    fn load(&self, saved: &[u8], shape: Shape, key: Option<&plan::Key>) -> Result<Prepared<Weight>, Error> {
        plan::read(saved, &self.session, &self.settings, &self.info.compatibility, shape, key)
    }
}
