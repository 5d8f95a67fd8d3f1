//! Any bytes as a GGUF file: an answer or a typed error, and what is answered holds together.
//!
//! Run from `tests`: `cargo +nightly fuzz run gguf_header`.

#![no_main]

use std::path::Path;

use libfuzzer_sys::fuzz_target;
use neuropil::gguf::{TypePolicy, parse};

fuzz_target!(|bytes: &[u8]| {
    for types in [TypePolicy::Supported, TypePolicy::Any] {
        let header = match parse(bytes, Path::new("fuzz.gguf"), types) {
            Ok(header) => header,
            Err(error) => {
                assert!(error.to_string().starts_with("fuzz.gguf: "));
                continue;
            }
        };
        let mut extents: Vec<_> = header.tensors.iter().map(|t| (t.offset, t.end())).collect();
        extents.sort_unstable();
        assert!(extents.iter().all(|&(start, end)| start <= end && end <= bytes.len() as u64));
        assert!(extents.windows(2).all(|pair| pair[0].1 <= pair[1].0));
        for (key, value) in header.metadata.iter() {
            assert_eq!(header.metadata.get(key).map(|v| v.type_name()), Some(value.type_name()));
            let _ = (value.to_string(), header.metadata.u32(key), header.metadata.str(key));
        }
    }
});
