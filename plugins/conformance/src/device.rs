//! A unit behind the contract of `neuropil-device`: a backend of the tree, or a plugin as the host makes a device of it.

use neuropil_device::quant::{dequantize_row, quantize_row};
use neuropil_device::{
    Activation, Buffer, ClusterJob, ClusterWeights, CompletionQueue, DType, Device, DeviceError, MatmulJob,
    Matrix, OpShape, PreparedWeight, Product, Submission, Support, WeightSource,
};
use neuropil_plugin_abi as abi;

use crate::case::Cases;
use crate::groups;
use crate::raw::{Cluster, Failure, MARK};
use crate::reference::{Elements, widen};
use crate::sample::{Fill, Kind, Random};
use crate::subject::{Op, Question, Sampled, Stroke, Subject};

/// A device of neuropil.
#[derive(Clone, Copy)]
pub struct Unit<'d>(pub &'d dyn Device);

/// A matrix of a type of model files.
pub struct TypedMatrix {
    dtype: DType,
    rows: usize,
    cols: usize,
    data: Vec<u8>,
    values: Vec<f64>,
}

impl TypedMatrix {
    /// The matrix, borrowed.
    pub fn matrix(&self) -> Matrix<'_> {
        Matrix { dtype: self.dtype, rows: self.rows, cols: self.cols, data: &self.data }
    }
}

impl Sampled for TypedMatrix {
    fn elements(&self) -> Elements<'_> {
        Elements { values: &self.values, cols: self.cols }
    }
}

/// What a device says, with the code that a plugin would have.
pub(crate) fn failure(error: &DeviceError) -> Failure {
    let code = match error {
        DeviceError::Unsupported { .. } => abi::NP_UNSUPPORTED,
        DeviceError::OutOfMemory { .. } => abi::NP_OUT_OF_MEMORY,
        DeviceError::Lost { .. } => abi::NP_LOST,
        DeviceError::Shape { .. }
        | DeviceError::Mismatch { .. }
        | DeviceError::ForeignHandle { .. }
        | DeviceError::Leased
        | DeviceError::ReadOnly => abi::NP_INVALID,
        _ => abi::NP_INTERNAL,
    };
    Failure { code, text: error.to_string() }
}

/// Values after an output that nobody may touch.
const MARKS: usize = 16;

/// A buffer of these values and marks behind them.
pub(crate) fn marked(device: &dyn Device, values: &[f32]) -> Result<Buffer, Failure> {
    let buffer = device.alloc((values.len() + MARKS) * 4).map_err(|error| failure(&error))?;
    let mut lease = buffer.write().map_err(|error| failure(&error))?;
    let (inner, marks) = lease.slice_mut::<f32>().split_at_mut(values.len());
    inner.copy_from_slice(values);
    marks.fill(MARK);
    drop(lease);
    Ok(buffer)
}

/// The values of such a buffer, if the marks are whole and no job holds it any more.
pub(crate) fn opened(buffer: &Buffer) -> Result<Vec<f32>, Failure> {
    let lease = buffer.write().map_err(|_| Failure::breach("a job that ended still holds a lease"))?;
    let values: Vec<f32> = lease.slice().to_vec();
    let inner = values.len().saturating_sub(MARKS);
    if values[inner..].iter().any(|value| value.to_bits() != MARK.to_bits()) {
        return Err(Failure::breach("values beside an output were written"));
    }
    Ok(values[..inner].to_vec())
}

fn unchanged(buffer: &Buffer, was: &[f32], what: &str) -> Result<(), Failure> {
    match opened(buffer)?.iter().zip(was).all(|(is, was)| is.to_bits() == was.to_bits()) {
        true => Ok(()),
        false => Err(Failure::breach(format!("{what}, an input of the job, was written"))),
    }
}

impl Unit<'_> {
    /// Submits with `submit` and waits for the end, which must be told once.
    pub(crate) fn finish(&self, submit: impl FnOnce(neuropil_device::Completion)) -> Result<(), Failure> {
        let queue = CompletionQueue::new();
        submit(queue.completion(7));
        let (token, result) = queue.wait(|| self.0.help());
        if token != 7 || queue.try_next().is_some() {
            return Err(Failure::breach("the end of a job was told twice"));
        }
        result.map_err(|error| failure(&error))
    }

    /// A stage as a job, with its buffers: x, hidden and y.
    pub(crate) fn cluster_job(
        &self,
        weight: &PreparedWeight,
        stroke: &Stroke<'_>,
    ) -> Result<(ClusterJob, [Buffer; 3]), Failure> {
        let lease = |error: DeviceError| failure(&error);
        let buffers = [
            marked(self.0, stroke.x)?,
            marked(self.0, stroke.hidden)?,
            marked(self.0, &vec![f32::NAN; stroke.y])?,
        ];
        let [x, hidden, y] = &buffers;
        let job = ClusterJob {
            stage: stroke.stage,
            tokens: stroke.tokens,
            activation: Activation { kind: stroke.activation, threshold: stroke.threshold },
            weights: ClusterWeights::Block(weight.clone()),
            x: x.read().map_err(lease)?,
            hidden: stroke.stage.has_hidden().then(|| hidden.write()).transpose().map_err(lease)?,
            y: stroke.stage.has_down().then(|| y.write()).transpose().map_err(lease)?,
            accumulate: false,
        };
        Ok((job, buffers))
    }

    /// A product as a job, with its input and outputs.
    pub(crate) fn matmul_job(
        &self,
        weights: &[&PreparedWeight],
        x: &[f32],
        tokens: usize,
    ) -> Result<(MatmulJob, Buffer, Vec<Buffer>), Failure> {
        let lease = |error: DeviceError| failure(&error);
        let input = marked(self.0, x)?;
        let mut job = MatmulJob::new(tokens, input.read().map_err(lease)?);
        let mut outputs = Vec::new();
        for weight in weights {
            let rows = match weight.shape() {
                neuropil_device::WeightShape::Matrix { rows, .. } => rows,
                neuropil_device::WeightShape::Neurons { width, .. } => width,
            };
            let y = marked(self.0, &vec![f32::NAN; tokens * rows])?;
            job = job.with(Product {
                weight: (*weight).clone(),
                y: y.write().map_err(lease)?,
                accumulate: false,
            });
            outputs.push(y);
        }
        Ok((job, input, outputs))
    }
}

impl Subject for Unit<'_> {
    type Sample = TypedMatrix;
    type Weight<'a>
        = PreparedWeight
    where
        Self: 'a;

    fn kinds(&self) -> Vec<Kind> {
        DType::ALL.map(Kind::Type).to_vec()
    }

    fn buckets(&self) -> &[usize] {
        // A device fits tokens to its buckets by itself.
        &[]
    }

    fn is_parallel(&self) -> bool {
        true
    }

    fn ask(&self, question: &Question) -> Result<(), Failure> {
        let Question { rows, cols, tokens, .. } = *question;
        let dtype = |kind| match kind {
            Kind::Type(dtype) => Ok(dtype),
            _ => Err(Failure::unsupported("it takes types of model files")),
        };
        let op = match question.op {
            Op::Matmul => OpShape::Matmul { dtype: dtype(question.kind)?, rows, cols, tokens },
            Op::Cluster(stage, _, down) => OpShape::Cluster {
                stage,
                dtype: dtype(question.kind)?,
                down_dtype: dtype(down)?,
                neurons: rows,
                width: cols,
                tokens,
                bundles: false,
            },
        };
        match self.0.supports(&op) {
            Support::Native | Support::Emulated => Ok(()),
            Support::No(reason) => Err(Failure::unsupported(reason)),
        }
    }

    fn sample(&self, kind: Kind, (rows, cols): (usize, usize), fill: Fill, seed: u64) -> TypedMatrix {
        let Kind::Type(dtype) = kind else {
            return TypedMatrix { dtype: DType::F32, rows: 0, cols: 1, data: Vec::new(), values: Vec::new() };
        };
        let mut random = Random::new(seed);
        let each = dtype.row_bytes(cols).unwrap_or(0);
        let mut data = vec![0; each * rows];
        let mut values = Vec::with_capacity(rows * cols);
        let mut wide = vec![0f32; cols];
        for (row, bytes) in data.chunks_exact_mut(each.max(1)).enumerate() {
            let drawn: Vec<f32> =
                (0..cols).map(|col| fill.value((row, col), (rows, cols), &mut random)).collect();
            quantize_row(dtype, &drawn, bytes);
            dequantize_row(dtype, bytes, &mut wide);
            values.extend(widen(&wide));
        }
        TypedMatrix { dtype, rows, cols, data, values }
    }

    fn prepare(&self, samples: &[&TypedMatrix]) -> Result<PreparedWeight, Failure> {
        let source = match samples {
            [one] => WeightSource::Matrix(one.matrix()),
            [gate, up, down] => {
                WeightSource::Neurons { gate: gate.matrix(), up: up.matrix(), down: down.matrix() }
            }
            _ => return Err(Failure::breach("a weight is one matrix or three")),
        };
        self.0.prepare(source, None).map_err(|error| failure(&error))
    }

    fn matmul(
        &self,
        weights: &[&PreparedWeight],
        x: &[f32],
        tokens: usize,
    ) -> Result<Vec<Vec<f32>>, Failure> {
        let (job, input, outputs) = self.matmul_job(weights, x, tokens)?;
        self.finish(|completion| self.0.submit_matmul(Submission::new(job, completion)))?;
        unchanged(&input, x, "x")?;
        outputs.iter().map(opened).collect()
    }

    fn cluster(&self, weight: &PreparedWeight, stroke: &Stroke<'_>) -> Result<Cluster, Failure> {
        let (job, [x, hidden, y]) = self.cluster_job(weight, stroke)?;
        self.finish(|completion| {
            let mut batch = vec![Submission::new(job, completion)];
            self.0.submit_clusters(&mut batch);
        })?;
        unchanged(&x, stroke.x, "x")?;
        Ok(Cluster { hidden: opened(&hidden)?, y: opened(&y)? })
    }

    fn own_cases<'a>(&'a self, group: &str, cases: &mut Cases<'a>) {
        match group {
            "info" => groups::device::info(self, cases),
            "completion" => groups::device::completion(self, cases),
            "errors" => groups::device::errors(self, cases),
            _ => {}
        }
    }
}
