//! The suite on devices of neuropil: the CPU, and a plugin behind the host.

mod common;

use std::time::Instant;

use neuropil_cpu::{CpuBackend, CpuOptions};
use neuropil_device::Backend;
use neuropil_plugin_conformance::{Filter, check_device};
use neuropil_plugin_host::PluginBackend;

use common::{good, sim};

#[test]
fn the_cpu_passes() {
    let began = Instant::now();
    let options = CpuOptions { threads: Some(2), ..CpuOptions::default() };
    let device = CpuBackend::new(options).unwrap().open(0).unwrap();
    let report = check_device(&*device, &Filter::all(), &mut |_| ());
    good("cpu", &report);
    println!("{:?}", began.elapsed());
    assert!(report.passed() >= 1000, "{}", report.summary());
}

#[test]
fn a_plugin_behind_the_host_passes() {
    let began = Instant::now();
    let device = PluginBackend::load(sim(), "").unwrap().open(0).unwrap();
    let report = check_device(&*device, &Filter::all(), &mut |_| ());
    good("software NPU behind the host", &report);
    println!("{:?}", began.elapsed());
    assert!(report.passed() >= 1000, "{}", report.summary());
}
