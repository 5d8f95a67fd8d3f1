//! Plugins that tests load.

use std::path::{Path, PathBuf};
use std::process::Command;

/// A library of a member of the workspace that the test's crate depends on; cargo has built it beside the test.
///
/// # Panics
/// When the test has no path.
pub fn library(crate_name: &str) -> PathBuf {
    let file = format!("{}{crate_name}{}", std::env::consts::DLL_PREFIX, std::env::consts::DLL_SUFFIX);
    std::env::current_exe().expect("a test has a path").with_file_name(file)
}

/// The workspace's plugins.
fn sources() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).with_file_name("plugins")
}

/// The template in C, copied to `folder` and built there as its page says; `None` where there is no C compiler.
///
/// # Panics
/// When it does not compile.
pub fn template_c(folder: &Path) -> Option<PathBuf> {
    let (source, library) = (folder.join("mine.c"), folder.join("libmine.so"));
    std::fs::copy(sources().join("template-c/plugin.c"), &source).expect("the folder can be written");
    let mut cc = Command::new("cc");
    cc.args(["-std=c11", "-O2", "-shared", "-fPIC", "-I"]).arg(sources().join("abi/include"));
    cc.arg(&source).arg("-lm").arg("-o").arg(&library);
    let Ok(ran) = cc.output() else {
        eprintln!("SKIPPED: there is no cc here");
        return None;
    };
    assert!(ran.status.success(), "{}", String::from_utf8_lossy(&ran.stderr));
    Some(library)
}

/// The template in Rust, as a crate of its own in `folder`, outside of the workspace.
///
/// # Panics
/// When it does not compile.
pub fn template_rust(folder: &Path) -> PathBuf {
    let crate_folder = folder.join("my-npu");
    std::fs::create_dir_all(crate_folder.join("src")).expect("the folder can be written");
    let manifest = format!(
        "[package]\nname = \"my-npu\"\nversion = \"0.1.0\"\nedition = \"2024\"\n\n[lib]\ncrate-type = [\"cdylib\"]\n\n\
         [dependencies]\nneuropil-plugin-sdk = {{ path = {:?} }}\n\n[workspace]\n",
        sources().join("sdk")
    );
    std::fs::write(crate_folder.join("Cargo.toml"), manifest).expect("the folder can be written");
    let source = sources().join("template/src/lib.rs");
    std::fs::copy(source, crate_folder.join("src/lib.rs")).expect("the folder can be written");
    let target = crate_folder.join("target");
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(["build", "--release", "--offline", "--target-dir"]).arg(&target).current_dir(&crate_folder);
    let ran = cargo.output().expect("cargo runs");
    assert!(ran.status.success(), "{}", String::from_utf8_lossy(&ran.stderr));
    let (prefix, suffix) = (std::env::consts::DLL_PREFIX, std::env::consts::DLL_SUFFIX);
    target.join("release").join(format!("{prefix}my_npu{suffix}"))
}
