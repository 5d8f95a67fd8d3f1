//! Keys, values, and typed questions to them.

use std::time::Duration;

use neuropil::gguf::GgufError;
use neuropil_tests::counting_alloc::peak_bytes;
use neuropil_tests::gguf_writer::{GgufFile, Value};

use crate::{assert_faster, assert_message, parsed, refused};

/// The bytes of an array: element type, count, elements.
fn raw_array(element: u32, count: u64, elements: &[u8]) -> Value {
    Value::Raw(9, [&element.to_le_bytes()[..], &count.to_le_bytes(), elements].concat())
}

#[test]
fn every_type_is_read_as_it_was_written() {
    let scalars: [(u32, &[u8], &str, &str); 11] = [
        (0, &[200], "u8", "200"),
        (1, &[200], "i8", "-56"),
        (2, &[1, 2], "u16", "513"),
        (3, &[255, 255], "i16", "-1"),
        (4, &[1, 0, 0, 128], "u32", "2147483649"),
        (5, &[254, 255, 255, 255], "i32", "-2"),
        (6, &[0, 0, 32, 192], "f32", "-2.5"),
        (7, &[1], "bool", "true"),
        (10, &[0, 0, 0, 0, 1, 0, 0, 0], "u64", "4294967296"),
        (11, &[255; 8], "i64", "-1"),
        (12, &[0, 0, 0, 0, 0, 0, 4, 64], "f64", "2.5"),
    ];
    let mut file = GgufFile::default();
    for (id, bytes, name, _) in scalars {
        file = file.pair(name, Value::Raw(id, bytes.to_vec()));
        file = file.pair(&format!("list of {name}"), raw_array(id, 2, &bytes.repeat(2)));
    }
    let header = parsed(&file.bytes()).unwrap();
    for (_, _, name, text) in scalars {
        let value = header.metadata.get(name).unwrap();
        assert_eq!((value.type_name(), value.to_string()), (name, text.to_string()));
        let list = header.metadata.get(&format!("list of {name}")).unwrap();
        assert_eq!(list.to_string(), format!("array of {name} (2)"));
    }
    let keys: Vec<&str> = header.metadata.iter().map(|(key, _)| key).collect();
    assert_eq!(keys[..3], ["u8", "list of u8", "i8"]);
    assert_eq!(keys.len(), 22);
}

#[test]
fn getters_tell_absent_from_wrong() {
    let file = GgufFile::default()
        .pair("int", Value::U32(7))
        .pair("negative", Value::I32(-7))
        .pair("wide", Value::U64(1 << 40))
        .pair("float", Value::F32(0.5))
        .pair("flag", Value::Bool(true))
        .pair("name", Value::Str("llama".into()))
        .pair("scores", Value::F32s(vec![1.5]))
        .pair("types", Value::I32s(vec![3, -1]));
    let header = parsed(&file.bytes()).unwrap();
    let m = &header.metadata;
    assert_eq!((m.u32("int").unwrap(), m.u64("int").unwrap()), (Some(7), Some(7)));
    assert_eq!((m.u64("wide").unwrap(), m.f32("float").unwrap()), (Some(1 << 40), Some(0.5)));
    assert_eq!((m.bool("flag").unwrap(), m.str("name").unwrap()), (Some(true), Some("llama")));
    assert_eq!(m.f32s("scores").unwrap(), Some(&[1.5][..]));
    assert_eq!(m.i32s("types").unwrap(), Some(&[3, -1][..]));
    assert_eq!((m.u32("absent").unwrap(), m.strings("absent").unwrap().is_none()), (None, true));

    let errors = [
        m.require_u32("absent").unwrap_err(),
        m.require_strings("absent").unwrap_err(),
        m.u32("negative").unwrap_err(),
        m.u32("wide").unwrap_err(),
        m.u64("negative").unwrap_err(),
        m.u32("float").unwrap_err(),
        m.f32("int").unwrap_err(),
        m.str("int").unwrap_err(),
        m.strings("name").unwrap_err(),
        m.f32s("types").unwrap_err(),
    ];
    errors.iter().for_each(assert_message);
    assert!(matches!(&errors[0], GgufError::MissingKey { key, .. } if key == "absent"));
    assert!(matches!(errors[2], GgufError::BadValue { .. }));
    assert!(matches!(errors[5], GgufError::WrongType { wanted: "u32", found: "f32", .. }));
}

#[test]
fn an_array_of_bytes_is_no_array_of_numbers() {
    let file = GgufFile::default()
        .pair("tokenizer.ggml.token_type", Value::U8s(vec![1; 16]))
        .pair("tokenizer.ggml.scores", Value::U8s(vec![1; 16]));
    let header = parsed(&file.bytes()).unwrap();
    let types = header.metadata.i32s("tokenizer.ggml.token_type").unwrap_err().to_string();
    assert!(types.contains("tokenizer.ggml.token_type") && types.contains("array of u8"), "{types}");
    let scores = header.metadata.require_f32s("tokenizer.ggml.scores").unwrap_err().to_string();
    assert!(scores.contains("tokenizer.ggml.scores") && scores.contains("array of u8"), "{scores}");
}

#[test]
fn vocabulary_pieces_are_bytes() {
    let pieces = [&b"\xff\xfe"[..], b"", b"a"];
    let elements: Vec<u8> =
        pieces.iter().flat_map(|p| [&(p.len() as u64).to_le_bytes(), *p].concat()).collect();
    let lone = Value::Raw(8, [&2u64.to_le_bytes()[..], b"\xc3\x28"].concat());
    let file = GgufFile::default().pair("pieces", raw_array(8, 3, &elements)).pair("lone", lone);
    let header = parsed(&file.bytes()).unwrap();
    let strings = header.metadata.require_strings("pieces").unwrap();
    assert_eq!(strings.iter().collect::<Vec<_>>(), pieces);
    assert_eq!((strings.len(), strings.get(0), strings.get(3)), (3, Some(pieces[0]), None));
    assert_eq!(header.metadata.bytes("lone").unwrap(), Some(&b"\xc3\x28"[..]));
    let error = header.metadata.str("lone").unwrap_err();
    assert!(matches!(error, GgufError::NotUtf8 { .. }), "{error}");
}

#[test]
fn what_the_format_forbids_is_refused() {
    let one = |value| refused(&GgufFile::default().pair("k", value).bytes());
    assert!(matches!(one(Value::Raw(13, vec![0; 8])), GgufError::UnknownValueType { type_id: 13, .. }));
    assert!(matches!(one(raw_array(13, 0, &[])), GgufError::UnknownValueType { type_id: 13, .. }));
    assert!(matches!(one(raw_array(9, 1, &[0; 12])), GgufError::NestedArray { .. }));
    assert!(matches!(one(Value::Raw(7, vec![2])), GgufError::BadValue { .. }));
    assert!(matches!(one(raw_array(7, 2, &[1, 9])), GgufError::BadValue { .. }));
    let long = GgufFile::default().pair(&"k".repeat(70_000), Value::U8(1));
    assert!(matches!(refused(&long.bytes()), GgufError::NameTooLong { .. }));
}

#[test]
fn a_key_that_appears_twice_is_refused() {
    for second in [Value::U32(1), Value::Str("other".into())] {
        let file = GgufFile::default()
            .pair("general.name", Value::U32(1))
            .pair("between", Value::U32(1))
            .pair("general.name", second);
        let error = refused(&file.bytes());
        assert!(matches!(&error, GgufError::DuplicateKey { key, .. } if key == "general.name"), "{error}");
    }
}

#[test]
fn a_vocabulary_of_150_000_pieces_parses_in_no_time_and_no_extra_memory() {
    let pieces = (0..150_000).map(|i| "abcdefghijklmnopqrst"[..1 + i % 20].to_string()).collect();
    let bytes = GgufFile::default().pair("tokenizer.ggml.tokens", Value::Strings(pieces)).bytes();
    let work = || peak_bytes(|| parsed(&bytes).unwrap());
    let (header, peak) = assert_faster(Duration::from_millis(200), work);
    assert!(peak < bytes.len() + 65536, "took {peak} bytes for a file of {}", bytes.len());
    let strings = header.metadata.require_strings("tokenizer.ggml.tokens").unwrap();
    assert_eq!((strings.len(), strings.get(149_999)), (150_000, Some(&b"abcdefghijklmnopqrst"[..])));
}

#[test]
fn the_densest_file_stays_within_the_memory_promise() {
    let pairs = (0..65_536).map(|i| (format!("{i:x}"), Value::U8(0))).collect();
    let file = GgufFile { pairs, ..GgufFile::default() };
    let bytes = file.bytes();
    let (header, peak) = peak_bytes(|| parsed(&bytes).unwrap());
    assert_eq!(header.metadata.len(), 65_536);
    assert_eq!(header.metadata.require_u32("ffff").unwrap(), 0);
    assert!(peak < bytes.len() + (64 << 20), "took {peak} bytes");
}
