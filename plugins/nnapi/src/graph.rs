//! A compiled product of fixed shape, with its burst.
//!
//! A burst takes one execution at a time, so it is behind a lock. Where NNAPI offers executions that run many times, one
//! stays for jobs of few bytes, with memory of its own; what such an execution reads, writes and waits for cannot be
//! changed. Other jobs get a new execution, and memory from a shelf that all graphs of a unit share, because memory for
//! many tokens in every graph would be more than the weights.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use neuropil_plugin_sdk::{Deadline, Error};

use crate::library::Runtime;
use crate::memory::{Place, Shared};
use crate::runtime::{Burst, Compilation, Execution};

/// Bytes of input and output for which an execution stays.
const KEPT_BYTES: usize = 64 << 10;

/// Outputs begin at multiples of this.
const ALIGNMENT: usize = 64;

/// Pieces of memory that wait on a shelf at most.
const MOST_WAITING: usize = 4;

/// Memory for inputs and outputs that are not in imported memory.
pub(crate) struct Shelf {
    runtime: Arc<Runtime>,
    waiting: Mutex<Vec<Shared>>,
}

impl Shelf {
    pub fn new(runtime: &Arc<Runtime>) -> Shelf {
        Shelf { runtime: runtime.clone(), waiting: Mutex::new(Vec::new()) }
    }

    /// Takes memory of at least so many bytes.
    fn take(&self, bytes: usize) -> Result<Shared, Error> {
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        let large = waiting.iter().enumerate().filter(|(_, memory)| memory.len() >= bytes);
        match large.min_by_key(|(_, memory)| memory.len()).map(|(index, _)| index) {
            Some(index) => Ok(waiting.swap_remove(index)),
            None => {
                drop(waiting);
                Shared::new(&self.runtime, bytes.checked_next_power_of_two().unwrap_or(bytes))
            }
        }
    }

    /// Puts it back, in the place of the smallest when the shelf is full.
    fn put(&self, memory: Shared) {
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        waiting.push(memory);
        if waiting.len() > MOST_WAITING {
            waiting.sort_by_key(Shared::len);
            waiting.remove(0);
        }
    }
}

/// Where an input or output lies.
pub(crate) enum Side {
    /// In imported memory, in the form of the graph.
    Placed(Place),
    /// Anywhere: it goes through memory of ours.
    Copied,
}

/// Values of a job in the form of a graph.
pub(crate) trait Values {
    /// Fills the input of the graph.
    fn write(&mut self, x: &mut [u8]);
    /// Takes its output.
    fn read(&mut self, y: &[u8]);
}

/// A compiled product.
pub(crate) struct Graph {
    session: Mutex<Session>,
    compilation: Arc<Compilation>,
    shelf: Arc<Shelf>,
    x_bytes: usize,
    y_bytes: usize,
    /// Whether an execution stays.
    keeps: bool,
}

/// What one job uses at a time.
struct Session {
    /// Before the burst that it ran in, so that it is freed earlier.
    kept: Option<Kept>,
    burst: Burst,
}

/// An execution that stays.
struct Kept {
    execution: Execution,
    memory: Shared,
    timeout: Option<u64>,
}

impl Graph {
    /// `reusable`: NNAPI offers executions that run many times.
    pub fn new(
        compilation: Arc<Compilation>,
        shelf: &Arc<Shelf>,
        (x_bytes, y_bytes): (usize, usize),
        reusable: bool,
    ) -> Result<Graph, Error> {
        let session = Session { kept: None, burst: Burst::new(&compilation)? };
        let keeps = reusable && x_bytes.saturating_add(y_bytes) <= KEPT_BYTES;
        let session = Mutex::new(session);
        Ok(Graph { session, compilation, shelf: shelf.clone(), x_bytes, y_bytes, keeps })
    }

    /// Runs the graph, with the values of a job where they are not placed. Gives the time that it ran.
    pub fn run(
        &self,
        x: Side,
        y: Side,
        deadline: Deadline,
        values: &mut dyn Values,
    ) -> Result<Duration, Error> {
        // What a panic left behind is complete: an execution that was kept, or none.
        let mut session = self.session.lock().unwrap_or_else(PoisonError::into_inner);
        let session = &mut *session;
        let timeout = timeout(deadline)?;
        let y_at = if matches!(x, Side::Copied) { self.x_bytes.next_multiple_of(ALIGNMENT) } else { 0 };
        let y_end = y_at + if matches!(y, Side::Copied) { self.y_bytes } else { 0 };
        if y_end == 0 {
            let (Side::Placed(x), Side::Placed(y)) = (x, y) else {
                return Err(Error::internal("a graph without bytes"));
            };
            let mut execution = Execution::new(&self.compilation, &x, &y, timeout, false)?;
            return timed(&mut execution, &mut session.burst, deadline);
        }
        let both_copied = matches!((&x, &y), (Side::Copied, Side::Copied));
        let keeps = self.keeps && both_copied;
        let kept = if keeps { session.kept.take() } else { None };
        let (mut memory, execution) = match kept {
            Some(kept) => (kept.memory, (kept.timeout == timeout).then_some(kept.execution)),
            None if keeps => (Shared::new(&self.shelf.runtime, y_end)?, None),
            None => (self.shelf.take(y_end)?, None),
        };
        if let (Side::Copied, Some(bytes)) = (&x, memory.bytes_mut().get_mut(..self.x_bytes)) {
            values.write(bytes);
        }
        let mut execution = match execution {
            Some(execution) => execution,
            None => {
                let copied = |offset, bytes| Place::new(&memory.memory, offset, bytes);
                let x = match x {
                    Side::Placed(place) => place,
                    Side::Copied => copied(0, self.x_bytes)?,
                };
                let y = match y {
                    Side::Placed(place) => place,
                    Side::Copied => copied(y_at, self.y_bytes)?,
                };
                Execution::new(&self.compilation, &x, &y, timeout, keeps)?
            }
        };
        // After an error neither memory nor execution is used again.
        let time = timed(&mut execution, &mut session.burst, deadline)?;
        if y_end > y_at {
            values.read(memory.bytes().get(y_at..y_end).unwrap_or_default());
        }
        if keeps {
            session.kept = Some(Kept { execution, memory, timeout });
        } else {
            drop(execution);
            self.shelf.put(memory);
        }
        Ok(time)
    }
}

fn timed(execution: &mut Execution, burst: &mut Burst, deadline: Deadline) -> Result<Duration, Error> {
    let start = Instant::now();
    execution.run(burst)?;
    // Drivers may ignore it.
    match deadline.passed() {
        true => Err(Error::timeout("the deadline passed while the graph ran")),
        false => Ok(start.elapsed()),
    }
}

/// The time that is left for the driver, in nanoseconds. It is rounded up by at most an eighth, so that jobs with the same
/// deadline can share an execution.
fn timeout(deadline: Deadline) -> Result<Option<u64>, Error> {
    let Some(left) = deadline.remaining() else { return Ok(None) };
    let left = u64::try_from(left.as_nanos()).unwrap_or(u64::MAX);
    if left == 0 {
        return Err(Error::timeout("the deadline passed before the graph ran"));
    }
    Ok(Some(round_up(left)))
}

fn round_up(nanoseconds: u64) -> u64 {
    let step = 1u64 << (60u32.saturating_sub(nanoseconds.leading_zeros()));
    nanoseconds.checked_next_multiple_of(step).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timeouts_are_rounded_up_by_an_eighth_at_most() {
        for value in [1u64, 2, 15, 16, 17, 1000, 29_999_999_000, 1 << 62, u64::MAX] {
            let found = round_up(value);
            assert!(found >= value && found - value <= value / 8, "{value} {found}");
        }
        assert_eq!(round_up(29_999_999_000), round_up(29_000_000_000));
    }

    #[test]
    fn a_job_without_a_deadline_has_no_timeout_and_a_late_one_does_not_run() {
        assert_eq!(timeout(Deadline::after(0)), Ok(None));
        let late = Deadline::after(1);
        std::thread::sleep(Duration::from_micros(10));
        assert_eq!(timeout(late).unwrap_err().code, neuropil_plugin_sdk::Code::Timeout);
    }
}
