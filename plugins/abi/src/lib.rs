//! The C border between neuropil and its plugins: `include/neuropil_plugin.h`, and the same structs for Rust.
//!
//! The header is the contract, and says everything: what the functions do, who owns what, which thread may call. This
//! crate is its twin for the host and the SDK; it depends on nothing. Whoever writes a plugin in Rust needs neither, and
//! takes `neuropil-plugin-sdk`.
//!
//! Structs grow at their end, so nothing that came over the border is used in place: [`AbiStruct::read`] copies the
//! fields that both sides know. `layout.txt` has every size, offset and number; the compiler checks the Rust side, and a
//! test the C side.

#[cfg(target_endian = "big")]
compile_error!("neuropil plugins need a little-endian machine");

mod constants;
mod table;
mod types;

pub use constants::*;
pub use table::{AbiStruct, FieldLayout, StructLayout};
pub use types::*;

/// The name of the function that a plugin exports; its type is [`NpPluginQueryFn`].
pub const QUERY_SYMBOL: &str = "neuropil_plugin_query";

/// The C header, for those who write it to a folder of their own.
pub const HEADER: &str = include_str!("../include/neuropil_plugin.h");

/// Bytes that a plugin's table has at least: up to the last function that is required.
pub const LEAST_PLUGIN_BYTES: usize = std::mem::offset_of!(NpPlugin, cluster);

/// Every number, size and offset as Rust sees them, one per line: what `layout.txt` holds.
pub fn layout_text() -> String {
    let mut text = String::new();
    for (name, value) in constants::CONSTANTS {
        text += &format!("{name} = {value}\n");
    }
    for layout in types::STRUCTS {
        text += &format!("{} {}\n", layout.name, layout.bytes);
        for field in layout.fields {
            text += &format!("{}.{} {} {}\n", layout.name, field.name, field.offset, field.bytes);
        }
    }
    text
}
