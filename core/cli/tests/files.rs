//! `inspect` and `verify` on good files, on damaged ones, and on files that try to play tricks.

mod common;

use common::{arg, neuropil};
use neuropil_tests::gguf_writer::{GgufFile, Value};
use neuropil_tests::temp::TempDir;
use neuropil_tests::toy::Toy;

#[test]
fn inspect_lists_what_is_in_the_file() {
    let (_dir, path) = Toy::default().temp();
    let json = neuropil(&["inspect", arg(&path), "--json"]).json();
    assert_eq!(json["architecture"], "llama");
    assert_eq!(json["runs"], true);
    assert_eq!(json.get("reason"), None);
    assert_eq!(json["metadata"]["llama.block_count"], 2);
    assert_eq!(json["metadata"]["tokenizer.ggml.tokens"].as_array().unwrap().len(), 260);
    let tensors = json["tensors"].as_array().unwrap();
    let embedding = tensors.iter().find(|t| t["name"] == "token_embd.weight").unwrap();
    assert_eq!((&embedding["type"], &embedding["shape"]), (&"F32".into(), &serde_json::json!([256, 260])));
    assert!(tensors.iter().all(|t| t["offset"].as_u64().unwrap() % 32 == 0));
    let text = neuropil(&["inspect", arg(&path)]);
    assert!(text.text().contains("runs          yes") && text.text().contains("blk.1.ffn_down.weight"));
}

#[test]
fn inspect_says_what_a_file_could_do_more() {
    let (_dir, path) = Toy { architecture: "bamboo", predictor_rank: Some(8), ..Toy::default() }.temp();
    let json = neuropil(&["inspect", arg(&path), "--json"]).json();
    assert_eq!((&json["architecture"], &json["runs"]), (&"bamboo".into(), &true.into()));
    let cure = "convert the file to use its predictors";
    assert!(json["notes"][0].as_str().unwrap().contains(cure), "{json}");
    let text = neuropil(&["inspect", arg(&path)]);
    assert!(
        text.text().lines().any(|line| line.starts_with("note ") && line.contains(cure)),
        "{}",
        text.text()
    );
}

#[test]
fn a_file_that_cannot_run_is_listed_with_the_reason() {
    let dir = TempDir::new();
    let unknown = GgufFile::default().pair("general.architecture", Value::Str("llama".into())).tensor(
        "t",
        &[4],
        9999,
        vec![0; 16],
    );
    let other = GgufFile::default().pair("general.architecture", Value::Str("mamba".into())).f32_tensor(
        "t",
        &[4],
        &[0.0; 4],
    );
    for (file, reason) in [(&unknown, "9999"), (&other, "mamba"), (&GgufFile::default(), "no tensors")] {
        let path = dir.file("m.gguf", &file.bytes());
        let json = neuropil(&["inspect", arg(&path), "--json"]).json();
        assert_eq!(json["runs"], false);
        assert!(json["reason"].as_str().unwrap().contains(reason), "{json}");
        assert!(neuropil(&["inspect", arg(&path)]).text().contains(reason));
    }
}

#[test]
fn long_arrays_are_summed_up() {
    let dir = TempDir::new();
    let file =
        GgufFile::default().pair("a", Value::I32s(vec![7; 1025])).pair("b", Value::F32s(vec![1.5, f32::NAN]));
    let path = dir.file("m.gguf", &file.bytes());
    let json = neuropil(&["inspect", arg(&path), "--json"]).json();
    assert_eq!(json["metadata"]["a"], serde_json::json!({ "array": "i32", "length": 1025 }));
    assert_eq!(json["metadata"]["b"], serde_json::json!([1.5, null]));
}

#[test]
fn names_out_of_a_file_cannot_steer_the_terminal() {
    let dir = TempDir::new();
    let evil = "\x1b]0;owned\x07\n\u{202e}";
    let file = GgufFile::default()
        .pair("general.architecture", Value::Str(evil.into()))
        .pair(evil, Value::Str(evil.into()))
        .f32_tensor(evil, &[1], &[0.0]);
    let path = dir.file("m.gguf", &file.bytes());
    let shown = neuropil(&["inspect", arg(&path)]);
    assert!(shown.text().chars().all(|c| c == '\n' || !c.is_control()));
    assert!(!shown.text().contains('\u{202e}') && !shown.text().contains("\nu{202e}"));
    let ran = neuropil(&["run", arg(&path), "-p", "x"]);
    assert!(ran.error(4).chars().all(|c| !c.is_control()));
}

#[test]
fn a_cut_file_is_an_error_at_every_length() {
    let (dir, path) = Toy { layers: 1, width: 32, ffn: 32, ..Toy::default() }.temp();
    let bytes = std::fs::read(&path).unwrap();
    assert_eq!(neuropil(&["verify", arg(&path), "--json"]).json()["ok"], true);
    for keep in [0, 1, 4, 23, 24, 100, bytes.len() / 10, bytes.len() / 2, bytes.len() - 1] {
        let cut = dir.file("cut.gguf", &bytes[..keep]);
        for verb in ["inspect", "verify"] {
            neuropil(&[verb, arg(&cut), "--json"]).error(3);
        }
        assert_ne!(neuropil(&["run", arg(&cut), "-p", "x"]).code, Some(0));
    }
}

#[test]
fn verify_finds_a_weight_that_is_not_a_number() {
    let dir = TempDir::new();
    let file = GgufFile::default().f32_tensor("t", &[4], &[0.0, 1.0, f32::NAN, 2.0]);
    let path = dir.file("m.gguf", &file.bytes());
    assert!(neuropil(&["verify", arg(&path)]).error(3).contains("NaN"));
    let directory = neuropil(&["verify", arg(dir.path())]);
    directory.error(3);
}
