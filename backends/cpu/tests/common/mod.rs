//! Weights, inputs and jobs of the tests of the CPU device.

use std::sync::Arc;

use neuropil_cpu::{CpuBackend, CpuOptions, Isa};
use neuropil_device::quant::{quantize_row, reference};
use neuropil_device::{
    Backend, Buffer, ClusterJob, CompletionQueue, DType, Device, DeviceError, Matrix, Submission,
};

pub fn device(threads: usize, isa: Isa) -> Arc<dyn Device> {
    CpuBackend::new(CpuOptions { threads: Some(threads), isa: Some(isa) }).unwrap().open(0).unwrap()
}

pub fn numbers(seed: u32, count: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9E37_79B9) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        state as f32 / u32::MAX as f32 - 0.5
    };
    (0..count).map(|_| next()).collect()
}

/// A matrix that owns its bytes.
pub struct Weights {
    pub dtype: DType,
    pub rows: usize,
    pub cols: usize,
    pub bytes: Vec<u8>,
}

impl Weights {
    pub fn new(seed: u32, dtype: DType, rows: usize, cols: usize) -> Weights {
        let values = numbers(seed, rows * cols);
        let mut bytes = vec![0; dtype.matrix_bytes(rows, cols).unwrap()];
        let row_bytes = dtype.row_bytes(cols).unwrap();
        for (x, row) in values.chunks_exact(cols).zip(bytes.chunks_exact_mut(row_bytes)) {
            quantize_row(dtype, x, row);
        }
        Weights { dtype, rows, cols, bytes }
    }

    pub fn matrix(&self) -> Matrix<'_> {
        Matrix { dtype: self.dtype, rows: self.rows, cols: self.cols, data: &self.bytes }
    }

    pub fn reference(&self, x: &[f32], y: &mut [f32], accumulate: bool) {
        let tokens = x.len() / self.cols;
        reference::matmul(self.dtype, &self.bytes, self.rows, self.cols, tokens, x, y, accumulate);
    }
}

pub fn buffer(device: &dyn Device, values: &[f32]) -> Buffer {
    let buffer = device.alloc(values.len() * 4).unwrap();
    buffer.write().unwrap().slice_mut::<f32>().copy_from_slice(values);
    buffer
}

pub fn bits(buffer: &Buffer) -> Vec<u32> {
    buffer.read().unwrap().slice::<f32>().iter().map(|v| v.to_bits()).collect()
}

pub fn to_bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

pub fn run_cluster(device: &dyn Device, job: ClusterJob) -> Result<(), DeviceError> {
    let queue = CompletionQueue::new();
    let mut batch = vec![Submission::new(job, queue.completion(2))];
    device.submit_clusters(&mut batch);
    assert!(batch.is_empty());
    queue.try_next().expect("the CPU completes before it returns").1
}
