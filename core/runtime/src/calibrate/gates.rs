//! Collects how the gates of all layers are distributed over a text.

use neuropil_device::{Activation, DeviceError};

use crate::predict::{GateObserver, GateSeen};

use super::histogram::{Histogram, MOST};
use super::memory::room;
use super::shape::LayerShape;

/// Of one layer or expert.
pub(super) struct Seen {
    pub gates: Histogram,
    /// Tokens that were there, counted or not.
    pub tokens: usize,
}

/// Histograms by layer and expert.
pub(super) struct Gates {
    activation: Activation,
    /// Of so many tokens one is counted, so that no count overflows.
    every: usize,
    pub layers: Vec<Vec<Seen>>,
}

impl Gates {
    /// For a text of `tokens`.
    pub(super) fn new(
        activation: Activation,
        shapes: &[LayerShape],
        tokens: usize,
    ) -> Result<Gates, DeviceError> {
        let mut layers = room(shapes.len())?;
        for shape in shapes {
            let seen = |_| Ok(Seen { gates: Histogram::new(shape.neurons)?, tokens: 0 });
            layers.push((0..shape.experts).map(seen).collect::<Result<Vec<Seen>, DeviceError>>()?);
        }
        Ok(Gates { activation, every: tokens.div_ceil(MOST).max(1), layers })
    }
}

impl GateObserver for Gates {
    fn gate(&mut self, seen: &GateSeen<'_>) {
        let of = self.layers.get_mut(seen.layer).and_then(|experts| experts.get_mut(seen.expert));
        let Some(of) = of else { return };
        let rows = seen.gate.chunks_exact(seen.neurons).zip(seen.counted).filter(|(_, counted)| **counted);
        for (gates, _) in rows {
            if of.tokens.is_multiple_of(self.every) {
                of.gates.add(gates.iter().map(|gate| self.activation.gate(*gate)));
            }
            of.tokens += 1;
        }
    }
}
