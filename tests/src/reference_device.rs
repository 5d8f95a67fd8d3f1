//! A device that is nothing but the definition of the jobs: weights as F32, sums in f64, one thread.
//!
//! With it the engine is tested on a unit that is not the CPU backend, which proves that the runtime knows the
//! contract and no backend. It can do everything the contract names except whole blocks.

use std::sync::Arc;

use neuropil_device::quant::{bundle_row_bytes, dequantize_bundle_row};
use neuropil_device::{
    BundleLayout, ClusterJob, ClusterWeights, DType, Device, DeviceError, DeviceId, DeviceInfo, DeviceKind,
    MatmulJob, Matrix, OpShape, PinnedSlots, PreparedWeight, Submission, Support, WeightShape, WeightSource,
};

use crate::{codec, reference};

/// See the module.
pub struct ReferenceDevice {
    id: DeviceId,
    info: DeviceInfo,
}

/// A weight as the device keeps it.
enum Decoded {
    Matrix(Vec<f32>),
    Neurons(Neurons),
}

/// A block of neurons: one row of each per neuron, so down lies transposed.
struct Neurons {
    gate: Vec<f32>,
    up: Vec<f32>,
    down: Vec<f32>,
}

impl ReferenceDevice {
    /// A device.
    pub fn new() -> Arc<ReferenceDevice> {
        Arc::new(ReferenceDevice { id: DeviceId::new(), info: DeviceInfo::new("reference", DeviceKind::Cpu) })
    }

    fn own<'a>(&self, weight: &'a PreparedWeight) -> Result<&'a Decoded, DeviceError> {
        weight.downcast(self.id, &self.info.name)
    }

    fn matmul(&self, job: &mut MatmulJob) -> Result<(), DeviceError> {
        let tokens = job.tokens;
        let (x, products) = job.parts_mut();
        for product in products {
            let (rows, cols, w) = match (product.weight.shape(), self.own(&product.weight)?) {
                (WeightShape::Matrix { rows, cols }, Decoded::Matrix(w)) => (rows, cols, w),
                _ => return Err(self.unsupported("a block of neurons as a matrix")),
            };
            let x = &x.slice::<f32>()[..tokens * cols];
            let y = &mut product.y.slice_mut::<f32>()[..tokens * rows];
            for (x, y) in x.chunks_exact(cols).zip(y.chunks_exact_mut(rows)) {
                for (w, y) in w.chunks_exact(cols).zip(y) {
                    let start = if product.accumulate { f64::from(*y) } else { 0.0 };
                    *y = (start + dot(w, x)) as f32;
                }
            }
        }
        Ok(())
    }

    fn cluster(&self, job: &mut ClusterJob) -> Result<(), DeviceError> {
        let unpacked;
        let (neurons, width) = match &job.weights {
            ClusterWeights::Block(weight) => match (weight.shape(), self.own(weight)?) {
                (WeightShape::Neurons { width, .. }, Decoded::Neurons(neurons)) => (neurons, width),
                _ => return Err(self.unsupported("a matrix as a block of neurons")),
            },
            ClusterWeights::Bundles { layout, slots, .. } => {
                unpacked = unpack(layout, slots);
                (&unpacked, layout.width)
            }
        };
        let count = neurons.gate.len() / width;
        let (stage, nothing) = (job.stage, vec![0.0; job.tokens * width]);
        let x = if stage.reads_x() { &job.x.slice::<f32>()[..nothing.len()] } else { &nothing[..] };
        for (token, x) in x.chunks_exact(width).enumerate() {
            let mut sum = vec![0.0f64; width];
            for neuron in 0..count {
                let row = neuron * width..(neuron + 1) * width;
                let mut own = 0.0;
                let place = match &mut job.hidden {
                    Some(hidden) => &mut hidden.slice_mut::<f32>()[token * count + neuron],
                    None if stage.has_hidden() => panic!("a cluster job of stage {stage:?} needs `hidden`"),
                    None => &mut own,
                };
                let mut value =
                    if stage.has_gate() { dot(&neurons.gate[row.clone()], x) } else { f64::from(*place) };
                if stage.has_up() {
                    let (kind, threshold) = (job.activation.kind.name(), job.activation.threshold);
                    let up = dot(&neurons.up[row.clone()], x);
                    value = reference::activate(kind, f64::from(threshold), value, up);
                }
                if stage.writes_hidden() {
                    *place = value as f32;
                }
                if stage.has_down() {
                    sum.iter_mut().zip(&neurons.down[row]).for_each(|(s, w)| *s += value * f64::from(*w));
                }
            }
            if stage.has_down() {
                let y = job.y.as_mut().expect("a cluster job with a sum needs `y`");
                write(&mut y.slice_mut::<f32>()[token * width..][..width], &sum, job.accumulate);
            }
        }
        Ok(())
    }
}

impl Device for ReferenceDevice {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn supports(&self, op: &OpShape) -> Support {
        match op {
            OpShape::Matmul { .. } | OpShape::Cluster { .. } => Support::Native,
            _ => Support::No("the reference device has no attention".into()),
        }
    }

    fn prepare(
        &self,
        weight: WeightSource<'_>,
        _recycle: Option<PreparedWeight>,
    ) -> Result<PreparedWeight, DeviceError> {
        let shape = weight.shape()?;
        let (bytes, decoded) = match weight {
            WeightSource::Matrix(m) => (m.rows * m.cols * 4, Decoded::Matrix(values(&m)?)),
            WeightSource::Neurons { gate, up, down } => {
                let (neurons, width) = (gate.rows, gate.cols);
                let d = values(&down)?;
                let down = (0..neurons).flat_map(|n| (0..width).map(move |w| (n, w)));
                let down = down.map(|(n, w)| d[w * neurons + n]).collect();
                let block = Neurons { gate: values(&gate)?, up: values(&up)?, down };
                (3 * neurons * width * 4, Decoded::Neurons(block))
            }
        };
        Ok(PreparedWeight::new(self.id, shape, bytes, Arc::new(decoded)))
    }

    fn submit_matmul(&self, mut submission: Submission<MatmulJob>) {
        let result = self.matmul(submission.job_mut());
        submission.finish(result);
    }

    fn submit_clusters(&self, batch: &mut Vec<Submission<ClusterJob>>) {
        for mut submission in batch.drain(..) {
            let result = self.cluster(submission.job_mut());
            submission.finish(result);
        }
    }
}

fn values(m: &Matrix<'_>) -> Result<Vec<f32>, DeviceError> {
    let mut bytes = vec![0; m.data.len()];
    m.data.read(0, &mut bytes)?;
    Ok(codec::decode(m.dtype, &bytes))
}

fn dot(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum()
}

fn write(y: &mut [f32], sum: &[f64], accumulate: bool) {
    for (y, sum) in y.iter_mut().zip(sum) {
        *y = if accumulate { (f64::from(*y) + sum) as f32 } else { *sum as f32 };
    }
}

fn unpack(layout: &BundleLayout, slots: &PinnedSlots) -> Neurons {
    let rows = |dtype: DType, at: usize| -> Vec<f32> {
        let bytes = bundle_row_bytes(dtype, layout.width).expect("a bundle's rows are whole blocks");
        let mut values = vec![0.0; slots.len() * layout.width];
        for (n, row) in values.chunks_exact_mut(layout.width).enumerate() {
            dequantize_bundle_row(dtype, &slots.bytes(n)[at..][..bytes], row);
        }
        values
    };
    Neurons {
        gate: rows(layout.dtype, layout.gate),
        up: rows(layout.dtype, layout.up),
        down: rows(layout.down_dtype, layout.down),
    }
}
