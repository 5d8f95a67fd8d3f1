//! What a calibrated store says of how its neurons fire: the figures that decide what is worth keeping in memory.

use crate::gguf::{Gguf, GgufError};

use super::{BATCHES, Store};

/// The shares of firings that [`Firing::cover`] is about.
pub const COVERED: [f64; 3] = [0.5, 0.8, 0.9];

/// How the neurons of a layer fire, mean of its experts.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Firing {
    /// Share of neurons that fire in batches of 1, 2, 4 and 8 tokens.
    pub active: [f64; BATCHES.len()],
    /// Share of neurons, those that fire most, on which each of the shares [`COVERED`] of all firings fall.
    pub cover: [f64; COVERED.len()],
}

impl Firing {
    /// Of each layer; none when a layer has no counts, or counts of another type or size.
    ///
    /// # Errors
    /// Those of reading.
    pub fn read(gguf: &Gguf, store: &Store) -> Result<Option<Vec<Firing>>, GgufError> {
        let mut layers = Vec::new();
        for (index, layer) in store.layers.iter().enumerate() {
            let (neurons, experts) = (layer.layout.neurons, layer.bundles.len());
            let values = (neurons as u64).saturating_mul((BATCHES.len() * experts) as u64);
            let tensor = gguf.tensor(&format!("blk.{index}.ffn_count"));
            let Some(tensor) = tensor.filter(|t| t.type_name() == "F32" && t.elements() == values) else {
                return Ok(None);
            };
            let mut bytes = crate::gguf::reserve(tensor.bytes, gguf.path())?;
            bytes.resize(tensor.bytes as usize, 0);
            gguf.read_into(tensor, &mut bytes)?;
            let counts: Vec<f64> =
                bytes.as_chunks::<4>().0.iter().map(|value| f64::from(f32::from_le_bytes(*value))).collect();
            layers.push(Firing::of(&counts, neurons));
        }
        Ok(Some(layers))
    }

    /// From the counts of all experts, `[experts, batches, neurons]`.
    fn of(counts: &[f64], neurons: usize) -> Firing {
        let mut firing = Firing::default();
        let per_expert = neurons * BATCHES.len();
        let experts = counts.len() / per_expert.max(1);
        for counts in counts.chunks_exact(per_expert.max(1)) {
            for (active, counts) in firing.active.iter_mut().zip(counts.chunks_exact(neurons)) {
                *active += counts.iter().sum::<f64>() / (neurons * experts) as f64;
            }
            let mut single = counts[..neurons].to_vec();
            single.sort_unstable_by(|a, b| b.total_cmp(a));
            let all: f64 = single.iter().sum();
            for (cover, share) in firing.cover.iter_mut().zip(COVERED) {
                let mut sum = 0.0;
                let most = single.iter().take_while(|count| {
                    let short = sum < share * all;
                    sum += **count;
                    short
                });
                *cover += most.count() as f64 / (neurons * experts) as f64;
            }
        }
        firing
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hottest_cover_most() {
        let single = [0.6, 0.1, 0.1, 0.1, 0.1, 0.0, 0.0, 0.0];
        let counts: Vec<f64> = [single; BATCHES.len()].concat();
        let firing = Firing::of(&counts, 8);
        assert!((firing.active[0] - 1.0 / 8.0).abs() < 1e-9);
        assert_eq!(firing.cover, [1.0 / 8.0, 3.0 / 8.0, 4.0 / 8.0]);
        assert_eq!(Firing::of(&[0.0; 32], 8).cover, [0.0; 3]);
    }
}
