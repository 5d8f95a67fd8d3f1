//! The border as a host in C meets it, and as a host with mistakes does.

mod extras;

use std::any::Any;
use std::ffi::c_void;
use std::ptr::{null, null_mut};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Sender, channel};

use neuropil_plugin_abi::*;

use super::Exported;

use crate::{
    ClusterJob, DeviceInfo, Error, MatmulJob, Matrices, Offers, Options, PluginBackend, PluginDevice,
    Prepared, Query, Region, Report, Shape, Support, WeightSource,
};

struct Tester;

/// A unit of f32 matrices; its first weight decides how a job ends.
struct Unit {
    cancelled: AtomicUsize,
}

impl PluginBackend for Tester {
    const NAME: &'static str = "tester";
    const VERSION: &'static str = "1";
    type Device = Unit;

    fn new(_: crate::Log) -> Tester {
        Tester
    }

    fn probe(&self, options: &Options) -> Result<Vec<DeviceInfo>, Error> {
        options.check(&["panic", "refuse"])?;
        if let Some(text) = options.get("refuse") {
            return Err(Error::internal(text).with_vendor_code(-77));
        }
        if options.get("panic").is_some() {
            panic!("{}", "probe".repeat(2));
        }
        Ok(vec![info(); 2])
    }

    fn open(&self, _: usize, _: &Options) -> Result<Unit, Error> {
        Ok(Unit { cancelled: AtomicUsize::new(0) })
    }
}

fn info() -> DeviceInfo {
    DeviceInfo {
        name: "u".into(),
        memory_kinds: NP_MEMORY_HOST,
        memory_alignment: 64,
        token_buckets: vec![1, 2],
        ..Default::default()
    }
}

impl PluginDevice for Unit {
    type Weight = Vec<f32>;
    const OFFERS: Offers = Offers { cluster: true, submit: true, cancel: true, import: true, plans: true };

    fn info(&self) -> DeviceInfo {
        info()
    }

    fn query(&self, query: &Query) -> Result<Support, Error> {
        match query {
            Query::Matmul { rows: 13, .. } => panic!("thirteen"),
            _ => Ok(Support { emulated: false, outliers: true }),
        }
    }

    fn prepare(&self, source: &WeightSource<'_>) -> Result<Prepared<Vec<f32>>, Error> {
        let (Matrices::One(matrix) | Matrices::Neurons { gate: matrix, .. }) = source.matrices;
        let mut weight = vec![0.0; matrix.rows * matrix.cols];
        weight.chunks_exact_mut(matrix.cols).enumerate().for_each(|(row, out)| matrix.widen_row(row, out));
        Ok(Prepared { bytes: weight.len() as u64 * 4, weight })
    }

    fn matmul(&self, job: &mut MatmulJob<'_, Vec<f32>>) -> Result<Report, Error> {
        match job.products[0].weight[0] {
            666.0 => panic!("jobs"),
            404.0 => return Err(Error::lost("unplugged")),
            _ => {}
        }
        for product in &mut job.products {
            let imported = product.y.placed.is_some();
            product.y.values.fill(product.weight[0] + f32::from(u8::from(imported)));
        }
        Ok(Report { zero_copy_input: true, ..Report::default() })
    }

    fn cluster(&self, job: &mut ClusterJob<'_, Vec<f32>>) -> Result<Report, Error> {
        job.y.iter_mut().chain(&mut job.hidden).for_each(|out| out.values.fill(5.0));
        Ok(Report::default())
    }

    fn cancel(&self) {
        self.cancelled.fetch_add(1, Ordering::Relaxed);
        panic!("cancel");
    }

    fn import(&self, region: &Region) -> Result<Box<dyn Any + Send + Sync>, Error> {
        Ok(Box::new(region.bytes))
    }

    fn save_plan(
        &self,
        weight: &Vec<f32>,
        write: &mut dyn FnMut(&[u8]) -> Result<(), Error>,
    ) -> Result<(), Error> {
        weight.iter().try_for_each(|value| write(&value.to_le_bytes()))
    }

    fn load_plan(&self, plan: &[u8], _: Shape) -> Result<Prepared<Vec<f32>>, Error> {
        let weight = plan.as_chunks().0.iter().map(|value| f32::from_le_bytes(*value)).collect();
        Ok(Prepared { weight, bytes: plan.len() as u64 })
    }
}

crate::export_plugin!(Tester);

fn table() -> &'static NpPlugin {
    let host = NpHost { abi_major: NEUROPIL_PLUGIN_ABI_MAJOR, ..NpHost::new() };
    // SAFETY: a whole table of a host; that of the plugin lives for ever.
    unsafe { Tester::export().query(&host).as_ref() }.unwrap()
}

/// Calls a function with a status; what it answered, with text and vendor code.
fn call(function: impl FnOnce(*mut NpStatus) -> i32) -> (i32, String, i64) {
    let mut text = [0u8; 64];
    let mut status = NpStatus { text: text.as_mut_ptr().cast(), text_capacity: 64, ..NpStatus::new() };
    let code = function(&mut status);
    assert_eq!(code, status.code);
    let text = std::str::from_utf8(&text[..status.text_bytes as usize]).unwrap();
    (code, text.into(), status.vendor_code)
}

fn open() -> *mut NpDevice {
    let mut device = null_mut();
    // SAFETY: all pointers are good for the call.
    let (code, text, _) = call(|s| unsafe { table().open.unwrap()(0, null(), &mut device, s) });
    assert_eq!(code, NP_OK, "{text}");
    device
}

fn matrix(values: &[f32]) -> NpMatrix {
    NpMatrix {
        scheme: NP_SCHEME_F32,
        rows: 1,
        cols: values.len() as u64,
        data: values.as_ptr().cast(),
        data_bytes: size_of_val(values) as u64,
        ..NpMatrix::new()
    }
}

fn prepare(device: *mut NpDevice, matrix: &NpMatrix) -> Result<*mut NpWeight, (i32, String)> {
    let source = NpWeightSource { matrix, ..NpWeightSource::new() };
    let mut prepared = NpPrepared::new();
    // SAFETY: all pointers are good for the call.
    let (code, text, _) = call(|s| unsafe { table().prepare.unwrap()(device, &source, &mut prepared, s) });
    if code == NP_OK { Ok(prepared.weight) } else { Err((code, text)) }
}

fn buffer(values: &mut [f32]) -> NpBuffer {
    let bytes = size_of_val(values) as u64;
    NpBuffer { data: values.as_mut_ptr().cast(), bytes, ..NpBuffer::new() }
}

/// Multiplies one token with a weight of two columns; `change` makes the mistake.
fn matmul(
    device: *mut NpDevice,
    weight: *mut NpWeight,
    change: impl FnOnce(&mut NpMatmulJob, &mut NpBuffer, &mut NpProduct),
) -> (i32, String, f32) {
    let (mut xs, mut ys) = ([1.0f32; 2], [9.0f32; 1]);
    let mut x = buffer(&mut xs);
    let y = buffer(&mut ys);
    let mut product = NpProduct { weight, y: &y, ..NpProduct::new() };
    let mut job = NpMatmulJob { tokens: 1, product_count: 1, ..NpMatmulJob::new() };
    change(&mut job, &mut x, &mut product);
    let list = [&raw const product];
    (job.x, job.products) = (&x, if job.product_count == 77 { null() } else { list.as_ptr() });
    let mut report = NpReport::new();
    // SAFETY: all pointers are good for the call.
    let (code, text, _) = call(|s| unsafe { table().matmul.unwrap()(device, &job, &mut report, s) });
    (code, text, ys[0])
}

#[test]
fn another_major_version_and_no_host_get_no_table() {
    let host = NpHost { abi_major: NEUROPIL_PLUGIN_ABI_MAJOR + 1, ..NpHost::new() };
    // SAFETY: NULL, or a whole table of a host.
    unsafe {
        assert!(Tester::export().query(&host).is_null());
        assert!(Tester::export().query(null()).is_null());
    }
    assert_eq!((table().size, table().abi_major), (176, 1));
}

#[test]
fn panics_and_errors_are_codes_with_texts_that_fit() {
    let long = "ä".repeat(100);
    let option = |key: &'static str, value: &str| NpOption {
        key: key.as_ptr().cast(),
        key_bytes: key.len() as u64,
        value: value.as_ptr().cast(),
        value_bytes: value.len() as u64,
        ..NpOption::new()
    };
    unsafe extern "C" fn count(context: *mut c_void, _: *const NpDeviceInfo) {
        // SAFETY: the context is the counter of `probe`.
        unsafe { *context.cast::<u32>() += 1 };
    }
    let probe = |option: Option<NpOption>, count_options: u64| {
        let (mut found, item) = (0u32, option.as_ref().map_or(null(), |option| &raw const *option));
        let items = [item];
        let options = NpOptions { items: items.as_ptr(), count: count_options, ..NpOptions::new() };
        // SAFETY: all pointers are good for the call.
        let said =
            call(|s| unsafe { table().probe.unwrap()(&options, (&raw mut found).cast(), Some(count), s) });
        (said, found)
    };
    assert_eq!(probe(None, 0), ((NP_OK, String::new(), 0), 2));
    let ((code, text, _), _) = probe(Some(option("panic", "")), 1);
    assert_eq!((code, text.as_str()), (NP_INTERNAL, "the plugin panicked: probeprobe"));
    let ((code, text, vendor), _) = probe(Some(option("refuse", &long)), 1);
    assert_eq!((code, text.as_str(), vendor), (NP_INTERNAL, &long[..64], -77));
    let ((code, text, _), _) = probe(Some(option("what", "")), 1);
    assert_eq!((code, text.as_str()), (NP_INVALID, "there is no option what: choose among panic, refuse"));
    assert_eq!(probe(None, 1).0.0, NP_INVALID, "an option that is NULL");
    assert_eq!(probe(None, u64::MAX).0.0, NP_INVALID);
    let huge = NpOption { key_bytes: u64::MAX, ..option("panic", "") };
    assert_eq!(probe(Some(huge), 1).0.0, NP_INVALID);
    let binary = NpOption { key: [0xffu8; 4].as_ptr().cast(), key_bytes: 4, ..option("panic", "") };
    assert_eq!(probe(Some(binary), 1).0.0, NP_INVALID);

    // A status without room, without a place for the text, or that is not there.
    let refuse = |status: *mut NpStatus| {
        // SAFETY: all pointers are NULL or good for the call.
        unsafe { table().open.unwrap()(0, null(), null_mut(), status) }
    };
    let mut short = NpStatus { size: 8, ..NpStatus::new() };
    assert_eq!((refuse(&mut short), short.code, short.text_bytes), (NP_INVALID, NP_INVALID, 0));
    assert_eq!(refuse(null_mut()), NP_INVALID);
}

#[test]
fn a_weight_whose_counts_lie_is_refused_before_it_is_read() {
    let device = open();
    let values = [1.0f32, 2.0];
    let good = matrix(&values);
    let weight = prepare(device, &good).unwrap();
    assert_eq!(matmul(device, weight, |_, _, _| {}), (NP_OK, String::new(), 1.0));
    let invalid = [
        NpMatrix { data_bytes: 7, ..good },
        NpMatrix { data_bytes: u64::MAX, ..good },
        NpMatrix { rows: u64::MAX, ..good },
        NpMatrix { rows: 0, data_bytes: 0, ..good },
        NpMatrix { data: null(), ..good },
        NpMatrix { scales_bytes: 4, ..good },
        NpMatrix { outlier_count: 1, ..good },
        NpMatrix {
            scheme: NP_SCHEME_CHANNEL4,
            outlier_count: u64::MAX,
            data_bytes: 1,
            scales_bytes: 4,
            ..good
        },
        NpMatrix { size: 0, ..good },
    ];
    for (index, matrix) in invalid.iter().enumerate() {
        assert_eq!(prepare(device, matrix).unwrap_err().0, NP_INVALID, "{index}");
    }
    // A struct that is cut has no data: its count is 0.
    assert_eq!(prepare(device, &NpMatrix { size: 32, ..good }).unwrap_err().0, NP_INVALID);
    for matrix in [NpMatrix { scheme: 99, ..good }, NpMatrix { group: 64, ..good }] {
        assert_eq!(prepare(device, &matrix).unwrap_err().0, NP_UNSUPPORTED);
    }
    let source = NpWeightSource { matrix: &good, gate: &good, ..NpWeightSource::new() };
    let source_good = NpWeightSource { matrix: &good, ..NpWeightSource::new() };
    for (source, size) in [(&raw const source, 24), (null(), 24), (&raw const source_good, 8)] {
        let mut prepared = NpPrepared { size, ..NpPrepared::new() };
        // SAFETY: all pointers are NULL or good for the call.
        let (code, ..) = call(|s| unsafe { table().prepare.unwrap()(device, source, &mut prepared, s) });
        assert_eq!((code, prepared.weight), (NP_INVALID, null_mut()));
    }
}

#[test]
fn jobs_that_do_not_fit_and_handles_that_are_not_there_are_refused() {
    let device = open();
    let weight = prepare(device, &matrix(&[1.0, 2.0])).unwrap();
    let refused = |change: &dyn Fn(&mut NpMatmulJob, &mut NpBuffer, &mut NpProduct)| {
        let (code, text, y) = matmul(device, weight, |j, x, p| change(j, x, p));
        assert_eq!((code, y), (NP_INVALID, 9.0), "{text}");
        text
    };
    refused(&|job, _, _| job.tokens = 0);
    assert!(refused(&|job, _, _| job.tokens = 3).contains("none of the buckets"));
    refused(&|job, _, _| job.tokens = 2);
    refused(&|job, _, _| job.product_count = 0);
    refused(&|job, _, _| job.product_count = 5);
    refused(&|job, _, _| job.product_count = 77);
    refused(&|job, _, _| job.size = 8);
    refused(&|_, x, _| x.bytes = 7);
    refused(&|_, x, _| x.data = null_mut());
    refused(&|_, x, _| x.data = x.data.wrapping_byte_add(1));
    refused(&|_, x, p| p.y = x);
    refused(&|_, x, _| x.memory = std::ptr::dangling_mut());
    refused(&|_, _, p| p.y = null());
    refused(&|_, _, p| p.weight = null_mut());
    refused(&|_, _, p| p.weight = std::ptr::without_provenance_mut(48));
    refused(&|_, _, p| p.size = 0);
    let other = prepare(open(), &matrix(&[1.0, 2.0])).unwrap();
    assert_eq!(matmul(device, other, |_, _, _| {}).0, NP_INVALID);
    assert_eq!(matmul(null_mut(), weight, |_, _, _| {}).0, NP_INVALID);
    // SAFETY: handles that were given back are looked up, not followed.
    unsafe {
        for _ in 0..2 {
            table().free_weight.unwrap()(device, weight);
            table().free_weight.unwrap()(null_mut(), weight);
        }
        assert_eq!(matmul(device, weight, |_, _, _| {}).0, NP_INVALID);
        table().cancel.unwrap()(device);
        table().close.unwrap()(device);
        table().close.unwrap()(device);
        table().cancel.unwrap()(device);
    }
    assert_eq!(prepare(device, &matrix(&[1.0])).unwrap_err().0, NP_INVALID);
}

#[test]
fn a_panic_ends_a_job_and_a_loss_ends_the_device() {
    let device = open();
    let [good, panics, lost] = [1.0, 666.0, 404.0].map(|v| prepare(device, &matrix(&[v, 0.0])).unwrap());
    let said = matmul(device, panics, |_, _, _| {});
    assert_eq!((said.0, said.1.as_str()), (NP_INTERNAL, "the plugin panicked: jobs"));
    assert_eq!(matmul(device, good, |_, _, _| {}).0, NP_OK);
    for weight in [lost, good] {
        assert_eq!(matmul(device, weight, |_, _, _| {}), (NP_LOST, "unplugged".into(), 9.0));
    }
    assert_eq!(prepare(device, &matrix(&[1.0])).unwrap_err().0, NP_LOST);
}

#[test]
fn questions_are_answered_and_unknown_ones_refused() {
    let device = open();
    let good = NpQuery {
        op: NP_OP_CLUSTER,
        scheme: NP_SCHEME_GROUP4,
        down_scheme: NP_SCHEME_F16,
        stage: NP_STAGE_FUSED,
        activation: NP_ACT_SILU,
        rows: 1,
        cols: 1,
        group: 32,
        tokens: 1,
        ..NpQuery::new()
    };
    let ask = |query: NpQuery| {
        let mut support = NpSupport::new();
        // SAFETY: all pointers are good for the call.
        let (code, ..) = call(|s| unsafe { table().query.unwrap()(device, &query, &mut support, s) });
        (code, support.flags)
    };
    assert_eq!(ask(good), (NP_OK, NP_SUPPORT_NATIVE | NP_SUPPORT_OUTLIERS));
    for query in [
        NpQuery { op: 9, ..good },
        NpQuery { scheme: 0, ..good },
        NpQuery { down_scheme: 0, ..good },
        NpQuery { stage: 7, ..good },
        NpQuery { activation: 7, ..good },
        NpQuery { group: 16, ..good },
        NpQuery { tokens: 3, ..good },
        NpQuery { size: 24, ..good },
    ] {
        assert_eq!(ask(query), (NP_UNSUPPORTED, 0), "{query:?}");
    }
    assert_eq!(ask(NpQuery { op: NP_OP_MATMUL, rows: 13, ..good }).0, NP_INTERNAL);
    // SAFETY: NULL is checked.
    let (code, ..) = call(|s| unsafe { table().query.unwrap()(device, &good, null_mut(), s) });
    assert_eq!(code, NP_INVALID);
}
