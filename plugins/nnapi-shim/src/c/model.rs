//! Models.

use std::ffi::c_void;

use super::{create, truth};
use crate::codes::*;
use crate::memory::Memory;
use crate::model::{Model, Operand, Operation, Value};
use crate::operand::{Channels, Shape};
use crate::peek::{checksum_at, copy_from};
use crate::world::{call, find, free, list, release};

/// A new model.
///
/// # Safety
/// As the interface says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ANeuralNetworksModel_create(model: *mut *mut c_void) -> i32 {
    let body = |world: &mut crate::world::World| {
        let handle = world.fresh();
        world.models.insert(handle, Model::new());
        Ok(handle)
    };
    // SAFETY: the client vouches for its slot.
    unsafe { create("Model_create", model, body) }
}

/// Frees a model. Its compilations must be gone, and the constants it borrows must still be what they were.
///
/// # Safety
/// As the interface says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ANeuralNetworksModel_free(model: *mut c_void) {
    free("Model_free", |world| {
        let freed = release(&mut world.models, &mut world.log, model)?;
        if world.compilations.values().any(|c| c.model == model.addr()) {
            world.log.violation("order", "a model was freed before its compilation".into());
        }
        if world.settings.constants_until_freed && freed.constant_changed() {
            let text = "a large constant changed, or was gone, before its model was freed";
            world.log.violation("constant_changed", text.into());
        }
        Ok(())
    });
}

/// Finishes a model: checks it, and allows no more changes.
///
/// # Safety
/// As the interface says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ANeuralNetworksModel_finish(model: *mut c_void) -> i32 {
    call("Model_finish", |world| find(&mut world.models, &mut world.log, model)?.finish())
}

/// Adds an operand; its index is the number of those before.
///
/// # Safety
/// As the interface says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ANeuralNetworksModel_addOperand(
    model: *mut c_void,
    kind: *const OperandType,
) -> i32 {
    call("Model_addOperand", |world| {
        let model = find(&mut world.models, &mut world.log, model)?;
        // SAFETY: the client vouches for the type.
        let shape = unsafe { Shape::read(kind) }?;
        model.building()?.operands.push(Operand { shape, channels: None, value: Value::Unset });
        Ok(())
    })
}

/// Sets a constant: small ones are copied, large ones stay where they are.
///
/// # Safety
/// As the interface says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ANeuralNetworksModel_setOperandValue(
    model: *mut c_void,
    index: i32,
    buffer: *const c_void,
    length: usize,
) -> i32 {
    call("Model_setOperandValue", |world| {
        let model = find(&mut world.models, &mut world.log, model)?;
        model.building()?;
        if buffer.is_null() {
            return if length > 0 { Err(UNEXPECTED_NULL) } else { model.set_value(index, 0, Value::Missing) };
        }
        // The length is checked before anything is read.
        model.set_value(index, length, Value::Unset)?;
        let address = buffer.expose_provenance();
        let value = match length <= COPIED_AT_ONCE {
            true => copy_from(address, length).map(|(bytes, _)| Value::Copied(bytes)),
            false => checksum_at(address, length).map(|sum| Value::Borrowed { address, len: length, sum }),
        };
        let Some(value) = value else {
            world.log.violation("client_memory", "a constant cannot be read".into());
            return Err(BAD_DATA);
        };
        model.set_value(index, length, value)
    })
}

/// Sets a constant that lies in a memory object.
///
/// # Safety
/// As the interface says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ANeuralNetworksModel_setOperandValueFromMemory(
    model: *mut c_void,
    index: i32,
    memory: *const c_void,
    offset: usize,
    length: usize,
) -> i32 {
    call("Model_setOperandValueFromMemory", |world| {
        let model = find(&mut world.models, &mut world.log, model)?;
        model.building()?;
        let Memory::Mapped(region) = find(&mut world.memories, &mut world.log, memory)?.clone() else {
            return Err(BAD_DATA);
        };
        model.set_value(index, length, Value::Unset)?;
        let sum = region.checksum(offset, length)?;
        let memory = memory.addr();
        model.set_value(index, length, Value::InMemory { memory, region, offset, len: length, sum })
    })
}

/// Sets the scales of a tensor with one per channel.
///
/// # Safety
/// As the interface says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ANeuralNetworksModel_setOperandSymmPerChannelQuantParams(
    model: *mut c_void,
    index: i32,
    channels: *const ChannelScales,
) -> i32 {
    call("Model_setOperandSymmPerChannelQuantParams", |world| {
        let model = find(&mut world.models, &mut world.log, model)?;
        // SAFETY: the client vouches for the struct, NULL aside.
        let channels = unsafe { channels.as_ref() }.ok_or(UNEXPECTED_NULL)?;
        // SAFETY: the client vouches for the scales.
        let scales = unsafe { list(channels.scales, channels.count) }?;
        model.set_channels(index, Channels { dimension: channels.dimension as usize, scales })
    })
}

/// Adds an operation on operands that are there already.
///
/// # Safety
/// As the interface says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ANeuralNetworksModel_addOperation(
    model: *mut c_void,
    kind: i32,
    input_count: u32,
    inputs: *const u32,
    output_count: u32,
    outputs: *const u32,
) -> i32 {
    call("Model_addOperation", |world| {
        let runtime = world.settings.runtime_level;
        let model = find(&mut world.models, &mut world.log, model)?;
        // SAFETY: the client vouches for both lists.
        let (inputs, outputs) = unsafe { (list(inputs, input_count)?, list(outputs, output_count)?) };
        let operation = Operation { kind, inputs, outputs };
        let too_new = crate::devices::needed_level(model, &operation) > runtime;
        model.building()?;
        if too_new {
            return Err(BAD_DATA);
        }
        model.add_operation(operation)
    })
}

/// Says which operands are the model's inputs and outputs.
///
/// # Safety
/// As the interface says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ANeuralNetworksModel_identifyInputsAndOutputs(
    model: *mut c_void,
    input_count: u32,
    inputs: *const u32,
    output_count: u32,
    outputs: *const u32,
) -> i32 {
    call("Model_identifyInputsAndOutputs", |world| {
        let model = find(&mut world.models, &mut world.log, model)?;
        if inputs.is_null() || outputs.is_null() {
            return Err(UNEXPECTED_NULL);
        }
        // SAFETY: the client vouches for both lists.
        let (inputs, outputs) = unsafe { (list(inputs, input_count)?, list(outputs, output_count)?) };
        model.identify(inputs, outputs)
    })
}

/// Lets F32 be computed as F16.
///
/// # Safety
/// As the interface says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ANeuralNetworksModel_relaxComputationFloat32toFloat16(
    model: *mut c_void,
    allow: u8,
) -> i32 {
    call("Model_relaxComputationFloat32toFloat16", |world| {
        let model = find(&mut world.models, &mut world.log, model)?;
        model.building()?.relaxed = truth(allow)?;
        Ok(())
    })
}
