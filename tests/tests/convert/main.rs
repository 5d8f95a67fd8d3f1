//! Conversion to neuron stores, held against `FORMAT.md` by a reader that shares no code with the store's own.

mod bits;
mod hostile;
mod kinds;
mod order;
mod reading;
mod safetensors;
mod twin;

use std::path::{Path, PathBuf};

use neuropil::store::{self, ConvertError, ConvertOptions, ConvertReport};
use neuropil_device::DType;
use neuropil_tests::temp::TempDir;
use neuropil_tests::toy::Toy;

/// A toy with types for gate and up, and for down.
fn toy(gate_up: DType, down: DType) -> Toy {
    Toy { dtypes: vec![("ffn_down", down), ("ffn_", gate_up)], ..Toy::default() }
}

/// Converts a file in the folder and gives back where the store is.
fn convert(
    dir: &TempDir,
    source: &Path,
    options: &ConvertOptions,
) -> Result<(PathBuf, ConvertReport), ConvertError> {
    let out = dir.path().join("store.gguf");
    let report = store::convert(source, &out, options, &mut |_, _| true)?;
    assert_eq!(std::fs::metadata(&out).unwrap().len(), report.bytes);
    Ok((out, report))
}

/// The files of a folder.
fn names(dir: &TempDir) -> Vec<String> {
    let entries = std::fs::read_dir(dir.path()).unwrap().flatten();
    let mut names: Vec<String> = entries.map(|e| e.file_name().into_string().unwrap()).collect();
    names.sort();
    names
}
