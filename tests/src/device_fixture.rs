//! Jobs for a device alone, with the right results beside them: what every device must get right, whoever made it.
//!
//! A [`Case`] builds weights and inputs, runs them through a device as the engine would, and says how far the
//! outputs are from the exact ones. The bound is the caller's: it depends on how the device keeps activations.

use std::time::Duration;

use neuropil_device::quant::{bundle_row, bundle_row_bytes};
use neuropil_device::{
    Activation, Arena, Buffer, BundleLayout, ClusterJob, ClusterWeights, CompletionQueue, DType, Device,
    DeviceError, MatmulJob, Matrix, PreparedWeight, Product, RowSource, SLOT_ALIGNMENT, Stage, Submission,
    WeightSource,
};

use crate::reference::{activate, multiply};
use crate::toy::Weight;

/// The shape of a piece of work.
#[derive(Clone, Copy, Debug)]
pub struct Case {
    /// Type of the weights (gate and up in a cluster).
    pub dtype: DType,
    /// Type of the down weights of a cluster.
    pub down_dtype: DType,
    /// Rows of a matrix, neurons of a cluster.
    pub rows: usize,
    /// Width of the input.
    pub cols: usize,
    /// Tokens.
    pub tokens: usize,
}

/// A cluster's weights come as a prepared block, or as bundles in an arena.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// Hot.
    Block,
    /// Cold.
    Bundles,
}

/// Every way from an input to an output: the stages, one after the other.
pub const WAYS: [&[Stage]; 4] = [
    &[Stage::Fused],
    &[Stage::Gate, Stage::UpDown],
    &[Stage::GateUp, Stage::Down],
    &[Stage::Gate, Stage::Up, Stage::Down],
];

/// What a device made of a case: the outputs, and the exact ones.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// The device's, token after token.
    pub got: Vec<f32>,
    /// The exact ones.
    pub want: Vec<f64>,
}

impl Outcome {
    /// The greatest difference, as a share of the root mean square of the exact outputs; NaN counts as infinite.
    pub fn error(&self) -> f64 {
        let square: f64 = self.want.iter().map(|w| w * w).sum();
        let size = (square / self.want.len().max(1) as f64).sqrt().max(f64::MIN_POSITIVE);
        let off = |(g, w): (&f32, &f64)| if g.is_nan() { f64::INFINITY } else { (f64::from(*g) - w).abs() };
        self.got.iter().zip(&self.want).map(off).fold(0.0, f64::max) / size
    }
}

/// What stands in outputs before a job: a job that overwrites must not see it, one that accumulates adds to it.
const BEFORE: f32 = 0.5;

impl Case {
    /// A matmul of two products, one that overwrites and one that accumulates, which share their input.
    ///
    /// # Errors
    /// The device's.
    pub fn matmul(&self, device: &dyn Device) -> Result<Outcome, DeviceError> {
        let weights = ["first", "second"].map(|name| self.weight(name, self.dtype, self.rows, self.cols));
        let x = self.input();
        let mut job = MatmulJob::new(self.tokens, filled(device, &x)?.read()?);
        let outputs = [self.output(device, self.rows)?, self.output(device, self.rows)?];
        for (index, (weight, y)) in weights.iter().zip(&outputs).enumerate() {
            let weight = device.prepare(WeightSource::Matrix(matrix(weight)), None)?;
            job = job.with(Product { weight, y: y.write()?, accumulate: index == 1 });
        }
        run(device, |submission| device.submit_matmul(submission), job)?;
        let mut outcome = Outcome { got: Vec::new(), want: Vec::new() };
        for (index, (weight, y)) in weights.iter().zip(&outputs).enumerate() {
            outcome.got.extend(y.read()?.slice::<f32>());
            let before = if index == 1 { f64::from(BEFORE) } else { 0.0 };
            for x in x.chunks_exact(self.cols) {
                outcome.want.extend(multiply(weight, &exact(x)).iter().map(|y| y + before));
            }
        }
        Ok(outcome)
    }

    /// A cluster that overwrites, by these stages, the last of which has the sum.
    ///
    /// # Errors
    /// The device's.
    pub fn cluster(
        &self,
        device: &dyn Device,
        activation: Activation,
        form: Form,
        stages: &[Stage],
    ) -> Result<Outcome, DeviceError> {
        let neurons = Neurons::of(self);
        let input = self.input();
        let x = filled(device, &input)?;
        let y = self.output(device, self.cols)?;
        let hidden = device.alloc(self.tokens * self.rows * 4)?;
        let block = neurons.prepare(device, form)?;
        let arena = neurons.arena()?;
        for stage in stages {
            let job = ClusterJob {
                stage: *stage,
                tokens: self.tokens,
                activation,
                weights: match &block {
                    Some(block) => ClusterWeights::Block(block.clone()),
                    None => {
                        let mut slots = arena.take_list();
                        slots.extend(0..self.rows as u32);
                        let list = device.alloc(self.rows * 4)?;
                        list.write()?.slice_mut::<u32>().copy_from_slice(&slots);
                        let (slots, positions) = (arena.pin(slots)?, list.read()?);
                        ClusterWeights::Bundles { layout: neurons.layout(), slots, positions }
                    }
                },
                x: x.read()?,
                hidden: if stage.has_hidden() { Some(hidden.write()?) } else { None },
                y: if stage.has_down() { Some(y.write()?) } else { None },
                accumulate: false,
            };
            run(device, |submission| device.submit_clusters(&mut vec![submission]), job)?;
        }
        let got = y.read()?.slice::<f32>().to_vec();
        let want = input.chunks_exact(self.cols).flat_map(|x| neurons.exact(&exact(x), activation)).collect();
        Ok(Outcome { got, want })
    }

    fn weight(&self, name: &str, dtype: DType, rows: usize, cols: usize) -> Weight {
        let seed = name.bytes().map(f32::from).sum::<f32>();
        let values: Vec<f32> = (0..rows * cols).map(|i| (i as f32 * 0.377 + seed).sin()).collect();
        Weight::new(name, dtype, rows, cols, &values)
    }

    fn input(&self) -> Vec<f32> {
        (0..self.tokens * self.cols).map(|i| (i as f32 * 0.731).cos() + 0.2).collect()
    }

    fn output(&self, device: &dyn Device, width: usize) -> Result<Buffer, DeviceError> {
        filled(device, &vec![BEFORE; self.tokens * width])
    }
}

/// The three matrices of a cluster.
struct Neurons {
    gate: Weight,
    up: Weight,
    /// `width × neurons` for a block.
    down: Weight,
    /// `neurons × width`, for bundles: the same values, if the type keeps them along both axes.
    down_rows: Weight,
}

impl Neurons {
    fn of(case: &Case) -> Neurons {
        let down_rows = case.weight("down", case.down_dtype, case.rows, case.cols);
        let turned: Vec<f32> = (0..case.cols)
            .flat_map(|c| (0..case.rows).map(move |r| (r, c)))
            .map(|(r, c)| down_rows.values[r * case.cols + c])
            .collect();
        Neurons {
            gate: case.weight("gate", case.dtype, case.rows, case.cols),
            up: case.weight("up", case.dtype, case.rows, case.cols),
            down: Weight::new("down", case.down_dtype, case.cols, case.rows, &turned),
            down_rows,
        }
    }

    fn prepare(&self, device: &dyn Device, form: Form) -> Result<Option<PreparedWeight>, DeviceError> {
        let source = || WeightSource::Neurons {
            gate: matrix(&self.gate),
            up: matrix(&self.up),
            down: matrix(&self.down),
        };
        if form == Form::Block { device.prepare(source(), None).map(Some) } else { Ok(None) }
    }

    fn layout(&self) -> BundleLayout {
        let row = bundle_bytes(&self.gate);
        let down = (2 * row).next_multiple_of(64);
        BundleLayout {
            width: self.gate.cols,
            dtype: self.gate.dtype,
            down_dtype: self.down.dtype,
            gate: 0,
            up: row,
            down,
        }
    }

    /// One slot per neuron.
    fn arena(&self) -> Result<Arena, DeviceError> {
        let layout = self.layout();
        let slot_bytes = layout.down + bundle_bytes(&self.down_rows);
        let arena = Arena::new(self.gate.rows, slot_bytes, SLOT_ALIGNMENT)?;
        for neuron in 0..self.gate.rows {
            let mut slot = arena.write(neuron)?;
            for (weight, at) in
                [(&self.gate, layout.gate), (&self.up, layout.up), (&self.down_rows, layout.down)]
            {
                let size = weight.bytes.len() / weight.rows;
                let row = &weight.bytes[neuron * size..][..size];
                bundle_row(
                    weight.dtype,
                    weight.cols,
                    row,
                    &mut slot.bytes_mut()[at..][..bundle_bytes(weight)],
                );
            }
        }
        Ok(arena)
    }

    fn exact(&self, x: &[f64], activation: Activation) -> Vec<f64> {
        let (gate, up) = (multiply(&self.gate, x), multiply(&self.up, x));
        let (name, threshold) = (activation.kind.name(), f64::from(activation.threshold));
        let hidden: Vec<f64> = gate.iter().zip(&up).map(|(g, u)| activate(name, threshold, *g, *u)).collect();
        multiply(&self.down, &hidden)
    }
}

/// Bytes of a weight's row in a bundle.
fn bundle_bytes(weight: &Weight) -> usize {
    bundle_row_bytes(weight.dtype, weight.cols).expect("a toy's rows are whole blocks")
}

/// The matrix of a weight, for [`Device::prepare`].
pub fn matrix(weight: &Weight) -> Matrix<'_> {
    Matrix { dtype: weight.dtype, rows: weight.rows, cols: weight.cols, data: weight }
}

impl RowSource for Weight {
    fn len(&self) -> usize {
        self.bytes.len()
    }

    fn read(&self, offset: usize, out: &mut [u8]) -> Result<(), DeviceError> {
        self.bytes.as_slice().read(offset, out)
    }
}

/// Submits a job and waits for its end, for at most ten seconds.
///
/// # Errors
/// The job's.
///
/// # Panics
/// When the job does not end.
pub fn run<J>(device: &dyn Device, submit: impl FnOnce(Submission<J>), job: J) -> Result<(), DeviceError> {
    let queue = CompletionQueue::new();
    submit(Submission::new(job, queue.completion(7)));
    for _ in 0..10_000 {
        while device.help() {}
        if let Some((token, result)) = queue.try_next() {
            assert_eq!((token, queue.try_next()), (7, None), "a job ends once");
            return result;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    panic!("{} never finished a job", device.info().name);
}

fn filled(device: &dyn Device, values: &[f32]) -> Result<Buffer, DeviceError> {
    let buffer = device.alloc(values.len() * 4)?;
    buffer.write()?.slice_mut::<f32>().copy_from_slice(values);
    Ok(buffer)
}

fn exact(x: &[f32]) -> Vec<f64> {
    x.iter().map(|v| f64::from(*v)).collect()
}
