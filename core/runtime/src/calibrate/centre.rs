//! The constant of each neuron, and what it costs to leave those out that stray little from it.
//!
//! Leaving a neuron out replaces its gate by its constant, so the best constant is the mean of the values that will be
//! left out, which depends on the cut, which depends on the constants: a few rounds settle it, from the median on.

use neuropil_device::DeviceError;

use super::histogram::Histogram;
use super::memory::zeros;

/// Share of the gates that the constants are made for.
const DESIGN: f64 = 0.6;
/// Rounds of mean and cut.
const ROUNDS: usize = 4;
/// Bins of the distances of a layer, and how far they reach: a gate that strays further is never left out.
const BINS: usize = 4096;
const REACH: f32 = 2.0;

/// The constants of a layer or expert, and how its gates stray from them.
#[derive(Clone, Debug)]
pub(super) struct Centres {
    /// c_i, one per neuron.
    pub center: Vec<f32>,
    pub distances: Distances,
}

impl Centres {
    /// From the gates of a text. `weight` is what a neuron's gate is worth: the size of what it is multiplied with.
    pub(super) fn new(gates: &Histogram, weight: &[f32]) -> Result<Centres, DeviceError> {
        let mut center = zeros::<f32>(gates.neurons())?;
        center.iter_mut().enumerate().for_each(|(neuron, center)| *center = median(gates.of(neuron)));
        for _ in 0..ROUNDS {
            let cut = Curve::new(&Distances::new(gates, &center, weight)).cut(DESIGN);
            for (neuron, center) in center.iter_mut().enumerate() {
                let near = gates.of(neuron).filter(|(value, _)| (value - *center).abs() <= cut);
                let (sum, count) = near.fold((0.0, 0.0), |(s, c), (v, n)| (s + f64::from(v) * n, c + n));
                if count > 0.0 {
                    *center = (sum / count) as f32;
                }
            }
        }
        let distances = Distances::new(gates, &center, weight);
        Ok(Centres { center, distances })
    }
}

/// How far gates stray, and what energy those at each distance have. Sums, so that experts can be taken together.
#[derive(Clone, Debug)]
pub(super) struct Distances {
    count: Vec<f64>,
    energy: Vec<f64>,
    total: f64,
}

impl Distances {
    fn new(gates: &Histogram, center: &[f32], weight: &[f32]) -> Distances {
        let mut all = Distances { count: vec![0.0; BINS], energy: vec![0.0; BINS], total: 0.0 };
        for (neuron, (center, weight)) in center.iter().zip(weight).enumerate() {
            for (value, n) in gates.of(neuron) {
                let distance = (value - center).abs();
                all.total += n;
                let at = (distance / REACH * BINS as f32) as usize;
                if let (Some(count), Some(energy)) = (all.count.get_mut(at), all.energy.get_mut(at)) {
                    *count += n;
                    *energy += n * f64::from(distance * weight).powi(2);
                }
            }
        }
        all
    }

    /// Adds those of another expert.
    fn add(&mut self, other: &Distances) {
        self.count.iter_mut().zip(&other.count).for_each(|(sum, n)| *sum += n);
        self.energy.iter_mut().zip(&other.energy).for_each(|(sum, n)| *sum += n);
        self.total += other.total;
    }
}

/// What cuts do to a layer.
#[derive(Clone, Debug)]
pub(super) struct Curve {
    /// Share of gates that stray less than each distance.
    below: Vec<f64>,
    /// Energy that is lost by leaving those out.
    lost: Vec<f64>,
}

impl Curve {
    fn new(distances: &Distances) -> Curve {
        let scale = if distances.total > 0.0 { 1.0 / distances.total } else { 0.0 };
        let running = |values: &[f64]| {
            let sums = values.iter().scan(0.0, |sum, value| {
                *sum += value;
                Some(*sum * scale)
            });
            sums.collect()
        };
        Curve { below: running(&distances.count), lost: running(&distances.energy) }
    }

    /// Of a layer, whose experts share a cut.
    pub(super) fn of(experts: &[Centres]) -> Curve {
        let mut sum = Distances { count: vec![0.0; BINS], energy: vec![0.0; BINS], total: 0.0 };
        experts.iter().for_each(|expert| sum.add(&expert.distances));
        Curve::new(&sum)
    }

    /// The cut that leaves out a share of the gates.
    pub(super) fn cut(&self, share: f64) -> f32 {
        let at = self.below.partition_point(|below| *below < share);
        REACH * (at + 1).min(BINS) as f32 / BINS as f32
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
        let mut gates = Histogram::new(2).unwrap();
        for i in 0..1000 {
            let first = if i % 10 == 0 { 3.0 } else { -0.2 + 0.00002 * i as f32 };
            gates.add([first, 0.1].into_iter());
        }
        let centres = Centres::new(&gates, &[1.0, 1.0]).unwrap();
        let curve = Curve::of(std::slice::from_ref(&centres));
        assert!((centres.center[0] + 0.19).abs() < 0.01, "{}", centres.center[0]);
        assert!((centres.center[1] - 0.1).abs() < 0.003);
        assert!(curve.cut(0.9) < 0.02 && curve.lost(0.9) < 1e-4);
        assert!(curve.cut(0.99) >= REACH - 0.01);
    }
}
