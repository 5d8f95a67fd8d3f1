//! Imported memory: by the plugin's own methods, with a file in memory for what would be a dma-buf on a phone.

use std::any::Any;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::ptr;

use neuropil_nnapi::{Nnapi, Unit, Weight};
use neuropil_plugin_abi as abi;
use neuropil_plugin_conformance::sample::{Random, Sample, relative_error};
use neuropil_plugin_sdk::{
    Code, Deadline, Input, MatmulJob, Matrices, Matrix, Options, Output, Placed, PluginBackend, PluginDevice,
    Product, Region, Report, Scheme, WeightSource,
};

use crate::kit::Shim;

const ROWS: usize = 24;
const COLS: usize = 40;
const TOKENS: usize = 3;
const X_BYTES: usize = TOKENS * COLS * 4;
const Y_BYTES: usize = TOKENS * ROWS * 4;

/// A unit with a weight.
fn open(shim: &Shim, options: &[(&str, &str)]) -> (Unit, Weight, Sample) {
    let fixed = [("library", shim.path.to_str().unwrap()), ("tokens", "3")];
    let pairs = fixed.iter().chain(options).map(|(key, value)| (key.to_string(), value.to_string()));
    let unit = Nnapi.open(0, &pairs.collect::<Options>()).unwrap();
    let sample = Sample::random(abi::NP_SCHEME_F32, ROWS, COLS, 1);
    let matrix = Matrix {
        scheme: Scheme::F32,
        rows: ROWS,
        cols: COLS,
        data: &sample.data,
        scales: &[],
        mins: &[],
        outliers: None,
    };
    let weight = unit.prepare(&WeightSource { name: "", matrices: Matrices::One(matrix) }).unwrap().weight;
    (unit, weight, sample)
}

fn file(bytes: usize) -> File {
    let fd = rustix::fs::memfd_create("test", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&fd, bytes as u64).unwrap();
    fd.into()
}

fn region(file: &File, offset: usize, bytes: usize) -> Region {
    let (host, native) = (ptr::null_mut(), ptr::null_mut());
    Region { kind: abi::NP_MEMORY_DMA_BUF, host, native, fd: file.as_raw_fd(), offset, bytes }
}

type Memory = Box<dyn Any + Send + Sync>;

fn placed<'a>((memory, offset): (&'a Memory, usize)) -> Placed<'a> {
    Placed { memory: &**memory, offset }
}

/// Runs a job whose values lie at these offsets of memories, or nowhere but in ordinary memory.
fn run(
    unit: &Unit,
    weight: &Weight,
    x: (&[f32], Option<(&Memory, usize)>),
    y: (&mut [f32], Option<(&Memory, usize)>),
) -> Result<Report, neuropil_plugin_sdk::Error> {
    let mut job = MatmulJob {
        tokens: TOKENS,
        cols: COLS,
        deadline: Deadline::after(0),
        x: Input { values: x.0, placed: x.1.map(placed) },
        products: vec![Product { weight, rows: ROWS, y: Output { values: y.0, placed: y.1.map(placed) } }],
    };
    unit.matmul(&mut job)
}

#[test]
fn values_in_imported_memory_are_used_where_they_lie() {
    let shim = Shim::new();
    let (unit, weight, sample) = open(&shim, &[("precision", "f32")]);
    let info = unit.info();
    assert_eq!(info.memory_kinds & abi::NP_MEMORY_DMA_BUF, abi::NP_MEMORY_DMA_BUF);
    let x = Random::new(2).values(TOKENS * COLS);
    let x_bytes: Vec<u8> = x.iter().flat_map(|x| x.to_le_bytes()).collect();
    let wide: Vec<f64> = x.iter().map(|x| f64::from(*x)).collect();
    let want = sample.product(&wide);
    // A region that begins in the middle of a page, with values that begin in the middle of it.
    let file = file(64 << 10);
    let (start, x_at, y_at) = (5000, 256, 1024);
    let memory = unit.import(&region(&file, start, 8192)).unwrap();
    for (x_placed, y_placed) in [(true, true), (true, false), (false, true), (false, false)] {
        file.write_all_at(&vec![0; 64 << 10], 0).unwrap();
        // Ordinary memory with other values shows which of both was read.
        let nothing = vec![0.0; x.len()];
        let (given, x_place) = if x_placed { (&nothing, Some((&memory, x_at))) } else { (&x, None) };
        if x_placed {
            file.write_all_at(&x_bytes, (start + x_at) as u64).unwrap();
        }
        let mut y = vec![f32::NAN; TOKENS * ROWS];
        let y_place = y_placed.then_some((&memory, y_at));
        let report = run(&unit, &weight, (given, x_place), (&mut y, y_place)).unwrap();
        assert_eq!((report.zero_copy_input, report.zero_copy_output), (x_placed, y_placed));
        if y_placed {
            assert!(y.iter().all(|value| value.is_nan()), "ordinary memory is not touched");
            let mut bytes = vec![0; Y_BYTES];
            file.read_exact_at(&mut bytes, (start + y_at) as u64).unwrap();
            let floats = bytes.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes));
            y = floats.collect();
        }
        assert!(relative_error(&y, &want) < 1e-6, "{x_placed} {y_placed}");
    }
    drop((memory, weight, unit));
    shim.is_clean();
}

#[test]
fn other_types_copy_and_say_so() {
    let shim = Shim::new();
    let (unit, weight, _) = open(&shim, &[("precision", "f16")]);
    let file = file(8192);
    let memory = unit.import(&region(&file, 0, 8192)).unwrap();
    let (x, mut y) = (vec![1.0; TOKENS * COLS], vec![f32::NAN; TOKENS * ROWS]);
    let report = run(&unit, &weight, (&x, Some((&memory, 0))), (&mut y, Some((&memory, 4096)))).unwrap();
    assert_eq!((report.zero_copy_input, report.zero_copy_output), (false, false));
    assert!(y.iter().all(|value| value.is_finite()));
    drop((memory, weight, unit));
    shim.is_clean();
}

#[test]
fn memory_that_does_not_fit_is_refused() {
    let shim = Shim::new();
    let (unit, weight, _) = open(&shim, &[("precision", "f32")]);
    let file = file(8192);
    let memory = unit.import(&region(&file, 0, X_BYTES)).unwrap();
    let (x, mut y) = (vec![1.0; TOKENS * COLS], vec![f32::NAN; TOKENS * ROWS]);
    let outside = run(&unit, &weight, (&x, Some((&memory, 4))), (&mut y, None)).unwrap_err();
    assert_eq!((outside.code, outside.text.contains("outside of the memory")), (Code::Invalid, true));
    let stranger: Memory = Box::new(7u8);
    assert!(run(&unit, &weight, (&x, Some((&stranger, 0))), (&mut y, None)).is_err());
    // Values between the places of floats are copied.
    let report = run(&unit, &weight, (&x, Some((&memory, 2))), (&mut y, None)).unwrap();
    assert!(!report.zero_copy_input);
    for wrong in
        [Region { fd: -1, ..region(&file, 0, 64) }, region(&file, 2, 64), region(&file, 0, usize::MAX)]
    {
        assert!(unit.import(&wrong).is_err(), "{wrong:?}");
    }
    let buffer = Region { kind: abi::NP_MEMORY_HARDWARE_BUFFER, ..region(&file, 0, 64) };
    assert!(unit.import(&buffer).unwrap_err().text.contains("no hardware buffer"));
    shim.set("fail", "Memory_createFromFd 7");
    assert_eq!(unit.import(&region(&file, 0, 64)).unwrap_err().vendor_code, 7);
    drop((memory, weight, unit));
    shim.is_clean();
}
