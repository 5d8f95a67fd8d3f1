//! A neural processor in software, as a plugin.
//!
//! It has the habits of the real ones: graphs for a few token counts only, weights quantised per channel with a few
//! outlier columns of 8 bits beside 4 (PowerInfer-2 section 4.1.1), activations of 16 or 8 bits, a price per call. And it
//! fails in every way that a driver does, at the call that its options name:
//!
//! | option | default | |
//! |---|---|---|
//! | `units` | 1 | units that there are |
//! | `buckets` | `1+16+128` | token counts with a graph; `any` for all |
//! | `schemes` | all | those that it takes, joined by `+`: `f32 f16 group8 group4 group4m channel8 channel4` |
//! | `outliers` | `on` | whether it takes outlier columns |
//! | `activations` | 16 | bits of the activations of the channel schemes: 16 or 8 |
//! | `clusters` | `on` | whether it takes blocks of neurons |
//! | `latency_us` | 0 | time that a job takes at least |
//! | `compile_ms` | 0 | time that it compiles a weight at least; without it there is nothing to save, and its compatibility text is empty |
//! | `memory` | 0 | bytes for weights; 0 for no bound |
//! | `fault` | none | `KIND@FUNCTION` or `KIND@FUNCTION:N`: at the N-th call. Kinds: `error lost oom panic hang abort nan tile` (the last two spoil results). Functions: `probe open query prepare matmul cluster save_plan load_plan` |
//! | `fault_columns` | 0 | only calls for weights of as many columns count; 0 for all |
//! | `hang_ms` | 60000 | how long a hang lasts |

#![deny(unsafe_code)]

mod elements;
mod fault;
mod plan;
mod settings;
mod unit;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use neuropil_plugin_sdk::{DeviceInfo, DeviceKind, Error, Log, Options, PluginBackend, export_plugin};

use fault::{Calls, Function};
use settings::Settings;
pub use unit::Unit;

/// The plugin.
pub struct SimNpu {
    /// Calls of `probe` and `open` that count for a fault, by options: a process may try many.
    calls: Mutex<BTreeMap<String, Arc<Calls>>>,
}

impl SimNpu {
    fn calls(&self, options: &Options) -> Arc<Calls> {
        let key = options.iter().map(|(key, value)| format!("{key}={value}&")).collect();
        let mut calls = self.calls.lock().unwrap_or_else(PoisonError::into_inner);
        calls.entry(key).or_default().clone()
    }
}

fn info(index: usize, settings: &Settings) -> DeviceInfo {
    let driver = concat!("sim-npu ", env!("CARGO_PKG_VERSION"));
    let compatibility = match settings.compile.is_zero() {
        true => String::new(),
        false => format!("{driver}, activations up to {}", settings.activation_limit),
    };
    DeviceInfo {
        name: format!("software NPU {index}"),
        vendor: "neuropil".into(),
        driver: driver.into(),
        compatibility,
        kind: DeviceKind::Npu,
        memory_bytes: settings.memory,
        token_buckets: settings.buckets.clone(),
        ..DeviceInfo::default()
    }
}

impl PluginBackend for SimNpu {
    const NAME: &'static str = "sim-npu";
    const VERSION: &'static str = env!("CARGO_PKG_VERSION");
    type Device = Unit;

    fn new(_: Log) -> SimNpu {
        SimNpu { calls: Mutex::default() }
    }

    fn probe(&self, options: &Options) -> Result<Vec<DeviceInfo>, Error> {
        let settings = Settings::new(options)?;
        settings.fault.strike(&self.calls(options), Function::Probe, 0)?;
        Ok((0..settings.units).map(|index| info(index, &settings)).collect())
    }

    fn open(&self, index: usize, options: &Options) -> Result<Unit, Error> {
        let settings = Settings::new(options)?;
        settings.fault.strike(&self.calls(options), Function::Open, 0)?;
        if index >= settings.units {
            return Err(Error::invalid(format!("there is no unit {index}: units={}", settings.units)));
        }
        Ok(Unit::new(info(index, &settings), settings))
    }
}

export_plugin!(SimNpu);
