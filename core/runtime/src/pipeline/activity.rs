//! How many of a token's neurons fired: the figure that sparsity is about. A prompt, for which all are computed, does not
//! count.

/// Neurons computed for a token and neurons there, per layer, summed over tokens.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Activity {
    layers: Vec<[u64; 2]>,
}

impl Activity {
    /// Counts one token in a layer, or in an expert of it.
    pub(crate) fn add(&mut self, layer: usize, computed: usize, neurons: usize) {
        if self.layers.len() <= layer {
            self.layers.resize(layer + 1, [0; 2]);
        }
        let counts = &mut self.layers[layer];
        (counts[0], counts[1]) = (counts[0] + computed as u64, counts[1] + neurons as u64);
    }

    /// Adds the counts of other steps.
    pub fn merge(&mut self, other: &Activity) {
        if self.layers.len() < other.layers.len() {
            self.layers.resize(other.layers.len(), [0; 2]);
        }
        for (counts, more) in self.layers.iter_mut().zip(&other.layers) {
            (counts[0], counts[1]) = (counts[0] + more[0], counts[1] + more[1]);
        }
    }

    /// Forgets the counts and keeps the memory.
    pub(crate) fn clear(&mut self) {
        self.layers.iter_mut().for_each(|counts| *counts = [0; 2]);
    }

    /// Whether nothing was counted: the model runs in blocks, with all neurons.
    pub fn is_empty(&self) -> bool {
        self.layers.iter().all(|counts| counts[1] == 0)
    }

    /// The share of neurons that were computed, of all layers; 1 when nothing was counted.
    pub fn share(&self) -> f64 {
        share(self.layers.iter().fold([0; 2], |all, counts| [all[0] + counts[0], all[1] + counts[1]]))
    }

    /// The share of neurons that were computed, layer by layer.
    pub fn per_layer(&self) -> impl ExactSizeIterator<Item = f64> {
        self.layers.iter().map(|counts| share(*counts))
    }
}

fn share([computed, neurons]: [u64; 2]) -> f64 {
    if neurons == 0 { 1.0 } else { computed as f64 / neurons as f64 }
}
