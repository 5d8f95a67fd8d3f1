//! The stand-in of NNAPI beside the plugin: who controls it, and whose turn it is.

use std::ffi::{CString, c_char};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use neuropil_plugin_conformance::raw::{Device, Failure, Plugin};

type Control = unsafe extern "C" fn(*const c_char, *const c_char) -> i32;
type Query = unsafe extern "C" fn(*const c_char) -> i64;

/// The stand-in has one state per process, so tests take turns.
static TURN: Mutex<()> = Mutex::new(());

/// A loaded stand-in, as it was made, for one test.
pub struct Shim {
    pub path: PathBuf,
    control: Control,
    query: Query,
    _turn: MutexGuard<'static, ()>,
}

/// The file that cargo has built beside the tests.
pub fn library() -> PathBuf {
    let file = format!("{}neuropil_nnapi_shim{}", std::env::consts::DLL_PREFIX, std::env::consts::DLL_SUFFIX);
    std::env::current_exe().unwrap().with_file_name(file)
}

/// The plugin, which cargo has built there too.
pub fn plugin_path() -> PathBuf {
    let file = format!("{}neuropil_nnapi{}", std::env::consts::DLL_PREFIX, std::env::consts::DLL_SUFFIX);
    std::env::current_exe().unwrap().with_file_name(file)
}

pub fn plugin() -> Plugin {
    Plugin::of_crate("neuropil_nnapi")
}

impl Shim {
    pub fn new() -> Shim {
        Shim::at(&library())
    }

    /// Another file with the same functions.
    pub fn at(path: &Path) -> Shim {
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: the library is ours, and its functions have these types. It stays loaded.
        let (control, query) = unsafe {
            let library = libloading::Library::new(path).unwrap();
            let control: Control = *library.get("neuropil_nnapi_shim_control").unwrap();
            let query: Query = *library.get("neuropil_nnapi_shim_query").unwrap();
            std::mem::forget(library);
            (control, query)
        };
        let shim = Shim { path: path.to_path_buf(), control, query, _turn: turn };
        shim.set("reset", "");
        shim
    }

    pub fn set(&self, key: &str, value: &str) {
        let (c_key, c_value) = (CString::new(key).unwrap(), CString::new(value).unwrap());
        // SAFETY: the texts end.
        let result = unsafe { (self.control)(c_key.as_ptr(), c_value.as_ptr()) };
        assert_eq!(result, 0, "{key} {value}");
    }

    pub fn get(&self, key: &str) -> i64 {
        let key = CString::new(key).unwrap();
        // SAFETY: the text ends.
        unsafe { (self.query)(key.as_ptr()) }
    }

    /// Opens the unit with options.
    pub fn open(&self, options: &[(&str, &str)]) -> Result<Device, Failure> {
        let path = self.path.to_str().unwrap();
        plugin().open(0, &[&[("library", path)], options].concat())
    }

    /// Nothing is left, and nothing was done that NNAPI does not allow.
    pub fn is_clean(&self) {
        let kinds =
            ["stale_handle", "double_free", "order", "in_use", "execution_concurrent", "burst_concurrent"];
        let more = ["constant_changed", "client_memory", "overlap", "token_collision", "too_new"];
        for kind in kinds.iter().chain(&more) {
            assert_eq!(self.get(&format!("violations.{kind}")), 0, "{kind}");
        }
        assert_eq!((self.get("violations"), self.get("live")), (0, 0), "violations and what is left");
    }
}
