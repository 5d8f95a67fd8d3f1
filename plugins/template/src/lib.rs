//! A plugin that multiplies on the CPU: the starting point for a plugin of your own.
//!
//! Replace `Unit` by what opens your unit, `Weight` by its form of a weight, and the loops by its work. What arrives
//! here has been checked by the SDK.

use std::time::Instant;

use neuropil_plugin_sdk::*;

struct Template;

struct Unit;

/// Matrices as the unit wants them: plain floats. One, or gate, up and down.
struct Weight(Vec<Vec<f32>>);

export_plugin!(Template);

fn describe() -> DeviceInfo {
    DeviceInfo {
        name: "one thread of the CPU".into(),
        vendor: "neuropil".into(),
        driver: concat!("template ", env!("CARGO_PKG_VERSION")).into(),
        kind: DeviceKind::Cpu,
        // Nothing in here changes after it was made.
        parallel: true,
        ..Default::default()
    }
}

impl PluginBackend for Template {
    const NAME: &'static str = "template";
    const VERSION: &'static str = env!("CARGO_PKG_VERSION");
    type Device = Unit;

    fn new(_log: Log) -> Template {
        Template
    }

    fn probe(&self, options: &Options) -> Result<Vec<DeviceInfo>, Error> {
        options.check(&[])?;
        Ok(vec![describe()])
    }

    fn open(&self, index: usize, options: &Options) -> Result<Unit, Error> {
        options.check(&[])?;
        if index == 0 { Ok(Unit) } else { Err(Error::invalid("there is one unit, of index 0")) }
    }
}

impl PluginDevice for Unit {
    type Weight = Weight;

    const OFFERS: Offers = Offers { cluster: true, ..Offers::NONE };

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
        if !fits {
            return Err(Error::unsupported("there is no matrix of this scheme and shape"));
        }
        Ok(Support { outliers: true, ..Support::NATIVE })
    }

    fn prepare(&self, source: &WeightSource<'_>) -> Result<Prepared<Weight>, Error> {
        let matrices = match source.matrices {
            Matrices::One(matrix) => vec![matrix],
            Matrices::Neurons { gate, up, down } => vec![gate, up, down],
        };
        let weight = Weight(matrices.iter().map(widen).collect::<Result<_, _>>()?);
        let bytes = weight.0.iter().map(|matrix| size_of_val(&matrix[..]) as u64).sum();
        Ok(Prepared { weight, bytes })
    }

    fn matmul(&self, job: &mut MatmulJob<'_, Weight>) -> Result<Report, Error> {
        let start = Instant::now();
        for product in &mut job.products {
            let outputs = product.y.values.chunks_exact_mut(product.rows);
            for (x, y) in job.x.values.chunks_exact(job.cols).zip(outputs) {
                in_time(job.deadline)?;
                multiply(&product.weight.0[0], x, y);
            }
        }
        Ok(report(start))
    }

    fn cluster(&self, job: &mut ClusterJob<'_, Weight>) -> Result<Report, Error> {
        let start = Instant::now();
        let [gate, up, down] = &job.weight.0[..] else { return Err(Error::invalid("this is no block")) };
        let mut inner = vec![0.0; job.neurons];
        let mut of_up = vec![0.0; job.neurons];
        for token in 0..job.tokens {
            in_time(job.deadline)?;
            let x = job.x.map_or(&[][..], |x| &x.values[token * job.width..][..job.width]);
            let hidden = job.hidden.as_mut().map(|h| &mut h.values[token * job.neurons..][..job.neurons]);
            match (job.stage.has_gate(), &hidden) {
                (true, _) => multiply(gate, x, &mut inner),
                (false, Some(left)) => inner.copy_from_slice(left),
                (false, None) => return Err(Error::invalid("the stage needs hidden values")),
            }
            if job.stage.has_up() {
                multiply(up, x, &mut of_up);
                for (g, u) in inner.iter_mut().zip(&of_up) {
                    *g = job.activation.apply(*g, *u);
                }
            }
            match (&mut job.y, hidden) {
                (Some(y), _) => multiply(down, &inner, &mut y.values[token * job.width..][..job.width]),
                (None, Some(hidden)) => hidden.copy_from_slice(&inner),
                (None, None) => return Err(Error::invalid("the stage has no output")),
            }
        }
        Ok(report(start))
    }
}

/// Puts a matrix into the unit's form.
fn widen(matrix: &Matrix<'_>) -> Result<Vec<f32>, Error> {
    let len = matrix.rows.checked_mul(matrix.cols);
    let mut values = Vec::new();
    len.and_then(|len| values.try_reserve_exact(len).ok())
        .ok_or_else(|| Error::out_of_memory("there is no memory for a weight"))?;
    values.resize(matrix.rows * matrix.cols, 0.0);
    for (row, out) in values.chunks_exact_mut(matrix.cols).enumerate() {
        matrix.widen_row(row, out);
    }
    Ok(values)
}

/// The work: `y[r] = Σ w[r, c] · x[c]`.
fn multiply(w: &[f32], x: &[f32], y: &mut [f32]) {
    for (w, y) in w.chunks_exact(x.len()).zip(y) {
        *y = w.iter().zip(x).map(|(w, x)| f64::from(*w) * f64::from(*x)).sum::<f64>() as f32;
    }
}

fn in_time(deadline: Deadline) -> Result<(), Error> {
    if deadline.passed() { Err(Error::timeout("the deadline passed")) } else { Ok(()) }
}

fn report(start: Instant) -> Report {
    Report { zero_copy_input: true, zero_copy_output: true, device_time: start.elapsed() }
}
