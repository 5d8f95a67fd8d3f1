//! How often neurons fire, and how alike adjacent tokens are.
//!
//! Firing frequencies are logit-normal: logit(p_i) ~ N(mu, sigma). A neuron fires when a normal value exceeds
//! Φ⁻¹(1 − p_i), and that value of one token and of the next have a correlation c, which is a number of the whole model.
//! sigma makes the skew between hot and cold neurons, c the overlap of adjacent tokens. What is asked for is a mean
//! frequency and an overlap; mu and c follow from them.
//!
//! Of a dReLU model a neuron fires when gate and up are both positive. The two are independent; up is positive nearly
//! as often as not to matter (`UP_LEAST` and more), as the co-firing of 80 % that PowerInfer-2 reports.

use super::SynthError;
use super::normal::{bisect, both_above, probit};

/// The rarest up value of dReLU is positive so often.
const UP_LEAST: f64 = 0.8;

/// Points at which a distribution of frequencies is summed.
const POINTS: usize = 400;

/// Shares of active neurons that can be asked for.
pub(super) const ACTIVE: [f64; 2] = [0.002, 0.9];

/// A way of firing.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Preset {
    /// Its name on the command line.
    pub name: &'static str,
    /// Share of active neurons where none is asked for.
    pub active: f64,
    /// Overlap of adjacent tokens where none is asked for.
    pub overlap: f64,
    /// Standard deviation of logit(p) in the first third of the layers, and in the others: real models are more
    /// skewed in their later layers.
    pub(super) sigma: [f64; 2],
    /// Share of the stream that belongs to the sequence.
    pub(super) topic: f64,
    /// Share of the stream that belongs to the token alone.
    pub(super) white: f64,
}

/// Every preset: the figures of the PowerInfer papers, and those that a small real model gives.
pub const PRESETS: [Preset; 2] = [
    Preset { name: "paper", active: 0.10, overlap: 0.84, sigma: [1.6, 2.3], topic: 0.2, white: 0.02 },
    Preset { name: "smollm2", active: 0.10, overlap: 0.41, sigma: [0.45, 1.35], topic: 0.0, white: 0.1 },
];

impl Preset {
    /// The preset of that name.
    ///
    /// # Errors
    /// [`SynthError::Preset`], which lists the names.
    pub fn named(name: &str) -> Result<Preset, SynthError> {
        PRESETS.into_iter().find(|preset| preset.name == name).ok_or_else(|| SynthError::Preset {
            found: name.into(),
            known: PRESETS.map(|preset| preset.name).join(" "),
        })
    }
}

/// How often one neuron fires, and its gate and up value are positive. Without dReLU, `up` does not matter.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Frequency {
    pub both: f64,
    pub gate: f64,
    pub up: f64,
}

/// The distribution of the frequencies in one layer.
#[derive(Clone, Debug)]
pub(super) struct Frequencies {
    mu: f64,
    sigma: f64,
    drelu: bool,
    /// Some neurons, evenly spread: how often each fires, and the thresholds of its gate and up.
    points: Vec<(f64, [f64; 2])>,
}

impl Frequencies {
    /// The distribution with this mean. `grid` holds the places of the points.
    fn new(active: f64, sigma: f64, drelu: bool, grid: &[f64]) -> Frequencies {
        let mean = |mu: f64| grid.iter().map(|x| logistic(mu + sigma * x)).sum::<f64>() / grid.len() as f64;
        let mu = bisect([-30.0, 30.0], |mu| mean(mu) < active);
        let mut frequencies = Frequencies { mu, sigma, drelu, points: Vec::new() };
        let point = |x: &f64| {
            let f = frequencies.of(*x);
            (f.both, [probit(1.0 - f.gate), probit(1.0 - f.up)])
        };
        frequencies.points = grid.iter().map(point).collect();
        frequencies
    }

    /// The frequency of a neuron whose logit is so many deviations above the mean.
    fn of(&self, x: f64) -> Frequency {
        let both = logistic(self.mu + self.sigma * x);
        match self.drelu {
            false => Frequency { both, gate: both, up: 0.5 },
            true => {
                let up = UP_LEAST + (1.0 - UP_LEAST) * both;
                Frequency { both, gate: both / up, up }
            }
        }
    }

    /// The frequency of the neuron at position `position` of `neurons`, the hottest first.
    pub(super) fn at(&self, position: usize, neurons: usize) -> Frequency {
        self.of(place(position, neurons))
    }

    /// The share of what fires that also fires in a set whose gate values have correlation `gate` with it, and whose up
    /// values have correlation `up`.
    fn shared(&self, gate: f64, up: f64) -> f64 {
        let (mut shared, mut all) = (0.0, 0.0);
        for (both, [gate_threshold, up_threshold]) in &self.points {
            let ups = if self.drelu { both_above(*up_threshold, up) } else { 1.0 };
            shared += both_above(*gate_threshold, gate) * ups;
            all += both;
        }
        shared / all
    }
}

fn logistic(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

/// How many deviations above the mean the neuron at a position is, the highest first.
fn place(position: usize, neurons: usize) -> f64 {
    probit(1.0 - (position as f64 + 0.5) / neurons as f64)
}

/// The firing of a whole model.
#[derive(Clone, Debug)]
pub(super) struct Firing {
    /// Of the first third of the layers, and of the others.
    groups: [Frequencies; 2],
    /// Layers of the first group, and all.
    first: usize,
    layers: usize,
}

impl Firing {
    /// The firing of a model of `layers` layers with this share of active neurons.
    pub(super) fn new(
        preset: &Preset,
        active: f64,
        layers: usize,
        drelu: bool,
    ) -> Result<Firing, SynthError> {
        if !(ACTIVE[0]..=ACTIVE[1]).contains(&active) {
            let wanted = format!("{} to {}", ACTIVE[0], ACTIVE[1]);
            return Err(SynthError::Range { what: "the share of active neurons", found: active, wanted });
        }
        let grid: Vec<f64> = (0..POINTS).map(|i| place(i, POINTS)).collect();
        let groups = preset.sigma.map(|sigma| Frequencies::new(active, sigma, drelu, &grid));
        Ok(Firing { groups, first: layers / 3, layers })
    }

    /// The frequencies of a layer.
    pub(super) fn layer(&self, layer: usize) -> &Frequencies {
        &self.groups[usize::from(layer >= self.first)]
    }

    fn mean(&self, of: impl Fn(&Frequencies) -> f64) -> f64 {
        let share = self.first as f64 / self.layers as f64;
        let first = if self.first == 0 { 0.0 } else { of(&self.groups[0]) };
        share * first + (1.0 - share) * of(&self.groups[1])
    }

    /// The overlap of adjacent tokens whose streams have this cosine.
    pub(super) fn overlap(&self, cosine: f64) -> f64 {
        self.mean(|group| group.shared(cosine, cosine))
    }

    /// The cosine that gives an overlap.
    pub(super) fn cosine(&self, overlap: f64) -> Result<f64, SynthError> {
        let range = [self.overlap(0.0), self.overlap(MOST_COSINE)];
        if !(range[0] < overlap && overlap <= range[1]) {
            let wanted = format!(
                "{:.3} (what independent tokens have here) to {:.3}",
                range[0] + 5e-4,
                range[1] - 5e-4
            );
            return Err(SynthError::Range { what: "the overlap", found: overlap, wanted });
        }
        Ok(bisect([0.0, MOST_COSINE], |cosine| self.overlap(cosine) < overlap))
    }

    /// The recall of a predictor that knows the gate with this correlation.
    fn recall_of(&self, correlation: f64) -> f64 {
        self.mean(|group| group.shared(correlation, 1.0))
    }

    /// How well a predictor must know the gate for this recall.
    pub(super) fn correlation(&self, recall: f64) -> Result<f64, SynthError> {
        let range = [self.recall_of(0.0), self.recall_of(MOST_CORRELATION)];
        if !(range[0] < recall && recall <= range[1]) {
            let wanted = format!("{:.3} (what guessing has) to {:.3}", range[0] + 5e-4, range[1] - 5e-4);
            return Err(SynthError::Range { what: "the recall", found: recall, wanted });
        }
        Ok(bisect([0.0, MOST_CORRELATION], |correlation| self.recall_of(correlation) < recall))
    }
}

/// Streams of adjacent tokens are never more alike.
const MOST_COSINE: f64 = 0.98;

/// No predictor knows more of the gate: something is left to the columns that it does not see.
const MOST_CORRELATION: f64 = 0.999_9;

/// The threshold that a normal value exceeds with probability `p`.
pub(super) fn threshold(p: f64) -> f64 {
    probit(1.0 - p).clamp(-5.5, 5.5)
}

/// The probability that one of `count` independent tokens fires a neuron of frequency `p`.
pub(super) fn union(p: f64, count: usize) -> f64 {
    1.0 - (1.0 - p).powi(count as i32)
}

#[cfg(test)]
mod tests {
    use super::super::normal::cumulative;
    use super::*;

    fn firing(preset: usize, drelu: bool) -> Firing {
        Firing::new(&PRESETS[preset], 0.1, 30, drelu).unwrap()
    }

    #[test]
    fn a_layer_has_the_mean_that_was_asked_for_hottest_first() {
        for drelu in [false, true] {
            for layer in [0, 20] {
                let firing = firing(0, drelu);
                let frequencies = firing.layer(layer);
                let all: Vec<f64> = (0..5000).map(|i| frequencies.at(i, 5000).both).collect();
                assert!(all.is_sorted_by(|a, b| a >= b));
                assert!((all.iter().sum::<f64>() / 5000.0 - 0.1).abs() < 1e-3);
            }
        }
    }

    #[test]
    fn the_hot_half_of_the_paper_holds_nearly_all() {
        let share = |frequencies: &Frequencies| {
            let hot: f64 = (0..500).map(|i| frequencies.at(i, 1000).both).sum();
            hot / (0..1000).map(|i| frequencies.at(i, 1000).both).sum::<f64>()
        };
        let paper = firing(0, false).mean(share);
        assert!((0.93..0.97).contains(&paper), "{paper}");
        let smollm2 = firing(1, false).mean(share);
        assert!((0.75..0.85).contains(&smollm2), "{smollm2}");
    }

    #[test]
    fn overlap_and_recall_grow_with_what_they_depend_on() {
        for drelu in [false, true] {
            let firing = firing(1, drelu);
            let cosine = firing.cosine(0.41).unwrap();
            assert!((firing.overlap(cosine) - 0.41).abs() < 1e-6);
            assert!(firing.overlap(0.2) < firing.overlap(0.8));
            let correlation = firing.correlation(0.9).unwrap();
            assert!((firing.recall_of(correlation) - 0.9).abs() < 1e-6);
        }
        for (overlap, word) in [(0.01, "independent"), (0.9999, "overlap")] {
            assert!(firing(0, false).cosine(overlap).unwrap_err().to_string().contains(word));
        }
        assert!(Firing::new(&PRESETS[0], 1.5, 3, false).is_err());
        assert!(Firing::new(&PRESETS[0], f64::NAN, 3, false).is_err());
    }

    #[test]
    fn unions_of_tokens() {
        assert!((union(0.1, 2) - 0.19).abs() < 1e-12);
        assert!(threshold(0.0) <= 5.5 && cumulative(-threshold(0.3)) - 0.3 < 1e-9);
    }
}
