//! What the tests share: the software NPU as a library, plugins from one C file, jobs, and products in double precision.

#![allow(dead_code, reason = "each test uses some of it")]

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, OnceLock};

use neuropil_device::quant::{dequantize_row, quantize_row};
use neuropil_device::{
    Activation, Buffer, ClusterJob, ClusterWeights, CompletionQueue, DType, Device, DeviceError, MatmulJob,
    Matrix, PreparedWeight, Product, Stage, Submission, WeightSource,
};
use neuropil_plugin_host::{PluginBackend, PluginDevice};

/// The folder of the profile: `target/debug`.
fn built() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    test.parent().and_then(Path::parent).unwrap().into()
}

/// The library of the software NPU, built if need be.
pub fn sim() -> &'static Path {
    static PATH: OnceLock<PathBuf> = OnceLock::new();
    PATH.get_or_init(|| {
        let mut cargo = Command::new(env!("CARGO"));
        cargo.args(["build", "--offline", "--quiet", "-p", "neuropil-sim-npu"]);
        cargo.arg("--target-dir").arg(built().parent().unwrap()).current_dir(env!("CARGO_MANIFEST_DIR"));
        if built().ends_with("release") {
            cargo.arg("--release");
        }
        assert!(cargo.status().unwrap().success(), "the software NPU is built");
        let (prefix, suffix) = (std::env::consts::DLL_PREFIX, std::env::consts::DLL_SUFFIX);
        built().join(format!("{prefix}neuropil_sim_npu{suffix}"))
    })
}

/// A folder of this test's own.
pub fn folder(name: &str) -> PathBuf {
    let folder = built().join("tmp-plugin-host").join(name);
    // It may be there from the last run.
    let _ = std::fs::remove_dir_all(&folder);
    std::fs::create_dir_all(&folder).unwrap();
    folder
}

/// A plugin made of `fixtures/plugin.c` with these macros.
pub fn fixture(folder: &Path, name: &str, macros: &[&str]) -> PathBuf {
    let out = folder.join(format!("{name}.so"));
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut cc = Command::new("cc");
    cc.args(["-std=c11", "-Wall", "-Werror", "-Wno-unused-function", "-shared", "-fPIC", "-I"])
        .arg(here.join("../abi/include"));
    cc.args(macros).arg("-o").arg(&out).arg(here.join("tests/fixtures/plugin.c"));
    assert!(cc.status().unwrap().success(), "{name} compiles");
    out
}

/// The software NPU with options of its own and of the host.
pub fn open(options: &str) -> Result<Arc<PluginDevice>, DeviceError> {
    PluginBackend::load(sim(), options).unwrap().open_unit(0)
}

/// Numbers from -1 to 1 that look random.
pub fn noise(count: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (state >> 40) as f32 / 8_388_608.0 - 1.0
    };
    (0..count).map(|_| next()).collect()
}

/// A matrix of a model file.
pub struct Weights {
    pub dtype: DType,
    pub rows: usize,
    pub cols: usize,
    pub data: Vec<u8>,
}

impl Weights {
    pub fn new(dtype: DType, rows: usize, cols: usize, seed: u64) -> Weights {
        let each = dtype.row_bytes(cols).unwrap();
        let mut data = vec![0; each * rows];
        for (x, out) in noise(rows * cols, seed).chunks_exact(cols).zip(data.chunks_exact_mut(each)) {
            quantize_row(dtype, x, out);
        }
        Weights { dtype, rows, cols, data }
    }

    pub fn matrix(&self) -> Matrix<'_> {
        Matrix { dtype: self.dtype, rows: self.rows, cols: self.cols, data: &self.data }
    }

    pub fn prepare(&self, device: &PluginDevice) -> Result<PreparedWeight, DeviceError> {
        device.prepare(WeightSource::Matrix(self.matrix()), None)
    }

    /// `[tokens, rows]` in double precision, and the size of the terms of each.
    pub fn product(&self, x: &[f32]) -> (Vec<f64>, Vec<f64>) {
        let mut wide = vec![0f32; self.cols];
        let (mut y, mut sizes) = (vec![0.0; x.len() / self.cols * self.rows], Vec::new());
        sizes.resize(y.len(), 0.0);
        for (row, bytes) in self.data.chunks_exact(self.data.len() / self.rows).enumerate() {
            dequantize_row(self.dtype, bytes, &mut wide);
            for (token, x) in x.chunks_exact(self.cols).enumerate() {
                let terms = wide.iter().zip(x).map(|(w, x)| f64::from(*w) * f64::from(*x));
                y[token * self.rows + row] = terms.clone().sum();
                sizes[token * self.rows + row] = terms.map(|term| term * term).sum::<f64>().sqrt();
            }
        }
        (y, sizes)
    }
}

pub fn buffer(values: &[f32]) -> Buffer {
    let buffer = Buffer::host(values.len() * 4).unwrap();
    buffer.write().unwrap().slice_mut().copy_from_slice(values);
    buffer
}

pub fn values(buffer: &Buffer) -> Vec<f32> {
    buffer.read().unwrap().slice().to_vec()
}

/// Runs a matmul with one weight; the outputs are 1 before.
pub fn matmul(
    device: &PluginDevice,
    weight: &PreparedWeight,
    rows: usize,
    x: &[f32],
    tokens: usize,
    accumulate: bool,
) -> Result<Vec<f32>, DeviceError> {
    let (x, y) = (buffer(x), buffer(&vec![1.0; tokens * rows]));
    let product = Product { weight: weight.clone(), y: y.write().unwrap(), accumulate };
    let job = MatmulJob::new(tokens, x.read().unwrap()).with(product);
    let queue = CompletionQueue::new();
    device.submit_matmul(Submission::new(job, queue.completion(1)));
    let (_, result) = queue.wait(|| false);
    let y = values(&y);
    assert!(x.write().is_ok(), "the leases are free");
    result.map(|()| y)
}

/// A block of neurons.
pub struct Block {
    pub gate: Weights,
    pub up: Weights,
    pub down: Weights,
}

impl Block {
    pub fn new(dtype: DType, down: DType, neurons: usize, width: usize) -> Block {
        Block {
            gate: Weights::new(dtype, neurons, width, 21),
            up: Weights::new(dtype, neurons, width, 22),
            down: Weights::new(down, width, neurons, 23),
        }
    }

    pub fn prepare(&self, device: &PluginDevice) -> Result<PreparedWeight, DeviceError> {
        let source = WeightSource::Neurons {
            gate: self.gate.matrix(),
            up: self.up.matrix(),
            down: self.down.matrix(),
        };
        device.prepare(source, None)
    }
}

/// Runs a stage; what comes back is hidden and y. `hidden` is what an earlier stage left.
pub fn cluster(
    device: &PluginDevice,
    weight: &PreparedWeight,
    (stage, activation): (Stage, Activation),
    x: &[f32],
    (hidden, width): (&[f32], usize),
    tokens: usize,
) -> Result<(Vec<f32>, Vec<f32>), DeviceError> {
    let (x, hidden, y) = (buffer(x), buffer(hidden), buffer(&vec![1.0; tokens * width]));
    let job = ClusterJob {
        stage,
        tokens,
        activation,
        weights: ClusterWeights::Block(weight.clone()),
        x: x.read().unwrap(),
        hidden: stage.has_hidden().then(|| hidden.write().unwrap()),
        y: stage.has_down().then(|| y.write().unwrap()),
        accumulate: false,
    };
    let queue = CompletionQueue::new();
    device.submit_clusters(&mut vec![Submission::new(job, queue.completion(1))]);
    let (_, result) = queue.wait(|| false);
    result.map(|()| (values(&hidden), values(&y)))
}
