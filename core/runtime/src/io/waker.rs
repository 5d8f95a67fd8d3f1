//! How another thread ends a wait: each engine waits for something else, so each brings its own bell.

use std::fmt;
use std::sync::Arc;

/// Ends a [`reap`](super::IoEngine::reap) that waits. Clones ring the same bell.
#[derive(Clone)]
pub struct IoWaker(Arc<dyn Bell>);

/// What an engine waits for besides storage.
pub(super) trait Bell: Send + Sync {
    /// Ends the wait that is under way, or the next one.
    fn ring(&self);
}

impl IoWaker {
    pub(super) fn new(bell: Arc<dyn Bell>) -> IoWaker {
        IoWaker(bell)
    }

    /// Ends the wait that is under way, or the next one.
    pub fn wake(&self) {
        self.0.ring();
    }
}

impl fmt::Debug for IoWaker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("IoWaker")
    }
}
