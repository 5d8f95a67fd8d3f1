//! What threads wait on and lock, in one place, so that a model checker can compile the modules that use it with its
//! own (`tests/loom`).

pub(crate) use std::sync::{Condvar, Mutex, MutexGuard};
