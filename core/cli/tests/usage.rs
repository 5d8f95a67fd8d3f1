//! The command line: what is refused, and how it is said.

mod common;

use common::{neuropil, with_input};

const VERBS: [&str; 11] = [
    "run",
    "chat",
    "demo",
    "inspect",
    "verify",
    "tokenize",
    "logits",
    "perplexity",
    "bench",
    "synth",
    "devices",
];

#[test]
fn every_verb_helps_with_an_example_and_has_the_version() {
    for verb in VERBS {
        let help = neuropil(&[verb, "--help"]);
        assert!(help.text().contains(&format!("neuropil {verb}")), "{verb}");
        assert!(help.text().contains("Example"), "{verb}");
        assert!(neuropil(&[verb, "--version"]).text().contains(env!("CARGO_PKG_VERSION")));
    }
    let help = neuropil(&["--help"]);
    assert!(VERBS.iter().all(|verb| help.text().contains(verb)));
    assert!(help.text().contains("Exit codes:"));
    assert_eq!(neuropil(&["--version"]).text(), format!("neuropil {}\n", env!("CARGO_PKG_VERSION")));
}

#[test]
fn a_wrong_command_line_is_one_line_that_names_the_word() {
    for (args, word) in [
        (&["run", "m.gguf", "--tempp", "1"][..], "--tempp"),
        (&["run"], "<MODEL>"),
        (&["rum"], "rum"),
        (&[], "no verb"),
        (&["run", "m.gguf", "-t", "100000"], "100000"),
        (&["run", "m.gguf", "-t", "-1"], "-1"),
        (&["run", "m.gguf", "--temp", "-1"], "0 or more"),
        (&["run", "m.gguf", "--temp", "hot"], "hot"),
        (&["run", "m.gguf", "--temp", "1", "--temp", "2"], "--temp"),
        (&["run", "m.gguf", "--top-p", "1.1"], "0 to 1"),
        (&["run", "m.gguf", "-n", "-2"], "-2"),
        (&["run", "m.gguf", "--kv", "q4_0"], "f16"),
        (&["run", "m.gguf", "--device", "wgpu"], "cpu"),
        (&["run", "m.gguf", "--logit-bias", "x=1"], "token id"),
        (&["run", "m.gguf", "--stop", ""], "empty"),
        (&["run", "m.gguf", "--system", "x"], "--chat"),
        (&["run", "m.gguf", "-p", "a\nb", "--no\nflag"], "--no"),
        (&["logits", "m.gguf"], "--tokens"),
        (&["logits", "m.gguf", "-p", "x", "--tokens", "1"], "--tokens"),
        (&["perplexity", "m.gguf"], "--file"),
        (&["run", "m.gguf", "--seed", "-1"], "whole number from 0"),
        (&["run", "m.gguf", "--ctx", "-5"], "4294967295"),
        (&["bench", "m.gguf", "-p", "0", "-n", "0"], "-p 0 and -n 0"),
        (&["synth", "x.gguf"], "--shape"),
        (&["synth", "--shape", "gpt", "x.gguf"], "turbosparse-mixtral-47b"),
        (&["synth", "--shape", "toy", "--preset", "easy", "x.gguf"], "smollm2"),
        (&["synth", "--shape", "toy", "--active", "1.5", "x.gguf"], "the share of active neurons"),
        (&["synth", "--shape", "toy", "--active", "-1", "x.gguf"], "the share of active neurons"),
        (&["synth", "--shape", "toy", "--overlap", "0.01", "x.gguf"], "the overlap"),
        (&["synth", "--shape", "toy", "--rank", "0", "x.gguf"], "a multiple of 32"),
        (&["synth", "--shape", "toy", "--rank", "250", "x.gguf"], "a multiple of 32"),
        (&["synth", "--shape", "toy", "--recall", "0.9", "x.gguf"], "--rank"),
        (&["synth", "--shape", "toy", "--rank", "256", "--recall", "1", "x.gguf"], "the recall"),
        (&["synth", "--shape", "toy", "--type", "q4_k", "x.gguf"], "q8_0"),
        (&["synth", "--shape", "toy", "--layers", "0", "x.gguf"], "layers"),
    ] {
        let ran = neuropil(args);
        let line = ran.error(2);
        assert!(line.contains(word), "{args:?}: {line}");
        assert!(line.contains("--help"), "{args:?}: {line}");
        assert!(!line.contains("tip: to pass"), "{args:?}: {line}");
    }
}

#[cfg(unix)]
#[test]
fn flags_that_take_text_say_which_one_is_not_utf8() {
    use std::os::unix::ffi::OsStrExt;
    let bad = std::ffi::OsStr::from_bytes(b"a\xffb");
    for args in [
        &["run", "m.gguf", "-p", "x", "--stop"][..],
        &["run", "m.gguf", "-p", "x", "--chat", "--system"],
        &["chat", "m.gguf", "--system"],
        &["demo", "-p"],
    ] {
        let ran = common::Ran::new(common::command(args).arg(bad).output().unwrap());
        let line = ran.error(2);
        assert!(line.contains(args.last().unwrap()) && line.contains("UTF-8"), "{line}");
    }
}

#[test]
fn what_is_not_built_does_not_exist() {
    for flag in ["--plan=p", "--grammar=g", "--json-schema=s"] {
        let ran = neuropil(&["run", "m.gguf", flag]);
        assert!(ran.error(2).contains("unexpected argument"), "{flag}");
    }
    for verb in ["serve", "profile", "plan", "simulate"] {
        assert!(neuropil(&[verb]).error(2).contains(verb));
    }
}

#[test]
fn a_missing_file_is_a_file_error_also_with_json() {
    for args in [
        &["run", "/no/such.gguf", "-p", "x", "--json"][..],
        &["chat", "/no/such.gguf"],
        &["demo", "--model", "/no/such.gguf"],
        &["inspect", "/no/such.gguf", "--json"],
        &["verify", "/no/such.gguf"],
        &["tokenize", "/no/such.gguf"],
        &["logits", "/no/such.gguf", "-p", "x", "--json"],
        &["perplexity", "/no/such.gguf", "-f", env!("CARGO_MANIFEST_PATH")],
        &["perplexity", "/no/such.gguf", "-f", "/no/such.txt"],
        &["bench", "/no/such.gguf", "--json"],
    ] {
        assert!(with_input(args, b"text").error(3).contains("/no/such."), "{args:?}");
    }
}

#[test]
fn devices_lists_the_cpu_with_every_type() {
    let devices = neuropil(&["devices", "--json"]).json();
    let cpu = &devices.as_array().unwrap()[0];
    assert_eq!((&cpu["backend"], &cpu["kind"]), (&"cpu".into(), &"cpu".into()));
    let supports = cpu["supports"].as_array().unwrap();
    let kernels = ["f32", "f16", "bf16", "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q4_k", "q5_k", "q6_k"];
    let expanded = ["q2_k", "q3_k", "iq4_nl", "iq4_xs", "mxfp4"];
    for dtype in kernels.iter().chain(&expanded) {
        assert!(supports.iter().any(|s| s["op"] == "matmul" && s["dtype"] == *dtype), "{dtype}");
    }
    assert!(
        supports.iter().all(|s| !expanded.contains(&s["dtype"].as_str().unwrap()) || s["how"] == "emulated")
    );
    assert!(cpu["disabled"].is_array() && cpu["memory_bytes"].is_u64() && cpu["name"].is_string());
    assert!(neuropil(&["devices"]).text().contains("q4_k"));
}

#[cfg(unix)]
#[test]
fn without_pip_the_demo_says_what_to_do() {
    let dir = neuropil_tests::temp::TempDir::new();
    let ran =
        common::command(&["demo", "--cache-dir", common::arg(dir.path())]).env("PATH", dir.path()).output();
    let ran = common::Ran::new(ran.unwrap());
    let line = ran.error(7);
    assert!(line.contains("pip") && line.contains("--model FILE"), "{line}");
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "nothing is left behind");
}

#[cfg(unix)]
#[test]
fn a_failing_pip_is_quoted_and_leaves_nothing_behind() {
    use std::os::unix::fs::PermissionsExt;
    let dir = neuropil_tests::temp::TempDir::new();
    let script = "#!/bin/sh\ncase \"$*\" in *--version*) exit 0;; esac\necho no route to host >&2\nexit 1\n";
    let python = dir.file("python3", script.as_bytes());
    std::fs::set_permissions(&python, std::fs::Permissions::from_mode(0o755)).unwrap();
    let cache = dir.path().join("cache");
    let ran = common::command(&["demo", "--json", "--cache-dir", common::arg(&cache)])
        .env("PATH", dir.path())
        .output();
    let ran = common::Ran::new(ran.unwrap());
    let line = ran.error(7);
    assert!(line.contains("no route to host") && line.contains("--model FILE"), "{line}");
    assert_eq!(std::fs::read_dir(&cache).unwrap().count(), 0);
}
