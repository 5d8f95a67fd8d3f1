//! Why a plugin cannot be used at all. What goes wrong later is a [`neuropil_device::DeviceError`].

use std::path::PathBuf;

/// A library that is no plugin for this host, in one sentence.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PluginError {
    /// The file or folder cannot be read.
    #[error("plugin {path} cannot be read: {source}")]
    Read {
        /// The file or folder.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The file is no shared library.
    #[error("plugin {path} is no shared library: {reason}")]
    NotALibrary {
        /// The file.
        path: PathBuf,
        /// What it is instead.
        reason: &'static str,
    },
    /// The library is for another kind of processor.
    #[error("plugin {path} is built for {found}, but this program runs on {needed}: build it for {needed}")]
    Architecture {
        /// The file.
        path: PathBuf,
        /// What it is for.
        found: String,
        /// What it must be for.
        needed: &'static str,
    },
    /// The system does not load the library.
    #[error("plugin {path} cannot be loaded: {reason}")]
    Load {
        /// The file.
        path: PathBuf,
        /// What the system says.
        reason: String,
    },
    /// The library does not export the one function.
    #[error("{path} is no plugin: it does not export {symbol}")]
    NoSymbol {
        /// The file.
        path: PathBuf,
        /// The function.
        symbol: &'static str,
    },
    /// The plugin says that it cannot serve this host.
    #[error(
        "plugin {path} refuses this program, which speaks version {major}.{minor} of the plugin interface"
    )]
    Refused {
        /// The file.
        path: PathBuf,
        /// The host's version.
        major: u32,
        /// The host's version.
        minor: u32,
    },
    /// The plugin speaks another version.
    #[error(
        "plugin {path} speaks version {major}.{minor} of the plugin interface, but this program speaks version \
         {needed}: get a plugin for version {needed}"
    )]
    Version {
        /// The file.
        path: PathBuf,
        /// The plugin's version.
        major: u32,
        /// The plugin's version.
        minor: u32,
        /// The host's major version.
        needed: u32,
    },
    /// The plugin's table ends before the last function that is required.
    #[error("plugin {path} gives a table of {found} bytes, but {needed} are required")]
    Short {
        /// The file.
        path: PathBuf,
        /// Bytes that there are.
        found: usize,
        /// Bytes that must be there.
        needed: usize,
    },
    /// A function that is required is NULL.
    #[error("plugin {path} does not offer {function}, which is required")]
    NoFunction {
        /// The file.
        path: PathBuf,
        /// Its name in the header.
        function: &'static str,
    },
    /// The process that tried the plugin crashed.
    #[error("plugin {path} is left out: a process of its own that tried it crashed ({how})")]
    Crashed {
        /// The file.
        path: PathBuf,
        /// How.
        how: String,
    },
    /// The process that tried the plugin did not end.
    #[error(
        "plugin {path} is left out: a process of its own that tried it gave no answer in {seconds} seconds"
    )]
    Silent {
        /// The file.
        path: PathBuf,
        /// How long it was waited for.
        seconds: f64,
    },
    /// An option of the host that cannot be.
    #[error("plugin option {key}={value} cannot be: choose {choice}")]
    Option {
        /// The key.
        key: String,
        /// The value.
        value: String,
        /// What can be.
        choice: &'static str,
    },
}
