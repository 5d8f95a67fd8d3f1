//! Executions and events.

use std::ffi::c_void;

use super::{create, truth};
use crate::codes::*;
use crate::execution::{Event, Execution, Place, State};
use crate::operand::Shape;
use crate::world::{call, enter, find, free, give, leave, lock, release};

/// An execution of a finished compilation.
///
/// # Safety
/// As the interface says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ANeuralNetworksExecution_create(
    compilation: *mut c_void,
    execution: *mut *mut c_void,
) -> i32 {
    let body = |world: &mut crate::world::World| {
        let plan = find(&mut world.compilations, &mut world.log, compilation)?.plan()?;
        let handle = world.fresh();
        world.executions.insert(handle, Execution::new(compilation.addr(), plan));
        Ok(handle)
    };
    // SAFETY: the client vouches for its slot.
    unsafe { create("Execution_create", execution, body) }
}

/// Frees an execution that does not run.
///
/// # Safety
/// As the interface says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ANeuralNetworksExecution_free(execution: *mut c_void) {
    free("Execution_free", |world| {
        if release(&mut world.executions, &mut world.log, execution)?.state == State::Computation {
            world.log.violation("in_use", "an execution was freed while it ran".into());
        }
        Ok(())
    });
}

/// Binds a client's buffer, for the two functions below.
///
/// # Safety
/// `kind` is NULL or a type.
unsafe fn bind(
    function: &'static str,
    execution: *mut c_void,
    index: i32,
    kind: *const OperandType,
    buffer: *const c_void,
    length: usize,
    output: bool,
) -> i32 {
    call(function, |world| {
        let execution = find(&mut world.executions, &mut world.log, execution)?.preparing()?;
        // No operation here has an optional tensor, so none can be left out.
        if buffer.is_null() {
            return Err(if length > 0 { UNEXPECTED_NULL } else { BAD_DATA });
        }
        // SAFETY: the client vouches for the type.
        let given = if kind.is_null() { None } else { Some(unsafe { Shape::read(kind) }?) };
        execution.bind(index, output, given.as_ref(), Place::Address(buffer.expose_provenance()), length)
    })
}

/// Binds a client's buffer to an input.
///
/// # Safety
/// As the interface says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ANeuralNetworksExecution_setInput(
    execution: *mut c_void,
    index: i32,
    kind: *const OperandType,
    buffer: *const c_void,
    length: usize,
) -> i32 {
    // SAFETY: the client vouches for the type.
    unsafe { bind("Execution_setInput", execution, index, kind, buffer, length, false) }
}

/// Binds a client's buffer to an output.
///
/// # Safety
/// As the interface says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ANeuralNetworksExecution_setOutput(
    execution: *mut c_void,
    index: i32,
    kind: *const OperandType,
    buffer: *mut c_void,
    length: usize,
) -> i32 {
    // SAFETY: the client vouches for the type.
    unsafe { bind("Execution_setOutput", execution, index, kind, buffer, length, true) }
}

/// Part of a memory object, as a client names it.
#[derive(Debug, Clone, Copy)]
struct Part {
    memory: *const c_void,
    offset: usize,
    length: usize,
}

/// Binds a part of a memory object, for the two functions below.
///
/// # Safety
/// `kind` is NULL or a type.
unsafe fn bind_part(
    function: &'static str,
    execution: *mut c_void,
    index: i32,
    kind: *const OperandType,
    part: Part,
    output: bool,
) -> i32 {
    call(function, |world| {
        find(&mut world.executions, &mut world.log, execution)?.preparing()?;
        // SAFETY: the client vouches for the type.
        let given = if kind.is_null() { None } else { Some(unsafe { Shape::read(kind) }?) };
        let place = world.place_in(part.memory, part.offset, part.length)?;
        let execution = find(&mut world.executions, &mut world.log, execution)?;
        execution.bind(index, output, given.as_ref(), place, part.length)
    })
}

/// Binds a part of a memory object to an input.
///
/// # Safety
/// As the interface says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ANeuralNetworksExecution_setInputFromMemory(
    execution: *mut c_void,
    index: i32,
    kind: *const OperandType,
    memory: *const c_void,
    offset: usize,
    length: usize,
) -> i32 {
    let part = Part { memory, offset, length };
    // SAFETY: the client vouches for the type.
    unsafe { bind_part("Execution_setInputFromMemory", execution, index, kind, part, false) }
}

/// Binds a part of a memory object to an output.
///
/// # Safety
/// As the interface says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ANeuralNetworksExecution_setOutputFromMemory(
    execution: *mut c_void,
    index: i32,
    kind: *const OperandType,
    memory: *const c_void,
    offset: usize,
    length: usize,
) -> i32 {
    let part = Part { memory, offset, length };
    // SAFETY: the client vouches for the type.
    unsafe { bind_part("Execution_setOutputFromMemory", execution, index, kind, part, true) }
}

/// Sets the deadline of the execution, in nanoseconds; 0 for none.
///
/// # Safety
/// As the interface says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ANeuralNetworksExecution_setTimeout(execution: *mut c_void, nanos: u64) -> i32 {
    call("Execution_setTimeout", |world| {
        let execution = find(&mut world.executions, &mut world.log, execution)?.preparing()?;
        world.compilations.get(&execution.compilation).ok_or(BAD_STATE)?.one_device()?;
        execution.timeout = nanos;
        Ok(())
    })
}

/// Lets the execution run more than once.
///
/// # Safety
/// As the interface says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ANeuralNetworksExecution_setReusable(execution: *mut c_void, reusable: u8) -> i32 {
    call("Execution_setReusable", |world| {
        let execution = find(&mut world.executions, &mut world.log, execution)?.preparing()?;
        execution.reusable = truth(reusable)?;
        Ok(())
    })
}

/// Lets buffers be longer than their values; it must come before any of them is bound.
///
/// # Safety
/// As the interface says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ANeuralNetworksExecution_enableInputAndOutputPadding(
    execution: *mut c_void,
    on: u8,
) -> i32 {
    call("Execution_enableInputAndOutputPadding", |world| {
        let execution = find(&mut world.executions, &mut world.log, execution)?.preparing()?;
        if execution.inputs.iter().chain(&execution.outputs).any(Option::is_some) {
            return Err(BAD_STATE);
        }
        execution.padding = truth(on)?;
        Ok(())
    })
}

/// Asks for the time of the run.
///
/// # Safety
/// As the interface says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ANeuralNetworksExecution_setMeasureTiming(
    execution: *mut c_void,
    measure: u8,
) -> i32 {
    call("Execution_setMeasureTiming", |world| {
        let execution = find(&mut world.executions, &mut world.log, execution)?.preparing()?;
        world.compilations.get(&execution.compilation).ok_or(BAD_STATE)?.one_device()?;
        execution.measured = truth(measure)?;
        Ok(())
    })
}

/// The time of the last run in nanoseconds; all ones when it was not measured.
///
/// # Safety
/// As the interface says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ANeuralNetworksExecution_getDuration(
    execution: *const c_void,
    what: i32,
    nanos: *mut u64,
) -> i32 {
    call("Execution_getDuration", |world| {
        let execution = find(&mut world.executions, &mut world.log, execution)?;
        if nanos.is_null() {
            return Err(UNEXPECTED_NULL);
        }
        if !(0..=3).contains(&what) {
            return Err(BAD_DATA);
        }
        let done =
            execution.done.as_ref().filter(|_| execution.state == State::Completed).ok_or(BAD_STATE)?;
        let known = execution.measured && done.code == NO_ERROR;
        // SAFETY: the client vouches for its pointer.
        unsafe { give(nanos, if known { done.nanos } else { u64::MAX }) }
    })
}

/// Runs an execution now, for the two functions below.
fn run_now(function: &'static str, execution: *mut c_void, burst: Option<*const c_void>) -> i32 {
    let job = {
        let mut world = lock();
        let started = enter(&mut world, function).and_then(|()| world.begin(execution, burst));
        match started {
            Ok(mut job) => {
                // A failure that a test wants is one of the run, which the execution has then seen.
                let fault = world.settings.faults.of_function(function).err();
                job.injected.code = fault.or(job.injected.code);
                job
            }
            Err(code) => return leave(&mut world, function, Err(code)),
        }
    };
    let done = job.run();
    lock().end(&job, done)
}

/// Runs an execution and returns when it is done.
///
/// # Safety
/// As the interface says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ANeuralNetworksExecution_compute(execution: *mut c_void) -> i32 {
    run_now("Execution_compute", execution, None)
}

/// Runs an execution on a burst, which takes one at a time.
///
/// # Safety
/// As the interface says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ANeuralNetworksExecution_burstCompute(
    execution: *mut c_void,
    burst: *mut c_void,
) -> i32 {
    run_now("Execution_burstCompute", execution, Some(burst))
}

/// Starts an execution and returns an event to wait for.
///
/// # Safety
/// As the interface says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ANeuralNetworksExecution_startCompute(
    execution: *mut c_void,
    event: *mut *mut c_void,
) -> i32 {
    let body = |world: &mut crate::world::World| {
        let job = world.begin(execution, None)?;
        let (handle, event) = (world.fresh(), Event::new());
        world.events.insert(handle, event.clone());
        std::thread::spawn(move || {
            let done = job.run();
            let code = lock().end(&job, done);
            event.signal(code);
        });
        Ok(handle)
    };
    // SAFETY: the client vouches for its slot.
    unsafe { create("Execution_startCompute", event, body) }
}

/// Waits for an event and gives the code of its run.
///
/// # Safety
/// As the interface says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ANeuralNetworksEvent_wait(event: *mut c_void) -> i32 {
    let function = "Event_wait";
    let waiting = {
        let mut world = lock();
        let found = enter(&mut world, function).and_then(|()| {
            let world = &mut *world;
            world.settings.faults.of_function(function)?;
            let event = find(&mut world.events, &mut world.log, event)?;
            event.waited = true;
            Ok(event.clone())
        });
        match found {
            Ok(event) => event,
            Err(code) => return leave(&mut world, function, Err(code)),
        }
    };
    waiting.wait()
}

/// Frees an event that was waited for.
///
/// # Safety
/// As the interface says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ANeuralNetworksEvent_free(event: *mut c_void) {
    let mut left = None;
    free("Event_free", |world| {
        let event = release(&mut world.events, &mut world.log, event)?;
        if !event.waited {
            world.log.violation("not_waited", "an event was freed and nobody waited for it".into());
            left = Some(event);
        }
        Ok(())
    });
    // The real library waits here too.
    if let Some(event) = left {
        event.wait();
    }
}

/// The rank of an output after a run.
///
/// # Safety
/// As the interface says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ANeuralNetworksExecution_getOutputOperandRank(
    execution: *mut c_void,
    index: i32,
    rank: *mut u32,
) -> i32 {
    call("Execution_getOutputOperandRank", |world| {
        let execution = find(&mut world.executions, &mut world.log, execution)?;
        if rank.is_null() {
            return Err(UNEXPECTED_NULL);
        }
        let dims = execution.output_dims(index)?;
        // SAFETY: the client vouches for its pointer.
        unsafe { give(rank, dims.len() as u32) }
    })
}

/// The dimensions of an output after a run, as many as its rank.
///
/// # Safety
/// As the interface says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ANeuralNetworksExecution_getOutputOperandDimensions(
    execution: *mut c_void,
    index: i32,
    dimensions: *mut u32,
) -> i32 {
    call("Execution_getOutputOperandDimensions", |world| {
        let execution = find(&mut world.executions, &mut world.log, execution)?;
        if dimensions.is_null() {
            return Err(UNEXPECTED_NULL);
        }
        let dims = execution.output_dims(index)?;
        // SAFETY: the client's array has a place for each dimension.
        unsafe { std::ptr::copy_nonoverlapping(dims.as_ptr(), dimensions, dims.len()) };
        Ok(())
    })
}
