//! The device contract, without an engine: what a device must get right and how it must fail.

use std::sync::Arc;
use std::time::Duration;

use neuropil_cpu::{CpuBackend, CpuOptions};
use neuropil_device::{
    Activation, ActivationKind, Backend, Buffer, DType, Device, DeviceError, MatmulJob, Matrix, Product,
    RowSource, WeightSource,
};
use neuropil_tests::counting_alloc::{CountingAlloc, peak_bytes};
use neuropil_tests::device_fixture::{Case, Form, WAYS, matrix, run};
use neuropil_tests::mock::{Fault, FaultyDevice};
use neuropil_tests::reference_device::ReferenceDevice;
use neuropil_tests::toy::Weight;

#[global_allocator]
static ALLOCATOR: CountingAlloc = CountingAlloc;

const SMALL: Case = Case { dtype: DType::F32, down_dtype: DType::F32, rows: 64, cols: 32, tokens: 3 };

/// The devices under test, each with the error it may make.
fn devices() -> Vec<(Arc<dyn Device>, f64)> {
    let slow = FaultyDevice::around(ReferenceDevice::new()).threaded().delayed(Duration::from_millis(2));
    vec![(ReferenceDevice::new(), 1e-6), (Arc::new(slow), 1e-6)]
}

#[test]
fn matmul_of_every_type_and_awkward_counts_of_rows() {
    for (device, bound) in devices() {
        for dtype in DType::ALL {
            for (rows, tokens) in [(1, 1), (4, 5), (33, 2)] {
                let case = Case { dtype, rows, cols: 256, tokens, ..SMALL };
                let error = case.matmul(&*device).unwrap().error();
                assert!(error <= bound, "{case:?}: {error}");
            }
        }
    }
}

#[test]
fn clusters_of_every_activation_form_and_stage() {
    for (device, bound) in devices() {
        for (_, kind) in ActivationKind::NAMES {
            for (form, stages) in [Form::Block, Form::Bundles].into_iter().flat_map(|f| WAYS.map(|w| (f, w)))
            {
                let activation = Activation { kind, threshold: 0.25 };
                let error = SMALL.cluster(&*device, activation, form, stages).unwrap().error();
                assert!(error <= bound, "{kind:?} {form:?} {stages:?}: {error}");
            }
        }
        let quantized = Case { dtype: DType::Q4_0, down_dtype: DType::Q8_0, rows: 64, cols: 64, tokens: 2 };
        let silu = Activation::new(ActivationKind::Silu);
        let error = quantized.cluster(&*device, silu, Form::Block, WAYS[1]).unwrap().error();
        assert!(error <= bound, "quantised: {error}");
    }
}

#[test]
fn a_weight_of_another_device_is_refused() {
    for ((device, _), (other, _)) in devices().into_iter().zip(devices()) {
        let x = Buffer::host(32 * 4).unwrap();
        let y = Buffer::host(64 * 4).unwrap();
        // The same type of device, so only the identity tells them apart.
        let values = Weight::new("w", DType::F32, 64, 32, &[0.5; 64 * 32]);
        let source = || WeightSource::Matrix(matrix(&values));
        let weight = other.prepare(source(), None).unwrap();
        assert!(device.prepare(source(), Some(weight.clone())).is_ok(), "nothing of it is reused");
        let product = Product { weight, y: y.write().unwrap(), accumulate: false };
        let job = MatmulJob::new(1, x.read().unwrap()).with(product);
        let result = run(&*device, |s| device.submit_matmul(s), job);
        assert!(matches!(result, Err(DeviceError::ForeignHandle { .. })), "{result:?}");
        assert!(y.write().is_ok(), "a failed job gives its leases back");
    }
}

#[test]
fn a_weight_of_the_wrong_size_is_refused() {
    for (device, _) in devices() {
        let weight = Weight::new("w", DType::F32, 4, 8, &[0.0; 32]);
        let short = Matrix { data: &&weight.bytes[1..], ..matrix(&weight) };
        let result = device.prepare(WeightSource::Matrix(short), None);
        assert!(matches!(result, Err(DeviceError::Shape { rows: 4, cols: 8, bytes: 127, .. })));
    }
}

#[test]
fn a_weight_that_cannot_be_read_is_an_error() {
    struct Unreadable;
    impl RowSource for Unreadable {
        fn len(&self) -> usize {
            4 * 64 * 32
        }

        fn read(&self, _: usize, _: &mut [u8]) -> Result<(), DeviceError> {
            Err(DeviceError::Source { reason: "the disk is gone".into() })
        }
    }
    for (device, _) in devices() {
        let weight = Matrix { dtype: DType::F32, rows: 64, cols: 32, data: &Unreadable };
        let result = device.prepare(WeightSource::Matrix(weight), None);
        assert!(matches!(result, Err(DeviceError::Source { .. })), "{result:?}");
    }
}

#[test]
fn an_empty_weight_is_refused() {
    for (device, _) in devices() {
        for (rows, cols) in [(0, 32), (4, 0), (0, 0)] {
            let weight = Matrix { dtype: DType::F32, rows, cols, data: &Vec::new() };
            let result = device.prepare(WeightSource::Matrix(weight), None);
            assert!(matches!(result, Err(DeviceError::Shape { .. })), "{rows} x {cols}: {result:?}");
        }
    }
}

#[test]
fn packing_takes_the_packed_weight_and_little_more() {
    struct Zeros(usize);
    impl RowSource for Zeros {
        fn len(&self) -> usize {
            self.0
        }

        fn read(&self, _: usize, out: &mut [u8]) -> Result<(), DeviceError> {
            out.fill(0);
            Ok(())
        }
    }
    // One thread, for the allocator counts those of the test's only.
    let cpu = CpuBackend::new(CpuOptions { threads: Some(1), isa: None }).unwrap().open(0).unwrap();
    let (rows, cols) = (8192, 2048);
    let weight = Matrix { dtype: DType::Q8_0, rows, cols, data: &Zeros(rows * cols / 32 * 34) };
    let (prepared, peak) = peak_bytes(|| cpu.prepare(WeightSource::Matrix(weight), None));
    let bytes = prepared.unwrap().bytes();
    assert!(peak < bytes + (4 << 20), "{peak} bytes for a packed weight of {bytes}");
}

#[test]
fn the_named_submission_fails_and_no_other() {
    let lost = DeviceError::Lost { device: "reference".into(), reason: "unplugged".into() };
    for threaded in [false, true] {
        let device = FaultyDevice::around(ReferenceDevice::new())
            .at(1, Fault::Error(lost.clone()))
            .at(2, Fault::Drop)
            .at(3, Fault::Fill(f32::NAN));
        let device = if threaded { device.threaded() } else { device };
        assert!(SMALL.matmul(&device).unwrap().error() < 1e-6);
        assert_eq!(SMALL.matmul(&device).unwrap_err(), lost);
        assert_eq!(SMALL.matmul(&device).unwrap_err(), DeviceError::Dropped);
        assert_eq!(SMALL.matmul(&device).unwrap().error(), f64::INFINITY);
        let silu = Activation::new(ActivationKind::Silu);
        assert!(SMALL.cluster(&device, silu, Form::Block, WAYS[0]).unwrap().error() < 1e-6);
        assert_eq!(device.submissions(), 5);
    }
}

#[test]
fn a_full_device_says_so() {
    let device = FaultyDevice::around(ReferenceDevice::new()).with_room_for(3);
    assert!(SMALL.matmul(&device).is_ok());
    assert!(matches!(SMALL.matmul(&device), Err(DeviceError::OutOfMemory { .. })));
}
