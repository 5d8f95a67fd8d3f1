//! The shape of the workspace: which crate may use which, how long a file may get, and where unsafe code lives.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

/// Which members a member may depend on; dev-dependencies aside. A new crate needs a line.
const ALLOWED: &[(&str, &[&str])] = &[
    ("neuropil-device", &[]),
    ("neuropil-plugin-abi", &[]),
    ("neuropil-plugin-host", &["neuropil-device", "neuropil-plugin-abi"]),
    ("neuropil-plugin-sdk", &["neuropil-plugin-abi"]),
    ("neuropil-plugin-conformance", &["neuropil-device", "neuropil-plugin-abi"]),
    ("neuropil-plugin-template", &["neuropil-plugin-sdk"]),
    ("neuropil-nnapi-shim", &[]),
    ("neuropil-sim-npu", &["neuropil-plugin-sdk"]),
    ("neuropil-nnapi", &["neuropil-plugin-sdk"]),
    ("neuropil-openvino", &["neuropil-plugin-sdk"]),
    ("neuropil-qnn", &["neuropil-plugin-sdk"]),
    ("neuropil-cpu", &["neuropil-device"]),
    ("neuropil", &["neuropil-device"]),
    (
        "neuropil-cli",
        &[
            "neuropil",
            "neuropil-device",
            "neuropil-cpu",
            "neuropil-plugin-host",
            "neuropil-plugin-conformance",
        ],
    ),
];

/// Members that wire everything and that nothing depends on.
const TOP: [&str; 3] = ["neuropil-cli", "neuropil-tests", "neuropil-benches"];

/// Crates that would bring an async runtime or the network into the library.
const REFUSED: [&str; 5] = ["tokio", "async-std", "smol", "hyper", "reqwest"];

/// Files and folders whose code may be unsafe.
const UNSAFE_CODE: &[&str] = &[
    "core/device/src/arena.rs",
    "core/device/src/bytes.rs",
    "core/runtime/src/gguf/map.rs",
    "core/runtime/src/io/uring.rs",
    "backends/cpu/src/arch/",
    "backends/cpu/src/mem.rs",
    "backends/cpu/src/pool/",
    "plugins/abi/src/",
    "plugins/host/src/border/",
    "plugins/conformance/src/raw/",
    "plugins/openvino/src/library.rs",
    "plugins/openvino/src/runtime.rs",
    "plugins/nnapi/src/library.rs",
    "plugins/nnapi/src/memory.rs",
    "plugins/nnapi/src/runtime.rs",
    "plugins/nnapi/tests/shim/kit.rs",
    "plugins/nnapi-shim/src/c/",
    "plugins/nnapi-shim/src/control.rs",
    "plugins/nnapi-shim/src/memory.rs",
    "plugins/nnapi-shim/src/operand.rs",
    "plugins/nnapi-shim/src/run.rs",
    "plugins/nnapi-shim/src/world.rs",
    "plugins/nnapi-shim/tests/",
    "plugins/sdk/src/border/",
    "plugins/qnn/src/graph.rs",
    "plugins/qnn/src/library.rs",
    "plugins/qnn/src/memory.rs",
    "plugins/qnn/src/power.rs",
    "plugins/qnn/src/runtime.rs",
    "tests/loom/tests/shared.rs",
    "tests/src/counting_alloc.rs",
    "benches/src/loops/",
];

/// Lines that a source file may have.
const LONGEST: usize = 800;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the tests lie in the workspace").into()
}

/// The members, each with the crates it depends on directly, dev-dependencies aside.
fn members() -> BTreeMap<String, BTreeSet<String>> {
    let args = ["metadata", "--format-version", "1", "--offline", "--no-deps"];
    let output = Command::new(env!("CARGO")).args(args).current_dir(root()).output().expect("cargo runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let metadata: Value = serde_json::from_slice(&output.stdout).expect("cargo prints JSON");
    let text = |value: &Value| value.as_str().unwrap_or_default().to_string();
    let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
    let direct = |package: &Value| {
        let normal = list(&package["dependencies"]).into_iter().filter(|d| d["kind"] != "dev");
        normal.map(|d| text(&d["name"])).collect()
    };
    list(&metadata["packages"]).iter().map(|p| (text(&p["name"]), direct(p))).collect()
}

/// Every package of the lock file with what it depends on, on any platform. Versions of one name count as one.
fn locked() -> BTreeMap<String, BTreeSet<String>> {
    let lock = std::fs::read_to_string(root().join("Cargo.lock")).expect("the lock file is committed");
    let mut packages: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    let mut name = String::new();
    for line in lock.lines() {
        if let Some(rest) = line.strip_prefix("name = ") {
            name = rest.trim_matches('"').into();
            packages.entry(name.clone()).or_default();
        } else if let Some(rest) = line.strip_prefix(" \"") {
            let dependency = rest.split([' ', '"']).next().unwrap_or_default();
            packages.entry(name.clone()).or_default().insert(dependency.into());
        }
    }
    packages
}

#[test]
fn dependencies_point_one_way() {
    let members = members();
    for (name, dependencies) in &members {
        let among: BTreeSet<&str> =
            dependencies.iter().filter(|d| members.contains_key(*d)).map(String::as_str).collect();
        let top: Vec<&&str> = among.iter().filter(|d| TOP.contains(d)).collect();
        assert!(top.is_empty(), "{name} depends on {top:?}, on which nothing may");
        if ["neuropil-tests", "neuropil-benches"].contains(&name.as_str()) {
            continue;
        }
        let allowed = ALLOWED.iter().find(|(n, _)| n == name);
        let (_, allowed) = allowed.unwrap_or_else(|| panic!("{name} has no line in the table above"));
        let more: Vec<&&str> = among.iter().filter(|d| !allowed.contains(d)).collect();
        assert!(more.is_empty(), "{name} must not depend on {more:?}");
    }
}

#[test]
fn the_contract_stands_on_four_crates() {
    let want: BTreeSet<String> = ["bytemuck", "half", "rustix", "thiserror"].map(String::from).into();
    assert_eq!(members()["neuropil-device"], want);
}

#[test]
fn the_library_brings_no_async_runtime_and_no_network() {
    let (members, locked) = (members(), locked());
    for library in ["neuropil", "neuropil-device"] {
        let mut seen = BTreeSet::new();
        let mut next: Vec<String> = vec![library.into()];
        while let Some(name) = next.pop() {
            assert!(!REFUSED.contains(&name.as_str()), "{library} depends on {name}");
            if seen.insert(name.clone()) {
                // The lock file mixes a member's dev-dependencies in; cargo metadata keeps them apart.
                let dependencies = members.get(&name).or_else(|| locked.get(&name));
                next.extend(dependencies.into_iter().flatten().cloned());
            }
        }
        assert!(seen.contains("syn"), "the walk must reach far below: {seen:?}");
    }
}

/// The Rust files of the workspace, by their path from the root.
fn sources() -> Vec<(String, String)> {
    let mut folders: Vec<PathBuf> =
        ["core", "backends", "plugins", "benches", "tests"].iter().map(|f| root().join(f)).collect();
    let mut files = Vec::new();
    while let Some(folder) = folders.pop() {
        let Ok(entries) = std::fs::read_dir(&folder) else { continue };
        for path in entries.flatten().map(|entry| entry.path()) {
            if path.is_dir() && !path.ends_with("target") {
                folders.push(path);
            } else if path.extension().is_some_and(|e| e == "rs") {
                let name = path.strip_prefix(root()).unwrap_or(&path).to_string_lossy().replace('\\', "/");
                files.push((name, std::fs::read_to_string(&path).expect("sources are UTF-8")));
            }
        }
    }
    assert!(files.len() > 10, "the sources were found");
    files
}

#[test]
fn no_source_file_is_too_long() {
    for (name, text) in sources() {
        let lines = text.lines().count();
        assert!(lines <= LONGEST, "{name} has {lines} lines; cut it by ideas");
    }
}

#[test]
fn unsafe_code_lives_where_it_may() {
    let keyword = concat!("un", "safe");
    for (name, text) in sources() {
        if UNSAFE_CODE.iter().any(|place| name == *place || place.ends_with('/') && name.starts_with(place)) {
            continue;
        }
        for (number, line) in text.lines().enumerate() {
            let code = line.split("//").next().unwrap_or_default();
            let found = code.split(|c: char| !c.is_alphanumeric() && c != '_').any(|word| word == keyword);
            assert!(!found, "{name}:{}: {keyword} code outside its places", number + 1);
        }
    }
}
