//! Plugins to test, built when they are needed.

#![allow(dead_code, reason = "each test uses some of it")]

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use neuropil_plugin_conformance::{Report, Status};

/// The folder of the profile: `target/debug`.
pub fn built() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    test.parent().and_then(Path::parent).unwrap().into()
}

/// Builds a target of a package with cargo; the library that it is, in a folder of `target`.
fn library(package: &str, target: &[&str], file: &str) -> PathBuf {
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(["build", "--offline", "--quiet", "-p", package]).args(target);
    cargo.arg("--target-dir").arg(built().parent().unwrap()).current_dir(env!("CARGO_MANIFEST_DIR"));
    if built().ends_with("release") {
        cargo.arg("--release");
    }
    assert!(cargo.status().unwrap().success(), "{package} is built");
    let (prefix, suffix) = (std::env::consts::DLL_PREFIX, std::env::consts::DLL_SUFFIX);
    let folder = if target.is_empty() { built() } else { built().join("examples") };
    folder.join(format!("{prefix}{file}{suffix}"))
}

/// The software NPU.
pub fn sim() -> &'static Path {
    static PATH: OnceLock<PathBuf> = OnceLock::new();
    PATH.get_or_init(|| library("neuropil-sim-npu", &[], "neuropil_sim_npu"))
}

/// The plugin that offers everything.
pub fn complete() -> &'static Path {
    static PATH: OnceLock<PathBuf> = OnceLock::new();
    PATH.get_or_init(|| library("neuropil-plugin-conformance", &["--example", "complete"], "complete"))
}

/// Asserts that nothing failed, and prints what there was.
pub fn good(what: &str, report: &Report) {
    println!("{what}: {}", report.summary());
    for (kind, error, precision) in report.precision() {
        println!("  {kind}: {error:.2e}, {}", precision.name());
    }
    assert_eq!(report.failed(), 0, "{what}: {}", report.summary());
    let mut ids: Vec<&str> = report.known.iter().map(String::as_str).collect();
    ids.sort_unstable();
    assert!(ids.windows(2).all(|pair| pair[0] != pair[1]), "no two cases have one id");
    for case in &report.cases {
        let bare = matches!(&case.status, Status::Unsupported(reason) if reason.trim().is_empty());
        assert!(!bare, "{}: a no has a reason", case.id);
    }
}
