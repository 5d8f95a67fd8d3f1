//! Stores that are wrong: each key and tensor damaged in turn. An answer or a typed error, never a panic.

use neuropil::gguf::{Gguf, GgufError, verify};
use neuropil::store::{self, ConvertOptions, Store};
use neuropil_device::DType;
use neuropil_tests::gguf_writer::{GgufFile, Value};
use neuropil_tests::temp::TempDir;
use proptest::prelude::*;

use crate::{convert, names, toy};

/// Array of u32.
fn numbers(values: &[u32]) -> Value {
    let mut bytes = 4u32.to_le_bytes().to_vec();
    bytes.extend((values.len() as u64).to_le_bytes());
    values.iter().for_each(|v| bytes.extend(v.to_le_bytes()));
    Value::Raw(9, bytes)
}

/// A store of one layer of two neurons, made by hand: F32 rows of 64, parts at multiples of 64.
fn small() -> GgufFile {
    GgufFile { alignment: 4096, ..GgufFile::default() }
        .pair("general.architecture", Value::Str("llama".into()))
        .pair("general.alignment", Value::U32(4096))
        .pair("llama.block_count", Value::U32(1))
        .pair("llama.embedding_length", Value::U32(64))
        .pair("neuropil.store.version", Value::U32(1))
        .pair("neuropil.store.read_unit", Value::U32(64))
        .pair("neuropil.store.group", Value::U32(1))
        .pair("neuropil.store.gate_type", numbers(&[0]))
        .pair("neuropil.store.down_type", numbers(&[0]))
        .pair("neuropil.store.gate_bytes", numbers(&[256]))
        .pair("neuropil.store.stride", numbers(&[768]))
        .tensor("blk.0.ffn_perm", &[2], 26, vec![0, 0, 0, 0, 1, 0, 0, 0])
        .tensor("blk.0.ffn_bundle.weight", &[768, 2], 24, vec![0; 1536])
}

/// Opens and converts a file; the error, if there is one.
fn tried(dir: &TempDir, bytes: &[u8]) -> Option<String> {
    let path = dir.file("m.gguf", bytes);
    let read = Gguf::open_header(&path).ok().map(|gguf| Store::read(&gguf).map(|_| ()));
    let converted = convert(dir, &path, &ConvertOptions::default());
    if let Some(Err(error)) = &read {
        assert!(converted.is_err(), "{error}");
        return Some(error.to_string());
    }
    converted.err().map(|error| error.to_string())
}

#[test]
fn each_key_that_is_wrong_is_named() {
    let dir = TempDir::new();
    assert_eq!(tried(&dir, &small().bytes()), None);
    let with = |key: &str, value: Value| (small().set(key, value), key.to_owned());
    let mut cases = vec![
        with("neuropil.store.version", Value::U32(2)),
        with("neuropil.store.version", Value::Str("1".into())),
        with("neuropil.store.read_unit", Value::U32(100)),
        with("neuropil.store.read_unit", Value::U32(0)),
        with("neuropil.store.group", Value::U32(2)),
        with("llama.block_count", Value::U32(2)),
        with("llama.embedding_length", Value::U32(65)),
    ];
    for key in ["gate_type", "down_type", "gate_bytes", "stride"] {
        let key = format!("neuropil.store.{key}");
        for value in [numbers(&[]), numbers(&[0, 0]), numbers(&[u32::MAX]), numbers(&[10]), Value::U32(0)] {
            cases.push(with(&key, value));
        }
        cases.push((small().without(&key), key));
    }
    for (file, key) in cases {
        let error = tried(&dir, &file.bytes()).unwrap_or_else(|| panic!("{key} must be refused"));
        assert!(
            error.contains("m.gguf") || error.contains("no read unit") || error.contains("cannot be stored")
        );
    }
    for (file, reason) in [
        (small().set("neuropil.store.stride", numbers(&[832])), "832"),
        (small().set("neuropil.store.gate_type", numbers(&[10])), "10 is no type"),
        (small().set("neuropil.store.version", Value::U32(7)), "version 7"),
    ] {
        let error = tried(&dir, &file.bytes()).unwrap();
        assert!(error.contains(reason), "{error}");
    }
}

#[test]
fn each_tensor_that_is_wrong_is_named() {
    let dir = TempDir::new();
    let changed = |name: &str, dims: &[u64], type_id: u32, bytes: usize| {
        let mut file = small();
        let tensor = file.tensors.iter_mut().find(|t| t.name == name).unwrap();
        (tensor.dims, tensor.type_id, tensor.data) = (dims.to_vec(), type_id, vec![0; bytes]);
        file
    };
    let bundle = "blk.0.ffn_bundle.weight";
    for file in [
        changed(bundle, &[700, 2], 24, 1400),
        changed(bundle, &[768], 24, 768),
        changed(bundle, &[768, 2, 2], 24, 3072),
        changed(bundle, &[192, 2], 0, 1536),
        changed("blk.0.ffn_perm", &[2], 26, 8),
        changed("blk.0.ffn_perm", &[3], 26, 12),
        changed("blk.0.ffn_perm", &[2], 0, 8),
    ] {
        let error = tried(&dir, &file.bytes()).expect("it must be refused");
        assert!(error.contains("blk.0.ffn_"), "{error}");
    }
    let mut none = small();
    none.tensors.retain(|tensor| tensor.name != bundle);
    assert!(tried(&dir, &none.bytes()).unwrap().contains("is missing"));
}

#[test]
fn damage_to_any_tensor_is_found() {
    let dir = TempDir::new();
    let source = dir.file("m.gguf", &toy(DType::Q4_0, DType::Q4_0).model().file().bytes());
    let (out, _) = convert(&dir, &source, &ConvertOptions::default()).unwrap();
    let good = std::fs::read(&out).unwrap();
    let tensors = Gguf::open_header(&out).unwrap().tensors().to_vec();
    for tensor in tensors.iter().step_by(3) {
        let mut bytes = good.clone();
        bytes[(tensor.offset + tensor.bytes / 2) as usize] ^= 0x10;
        let path = dir.file("bad.gguf", &bytes);
        let error = verify(&Gguf::open_header(&path).unwrap(), &mut |_| ()).unwrap_err();
        let found = matches!(&error, GgufError::Checksum { tensor: name, .. } if *name == tensor.name)
            || matches!(error, GgufError::NotFinite { .. });
        assert!(found, "{}: {error}", tensor.name);
    }
    for end in (0..good.len()).step_by(good.len() / 40) {
        let path = dir.file("cut.gguf", &good[..end]);
        let error =
            store::convert(&path, &dir.path().join("x.gguf"), &ConvertOptions::default(), &mut |_, _| true);
        assert!(error.is_err());
    }
    assert_eq!(names(&dir), ["bad.gguf", "cut.gguf", "m.gguf", "store.gguf"]);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn a_store_with_any_damage_gives_an_answer(flips in prop::collection::vec((0usize..900, any::<u8>()), 1..6)) {
        let dir = TempDir::new();
        let mut bytes = small().bytes();
        for (at, value) in flips {
            bytes[at] = value;
        }
        let _ = tried(&dir, &bytes);
    }
}
