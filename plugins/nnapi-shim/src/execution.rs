//! An execution: what is bound to its inputs and outputs, and the states it goes through.

use std::ffi::c_void;
use std::sync::{Arc, Condvar, Mutex, PoisonError};

use crate::codes::*;
use crate::compile::Plan;
use crate::memory::{Memory, Opaque, Region, Role};
use crate::operand::Shape;
use crate::run::{Done, Job};
use crate::world::{World, find};

/// Where an execution is in its life.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum State {
    Preparation,
    Computation,
    Completed,
}

/// Where a value lies.
#[derive(Debug, Clone)]
pub(crate) enum Place {
    /// In the client's memory.
    Address(usize),
    /// In a memory object, by its handle.
    Region { memory: usize, region: Arc<Region>, offset: usize },
    /// In a buffer of the library.
    Opaque { memory: usize, opaque: Arc<Opaque> },
}

/// A value bound to an input or output.
#[derive(Debug, Clone)]
pub(crate) struct Bound {
    pub(crate) place: Place,
    pub(crate) shape: Shape,
    pub(crate) len: usize,
}

/// An execution.
#[derive(Debug)]
pub(crate) struct Execution {
    pub(crate) compilation: usize,
    pub(crate) plan: Arc<Plan>,
    pub(crate) inputs: Vec<Option<Bound>>,
    pub(crate) outputs: Vec<Option<Bound>>,
    pub(crate) timeout: u64,
    pub(crate) reusable: bool,
    pub(crate) padding: bool,
    pub(crate) measured: bool,
    pub(crate) state: State,
    pub(crate) done: Option<Done>,
}

/// Something to wait for.
#[derive(Debug, Clone)]
pub(crate) struct Event {
    shared: Arc<(Mutex<Option<i32>>, Condvar)>,
    pub(crate) waited: bool,
}

impl Event {
    pub(crate) fn new() -> Event {
        Event { shared: Arc::default(), waited: false }
    }

    /// The work is done.
    pub(crate) fn signal(&self, code: i32) {
        *self.shared.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(code);
        self.shared.1.notify_all();
    }

    /// Waits for the work and gives its code.
    pub(crate) fn wait(&self) -> i32 {
        let mut code = self.shared.0.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            match *code {
                Some(code) => return code,
                None => code = self.shared.1.wait(code).unwrap_or_else(PoisonError::into_inner),
            }
        }
    }
}

impl Bound {
    /// The first and the last address but one, for what has an address.
    fn range(&self) -> Option<(usize, usize)> {
        let start = match &self.place {
            Place::Address(at) => *at,
            Place::Region { region, offset, .. } => region.address(*offset),
            Place::Opaque { .. } => return None,
        };
        Some((start, start.saturating_add(self.len)))
    }

    fn overlaps(&self, other: &Bound) -> bool {
        matches!((self.range(), other.range()), (Some(a), Some(b)) if a.0 < b.1 && b.0 < a.1)
    }
}

impl Execution {
    pub(crate) fn new(compilation: usize, plan: Arc<Plan>) -> Execution {
        Execution {
            compilation,
            inputs: vec![None; plan.model.inputs.len()],
            outputs: vec![None; plan.model.outputs.len()],
            plan,
            timeout: 0,
            reusable: false,
            padding: false,
            measured: false,
            state: State::Preparation,
            done: None,
        }
    }

    /// Nothing may be bound or set once the execution was scheduled.
    pub(crate) fn preparing(&mut self) -> Outcome<&mut Execution> {
        if self.state == State::Preparation { Ok(self) } else { Err(BAD_STATE) }
    }

    /// Binds an input or output by position. `given` may make open dimensions known.
    pub(crate) fn bind(
        &mut self,
        index: i32,
        output: bool,
        given: Option<&Shape>,
        place: Place,
        len: usize,
    ) -> Outcome {
        let padding = self.padding;
        let execution = self.preparing()?;
        let index = usize::try_from(index).map_err(|_| BAD_DATA)?;
        let model = &execution.plan.model;
        let operand = if output { model.outputs.get(index) } else { model.inputs.get(index) };
        let operand = operand.and_then(|i| model.operands.get(*i as usize)).ok_or(BAD_DATA)?;
        let shape = operand.shape.with(given)?;
        let len = match &place {
            Place::Opaque { opaque, .. } => {
                let role = Role { compilation: execution.compilation, index, output };
                if len != 0 || !opaque.roles.contains(&role) {
                    return Err(BAD_DATA);
                }
                opaque.shape.bytes()?.ok_or(BAD_DATA)?
            }
            _ => len,
        };
        match shape.bytes()? {
            Some(size) if len == size || padding && len > size => {}
            None if output => {}
            _ => return Err(BAD_DATA),
        }
        let slots = if output { &mut execution.outputs } else { &mut execution.inputs };
        *slots.get_mut(index).ok_or(BAD_DATA)? = Some(Bound { place, shape, len });
        Ok(())
    }

    /// Whether something is bound to this memory object.
    pub(crate) fn uses_memory(&self, handle: usize) -> bool {
        self.inputs.iter().chain(&self.outputs).flatten().any(|bound| match &bound.place {
            Place::Address(_) => false,
            Place::Region { memory, .. } | Place::Opaque { memory, .. } => *memory == handle,
        })
    }

    /// The dimensions of an output after a run.
    pub(crate) fn output_dims(&self, index: i32) -> Outcome<Vec<u32>> {
        let done = self.done.as_ref().filter(|_| self.state == State::Completed).ok_or(BAD_STATE)?;
        let index = usize::try_from(index).map_err(|_| BAD_DATA)?;
        if index >= self.outputs.len() {
            return Err(BAD_DATA);
        }
        match done.outputs.get(index) {
            Some((_, false)) => Err(OUTPUT_INSUFFICIENT_SIZE),
            Some((dims, true)) => Ok(dims.clone()),
            None => Err(BAD_STATE),
        }
    }
}

impl World {
    /// Makes an execution ready to run, which may then happen without the lock.
    pub(crate) fn begin(&mut self, handle: *const c_void, burst: Option<*const c_void>) -> Outcome<Job> {
        let execution = find(&mut self.executions, &mut self.log, handle)?;
        if execution.state == State::Computation {
            self.log.violation("execution_concurrent", "an execution was started while it runs".into());
            return Err(BAD_STATE);
        }
        if execution.state == State::Completed && !execution.reusable {
            return Err(BAD_STATE);
        }
        let bound = |slots: &[Option<Bound>]| slots.iter().cloned().collect::<Option<Vec<Bound>>>();
        let inputs = bound(&execution.inputs).ok_or(BAD_DATA)?;
        let outputs = bound(&execution.outputs).ok_or(BAD_DATA)?;
        for (at, output) in outputs.iter().enumerate() {
            let others = inputs.iter().chain(outputs.iter().skip(at + 1));
            if others.into_iter().any(|other| output.overlaps(other)) {
                self.log.violation("overlap", "an output lies over another value of the execution".into());
                return Err(BAD_DATA);
            }
        }
        if !self.compilations.contains_key(&execution.compilation) {
            self.log.violation("order", "an execution was started after its compilation was freed".into());
            return Err(BAD_STATE);
        }
        if let Some(burst) = burst {
            let burst = find(&mut self.bursts, &mut self.log, burst)?;
            if burst.compilation != execution.compilation {
                return Err(BAD_DATA);
            }
            if burst.busy {
                self.log.violation("burst_concurrent", "a burst was given a second execution at once".into());
                return Err(BAD_STATE);
            }
            burst.busy = true;
            self.log.count("executions.burst");
        }
        let mut injected = self.settings.faults.of_execution();
        if execution.plan.devices.contains(&self.settings.unavailable) {
            injected.code = Some(UNAVAILABLE_DEVICE);
        }
        execution.state = State::Computation;
        execution.done = None;
        self.log.count("executions.run");
        self.running += 1;
        self.peak = self.peak.max(self.running);
        Ok(Job {
            execution: handle.addr(),
            burst: burst.map(<*const c_void>::addr),
            plan: execution.plan.clone(),
            inputs,
            outputs,
            timeout: execution.timeout,
            injected,
        })
    }

    /// Notes what came out of a run.
    pub(crate) fn end(&mut self, job: &Job, done: Done) -> i32 {
        let code = done.code;
        // A test may have reset the world meanwhile.
        self.running = (self.running - 1).max(0);
        for text in &done.violations {
            self.log.violation("client_memory", text.clone());
        }
        if let Some(burst) = job.burst.and_then(|b| self.bursts.get_mut(&b)) {
            burst.busy = false;
        }
        if let Some(execution) = self.executions.get_mut(&job.execution) {
            execution.state = State::Completed;
            execution.done = Some(done);
        }
        code
    }

    /// Where a memory object's bytes lie, for binding: inside it, or the whole of an opaque one.
    pub(crate) fn place_in(&mut self, memory: *const c_void, offset: usize, len: usize) -> Outcome<Place> {
        let handle = memory.addr();
        match find(&mut self.memories, &mut self.log, memory)? {
            Memory::Mapped(region) if offset.checked_add(len).is_some_and(|end| end <= region.len()) => {
                Ok(Place::Region { memory: handle, region: region.clone(), offset })
            }
            Memory::Opaque(opaque) if offset == 0 && len == 0 => {
                Ok(Place::Opaque { memory: handle, opaque: opaque.clone() })
            }
            _ => Err(BAD_DATA),
        }
    }
}
