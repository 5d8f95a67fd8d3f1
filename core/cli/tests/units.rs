//! Units that plugins drive, from the command line: listed with reasons, used when they are named, left out when they
//! cannot be used.

mod common;

use std::path::{Path, PathBuf};

use common::{arg, neuropil};
use neuropil_tests::plugins::library;
use neuropil_tests::temp::TempDir;
use neuropil_tests::toy::Toy;
use serde_json::Value;

const PROMPT: &str = "the quick brown fox jumps over";

fn sim(options: &str) -> String {
    format!("plugin:{}?{options}", library("neuropil_sim_npu").display())
}

fn toy() -> (TempDir, PathBuf) {
    Toy { width: 192, heads: 6, kv_heads: 3, ffn: 320, ..Toy::default() }.temp()
}

fn run(model: &Path, more: &[&str]) -> common::Ran {
    let args = ["run", arg(model), "-p", PROMPT, "-n", "6", "--temp", "0", "--ignore-eos", "-t", "1"];
    neuropil(&[&args, more].concat())
}

#[test]
fn devices_lists_units_of_plugins_and_what_they_can_do() {
    let names = format!("cpu,{}", sim("schemes=f16+group8&units=2&buckets=1+64"));
    let listed = neuropil(&["devices", "--device", &names, "--json"]).json();
    let units = listed.as_array().unwrap();
    assert_eq!(units.len(), 3);
    assert_eq!((&units[0]["backend"], &units[1]["kind"]), (&"cpu".into(), &"npu".into()));
    assert_eq!(units[2]["name"], "software NPU 1");
    let plugin = &units[1]["plugin"];
    assert_eq!((&plugin["name"], &plugin["abi"]), (&"sim-npu".into(), &"1.0".into()));
    assert_eq!(plugin["token_buckets"], serde_json::json!([1, 64]));
    assert!(plugin["tested"][0].as_str().unwrap().starts_with("matmul f16 (error "));
    let is_off =
        |no: &Value| no["op"] == "matmul f32" && no["reason"].as_str().unwrap().contains("it takes f16");
    assert!(units[1]["disabled"].as_array().unwrap().iter().any(is_off));
    let text = neuropil(&["devices", "--device", &names]);
    assert!(text.text().contains("plugin sim-npu 0.1.0, interface 1.0, driver sim-npu"), "{}", text.text());
}

#[test]
fn what_is_no_plugin_is_listed_with_the_reason() {
    let dir = TempDir::new();
    let text = dir.file("text.so", b"not a library");
    let empty = dir.file("empty.so", b"");
    let mut head = [0u8; 64];
    head[..7].copy_from_slice(b"\x7fELF\x01\x01\x01");
    (head[16], head[18]) = (3, 40);
    let foreign = dir.file("foreign.so", &head);
    let missing = dir.path().join("missing.so");
    for (path, reason) in [
        (&text, "is no shared library: it is no ELF file"),
        (&empty, "is no shared library: the file is empty"),
        (&foreign, "is built for ARM (32 bit), but this program runs on"),
        (&missing, "cannot be read"),
    ] {
        let name = format!("plugin:{}", path.display());
        let listed = neuropil(&["devices", "--device", &name, "--json"]).json();
        let said = listed[0]["disabled"][0]["reason"].as_str().unwrap().to_owned();
        assert!(said.contains(reason), "{said}");
    }
    // All of a folder, the good one among them.
    std::fs::copy(library("neuropil_sim_npu"), dir.path().join("good.so")).unwrap();
    let name = format!("plugin:{}", dir.path().display());
    let listed = neuropil(&["devices", "--device", &name, "--json"]).json();
    let works = |unit: &Value| !unit["supports"].as_array().unwrap().is_empty();
    let working: Vec<bool> = listed.as_array().unwrap().iter().map(works).collect();
    assert_eq!(working, [false, false, true, false]);
}

#[test]
fn a_named_unit_computes_and_the_report_says_what() {
    let (_dir, model) = toy();
    let want = run(&model, &["--json"]).json();
    assert_eq!(want["events"], serde_json::json!([]));
    let got = run(&model, &["--json", "--strict", "--device", &sim("")]).json();
    assert_eq!(got["tokens"], want["tokens"]);
    let on_unit = |place: &Value| place["unit"] == "software NPU 0" && place["op"] == "ffn f32";
    assert!(got["placement"].as_array().unwrap().iter().any(on_unit), "{}", got["placement"]);
    // It fails in the middle: the run goes on and tells, or ends with its error.
    let failing = sim("fault=error@cluster:3&fault_columns=192");
    let got = run(&model, &["--json", "--device", &failing]).json();
    assert_eq!(got["tokens"], want["tokens"]);
    let event = got["events"][0].as_str().unwrap();
    assert!(
        event.starts_with("unit software NPU 0 taken out: plugin sim-npu failed (code -1234)"),
        "{event}"
    );
    let strict = run(&model, &["--json", "--device", &failing, "--strict"]);
    assert!(strict.error(6).contains("code -1234"), "{}", strict.stderr);
}

#[test]
fn a_plugin_that_crashes_or_sleeps_takes_nobody_along() {
    let (_dir, model) = toy();
    let want = run(&model, &[]).text().to_owned();
    for (options, reason) in [
        ("fault=abort@open", "crashed (signal 6 ended it)"),
        ("fault=abort@probe", "crashed (signal 6 ended it)"),
        ("fault=abort@matmul", "crashed (signal 6 ended it)"),
        ("fault=hang@open&hang_ms=60000&deadline_ms=200", "gave no answer in 2 seconds"),
        ("fault=panic@open", "panicked"),
        ("units=0", "has no unit 0"),
        ("color=red", "there is no option color"),
    ] {
        let ran = run(&model, &["--device", &sim(options)]);
        assert_eq!(ran.text(), want, "{options}");
        assert!(ran.stderr.contains(reason) && ran.stderr.contains("going on without it"), "{}", ran.stderr);
        let strict = run(&model, &["--device", &sim(options), "--strict"]);
        // A panic of the plugin is told by the plugin too.
        assert_eq!(strict.code, Some(6), "{options}: {}", strict.stderr);
        let last = strict.stderr.lines().rfind(|line| line.starts_with("error: ")).unwrap();
        assert!(last.contains(reason), "{options}: {last}");
    }
    let missing = run(&model, &["--device", "plugin:/nowhere.so", "--json"]).json();
    assert!(missing["events"][0].as_str().unwrap().contains("/nowhere.so"), "{}", missing["events"]);
    let wrong = run(&model, &["--device", &sim("weights=q9")]);
    assert!(wrong.error(2).contains("plugin option weights=q9 cannot be: choose auto"), "{}", wrong.stderr);
}
