//! The real model that some tests run on, if `neuropil demo` has put it in the cache directory.

use std::path::PathBuf;

/// File of the default model.
const FILE: &str = "SmolLM2-135M-Instruct.Q4_1.gguf";

/// The model's path; says on standard error that a test was skipped when it is not there.
pub fn smollm2() -> Option<PathBuf> {
    cached(FILE, "cargo run --release -- demo")
}

/// A real model with ReLU gates, made from the default one. It is no good model and not published; the tests on it run
/// where somebody has put it.
pub fn relu() -> Option<PathBuf> {
    cached("smollm2-135m-relu65-q8_0.gguf", "who has it can put it there; nothing")
}

/// A file below the cache directory. `how` is the command that fetches it.
pub fn cached(name: &str, how: &str) -> Option<PathBuf> {
    let base = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from).filter(|path| path.is_absolute());
    let base = base.or_else(|| std::env::home_dir().map(|home| home.join(".cache")))?;
    let path = base.join("neuropil").join(name);
    if path.is_file() {
        return Some(path);
    }
    eprintln!("SKIPPED: {} is not there; `{how}` fetches it", path.display());
    None
}
