//! The unit: what it takes, and jobs.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use neuropil_plugin_sdk::{
    ClusterJob, DeviceInfo, Error, MatmulJob, Matrices, Matrix, Offers, PluginDevice, Prepared, Query,
    Report, Scheme, Shape, Stage, Support, WeightSource,
};

use crate::elements::Elements;
use crate::fault::{Calls, Function};
use crate::plan;
use crate::settings::Settings;

/// One open unit.
pub struct Unit {
    info: DeviceInfo,
    settings: Settings,
    calls: Calls,
    used: Arc<AtomicU64>,
}

/// A weight on the unit.
pub struct Weight {
    /// One matrix, or gate, up and down.
    parts: Vec<Elements>,
    bytes: u64,
    used: Arc<AtomicU64>,
}

impl Drop for Weight {
    fn drop(&mut self) {
        self.used.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

impl Unit {
    pub(crate) fn new(info: DeviceInfo, settings: Settings) -> Unit {
        Unit { info, settings, calls: Calls::default(), used: Arc::default() }
    }

    fn takes(&self, scheme: Scheme) -> Result<(), Error> {
        if self.settings.schemes.contains(&scheme) {
            return Ok(());
        }
        let names: Vec<&str> = self.settings.schemes.iter().map(|scheme| scheme.name()).collect();
        Err(Error::unsupported(format!("weights of {}: it takes {}", scheme.name(), names.join(", "))))
    }

    fn pack(&self, matrix: &Matrix<'_>) -> Result<Elements, Error> {
        self.takes(matrix.scheme)?;
        if matrix.outliers.is_some() && !self.settings.outliers {
            return Err(Error::unsupported("outlier columns"));
        }
        Ok(Elements::new(matrix))
    }

    fn keep(&self, parts: Vec<Elements>) -> Result<Prepared<Weight>, Error> {
        let bytes = parts.iter().map(Elements::bytes).sum();
        let used = self.used.fetch_add(bytes, Ordering::Relaxed) + bytes;
        let weight = Weight { parts, bytes, used: self.used.clone() };
        if self.settings.memory != 0 && used > self.settings.memory {
            return Err(Error::out_of_memory(format!(
                "{used} bytes of weights: it has {}",
                self.settings.memory
            )));
        }
        Ok(Prepared { weight, bytes })
    }

    fn multiply(&self, weight: &Elements, x: &[f32], y: &mut [f32]) {
        weight.multiply(x, y, self.settings.activation_limit);
    }

    fn report(&self) -> Report {
        std::thread::sleep(self.settings.latency);
        Report { device_time: self.settings.latency, ..Report::default() }
    }
}

impl PluginDevice for Unit {
    type Weight = Weight;
    const OFFERS: Offers = Offers { cluster: true, plans: true, ..Offers::NONE };

    fn info(&self) -> DeviceInfo {
        self.info.clone()
    }

    fn query(&self, query: &Query) -> Result<Support, Error> {
        self.settings.fault.strike(&self.calls, Function::Query, 0)?;
        match query {
            Query::Matmul { scheme, .. } => self.takes(*scheme)?,
            Query::Cluster { .. } if !self.settings.clusters => {
                return Err(Error::unsupported("blocks of neurons"));
            }
            Query::Cluster { scheme, down_scheme, .. } => {
                self.takes(*scheme)?;
                self.takes(*down_scheme)?;
            }
            _ => return Err(Error::unsupported("an operation that it does not know")),
        }
        Ok(Support { emulated: false, outliers: self.settings.outliers })
    }

    fn prepare(&self, source: &WeightSource<'_>) -> Result<Prepared<Weight>, Error> {
        let (Matrices::One(first) | Matrices::Neurons { gate: first, .. }) = &source.matrices;
        self.settings.fault.strike(&self.calls, Function::Prepare, first.cols)?;
        let parts = match &source.matrices {
            Matrices::One(matrix) => vec![self.pack(matrix)?],
            Matrices::Neurons { gate, up, down } => vec![self.pack(gate)?, self.pack(up)?, self.pack(down)?],
        };
        std::thread::sleep(self.settings.compile);
        self.keep(parts)
    }

    fn save_plan(
        &self,
        weight: &Weight,
        write: &mut dyn FnMut(&[u8]) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let columns = weight.parts.first().map_or(0, |part| part.cols);
        self.settings.fault.strike(&self.calls, Function::SavePlan, columns)?;
        weight.parts.iter().try_for_each(|part| plan::save(part, write))
    }

    fn load_plan(&self, plan: &[u8], shape: Shape) -> Result<Prepared<Weight>, Error> {
        let (Shape::Matrix { cols, .. } | Shape::Neurons { width: cols, .. }) = shape;
        self.settings.fault.strike(&self.calls, Function::LoadPlan, cols)?;
        self.keep(plan::load(plan, shape)?)
    }

    fn matmul(&self, job: &mut MatmulJob<'_, Weight>) -> Result<Report, Error> {
        let spoil = self.settings.fault.strike(&self.calls, Function::Matmul, job.cols)?;
        for product in &mut job.products {
            let [matrix] = &product.weight.parts[..] else {
                return Err(Error::invalid("a block of neurons"));
            };
            self.multiply(matrix, job.x.values, product.y.values);
            spoil.apply(product.y.values);
        }
        Ok(self.report())
    }

    fn cluster(&self, job: &mut ClusterJob<'_, Weight>) -> Result<Report, Error> {
        let spoil = self.settings.fault.strike(&self.calls, Function::Cluster, job.width)?;
        let [gate, up, down] = &job.weight.parts[..] else { return Err(Error::invalid("one matrix")) };
        let values = || vec![0.0; job.tokens * job.neurons];
        let x = job.x.map_or(&[][..], |x| x.values);
        let mut hidden = match &job.hidden {
            Some(hidden) if !job.stage.has_gate() => hidden.values.to_vec(),
            _ => values(),
        };
        if job.stage.has_gate() {
            self.multiply(gate, x, &mut hidden);
        }
        if job.stage.has_up() {
            let mut ups = values();
            self.multiply(up, x, &mut ups);
            hidden.iter_mut().zip(ups).for_each(|(h, up)| *h = job.activation.apply(*h, up));
        }
        if let Some(y) = &mut job.y {
            self.multiply(down, &hidden, y.values);
            spoil.apply(y.values);
        }
        if let (Some(out), Stage::Gate | Stage::Up | Stage::GateUp) = (&mut job.hidden, job.stage) {
            spoil.apply(&mut hidden);
            out.values.copy_from_slice(&hidden);
        }
        Ok(self.report())
    }
}
