//! Top-p over a long list, without sorting it.
//!
//! Weights are gathered in bins by the distance of their logit to the maximum; only the bin in which the limit falls is
//! sorted.

use super::select::{Candidate, by_rank};

const BINS: usize = 2048;

/// Bins per unit of a logit.
const PER_UNIT: f32 = 64.0;

/// How many weights, from the first on, reach `goal`; all if they never do, and at least one.
pub(super) fn count(weights: &[f32], goal: f64) -> usize {
    let mut left = goal;
    let enough = weights.iter().position(|&weight| {
        left -= f64::from(weight);
        left <= 0.0
    });
    enough.map_or(weights.len(), |at| at + 1)
}

/// Keeps the fewest candidates, likeliest first, whose weights reach `goal`; the order stays. `weights` has one per
/// token of the vocabulary; `bins` and `edge` are memory to use.
pub(super) fn keep(
    candidates: &mut Vec<Candidate>,
    max: f32,
    goal: f64,
    weights: &[f32],
    bins: &mut Vec<f64>,
    edge: &mut Vec<Candidate>,
) {
    let bin = |candidate: &Candidate| (((max - candidate.1) * PER_UNIT) as usize).min(BINS - 1);
    let weight_of = |candidate: &Candidate| weights.get(candidate.0 as usize).map_or(0.0, |&w| f64::from(w));
    bins.clear();
    bins.resize(BINS, 0.0);
    for candidate in candidates.iter() {
        bins[bin(candidate)] += weight_of(candidate);
    }
    let mut left = goal;
    let Some(last) = bins.iter().position(|&weight| {
        let reached = weight >= left;
        left -= if reached { 0.0 } else { weight };
        reached
    }) else {
        return;
    };
    edge.clear();
    edge.extend(candidates.iter().filter(|candidate| bin(candidate) == last));
    edge.sort_unstable_by(by_rank);
    let enough = edge.iter().find(|candidate| {
        left -= weight_of(candidate);
        left <= 0.0
    });
    if let Some(&(id, logit)) = enough.or(edge.last()) {
        candidates.retain(|candidate| candidate.1 > logit || (candidate.1 == logit && candidate.0 <= id));
    }
}

#[cfg(test)]
mod tests {
    use super::super::maths::exp;
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn keeps_what_sorting_would_keep(
            logits in prop::collection::vec(-40.0f32..0.0, 1..200),
            top_p in 0.01f64..0.99,
        ) {
            let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let mut all: Vec<Candidate> = logits.iter().enumerate().map(|(id, &l)| (id as u32, l)).collect();
            let mut sorted = all.clone();
            sorted.sort_by(by_rank);
            let weights: Vec<f32> = sorted.iter().map(|c| exp(c.1 - max)).collect();
            let by_id: Vec<f32> = logits.iter().map(|&l| exp(l - max)).collect();
            let goal = top_p * weights.iter().map(|&w| f64::from(w)).sum::<f64>();
            sorted.truncate(count(&weights, goal));
            sorted.sort_by_key(|c| c.0);
            keep(&mut all, max, goal, &by_id, &mut Vec::new(), &mut Vec::new());
            prop_assert_eq!(all, sorted);
        }
    }
}
