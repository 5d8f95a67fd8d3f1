//! Any bytes as a neuron store: a typed error, or layers whose neurons all lie inside their tensors.
//!
//! Run from `tests`: `cargo +nightly fuzz run store`.

#![no_main]

use libfuzzer_sys::fuzz_target;
use neuropil::gguf::Gguf;
use neuropil::store::{Part, Store};

fuzz_target!(|bytes: &[u8]| {
    let path = std::env::temp_dir().join(format!("neuropil-fuzz-{}.gguf", std::process::id()));
    std::fs::write(&path, bytes).expect("the file can be written");
    let Ok(gguf) = Gguf::open_header(&path) else { return };
    let Ok(store) = Store::read(&gguf) else { return };
    for layer in &store.layers {
        let layout = &layer.layout;
        layout.slot().check(layout.stride).expect("a bundle fits its slot");
        for tensor in &layer.bundles {
            assert_eq!(layout.bytes(), tensor.bytes);
            for part in [Part::Gate, Part::UpDown, Part::Both] {
                assert!(layout.bundle(layout.neurons - 1, part).end <= tensor.bytes);
            }
        }
    }
});
