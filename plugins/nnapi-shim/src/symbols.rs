//! Which function came with which level of the interface.
//!
//! An old library simply lacks the newer functions, and a client must notice by their absence. A symbol cannot be hidden
//! while a library is loaded, so [`old_library`] writes a copy of the file in which the newer names are spelt differently.

use std::collections::BTreeSet;
use std::path::Path;

/// The exported functions, without their common prefix, each with the feature level that brought it.
pub const FUNCTIONS: &[(&str, i64)] = &[
    ("Memory_createFromFd", 27),
    ("Memory_free", 27),
    ("Model_create", 27),
    ("Model_free", 27),
    ("Model_finish", 27),
    ("Model_addOperand", 27),
    ("Model_setOperandValue", 27),
    ("Model_setOperandValueFromMemory", 27),
    ("Model_addOperation", 27),
    ("Model_identifyInputsAndOutputs", 27),
    ("Compilation_create", 27),
    ("Compilation_free", 27),
    ("Compilation_setPreference", 27),
    ("Compilation_finish", 27),
    ("Execution_create", 27),
    ("Execution_free", 27),
    ("Execution_setInput", 27),
    ("Execution_setInputFromMemory", 27),
    ("Execution_setOutput", 27),
    ("Execution_setOutputFromMemory", 27),
    ("Execution_startCompute", 27),
    ("Event_wait", 27),
    ("Event_free", 27),
    ("Model_relaxComputationFloat32toFloat16", 28),
    ("_getDeviceCount", 29),
    ("_getDevice", 29),
    ("Device_getName", 29),
    ("Device_getType", 29),
    ("Device_getVersion", 29),
    ("Device_getFeatureLevel", 29),
    ("Model_setOperandSymmPerChannelQuantParams", 29),
    ("Model_getSupportedOperationsForDevices", 29),
    ("Compilation_createForDevices", 29),
    ("Compilation_setCaching", 29),
    ("Execution_compute", 29),
    ("Execution_getOutputOperandRank", 29),
    ("Execution_getOutputOperandDimensions", 29),
    ("Execution_setMeasureTiming", 29),
    ("Execution_getDuration", 29),
    ("Burst_create", 29),
    ("Burst_free", 29),
    ("Execution_burstCompute", 29),
    ("Device_wait", 30),
    ("Compilation_setPriority", 30),
    ("Compilation_setTimeout", 30),
    ("Execution_setTimeout", 30),
    ("MemoryDesc_create", 30),
    ("MemoryDesc_free", 30),
    ("MemoryDesc_addInputRole", 30),
    ("MemoryDesc_addOutputRole", 30),
    ("MemoryDesc_setDimensions", 30),
    ("MemoryDesc_finish", 30),
    ("Memory_createFromDesc", 30),
    ("Memory_copy", 30),
    ("_getRuntimeFeatureLevel", 31),
    ("Compilation_getPreferredMemoryAlignmentForInput", 31),
    ("Compilation_getPreferredMemoryPaddingForInput", 31),
    ("Compilation_getPreferredMemoryAlignmentForOutput", 31),
    ("Compilation_getPreferredMemoryPaddingForOutput", 31),
    ("Execution_setReusable", 31),
    ("Execution_enableInputAndOutputPadding", 31),
];

/// What every name begins with.
const PREFIX: &str = "ANeuralNetworks";

/// The level that brought a function, by its name without the prefix.
pub(crate) fn level_of(function: &str) -> i64 {
    FUNCTIONS.iter().find(|(name, _)| *name == function).map_or(27, |(_, level)| *level)
}

/// The function's name without the common prefix, if there is such a function.
pub(crate) fn short_name(name: &str) -> Option<&'static str> {
    let name = name.strip_prefix(PREFIX).unwrap_or(name);
    FUNCTIONS.iter().find(|(known, _)| *known == name).map(|(known, _)| *known)
}

/// Writes to `to` a copy of the library `from` that has only the functions of `level` and older (27 to 31).
///
/// # Errors
/// When a file cannot be read or written, or when a name to hide is not in the library.
pub fn old_library(from: &Path, to: &Path, level: i64) -> std::io::Result<()> {
    let mut bytes = std::fs::read(from)?;
    let mut newer: BTreeSet<Vec<u8>> = FUNCTIONS
        .iter()
        .filter(|(_, since)| *since > level)
        .map(|(function, _)| format!("{PREFIX}{function}").into_bytes())
        .collect();
    let first = format!("\0{PREFIX}").into_bytes();
    let places: Vec<usize> =
        bytes.windows(first.len()).enumerate().filter(|(_, w)| *w == first).map(|(at, _)| at + 1).collect();
    let mut hidden = BTreeSet::new();
    for at in places {
        let name: Vec<u8> = bytes.iter().skip(at).take_while(|b| **b != 0).copied().collect();
        // The table of names is looked up by a hash of the true name, then compared: one other letter hides it.
        if let Some(letter) = bytes.get_mut(at).filter(|_| newer.contains(&name)) {
            *letter = b'X';
            hidden.insert(name);
        }
    }
    newer.retain(|name| !hidden.contains(name));
    if let Some(name) = newer.first() {
        let name = String::from_utf8_lossy(name).into_owned();
        return Err(std::io::Error::other(format!("the library has no function {name}")));
    }
    std::fs::write(to, bytes)
}
