//! Files on disk: opening, reading, verifying.

use std::fs::OpenOptions;

use half::f16;
use neuropil::gguf::{Gguf, GgufError, MAX_HEADER_BYTES, verify};
use neuropil_tests::counting_alloc::peak_bytes;
use neuropil_tests::gguf_writer::{GgufFile, Value};
use neuropil_tests::temp::TempDir;

use crate::{MIB, assert_message, one_vector};

#[test]
fn an_open_file_can_be_shared_between_threads() {
    fn shared<T: Send + Sync>() {}
    shared::<Gguf>();
}

#[test]
fn data_is_the_same_by_map_and_by_read() {
    let dir = TempDir::new();
    let values: Vec<f32> = (0..1000).map(|i| i as f32).collect();
    let path = dir.file("m.gguf", &one_vector(5).f32_tensor("u", &[10, 100], &values).bytes());
    let gguf = Gguf::open(&path).unwrap();
    let u = gguf.require("u").unwrap();
    let mut read = vec![0; u.bytes as usize];
    gguf.read_into(u, &mut read).unwrap();
    assert_eq!(read, gguf.data(u));
    assert_eq!(read, values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<_>>());
    let mut row = [0; 40];
    gguf.read_part(u, 80, &mut row).unwrap();
    assert_eq!(row, read[80..120]);
    gguf.release(u);
    assert_eq!((gguf.path(), gguf.version()), (&*path, 3));
    assert!(gguf.tensor("v").is_none());
    let missing = gguf.require("v").unwrap_err();
    assert!(matches!(&missing, GgufError::MissingTensor { tensor, .. } if tensor == "v"));
    assert!(matches!(gguf.read_into(u, &mut row), Err(GgufError::BufferSize { .. })));
    assert!(matches!(gguf.read_part(u, u64::MAX, &mut row), Err(GgufError::BufferSize { .. })));
}

#[test]
fn opening_takes_far_less_memory_than_the_file() {
    let dir = TempDir::new();
    let path = dir.file("m.gguf", &one_vector(MIB).bytes());
    let (gguf, peak) = peak_bytes(|| Gguf::open(&path).unwrap());
    assert!(gguf.file_bytes() > 4 * MIB as u64 && peak < 65536, "took {peak} bytes");
}

#[test]
fn a_vocabulary_without_tensors_opens() {
    let dir = TempDir::new();
    let file = GgufFile::default().pair("tokenizer.ggml.tokens", Value::Strings(vec!["a".into()]));
    let gguf = Gguf::open(&dir.file("v.gguf", &file.bytes())).unwrap();
    assert!(gguf.tensors().is_empty());
    assert_eq!(verify(&gguf, &mut |_| {}).unwrap().bytes, 0);
}

#[test]
fn what_is_no_file_is_refused() {
    let dir = TempDir::new();
    let absent = Gguf::open(&dir.path().join("absent.gguf")).unwrap_err();
    assert!(matches!(absent, GgufError::Io { .. }), "{absent}");
    assert_message(&absent);
    assert!(matches!(Gguf::open(dir.path()), Err(GgufError::NotAFile { .. })));
    let empty = dir.file("empty.gguf", &[]);
    assert!(matches!(Gguf::open(&empty), Err(GgufError::HeaderCut { .. })));
}

#[test]
fn a_header_above_the_limit_is_refused() {
    let dir = TempDir::new();
    // A file with a hole: as long as its one string claims, and no room taken on the disk.
    let text = Value::Raw(8, (MAX_HEADER_BYTES as u64).to_le_bytes().to_vec());
    let path = dir.file("long.gguf", &GgufFile::default().pair("k", text).bytes());
    OpenOptions::new().write(true).open(&path).unwrap().set_len(MAX_HEADER_BYTES as u64 * 2).unwrap();
    let (result, peak) = peak_bytes(|| Gguf::open(&path));
    let error = result.unwrap_err();
    assert!(matches!(error, GgufError::HeaderTooLarge { .. }) && peak < 65536, "took {peak}: {error}");
    assert_message(&error);
}

#[test]
fn a_tenth_of_a_file_is_never_a_valid_file() {
    let dir = TempDir::new();
    let bytes = one_vector(5000).bytes();
    let path = dir.file("cut.gguf", &bytes[..bytes.len() / 10]);
    assert!(matches!(Gguf::open_header(&path), Err(GgufError::Truncated { .. })));
}

#[test]
fn listing_tolerates_types_that_running_refuses() {
    let dir = TempDir::new();
    let file = one_vector(8).tensor("odd", &[7], 9999, vec![0; 100]).tensor("iq", &[256], 16, vec![0; 66]);
    let path = dir.file("odd.gguf", &file.bytes());
    assert!(matches!(Gguf::open(&path), Err(GgufError::UnsupportedType { .. })));
    let gguf = Gguf::open_header(&path).unwrap();
    let listed: Vec<_> = gguf.tensors().iter().map(|t| (t.type_id, t.type_name(), t.bytes)).collect();
    assert_eq!(listed, [(0, "F32", 32), (9999, "unknown", 0), (16, "IQ2_XXS", 66)]);
    let report = verify(&gguf, &mut |_| {}).unwrap();
    assert_eq!((report.tensors, report.bytes, report.unchecked), (3, 98, 2));
}

#[test]
fn a_file_that_shrinks_is_an_error_of_the_read() {
    let dir = TempDir::new();
    let path = dir.file("m.gguf", &one_vector(4096).bytes());
    let gguf = Gguf::open(&path).unwrap();
    let len = gguf.file_bytes();
    OpenOptions::new().write(true).open(&path).unwrap().set_len(len - 100).unwrap();
    let t = gguf.require("t").unwrap();
    let error = gguf.read_into(t, &mut vec![0; t.bytes as usize]).unwrap_err();
    assert!(
        matches!(&error, GgufError::Truncated { end, len: l, .. } if *end == len && *l == len - 100),
        "{error}"
    );
    assert!(verify(&gguf, &mut |_| {}).is_err());
}

/// Q8_0 blocks with a scale of 1.
fn q8_0(blocks: usize) -> Vec<u8> {
    let block = [&f16::ONE.to_le_bytes()[..], &[1; 32]].concat();
    block.repeat(blocks)
}

#[test]
fn verify_reads_everything_and_reports_totals() {
    let dir = TempDir::new();
    let blocks = 100_000;
    let file = one_vector(8).tensor("q", &[32, blocks as u64], 8, q8_0(blocks));
    let gguf = Gguf::open(&dir.file("m.gguf", &file.bytes())).unwrap();
    let mut seen = Vec::new();
    let (report, peak) = peak_bytes(|| verify(&gguf, &mut |bytes| seen.push(bytes)).unwrap());
    assert_eq!((report.tensors, report.blocks, report.unchecked), (2, 8 + blocks as u64, 0));
    assert_eq!(report.bytes, 32 + 34 * blocks as u64);
    assert!(seen.is_sorted() && seen.len() > 3 && seen.last() == Some(&report.bytes));
    assert!(peak < 2 * MIB, "took {peak} bytes");
}

#[test]
fn verify_names_the_block_of_a_bad_scale() {
    let dir = TempDir::new();
    for (bits, value) in [(0x7E00u16, "NaN"), (0xFC00, "infinite")] {
        for block in [0, 70_000, 99_999] {
            let mut data = q8_0(100_000);
            data[block * 34..][..2].copy_from_slice(&bits.to_le_bytes());
            let file = GgufFile::default().tensor("q", &[320, 10_000], 8, data);
            let gguf = Gguf::open(&dir.file("m.gguf", &file.bytes())).unwrap();
            let text = verify(&gguf, &mut |_| {}).unwrap_err().to_string();
            let parts = ["\"q\"", &format!("block {block} "), value, "m.gguf"];
            assert!(parts.iter().all(|part| text.contains(part)), "{text}");
        }
    }
}

#[test]
fn verify_finds_a_nan_among_plain_floats() {
    let dir = TempDir::new();
    let gguf = Gguf::open(
        &dir.file("m.gguf", &GgufFile::default().f32_tensor("t", &[4], &[0.0, 1.0, f32::NAN, 0.0]).bytes()),
    )
    .unwrap();
    let error = verify(&gguf, &mut |_| {}).unwrap_err();
    assert!(matches!(error, GgufError::NotFinite { block: 2, value: "NaN", .. }), "{error}");
    assert_message(&error);
}
