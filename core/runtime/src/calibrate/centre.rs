//! The constant of each neuron, and what it costs to leave those out that stray little from it.
//!
//! Leaving a neuron out replaces its gate by its constant, so the best constant is the mean of the values that will be
//! left out, which depends on the cut, which depends on the constants: a few rounds settle it, from the median on.

use super::histogram::Histogram;

/// Share of the gates that the constants are made for.
const DESIGN: f64 = 0.6;
/// Rounds of mean and cut.
const ROUNDS: usize = 4;
/// Bins of the distances of a layer, and how far they reach: a gate that strays further is never left out.
const DISTANCES: usize = 4096;
const REACH: f32 = 2.0;

/// The constants of a layer and what cuts do to it.
#[derive(Clone, Debug)]
pub(super) struct Centres {
    /// c_i, one per neuron.
    pub center: Vec<f32>,
    /// Share of gates that stray less than each distance.
    below: Vec<f64>,
    /// Energy that is lost by leaving those out.
    lost: Vec<f64>,
}

impl Centres {
    /// From the gates of a text. `weight` is what a neuron's gate is worth: the size of what it is multiplied with.
    pub(super) fn new(gates: &Histogram, weight: &[f32]) -> Centres {
        let neurons = gates.neurons();
        let mut centres = Centres {
            center: (0..neurons).map(|n| median(gates.of(n))).collect(),
            below: Vec::new(),
            lost: Vec::new(),
        };
        for _ in 0..ROUNDS {
            centres.distances(gates, weight);
            let cut = centres.cut(DESIGN);
            for (neuron, center) in centres.center.iter_mut().enumerate() {
                let near = gates.of(neuron).filter(|(value, _)| (value - *center).abs() <= cut);
                let (sum, count) = near.fold((0.0, 0.0), |(s, c), (v, n)| (s + f64::from(v) * n, c + n));
                if count > 0.0 {
                    *center = (sum / count) as f32;
                }
            }
        }
        centres.distances(gates, weight);
        centres
    }

    /// Recomputes the distances' distribution and energy.
    fn distances(&mut self, gates: &Histogram, weight: &[f32]) {
        let mut count = vec![0.0; DISTANCES];
        let mut energy = vec![0.0; DISTANCES];
        let mut total = 0.0;
        for (neuron, (center, weight)) in self.center.iter().zip(weight).enumerate() {
            for (value, n) in gates.of(neuron) {
                let distance = (value - center).abs();
                total += n;
                let at = (distance / REACH * DISTANCES as f32) as usize;
                if at < DISTANCES {
                    count[at] += n;
                    energy[at] += n * f64::from(distance * weight).powi(2);
                }
            }
        }
        let running = |values: Vec<f64>, scale: f64| {
            let sums = values.into_iter().scan(0.0, |sum, value| {
                *sum += value;
                Some(*sum * scale)
            });
            sums.collect()
        };
        let scale = if total > 0.0 { 1.0 / total } else { 0.0 };
        self.below = running(count, scale);
        self.lost = running(energy, scale);
    }

    /// The cut that leaves out a share of the gates.
    pub(super) fn cut(&self, share: f64) -> f32 {
        let at = self.below.partition_point(|below| *below < share);
        REACH * (at + 1).min(DISTANCES) as f32 / DISTANCES as f32
    }

    /// The energy lost by leaving out a share of the gates.
    pub(super) fn lost(&self, share: f64) -> f64 {
        let at = self.below.partition_point(|below| *below < share);
        self.lost.get(at).or(self.lost.last()).copied().unwrap_or(0.0)
    }
}

fn median(values: impl Iterator<Item = (f32, f64)> + Clone) -> f32 {
    let half: f64 = values.clone().map(|(_, n)| n).sum::<f64>() / 2.0;
    let mut seen = 0.0;
    for (value, n) in values {
        seen += n;
        if seen >= half {
            return value;
        }
    }
    0.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_constant_is_where_most_values_lie() {
        let mut gates = Histogram::new(2);
        for i in 0..1000 {
            let first = if i % 10 == 0 { 3.0 } else { -0.2 + 0.00002 * i as f32 };
            gates.add([first, 0.1].into_iter());
        }
        let centres = Centres::new(&gates, &[1.0, 1.0]);
        assert!((centres.center[0] + 0.19).abs() < 0.01, "{}", centres.center[0]);
        assert!((centres.center[1] - 0.1).abs() < 0.003);
        assert!(centres.cut(0.9) < 0.02 && centres.lost(0.9) < 1e-4);
        assert!(centres.cut(0.99) >= REACH - 0.01);
    }
}
