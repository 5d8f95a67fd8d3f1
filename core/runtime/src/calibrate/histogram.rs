//! How a neuron's activated gate is distributed over a text, in little memory.
//!
//! SiLU and GELU have a trough a little below zero, in which most values lie, and a long tail above. So the bins are even
//! up to 0.36 and grow by a constant factor beyond. A count takes two bytes: a model of 7B parameters has half a million
//! neurons.

use neuropil_device::DeviceError;

use super::memory::zeros;

/// Where the bins begin; SiLU's least value is -0.2785.
const LOW: f32 = -0.28;
/// Width of the even bins.
const STEP: f32 = 0.004;
/// Even bins.
const EVEN: usize = 160;
/// Bins that grow.
const GROWING: usize = 96;
/// Bins of a neuron.
pub(super) const BINS: usize = EVEN + GROWING;
/// Where growth begins.
const KNEE: f32 = LOW + STEP * EVEN as f32;
/// ln of the factor by which a bin's end is larger than its start, so that the last one ends at 64.
const LN_GROWTH: f32 = 0.053_96;

/// The bin of a value; NaN goes to the last.
pub(super) fn bin(value: f32) -> usize {
    let at = if value < KNEE { (value - LOW) / STEP } else { EVEN as f32 + (value / KNEE).ln() / LN_GROWTH };
    // A cast saturates, and takes NaN to 0.
    if at.is_nan() { BINS - 1 } else { (at as usize).min(BINS - 1) }
}

/// The middle of a bin.
pub(super) fn value(bin: usize) -> f32 {
    if bin < EVEN {
        LOW + STEP * (bin as f32 + 0.5)
    } else {
        KNEE * (LN_GROWTH * ((bin - EVEN) as f32 + 0.5)).exp()
    }
}

/// The neurons of one layer.
#[derive(Clone, Debug)]
pub(super) struct Histogram {
    counts: Vec<u16>,
}

/// Most tokens that a histogram counts.
pub(super) const MOST: usize = u16::MAX as usize;

impl Histogram {
    pub(super) fn new(neurons: usize) -> Result<Histogram, DeviceError> {
        Ok(Histogram { counts: zeros(neurons.saturating_mul(BINS))? })
    }

    pub(super) fn neurons(&self) -> usize {
        self.counts.len() / BINS
    }

    /// Counts the activated gates of one token.
    pub(super) fn add(&mut self, values: impl Iterator<Item = f32>) {
        for (counts, value) in self.counts.chunks_exact_mut(BINS).zip(values) {
            let count = &mut counts[bin(value)];
            *count = count.saturating_add(1);
        }
    }

    /// The counts of a neuron with the values that they stand for.
    pub(super) fn of(&self, neuron: usize) -> impl Iterator<Item = (f32, f64)> + Clone {
        let counts = self.counts.get(neuron * BINS..(neuron + 1) * BINS).unwrap_or_default();
        counts.iter().enumerate().filter(|(_, n)| **n > 0).map(|(bin, n)| (value(bin), f64::from(*n)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_lies_in_its_bin() {
        for at in 0..BINS {
            assert_eq!(bin(value(at)), at);
        }
        assert_eq!((bin(-1.0), bin(-0.2785), bin(1e9), bin(f32::NAN)), (0, 0, BINS - 1, BINS - 1));
        assert!((value(BINS - 1) - 62.3).abs() < 1.0);
    }
}
