//! A neuropil plugin for Qualcomm's Hexagon NPUs, by a QNN library (core API 2.32 or newer) that is found when it runs.
//!
//! ```text
//!   unit            what the host asks for: query, prepare, matmul, plans
//!     product       a matrix as a graph of codes, and the ranges of these
//!     activations   values of a job to inputs of a graph, and back
//!     plan, cache   compiled weights as bytes, and in a folder
//!     runtime       sessions, contexts and graphs with owners and lengths
//!       graph, tensor, memory
//!       library     the functions, found in a library
//!         abi       the structs
//! ```
//!
//! The README says what the options do.

#![deny(unsafe_code)]

mod abi;
mod activations;
mod cache;
#[allow(unsafe_code)]
mod graph;
#[allow(unsafe_code)]
mod library;
#[allow(unsafe_code)]
mod memory;
mod plan;
#[allow(unsafe_code)]
mod power;
mod product;
#[allow(unsafe_code)]
mod runtime;
mod settings;
mod tensor;
mod unit;

use neuropil_plugin_sdk::{DeviceInfo, Error, Log, Options, PluginBackend};

use library::{Loaded, Vendor};
use settings::Settings;
pub use unit::{Unit, Weight};

/// The plugin.
pub struct Qnn {
    log: Log,
    loaded: Loaded,
}

impl PluginBackend for Qnn {
    const NAME: &'static str = "qnn";
    const VERSION: &'static str = env!("CARGO_PKG_VERSION");
    type Device = Unit;

    fn new(log: Log) -> Qnn {
        Qnn { log, loaded: Loaded::default() }
    }

    fn probe(&self, options: &Options) -> Result<Vec<DeviceInfo>, Error> {
        let settings = Settings::new(options)?;
        let vendor = Vendor::load(settings.library.as_deref(), &self.loaded)?;
        Ok(vec![unit::describe(&vendor, &settings)])
    }

    fn open(&self, index: usize, options: &Options) -> Result<Unit, Error> {
        match index {
            0 => {
                let settings = Settings::new(options)?;
                let vendor = Vendor::load(settings.library.as_deref(), &self.loaded)?;
                Unit::open(vendor, settings, self.log.clone())
            }
            _ => Err(Error::invalid("there is one unit, of index 0: choose its backend with library=PATH")),
        }
    }
}

#[allow(unsafe_code)]
mod border {
    neuropil_plugin_sdk::export_plugin!(super::Qnn);
}
