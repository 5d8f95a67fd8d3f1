//! What tests may set and read. It is outside the real interface, under names of its own.
//!
//! | key of `neuropil_nnapi_shim_control` | value |
//! |---|---|
//! | `reset` | anything: forget all objects, counters and settings |
//! | `fail` | `FUNCTION CODE [WHEN]`: the function returns the code and does nothing; several may be set |
//! | `nan_outputs`, `wrong_tile` | `WHEN`, by execution |
//! | `hang_ms`, `compile_hang_ms` | `MS [WHEN]`: sleep before the work; a shorter timeout of the client ends it |
//! | `missed_deadline` | `WHEN`, by execution |
//! | `dead_object` | `WHEN`: from that execution on the device is dead, until `ANeuralNetworksDevice_wait` |
//! | `devices` | `name:type:level[:version],...`; empty for none |
//! | `unavailable` | a device's name; compiling and running on it fails; empty for none |
//! | `runtime_level` | the level that the runtime reports |
//! | `symbols_level` | functions newer than this refuse, and the call counts as a violation |
//! | `unsupported` | `DEVICE/OPERATION/TYPE`, each may be `*`; several may be set; `off` for none |
//! | `constants` | `until_freed` (the documented rule) or `until_compiled` |
//!
//! `WHEN` is `once`, `always`, `at=N` or `after=N`; `off` clears a fault. Functions are named with or without their prefix.
//!
//! Keys of `neuropil_nnapi_shim_query`: `violations`, `violations.KIND`, `live`, `live.models` (`.compilations`,
//! `.memories`, `.memory_descs`, `.bursts`, `.executions`, `.events`), `executions.run`, `executions.now`, `executions.peak`,
//! `executions.burst`, `compilations.done`, `compilations.from_cache`, `cache.written`, `cache.corrupt`,
//! `calls.FUNCTION`, `refused`, `refused.CODE`, `refused.FUNCTION`. A counter that never moved is 0; an unknown key is -1.

use std::ffi::{CStr, c_char};

use crate::faults::Faults;
use crate::symbols::short_name;
use crate::world::{World, lock};

/// What tests have set.
#[derive(Debug)]
pub(crate) struct Settings {
    pub(crate) faults: Faults,
    pub(crate) unavailable: String,
    pub(crate) runtime_level: i64,
    pub(crate) symbols_level: i64,
    /// Device, operation and type, each a name or `*`.
    pub(crate) unsupported: Vec<[String; 3]>,
    /// Large constants must outlive the model, not only the compilation.
    pub(crate) constants_until_freed: bool,
}

impl Default for Settings {
    fn default() -> Settings {
        Settings {
            faults: Faults::default(),
            unavailable: String::new(),
            runtime_level: 31,
            symbols_level: i64::MAX,
            unsupported: Vec::new(),
            constants_until_freed: true,
        }
    }
}

impl World {
    /// Applies a setting; `None` when key or value are not understood.
    fn set(&mut self, key: &str, value: &str) -> Option<()> {
        match key {
            "reset" => self.reset(),
            "devices" => self.set_devices(value)?,
            "unavailable" => self.settings.unavailable = value.into(),
            "runtime_level" => self.settings.runtime_level = value.parse().ok()?,
            "symbols_level" => self.settings.symbols_level = value.parse().ok()?,
            "unsupported" if value == "off" => self.settings.unsupported.clear(),
            "unsupported" => {
                let parts: Vec<String> = value.split('/').map(String::from).collect();
                self.settings.unsupported.push(parts.try_into().ok()?);
            }
            "constants" => {
                self.settings.constants_until_freed = match value {
                    "until_freed" => true,
                    "until_compiled" => false,
                    _ => return None,
                }
            }
            _ => self.settings.faults.set(key, value)?,
        }
        Some(())
    }

    /// The value of a counter; `None` for a key that does not exist.
    fn get(&self, key: &str) -> Option<i64> {
        let counter = || self.log.counts.get(key).copied().unwrap_or_default();
        let (group, rest) = key.split_once('.').unwrap_or((key, ""));
        match (group, rest) {
            ("violations", "") => Some(self.log.violations.values().sum()),
            ("violations", kind) => Some(self.log.violations.get(kind).copied().unwrap_or_default()),
            ("live", "") => Some(self.live().iter().map(|(_, n)| *n as i64).sum()),
            ("live", kind) => self.live().iter().find(|(k, _)| *k == kind).map(|(_, n)| *n as i64),
            ("executions", "now") => Some(self.running),
            ("executions", "peak") => Some(self.peak),
            ("executions", "run" | "burst") => Some(counter()),
            ("compilations", "done" | "from_cache") => Some(counter()),
            ("cache", "written" | "corrupt") => Some(counter()),
            ("calls" | "refused", name) => match short_name(name) {
                Some(short) => {
                    Some(self.log.counts.get(&format!("{group}.{short}")).copied().unwrap_or_default())
                }
                None => {
                    (group == "refused" && (name.is_empty() || name.parse::<i32>().is_ok())).then(counter)
                }
            },
            _ => None,
        }
    }
}

/// Sets a fault or a property of the machine; 0 when it was understood, -1 otherwise.
///
/// # Safety
/// Both texts are NULL or end with a zero byte.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn neuropil_nnapi_shim_control(key: *const c_char, value: *const c_char) -> i32 {
    // SAFETY: as the caller vouches.
    let (key, value) = unsafe { (text(key), text(value)) };
    let (Some(key), Some(value)) = (key, value) else { return -1 };
    if lock().set(&key, &value).is_some() { 0 } else { -1 }
}

/// Reads a counter; -1 when there is none of this name.
///
/// # Safety
/// `key` is NULL or ends with a zero byte.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn neuropil_nnapi_shim_query(key: *const c_char) -> i64 {
    // SAFETY: as the caller vouches.
    let Some(key) = (unsafe { text(key) }) else { return -1 };
    lock().get(&key).unwrap_or(-1)
}

/// Writes the last violation in words, cut to fit and ended with a zero byte; returns the bytes it takes without the zero.
///
/// # Safety
/// `len` bytes may be written at `to`, or `to` is NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn neuropil_nnapi_shim_last_violation(to: *mut c_char, len: usize) -> i64 {
    let last = lock().log.last.clone();
    if !to.is_null() && len > 0 {
        let n = last.len().min(len - 1);
        // SAFETY: the caller vouches for `len` bytes; `n` is at least one less.
        unsafe {
            std::ptr::copy_nonoverlapping(last.as_ptr(), to.cast(), n);
            to.add(n).write(0);
        }
    }
    last.len() as i64
}

/// # Safety
/// `from` is NULL or ends with a zero byte.
unsafe fn text(from: *const c_char) -> Option<String> {
    if from.is_null() {
        return None;
    }
    // SAFETY: not NULL, and the caller vouches for the end.
    unsafe { CStr::from_ptr(from) }.to_str().ok().map(String::from)
}
