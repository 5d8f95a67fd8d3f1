//! A plugin as a host sees it: its table, called with structs of the header.
//!
//! It shares nothing with the host or the SDK but the layouts. Every call is watched: whether status and code agree,
//! whether texts are texts and lie in their room, whether an answer is one that the header knows. What the header forbids
//! is a [`Failure`] with the code [`BREACH`].

mod device;
mod guard;
mod submit;

use std::error::Error;
use std::ffi::{c_char, c_void};
use std::fmt;
use std::path::{Path, PathBuf};
use std::ptr;

use neuropil_plugin_abi::{
    self as abi, AbiStruct, NEUROPIL_PLUGIN_ABI_MAJOR, NEUROPIL_PLUGIN_ABI_MINOR, NP_INTERNAL, NP_OK,
    NpDeviceInfo, NpFoundFn, NpHost, NpOption, NpOptions, NpPlugin, NpPluginQueryFn, NpStatus, QUERY_SYMBOL,
};

pub use device::{Cluster, Device, Memory, Weight};
pub(crate) use guard::{Guarded, MARK, copied, shortened};
pub use guard::{Padded, buffer};
pub use submit::Submitted;

/// The code of a [`Failure`] when the plugin broke a rule of the header.
pub const BREACH: i32 = -1;

/// The code of a no.
pub const UNSUPPORTED: i32 = abi::NP_UNSUPPORTED;

/// A call that did not end with `NP_OK`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// One of `NP_*`, or [`BREACH`].
    pub code: i32,
    /// What the plugin says.
    pub text: String,
}

impl Failure {
    /// A rule that was broken.
    pub fn breach(text: impl Into<String>) -> Failure {
        Failure { code: BREACH, text: text.into() }
    }

    /// What the plugin does not offer.
    pub fn unsupported(text: impl Into<String>) -> Failure {
        Failure { code: UNSUPPORTED, text: text.into() }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = match self.code {
            BREACH => return f.write_str(&self.text),
            abi::NP_UNSUPPORTED => "NP_UNSUPPORTED",
            abi::NP_INVALID => "NP_INVALID",
            abi::NP_OUT_OF_MEMORY => "NP_OUT_OF_MEMORY",
            abi::NP_LOST => "NP_LOST",
            abi::NP_TIMEOUT => "NP_TIMEOUT",
            abi::NP_CANCELLED => "NP_CANCELLED",
            _ => "NP_INTERNAL",
        };
        match self.text.trim() {
            "" => write!(f, "{name}, without a reason"),
            text => write!(f, "{name}: {text}"),
        }
    }
}

/// Room for the text of a status, with marks behind it.
const ROOM: usize = 320;
const TEXT: usize = 300;

/// Reads a status that a plugin filled in for a call or a completion that answered `code`.
fn ended(code: i32, status: &NpStatus, text: &[u8]) -> Result<(), Failure> {
    if !(NP_OK..=NP_INTERNAL).contains(&code) {
        return Err(Failure::breach(format!("it answers {code}, which is no code of the header")));
    }
    if status.code != code {
        let text = format!("it returns the code {code}, but writes {} to the status", status.code);
        return Err(Failure::breach(text));
    }
    let bytes = usize::try_from(status.text_bytes).ok().and_then(|len| text.get(..len));
    let bytes = bytes.ok_or_else(|| {
        Failure::breach(format!("the text of the status has {} bytes, but less room", status.text_bytes))
    })?;
    let text = str::from_utf8(bytes).map_err(|_| Failure::breach("the text of the status is no UTF-8"))?;
    if code == NP_OK { Ok(()) } else { Err(Failure { code, text: text.into() }) }
}

/// Calls a function with a status, and checks that status and code agree.
fn call(run: impl FnOnce(*mut NpStatus) -> i32) -> Result<(), Failure> {
    let mut room = [b'#'; ROOM];
    let mut status = NpStatus::new();
    (status.text, status.text_capacity) = (room.as_mut_ptr().cast(), TEXT as u64);
    status.code = -1;
    let code = run(&mut status);
    if room[TEXT..].iter().any(|byte| *byte != b'#') {
        return Err(Failure::breach("the text of the status is longer than its room"));
    }
    ended(code, &status, &room[..TEXT])
}

/// What a unit says of itself.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Info {
    /// Its name.
    pub name: String,
    /// Who makes it.
    pub vendor: String,
    /// Versions.
    pub driver: String,
    /// For saved plans.
    pub compatibility: String,
    /// `NP_KIND_*`.
    pub kind: u32,
    /// `NP_DEVICE_*`.
    pub flags: u32,
    /// The token counts that it takes; none: any.
    pub token_buckets: Vec<u64>,
    /// `NP_MEMORY_*`.
    pub memory_kinds: u32,
    /// Of imported memory.
    pub memory_alignment: u64,
}

/// Units that were told of, or what was wrong with one.
type Told = Vec<Result<Info, Failure>>;

/// # Safety
/// The plugin passes a struct as the header has it.
unsafe fn info_of(info: *const NpDeviceInfo) -> Result<Info, Failure> {
    // SAFETY: as of this function.
    let info = unsafe { NpDeviceInfo::read(info) };
    let info = info.ok_or_else(|| Failure::breach("a unit is told of without a description"))?;
    let text = |from: *const c_char, bytes: u64, what: &str| {
        if bytes == 0 {
            return Ok(String::new());
        }
        if from.is_null() || bytes > 1 << 20 {
            return Err(Failure::breach(format!("the {what} of a unit has {bytes} bytes at {from:?}")));
        }
        // SAFETY: the plugin vouches for its texts.
        let bytes = unsafe { std::slice::from_raw_parts(from.cast(), bytes as usize) };
        let text = str::from_utf8(bytes);
        text.map(str::to_string).map_err(|_| Failure::breach(format!("the {what} of a unit is no UTF-8")))
    };
    let buckets = match info.token_bucket_count {
        0 => Vec::new(),
        count if info.token_buckets.is_null() || !info.token_buckets.is_aligned() || count > 1 << 16 => {
            let text = format!("there are {count} token buckets at {:?}", info.token_buckets);
            return Err(Failure::breach(text));
        }
        // SAFETY: the plugin vouches for its array.
        count => unsafe { std::slice::from_raw_parts(info.token_buckets, count as usize) }.to_vec(),
    };
    Ok(Info {
        name: text(info.name, info.name_bytes, "name")?,
        vendor: text(info.vendor, info.vendor_bytes, "vendor")?,
        driver: text(info.driver, info.driver_bytes, "driver")?,
        compatibility: text(info.compatibility, info.compatibility_bytes, "compatibility")?,
        kind: info.kind,
        flags: info.flags,
        token_buckets: buckets,
        memory_kinds: info.memory_kinds,
        memory_alignment: info.memory_alignment,
    })
}

unsafe extern "C" fn found(context: *mut c_void, info: *const NpDeviceInfo) {
    // SAFETY: the plugin passes the context of the caller, and a struct.
    unsafe { (*context.cast::<Told>()).push(info_of(info)) };
}

/// Calls a function that tells of units.
fn told(
    run: impl FnOnce(*mut c_void, Option<NpFoundFn>, *mut NpStatus) -> i32,
) -> Result<Vec<Info>, Failure> {
    let mut told = Told::new();
    let context = (&raw mut told).cast();
    call(|status| run(context, Some(found), status))?;
    told.into_iter().collect()
}

/// Options as the header has them; they borrow the pairs.
struct Options(Vec<NpOption>);

impl Options {
    fn new(pairs: &[(&str, &str)]) -> Options {
        Options(
            pairs
                .iter()
                .map(|(key, value)| NpOption {
                    key: key.as_ptr().cast(),
                    key_bytes: key.len() as u64,
                    value: value.as_ptr().cast(),
                    value_bytes: value.len() as u64,
                    ..NpOption::new()
                })
                .collect(),
        )
    }

    fn with<T>(&self, run: impl FnOnce(*const NpOptions) -> T) -> T {
        let items: Vec<*const NpOption> = self.0.iter().map(|item| &raw const *item).collect();
        run(&NpOptions { items: items.as_ptr(), count: items.len() as u64, ..NpOptions::new() })
    }
}

/// A library that cannot be tested.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LoadError {
    /// The system does not load it.
    #[error("plugin {path} cannot be loaded: {reason}")]
    Load {
        /// The file.
        path: PathBuf,
        /// What the system says.
        reason: String,
    },
    /// It does not export the one function.
    #[error("{path} is no plugin: it does not export {QUERY_SYMBOL}")]
    NoSymbol {
        /// The file.
        path: PathBuf,
    },
    /// It gives no table that this version can call.
    #[error(
        "plugin {path} gives no table for version {NEUROPIL_PLUGIN_ABI_MAJOR} of the plugin interface: {reason}"
    )]
    Table {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
}

/// A library that was loaded.
#[derive(Clone, Copy)]
pub struct Plugin {
    table: NpPlugin,
    query: NpPluginQueryFn,
}

// SAFETY: the table is a copy of functions and of texts that live until the process ends.
unsafe impl Send for Plugin {}
// SAFETY: as above.
unsafe impl Sync for Plugin {}

impl Plugin {
    /// Loads a library, never to unload it, and asks for its table.
    ///
    /// # Errors
    /// [`LoadError`].
    pub fn open_library(path: &Path) -> Result<Plugin, LoadError> {
        let fail = |error: libloading::Error| {
            // What the system says stands behind what failed.
            let reason = error.source().map_or_else(|| error.to_string(), ToString::to_string);
            LoadError::Load { path: path.into(), reason }
        };
        // SAFETY: who names the library trusts its code, as all of it runs here.
        let library = unsafe { libloading::Library::new(path) }.map_err(fail)?;
        // SAFETY: the header fixes the type of the symbol.
        let query = unsafe { library.get::<NpPluginQueryFn>(QUERY_SYMBOL.as_bytes()) }.map(|symbol| *symbol);
        std::mem::forget(library);
        let query = query.map_err(|_| LoadError::NoSymbol { path: path.into() })?;
        let no_table = |reason: &str| LoadError::Table { path: path.into(), reason: reason.into() };
        // SAFETY: the host's table lives until the process ends, and so does the plugin's.
        let table = unsafe { NpPlugin::read(query(host(NpHost::new()))) };
        let table = table.ok_or_else(|| no_table("it refuses this program"))?;
        if table.abi_major != NEUROPIL_PLUGIN_ABI_MAJOR {
            return Err(no_table(&format!("it speaks version {}", table.abi_major)));
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
            Some((name, _)) => Err(no_table(&format!("it does not offer {name}, which is required"))),
            None => Ok(Plugin { table, query }),
        }
    }

    /// Loads a library, for tests.
    ///
    /// # Panics
    /// When it is no plugin.
    pub fn load(path: &Path) -> Plugin {
        Plugin::open_library(path).unwrap_or_else(|error| panic!("{error}"))
    }

    /// Loads the library of a crate whose test is running, which cargo has built beside the test.
    ///
    /// # Panics
    /// When it is not there, or is no plugin.
    pub fn of_crate(name: &str) -> Plugin {
        Plugin::load(&library_of_crate(name))
    }

    /// Whether the plugin gives a table to a host of another version, or to one that sends more or less of itself than
    /// this version has; `None` stands for no host at all.
    pub fn serves(&self, host: Option<NpHost>, extra_bytes: bool) -> bool {
        let pointer = match host {
            None => ptr::null(),
            Some(host) if extra_bytes => &raw const *Box::leak(Box::new(Padded::new(host))) as *const NpHost,
            Some(host) => Box::leak(Box::new(host)),
        };
        // SAFETY: the struct lives until the process ends and is as large as it says.
        unsafe { !(self.query)(pointer).is_null() }
    }

    /// The table that it gives to this version.
    pub fn table(&self) -> &NpPlugin {
        &self.table
    }

    /// Its name and its version.
    ///
    /// # Errors
    /// A text that is none.
    pub fn names(&self) -> Result<(String, String), Failure> {
        let text = |from: *const c_char, bytes: u64, what: &str| {
            if from.is_null() || bytes == 0 || bytes > 1 << 20 {
                return Err(Failure::breach(format!(
                    "the {what} of the plugin has {bytes} bytes at {from:?}"
                )));
            }
            // SAFETY: the plugin vouches for its texts, which live until the process ends.
            let bytes = unsafe { std::slice::from_raw_parts(from.cast(), bytes as usize) };
            let text = str::from_utf8(bytes).map(str::to_string);
            text.map_err(|_| Failure::breach(format!("the {what} of the plugin is no UTF-8")))
        };
        let table = &self.table;
        Ok((
            text(table.name, table.name_bytes, "name")?,
            text(table.version, table.version_bytes, "version")?,
        ))
    }

    /// The units.
    ///
    /// # Errors
    /// What the plugin says.
    pub fn probe(&self, options: &[(&str, &str)]) -> Result<Vec<Info>, Failure> {
        Options::new(options).with(|options| self.probe_options(options))
    }

    /// The units, with options as they are; NULL for none.
    ///
    /// # Errors
    /// What the plugin says.
    pub(crate) fn probe_options(&self, options: *const NpOptions) -> Result<Vec<Info>, Failure> {
        let probe = self.table.probe.ok_or_else(|| Failure::unsupported("there is no probe"))?;
        // SAFETY: the function is that of the table, with what it asks for.
        told(|context, found, status| unsafe { probe(options, context, found, status) })
    }

    /// Opens a unit.
    ///
    /// # Errors
    /// What the plugin says.
    pub fn open(&self, index: u64, options: &[(&str, &str)]) -> Result<Device, Failure> {
        let mut handle = ptr::null_mut();
        let open = self.table.open.ok_or_else(|| Failure::unsupported("there is no open"))?;
        Options::new(options).with(|options| {
            // SAFETY: the function is that of the table, with what it asks for.
            call(|status| unsafe { open(index, options, &mut handle, status) })
        })?;
        if handle.is_null() {
            return Err(Failure::breach("open answers NP_OK, but gives no device"));
        }
        Ok(Device::new(self.table, handle))
    }
}

/// The library of a crate whose test is running, which cargo has built beside the test.
///
/// # Panics
/// When the test has no path.
pub fn library_of_crate(name: &str) -> PathBuf {
    let file = format!("{}{name}{}", std::env::consts::DLL_PREFIX, std::env::consts::DLL_SUFFIX);
    std::env::current_exe().expect("a test has a path").with_file_name(file)
}

unsafe extern "C" fn log(_: *mut c_void, _: u32, _: *const c_char, _: u64) {}

/// A host of this version, with what `host` says of its own.
fn host(host: NpHost) -> *const NpHost {
    let host = NpHost {
        abi_major: NEUROPIL_PLUGIN_ABI_MAJOR,
        abi_minor: NEUROPIL_PLUGIN_ABI_MINOR,
        log: Some(log),
        ..host
    };
    Box::leak(Box::new(host))
}
