//! The neuron store: a model file in which a neuron is one read.
//!
//! An ordinary model file holds matrices, and the three rows of a neuron lie in three places, one of them as a column.
//! A store is a GGUF file too, but each feed-forward layer is one tensor of *bundles*, neuron after neuron, those that
//! fire most first. `FORMAT.md` beside this file draws it byte by byte.

mod content;
mod convert;
mod error;
mod firing;
pub(crate) mod keys;
mod layout;
mod open;

pub use content::content_key;
pub use convert::{Additions, ConvertError, ConvertOptions, ConvertReport, LayerReport, convert, twin};
pub use error::StoreError;
pub use firing::{COVERED, Firing};
pub use layout::{DOWN_TYPES, Layout, Part, READ_UNITS, gate_types};
pub use open::{ALIGNMENT, BATCHES, Store, StoreLayer, VERSION, bundle_name, neuron_tensor_name, parameters};
