//! What files of PowerInfer say without saying it.
//!
//! They differ from stock files in their first four bytes, in a down matrix that is stored by neuron, and in the
//! predictors `fc1` and `fc2`. Their activation follows from the architecture.

use crate::gguf::{Pairs, Value};

/// Puts the keys of a store in place of those of PowerInfer.
pub(super) fn rename_keys(pairs: &mut Pairs, architecture: &str, layers: usize) {
    let threshold = match pairs.get("powerinfer.sparse_threshold") {
        Some(Value::F32(threshold)) => *threshold,
        Some(Value::F64(threshold)) => *threshold as f32,
        _ => 0.0,
    };
    pairs.retain(|key| !key.starts_with("powerinfer."));
    let activation = if architecture == "bamboo" { "drelu" } else { "relu" };
    if pairs.get("neuropil.ffn_activation").is_none() {
        pairs.set("neuropil.ffn_activation", activation);
    }
    pairs.set("neuropil.predictor.input", "residual");
    pairs.set("neuropil.predictor.threshold", vec![threshold; layers]);
}
