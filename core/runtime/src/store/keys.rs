//! The keys of a store, in one place: who writes one, who reads one and who leaves one out must mean the same.

/// What begins the keys of the layout.
const STORE: &str = "neuropil.store.";
/// Version of the format.
pub(crate) const VERSION: &str = "neuropil.store.version";
/// Parts of bundles start at multiples of it.
pub(crate) const READ_UNIT: &str = "neuropil.store.read_unit";
/// Neurons that are stored as one.
pub(crate) const GROUP: &str = "neuropil.store.group";
/// Types of gate and up rows.
pub(crate) const GATE_TYPE: &str = "neuropil.store.gate_type";
/// Types of down rows.
pub(crate) const DOWN_TYPE: &str = "neuropil.store.down_type";
/// Where the up rows begin.
pub(crate) const GATE_BYTES: &str = "neuropil.store.gate_bytes";
/// From a bundle to the next.
pub(crate) const STRIDE: &str = "neuropil.store.stride";
/// Digest of the source.
pub(crate) const SOURCE_SHA256: &str = "neuropil.source.sha256";

/// The activation of the feed-forward, and its cut: keys of a model, which its dense twin has too.
pub(crate) const ACTIVATION: &str = "neuropil.ffn_activation";
/// See [`ACTIVATION`].
pub(crate) const ACTIVATION_THRESHOLD: &str = "neuropil.ffn_activation_threshold";
/// Neurons that come first whatever their counts.
pub(crate) const HOT_COUNT: &str = "neuropil.ffn_hot_count";

/// Cuts of the centred threshold.
pub(crate) const THRESHOLD: &str = "neuropil.ffn_threshold";
/// What begins the keys of the gate in 4 bits.
const GATE4: &str = "neuropil.gate4_";
/// Cuts of the gate in 4 bits.
pub(crate) const GATE4_THRESHOLD: &str = "neuropil.gate4_threshold";
/// Share of the neurons that such a cut leaves.
pub(crate) const GATE4_ACTIVE: &str = "neuropil.gate4_active";
/// Share of the neurons that fired for the token before too.
pub(crate) const OVERLAP: &str = "neuropil.ffn_overlap";

/// What `auto` takes, where calibration found that predictors cost too much.
pub(crate) const PREDICT: &str = "neuropil.predict";

/// What begins the keys of the predictors.
const PREDICTOR: &str = "neuropil.predictor.";
/// The stream that they read.
pub(crate) const PREDICTOR_INPUT: &str = "neuropil.predictor.input";
/// What stands between their matrices.
pub(crate) const PREDICTOR_ACTIVATION: &str = "neuropil.predictor.activation";
/// Share of neurons that fitted ones evaluate; a model's own have no such key.
pub(crate) const PREDICTOR_ACTIVE: &str = "neuropil.predictor.active";
/// Scores above it fire.
pub(crate) const PREDICTOR_THRESHOLD: &str = "neuropil.predictor.threshold";
/// The value of [`PREDICTOR_INPUT`] of predictors that came with a model; those that were fitted read the normed stream.
pub(crate) const RESIDUAL: &str = "residual";

/// Whether a key says something of a store, not of the model.
pub(crate) fn of_store(key: &str) -> bool {
    let exact = [crate::gguf::CHECKSUM_KEY, SOURCE_SHA256, HOT_COUNT];
    is_layout(key) || is_measured(key) || is_of_predictors(key) || exact.contains(&key)
}

/// Whether a key says how bundles lie.
pub(crate) fn is_layout(key: &str) -> bool {
    key.starts_with(STORE)
}

/// Whether a key holds what calibration measured of the weights.
pub(crate) fn is_measured(key: &str) -> bool {
    [THRESHOLD, OVERLAP, PREDICT].contains(&key) || key.starts_with(GATE4)
}

/// Whether a key is about predictors.
pub(crate) fn is_of_predictors(key: &str) -> bool {
    key.starts_with(PREDICTOR)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_twin_keeps_the_activation_and_nothing_of_the_store() {
        let names = ["gate4_active", "gate4_threshold", "ffn_overlap", "ffn_threshold", "ffn_hot_count"];
        let more =
            ["predict", "predictor.input", "predictor.active", "store.stride", "checksum", "source.sha256"];
        for name in names.iter().chain(&more) {
            assert!(of_store(&format!("neuropil.{name}")), "{name}");
        }
        for key in [ACTIVATION, ACTIVATION_THRESHOLD, "llama.block_count", "neuropil.synth"] {
            assert!(!of_store(key), "{key}");
        }
    }
}
