//! Some tokens' inputs and gates of every layer: what predictors are fitted to and judged by.

use half::f16;
use neuropil_device::DeviceError;

use crate::predict::{GateObserver, GateSeen};

use super::memory::{room, zeros};
use super::shape::LayerShape;

/// Most tokens kept of a layer or expert.
const MOST: usize = 1024;

/// Tokens of one layer or expert. Kept in half precision: they are many.
#[derive(Clone, Debug, Default)]
pub(super) struct LayerSamples {
    h: Vec<f16>,
    gate: Vec<f16>,
    /// Tokens that are kept, and those that were there.
    kept: usize,
    pub tokens: usize,
    most: usize,
    /// Of so many tokens one is kept, so that they come from all of the text.
    every: usize,
}

impl LayerSamples {
    /// The inputs, `[tokens, width]`.
    pub(super) fn inputs(&self) -> Result<Vec<f32>, DeviceError> {
        widened(&self.h)
    }

    /// The gates, `[tokens, neurons]`.
    pub(super) fn gates(&self) -> Result<Vec<f32>, DeviceError> {
        widened(&self.gate)
    }
}

fn widened(from: &[f16]) -> Result<Vec<f32>, DeviceError> {
    let mut values = zeros::<f32>(from.len())?;
    values.iter_mut().zip(from).for_each(|(to, from)| *to = from.to_f32());
    Ok(values)
}

/// Samples by layer and expert, within a budget of memory.
pub(super) struct Samples {
    pub layers: Vec<Vec<LayerSamples>>,
}

impl Samples {
    /// At most `bytes` in all, of a text of `tokens` of which each expert sees the share `seen`.
    pub(super) fn new(
        bytes: usize,
        shapes: &[LayerShape],
        tokens: usize,
        seen: f64,
    ) -> Result<Samples, DeviceError> {
        let parts: usize = shapes.iter().map(|shape| shape.experts).sum();
        let mut layers = room(shapes.len())?;
        for shape in shapes {
            let row = 2 * (shape.width + shape.neurons).max(1);
            let most = MOST.min(bytes / parts.max(1) / row).min(tokens);
            let every = ((tokens as f64 * seen).ceil() as usize).div_ceil(most.max(1)).max(1);
            let of = |_| {
                let (h, gate) = (room(most * shape.width)?, room(most * shape.neurons)?);
                Ok(LayerSamples { h, gate, kept: 0, tokens: 0, most, every })
            };
            layers.push((0..shape.experts).map(of).collect::<Result<Vec<LayerSamples>, DeviceError>>()?);
        }
        Ok(Samples { layers })
    }
}

impl GateObserver for Samples {
    fn gate(&mut self, seen: &GateSeen<'_>) {
        let of = self.layers.get_mut(seen.layer).and_then(|experts| experts.get_mut(seen.expert));
        let Some(samples) = of else { return };
        let rows = seen.h.chunks_exact(seen.width).zip(seen.gate.chunks_exact(seen.neurons));
        for ((h, gate), _) in rows.zip(seen.counted).filter(|(_, counted)| **counted) {
            // There is room for `most`, made beforehand.
            if samples.tokens.is_multiple_of(samples.every) && samples.kept < samples.most {
                samples.h.extend(h.iter().map(|value| f16::from_f32(*value)));
                samples.gate.extend(gate.iter().map(|value| f16::from_f32(*value)));
                samples.kept += 1;
            }
            samples.tokens += 1;
        }
    }
}
