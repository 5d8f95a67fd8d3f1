//! A neuropil plugin for Intel NPUs and CPUs, by an OpenVINO runtime (2025.1 or newer) that is found when it runs.
//!
//! ```text
//!   unit        what the host asks for: query, prepare, matmul, plans
//!     graph     a product as a graph in OpenVINO's format
//!     runtime   OpenVINO with owners and lengths
//!       library its C functions, found in a library
//! ```
//!
//! The options are `library=PATH` (a file or a folder), `device=NAME`, `tokens=1+32+128` or `any`, `exact=yes` or `no`,
//! and `threads=N`; the README says what they do.

#![deny(unsafe_code)]

mod graph;
#[allow(unsafe_code)]
mod library;
mod plan;
#[allow(unsafe_code)]
mod runtime;
mod settings;
mod unit;

use neuropil_plugin_sdk::{DeviceInfo, Error, Log, Options, PluginBackend, PluginDevice};

pub use unit::{Unit, Weight};

/// The plugin.
#[derive(Debug)]
pub struct OpenVino;

impl PluginBackend for OpenVino {
    const NAME: &'static str = "openvino";
    const VERSION: &'static str = env!("CARGO_PKG_VERSION");
    type Device = Unit;

    fn new(_log: Log) -> OpenVino {
        OpenVino
    }

    fn probe(&self, options: &Options) -> Result<Vec<DeviceInfo>, Error> {
        Ok(vec![Unit::open(&settings::Settings::new(options)?)?.info()])
    }

    fn open(&self, index: usize, options: &Options) -> Result<Unit, Error> {
        match index {
            0 => Unit::open(&settings::Settings::new(options)?),
            _ => Err(Error::invalid("there is one unit, of index 0: choose its device with device=NAME")),
        }
    }
}

#[allow(unsafe_code)]
mod border {
    neuropil_plugin_sdk::export_plugin!(super::OpenVino);
}
