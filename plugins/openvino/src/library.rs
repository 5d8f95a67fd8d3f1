//! The functions of OpenVINO's C library that the plugin calls, found when it runs.
//!
//! The plugin links to nothing of OpenVINO, so it loads where there is none and says so. The table has the functions'
//! types as the C headers of OpenVINO declare them; they have stayed the same since 2023. What did not stay are the
//! numbers of element types, which changed with 2025.1: older runtimes are refused.

use std::ffi::{c_char, c_void};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use libloading::Library;
use neuropil_plugin_sdk::Error;

/// Numbers of `ov_element_type_e` since 2025.1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum ElementType {
    F32 = 4,
    U8 = 16,
}

/// `ov_shape_t`: passed by value.
#[repr(C)]
pub(crate) struct Shape {
    pub rank: i64,
    pub dims: *mut i64,
}

/// `ov_version_t`.
#[repr(C)]
pub(crate) struct Version {
    build: *const c_char,
    description: *const c_char,
}

/// `ov_available_devices_t`.
#[repr(C)]
pub(crate) struct DeviceNames {
    pub names: *mut *mut c_char,
    pub count: usize,
}

/// A pointer to something of OpenVINO's own.
pub(crate) type Opaque = *mut c_void;

/// Declares the table, and how it is filled.
macro_rules! functions {
    ($($name:ident = $symbol:literal: $type:ty;)*) => {
        /// The functions. They stay loaded until the process ends.
        pub(crate) struct Functions {
            $(pub $name: $type,)*
        }

        impl Functions {
            fn find(library: &Library, path: &Path) -> Result<Functions, Error> {
                // SAFETY: the types are those of OpenVINO's headers.
                unsafe {
                    Ok(Functions {
                        $($name: *library.get::<$type>($symbol).map_err(|_| missing(path, $symbol))?,)*
                    })
                }
            }
        }
    };
}

fn missing(path: &Path, symbol: &str) -> Error {
    Error::unsupported(format!(
        "{} has no function {symbol}: OpenVINO 2025.1 or newer is needed",
        path.display()
    ))
}

functions! {
    get_version = "ov_get_openvino_version": unsafe extern "C" fn(*mut Version) -> i32;
    version_free = "ov_version_free": unsafe extern "C" fn(*mut Version);
    free = "ov_free": unsafe extern "C" fn(*const c_char);
    last_error = "ov_get_last_err_msg": unsafe extern "C" fn() -> *const c_char;
    core_create = "ov_core_create": unsafe extern "C" fn(*mut Opaque) -> i32;
    core_free = "ov_core_free": unsafe extern "C" fn(Opaque);
    get_devices = "ov_core_get_available_devices": unsafe extern "C" fn(Opaque, *mut DeviceNames) -> i32;
    devices_free = "ov_available_devices_free": unsafe extern "C" fn(*mut DeviceNames);
    get_property = "ov_core_get_property":
        unsafe extern "C" fn(Opaque, *const c_char, *const c_char, *mut *mut c_char) -> i32;
    set_property = "ov_core_set_property": unsafe extern "C" fn(Opaque, *const c_char, ...) -> i32;
    read_model = "ov_core_read_model_from_memory_buffer":
        unsafe extern "C" fn(Opaque, *const c_char, usize, Opaque, *mut Opaque) -> i32;
    model_free = "ov_model_free": unsafe extern "C" fn(Opaque);
    compile = "ov_core_compile_model":
        unsafe extern "C" fn(Opaque, Opaque, *const c_char, usize, *mut Opaque, ...) -> i32;
    import = "ov_core_import_model":
        unsafe extern "C" fn(Opaque, *const c_char, usize, *const c_char, *mut Opaque) -> i32;
    export = "ov_compiled_model_export_model": unsafe extern "C" fn(Opaque, *const c_char) -> i32;
    compiled_free = "ov_compiled_model_free": unsafe extern "C" fn(Opaque);
    create_request = "ov_compiled_model_create_infer_request": unsafe extern "C" fn(Opaque, *mut Opaque) -> i32;
    request_free = "ov_infer_request_free": unsafe extern "C" fn(Opaque);
    set_input = "ov_infer_request_set_input_tensor_by_index": unsafe extern "C" fn(Opaque, usize, Opaque) -> i32;
    set_output = "ov_infer_request_set_output_tensor_by_index": unsafe extern "C" fn(Opaque, usize, Opaque) -> i32;
    infer = "ov_infer_request_infer": unsafe extern "C" fn(Opaque) -> i32;
    start = "ov_infer_request_start_async": unsafe extern "C" fn(Opaque) -> i32;
    wait = "ov_infer_request_wait": unsafe extern "C" fn(Opaque) -> i32;
    wait_for = "ov_infer_request_wait_for": unsafe extern "C" fn(Opaque, i64) -> i32;
    cancel = "ov_infer_request_cancel": unsafe extern "C" fn(Opaque) -> i32;
    tensor_of = "ov_tensor_create_from_host_ptr":
        unsafe extern "C" fn(u32, Shape, *mut c_void, *mut Opaque) -> i32;
    tensor_free = "ov_tensor_free": unsafe extern "C" fn(Opaque);
}

/// A loaded runtime.
pub(crate) struct Runtime {
    pub functions: Functions,
    /// Its version, as it says itself.
    pub version: String,
}

impl Runtime {
    /// Loads the library: `given` is a file or a folder; without it the system's loader looks.
    pub fn load(given: Option<&str>) -> Result<Arc<Runtime>, Error> {
        let path = match given {
            None => PathBuf::from(plain_name()),
            Some(given) => in_folder(Path::new(given))?,
        };
        // SAFETY: the user names this library to be run; what it does when it is loaded is its own affair.
        let library = unsafe { Library::new(&path) }.map_err(|error| {
            let what =
                "there is no OpenVINO runtime: name its library, or the folder of it, with library=PATH";
            Error::unsupported(format!("{what} ({error})"))
        })?;
        let functions = Functions::find(&library, &path)?;
        // Threads of the runtime may outlive everything that we know of.
        std::mem::forget(library);
        let version = version(&functions)?;
        check_version(&version)?;
        Ok(Arc::new(Runtime { functions, version }))
    }
}

fn version(functions: &Functions) -> Result<String, Error> {
    let mut version = Version { build: std::ptr::null(), description: std::ptr::null() };
    // SAFETY: the function fills the struct with texts that live until it is freed.
    unsafe {
        if (functions.get_version)(&mut version) != 0 || version.build.is_null() {
            return Err(Error::unsupported("the OpenVINO runtime does not tell its version"));
        }
        let text = std::ffi::CStr::from_ptr(version.build).to_string_lossy().into_owned();
        (functions.version_free)(&mut version);
        Ok(text)
    }
}

/// Refuses runtimes whose element types have other numbers.
fn check_version(version: &str) -> Result<(), Error> {
    let mut numbers = version.split(|c: char| !c.is_ascii_digit()).map(str::parse::<u32>);
    match (numbers.next(), numbers.next()) {
        (Some(Ok(year)), Some(Ok(release))) if (year, release) >= (2025, 1) => Ok(()),
        _ => Err(Error::unsupported(format!("OpenVINO {version} is too old: 2025.1 or newer is needed"))),
    }
}

fn plain_name() -> String {
    let prefix = if cfg!(windows) { "" } else { "lib" };
    format!("{prefix}openvino_c{}", std::env::consts::DLL_SUFFIX)
}

/// The library that is meant by a file or a folder. The packages of OpenVINO have it under a name with a version only.
fn in_folder(path: &Path) -> Result<PathBuf, Error> {
    if !path.is_dir() {
        return Ok(path.to_path_buf());
    }
    let plain = path.join(plain_name());
    if plain.exists() {
        return Ok(plain);
    }
    let refuse = |why: String| Error::unsupported(format!("library={}: {why}", path.display()));
    let entries = std::fs::read_dir(path).map_err(|error| refuse(error.to_string()))?;
    let names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    let begin = plain_name() + ".";
    let number = |name: &String| name.strip_prefix(&begin).and_then(|rest| rest.parse::<u64>().ok());
    let newest = names.filter(|name| number(name).is_some()).max_by_key(number);
    newest.map(|name| path.join(name)).ok_or_else(|| refuse(format!("the folder has no {}", plain_name())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runtimes_with_other_element_types_are_refused() {
        for good in ["2025.1.0-18503-abc", "2026.4.1-22982-e213a147257-releases/2026/4", "2025.1"] {
            assert_eq!(check_version(good), Ok(()), "{good}");
        }
        for old in ["2025.0.0-17942", "2024.6.0", "2023.3", "", "custom_build", "2025"] {
            let text = check_version(old).unwrap_err().text;
            assert!(text.contains("2025.1 or newer"), "{text}");
        }
    }

    #[test]
    fn the_newest_library_of_a_folder_is_taken_and_a_plain_name_before_it() {
        let folder = std::env::temp_dir().join(format!("neuropil-openvino-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let text = in_folder(&folder).unwrap_err().text;
        assert!(text.contains("the folder has no"), "{text}");
        let name = plain_name();
        for suffix in [".2541", ".2641", ".old", ".999"] {
            std::fs::write(folder.join(format!("{name}{suffix}")), "").unwrap();
        }
        assert_eq!(in_folder(&folder).unwrap(), folder.join(format!("{name}.2641")));
        std::fs::write(folder.join(&name), "").unwrap();
        assert_eq!(in_folder(&folder).unwrap(), folder.join(&name));
        std::fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn a_library_that_is_not_there_is_said() {
        let text = Runtime::load(Some("/no/such/library.so")).err().unwrap().text;
        assert!(text.contains("library=PATH"), "{text}");
    }
}
