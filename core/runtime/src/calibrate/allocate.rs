//! How much of each layer to leave out, so that the whole loses as little as it must.
//!
//! A layer's loss grows with the energy that it leaves out, in a way that its gates tell; how much of it reaches the
//! output was measured once per layer, at one share. Layers then get the shares at which one more neuron costs the same
//! everywhere.

use super::centre::Centres;

/// The share at which a layer's cost is measured.
pub(super) const PROBE: f64 = 0.7;
/// Shares that a layer can get.
const STEPS: usize = 96;
const MOST: f64 = 0.96;

/// The shares of all layers at a price: what one more share of neurons may cost in nats.
pub(super) fn shares(layers: &[Centres], probe_cost: &[f64], price: f64) -> Vec<f64> {
    let share = |(layer, cost): (&Centres, &f64)| {
        let scale = cost.max(0.0) / layer.lost(PROBE).max(f64::MIN_POSITIVE);
        let gain = |step: usize| {
            let share = MOST * step as f64 / STEPS as f64;
            price * share - scale * layer.lost(share)
        };
        let best = (0..=STEPS).max_by(|a, b| gain(*a).total_cmp(&gain(*b))).unwrap_or(0);
        MOST * best as f64 / STEPS as f64
    };
    layers.iter().zip(probe_cost).map(share).collect()
}

/// The shares whose mean is `target`.
pub(super) fn shares_of_mean(layers: &[Centres], probe_cost: &[f64], target: f64) -> Vec<f64> {
    let (mut low, mut high) = (1e-9f64, 1e3f64);
    for _ in 0..60 {
        let price = (low * high).sqrt();
        if mean(&shares(layers, probe_cost, price)) < target { low = price } else { high = price }
    }
    shares(layers, probe_cost, high)
}

pub(super) fn mean(shares: &[f64]) -> f64 {
    shares.iter().sum::<f64>() / shares.len().max(1) as f64
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::calibrate::histogram::Histogram;

    #[test]
    fn a_layer_that_costs_more_keeps_more() {
        let mut gates = Histogram::new(1);
        (0..2000).for_each(|i| gates.add(std::iter::once(0.0005 * i as f32)));
        let centres = Centres::new(&gates, &[1.0]);
        let layers = [centres.clone(), centres];
        let shares = shares_of_mean(&layers, &[0.1, 0.01], 0.5);
        assert!(shares[0] < shares[1] && (mean(&shares) - 0.5).abs() < 0.03, "{shares:?}");
    }
}
