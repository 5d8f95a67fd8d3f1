//! Collects how the gates of all layers are distributed over a text.

use neuropil_device::Activation;

use crate::predict::{GateObserver, GateSeen};

use super::histogram::Histogram;

/// Histograms by layer and expert.
pub(super) struct Gates {
    activation: Activation,
    pub layers: Vec<Vec<Histogram>>,
}

impl Gates {
    pub(super) fn new(activation: Activation) -> Gates {
        Gates { activation, layers: Vec::new() }
    }
}

impl GateObserver for Gates {
    fn gate(&mut self, seen: &GateSeen<'_>) {
        if self.layers.len() <= seen.layer {
            self.layers.resize_with(seen.layer + 1, Vec::new);
        }
        let experts = &mut self.layers[seen.layer];
        if experts.len() <= seen.expert {
            experts.resize_with(seen.expert + 1, || Histogram::new(seen.neurons));
        }
        let histogram = &mut experts[seen.expert];
        let rows = seen.gate.chunks_exact(seen.neurons).zip(seen.counted).filter(|(_, counted)| **counted);
        rows.for_each(|(gates, _)| histogram.add(gates.iter().map(|gate| self.activation.gate(*gate))));
    }
}
