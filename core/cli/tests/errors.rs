//! Failures: each is one line of bounded length that names the file and the cure.

mod common;

use std::path::Path;

use common::{arg, neuropil};
use neuropil_tests::gguf_writer::{GgufFile, Value};
use neuropil_tests::temp::TempDir;
use neuropil_tests::toy::Toy;

fn toy() -> GgufFile {
    small().file()
}

fn small() -> Toy {
    Toy { layers: 1, width: 32, ffn: 32, ..Toy::default() }
}

/// The file's line for `run`, which names the file once.
fn refused(path: &Path, code: i32) -> String {
    let ran = neuropil(&["run", arg(path), "-p", "x", "-n", "1", "--json"]);
    let line = ran.error(code).to_owned();
    assert_eq!(line.matches(arg(path)).count(), 1, "{line}");
    assert!(line.contains("; "), "there is a cure: {line}");
    line
}

#[test]
fn inspect_says_what_run_says() {
    let dir = TempDir::new();
    let mut renamed = toy();
    renamed.tensors.iter_mut().filter(|t| t.name.contains("ffn_up")).for_each(|t| t.name.push('x'));
    let files = [
        (renamed, "ffn_up"),
        (toy().set("llama.vocab_size", Value::U32(77)), "77"),
        (toy().f32_tensor("blk.0.attn_q.bias", &[32], &[0.0; 32]), "attn_q.bias"),
        (toy().set("general.architecture", Value::Str("mamba".into())), "mamba"),
        (toy().set("tokenizer.ggml.model", Value::Str("odd".into())), "odd"),
        (toy().set("llama.attention.head_count", Value::U32(5)), "head_count"),
    ];
    for (file, word) in files {
        let path = dir.file("m.gguf", &file.bytes());
        let line = refused(&path, 4);
        let json = neuropil(&["inspect", arg(&path), "--json"]).json();
        assert_eq!(json["runs"], false, "{word}");
        let reason = json["reason"].as_str().unwrap();
        assert!(reason.contains(word) && line.ends_with(reason), "{word}: {line} / {reason}");
    }
}

#[test]
fn megabytes_in_a_file_are_no_megabytes_in_a_message() {
    let dir = TempDir::new();
    let long = "x".repeat(5_000_000);
    for key in ["general.architecture", "tokenizer.ggml.model"] {
        let path = dir.file("m.gguf", &toy().set(key, Value::Str(long.clone())).bytes());
        let line = refused(&path, 4);
        assert!(line.chars().count() <= 600 && line.ends_with("of these"), "{line}");
    }
    let path =
        dir.file("m.gguf", &toy().set("tokenizer.chat_template", Value::Str(format!("{{{{ {long}"))).bytes());
    let ran = neuropil(&["run", arg(&path), "--chat", "-p", "x"]);
    let line = ran.error(4);
    assert!(line.contains(arg(&path)) && line.contains("--chat") && line.chars().count() <= 600, "{line}");
    assert!(ran.stderr.lines().all(|line| line.chars().count() < 700));
}

#[test]
fn logits_that_are_no_numbers_name_the_file_and_the_cure() {
    let dir = TempDir::new();
    let mut file = toy();
    let norm = file.tensors.iter_mut().find(|t| t.name == "output_norm.weight").unwrap();
    norm.data[..4].copy_from_slice(&f32::NAN.to_le_bytes());
    let path = dir.file("m.gguf", &file.bytes());
    assert!(refused(&path, 1).contains("neuropil verify"));
    let text = dir.file("text", &[b'x'; 64]);
    for args in [
        &["logits", arg(&path), "-p", "x"][..],
        &["perplexity", arg(&path), "-f", arg(&text), "--chunk", "16"],
    ] {
        let ran = neuropil(args);
        let line = ran.error(1);
        assert!(line.starts_with(arg(&path)) && line.contains("neuropil verify"), "{line}");
    }
}

#[test]
fn no_vocabulary_is_said_with_the_file() {
    let dir = TempDir::new();
    let file = GgufFile::default().pair("general.architecture", Value::Str("llama".into()));
    let path = dir.file("m.gguf", &file.bytes());
    let ran = neuropil(&["tokenize", arg(&path)]);
    assert!(ran.error(4).starts_with(arg(&path)), "{}", ran.stderr);
}

#[cfg(target_os = "linux")]
#[test]
fn a_map_that_does_not_fit_the_limit_is_out_of_memory() {
    let dir = TempDir::new();
    let path = dir.file("m.gguf", b"");
    std::fs::File::options().write(true).open(&path).unwrap().set_len(8 << 30).unwrap();
    let script = "ulimit -v 4000000 && exec \"$0\" inspect \"$1\"";
    let args = ["-c", script, env!("CARGO_BIN_EXE_neuropil"), arg(&path)];
    let ran = common::Ran::new(std::process::Command::new("sh").args(args).output().unwrap());
    let line = ran.error(8);
    assert!(line.contains(arg(&path)) && line.contains("memory"), "{line}");
}

#[test]
fn verify_does_not_call_sound_what_it_cannot_know() {
    let dir = TempDir::new();
    let path = dir.file("m.gguf", &GgufFile::default().tensor("odd", &[4], 9999, vec![0; 16]).bytes());
    let ran = neuropil(&["verify", arg(&path), "--json"]);
    let line = ran.error(4);
    assert!(line.contains("9999") && line.contains("odd") && line.contains(arg(&path)), "{line}");
    let path = dir.file("m.gguf", &GgufFile::default().bytes());
    assert!(neuropil(&["verify", arg(&path)]).text().contains("no tensors"));
    assert_eq!(neuropil(&["verify", arg(&path), "--json"]).json()["tensors"], 0);
}
