//! The functions of a QNN library, found when the plugin runs.
//!
//! The library has one symbol, which gives a struct of versions and a table of functions by number. The table only grows,
//! so its first entries can be read when the version is one whose table is known; each may be NULL, which is checked
//! before any is kept.

use std::collections::BTreeMap;
use std::ffi::{CStr, c_char, c_void};
use std::path::{Path, PathBuf};
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, TryLockError};
use std::time::Duration;

use libloading::Library;
use neuropil_plugin_sdk::Error;

use crate::abi::{Code, Handle, Interface, MemoryDescriptor, OpConfig, Tensor, Version};

/// The oldest core API whose structs are known to be these, and the newest that was run.
const OLDEST_CORE: (u32, u32) = (2, 32);
const NEWEST_CORE: u32 = 40;

/// The backends that the plugin knows, with the numbers that they have in the interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Backend {
    /// The reference on the CPU: 32-bit floats.
    Cpu,
    /// The Hexagon tensor processor, or its simulator.
    Htp,
}

impl Backend {
    fn from_interface(id: u32, backend: Version) -> Result<Backend, String> {
        let (found, major) = match id {
            3 => (Backend::Cpu, 1),
            6 => (Backend::Htp, 5),
            _ => return Err(format!("it is backend {id} of QNN, not the HTP (6) or the CPU (3)")),
        };
        match backend.major == major {
            true => Ok(found),
            false => {
                let Version { major: found, minor, patch } = backend;
                Err(format!("its backend API is {found}.{minor}.{patch}, and {major} is needed"))
            }
        }
    }
}

/// Declares the functions, and how they are found in a table.
macro_rules! functions {
    (required { $($name:ident = $index:literal: $type:ty;)* } optional { $($extra:ident = $place:literal: $kind:ty;)* }) => {
        /// The functions. They stay loaded until the process ends. Backends lack some.
        pub(crate) struct Functions {
            $(pub $name: $type,)*
            $(pub $extra: Option<$kind>,)*
        }

        impl Functions {
            fn find(interface: &Interface) -> Result<Functions, String> {
                let table = &interface.table;
                let lacks = |index: usize, name: &str| {
                    table[index].is_null().then(|| format!("it has no function {index} ({name})"))
                };
                $(if let Some(text) = lacks($index, stringify!($name)) {
                    return Err(text);
                })*
                // SAFETY: the entries of these numbers have these types in every version that is let through. Those that
                // are needed are not NULL, and NULL is `None` of the others.
                unsafe {
                    Ok(Functions {
                        $($name: std::mem::transmute::<*const c_void, $type>(table[$index]),)*
                        $($extra: std::mem::transmute::<*const c_void, Option<$kind>>(table[$place]),)*
                    })
                }
            }
        }
    };
}

functions! {
    required {
        backend_create = 1: unsafe extern "C" fn(Handle, *const *const c_void, *mut Handle) -> Code;
        build_id = 4: unsafe extern "C" fn(*mut *const c_char) -> Code;
        validate = 7: unsafe extern "C" fn(Handle, OpConfig) -> Code;
        backend_free = 8: unsafe extern "C" fn(Handle) -> Code;
        context_create = 9: unsafe extern "C" fn(Handle, Handle, *const *const c_void, *mut Handle) -> Code;
        binary_size = 11: unsafe extern "C" fn(Handle, *mut u64) -> Code;
        binary = 12: unsafe extern "C" fn(Handle, *mut c_void, u64, *mut u64) -> Code;
        context_from_binary = 13:
            unsafe extern "C" fn(Handle, Handle, *const *const c_void, *const c_void, u64, *mut Handle, Handle) -> Code;
        context_free = 14: unsafe extern "C" fn(Handle, Handle) -> Code;
        graph_create = 15: unsafe extern "C" fn(Handle, *const c_char, *const *const c_void, *mut Handle) -> Code;
        add_node = 18: unsafe extern "C" fn(Handle, OpConfig) -> Code;
        finalize = 19: unsafe extern "C" fn(Handle, Handle, Handle) -> Code;
        retrieve = 20: unsafe extern "C" fn(Handle, *const c_char, *mut Handle) -> Code;
        execute = 21:
            unsafe extern "C" fn(Handle, *const Tensor, u32, *mut Tensor, u32, Handle, Handle) -> Code;
        create_tensor = 24: unsafe extern "C" fn(Handle, *mut Tensor) -> Code;
    }
    optional {
        log_create = 25: unsafe extern "C" fn(*const c_void, u32, *mut Handle) -> Code;
        log_free = 27: unsafe extern "C" fn(Handle) -> Code;
        register = 35: unsafe extern "C" fn(Handle, *const MemoryDescriptor, u32, *mut Handle) -> Code;
        deregister = 36: unsafe extern "C" fn(*const Handle, u32) -> Code;
        infrastructure = 39: unsafe extern "C" fn(*mut *const c_void) -> Code;
        device_create = 40: unsafe extern "C" fn(Handle, *const *const c_void, *mut Handle) -> Code;
        device_free = 43: unsafe extern "C" fn(Handle) -> Code;
        error_message = 48: unsafe extern "C" fn(Code, *mut *const c_char) -> Code;
    }
}

/// A library that was loaded and understood.
pub(crate) struct Vendor {
    functions: Functions,
    pub backend: Backend,
    /// What the library calls itself.
    pub provider: String,
    /// Its core API and that of the backend.
    pub versions: [Version; 2],
    /// Its build.
    pub build: String,
    shared: Arc<Shared>,
}

/// What all units of a library share. The library has state of its own behind its handles:
///
/// - The simulator hangs or fails when one thread makes or frees something while another runs a graph, even one of
///   another backend handle. So calls go one at a time.
/// - The chip that a device was made for, even one that it could not be made for, counts for all devices from then on,
///   until another is named. So a process has one chip.
/// - When the process ends the library takes itself apart, and crashes whoever is in it then or comes later. So the turn
///   is taken before that, for good.
#[derive(Default)]
struct Shared {
    /// Held by who calls. It counts the calls.
    turn: Mutex<u64>,
    /// The process ends.
    ended: AtomicBool,
    /// The chip of the first session; `None` of it when none was named.
    chip: OnceLock<Option<u32>>,
}

#[cfg(unix)]
unsafe extern "C" {
    /// `atexit` with an argument. It is what the ABI of C++ has for destructors, so every Unix has it.
    fn __cxa_atexit(run: unsafe extern "C" fn(*mut c_void), argument: *mut c_void, dso: *mut c_void) -> i32;
}

#[cfg(unix)]
unsafe extern "C" fn at_exit(shared: *mut c_void) {
    // SAFETY: it is what `Shared::guard_exit` gave away for good.
    let shared = unsafe { &*shared.cast::<Shared>() };
    if shared.ended.swap(true, Ordering::AcqRel) {
        return;
    }
    // A call that does not return must not keep the process.
    for _ in 0..200 {
        match shared.turn.try_lock() {
            Err(TryLockError::WouldBlock) => std::thread::sleep(Duration::from_millis(10)),
            taken => return std::mem::forget(taken),
        }
    }
}

impl Shared {
    /// Lets the end of the process wait for the turn. What is registered last runs first, and the library registers its
    /// own whenever it makes something for the first time: hence this is done again and again, ever more rarely.
    fn guard_exit(self: &Arc<Shared>, calls: u64) {
        #[cfg(unix)]
        if calls <= 1024 || calls.is_power_of_two() {
            let shared = Arc::into_raw(self.clone()).cast_mut().cast();
            // SAFETY: the function and its argument stay as long as the process. If it is refused, nothing is guarded.
            unsafe { __cxa_atexit(at_exit, shared, ptr::null_mut()) };
        }
    }
}

/// The libraries that were loaded, by the address of their interface.
#[derive(Clone, Default)]
pub(crate) struct Loaded {
    known: Arc<Mutex<BTreeMap<usize, Arc<Shared>>>>,
}

impl Loaded {
    fn shared(&self, interface: usize) -> Arc<Shared> {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        known.entry(interface).or_default().clone()
    }
}

impl Vendor {
    /// Loads a library: `given` is a file or a folder; without it the system's loader looks.
    pub fn load(given: Option<&str>, loaded: &Loaded) -> Result<Arc<Vendor>, Error> {
        let path = match given.map(Path::new) {
            None => PathBuf::from(plain_name()),
            Some(path) if path.is_dir() => path.join(plain_name()),
            Some(path) => path.to_path_buf(),
        };
        // SAFETY: the user names this library to be run; what it does when it is loaded is its own affair.
        let library = unsafe { Library::new(&path) }.map_err(|error| {
            let what = "there is no QNN library: name libQnnHtp.so or libQnnCpu.so, or its folder, with library=PATH";
            Error::unsupported(format!("{what} ({error})"))
        })?;
        let refuse = |why: String| Error::unsupported(format!("{} cannot be used: {why}", path.display()));
        let vendor = Vendor::read(&library, loaded).map_err(refuse)?;
        // Its threads may outlive everything that we know of, and some releases stay mapped anyway.
        std::mem::forget(library);
        Ok(Arc::new(vendor))
    }

    fn read(library: &Library, loaded: &Loaded) -> Result<Vendor, String> {
        type Providers = unsafe extern "C" fn(*mut *const *const Interface, *mut u32) -> Code;
        let (mut list, mut count) = (ptr::null(), 0);
        // SAFETY: the function writes a list of its own and its length. The structs live as long as the library.
        let interface = unsafe {
            let providers = library.get::<Providers>("QnnInterface_getProviders");
            let providers =
                providers.map_err(|_| "it has no QnnInterface_getProviders, so it is no QNN library")?;
            let code = providers(&mut list, &mut count);
            if code != 0 || list.is_null() || count == 0 || (*list).is_null() {
                return Err(format!("it offers no interface (code {code})"));
            }
            // The head of the struct is the same in all versions; the table behind it is read once the version is known.
            let head = *list;
            check_core((&raw const (*head).core).read())?;
            &*head
        };
        let backend = Backend::from_interface(interface.backend_id, interface.backend)?;
        let functions = Functions::find(interface)?;
        // SAFETY: the name is a text of the library or NULL.
        let provider = unsafe { text(interface.provider) };
        let mut build = ptr::null();
        // SAFETY: the function writes a text of the library.
        let build = unsafe {
            match (functions.build_id)(&mut build) {
                0 => text(build),
                code => return Err(format!("it does not tell its build (code {code})")),
            }
        };
        let versions = [interface.core, interface.backend];
        let shared = loaded.shared(ptr::from_ref(interface).addr());
        Ok(Vendor { functions, backend, provider, versions, build, shared })
    }

    /// Calls the library when it is its turn, which does not come any more when the process ends. `run` must not come here
    /// again.
    pub fn call<T>(&self, run: impl FnOnce(&Functions) -> T) -> T {
        while self.shared.ended.load(Ordering::Acquire) {
            std::thread::park();
        }
        // It guards nothing of ours that a panic could leave in disorder.
        let mut calls = self.shared.turn.lock().unwrap_or_else(PoisonError::into_inner);
        let result = run(&self.functions);
        *calls += 1;
        self.shared.guard_exit(*calls);
        result
    }

    /// Takes a chip for all sessions from now on.
    pub fn settle(&self, soc: Option<u32>) -> Result<(), Error> {
        let chip = *self.shared.chip.get_or_init(|| soc);
        if chip == soc {
            return Ok(());
        }
        let name = |soc: Option<u32>| soc.map_or("the chip at hand".into(), |soc| format!("SoC {soc}"));
        let (now, asked) = (name(chip), name(soc));
        let text =
            format!("option soc: this process has used QNN for {now}, so another one is needed for {asked}");
        Err(Error::unsupported(text))
    }

    /// Whether the core API is newer than any that was run.
    pub fn is_newer_than_tested(&self) -> bool {
        self.versions[0].minor > NEWEST_CORE
    }

    /// Build and versions, for people and for the keys of saved plans.
    pub fn describe(&self) -> String {
        let [core, backend] = self.versions.map(|v| format!("{}.{}.{}", v.major, v.minor, v.patch));
        format!("QNN {} (core API {core}, backend API {backend})", self.build)
    }

    /// Turns a code into an error, with the text that the library has for it.
    pub fn check(&self, code: Code, what: &str) -> Result<(), Error> {
        if code == 0 {
            return Ok(());
        }
        let mut said = ptr::null();
        let told = self.call(|functions| {
            // SAFETY: the function writes a text of the library or leaves NULL.
            functions.error_message.map(|tell| unsafe { tell(code, &mut said) })
        });
        // SAFETY: as above.
        let said = if told == Some(0) { unsafe { text(said) } } else { String::new() };
        let said = said.trim();
        let number = code & 0xffff;
        let text = match said.is_empty() {
            true => format!("QNN cannot {what}: code {number}"),
            false => format!("QNN cannot {what}: {said} (code {number})"),
        };
        let error = match number {
            // The numbers that all groups of functions have for memory: of the common group, and of contexts and graphs.
            1002 | 5003 | 6001 => Error::out_of_memory(text),
            _ => Error::internal(text),
        };
        Err(error.with_vendor_code(code as i64))
    }
}

/// Refuses core APIs whose structs are not known.
fn check_core(core: Version) -> Result<(), String> {
    let (major, minor) = OLDEST_CORE;
    match core.major == major && core.minor >= minor {
        true => Ok(()),
        false => Err(format!(
            "its core API is {}.{}.{}, and {major}.{minor} or a later {major} is needed",
            core.major, core.minor, core.patch
        )),
    }
}

/// # Safety
/// `from` is NULL or a text that ends with 0.
unsafe fn text(from: *const c_char) -> String {
    match from.is_null() {
        true => String::new(),
        // SAFETY: the caller vouches for it.
        false => unsafe { CStr::from_ptr(from) }.to_string_lossy().into_owned(),
    }
}

fn plain_name() -> String {
    let prefix = if cfg!(windows) { "" } else { "lib" };
    format!("{prefix}QnnHtp{}", std::env::consts::DLL_SUFFIX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_core_versions_are_refused() {
        let version = |major, minor| Version { major, minor, patch: 0 };
        for good in [version(2, 32), version(2, 36), version(2, 99)] {
            assert_eq!(check_core(good), Ok(()));
        }
        for bad in [version(2, 31), version(1, 40), version(3, 0)] {
            assert!(check_core(bad).unwrap_err().contains("2.32 or a later 2 is needed"));
        }
    }

    #[test]
    fn other_backends_are_refused() {
        let version = |major| Version { major, minor: 1, patch: 0 };
        assert_eq!(Backend::from_interface(6, version(5)), Ok(Backend::Htp));
        assert_eq!(Backend::from_interface(3, version(1)), Ok(Backend::Cpu));
        assert!(Backend::from_interface(4, version(3)).unwrap_err().contains("backend 4"));
        assert!(Backend::from_interface(6, version(6)).unwrap_err().contains("backend API is 6.1.0"));
    }

    #[test]
    fn a_library_that_is_not_there_or_is_none_of_qnn_is_said() {
        let text = Vendor::load(Some("/no/such/library.so"), &Loaded::default()).err().unwrap().text;
        assert!(text.contains("library=PATH"), "{text}");
        #[cfg(all(target_os = "linux", target_env = "gnu"))]
        {
            let text = Vendor::load(Some("libm.so.6"), &Loaded::default()).err().unwrap().text;
            assert!(text.contains("no QNN library"), "{text}");
        }
    }
}
