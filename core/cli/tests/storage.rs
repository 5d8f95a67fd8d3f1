//! Models in less memory than their weights, as a user runs them: the store that is made once, what reports say, and
//! which switches change nothing.

mod common;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use common::{Ran, arg, command, neuropil};
use neuropil_device::DType;
use neuropil_tests::temp::TempDir;
use neuropil_tests::toy::Toy;
use serde_json::Value;

/// Less than the neurons of the toy take with all else, and enough for some.
const BUDGET: &str = "20MiB";

/// A model whose neurons are most of it: ReLU, with predictors.
fn toy_bytes() -> &'static [u8] {
    static BYTES: OnceLock<Vec<u8>> = OnceLock::new();
    BYTES.get_or_init(|| {
        let toy = Toy {
            layers: 3,
            ffn: 4096,
            activation: Some("relu"),
            predictor_rank: Some(16),
            dtypes: vec![("fc2", DType::F16), ("", DType::Q8_0)],
            context: 1024,
            ..Toy::default()
        };
        toy.file().bytes()
    })
}

/// The toy in a folder of its own.
fn model() -> (TempDir, PathBuf) {
    let dir = TempDir::new();
    let path = dir.file("m.gguf", toy_bytes());
    (dir, path)
}

/// The toy as a store.
fn store() -> (TempDir, PathBuf) {
    let (dir, path) = model();
    let store = dir.path().join("store.gguf");
    neuropil(&["convert", arg(&path), arg(&store)]).text();
    (dir, store)
}

/// Adds flags to a run of a few tokens.
fn args<'a>(model: &'a Path, flags: &[&'a str]) -> Vec<&'a str> {
    let run = ["run", arg(model), "-p", "abcdefgh", "-n", "8", "--temp", "0", "--ignore-eos", "--json"];
    run.iter().chain(flags).copied().collect()
}

fn run(model: &Path, flags: &[&str]) -> Ran {
    neuropil(&args(model, flags))
}

fn names(dir: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(dir).unwrap().flatten();
    let mut names: Vec<String> = entries.map(|e| e.file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn a_model_that_does_not_fit_is_turned_into_a_store_once() {
    let (dir, model) = model();
    let cache = dir.path().join("cache");
    let flags = ["--memory", BUDGET, "--cache-dir", arg(&cache)];
    let first = run(&model, &flags);
    let json = first.json();
    let stores = cache.join("stores");
    let [name] = &names(&stores)[..] else { panic!("one store") };
    let made = stores.join(name);
    assert!(first.stderr.contains("once") && first.stderr.contains(arg(&made)), "{}", first.stderr);
    assert!(json["cache"]["cold"]["misses"].as_u64().unwrap() > 0);

    let second = run(&model, &flags);
    assert_eq!(second.json()["tokens"], json["tokens"]);
    assert!(!second.stderr.contains("once"), "{}", second.stderr);
    // The model under another name is the same model.
    let other = dir.file("other.gguf", toy_bytes());
    assert!(!run(&other, &flags).stderr.contains("once"));

    // What is no whole store is made anew, whatever is left of it.
    let bytes = std::fs::read(&made).unwrap();
    let tail = [&bytes[..100], b"damage"].concat();
    for damaged in [&bytes[..bytes.len() / 2], &bytes[..5000], &tail, toy_bytes(), b""] {
        std::fs::write(&made, damaged).unwrap();
        std::fs::write(stores.join(format!(".{name}.tmp")), &bytes[..3000]).unwrap();
        let again = run(&model, &flags);
        assert_eq!(again.json()["tokens"], json["tokens"]);
        assert!(again.stderr.contains("once"), "{}", again.stderr);
        assert!(std::fs::read(&made).unwrap() == bytes);
        assert_eq!(names(&stores), [name.as_str()]);
    }
    // With room for all of it, there is no store.
    let other = dir.path().join("unused");
    let whole = run(&model, &["--memory", "1GiB", "--cache-dir", arg(&other)]);
    whole.json();
    assert!(!whole.stderr.contains("once") && !other.exists(), "{}", whole.stderr);
}

#[test]
fn a_place_where_no_store_can_be_written_is_one_line() {
    let (dir, model) = model();
    let file = dir.file("file", b"");
    let below = file.join("cache");
    let ran = run(&model, &["--memory", BUDGET, "--cache-dir", arg(&below)]);
    let line = ran.error(3);
    assert!(line.contains(arg(&below)) && line.contains("--cache-dir"), "{line}");

    let cache = dir.path().join("cache");
    let script = "ulimit -f 2000; exec \"$0\" \"$@\"";
    let program = command(&[]).get_program().to_owned();
    let flags = args(&model, &["--memory", BUDGET, "--cache-dir", arg(&cache)]);
    let ran = Command::new("sh").arg("-c").arg(script).arg(program).args(flags).output().unwrap();
    let ran = Ran::new(ran);
    let line = ran.error(9);
    assert!(line.contains("no space left") && line.contains("--cache-dir"), "{line}");
    assert!(names(&cache.join("stores")).is_empty());
}

#[test]
fn a_run_out_of_storage_reports_what_it_read() {
    let (_dir, store) = store();
    for predict in ["auto", "off", "gate"] {
        let json = run(&store, &["--memory", BUDGET, "--predict", predict]).json();
        let memory = &json["memory"];
        assert_eq!(memory["budget_bytes"], 20 << 20);
        let (hot, cold) = (memory["hot_bytes"].as_u64().unwrap(), memory["cold_bytes"].as_u64().unwrap());
        let resident = memory["resident_bytes"].as_u64().unwrap();
        assert!(hot + cold > 1 << 19 && hot + cold + resident < 20 << 20, "{predict}: {memory}");
        assert!(memory["peak_bytes"].as_u64().unwrap() < (20 + 64) << 20, "{predict}: {memory}");
        for segment in ["hot", "cold"] {
            let segment = &json["cache"][segment];
            let count = |name: &str| segment[name].as_u64().unwrap_or_else(|| panic!("{name} of {segment}"));
            let asked = count("hits") + count("joined") + count("misses");
            let rate = segment["hit_rate"].as_f64().unwrap();
            let want = if asked == 0 { 1.0 } else { count("hits") as f64 / asked as f64 };
            assert!((rate - want).abs() < 1e-9, "{predict}: {segment}");
            count("evictions");
        }
        let io = &json["io"];
        assert!(!io["engine"].as_str().unwrap().is_empty());
        let (reads, bytes) = (io["reads"].as_u64().unwrap(), io["bytes"].as_u64().unwrap());
        assert!(reads > 0 && bytes / reads >= 256, "{io}");
        // Nine tokens of the prompt and seven steps.
        assert_eq!(io["bytes_per_token"].as_u64().unwrap(), bytes / 16);
        let share = io["critical_path_share"].as_f64().unwrap();
        assert!((0.0..=1.0).contains(&share), "{io}");
    }
    let json = run(&store, &["--memory", "1GiB"]).json();
    assert_eq!(json["memory"]["budget_bytes"], 1 << 30);
    for absent in ["cache", "io"] {
        assert_eq!(json.get(absent), None);
    }
    assert!(json["memory"].get("hot_bytes").is_none() && json["memory"].get("cold_bytes").is_none());
}

#[test]
fn without_predictions_no_switch_changes_a_token() {
    let (_dir, store) = store();
    let want = run(&store, &["--predict", "off", "--memory", "1GiB"]).json()["tokens"].clone();
    let switches: [&[&str]; 9] = [
        &[],
        &["--policy", "neuropil"],
        &["--policy", "mmap"],
        &["--policy", "llm-flash"],
        &["--no-bundle"],
        &["--no-cache"],
        &["--no-pipeline"],
        &["--no-two-phase"],
        &["--no-bundle", "--no-cache", "--no-pipeline", "--no-two-phase", "--policy", "llm-flash"],
    ];
    for flags in switches {
        // The exact gate of a ReLU model leaves out what changes nothing.
        for predict in ["off", "gate"] {
            let flags = [flags, &["--predict", predict, "--memory", BUDGET]].concat();
            assert_eq!(run(&store, &flags).json()["tokens"], want, "{flags:?}");
        }
    }
}

#[test]
fn a_policy_on_a_file_that_is_no_store_makes_one() {
    let (dir, model) = model();
    let cache = dir.path().join("cache");
    let mapped = run(&model, &["--policy", "mmap", "--predict", "off", "--cache-dir", arg(&cache)]);
    let want = mapped.json()["tokens"].clone();
    let store = cache.join("stores").join(&names(&cache.join("stores"))[0]);
    assert_eq!(run(&store, &["--predict", "off"]).json()["tokens"], want);
}

#[test]
fn every_engine_gives_the_same_tokens() {
    let (_dir, store) = store();
    let want = run(&store, &["--memory", "1GiB"]).json()["tokens"].clone();
    for (io, name) in [
        ("auto", ""),
        ("uring", "uring"),
        ("pread", "pread"),
        ("throttle:ufs4.0", "throttle:ufs4.0"),
        ("throttle:ufs3.1", "throttle:ufs3.1"),
    ] {
        let ran = run(&store, &["--memory", BUDGET, "--io", io]);
        if io == "uring" && ran.code == Some(6) {
            eprintln!("SKIPPED: {}", ran.error(6));
            continue;
        }
        let json = ran.json();
        assert_eq!(json["tokens"], want, "{io}");
        assert!(json["io"]["engine"].as_str().unwrap().contains(name), "{io}: {}", json["io"]);
    }
    for wrong in ["aio", "throttle:", "throttle:ufs9", ""] {
        let ran = run(&store, &["--memory", BUDGET, "--io", wrong]);
        assert!(ran.error(2).contains("there are"), "{wrong}: {}", ran.stderr);
    }
}

/// The lanes of a trace, by number.
fn lanes(events: &[Value]) -> BTreeMap<u64, &str> {
    let named = events.iter().filter(|event| event["name"] == "thread_name");
    named.map(|event| (event["tid"].as_u64().unwrap(), event["args"]["name"].as_str().unwrap())).collect()
}

#[test]
fn a_trace_shows_who_did_what() {
    let (dir, store) = store();
    let trace = dir.path().join("trace.json");
    let read = || serde_json::from_slice::<Value>(&std::fs::read(&trace).unwrap()).unwrap();
    run(&store, &["-t", "3", "--memory", BUDGET, "--trace", arg(&trace)]).json();
    let json = read();
    let events = json["traceEvents"].as_array().unwrap();
    let names = lanes(events);
    let mut sorted: Vec<&str> = names.values().copied().collect();
    sorted.sort_unstable();
    assert_eq!(sorted, ["I/O", "compute 0", "compute 1", "compute 2", "conductor", "device 0"]);
    for (lane, name) in [
        ("conductor", "step"),
        ("conductor", "predict"),
        ("conductor", "acquire"),
        ("I/O", "submit"),
        ("I/O", "arrived"),
        ("device 0", "matmul"),
        ("device 0", "down"),
        ("compute 0", "pack"),
        ("compute 0", "matmul"),
        ("compute 2", "start"),
    ] {
        let of = |event: &&Value| event["name"] == name && event["ph"] == "X";
        let mut spans = events.iter().filter(of);
        assert!(spans.any(|span| names[&span["tid"].as_u64().unwrap()] == lane), "{name} of {lane}");
    }
    let timed = events.iter().filter(|event| event["ph"] == "X");
    assert!(timed.clone().count() > 20);
    assert!(timed.clone().all(|event| event["ts"].as_f64().is_some() && event["dur"].as_f64().is_some()));
    // Also where nothing is read, by the system's page cache, and by the other verbs that run a model.
    let text = dir.file("text", &b"abcdefgh".repeat(100));
    for args in [
        args(&store, &["-t", "2"]),
        args(&store, &["-t", "2", "--policy", "mmap"]),
        vec!["logits", arg(&store), "-p", "abc", "-t", "2"],
        vec!["perplexity", arg(&store), "-f", arg(&text), "--chunk", "64", "-t", "2"],
    ] {
        std::fs::remove_file(&trace).unwrap();
        neuropil(&[&args[..], &["--trace", arg(&trace)]].concat()).json();
        let json = read();
        let names = lanes(json["traceEvents"].as_array().unwrap());
        let mut names: Vec<&str> = names.into_values().collect();
        names.sort_unstable();
        assert_eq!(names, ["compute 0", "compute 1", "conductor", "device 0"], "{args:?}");
    }

    // Before anything is loaded: there is no such model either.
    let nowhere = dir.path().join("none").join("trace.json");
    for path in [arg(&nowhere), arg(dir.path())] {
        let ran = neuropil(&["run", "/nowhere.gguf", "-p", "a", "--trace", path]);
        assert!(ran.error(9).contains(path), "{}", ran.stderr);
    }
}

#[test]
fn a_budget_that_is_too_small_names_one_that_works() {
    let (dir, store) = store();
    let cache = dir.path().join("cache");
    let plain = dir.path().join("m.gguf");
    for model in [&store, &plain] {
        let ran = run(model, &["--memory", "1MiB", "--cache-dir", arg(&cache)]);
        let line = ran.error(8);
        let (_, rest) = line.split_once("at least ").unwrap_or_else(|| panic!("{line}"));
        let (size, fix) = rest.split_once(';').unwrap();
        assert_eq!(fix, " raise --memory", "{line}");
        assert!(line.contains("budget of 1MiB"), "{line}");
        run(model, &["--memory", size, "--cache-dir", arg(&cache)]).json();
        let json = run(model, &["--memory", size, "--cache-dir", arg(&cache), "--predict", "off"]);
        assert!(matches!(json.code, Some(0 | 8)), "{}", json.stderr);
    }
    let ran = run(&store, &["--memory", "20MiB", "--exact"]);
    let line = ran.error(8);
    assert!(line.ends_with("; raise --memory, or leave --exact out"), "{line}");
    for wrong in ["0", "lots", "1XB", "1e99", "", "99999999999999999999999"] {
        let ran = run(&store, &["--memory", wrong]);
        assert!(ran.error(2).contains("512MiB"), "{wrong}: {}", ran.stderr);
    }
}

#[test]
fn a_context_beyond_the_budget_is_said_in_one_line() {
    let (_dir, store) = store();
    let text = "abcdefgh".repeat(125);
    let ran = neuropil(&["run", arg(&store), "--memory", "18MiB", "--kv", "f32", "-p", &text, "-n", "4"]);
    let line = ran.error(8);
    assert!(line.contains("18MiB") && line.ends_with("lower --ctx, or use --kv q8_0"), "{line}");
}

/// Under every limit on its address space the program works or says that memory ran out: it is never killed.
#[test]
#[cfg(target_os = "linux")]
fn a_limit_on_memory_is_an_error_and_no_abort() {
    let (_dir, store) = store();
    let program = command(&[]).get_program().to_owned();
    let script = "ulimit -v \"$1\"; shift; exec \"$0\" \"$@\"";
    let (mut failed, mut passed) = (0, 0);
    for mib in (36..160).step_by(6).chain([4000]) {
        let limit = (mib << 10).to_string();
        for flags in [&["-t", "1"][..], &["-t", "2", "--memory", BUDGET]] {
            let mut shell = Command::new("sh");
            shell.arg("-c").arg(script).arg(&program).arg(&limit).args(args(&store, flags));
            let ran = Ran::new(shell.output().unwrap());
            match ran.code {
                Some(0) => passed += 1,
                Some(6 | 8) => {
                    failed += 1;
                    assert!(ran.stderr.lines().count() == 1, "{mib} MiB, {flags:?}: {}", ran.stderr);
                }
                code => panic!("{mib} MiB, {flags:?}: {code:?}, {}", ran.stderr),
            }
        }
    }
    assert!(failed > 2 && passed > 2, "{failed} failed, {passed} passed");
}

/// A control group with a limit on memory, page cache included; gone when dropped.
#[cfg(target_os = "linux")]
struct Group(PathBuf);

#[cfg(target_os = "linux")]
impl Group {
    /// One below that of this process, of version 1; none where that is not allowed.
    fn new() -> Option<Group> {
        let own = std::fs::read_to_string("/proc/self/cgroup").ok()?;
        let path = own.lines().find_map(|line| line.split_once(':')?.1.strip_prefix("memory:/"))?;
        let group = Path::new("/sys/fs/cgroup/memory").join(path);
        let group = group.join(format!("neuropil-test-{}", std::process::id()));
        std::fs::create_dir(&group).ok()?;
        let group = Group(group);
        group.limit(1 << 30).then_some(group)
    }

    fn limit(&self, bytes: u64) -> bool {
        std::fs::write(self.0.join("memory.limit_in_bytes"), bytes.to_string()).is_ok()
    }
}

#[cfg(target_os = "linux")]
impl Drop for Group {
    fn drop(&mut self) {
        let _ = std::fs::write(self.0.join("memory.force_empty"), "0");
        let _ = std::fs::remove_dir(&self.0);
    }
}

/// What a process may take beside its budget: the system's own pages of it, and what is reclaimed late.
#[cfg(target_os = "linux")]
const SLACK: u64 = 64 << 20;

#[test]
#[cfg(target_os = "linux")]
fn the_process_stays_within_its_budget() {
    let Some(file) = neuropil_tests::real::smollm2() else { return };
    let dir = TempDir::new();
    let store = dir.path().join("store.gguf");
    neuropil(&["convert", arg(&file), arg(&store)]).text();
    let group = Group::new();
    if group.is_none() {
        eprintln!("SKIPPED: no control group of version 1 can be made, so only the peak is looked at");
    }
    let long = "The quick brown fox jumps over the lazy dog and runs. ".repeat(24);
    let cases: [(u64, &str, &[&str]); 20] = [
        (76, "hi", &[]),
        (76, "hi", &["--kv", "q8_0"]),
        (76, "hi", &["--predict", "off"]),
        (84, "hi", &["--samples", "4"]),
        (84, &long, &[]),
        (84, &long, &["--kv", "q8_0", "--samples", "4"]),
        (92, &long, &["--kv", "f32"]),
        (92, &long, &["--samples", "4"]),
        (92, &long, &["-t", "1"]),
        (92, "hi", &["--io", "pread"]),
        (100, &long, &["--kv", "q8_0"]),
        (100, &long, &["--io", "pread", "--samples", "4"]),
        (100, "hi", &["--ctx", "1024"]),
        (100, "hi", &["--policy", "llm-flash"]),
        (112, &long, &["--kv", "f32", "--samples", "4"]),
        (112, &long, &["--no-pipeline"]),
        (128, &long, &["--samples", "4"]),
        (128, "hi", &["--kv", "f32"]),
        (200, &long, &["--samples", "4"]),
        (400, &long, &["--kv", "f32"]),
    ];
    let run = |limit: u64, model: &Path, prompt: &str, flags: &[&str]| {
        let given = ["run", arg(model), "-p", prompt, "-n", "4", "--temp", "0", "--ignore-eos", "--json"];
        let program = command(&[]).get_program().to_owned();
        let mut shell = Command::new("sh");
        match &group {
            Some(group) => {
                assert!(group.limit(limit));
                let script = "echo $$ > \"$1\" && shift && exec \"$0\" \"$@\"";
                shell.arg("-c").arg(script).arg(program).arg(group.0.join("cgroup.procs"));
            }
            None => drop(shell.arg("-c").arg("exec \"$0\" \"$@\"").arg(program)),
        }
        Ran::new(shell.args(given).args(flags).output().unwrap())
    };
    for (mib, prompt, flags) in cases {
        let budget = mib << 20;
        let size = budget.to_string();
        let json = run(budget + SLACK, &store, prompt, &[flags, &["--memory", &size]].concat()).json();
        let memory = &json["memory"];
        let peak = memory["peak_bytes"].as_u64().unwrap();
        assert!(peak <= budget + SLACK, "{mib} MiB, {flags:?}: {memory}");
        assert_eq!(memory["budget_bytes"], budget);
    }
    if group.is_some() {
        // Without a budget the group's limit is one, and the model is turned into a store, within it too.
        let limit = 128 << 20;
        let ran = run(limit, &file, "hi", &["--cache-dir", arg(dir.path())]);
        let budget = ran.json()["memory"]["budget_bytes"].as_u64().unwrap();
        assert!(ran.stderr.contains("once") && budget < limit, "{budget}: {}", ran.stderr);
    }
}
