//! Where real libraries of QNN are, and the plugin opened with one.

#![allow(dead_code, reason = "each test uses some of it")]

use std::path::{Path, PathBuf};

use neuropil_plugin_conformance::raw::{Device, Failure, Plugin};

/// The folder of models and runtimes.
pub fn cache() -> Option<PathBuf> {
    let absolute = |name| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let base = absolute("XDG_CACHE_HOME").or_else(|| Some(absolute("HOME")?.join(".cache")))?;
    Some(base.join("neuropil"))
}

/// The libraries of this name, of every version in the cache: `qnn/VERSION` holds the unpacked Python package
/// `onnxruntime-qnn`, or the libraries. Without one the tests are skipped, and say so.
pub fn libraries(name: &str) -> Vec<PathBuf> {
    let root = cache().unwrap_or_default().join("qnn");
    let versions = std::fs::read_dir(&root).into_iter().flatten().flatten().map(|entry| entry.path());
    let places = versions.flat_map(|version| [version.join("onnxruntime_qnn"), version]);
    let mut found: Vec<PathBuf> =
        places.map(|place| place.join(name)).filter(|path| path.is_file()).collect();
    found.sort();
    if found.is_empty() {
        println!("SKIPPED: there is no {name} in {}", root.display());
    }
    found
}

/// The plugin, as a library.
pub fn plugin() -> Plugin {
    Plugin::of_crate("neuropil_qnn")
}

/// Opens a library with options.
pub fn open(library: &Path, options: &[(&str, &str)]) -> Result<Device, Failure> {
    plugin().open(0, &[&[("library", library.to_str().unwrap())], options].concat())
}
