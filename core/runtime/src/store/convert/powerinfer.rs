//! What files of PowerInfer say without saying it.
//!
//! They differ from stock files in their first four bytes, in a down matrix that is stored by neuron, and in the
//! predictors `fc1` and `fc2`. What they call `llama` has ReLU in place of SiLU; other architectures have their own
//! activation, as anywhere.

use crate::gguf::{Pairs, Value};
use crate::store::keys;

/// Puts the keys of a store in place of those of PowerInfer.
pub(super) fn rename_keys(pairs: &mut Pairs, architecture: &str, layers: usize) {
    let threshold = match pairs.get("powerinfer.sparse_threshold") {
        Some(Value::F32(threshold)) => *threshold,
        Some(Value::F64(threshold)) => *threshold as f32,
        _ => 0.0,
    };
    pairs.retain(|key| !key.starts_with("powerinfer."));
    if architecture == "llama" && pairs.get(keys::ACTIVATION).is_none() {
        pairs.set(keys::ACTIVATION, "relu");
    }
    pairs.set(keys::PREDICTOR_INPUT, keys::RESIDUAL);
    pairs.set(keys::PREDICTOR_THRESHOLD, vec![threshold; layers]);
}
