//! `convert` as a user runs it: what it prints, what it refuses, and what is left when it is killed or the disk is full.

mod common;

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use common::{Ran, arg, command, neuropil};
use neuropil_device::DType;
use neuropil_tests::temp::TempDir;
use neuropil_tests::toy::Toy;

fn toy() -> Toy {
    Toy { ffn: 2048, dtypes: vec![("ffn_", DType::Q4_0)], ..Toy::default() }
}

fn names(dir: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(dir).unwrap().flatten();
    let mut names: Vec<String> = entries.map(|e| e.file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn a_store_is_written_verified_and_inspected() {
    let dir = TempDir::new();
    let source = dir.file("m.gguf", &toy().model().file().bytes());
    let (out, twin) = (dir.path().join("store.gguf"), dir.path().join("twin.gguf"));
    let run = neuropil(&["convert", arg(&source), arg(&out), "--twin", arg(&twin), "--json"]);
    let json = run.json();
    assert_eq!(json["bytes"], std::fs::metadata(&out).unwrap().len());
    assert_eq!(json["twin_bytes"], std::fs::metadata(&twin).unwrap().len());
    assert_eq!(json["layers"].as_array().unwrap().len(), 2);
    assert_eq!(json["layers"][1]["gate_up"], 0.0);
    assert!(json["layers"][1]["down"].as_f64().unwrap() > 0.0);
    assert_eq!(json["layers"][0]["down_type"], "q8_0");
    assert_eq!(json["source_sha256"].as_str().unwrap().len(), 64);
    assert_eq!(names(dir.path()), ["m.gguf", "store.gguf", "twin.gguf"]);

    let verified = neuropil(&["verify", arg(&out), "--json"]).json();
    assert_eq!(verified["checksums"], verified["tensors"]);
    let listed = neuropil(&["inspect", arg(&out), "--json"]).json();
    assert_eq!(listed["store"]["layers"][0]["neurons"], 2048);
    assert_eq!(listed["store"]["bundle_bytes"], json["bundle_bytes"]);
    let text = neuropil(&["inspect", arg(&out)]);
    assert!(text.text().contains("neuron store  version 1"), "{}", text.text());
    let text = neuropil(&["convert", arg(&source), arg(&out)]);
    assert!(text.text().contains("gate and up     q4_0, weights unchanged"), "{}", text.text());

    let mut bytes = std::fs::read(&out).unwrap();
    let last = bytes.len() - 5000;
    bytes[last] ^= 1;
    let bad = dir.file("bad.gguf", &bytes);
    assert!(neuropil(&["verify", arg(&bad)]).error(3).contains("checksum"));
    // Damage is not copied under new checksums.
    let again = dir.path().join("again.gguf");
    assert!(neuropil(&["convert", arg(&bad), arg(&again)]).error(3).contains("checksum"));
    assert!(!again.exists());
}

#[test]
fn what_is_wrong_is_said_before_anything_is_written() {
    let dir = TempDir::new();
    let source = dir.file("m.gguf", &toy().model().file().bytes());
    let (m, out) = (arg(&source), dir.path().join("o.gguf"));
    let out = arg(&out);
    for (args, code, reason) in [
        (vec!["convert", m, m], 2, "is the model that is read"),
        (vec!["convert", m, out, "--twin", out], 2, "same file"),
        (vec!["convert", m, out, "--twin", m], 2, "is the model that is read"),
        (vec!["convert", m, out, "--ffn-type", "q4"], 2, "q4_0"),
        (vec!["convert", m, out, "--ffn-type", "iq4_nl"], 2, "they can be"),
        (vec!["convert", m, out, "--down-type", "q6_k"], 2, "they can be: f32"),
        (vec!["convert", m, out, "--read-unit", "100"], 2, "4096, 512 or 64"),
        (vec!["convert", m, out, "--counts", "/nowhere.gguf"], 3, "/nowhere.gguf"),
        (vec!["convert", "/nowhere.gguf", out], 3, "/nowhere.gguf"),
        (vec!["convert", m, "/nowhere/o.gguf"], 9, "/nowhere/o.gguf"),
        (vec!["convert", m, "/dev/null"], 9, "another path"),
        (vec!["convert", m], 2, "OUT"),
    ] {
        let run = neuropil(&args);
        assert!(run.error(code).contains(reason), "{args:?}: {}", run.stderr);
        assert_eq!(names(dir.path()), ["m.gguf"], "{args:?}");
    }
}

/// Killed at any point, a conversion leaves nothing under the name of the result, and the next one works and cleans up.
#[test]
fn a_killed_conversion_leaves_no_result() {
    let dir = TempDir::new();
    let source = dir.file("m.gguf", &toy().model().file().bytes());
    let out = dir.path().join("store.gguf");
    let start = Instant::now();
    neuropil(&["convert", arg(&source), arg(&out)]).text();
    let whole = start.elapsed();
    let wanted = std::fs::read(&out).unwrap();
    std::fs::remove_file(&out).unwrap();
    let mut interrupted = 0;
    for step in 0..20u32 {
        let mut child = command(&["convert", arg(&source), arg(&out)])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        // Not in equal steps, so that no point of the work is left out for good.
        let wait = whole.as_micros() as u64 * u64::from(step * 7 % 20) / 19;
        std::thread::sleep(Duration::from_micros(wait));
        child.kill().unwrap();
        child.wait().unwrap();
        if out.exists() {
            assert!(std::fs::read(&out).unwrap() == wanted, "what has the name is whole");
            std::fs::remove_file(&out).unwrap();
        } else {
            interrupted += 1;
        }
        let left = names(dir.path());
        assert!(left == ["m.gguf"] || left == [".store.gguf.tmp", "m.gguf"], "{left:?}");
    }
    assert!(interrupted > 0);
    neuropil(&["convert", arg(&source), arg(&out)]).text();
    assert!(std::fs::read(&out).unwrap() == wanted);
    assert_eq!(names(dir.path()), ["m.gguf", "store.gguf"]);
}

/// The program under a limit on the size of files, by the shell's `ulimit`.
#[cfg(unix)]
fn limited(blocks: u64, args: &[&str]) -> Ran {
    let script = format!("ulimit -f {blocks}; exec \"$0\" \"$@\"");
    let program = command(&[]).get_program().to_owned();
    Ran::new(Command::new("sh").arg("-c").arg(script).arg(program).args(args).output().unwrap())
}

#[test]
#[cfg(target_os = "linux")]
fn no_room_for_the_result_is_said_and_nothing_is_left() {
    let dir = TempDir::new();
    let source = dir.file("m.gguf", &toy().model().file().bytes());
    let out = dir.path().join("store.gguf");
    let args = ["convert", arg(&source), arg(&out)];
    neuropil(&args).text();
    let (old, size) = (std::fs::read(&out).unwrap(), std::fs::metadata(&out).unwrap().len());
    for part in 0..12 {
        let blocks = size * part / 12 / 512;
        let run = limited(blocks, &args);
        assert!(run.error(9).contains("no space left"), "{}", run.stderr);
        assert_eq!(names(dir.path()), ["m.gguf", "store.gguf"]);
        assert!(std::fs::read(&out).unwrap() == old, "what was there stays");
    }
    // The store fits, and its twin with F32 down does not.
    let twin = dir.path().join("twin.gguf");
    let run = limited(size / 512 + 8, &[&args[..], &["--twin", arg(&twin)]].concat());
    assert!(run.error(9).contains("twin.gguf"), "{}", run.stderr);
    assert_eq!(names(dir.path()), ["m.gguf", "store.gguf"]);
}

/// Ctrl-C leaves nothing behind.
#[test]
#[cfg(unix)]
fn an_interrupted_conversion_leaves_nothing() {
    let dir = TempDir::new();
    let source = dir.file("m.gguf", &Toy { ffn: 1 << 14, ..toy() }.model().file().bytes());
    let out = dir.path().join("store.gguf");
    for wait in [5u64, 15, 30, 45, 60] {
        let mut child = command(&["convert", arg(&source), arg(&out)])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        std::thread::sleep(Duration::from_millis(wait));
        Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap();
        let status = child.wait().unwrap();
        let mut left = names(dir.path());
        left.retain(|name| name != "store.gguf");
        assert_eq!(left, ["m.gguf"]);
        // Before the program listens, the signal ends it; after its work, there is nothing to interrupt.
        assert!(matches!(status.code(), None | Some(0 | 10)), "{status}");
        let _ = std::fs::remove_file(&out);
    }
}

/// However large a model, a conversion takes at most 1 GiB: here one layer of a 70B model in F16, 1.4 GB.
#[test]
#[ignore = "writes 3 GB and takes half a minute"]
#[cfg(target_os = "linux")]
fn a_large_model_is_converted_in_little_memory() {
    use neuropil::gguf::{GgufWriter, NewTensor, Pairs};
    let dir = TempDir::new();
    let (source, out) = (dir.path().join("m.gguf"), dir.path().join("store.gguf"));
    let (width, neurons) = (8192u64, 28672u64);
    let mut pairs = Pairs::new();
    pairs.set("general.architecture", "llama");
    pairs.set("llama.block_count", 1u32);
    pairs.set("llama.embedding_length", width as u32);
    let matrix = |part: &str, dims: [u64; 2]| NewTensor::new(format!("blk.0.ffn_{part}.weight"), 1, dims);
    let tensors =
        [matrix("gate", [width, neurons]), matrix("up", [width, neurons]), matrix("down", [neurons, width])];
    let mut writer = GgufWriter::create(&source, &pairs, 32, &tensors, false).unwrap();
    let row: Vec<u8> =
        (0..neurons * 2).map(|i| if i % 2 == 1 { 0x2C } else { (i / 2 % 251) as u8 }).collect();
    for tensor in &tensors {
        writer.begin(&tensor.name).unwrap();
        let mut left = 2 * width * neurons;
        while left > 0 {
            let take = left.min(row.len() as u64);
            writer.write(&row[..take as usize]).unwrap();
            left -= take;
        }
    }
    writer.finish().unwrap();
    let counts = dir.path().join("counts.gguf");
    let count: Vec<u8> = (0..neurons).flat_map(|i| ((i * 7919 % neurons) as f32).to_le_bytes()).collect();
    let tensor = [NewTensor::new("blk.0.ffn_count", 0, [neurons])];
    let mut writer = GgufWriter::create(&counts, &Pairs::new(), 32, &tensor, false).unwrap();
    writer.tensor("blk.0.ffn_count", &count).unwrap();
    writer.finish().unwrap();
    for more in [&["--down-type", "q8_0"][..], &["--counts", arg(&counts)], &[]] {
        let args = [&["convert", arg(&source), arg(&out)], more].concat();
        let mut child = command(&args).stdout(Stdio::null()).spawn().unwrap();
        let status = format!("/proc/{}/status", child.id());
        let mut peak = 0u64;
        while child.try_wait().unwrap().is_none() {
            let text = std::fs::read_to_string(&status).unwrap_or_default();
            let line = text.lines().find_map(|line| line.strip_prefix("VmHWM:"));
            let kib = line.and_then(|line| line.trim().strip_suffix(" kB")).and_then(|kib| kib.parse().ok());
            peak = peak.max(kib.unwrap_or(0u64));
            std::thread::sleep(Duration::from_millis(5));
        }
        assert!(child.wait().unwrap().success());
        assert!(peak > 0 && peak < 1 << 20, "{more:?}: {peak} KiB");
        eprintln!("{more:?}: {} MiB", peak >> 10);
    }
}
