//! From a path to a table: loads the library, asks for its table, and checks that before anything is called.
//!
//! A library is never unloaded: drivers keep threads and destructors in it.

use std::collections::VecDeque;
use std::error::Error;
use std::ffi::{c_char, c_void};
use std::path::{Path, PathBuf};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

use neuropil_plugin_abi::{
    self as abi, AbiStruct, NpHost, NpOption, NpOptions, NpPlugin, NpPluginQueryFn, QUERY_SYMBOL,
};

use super::{Failure, Found, UnitInfo, call, found, not_offered, text};
use crate::PluginError;
use crate::find::check_library;

/// Messages of a plugin that are kept.
const MOST_MESSAGES: usize = 64;

/// A loaded plugin.
pub(crate) struct Library {
    pub path: PathBuf,
    pub name: String,
    pub version: String,
    pub abi: (u32, u32),
    pub(super) table: NpPlugin,
    messages: &'static Messages,
    /// Whether a call of `probe` or `open` is under way: there is one at a time.
    opening: Mutex<bool>,
    opened: Condvar,
}

// SAFETY: the table is a copy of functions and of texts that live until the process ends, and nothing changes it.
unsafe impl Send for Library {}
// SAFETY: as above.
unsafe impl Sync for Library {}

#[derive(Default)]
struct Messages(Mutex<VecDeque<String>>);

unsafe extern "C" fn log(context: *mut c_void, level: u32, message: *const c_char, bytes: u64) {
    // SAFETY: the context is the list of the plugin, which lives for ever, and the plugin vouches for the text.
    let (messages, text) = unsafe { (&*context.cast::<Messages>(), text(message, bytes)) };
    let level = match level {
        abi::NP_LOG_ERROR => "error",
        abi::NP_LOG_WARNING => "warning",
        abi::NP_LOG_INFO => "info",
        _ => "debug",
    };
    messages.push(format!("{level}: {text}"));
}

impl Messages {
    fn push(&self, message: String) {
        let mut messages = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if messages.len() == MOST_MESSAGES {
            messages.pop_front();
        }
        messages.push_back(message);
    }
}

impl Library {
    /// Loads the library and checks what it is.
    pub fn load(path: &Path) -> Result<Library, PluginError> {
        // A bare name would be looked for in the system's folders.
        let path = path.canonicalize().map_err(|source| PluginError::Read { path: path.into(), source })?;
        check_library(&path)?;
        let fail = |error: libloading::Error| {
            // What the system says stands behind what failed.
            let reason = error.source().map_or_else(|| error.to_string(), ToString::to_string);
            PluginError::Load { path: path.clone(), reason }
        };
        // SAFETY: the user named the library, whose initialisers run here and are trusted as all of its code is.
        let library = unsafe { libloading::Library::new(&path) }.map_err(fail)?;
        // SAFETY: the symbol's type is fixed by the header.
        let query = unsafe { library.get::<NpPluginQueryFn>(QUERY_SYMBOL.as_bytes()) }.map(|symbol| *symbol);
        std::mem::forget(library);
        let query = query.map_err(|_| PluginError::NoSymbol { path: path.clone(), symbol: QUERY_SYMBOL })?;
        let messages: &'static Messages = Box::leak(Box::default());
        let host: &'static NpHost = Box::leak(Box::new(NpHost {
            abi_major: abi::NEUROPIL_PLUGIN_ABI_MAJOR,
            abi_minor: abi::NEUROPIL_PLUGIN_ABI_MINOR,
            context: (&raw const *messages).cast_mut().cast(),
            log: Some(log),
            ..NpHost::new()
        }));
        // SAFETY: the host's table lives for ever, and so does the plugin's.
        let (table, bytes) = unsafe {
            let table = query(host);
            (NpPlugin::read(table), (!table.is_null()).then(|| table.cast::<u32>().read_unaligned()))
        };
        let Some(table) = table else {
            let (major, minor) = (host.abi_major, host.abi_minor);
            return Err(match bytes {
                None => PluginError::Refused { path, major, minor },
                Some(bytes) => short(path, bytes as usize),
            });
        };
        check(&path, &table, bytes.unwrap_or(0) as usize)?;
        // SAFETY: the texts live until the process ends.
        let (name, version) =
            unsafe { (text(table.name, table.name_bytes), text(table.version, table.version_bytes)) };
        let abi = (table.abi_major, table.abi_minor);
        let (opening, opened) = (Mutex::new(false), Condvar::new());
        Ok(Library { path, name, version, abi, table, messages, opening, opened })
    }

    /// The last messages of the plugin and about it, the oldest first.
    pub fn messages(&self) -> Vec<String> {
        let messages = self.messages.0.lock().unwrap_or_else(PoisonError::into_inner);
        messages.iter().cloned().collect()
    }

    /// A message of the host's own about the plugin.
    pub fn warn(&self, text: &str) {
        self.messages.push(format!("warning: {text}"));
    }

    /// Waits until no call of `probe` or `open` is under way; false when that takes longer than `most`.
    pub fn begin_opening(&self, most: Duration) -> bool {
        let busy = self.opening.lock().unwrap_or_else(PoisonError::into_inner);
        let free = self.opened.wait_timeout_while(busy, most, |busy| *busy);
        let (mut busy, waited) = free.unwrap_or_else(PoisonError::into_inner);
        if waited.timed_out() && *busy {
            return false;
        }
        *busy = true;
        true
    }

    /// The call is over.
    pub fn end_opening(&self) {
        *self.opening.lock().unwrap_or_else(PoisonError::into_inner) = false;
        self.opened.notify_one();
    }

    /// The units that are there.
    pub fn probe(&self, options: &[(String, String)]) -> Result<Vec<UnitInfo>, Failure> {
        let function = self.table.probe.ok_or_else(|| not_offered("probe"))?;
        let units = Found::default();
        let context = (&raw const units).cast_mut().cast();
        with_options(options, |options| {
            // SAFETY: the options and the list live until the call returns.
            call(|status| unsafe { function(options, context, Some(found), status) })
        })?;
        Ok(units.into_inner().unwrap_or_else(PoisonError::into_inner))
    }
}

/// Calls `with` with the options as the border has them.
pub(super) fn with_options<T>(options: &[(String, String)], with: impl FnOnce(*const NpOptions) -> T) -> T {
    let items: Vec<NpOption> = options
        .iter()
        .map(|(key, value)| NpOption {
            key: key.as_ptr().cast(),
            key_bytes: key.len() as u64,
            value: value.as_ptr().cast(),
            value_bytes: value.len() as u64,
            ..NpOption::new()
        })
        .collect();
    let items: Vec<*const NpOption> = items.iter().map(|item| &raw const *item).collect();
    let count = items.len() as u64;
    with(&NpOptions { items: items.as_ptr(), count, ..NpOptions::new() })
}

fn short(path: PathBuf, found: usize) -> PluginError {
    PluginError::Short { path, found, needed: abi::LEAST_PLUGIN_BYTES }
}

/// Checks version, size and required functions of a table of `bytes` bytes.
fn check(path: &Path, table: &NpPlugin, bytes: usize) -> Result<(), PluginError> {
    let needed = abi::NEUROPIL_PLUGIN_ABI_MAJOR;
    if bytes < std::mem::offset_of!(NpPlugin, reserved) {
        return Err(short(path.into(), bytes));
    }
    if table.abi_major != needed {
        let (major, minor) = (table.abi_major, table.abi_minor);
        return Err(PluginError::Version { path: path.into(), major, minor, needed });
    }
    if bytes < abi::LEAST_PLUGIN_BYTES {
        return Err(short(path.into(), bytes));
    }
    let required = [
        ("probe", table.probe.is_some()),
        ("open", table.open.is_some()),
        ("close", table.close.is_some()),
        ("info", table.info.is_some()),
        ("query", table.query.is_some()),
        ("prepare", table.prepare.is_some()),
        ("free_weight", table.free_weight.is_some()),
        ("matmul", table.matmul.is_some()),
    ];
    match required.iter().find(|(_, offered)| !offered) {
        Some((function, _)) => Err(PluginError::NoFunction { path: path.into(), function }),
        None => Ok(()),
    }
}
