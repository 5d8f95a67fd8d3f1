//! Devices and levels.

use std::ffi::{c_char, c_void};

use crate::codes::*;
use crate::world::{call, enter, find, give, leave, list, lock, pointer};

/// The number of devices.
///
/// # Safety
/// As the interface says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ANeuralNetworks_getDeviceCount(count: *mut u32) -> i32 {
    call("_getDeviceCount", |world| {
        // SAFETY: the client vouches for its pointer.
        unsafe { give(count, world.devices.len() as u32) }
    })
}

/// The device of an index; the same one each time.
///
/// # Safety
/// As the interface says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ANeuralNetworks_getDevice(index: u32, device: *mut *mut c_void) -> i32 {
    call("_getDevice", |world| {
        let found = world.devices.iter().find(|(_, d)| d.index == index).map(|(handle, _)| *handle);
        // SAFETY: the client vouches for its pointer.
        unsafe { give(device, pointer(found.unwrap_or_default())) }?;
        found.map(|_| ()).ok_or(BAD_DATA)
    })
}

/// The device's name.
///
/// # Safety
/// As the interface says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ANeuralNetworksDevice_getName(
    device: *const c_void,
    name: *mut *const c_char,
) -> i32 {
    call("Device_getName", |world| {
        let device = find(&mut world.devices, &mut world.log, device)?;
        // SAFETY: the client vouches for its pointer.
        unsafe { give(name, device.name.as_ptr()) }
    })
}

/// The version of the device's driver.
///
/// # Safety
/// As the interface says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ANeuralNetworksDevice_getVersion(
    device: *const c_void,
    version: *mut *const c_char,
) -> i32 {
    call("Device_getVersion", |world| {
        let device = find(&mut world.devices, &mut world.log, device)?;
        // SAFETY: the client vouches for its pointer.
        unsafe { give(version, device.version.as_ptr()) }
    })
}

/// The device's type.
///
/// # Safety
/// As the interface says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ANeuralNetworksDevice_getType(device: *const c_void, kind: *mut i32) -> i32 {
    call("Device_getType", |world| {
        let device = find(&mut world.devices, &mut world.log, device)?;
        // SAFETY: the client vouches for its pointer.
        unsafe { give(kind, device.kind) }
    })
}

/// The device's feature level, never above the runtime's.
///
/// # Safety
/// As the interface says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ANeuralNetworksDevice_getFeatureLevel(
    device: *const c_void,
    level: *mut i64,
) -> i32 {
    call("Device_getFeatureLevel", |world| {
        let runtime = world.settings.runtime_level;
        let device = find(&mut world.devices, &mut world.log, device)?;
        // SAFETY: the client vouches for its pointer.
        unsafe { give(level, device.level.min(runtime)) }
    })
}

/// Waits until the device lives; after it, a dead device is alive again.
///
/// # Safety
/// As the interface says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ANeuralNetworksDevice_wait(device: *const c_void) -> i32 {
    call("Device_wait", |world| {
        find(&mut world.devices, &mut world.log, device)?;
        world.settings.faults.revive();
        Ok(())
    })
}

/// The runtime's feature level.
#[unsafe(no_mangle)]
pub extern "C" fn ANeuralNetworks_getRuntimeFeatureLevel() -> i64 {
    let mut world = lock();
    let outcome = enter(&mut world, "_getRuntimeFeatureLevel");
    let level = world.settings.runtime_level;
    // The function has no way to fail: an injected fault makes it answer with the oldest level.
    if leave(&mut world, "_getRuntimeFeatureLevel", outcome) == NO_ERROR { level } else { 27 }
}

/// Which operations of a finished model some of these devices can do, one truth value for each.
///
/// # Safety
/// As the interface says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ANeuralNetworksModel_getSupportedOperationsForDevices(
    model: *const c_void,
    devices: *const *const c_void,
    count: u32,
    supported: *mut u8,
) -> i32 {
    call("Model_getSupportedOperationsForDevices", |world| {
        if devices.is_null() || supported.is_null() {
            return Err(UNEXPECTED_NULL);
        }
        // SAFETY: the client vouches for the list.
        let handles = world.chosen(unsafe { list(devices, count) }?)?;
        let model = find(&mut world.models, &mut world.log, model)?;
        if model.phase != crate::model::Phase::Finished {
            return Err(BAD_STATE);
        }
        for at in 0..model.operations.len() {
            let devices = handles.iter().filter_map(|h| world.devices.get(h));
            let yes = devices.into_iter().any(|d| d.supports(&world.settings, model, at));
            // SAFETY: the client's array has a place for each operation.
            unsafe { supported.add(at).write(u8::from(yes)) };
        }
        Ok(())
    })
}
