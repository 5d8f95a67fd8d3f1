//! The GGUF reader against files that are right, wrong and hostile.

mod data;
mod directory;
mod header;
mod metadata;
mod mutated;
mod split;

use std::path::Path;
use std::time::{Duration, Instant};

use neuropil::gguf::{GgufError, Header, TypePolicy, parse};
use neuropil_tests::counting_alloc::{CountingAlloc, peak_bytes};
use neuropil_tests::gguf_writer::GgufFile;

#[global_allocator]
static ALLOC: CountingAlloc = CountingAlloc;

const MIB: usize = 1 << 20;

/// Parses bytes as the reader of a model does.
fn parsed(bytes: &[u8]) -> Result<Header, GgufError> {
    parse(bytes, Path::new("test.gguf"), TypePolicy::Supported)
}

/// The error of a file that must not parse: it names the file, is one sentence, and cost little memory.
#[track_caller]
fn refused(bytes: &[u8]) -> GgufError {
    let (result, peak) = peak_bytes(|| parsed(bytes));
    let error = result.expect_err("the file must be refused");
    assert!(peak < bytes.len() + 16 * MIB, "took {peak} bytes: {error}");
    assert_message(&error);
    error
}

#[track_caller]
fn assert_message(error: &GgufError) {
    let text = error.to_string();
    assert!(text.contains(".gguf"), "names no file: {text}");
    assert!(!text.contains('\n') && text.len() < 600, "is not one short sentence: {text}");
}

/// Runs `work` until it takes less than `limit`; on a busy machine one run may lose its core for a while.
#[track_caller]
fn assert_faster<T>(limit: Duration, work: impl Fn() -> T) -> T {
    for _ in 0..10 {
        let start = Instant::now();
        let result = work();
        if start.elapsed() < limit {
            return result;
        }
    }
    panic!("never took less than {limit:?}");
}

/// Four bytes of magic, a version, and the two counts.
fn bare_header(version: [u8; 4], tensors: u64, pairs: u64) -> Vec<u8> {
    let mut bytes = b"GGUF".to_vec();
    bytes.extend(version);
    bytes.extend(tensors.to_le_bytes());
    bytes.extend(pairs.to_le_bytes());
    bytes
}

/// A file with one F32 tensor "t" of one row of `count` zeros.
fn one_vector(count: usize) -> GgufFile {
    GgufFile::default().f32_tensor("t", &[count as u64], &vec![0.0; count])
}
