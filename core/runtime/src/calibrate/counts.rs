//! How often each neuron fires, alone and in batches.
//!
//! A neuron counts as active in a batch when any of its tokens fires it. Tokens of one text that are far apart stand in
//! for the tokens of several sequences.

use neuropil_device::DeviceError;

use crate::predict::{GateObserver, GateSeen, Marks};
use crate::store::BATCHES;

use super::memory::{room, zeros};
use super::shape::LayerShape;

/// Tokens of the largest batch.
const LARGEST: usize = BATCHES[BATCHES.len() - 1];

/// Decides whether a gate fires: layer, expert, neuron, gate.
pub(super) type Fires = dyn Fn(usize, usize, usize, f32) -> bool + Send;

/// What was counted in one layer or expert.
#[derive(Clone, Debug, Default)]
pub(super) struct LayerCounts {
    /// Batches in which a neuron fired, by batch size, `[batches][neurons]`.
    pub fired: [Vec<u32>; BATCHES.len()],
    /// Batches looked at.
    pub batches: [u64; BATCHES.len()],
    /// Pairs of adjacent tokens: neurons that fired in both, and in the second.
    pub adjacent: [u64; 2],
}

impl LayerCounts {
    /// The share of batches in which a neuron fired.
    pub(super) fn frequency(&self, batch: usize, neuron: usize) -> f32 {
        let fired = self.fired[batch].get(neuron).copied().unwrap_or(0);
        (f64::from(fired) / self.batches[batch].max(1) as f64) as f32
    }
}

/// Counts over layers, or over experts in them.
pub(super) struct Counts {
    fires: Box<Fires>,
    /// By layer and expert.
    pub layers: Vec<Vec<LayerCounts>>,
    marks: Marks,
}

impl Counts {
    pub(super) fn new(fires: Box<Fires>, shapes: &[LayerShape]) -> Result<Counts, DeviceError> {
        let mut layers = room(shapes.len())?;
        for shape in shapes {
            let of = |_| {
                let mut counts = LayerCounts::default();
                for fired in &mut counts.fired {
                    *fired = zeros(shape.neurons)?;
                }
                Ok(counts)
            };
            layers.push((0..shape.experts).map(of).collect::<Result<Vec<LayerCounts>, DeviceError>>()?);
        }
        Ok(Counts { fires, layers, marks: Marks::default() })
    }
}

impl GateObserver for Counts {
    fn gate(&mut self, seen: &GateSeen<'_>) {
        let (tokens, neurons) = (seen.counted.len(), seen.neurons);
        let mut marks = std::mem::take(&mut self.marks);
        marks.reset(tokens, neurons);
        for (token, gate) in seen.gate.chunks_exact(neurons).enumerate().filter(|(t, _)| seen.counted[*t]) {
            for (neuron, gate) in gate.iter().enumerate() {
                if (self.fires)(seen.layer, seen.expert, neuron, *gate) {
                    marks.mark(token, neuron);
                }
            }
        }
        let of = self.layers.get_mut(seen.layer).and_then(|experts| experts.get_mut(seen.expert));
        let Some(counts) = of else { return };
        let counted = |token: usize| seen.counted.get(token).copied().unwrap_or(false);
        for (index, batch) in BATCHES.into_iter().enumerate() {
            // The largest batch spans the chunk. An expert sees tokens of its own choice, so whatever stands next to
            // another is one of a batch.
            let apart = if seen.expert_of_many { 1 } else { (tokens / LARGEST).max(1) };
            let starts = (0..tokens).filter(|start| batch == 1 || (start / apart) % batch == 0);
            for start in starts {
                let members = (0..batch).map(|i| start + i * apart);
                if !members.clone().all(counted) {
                    continue;
                }
                counts.batches[index] += 1;
                for (neuron, fired) in counts.fired[index].iter_mut().enumerate() {
                    *fired += u32::from(members.clone().any(|token| marks.is_marked(token, neuron)));
                }
            }
        }
        for token in (1..tokens).filter(|token| counted(*token) && counted(token - 1)) {
            for neuron in 0..neurons {
                let now = marks.is_marked(token, neuron);
                counts.adjacent[0] += u64::from(now && marks.is_marked(token - 1, neuron));
                counts.adjacent[1] += u64::from(now);
            }
        }
        self.marks = marks;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_batch_fires_what_any_of_its_tokens_fires() {
        let shape = LayerShape { neurons: 2, width: 1, experts: 1, numbered: false };
        let mut counts = Counts::new(Box::new(|_, _, _, gate| gate > 0.0), &[shape]).unwrap();
        // Two neurons; the first fires at token 0, the second at token 64.
        let mut gate = vec![-1.0; 256];
        (gate[0], gate[2 * 64 + 1]) = (1.0, 1.0);
        let counted = vec![true; 128];
        counts.gate(&GateSeen {
            layer: 0,
            expert: 0,
            expert_of_many: false,
            width: 1,
            neurons: 2,
            h: &[0.0; 128],
            gate: &gate,
            counted: &counted,
        });
        let layer = &counts.layers[0][0];
        assert_eq!((layer.batches, layer.fired[0].clone()), ([128, 64, 32, 16], vec![1, 1]));
        assert_eq!(layer.fired[1], [1, 1]);
        assert_eq!(layer.frequency(1, 0), 1.0 / 64.0);
        assert_eq!(layer.adjacent, [0, 1]);
    }
}
