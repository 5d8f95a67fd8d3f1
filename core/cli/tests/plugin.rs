//! `plugin check`: good plugins, broken ones, and files that are none.

mod common;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use common::{Ran, arg, neuropil};
use neuropil_tests::temp::TempDir;
use serde_json::Value;

/// The software NPU, built beside the program.
fn sim() -> &'static str {
    static PATH: OnceLock<PathBuf> = OnceLock::new();
    let path = PATH.get_or_init(|| {
        let folder = Path::new(env!("CARGO_BIN_EXE_neuropil")).parent().unwrap();
        let mut cargo = Command::new(env!("CARGO"));
        cargo.args(["build", "--offline", "--quiet", "-p", "neuropil-sim-npu"]);
        cargo.arg("--target-dir").arg(folder.parent().unwrap()).current_dir(env!("CARGO_MANIFEST_DIR"));
        if folder.ends_with("release") {
            cargo.arg("--release");
        }
        assert!(cargo.status().unwrap().success(), "the software NPU is built");
        let (prefix, suffix) = (std::env::consts::DLL_PREFIX, std::env::consts::DLL_SUFFIX);
        folder.join(format!("{prefix}neuropil_sim_npu{suffix}"))
    });
    arg(path)
}

fn check(plugin: &str, flags: &[&str]) -> Ran {
    neuropil(&[&["plugin", "check", plugin], flags].concat())
}

/// The document and the line of a check in which something failed.
fn failed(ran: &Ran) -> (Value, String) {
    assert_eq!(ran.code, Some(6), "{}", ran.stderr);
    let lines: Vec<&str> = ran.stderr.lines().collect();
    let [line] = lines[..] else { panic!("{}", ran.stderr) };
    let document = serde_json::from_slice(&ran.stdout).expect("standard output is one JSON document");
    (document, line.strip_prefix("error: ").expect("it is an error").to_owned())
}

#[test]
fn a_good_plugin_passes() {
    let document = check(sim(), &["--json"]).json();
    assert_eq!(document["plugin"]["name"], "sim-npu");
    assert_eq!(document["plugin"]["abi"], "1.0");
    assert!(document["plugin"]["version"].is_string());
    let count = |name: &str| document[name].as_u64().unwrap();
    assert!(count("total") >= 2000 && count("passed") >= 2000 && count("failed") == 0, "{}", count("passed"));
    assert_eq!(count("passed") + count("unsupported"), count("total"));
    let cases = document["cases"].as_array().unwrap();
    assert_eq!(cases.len() as u64, count("total"));
    for case in cases {
        assert!(case["id"].as_str().unwrap().starts_with(case["group"].as_str().unwrap()));
        assert!(case["status"] != "unsupported" || !case["reason"].as_str().unwrap().is_empty(), "{case}");
    }
    let of = |status: &str| cases.iter().filter(|case| case["status"] == status).count() as u64;
    assert_eq!((of("passed"), of("unsupported")), (count("passed"), count("unsupported")));
    assert!(cases.iter().any(|case| case["ns"].is_u64()) && cases.iter().any(|case| case["error"].is_f64()));
    let f32 = document["precision"].as_array().unwrap().iter().find(|p| p["scheme"] == "f32").unwrap();
    assert_eq!(f32["class"], "exact");
}

#[test]
fn people_get_a_line_for_each_group() {
    let plugin = format!("plugin:{}?schemes=f32&clusters=off", sim());
    let ran = check(&plugin, &["--filter", "weight"]);
    let text = ran.text();
    assert!(text.starts_with("sim-npu ") && text.contains("  weight "), "{text}");
    assert!(text.contains("unsupported, ") && text.contains("it takes f32"), "{text}");
    assert!(text.lines().last().unwrap().contains(" cases: "), "{text}");
    let pattern = check(sim(), &["--filter", "matmul/product/f16/*/t1/random", "--json"]).json();
    assert_eq!(pattern["total"], pattern["cases"].as_array().unwrap().len());
    let ids: Vec<&str> =
        pattern["cases"].as_array().unwrap().iter().map(|c| c["id"].as_str().unwrap()).collect();
    assert!(ids.iter().all(|id| *id == "info/open/unit" || id.starts_with("matmul/product/f16/")), "{ids:?}");
    assert!(ids.len() > 5);
}

#[test]
fn what_is_broken_fails_and_the_case_is_named() {
    for (fault, filter, word) in [
        ("tile@matmul:9", "matmul", "is allowed: token"),
        ("nan@matmul:2", "matmul", "is NaN"),
        ("error@matmul:3", "matmul", "the fault that was asked for"),
        ("panic@prepare", "weight", "the plugin panicked: the panic that was asked for"),
        ("abort@matmul:3", "matmul", "the plugin ended the process (signal 6 SIGABRT)"),
        ("abort@open", "info", "the plugin ended the process"),
        ("error@open:2", "info", "open failed"),
    ] {
        let plugin = format!("{}?fault={fault}", sim());
        let ran = check(&plugin, &["--filter", filter, "--json"]);
        let (document, line) = failed(&ran);
        assert!(line.contains(word), "{fault}: {line}");
        let first =
            document["cases"].as_array().unwrap().iter().find(|case| case["status"] == "failed").unwrap();
        assert!(line.contains(first["id"].as_str().unwrap()), "{fault}: {line}");
        assert!(first["reason"].as_str().unwrap().contains(word), "{fault}: {first}");
    }
}

#[test]
fn a_hang_is_a_case_that_failed() {
    let plugin = format!("{}?fault=hang@matmul:2&hang_ms=60000", sim());
    let (document, line) = failed(&check(&plugin, &["--filter", "matmul", "--timeout", "2", "--json"]));
    assert!(line.contains("matmul/product/f32/") && line.contains("did not end within 2 s"), "{line}");
    assert_eq!(document["failed"], 1);
}

#[test]
fn what_is_known_to_fail_is_no_failure_and_what_is_not_is_one() {
    let dir = TempDir::new();
    let list = |text: &str| dir.file("known", text.as_bytes());
    let plugin = format!("{}?fault=nan@matmul:2", sim());
    let flags = |path: &Path| {
        vec!["--filter".to_owned(), "matmul".into(), "--json".into(), "--expect".into(), arg(path).into()]
    };
    let run = |plugin: &str, text: &str| {
        let path = list(text);
        let flags = flags(&path);
        check(plugin, &flags.iter().map(String::as_str).collect::<Vec<_>>())
    };
    let (found, _) = failed(&check(&plugin, &["--filter", "matmul", "--json"]));
    let cases = found["cases"].as_array().unwrap();
    let id = cases.iter().find(|case| case["status"] == "failed").unwrap()["id"].as_str().unwrap().to_owned();

    let document = run(&plugin, &format!("# broken\n{id}  # the second product has a NaN\n")).json();
    assert_eq!((&document["failed"], &document["expected_failures"]), (&0.into(), &1.into()));
    let (document, line) = failed(&run(sim(), &format!("{id} # no more")));
    assert!(line.contains("it passed, but is listed") && line.contains(&id), "{line}");
    assert_eq!(document["failed"], 1);
    let ran = run(sim(), "matmul/none/* # x");
    assert!(ran.error(2).contains("matmul/none/* names no case"), "{}", ran.stderr);
    let ran = run(sim(), "timing/deadline/f32/* # left out by the filter, but there");
    assert_eq!(ran.code, Some(0), "{}", ran.stderr);
    // What comes after a crash was not tested, so nothing makes that good. It is in the same case: the second product.
    let (document, line) =
        failed(&run(&format!("{}?fault=abort@matmul:2", sim()), &format!("{id} # it crashes")));
    assert!(line.contains("the plugin ended the process") && line.contains(&id), "{line}");
    assert_eq!((&document["failed"], &document["expected_failures"]), (&1.into(), &0.into()));
    let ran = run(sim(), &id);
    assert!(ran.error(2).contains("line 1"), "{}", ran.stderr);
    assert!(check(sim(), &["--expect", "/no/such/list"]).error(3).contains("/no/such/list"));
}

#[test]
fn what_is_no_plugin_is_one_sentence() {
    let dir = TempDir::new();
    let text = dir.file("text.so", b"no library");
    let program = env!("CARGO_BIN_EXE_neuropil");
    for (path, code, word) in [
        ("/no/such/lib.so", 3, "/no/such/lib.so cannot be read"),
        (arg(&text), 6, "it is no ELF file"),
        (program, 6, "cannot be loaded"),
        (arg(dir.path()), 6, "it is no file"),
    ] {
        for flags in [&[][..], &["--json"]] {
            let ran = check(path, flags);
            let line = ran.error(code);
            assert!(line.contains(word), "{path}: {line}");
        }
    }
    let line = check(&format!("{}?weights=f16", sim()), &[]);
    assert!(line.error(2).contains("--device"), "{}", line.stderr);
    let line = check(&format!("{}?speed=9", sim()), &["--filter", "info"]);
    assert_eq!(line.code, Some(6));
    assert!(line.stderr.contains("there is no option speed"), "{}", line.stderr);
}

#[test]
fn words_that_are_no_filter_are_refused() {
    let ran = check(sim(), &["--filter", "matmuls"]);
    assert!(ran.error(2).contains("info buffer weight matmul"), "{}", ran.stderr);
    let ran = check(sim(), &["--filter", "matmul/none/*"]);
    assert!(ran.error(2).contains("leaves no case"), "{}", ran.stderr);
    assert!(neuropil(&["plugin", "check"]).error(2).contains("PATH"));
    assert!(neuropil(&["plugin", "check", "--help"]).text().contains("neuropil plugin check "));
    assert!(!neuropil(&["plugin", "check", "--help"]).text().contains("--child"));
}
