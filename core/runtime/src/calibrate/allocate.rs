//! How much of each layer to leave out, so that the whole loses as little as it must.
//!
//! A layer's loss grows with the energy that it leaves out, in a way that its gates tell; how much of it reaches the
//! output was measured once per layer, at one share. Layers then get the shares at which one more neuron costs the same
//! everywhere.

use super::centre::Curve;

/// The share at which a layer's cost is measured.
pub(super) const PROBE: f64 = 0.7;
/// Shares that a layer can get.
const STEPS: usize = 96;
const MOST: f64 = 0.96;

/// What a unit of a layer's lost energy costs; none where what was measured says nothing.
fn scale(layer: &Curve, probe_cost: f64) -> Option<f64> {
    let lost = layer.lost(PROBE);
    (lost > 0.0 && probe_cost.is_finite()).then(|| probe_cost.max(0.0) / lost)
}

/// The shares of all layers at a price: what one more share of neurons may cost in nats.
pub(super) fn shares(layers: &[Curve], probe_cost: &[f64], price: f64) -> Vec<f64> {
    let share = |(layer, cost): (&Curve, &f64)| {
        let Some(scale) = scale(layer, *cost) else {
            // Without energy up to the probe that much is free; what more costs is not known.
            return if cost.is_finite() && price > 0.0 { PROBE } else { 0.0 };
        };
        let gain = |step: usize| {
            let share = MOST * step as f64 / STEPS as f64;
            price * share - scale * layer.lost(share)
        };
        let better = |best: usize, step: usize| if gain(step) > gain(best) { step } else { best };
        MOST * (1..=STEPS).fold(0, better) as f64 / STEPS as f64
    };
    layers.iter().zip(probe_cost).map(share).collect()
}

/// What these shares should cost in all, in nats.
pub(super) fn predicted(layers: &[Curve], probe_cost: &[f64], shares: &[f64]) -> f64 {
    let cost = |((layer, cost), share): ((&Curve, &f64), &f64)| {
        if *share > 0.0 { scale(layer, *cost).unwrap_or(0.0) * layer.lost(*share) } else { 0.0 }
    };
    layers.iter().zip(probe_cost).zip(shares).map(cost).sum()
}

/// The highest price at which leaving out should cost no more than `nats`.
pub(super) fn price_of(layers: &[Curve], probe_cost: &[f64], nats: f64) -> f64 {
    let (mut low, mut high) = (1e-9f64, 1e3f64);
    for _ in 0..40 {
        let price = (low * high).sqrt();
        let cost = predicted(layers, probe_cost, &shares(layers, probe_cost, price));
        if cost <= nats { low = price } else { high = price }
    }
    low
}

/// The shares whose mean is `target`.
pub(super) fn shares_of_mean(layers: &[Curve], probe_cost: &[f64], target: f64) -> Vec<f64> {
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
    use crate::calibrate::centre::Centres;
    use crate::calibrate::histogram::Histogram;

    fn curve() -> Curve {
        let mut gates = Histogram::new(1).unwrap();
        (0..2000).for_each(|i| gates.add(std::iter::once(0.0005 * i as f32)));
        Curve::of(&[Centres::new(&gates, &[1.0]).unwrap()])
    }

    #[test]
    fn a_layer_that_costs_more_keeps_more() {
        let layers = [curve(), curve()];
        let shares = shares_of_mean(&layers, &[0.1, 0.01], 0.5);
        assert!(shares[0] < shares[1] && (mean(&shares) - 0.5).abs() < 0.03, "{shares:?}");
    }

    #[test]
    fn a_price_keeps_to_what_it_may_cost() {
        let layers = [curve(), curve()];
        let costs = [0.1, 0.01];
        let cheap = shares(&layers, &costs, price_of(&layers, &costs, 0.01));
        let spent = predicted(&layers, &costs, &cheap);
        assert!((0.005..=0.01).contains(&spent), "{spent}");
    }

    #[test]
    fn a_layer_that_tells_nothing_is_left_alone_or_cut_as_measured() {
        let mut still = Histogram::new(1).unwrap();
        (0..100).for_each(|_| still.add(std::iter::once(-0.2)));
        let still = Curve::of(&[Centres::new(&still, &[0.0]).unwrap()]);
        let layers = [curve(), curve(), still];
        let shares = shares(&layers, &[f64::NAN, f64::INFINITY, 0.1], 1.0);
        assert_eq!(shares, [0.0, 0.0, PROBE]);
    }
}
