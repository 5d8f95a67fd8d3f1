//! Where C meets the traits. All unsafe code of the SDK is in this folder.
//!
//! - `entry`: the functions of the table; each catches panics and fills `np_status`;
//! - `read`: structs and pointers of the host become slices and strings, after checks;
//! - `state`: open devices and their weights, kept under numbers, so that a handle that the host made up, gave back
//!   already, or got from another device is an error and no more;
//! - `work`: jobs;
//! - `queue`: the thread of a device that takes jobs by submission.
//!
//! The invariant: a pointer of the host is used only within the call that brought it, or, for a submitted job, until
//! its completion is told; and only for as many bytes as the host said. What the host says of itself is believed: that
//! its pointers point to something, and that a struct is as large as its size.

mod entry;
mod queue;
mod read;
mod state;
#[cfg(test)]
mod tests;
mod work;

use std::fmt;
use std::sync::{Mutex, OnceLock};

use neuropil_plugin_abi::{self as abi, AbiStruct, NpHost, NpPlugin};

use crate::{Error, PluginBackend};
use state::Devices;

/// How much a message matters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Level {
    /// Something failed.
    Error = abi::NP_LOG_ERROR,
    /// Something works, but not as it should.
    Warning = abi::NP_LOG_WARNING,
    /// Good to know.
    Info = abi::NP_LOG_INFO,
    /// For the author of the plugin.
    Debug = abi::NP_LOG_DEBUG,
}

/// The host's log.
#[derive(Clone)]
pub struct Log {
    host: Option<NpHost>,
}

// SAFETY: the header says that the host's functions may be called from any thread, with the host's context.
unsafe impl Send for Log {}
// SAFETY: as above.
unsafe impl Sync for Log {}

impl Log {
    /// A log that forgets everything.
    pub fn silent() -> Log {
        Log { host: None }
    }

    /// Tells the host something.
    pub fn write(&self, level: Level, text: &str) {
        if let Some((host, log)) = self.host.and_then(|host| Some((host, host.log?))) {
            // SAFETY: the host's function, context and a text that lives until it returns.
            unsafe { log(host.context, level as u32, text.as_ptr().cast(), text.len() as u64) };
        }
    }
}

impl fmt::Debug for Log {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Log")
    }
}

/// A backend that a library exports: it has one place in the process.
pub trait Exported: PluginBackend {
    /// That place.
    fn export() -> &'static Export<Self>;
}

/// Everything that a plugin keeps.
pub struct Export<P: PluginBackend> {
    table: NpPlugin,
    host: OnceLock<Log>,
    backend: Mutex<Option<&'static P>>,
    devices: Devices<P::Device>,
}

// SAFETY: the table is never changed, and its pointers point to constants. The rest is `Sync` by itself: a backend and
// its devices are, by their traits.
unsafe impl<P: PluginBackend> Sync for Export<P> {}

impl<P: Exported> Export<P> {
    /// The plugin, before anybody asked for it.
    #[expect(clippy::new_without_default, reason = "it is made once, as a constant")]
    pub const fn new() -> Export<P> {
        Export {
            table: entry::table::<P>(),
            host: OnceLock::new(),
            backend: Mutex::new(None),
            devices: Devices::new(),
        }
    }

    /// The table, if the host speaks this version.
    ///
    /// # Safety
    /// `host` is NULL or a table of a host.
    pub unsafe fn query(&'static self, host: *const NpHost) -> *const NpPlugin {
        // SAFETY: the caller vouches for the pointer.
        let Some(host) = (unsafe { NpHost::read(host) }) else { return std::ptr::null() };
        if host.abi_major != abi::NEUROPIL_PLUGIN_ABI_MAJOR {
            return std::ptr::null();
        }
        self.host.get_or_init(|| Log { host: Some(host) });
        &self.table
    }

    /// The backend; made when it is first asked for.
    fn backend(&self) -> Result<&'static P, Error> {
        let mut backend = self
            .backend
            .lock()
            .map_err(|_| Error::internal("the plugin panicked when it was started, and stays unusable"))?;
        if let Some(backend) = *backend {
            return Ok(backend);
        }
        let log = self.host.get().cloned().unwrap_or_else(Log::silent);
        // The library is never unloaded, and so is its one backend.
        Ok(*backend.insert(Box::leak(Box::new(P::new(log)))))
    }
}

/// Makes a plugin of a crate: exports `neuropil_plugin_query` for a type that implements [`crate::PluginBackend`].
///
/// A library is one plugin, so this stands once in a crate. A program that links several plugins as crates, and not as
/// libraries, gets the symbol twice: load them instead.
#[macro_export]
macro_rules! export_plugin {
    ($backend:ty) => {
        #[cfg(not(panic = "unwind"))]
        compile_error!(
            "a plugin needs panic = \"unwind\": a panic must become an error, not the end of the host"
        );

        #[allow(unsafe_code, reason = "the symbol is C's")]
        const _: () = {
            static EXPORT: $crate::export::Export<$backend> = $crate::export::Export::new();

            impl $crate::export::Exported for $backend {
                fn export() -> &'static $crate::export::Export<$backend> {
                    &EXPORT
                }
            }

            /// # Safety
            /// `host` is NULL or a table of a host.
            #[unsafe(no_mangle)]
            pub unsafe extern "C" fn neuropil_plugin_query(
                host: *const $crate::export::NpHost,
            ) -> *const $crate::export::NpPlugin {
                // SAFETY: the caller vouches for the table.
                unsafe { EXPORT.query(host) }
            }
        };
    };
}
