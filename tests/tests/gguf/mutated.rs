//! Good files with random damage: the parser answers, does not panic, and takes little memory.

use std::path::Path;

use neuropil::gguf::{Header, TypePolicy, parse};
use neuropil_tests::counting_alloc::peak_bytes;
use neuropil_tests::gguf_writer::{GgufFile, Value};
use proptest::prelude::*;

use crate::MIB;

/// A small file with every kind of thing in it.
fn good() -> Vec<u8> {
    GgufFile::default()
        .pair("general.architecture", Value::Str("llama".into()))
        .pair("general.alignment", Value::U32(32))
        .pair("llama.block_count", Value::U32(2))
        .pair("llama.rope.freq_base", Value::F32(1e4))
        .pair("flag", Value::Bool(true))
        .pair("wide", Value::U64(1 << 40))
        .pair("tokenizer.ggml.tokens", Value::Strings(vec!["a".into(), "bc".into(), String::new()]))
        .pair("tokenizer.ggml.scores", Value::F32s(vec![0.0, 1.0, 2.0]))
        .pair("tokenizer.ggml.token_type", Value::I32s(vec![1, 2, 3]))
        .f32_tensor("norm", &[16], &[1.0; 16])
        .tensor("q", &[64, 3], 8, vec![7; 204])
        .tensor("k", &[256, 2], 12, vec![9; 288])
        .bytes()
}

/// What holds of every header that parses.
fn check(header: &Header, len: usize) {
    let mut extents: Vec<(u64, u64)> = header.tensors.iter().map(|t| (t.offset, t.end())).collect();
    extents.sort_unstable();
    assert!(extents.iter().all(|&(start, end)| start <= end && end <= len as u64));
    assert!(extents.windows(2).all(|pair| pair[0].1 <= pair[1].0));
    for tensor in &header.tensors {
        assert!(tensor.cols() * tensor.rows() == tensor.elements() && tensor.elements() > 0);
    }
    for (key, value) in header.metadata.iter() {
        assert!(header.metadata.get(key).is_some());
        assert!(!value.to_string().is_empty());
    }
}

fn survives(bytes: &[u8]) {
    for types in [TypePolicy::Supported, TypePolicy::Any] {
        let (result, peak) = peak_bytes(|| parse(bytes, Path::new("m.gguf"), types));
        assert!(peak < MIB, "took {peak} bytes for a file of {}", bytes.len());
        match result {
            Ok(header) => check(&header, bytes.len()),
            Err(error) => assert!(error.to_string().starts_with("m.gguf: ")),
        }
    }
}

#[test]
fn every_truncation_is_refused() {
    let bytes = good();
    check(&parse(&bytes, Path::new("m.gguf"), TypePolicy::Supported).unwrap(), bytes.len());
    for end in 0..bytes.len() {
        survives(&bytes[..end]);
        assert!(parse(&bytes[..end], Path::new("m.gguf"), TypePolicy::Any).is_err());
    }
}

#[test]
fn every_byte_may_be_anything() {
    let bytes = good();
    for at in 0..bytes.len() {
        for value in [0, 1, 9, 0x7F, 0x80, 0xFF] {
            let mut changed = bytes.clone();
            changed[at] = value;
            survives(&changed);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn damage_is_answered(
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..12),
        cut in prop::option::weighted(0.2, any::<prop::sample::Index>()),
    ) {
        let mut bytes = good();
        for (at, value) in changes {
            let at = at.index(bytes.len());
            bytes[at] = value;
        }
        if let Some(cut) = cut {
            bytes.truncate(cut.index(bytes.len()));
        }
        survives(&bytes);
    }

    #[test]
    fn wide_numbers_in_any_place_are_answered(
        at in any::<prop::sample::Index>(),
        number in prop_oneof![any::<u64>(), (0u32..64).prop_map(|shift| 1 << shift), Just(u64::MAX)],
    ) {
        let mut bytes = good();
        let at = at.index(bytes.len() - 8);
        bytes[at..at + 8].copy_from_slice(&number.to_le_bytes());
        survives(&bytes);
    }

    #[test]
    fn noise_after_a_header_is_answered(noise in prop::collection::vec(any::<u8>(), 0..400)) {
        let mut bytes = b"GGUF\x03\0\0\0".to_vec();
        bytes.extend([1, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0]);
        bytes.extend(noise);
        survives(&bytes);
    }
}
