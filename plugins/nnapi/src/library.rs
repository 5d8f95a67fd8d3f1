//! The functions of NNAPI that the plugin calls, found when it runs.
//!
//! The plugin links to nothing of Android, so it loads where there is no NNAPI and says so. The types are those of the
//! public C interface. What came after feature level 29 may be missing, and is then done without.

use std::ffi::{c_char, c_void};
use std::sync::Arc;

use libloading::Library;
use neuropil_plugin_sdk::Error;

use crate::codes::{LEVEL_DEVICES, LEVEL_SIGNED};

/// A pointer to something of NNAPI's own.
pub(crate) type Opaque = *mut c_void;

/// The type of an operand.
#[repr(C)]
pub(crate) struct OperandType {
    pub kind: i32,
    pub dimension_count: u32,
    pub dimensions: *const u32,
    pub scale: f32,
    pub zero_point: i32,
}

/// The scales of an operand with one per channel.
#[repr(C)]
pub(crate) struct ChannelScales {
    pub dimension: u32,
    pub count: u32,
    pub scales: *const f32,
}

/// Declares the table, and how it is filled: first what must be there, then what may.
macro_rules! functions {
    (must { $($name:ident = $symbol:literal: $type:ty;)* }
     may { $($extra:ident = $extra_symbol:literal: $extra_type:ty;)* }) => {
        /// The functions. They stay loaded until the process ends.
        pub(crate) struct Functions {
            $(pub $name: $type,)*
            $(pub $extra: Option<$extra_type>,)*
        }

        impl Functions {
            fn find(library: &Library, path: &str) -> Result<Functions, Error> {
                // SAFETY: the types are those of the public interface.
                unsafe {
                    Ok(Functions {
                        $($name: *library.get::<$type>($symbol).map_err(|_| missing(path, $symbol))?,)*
                        $($extra: library.get::<$extra_type>($extra_symbol).ok().map(|found| *found),)*
                    })
                }
            }
        }
    };
}

fn missing(path: &str, symbol: &str) -> Error {
    Error::unsupported(format!(
        "{path} has no function {symbol}: NNAPI of feature level {LEVEL_DEVICES} (Android 10) or newer is needed"
    ))
}

functions! {
    must {
        device_count = "ANeuralNetworks_getDeviceCount": unsafe extern "C" fn(*mut u32) -> i32;
        device = "ANeuralNetworks_getDevice": unsafe extern "C" fn(u32, *mut Opaque) -> i32;
        device_name = "ANeuralNetworksDevice_getName": unsafe extern "C" fn(Opaque, *mut *const c_char) -> i32;
        device_version = "ANeuralNetworksDevice_getVersion": unsafe extern "C" fn(Opaque, *mut *const c_char) -> i32;
        device_type = "ANeuralNetworksDevice_getType": unsafe extern "C" fn(Opaque, *mut i32) -> i32;
        device_level = "ANeuralNetworksDevice_getFeatureLevel": unsafe extern "C" fn(Opaque, *mut i64) -> i32;
        model_create = "ANeuralNetworksModel_create": unsafe extern "C" fn(*mut Opaque) -> i32;
        model_free = "ANeuralNetworksModel_free": unsafe extern "C" fn(Opaque);
        add_operand = "ANeuralNetworksModel_addOperand": unsafe extern "C" fn(Opaque, *const OperandType) -> i32;
        set_value = "ANeuralNetworksModel_setOperandValue":
            unsafe extern "C" fn(Opaque, i32, *const c_void, usize) -> i32;
        set_value_from_memory = "ANeuralNetworksModel_setOperandValueFromMemory":
            unsafe extern "C" fn(Opaque, i32, Opaque, usize, usize) -> i32;
        set_channel_scales = "ANeuralNetworksModel_setOperandSymmPerChannelQuantParams":
            unsafe extern "C" fn(Opaque, i32, *const ChannelScales) -> i32;
        add_operation = "ANeuralNetworksModel_addOperation":
            unsafe extern "C" fn(Opaque, i32, u32, *const u32, u32, *const u32) -> i32;
        set_inputs_and_outputs = "ANeuralNetworksModel_identifyInputsAndOutputs":
            unsafe extern "C" fn(Opaque, u32, *const u32, u32, *const u32) -> i32;
        set_relaxed = "ANeuralNetworksModel_relaxComputationFloat32toFloat16":
            unsafe extern "C" fn(Opaque, bool) -> i32;
        model_finish = "ANeuralNetworksModel_finish": unsafe extern "C" fn(Opaque) -> i32;
        supported = "ANeuralNetworksModel_getSupportedOperationsForDevices":
            unsafe extern "C" fn(Opaque, *const Opaque, u32, *mut u8) -> i32;
        compilation_create = "ANeuralNetworksCompilation_createForDevices":
            unsafe extern "C" fn(Opaque, *const Opaque, u32, *mut Opaque) -> i32;
        compilation_free = "ANeuralNetworksCompilation_free": unsafe extern "C" fn(Opaque);
        set_preference = "ANeuralNetworksCompilation_setPreference": unsafe extern "C" fn(Opaque, i32) -> i32;
        set_caching = "ANeuralNetworksCompilation_setCaching":
            unsafe extern "C" fn(Opaque, *const c_char, *const u8) -> i32;
        compilation_finish = "ANeuralNetworksCompilation_finish": unsafe extern "C" fn(Opaque) -> i32;
        burst_create = "ANeuralNetworksBurst_create": unsafe extern "C" fn(Opaque, *mut Opaque) -> i32;
        burst_free = "ANeuralNetworksBurst_free": unsafe extern "C" fn(Opaque);
        execution_create = "ANeuralNetworksExecution_create": unsafe extern "C" fn(Opaque, *mut Opaque) -> i32;
        execution_free = "ANeuralNetworksExecution_free": unsafe extern "C" fn(Opaque);
        set_input = "ANeuralNetworksExecution_setInputFromMemory":
            unsafe extern "C" fn(Opaque, i32, *const OperandType, Opaque, usize, usize) -> i32;
        set_output = "ANeuralNetworksExecution_setOutputFromMemory":
            unsafe extern "C" fn(Opaque, i32, *const OperandType, Opaque, usize, usize) -> i32;
        burst_compute = "ANeuralNetworksExecution_burstCompute": unsafe extern "C" fn(Opaque, Opaque) -> i32;
        memory_from_fd = "ANeuralNetworksMemory_createFromFd":
            unsafe extern "C" fn(usize, i32, i32, usize, *mut Opaque) -> i32;
        memory_free = "ANeuralNetworksMemory_free": unsafe extern "C" fn(Opaque);
    }
    may {
        device_wait = "ANeuralNetworksDevice_wait": unsafe extern "C" fn(Opaque) -> i32;
        set_timeout = "ANeuralNetworksExecution_setTimeout": unsafe extern "C" fn(Opaque, u64) -> i32;
        set_reusable = "ANeuralNetworksExecution_setReusable": unsafe extern "C" fn(Opaque, bool) -> i32;
        runtime_level = "ANeuralNetworks_getRuntimeFeatureLevel": unsafe extern "C" fn() -> i64;
        memory_from_buffer = "ANeuralNetworksMemory_createFromAHardwareBuffer":
            unsafe extern "C" fn(*const c_void, *mut Opaque) -> i32;
    }
}

/// `ASharedMemory_create`: memory with a file descriptor, as Android wants it made.
pub(crate) type CreateSharedMemory = unsafe extern "C" fn(*const c_char, usize) -> i32;

/// A loaded NNAPI.
pub(crate) struct Runtime {
    pub functions: Functions,
    /// Its feature level: 29 and 30 for Android 10 and 11, what it says itself after that.
    pub level: i64,
    /// Missing off Android; an ordinary file without a name does as well there.
    pub shared_memory: Option<CreateSharedMemory>,
}

impl Runtime {
    /// Loads the library.
    pub fn load(path: &str) -> Result<Arc<Runtime>, Error> {
        let library = open(path).map_err(|error| {
            Error::unsupported(format!(
                "there is no NNAPI, which is a part of Android 10 and newer: name its library with library=PATH ({error})"
            ))
        })?;
        let functions = Functions::find(&library, path)?;
        // Threads of the runtime may outlive everything that we know of.
        std::mem::forget(library);
        let level = match (functions.runtime_level, functions.set_timeout) {
            // SAFETY: the function takes nothing.
            (Some(level), _) => unsafe { level() },
            (None, Some(_)) => LEVEL_SIGNED,
            (None, None) => LEVEL_DEVICES,
        };
        if level < LEVEL_DEVICES {
            return Err(Error::unsupported(format!(
                "NNAPI of feature level {level} is too old: {LEVEL_DEVICES} (Android 10) or newer is needed"
            )));
        }
        let shared_memory = if cfg!(target_os = "android") { shared_memory() } else { None };
        Ok(Arc::new(Runtime { functions, level, shared_memory }))
    }
}

fn open(path: &str) -> Result<Library, libloading::Error> {
    // SAFETY: the user or the system names this library to be run; what it does when it is loaded is its own affair.
    unsafe { Library::new(path) }
}

/// The function of `libandroid.so`, which is loaded in every app.
fn shared_memory() -> Option<CreateSharedMemory> {
    let library = open("libandroid.so").ok()?;
    // SAFETY: the type is that of the public interface.
    let create = unsafe { *library.get::<CreateSharedMemory>("ASharedMemory_create").ok()? };
    std::mem::forget(library);
    Some(create)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_that_is_not_there_or_another_one_is_said_in_a_sentence() {
        let text = Runtime::load("/no/such/library.so").err().unwrap().text;
        assert!(text.contains("library=PATH") && text.contains("Android"), "{text}");
        let text = Runtime::load("libc.so.6").err().map(|error| error.text).unwrap_or_default();
        assert!(text.contains("no function ANeuralNetworks_getDeviceCount") && text.contains("29"), "{text}");
    }
}
