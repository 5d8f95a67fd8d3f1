//! Who is told when the threads of a unit work.
//!
//! Only a unit knows which of its threads worked on a job, and for how long. It says so to whoever it was given when it
//! was built; a unit that was given nobody takes no time.

use std::time::Instant;

/// Told of the work of a unit's threads. It is called from all of them, once per thread and job, so it must be quick.
pub trait Timeline: Send + Sync {
    /// Thread `thread` of the unit, 0 for the thread that submits the jobs, worked on its share of a `name` from
    /// `start` to `end`.
    fn span(&self, thread: usize, name: &'static str, start: Instant, end: Instant);
}
