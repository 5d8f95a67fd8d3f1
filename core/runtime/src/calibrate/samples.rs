//! Some tokens' inputs and gates of every layer: what predictors are fitted to and judged by.

use half::f16;

use crate::predict::{GateObserver, GateSeen};

/// Most tokens kept of a layer or expert.
const MOST: usize = 1024;
/// Of the tokens of a text, every so many are looked at, so that all of it is.
const EVERY: usize = 7;

/// Tokens of one layer or expert. Kept in half precision: they are many.
#[derive(Clone, Debug, Default)]
pub(super) struct LayerSamples {
    h: Vec<f16>,
    gate: Vec<f16>,
    pub tokens: usize,
}

impl LayerSamples {
    /// The inputs, `[tokens, width]`.
    pub(super) fn inputs(&self) -> Vec<f32> {
        self.h.iter().map(|value| value.to_f32()).collect()
    }

    /// The gates, `[tokens, neurons]`.
    pub(super) fn gates(&self) -> Vec<f32> {
        self.gate.iter().map(|value| value.to_f32()).collect()
    }
}

/// Samples by layer and expert, within a budget of memory.
pub(super) struct Samples {
    budget: usize,
    pub layers: Vec<Vec<LayerSamples>>,
}

impl Samples {
    /// At most `bytes` in all, for `parts` layers or experts.
    pub(super) fn new(bytes: usize, parts: usize) -> Samples {
        Samples { budget: bytes / parts.max(1), layers: Vec::new() }
    }
}

impl GateObserver for Samples {
    fn gate(&mut self, seen: &GateSeen<'_>) {
        if self.layers.len() <= seen.layer {
            self.layers.resize_with(seen.layer + 1, Vec::new);
        }
        let experts = &mut self.layers[seen.layer];
        if experts.len() <= seen.expert {
            experts.resize_with(seen.expert + 1, LayerSamples::default);
        }
        let samples = &mut experts[seen.expert];
        let most = MOST.min(self.budget / (2 * (seen.width + seen.neurons)).max(1));
        let rows = seen.h.chunks_exact(seen.width).zip(seen.gate.chunks_exact(seen.neurons));
        for ((h, gate), _) in rows.zip(seen.counted).filter(|(_, counted)| **counted).step_by(EVERY) {
            if samples.tokens >= most {
                return;
            }
            samples.h.extend(h.iter().map(|value| f16::from_f32(*value)));
            samples.gate.extend(gate.iter().map(|value| f16::from_f32(*value)));
            samples.tokens += 1;
        }
    }
}
