//! The one world of a process: tables of live handles, counters, settings, behind one lock.
//!
//! Each C function passes through [`call`]: it counts the call, applies an injected fault, takes the lock and turns what
//! comes out into a result code. No computation happens under the lock.

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};

use crate::codes::*;
use crate::compile::Compilation;
use crate::control::Settings;
use crate::desc::MemoryDesc;
use crate::devices::Device;
use crate::execution::{Event, Execution};
use crate::memory::Memory;
use crate::model::Model;
use crate::symbols::level_of;

/// Objects of one kind by their handle.
pub(crate) type Table<T> = BTreeMap<usize, T>;

/// A burst: executions of one compilation, one at a time.
#[derive(Debug)]
pub(crate) struct Burst {
    pub(crate) compilation: usize,
    pub(crate) busy: bool,
}

/// What a client did wrong without being told by a code, and what happened.
#[derive(Debug, Default)]
pub(crate) struct Log {
    /// Breaches of lifetime and order, by kind.
    pub(crate) violations: BTreeMap<String, i64>,
    /// The last of them in words.
    pub(crate) last: String,
    /// Counters of events.
    pub(crate) counts: BTreeMap<String, i64>,
}

impl Log {
    /// Counts a breach.
    pub(crate) fn violation(&mut self, kind: &str, text: String) {
        *self.violations.entry(kind.into()).or_default() += 1;
        self.last = format!("{kind}: {text}");
    }

    /// Counts an event.
    pub(crate) fn count(&mut self, key: &str) {
        *self.counts.entry(key.into()).or_default() += 1;
    }
}

/// All that lives.
#[derive(Debug, Default)]
pub(crate) struct World {
    next: usize,
    pub(crate) models: Table<Model>,
    pub(crate) compilations: Table<Compilation>,
    pub(crate) memories: Table<Memory>,
    pub(crate) descs: Table<MemoryDesc>,
    pub(crate) bursts: Table<Burst>,
    pub(crate) executions: Table<Execution>,
    pub(crate) events: Table<Event>,
    pub(crate) devices: Table<Device>,
    pub(crate) settings: Settings,
    pub(crate) log: Log,
    /// Executions that compute now, and the most there ever were.
    pub(crate) running: i64,
    pub(crate) peak: i64,
}

static WORLD: LazyLock<Mutex<World>> = LazyLock::new(|| Mutex::new(World::new()));

/// The world, locked.
pub(crate) fn lock() -> MutexGuard<'static, World> {
    WORLD.lock().unwrap_or_else(PoisonError::into_inner)
}

impl World {
    fn new() -> World {
        let mut world = World::default();
        world.set_devices(crate::devices::DEFAULT);
        world
    }

    /// Forgets every object, counter and setting. Handles are never given twice.
    pub(crate) fn reset(&mut self) {
        let next = self.next;
        *self = World { next, ..World::default() };
        self.set_devices(crate::devices::DEFAULT);
    }

    /// A number that was no handle before. It is no address of this process and never dereferenced.
    pub(crate) fn fresh(&mut self) -> usize {
        self.next += 1;
        0x4E50_0000_0000 + self.next * 16
    }

    /// Live objects that a client must free.
    pub(crate) fn live(&self) -> [(&'static str, usize); 7] {
        [
            ("models", self.models.len()),
            ("compilations", self.compilations.len()),
            ("memories", self.memories.len()),
            ("memory_descs", self.descs.len()),
            ("bursts", self.bursts.len()),
            ("executions", self.executions.len()),
            ("events", self.events.len()),
        ]
    }
}

/// The object of a handle.
///
/// # Errors
/// `UNEXPECTED_NULL`, or `BAD_STATE` for a handle that is not live, which also counts as a violation.
pub(crate) fn find<'a, T>(
    table: &'a mut Table<T>,
    log: &mut Log,
    handle: *const c_void,
) -> Outcome<&'a mut T> {
    if handle.is_null() {
        return Err(UNEXPECTED_NULL);
    }
    let found = table.get_mut(&handle.addr());
    if found.is_none() {
        log.violation("stale_handle", format!("{:#x} is no live {}", handle.addr(), kind_of::<T>()));
    }
    found.ok_or(BAD_STATE)
}

/// Takes the object of a handle out of its table; a handle that is not live counts as a violation.
pub(crate) fn release<T>(table: &mut Table<T>, log: &mut Log, handle: *const c_void) -> Outcome<T> {
    if handle.is_null() {
        return Err(NO_ERROR);
    }
    let found = table.remove(&handle.addr());
    if found.is_none() {
        log.violation("double_free", format!("{:#x} is no live {}", handle.addr(), kind_of::<T>()));
    }
    found.ok_or(BAD_STATE)
}

fn kind_of<T>() -> &'static str {
    std::any::type_name::<T>().rsplit("::").next().unwrap_or_default()
}

/// Reads a list that a client passed.
///
/// # Safety
/// `from` is NULL, or `count` values can be read there.
pub(crate) unsafe fn list<T: Copy>(from: *const T, count: u32) -> Outcome<Vec<T>> {
    if count == 0 {
        return Ok(Vec::new());
    }
    if from.is_null() {
        return Err(UNEXPECTED_NULL);
    }
    // SAFETY: not NULL, and the caller vouches for the rest.
    Ok(unsafe { std::slice::from_raw_parts(from, count as usize) }.to_vec())
}

/// Writes a value that a client asked for.
///
/// # Safety
/// `to` is NULL or may be written.
pub(crate) unsafe fn give<T>(to: *mut T, value: T) -> Outcome {
    if to.is_null() {
        return Err(UNEXPECTED_NULL);
    }
    // SAFETY: not NULL, and the caller vouches for the rest.
    unsafe { to.write(value) };
    Ok(())
}

/// A handle as the C pointer it is passed as.
pub(crate) fn pointer(handle: usize) -> *mut c_void {
    std::ptr::without_provenance_mut(handle)
}

/// Counts a call and says whether it may go on: not when the function is too new.
pub(crate) fn enter(world: &mut World, function: &'static str) -> Outcome {
    world.log.count(&format!("calls.{function}"));
    if level_of(function) > world.settings.symbols_level {
        world.log.violation("too_new", format!("{function} does not exist in a library of this level"));
        return Err(BAD_STATE);
    }
    Ok(())
}

/// Notes a refusal and gives the code as C wants it.
pub(crate) fn leave(world: &mut World, function: &'static str, outcome: Outcome) -> i32 {
    let Err(code) = outcome else { return NO_ERROR };
    world.log.count("refused");
    world.log.count(&format!("refused.{code}"));
    world.log.count(&format!("refused.{function}"));
    code
}

/// Runs a C function's body under the lock.
pub(crate) fn call(function: &'static str, body: impl FnOnce(&mut World) -> Outcome) -> i32 {
    let mut world = lock();
    let outcome = catch_unwind(AssertUnwindSafe(|| {
        enter(&mut world, function)?;
        world.settings.faults.of_function(function)?;
        body(&mut world)
    }));
    let outcome = outcome.unwrap_or_else(|_| {
        world.log.violation("panic", format!("{function} panicked, which is a fault of the stand-in"));
        Err(OP_FAILED)
    });
    leave(&mut world, function, outcome)
}

/// Runs the body of a C function that frees: it returns nothing, and a fault set for it has no effect.
pub(crate) fn free(function: &'static str, body: impl FnOnce(&mut World) -> Outcome) {
    call(function, |world| match body(world) {
        // Freeing NULL is allowed and does nothing.
        Err(NO_ERROR) => Ok(()),
        other => other,
    });
}
