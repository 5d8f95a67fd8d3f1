//! The CPU as a backend: one device and the host operations, all on one pool.

use std::fs;
use std::io;
use std::sync::Arc;

use neuropil_device::{Backend, Device, DeviceError, DeviceInfo, DeviceKind, HostOps, Timeline};

use crate::arch::Isa;
use crate::crew::Crew;
use crate::device::CpuDevice;
use crate::host_ops::CpuOps;
use crate::pool::Pool;
use crate::topology::Topology;

/// Threads that a pool may have at most.
pub const MOST_THREADS: usize = 4096;

/// How to use the CPU.
#[derive(Clone, Copy, Debug, Default)]
pub struct CpuOptions {
    /// Threads that compute, the caller's included; `None` or 0 for [`Topology::default_threads`].
    pub threads: Option<usize>,
    /// Instruction set; `None` for the fastest. Results do not depend on it.
    pub isa: Option<Isa>,
}

/// Why the CPU backend did not start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CpuError {
    /// More threads than [`MOST_THREADS`].
    #[error("{0} threads are too many: choose at most {MOST_THREADS}, or 0 for a good number")]
    TooManyThreads(usize),
    /// The system refused a thread.
    #[error("the system does not give {threads} threads ({error}): choose fewer")]
    Spawn {
        /// Threads of the pool.
        threads: usize,
        /// What the system said.
        error: io::Error,
    },
}

/// The CPU backend: one device, `cpu`.
pub struct CpuBackend {
    device: Arc<CpuDevice>,
    ops: Arc<CpuOps>,
}

impl CpuBackend {
    /// Starts the threads.
    ///
    /// # Errors
    /// [`CpuError`].
    pub fn new(options: CpuOptions) -> Result<CpuBackend, CpuError> {
        CpuBackend::traced(options, None)
    }

    /// As [`CpuBackend::new`], and tells `timeline` when each of the threads works.
    ///
    /// # Errors
    /// [`CpuError`].
    pub fn traced(options: CpuOptions, timeline: Option<Arc<dyn Timeline>>) -> Result<CpuBackend, CpuError> {
        let topology = Topology::detect();
        let threads = options.threads.filter(|n| *n > 0).unwrap_or_else(|| topology.default_threads());
        if threads > MOST_THREADS {
            return Err(CpuError::TooManyThreads(threads));
        }
        let pool = Pool::traced(threads, &topology.cpus_for(threads), timeline)
            .map_err(|error| CpuError::Spawn { threads, error })?;
        let crew = Crew { pool: Arc::new(pool), isa: options.isa.unwrap_or_else(Isa::detect) };
        let cpuinfo = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let info = describe(&cpuinfo, crew.isa, threads);
        let ops = Arc::new(CpuOps::new(crew.clone()));
        Ok(CpuBackend { device: Arc::new(CpuDevice::new(info, crew)), ops })
    }
}

impl Backend for CpuBackend {
    fn name(&self) -> &str {
        "cpu"
    }

    fn probe(&self) -> Vec<DeviceInfo> {
        vec![self.device.info().clone()]
    }

    fn open(&self, index: usize) -> Result<Arc<dyn Device>, DeviceError> {
        if index > 0 {
            return Err(DeviceError::NoSuchDevice { name: self.name().into(), index });
        }
        Ok(self.device.clone())
    }

    fn host_ops(&self) -> Option<Arc<dyn HostOps>> {
        Some(self.ops.clone())
    }
}

fn describe(cpuinfo: &str, isa: Isa, threads: usize) -> DeviceInfo {
    let field = |name: &str| {
        let mut lines = cpuinfo.lines().filter_map(|line| line.split_once(':'));
        lines.find(|(key, _)| key.trim() == name).map(|(_, value)| value.trim().to_owned())
    };
    let product = field("model name").or_else(|| field("Hardware"));
    let product = product.unwrap_or_else(|| format!("{} CPU", std::env::consts::ARCH));
    let plural = if threads == 1 { "thread" } else { "threads" };
    let name = format!("{product} ({}, {threads} {plural})", isa.name());
    let mut info = DeviceInfo::new(name, DeviceKind::Cpu);
    info.vendor = field("vendor_id").unwrap_or_default();
    info.threads = threads;
    info
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_name_says_what_matters() {
        let info = describe("vendor_id\t: GenuineIntel\nmodel name\t: Xeon(R) X\n", Isa::Scalar, 2);
        assert_eq!(
            (info.name.as_str(), info.vendor.as_str()),
            ("Xeon(R) X (scalar, 2 threads)", "GenuineIntel")
        );
        assert!(describe("", Isa::Scalar, 1).name.ends_with(" CPU (scalar, 1 thread)"));
    }

    #[test]
    fn threads_are_a_sane_number() {
        for threads in [None, Some(0), Some(3)] {
            let backend = CpuBackend::new(CpuOptions { threads, isa: None }).unwrap();
            let expected = threads.filter(|n| *n > 0).unwrap_or_else(|| Topology::detect().default_threads());
            assert_eq!(backend.probe()[0].threads, expected);
            assert_eq!(backend.open(0).unwrap().info().threads, expected);
            let error = DeviceError::NoSuchDevice { name: "cpu".into(), index: 1 };
            assert_eq!(backend.open(1).err(), Some(error));
            assert!(backend.host_ops().is_some());
        }
        let many = CpuBackend::new(CpuOptions { threads: Some(100_000), isa: None });
        assert!(matches!(many, Err(CpuError::TooManyThreads(100_000))));
    }
}
