//! Plugins as ordinary devices.
//!
//! A plugin is a shared library behind the C border of `neuropil-plugin-abi`. This crate finds and loads it, and makes a
//! [`neuropil_device::Backend`] of it, so nobody else needs to know that there are plugins:
//!
//! ```no_run
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! use neuropil_device::Backend;
//! use neuropil_plugin_host::PluginBackend;
//!
//! let backend = PluginBackend::load("libvendor_npu.so".as_ref(), "library=/vendor/lib/libQnnHtp.so")?;
//! let device = backend.open(0)?;
//! # Ok(())
//! # }
//! ```
//!
//! What stands between a job and the plugin, from the outside to the inside:
//!
//! - [`PluginBackend`] and [`PluginDevice`]: the contract of `neuropil-device`;
//! - `choose`: in which scheme a weight goes to the unit; `encode`: that scheme's bytes ([`Encoded`]);
//! - `prepare`: a weight for the unit; `plans`: what it compiled, kept in a folder;
//! - `worker`: one thread per unit makes all calls; a watchdog gives up a call that takes too long;
//! - `session`: what that thread does: fitting tokens to buckets, feed-forwards of units that only multiply, and looking
//!   at results;
//! - `projection`: every result of a product is checked against one row;
//! - `self_test`: small products against double precision when a unit is opened; what is wrong is switched off;
//! - `border`: the C functions, and the only unsafe code.
//!
//! **A plugin is not trusted to work**, only to keep to its own memory. It works on copies of inputs and outputs that the
//! worker owns. So when a call hangs, the job's leases are free at once, and the copies live until the call returns, if
//! it ever does. That is also why no memory is imported (`import_memory` of the header): a unit that works in place would
//! hold the engine's own memory while it hangs. Outputs are filled with NaN before a call, so what the unit did not write is found like a NaN that it
//! wrote.

#![deny(unsafe_code)]

mod backend;
#[allow(unsafe_code)]
mod border;
mod choose;
mod describe;
mod device;
mod encode;
mod error;
mod find;
mod options;
mod pieces;
mod plans;
mod prepare;
mod probe;
mod projection;
mod scheme;
mod self_test;
mod session;
mod slot;
mod weight;
mod worker;

pub use backend::PluginBackend;
pub use describe::{Description, Disabled};
pub use device::PluginDevice;
pub use encode::{Encoded, Outliers};
pub use error::PluginError;
pub use find::find_plugins;
pub use options::{HOST_KEYS, Options, Plans, Weights};
pub use probe::{REFUSED, probe_in_child, try_plugin};
pub use scheme::Scheme;
