//! A plugin that offers all that the border has: feed-forwards, submitted jobs, cancelling, imported memory, saved plans,
//! and calls from many threads. It multiplies on the CPU with 64-bit sums. The suite runs every case on it.

use std::any::Any;
use std::sync::atomic::{AtomicU64, Ordering};

use neuropil_plugin_sdk::*;

struct Complete;

#[derive(Default)]
struct Unit {
    /// Goes up with every cancel: a job that began before is to end.
    cancels: AtomicU64,
}

/// Matrices as floats: one, or gate, up and down.
struct Weight(Vec<Vec<f32>>);

export_plugin!(Complete);

fn describe() -> DeviceInfo {
    DeviceInfo {
        name: "everything".into(),
        vendor: "neuropil".into(),
        driver: "complete 1".into(),
        compatibility: "complete 1".into(),
        kind: DeviceKind::Other,
        parallel: true,
        memory_kinds: 1,
        memory_alignment: 4096,
        ..Default::default()
    }
}

impl PluginBackend for Complete {
    const NAME: &'static str = "complete";
    const VERSION: &'static str = "1.0";
    type Device = Unit;

    fn new(_log: Log) -> Complete {
        Complete
    }

    fn probe(&self, options: &Options) -> Result<Vec<DeviceInfo>, Error> {
        options.check(&[])?;
        Ok(vec![describe()])
    }

    fn open(&self, index: usize, options: &Options) -> Result<Unit, Error> {
        options.check(&[])?;
        if index == 0 { Ok(Unit::default()) } else { Err(Error::invalid("there is one unit, of index 0")) }
    }
}

impl Unit {
    /// Called between tokens.
    fn go_on(&self, cancels: u64, deadline: Deadline) -> Result<(), Error> {
        if self.cancels.load(Ordering::Relaxed) != cancels {
            return Err(Error::cancelled("cancel was called"));
        }
        if deadline.passed() { Err(Error::timeout("the deadline passed")) } else { Ok(()) }
    }
}

impl PluginDevice for Unit {
    type Weight = Weight;
    const OFFERS: Offers = Offers { cluster: true, submit: true, cancel: true, import: true, plans: true };

    fn info(&self) -> DeviceInfo {
        describe()
    }

    fn query(&self, query: &Query) -> Result<Support, Error> {
        let fits = match *query {
            Query::Matmul { scheme, rows, cols, .. } => scheme.bytes(rows, cols).is_some(),
            Query::Cluster { scheme, down_scheme, neurons, width, .. } => {
                scheme.bytes(neurons, width).is_some() && down_scheme.bytes(width, neurons).is_some()
            }
            _ => return Err(Error::unsupported("this plugin does not know the operation")),
        };
        match fits {
            true => Ok(Support { outliers: true, ..Support::NATIVE }),
            false => Err(Error::unsupported("there is no matrix of this scheme and shape")),
        }
    }

    fn prepare(&self, source: &WeightSource<'_>) -> Result<Prepared<Weight>, Error> {
        let matrices = match source.matrices {
            Matrices::One(matrix) => vec![matrix],
            Matrices::Neurons { gate, up, down } => vec![gate, up, down],
        };
        Ok(prepared(matrices.iter().map(widen).collect()))
    }

    fn matmul(&self, job: &mut MatmulJob<'_, Weight>) -> Result<Report, Error> {
        let cancels = self.cancels.load(Ordering::Relaxed);
        for product in &mut job.products {
            let outputs = product.y.values.chunks_exact_mut(product.rows);
            for (x, y) in job.x.values.chunks_exact(job.cols).zip(outputs) {
                self.go_on(cancels, job.deadline)?;
                multiply(&product.weight.0[0], x, y);
            }
        }
        Ok(Report::default())
    }

    fn cluster(&self, job: &mut ClusterJob<'_, Weight>) -> Result<Report, Error> {
        let cancels = self.cancels.load(Ordering::Relaxed);
        let [gate, up, down] = &job.weight.0[..] else { return Err(Error::invalid("this is no block")) };
        let (mut inner, mut of_up) = (vec![0.0; job.neurons], vec![0.0; job.neurons]);
        for token in 0..job.tokens {
            self.go_on(cancels, job.deadline)?;
            let x = job.x.map_or(&[][..], |x| &x.values[token * job.width..][..job.width]);
            let hidden = job.hidden.as_mut().map(|h| &mut h.values[token * job.neurons..][..job.neurons]);
            match (job.stage.has_gate(), &hidden) {
                (true, _) => multiply(gate, x, &mut inner),
                (false, Some(left)) => inner.copy_from_slice(left),
                (false, None) => return Err(Error::invalid("the stage needs hidden values")),
            }
            if job.stage.has_up() {
                multiply(up, x, &mut of_up);
                inner.iter_mut().zip(&of_up).for_each(|(g, u)| *g = job.activation.apply(*g, *u));
            }
            match (&mut job.y, hidden) {
                (Some(y), _) => multiply(down, &inner, &mut y.values[token * job.width..][..job.width]),
                (None, Some(hidden)) => hidden.copy_from_slice(&inner),
                (None, None) => return Err(Error::invalid("the stage has no output")),
            }
        }
        Ok(Report::default())
    }

    fn cancel(&self) {
        self.cancels.fetch_add(1, Ordering::Relaxed);
    }

    fn import(&self, region: &Region) -> Result<Box<dyn Any + Send + Sync>, Error> {
        Ok(Box::new(region.bytes))
    }

    fn save_plan(
        &self,
        weight: &Weight,
        write: &mut dyn FnMut(&[u8]) -> Result<(), Error>,
    ) -> Result<(), Error> {
        for matrix in &weight.0 {
            write(&(matrix.len() as u64).to_le_bytes())?;
            matrix.iter().try_for_each(|value| write(&value.to_le_bytes()))?;
        }
        Ok(())
    }

    fn load_plan(&self, mut plan: &[u8], _shape: Shape) -> Result<Prepared<Weight>, Error> {
        let mut matrices = Vec::new();
        while let Some((len, rest)) = plan.split_first_chunk::<8>() {
            let bytes = usize::try_from(u64::from_le_bytes(*len)).ok().and_then(|len| len.checked_mul(4));
            let matrix = bytes.and_then(|bytes| rest.split_at_checked(bytes));
            let (matrix, rest) = matrix.ok_or_else(|| Error::invalid("the plan is too short"))?;
            matrices.push(matrix.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect());
            plan = rest;
        }
        Ok(prepared(matrices))
    }
}

fn prepared(matrices: Vec<Vec<f32>>) -> Prepared<Weight> {
    let bytes = matrices.iter().map(|matrix| size_of_val(&matrix[..]) as u64).sum();
    Prepared { weight: Weight(matrices), bytes }
}

fn widen(matrix: &Matrix<'_>) -> Vec<f32> {
    let mut values = vec![0.0; matrix.rows * matrix.cols];
    for (row, out) in values.chunks_exact_mut(matrix.cols).enumerate() {
        matrix.widen_row(row, out);
    }
    values
}

fn multiply(w: &[f32], x: &[f32], y: &mut [f32]) {
    for (w, y) in w.chunks_exact(x.len()).zip(y) {
        *y = w.iter().zip(x).map(|(w, x)| f64::from(*w) * f64::from(*x)).sum::<f64>() as f32;
    }
}
