//! Compiled graphs in a folder.

use std::path::{Path, PathBuf};

use neuropil_plugin_abi as abi;
use neuropil_plugin_conformance::sample::{Random, Sample};

use crate::kit::Shim;

fn folder(name: &str) -> PathBuf {
    let path =
        PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("nnapi-{name}-{}", std::process::id()));
    let _ = std::fs::remove_dir_all(&path);
    path
}

/// Prepares a weight and runs it; gives the outputs.
fn product(shim: &Shim, cache: &Path, sample: &Sample, options: &[(&str, &str)]) -> Vec<Vec<f32>> {
    let fixed = [("tokens", "1+2"), ("int8", "on"), ("cache", cache.to_str().unwrap())];
    let device = shim.open(&[&fixed[..], options].concat()).unwrap();
    let weight = device.prepare(&[sample]).unwrap();
    device.matmul(&[&weight], &Random::new(2).values(2 * 64), 2).unwrap()
}

#[test]
fn graphs_are_reloaded_and_damaged_ones_are_made_anew() {
    let shim = Shim::new();
    let cache = folder("cache");
    let counts =
        || [shim.get("cache.written"), shim.get("compilations.from_cache"), shim.get("cache.corrupt")];
    let sample = Sample::random(abi::NP_SCHEME_CHANNEL8, 32, 64, 1);
    let first = product(&shim, &cache, &sample, &[]);
    assert_eq!(counts(), [2, 0, 0]);
    assert_eq!(product(&shim, &cache, &sample, &[]), first);
    assert_eq!(counts(), [2, 2, 0]);
    for file in std::fs::read_dir(&cache).unwrap() {
        let path = file.unwrap().path();
        let mut bytes = std::fs::read(&path).unwrap();
        let middle = bytes.len() / 2;
        bytes[middle] ^= 1;
        std::fs::write(path, bytes).unwrap();
    }
    assert_eq!(product(&shim, &cache, &sample, &[]), first);
    assert_eq!(counts(), [4, 2, 2]);
    std::fs::remove_dir_all(cache).unwrap();
    shim.is_clean();
}

#[test]
fn another_weight_or_setting_is_another_graph() {
    let shim = Shim::new();
    let cache = folder("tokens");
    let sample = Sample::random(abi::NP_SCHEME_F32, 32, 64, 1);
    let mut changed = Sample::random(abi::NP_SCHEME_F32, 32, 64, 1);
    changed.data[40] ^= 1;
    let codes = Sample::random(abi::NP_SCHEME_CHANNEL8, 32, 64, 1);
    product(&shim, &cache, &sample, &[]);
    product(&shim, &cache, &changed, &[]);
    product(&shim, &cache, &codes, &[]);
    product(&shim, &cache, &sample, &[("precision", "f16")]);
    product(&shim, &cache, &sample, &[("relaxed", "off")]);
    product(&shim, &cache, &sample, &[("preference", "low_power")]);
    shim.set("devices", "shim-accelerator:accelerator:31:2.0");
    product(&shim, &cache, &sample, &[]);
    assert_eq!((shim.get("cache.written"), shim.get("compilations.from_cache")), (14, 0));
    // A scale of a row is multiplied outside of the graph, which stays the same.
    let mut other_scale = Sample::random(abi::NP_SCHEME_CHANNEL8, 32, 64, 1);
    other_scale.scales[..4].copy_from_slice(&3f32.to_le_bytes());
    shim.set("devices", "shim-accelerator:accelerator:31:1.0");
    product(&shim, &cache, &other_scale, &[]);
    assert_eq!(shim.get("compilations.from_cache"), 2);
    std::fs::remove_dir_all(cache).unwrap();
    shim.is_clean();
}

#[test]
fn a_folder_that_cannot_be_is_said() {
    let shim = Shim::new();
    let file = folder("file");
    std::fs::write(&file, "").unwrap();
    let device = shim.open(&[("cache", file.join("below").to_str().unwrap())]).unwrap();
    let failure = device.prepare(&[&Sample::random(abi::NP_SCHEME_F32, 8, 8, 1)]).err().unwrap();
    assert_eq!((failure.code, failure.text.contains("option cache=")), (abi::NP_INVALID, true));
    std::fs::remove_file(file).unwrap();
    drop(device);
    shim.is_clean();
}
