//! What the plugin says of libraries that it cannot use, and of options. No library of QNN is needed.

mod common;

use std::path::{Path, PathBuf};
use std::process::Command;

use common::plugin;
use neuropil_plugin_abi as abi;
use neuropil_plugin_conformance::sample::{Random, Sample};
use neuropil_plugin_sdk::{Code, Error, Log, Options, PluginBackend};
use neuropil_qnn::Qnn;

/// `fixtures/fake.c` with these macros; `None` where there is no C compiler.
fn fake(name: &str, macros: &[&str]) -> Option<PathBuf> {
    let out =
        Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("fake-qnn-{name}-{}.so", std::process::id()));
    let mut cc = Command::new("cc");
    cc.args(["-std=c11", "-Wall", "-Werror", "-Wno-cast-function-type", "-shared", "-fPIC"]).args(macros);
    cc.arg("-o").arg(&out).arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/fake.c"));
    let Ok(run) = cc.output() else {
        println!("SKIPPED: there is no cc here");
        return None;
    };
    assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stderr));
    Some(out)
}

fn open(library: &Path, more: &[(&str, &str)]) -> Result<(), Error> {
    let options = [&[("library", library.to_str().unwrap())], more].concat();
    let options: Options = options.iter().map(|(key, value)| (key.to_string(), value.to_string())).collect();
    Qnn::new(Log::silent()).open(0, &options).map(drop)
}

#[test]
fn without_a_library_the_plugin_says_what_to_do() {
    let failure = plugin().probe(&[("library", "/no/such/libQnnHtp.so")]).unwrap_err();
    assert_eq!((failure.code, failure.text.contains("library=PATH")), (abi::NP_UNSUPPORTED, true));
    for (key, value) in [("precision", "w4"), ("folder", "x"), ("power", "much"), ("tokens", "2+1")] {
        let failure = plugin().probe(&[(key, value)]).unwrap_err();
        assert_eq!((failure.code, failure.text.contains(key)), (abi::NP_INVALID, true), "{}", failure.text);
    }
}

#[test]
fn libraries_of_another_kind_are_refused_with_the_reason() {
    for (name, define, want) in [
        ("major", "-DCORE_MAJOR=3", "core API is 3.40.0, and 2.32 or a later 2 is needed"),
        ("minor", "-DCORE_MINOR=12", "core API is 2.12.0"),
        ("gpu", "-DBACKEND=4", "backend 4"),
        ("backend", "-DBACKEND_MAJOR=6", "backend API is 6.51.0, and 5 is needed"),
        ("null", "-DMISSING=19", "no function 19 (finalize)"),
        ("none", "-DPROVIDERS=0", "offers no interface"),
    ] {
        let Some(library) = fake(name, &[define]) else { return };
        let error = open(&library, &[]).unwrap_err();
        assert_eq!((error.code, error.text.contains(want)), (Code::Unsupported, true), "{}", error.text);
        std::fs::remove_file(library).unwrap();
    }
}

#[test]
fn the_code_and_the_text_of_the_library_are_passed_on() {
    let Some(library) = fake("create", &["-DCREATE_CODE=0x100000fa0ull"]) else { return };
    let error = open(&library, &[]).unwrap_err();
    assert_eq!((error.code, error.vendor_code), (Code::Internal, 0x1_0000_0fa0));
    assert_eq!(error.text, "QNN cannot start its backend: the chip is on holiday (code 4000)");
    std::fs::remove_file(library).unwrap();
}

#[test]
fn a_library_that_does_nothing_is_found_out() {
    let samples =
        [abi::NP_SCHEME_F16, abi::NP_SCHEME_CHANNEL8].map(|scheme| Sample::random(scheme, 8, 32, 1));
    let options =
        |library: &Path| [("library", library.to_str().unwrap().to_string()), ("tokens", "1".into())];
    // It says that it made a graph, and gives none.
    let Some(library) = fake("nothing", &[]) else { return };
    let given = options(&library);
    let device = plugin().open(0, &given.each_ref().map(|(key, value)| (*key, &value[..]))).unwrap();
    let failure = device.prepare(&[&samples[0]]).err().unwrap();
    assert!(failure.text.contains("made no graph"), "{}", failure.text);
    std::fs::remove_file(library).unwrap();
    // It says that it ran a graph, and wrote nothing.
    let Some(library) = fake("graph", &["-DGRAPH=(void *)8"]) else { return };
    let given = options(&library);
    let device = plugin().open(0, &given.each_ref().map(|(key, value)| (*key, &value[..]))).unwrap();
    let [halves, codes] = samples.each_ref().map(|sample| device.prepare(&[sample]).unwrap());
    let x = Random::new(2).values(32);
    assert!(device.matmul(&[&halves], &x, 1).unwrap()[0].iter().all(|y| y.is_nan()));
    let failure = device.matmul(&[&codes], &x, 1).err().unwrap();
    assert!(failure.text.contains("wrote no results"), "{}", failure.text);
    std::fs::remove_file(library).unwrap();
}

#[test]
fn codes_are_not_given_to_the_backend_that_gets_them_wrong() {
    let Some(library) = fake("cpu", &["-DBACKEND=3", "-DBACKEND_MAJOR=1"]) else { return };
    let error = open(&library, &[("precision", "a8")]).unwrap_err();
    assert!(error.text.contains("wrong"), "{}", error.text);
    std::fs::remove_file(library).unwrap();
}
