//! The devices that the machine pretends to have, and which operations each says it can do.

use std::ffi::CString;

use crate::check::Step;
use crate::codes::*;
use crate::control::Settings;
use crate::model::{Model, Operation};
use crate::world::World;

/// What a machine has unless a test says otherwise: `name:type:level`, as `control` takes it.
pub(crate) const DEFAULT: &str = "shim-accelerator:accelerator:31,shim-gpu:gpu:30,nnapi-reference:cpu:31";

/// One device.
#[derive(Debug)]
pub(crate) struct Device {
    pub(crate) index: u32,
    /// Name and version live for ever, as the interface promises for them.
    pub(crate) name: &'static CString,
    pub(crate) version: &'static CString,
    pub(crate) kind: i32,
    pub(crate) level: i64,
}

impl Device {
    /// Reads `name:type:level` or `name:type:level:version`.
    fn parse(index: u32, text: &str) -> Option<Device> {
        let mut parts = text.split(':');
        let (name, kind, level) = (parts.next()?, parts.next()?, parts.next()?);
        let version = parts.next().unwrap_or("1.0");
        let kind = ["unknown", "other", "cpu", "gpu", "accelerator"].iter().position(|k| *k == kind)?;
        let for_ever = |text: &str| CString::new(text).ok().map(|t| &*Box::leak(Box::new(t)));
        Some(Device {
            index,
            name: for_ever(name)?,
            version: for_ever(version)?,
            kind: kind as i32,
            level: level.parse().ok()?,
        })
    }

    /// Whether the device does an operation of this model, by its place.
    pub(crate) fn supports(&self, settings: &Settings, model: &Model, at: usize) -> bool {
        let Some(operation) = model.operations.get(at) else { return false };
        let kinds = model.kinds_of(operation);
        let unknown = model.order.iter().any(|(i, step)| *i == at && *step == Step::Unknown);
        if unknown || needed_level(model, operation) > self.level {
            return false;
        }
        // A GPU of this kind computes with floats only.
        let quantised = |k: &i32| {
            [TENSOR_QUANT8_ASYMM, TENSOR_QUANT8_ASYMM_SIGNED, TENSOR_QUANT8_SYMM_PER_CHANNEL].contains(k)
        };
        if self.kind == 3 && kinds.iter().any(quantised) {
            return false;
        }
        let name = self.name.to_string_lossy();
        !settings.unsupported.iter().any(|[device, what, kind]| {
            (device == "*" || *device == name)
                && (what == "*" || what == operation_name(operation.kind))
                && (kind == "*" || kinds.iter().any(|k| type_name(*k) == kind))
        })
    }
}

/// The level that brought what an operation uses.
pub(crate) fn needed_level(model: &Model, operation: &Operation) -> i64 {
    let kinds = model.kinds_of(operation);
    let mut level = 27;
    for kind in &kinds {
        level = level.max(match *kind {
            TENSOR_QUANT8_ASYMM_SIGNED => 30,
            TENSOR_FLOAT16 | TENSOR_QUANT8_SYMM_PER_CHANNEL | FLOAT16 | TENSOR_BOOL8 => 29,
            _ => 27,
        });
    }
    // The flag for the order of channels, and dilation.
    let plain = [7, 10].contains(&operation.inputs.len());
    if operation.kind == CONV_2D && !plain || !model.scales_were_ordered(operation) {
        level = level.max(29);
    }
    level
}

impl World {
    /// Puts these devices in place of the present ones. `None` when the list is not understood.
    pub(crate) fn set_devices(&mut self, list: &str) -> Option<()> {
        let mut devices = Vec::new();
        for (index, text) in list.split(',').filter(|t| !t.is_empty()).enumerate() {
            devices.push(Device::parse(index as u32, text.trim())?);
        }
        self.devices = devices.into_iter().map(|d| (self.fresh(), d)).collect();
        Some(())
    }
}
