//! The cache and its waiting, compiled with the locks of a model checker, which then tries every order in which threads
//! can run.
//!
//! `cargo test --release --manifest-path tests/loom/Cargo.toml --target-dir target/loom`

#![deny(unsafe_code)]

#[allow(missing_docs)]
#[path = "../../../core/runtime/src/cache/mod.rs"]
pub mod cache;

mod sync {
    pub(crate) use loom::sync::{Condvar, Mutex, MutexGuard};
}
