//! Memory objects and their descriptions.

use std::ffi::c_void;
use std::sync::Arc;

use super::create;
use crate::codes::*;
use crate::desc::MemoryDesc;
use crate::memory::{Memory, Region, Role};
use crate::world::{call, find, free, list, release};

/// Memory that is a part of a file; `size` and `offset` in bytes.
///
/// # Safety
/// As the interface says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ANeuralNetworksMemory_createFromFd(
    size: usize,
    protect: i32,
    fd: i32,
    offset: usize,
    memory: *mut *mut c_void,
) -> i32 {
    let body = |world: &mut crate::world::World| {
        let region = Region::map(size, protect, fd, offset)?;
        let handle = world.fresh();
        world.memories.insert(handle, Memory::Mapped(Arc::new(region)));
        Ok(handle)
    };
    // SAFETY: the client vouches for its slot.
    unsafe { create("Memory_createFromFd", memory, body) }
}

/// Frees a memory object, which no model and no execution may use any more.
///
/// # Safety
/// As the interface says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ANeuralNetworksMemory_free(memory: *mut c_void) {
    free("Memory_free", |world| {
        release(&mut world.memories, &mut world.log, memory)?;
        let handle = memory.addr();
        if world.models.values().any(|m| m.uses_memory(handle)) {
            world.log.violation("order", "a memory object was freed before a model that uses it".into());
        }
        if world.executions.values().any(|e| e.uses_memory(handle)) {
            world.log.violation("order", "a memory object was freed before an execution that uses it".into());
        }
        Ok(())
    });
}

/// Copies one memory object over another.
///
/// # Safety
/// As the interface says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ANeuralNetworksMemory_copy(from: *const c_void, to: *const c_void) -> i32 {
    call("Memory_copy", |world| {
        let from = find(&mut world.memories, &mut world.log, from)?.clone();
        let to = find(&mut world.memories, &mut world.log, to)?.clone();
        from.copy_to(&to)
    })
}

/// A new description.
///
/// # Safety
/// As the interface says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ANeuralNetworksMemoryDesc_create(desc: *mut *mut c_void) -> i32 {
    let body = |world: &mut crate::world::World| {
        let handle = world.fresh();
        world.descs.insert(handle, MemoryDesc::default());
        Ok(handle)
    };
    // SAFETY: the client vouches for its slot.
    unsafe { create("MemoryDesc_create", desc, body) }
}

/// Frees a description; buffers made from it live on.
///
/// # Safety
/// As the interface says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ANeuralNetworksMemoryDesc_free(desc: *mut c_void) {
    free("MemoryDesc_free", |world| release(&mut world.descs, &mut world.log, desc).map(|_| ()));
}

/// Adds a role, for the two functions below.
fn role(
    function: &'static str,
    desc: *mut c_void,
    compilation: *const c_void,
    index: u32,
    frequency: f32,
    output: bool,
) -> i32 {
    call(function, |world| {
        find(&mut world.descs, &mut world.log, desc)?;
        let plan = find(&mut world.compilations, &mut world.log, compilation)?.plan()?;
        let index = index as usize;
        let list = if output { &plan.model.outputs } else { &plan.model.inputs };
        let operand = list.get(index).and_then(|i| plan.model.operands.get(*i as usize)).ok_or(BAD_DATA)?;
        let role = Role { compilation: compilation.addr(), index, output };
        find(&mut world.descs, &mut world.log, desc)?.add(role, operand.shape.clone(), frequency)
    })
}

/// The buffer will be this input of the compilation.
///
/// # Safety
/// As the interface says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ANeuralNetworksMemoryDesc_addInputRole(
    desc: *mut c_void,
    compilation: *const c_void,
    index: u32,
    frequency: f32,
) -> i32 {
    role("MemoryDesc_addInputRole", desc, compilation, index, frequency, false)
}

/// The buffer will be this output of the compilation.
///
/// # Safety
/// As the interface says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ANeuralNetworksMemoryDesc_addOutputRole(
    desc: *mut c_void,
    compilation: *const c_void,
    index: u32,
    frequency: f32,
) -> i32 {
    role("MemoryDesc_addOutputRole", desc, compilation, index, frequency, true)
}

/// Dimensions that the roles leave open.
///
/// # Safety
/// As the interface says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ANeuralNetworksMemoryDesc_setDimensions(
    desc: *mut c_void,
    rank: u32,
    dimensions: *const u32,
) -> i32 {
    call("MemoryDesc_setDimensions", |world| {
        // SAFETY: the client vouches for the list.
        let dims = unsafe { list(dimensions, rank) }?;
        find(&mut world.descs, &mut world.log, desc)?.set_dimensions(dims)
    })
}

/// Finishes a description.
///
/// # Safety
/// As the interface says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ANeuralNetworksMemoryDesc_finish(desc: *mut c_void) -> i32 {
    call("MemoryDesc_finish", |world| find(&mut world.descs, &mut world.log, desc)?.finish())
}

/// A buffer of the library, for the roles of a finished description.
///
/// # Safety
/// As the interface says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ANeuralNetworksMemory_createFromDesc(
    desc: *const c_void,
    memory: *mut *mut c_void,
) -> i32 {
    let body = |world: &mut crate::world::World| {
        let opaque = find(&mut world.descs, &mut world.log, desc)?.buffer()?;
        let handle = world.fresh();
        world.memories.insert(handle, Memory::Opaque(Arc::new(opaque)));
        Ok(handle)
    };
    // SAFETY: the client vouches for its slot.
    unsafe { create("Memory_createFromDesc", memory, body) }
}
