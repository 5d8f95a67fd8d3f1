//! The first bytes, counts and lengths that lie, and the alignment.

use std::path::Path;
use std::time::Duration;

use neuropil::gguf::{GgufError, MAX_PAIRS, MAX_TENSORS, TypePolicy, parse};
use neuropil_tests::counting_alloc::peak_bytes;
use neuropil_tests::gguf_writer::{GgufFile, Value};

use crate::{MIB, assert_faster, bare_header, one_vector, parsed, refused};

const V3: [u8; 4] = [3, 0, 0, 0];

#[test]
fn versions_two_and_three_are_read() {
    for version in [2, 3] {
        let file = GgufFile { version, ..one_vector(4) };
        assert_eq!(parsed(&file.bytes()).unwrap().version, version);
    }
}

#[test]
fn other_versions_are_refused_by_number() {
    for version in [0, 1, 4, 0x0001_0003] {
        let error = refused(&bare_header(u32::to_le_bytes(version), 0, 0));
        assert!(matches!(error, GgufError::UnsupportedVersion { version: v, .. } if v == version), "{error}");
        assert!(error.to_string().contains(&format!("version {version}")), "{error}");
    }
}

#[test]
fn a_big_endian_file_is_called_one() {
    let mut bytes = b"GGUF".to_vec();
    bytes.extend(3u32.to_be_bytes());
    bytes.extend(1u64.to_be_bytes());
    bytes.extend(1u64.to_be_bytes());
    let error = refused(&bytes);
    assert!(matches!(error, GgufError::BigEndian { .. }), "{error}");
    assert!(error.to_string().contains("big-endian"));
}

#[test]
fn something_else_is_not_gguf() {
    for bytes in [&b"GGML\x03\0\0\0"[..], b"<!DOCTYPE html>", b"version https://git-lfs", b"\0\x1b[31"] {
        assert!(matches!(refused(bytes), GgufError::NotGguf { .. }));
    }
    assert!(!refused(b"\x1b[31m red").to_string().contains('\x1b'));
}

#[test]
fn a_file_of_powerinfer_is_called_one_and_can_be_listed() {
    let mut bytes = GgufFile::default().bytes();
    bytes[..4].copy_from_slice(b"PWRI");
    let error = refused(&bytes);
    assert!(matches!(error, GgufError::PowerInfer { .. }), "{error}");
    assert!(error.to_string().contains("neuropil convert"));
    assert!(parse(&bytes, Path::new("test.gguf"), TypePolicy::Any).unwrap().powerinfer);
}

#[test]
fn every_prefix_of_a_header_is_refused() {
    let file = GgufFile::default()
        .pair("a.string", Value::Str("text".into()))
        .pair("a.list", Value::Strings(vec!["x".into(), String::new(), "yz".into()]))
        .pair("numbers", Value::I32s(vec![1, -2]));
    let bytes = file.bytes();
    parsed(&bytes).unwrap();
    for end in 0..bytes.len() {
        let error = refused(&bytes[..end]);
        assert!(matches!(error, GgufError::HeaderCut { .. }), "{end}: {error}");
    }
}

#[test]
fn a_tensor_count_beyond_the_file_is_refused_at_once() {
    for count in [1, 1 << 59, 1 << 63, u64::MAX] {
        let work = || peak_bytes(|| refused(&bare_header(V3, count, 0)));
        let (_, peak) = assert_faster(Duration::from_millis(10), work);
        assert!(peak < MIB, "{count}: took {peak} bytes");
    }
}

#[test]
fn a_key_count_beyond_the_file_is_refused_at_once() {
    for count in [1, 500_000_000, u64::MAX] {
        let work = || peak_bytes(|| refused(&bare_header(V3, 0, count)));
        let (_, peak) = assert_faster(Duration::from_millis(10), work);
        assert!(peak < MIB, "{count}: took {peak} bytes");
    }
}

#[test]
fn counts_above_the_limits_are_refused_though_the_bytes_are_there() {
    let mut bytes = bare_header(V3, 0, MAX_PAIRS + 1);
    bytes.resize(bytes.len() + 13 * (MAX_PAIRS as usize + 1), 0);
    assert!(matches!(refused(&bytes), GgufError::TooMany { what: "keys", .. }));
    let mut bytes = bare_header(V3, MAX_TENSORS + 1, 0);
    bytes.resize(bytes.len() + 24 * (MAX_TENSORS as usize + 1), 0);
    assert!(matches!(refused(&bytes), GgufError::TooMany { what: "tensors", .. }));
}

#[test]
fn a_string_longer_than_the_file_is_refused() {
    for beyond in [u64::MAX, 1 << 63, 1 << 31, 1] {
        let raw = Value::Raw(8, beyond.to_le_bytes().to_vec());
        let bytes = GgufFile::default().pair("general.name", raw).bytes();
        assert!(bytes.len() <= 56);
        let (error, peak) = peak_bytes(|| refused(&bytes));
        assert!(peak < 65536 && error.to_string().contains("general.name"), "{error}");
    }
}

#[test]
fn an_array_longer_than_the_file_is_refused_without_a_loop() {
    for element in [0u32, 4, 7, 8, 10] {
        for count in [1u64 << 32, 1 << 61, 1 << 62, u64::MAX] {
            let mut raw = element.to_le_bytes().to_vec();
            raw.extend(count.to_le_bytes());
            let bytes = GgufFile::default().pair("k", Value::Raw(9, raw)).bytes();
            assert!(bytes.len() <= 49);
            let work = || peak_bytes(|| refused(&bytes));
            let (error, peak) = assert_faster(Duration::from_millis(10), work);
            assert!(matches!(error, GgufError::HeaderCut { .. }), "{error}");
            assert!(peak < 65536, "took {peak} bytes");
        }
    }
}

#[test]
fn an_alignment_of_zero_or_no_power_of_two_is_refused_with_its_value() {
    for value in [0u32, 1, 4, 24, 33, 1 << 25, u32::MAX] {
        let bytes = GgufFile::default().pair("general.alignment", Value::U32(value)).bytes();
        let error = refused(&bytes);
        let text = error.to_string();
        assert!(matches!(error, GgufError::BadValue { .. }), "{text}");
        assert!(text.contains("general.alignment") && text.contains(&format!(" {value},")), "{text}");
    }
}

#[test]
fn an_alignment_of_another_type_is_refused() {
    let array = {
        let mut raw = 4u32.to_le_bytes().to_vec();
        raw.extend(1u64.to_le_bytes());
        raw.extend(32u32.to_le_bytes());
        Value::Raw(9, raw)
    };
    let cases = [(Value::I32(32), "i32"), (Value::Str("32".into()), "string"), (array, "array of u32")];
    for (value, name) in cases {
        let error = refused(&GgufFile::default().pair("general.alignment", value).bytes());
        assert!(
            matches!(error, GgufError::WrongType { wanted: "u32", found, .. } if found == name),
            "{error}"
        );
    }
}

#[test]
fn the_alignment_of_the_file_places_its_tensors() {
    for alignment in [8u32, 32, 64, 4096] {
        let file = GgufFile { alignment: alignment as usize, ..one_vector(3) }
            .f32_tensor("u", &[2], &[1.0, 2.0])
            .pair("general.alignment", Value::U32(alignment));
        let bytes = file.bytes();
        let header = parsed(&bytes).unwrap();
        let u = &header.tensors[1];
        assert_eq!(bytes[u.offset as usize..u.end() as usize], [0, 0, 128, 63, 0, 0, 0, 64]);
        assert!(header.tensors.iter().all(|t| t.offset % u64::from(alignment) == 0));
    }
}
