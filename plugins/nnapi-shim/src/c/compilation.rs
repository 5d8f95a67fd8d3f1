//! Compilations and bursts.

use std::collections::BTreeSet;
use std::ffi::{CStr, c_char, c_void};
use std::path::PathBuf;

use super::create;
use crate::codes::*;
use crate::world::{Burst, World, call, enter, find, free, give, leave, list, lock, release};

/// What this device would like best; it takes everything.
const ALIGNMENT: u32 = 64;
const PADDING: u32 = 32;

impl World {
    /// The handles of devices that a client names, each once.
    pub(crate) fn chosen(&mut self, devices: Vec<*const c_void>) -> Outcome<Vec<usize>> {
        let handles: Vec<usize> = devices.iter().map(|d| d.addr()).collect();
        let different: BTreeSet<&usize> = handles.iter().collect();
        if handles.is_empty() || different.len() != handles.len() {
            return Err(BAD_DATA);
        }
        for device in devices {
            find(&mut self.devices, &mut self.log, device)?;
        }
        Ok(handles)
    }
}

/// A compilation for whatever devices there are.
///
/// # Safety
/// As the interface says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ANeuralNetworksCompilation_create(
    model: *mut c_void,
    compilation: *mut *mut c_void,
) -> i32 {
    let body = |world: &mut World| {
        let all = world.devices.keys().copied().collect();
        world.compile_for(model, all, false)
    };
    // SAFETY: the client vouches for its slot.
    unsafe { create("Compilation_create", compilation, body) }
}

/// A compilation for these devices.
///
/// # Safety
/// As the interface says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ANeuralNetworksCompilation_createForDevices(
    model: *mut c_void,
    devices: *const *const c_void,
    count: u32,
    compilation: *mut *mut c_void,
) -> i32 {
    let body = |world: &mut World| {
        if devices.is_null() {
            return Err(UNEXPECTED_NULL);
        }
        // SAFETY: the client vouches for the list.
        let handles = world.chosen(unsafe { list(devices, count) }?)?;
        world.compile_for(model, handles, true)
    };
    // SAFETY: the client vouches for its slot.
    unsafe { create("Compilation_createForDevices", compilation, body) }
}

/// Frees a compilation, whose executions and bursts must be gone.
///
/// # Safety
/// As the interface says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ANeuralNetworksCompilation_free(compilation: *mut c_void) {
    free("Compilation_free", |world| {
        release(&mut world.compilations, &mut world.log, compilation)?;
        let handle = compilation.addr();
        if world.executions.values().any(|e| e.compilation == handle) {
            world.log.violation("order", "a compilation was freed before its execution".into());
        }
        if world.bursts.values().any(|b| b.compilation == handle) {
            world.log.violation("order", "a compilation was freed before its burst".into());
        }
        Ok(())
    });
}

/// Sets what to prefer: little power, one fast answer, or lasting speed.
///
/// # Safety
/// As the interface says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ANeuralNetworksCompilation_setPreference(
    compilation: *mut c_void,
    preference: i32,
) -> i32 {
    call("Compilation_setPreference", |world| {
        find(&mut world.compilations, &mut world.log, compilation)?.open()?;
        if (0..=2).contains(&preference) { Ok(()) } else { Err(BAD_DATA) }
    })
}

/// Names a folder and a token of 32 bytes under which the compiled model is kept.
///
/// # Safety
/// As the interface says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ANeuralNetworksCompilation_setCaching(
    compilation: *mut c_void,
    folder: *const c_char,
    token: *const u8,
) -> i32 {
    call("Compilation_setCaching", |world| {
        let compilation = find(&mut world.compilations, &mut world.log, compilation)?;
        if folder.is_null() || token.is_null() {
            return Err(UNEXPECTED_NULL);
        }
        // SAFETY: the client vouches for a text that ends and for 32 bytes.
        let (folder, token) = unsafe { (CStr::from_ptr(folder), token.cast::<[u8; TOKEN]>().read()) };
        let folder = PathBuf::from(folder.to_str().map_err(|_| BAD_DATA)?);
        compilation.open()?.caching = Some((folder, token));
        Ok(())
    })
}

/// Sets the priority among the client's own executions.
///
/// # Safety
/// As the interface says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ANeuralNetworksCompilation_setPriority(
    compilation: *mut c_void,
    priority: i32,
) -> i32 {
    call("Compilation_setPriority", |world| {
        find(&mut world.compilations, &mut world.log, compilation)?.open()?;
        if [90, 100, 110].contains(&priority) { Ok(()) } else { Err(BAD_DATA) }
    })
}

/// Sets the deadline for compiling, in nanoseconds.
///
/// # Safety
/// As the interface says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ANeuralNetworksCompilation_setTimeout(compilation: *mut c_void, nanos: u64) -> i32 {
    call("Compilation_setTimeout", |world| {
        let compilation = find(&mut world.compilations, &mut world.log, compilation)?.open()?;
        compilation.one_device()?;
        compilation.timeout = nanos;
        Ok(())
    })
}

/// Compiles.
///
/// # Safety
/// As the interface says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ANeuralNetworksCompilation_finish(compilation: *mut c_void) -> i32 {
    let function = "Compilation_finish";
    let started = {
        let mut world = lock();
        let started = enter(&mut world, function).and_then(|()| world.begin_finish(compilation));
        match started {
            Ok(started) => started,
            Err(code) => return leave(&mut world, function, Err(code)),
        }
    };
    // Other threads go on while the device pretends to work.
    std::thread::sleep(started.0);
    let mut world = lock();
    let fault = world.settings.faults.of_function(function).err();
    let late = started.1.then_some(MISSED_DEADLINE_TRANSIENT);
    let outcome = world.end_finish(compilation.addr(), fault.or(late));
    leave(&mut world, function, outcome)
}

/// What a value of an input or output of a finished compilation should be aligned and padded to, in bytes.
///
/// # Safety
/// `to` is NULL or may be written.
unsafe fn preferred(
    function: &'static str,
    compilation: *const c_void,
    index: u32,
    output: bool,
    bytes: u32,
    to: *mut u32,
) -> i32 {
    call(function, |world| {
        let compilation = find(&mut world.compilations, &mut world.log, compilation)?;
        if to.is_null() {
            return Err(UNEXPECTED_NULL);
        }
        let plan = compilation.plan()?;
        let values = if output { &plan.model.outputs } else { &plan.model.inputs };
        if index as usize >= values.len() {
            return Err(BAD_DATA);
        }
        // SAFETY: as the caller vouches.
        unsafe { give(to, bytes) }
    })
}

/// The alignment that an input is best at.
///
/// # Safety
/// As the interface says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ANeuralNetworksCompilation_getPreferredMemoryAlignmentForInput(
    compilation: *const c_void,
    index: u32,
    alignment: *mut u32,
) -> i32 {
    let function = "Compilation_getPreferredMemoryAlignmentForInput";
    // SAFETY: the client vouches for its pointer.
    unsafe { preferred(function, compilation, index, false, ALIGNMENT, alignment) }
}

/// The multiple that an input's bytes are best padded to.
///
/// # Safety
/// As the interface says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ANeuralNetworksCompilation_getPreferredMemoryPaddingForInput(
    compilation: *const c_void,
    index: u32,
    padding: *mut u32,
) -> i32 {
    let function = "Compilation_getPreferredMemoryPaddingForInput";
    // SAFETY: the client vouches for its pointer.
    unsafe { preferred(function, compilation, index, false, PADDING, padding) }
}

/// The alignment that an output is best at.
///
/// # Safety
/// As the interface says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ANeuralNetworksCompilation_getPreferredMemoryAlignmentForOutput(
    compilation: *const c_void,
    index: u32,
    alignment: *mut u32,
) -> i32 {
    let function = "Compilation_getPreferredMemoryAlignmentForOutput";
    // SAFETY: the client vouches for its pointer.
    unsafe { preferred(function, compilation, index, true, ALIGNMENT, alignment) }
}

/// The multiple that an output's bytes are best padded to.
///
/// # Safety
/// As the interface says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ANeuralNetworksCompilation_getPreferredMemoryPaddingForOutput(
    compilation: *const c_void,
    index: u32,
    padding: *mut u32,
) -> i32 {
    let function = "Compilation_getPreferredMemoryPaddingForOutput";
    // SAFETY: the client vouches for its pointer.
    unsafe { preferred(function, compilation, index, true, PADDING, padding) }
}

/// A burst for executions of a finished compilation.
///
/// # Safety
/// As the interface says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ANeuralNetworksBurst_create(
    compilation: *mut c_void,
    burst: *mut *mut c_void,
) -> i32 {
    let body = |world: &mut World| {
        find(&mut world.compilations, &mut world.log, compilation)?.plan()?;
        let handle = world.fresh();
        world.bursts.insert(handle, Burst { compilation: compilation.addr(), busy: false });
        Ok(handle)
    };
    // SAFETY: the client vouches for its slot.
    unsafe { create("Burst_create", burst, body) }
}

/// Frees a burst that is not in use.
///
/// # Safety
/// As the interface says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ANeuralNetworksBurst_free(burst: *mut c_void) {
    free("Burst_free", |world| {
        if release(&mut world.bursts, &mut world.log, burst)?.busy {
            world.log.violation("in_use", "a burst was freed while an execution ran on it".into());
        }
        Ok(())
    });
}
