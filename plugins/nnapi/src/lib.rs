//! A neuropil plugin for the NPUs, GPUs and DSPs of Android devices, by NNAPI of feature level 29 (Android 10) or newer.
//!
//! ```text
//!   unit         what the host asks for: query, prepare, matmul, import
//!     settings   the options
//!     form       which operation of NNAPI computes a scheme, and what it cannot
//!     pack       a weight in the bytes of a form
//!     rows       values of a job in the types of a form, and back
//!     graph      a compiled product of fixed shape, with its burst
//!       runtime  models, compilations, bursts and executions with owners
//!       memory   memory that the driver shares with us
//!       codes    the numbers of NNAPI, and what its results mean
//!       library  its C functions, found in a library
//! ```
//!
//! NNAPI is a part of Android; on Linux a stand-in of the library serves for tests. On other systems this crate is empty.
//! The README has the options.

#![cfg(any(target_os = "android", target_os = "linux"))]
#![deny(unsafe_code)]

mod codes;
mod form;
mod graph;
#[allow(unsafe_code)]
mod library;
#[allow(unsafe_code)]
mod memory;
mod pack;
mod rows;
#[allow(unsafe_code)]
mod runtime;
mod settings;
mod unit;

use neuropil_plugin_sdk::{DeviceInfo, Error, Log, Options, PluginBackend, PluginDevice};

pub use unit::{Unit, Weight};

/// The plugin.
#[derive(Debug)]
pub struct Nnapi;

impl PluginBackend for Nnapi {
    const NAME: &'static str = "nnapi";
    const VERSION: &'static str = env!("CARGO_PKG_VERSION");
    type Device = Unit;

    fn new(_log: Log) -> Nnapi {
        Nnapi
    }

    fn probe(&self, options: &Options) -> Result<Vec<DeviceInfo>, Error> {
        Ok(vec![Unit::open(settings::Settings::new(options)?)?.info()])
    }

    fn open(&self, index: usize, options: &Options) -> Result<Unit, Error> {
        match index {
            0 => {
                let unit = Unit::open(settings::Settings::new(options)?)?;
                unit.wait()?;
                Ok(unit)
            }
            _ => Err(Error::invalid("there is one unit, of index 0: choose its device with device=NAME")),
        }
    }
}

#[allow(unsafe_code)]
mod border {
    neuropil_plugin_sdk::export_plugin!(super::Nnapi);
}
