//! A layer of experts: a router gives every token a few of them and says what each counts.
//!
//! Choosing and computing are two calls, because the choice may be known long before the input is
//! (see [`super::smallthinker`]). Experts compute one after the other, each the tokens that chose it as one small batch,
//! and a token's sum takes them in ascending order. So its bits depend on nothing but itself.

use std::mem;

use neuropil_device::{Activation, Buffer, MatmulJob, math};

use crate::engine::EngineError;
use crate::pipeline::{Choice, Decided, ExpertScratch, FfnInput, Scratch};
use crate::submit::Placed;

use super::ModelError;
use super::ffn::Ffn;
use super::frame::product;
use super::load::Loader;
use super::spec::{ExpertSpec, Gating};

/// The least that the chosen weights are divided by, the smallest normal half: weights that are next to nothing stay so.
const LEAST_SUM: f32 = 6.103_515_6e-5;

/// The experts of one layer.
pub(crate) struct Experts {
    spec: ExpertSpec,
    width: usize,
    router: Placed,
    /// By index.
    experts: Vec<Ffn>,
}

impl Experts {
    /// Loads those of layer `index`.
    pub(crate) fn load(
        spec: ExpertSpec,
        width: usize,
        index: usize,
        loader: &mut Loader<'_>,
    ) -> Result<Experts, ModelError> {
        let router = loader.matrix(&format!("blk.{index}.ffn_gate_inp.weight"), spec.count, width)?;
        let names = ["gate", "up", "down"].map(|part| format!("blk.{index}.ffn_{part}_exps.weight"));
        let [gate, up, down] = &names;
        let mut experts = Vec::new();
        for expert in 0..spec.count {
            let place = Some((expert, spec.count));
            experts.push(loader.ffn(index, place, [gate, up, down], spec.neurons, width)?);
        }
        Ok(Experts { spec, width, router, experts })
    }

    /// Chooses the experts of `tokens` rows of `input`, `[tokens, width]`, and leaves the choice in `scratch`, where
    /// [`Experts::forward`] finds it.
    pub(crate) fn route(
        &self,
        tokens: usize,
        input: &Buffer,
        scratch: &mut Scratch,
    ) -> Result<(), EngineError> {
        let logits = product(&self.router.weight, scratch.experts.logits.write()?, false);
        scratch.jobs.matmul(&*self.router.device, MatmulJob::new(tokens, input.read()?).with(logits))?;
        let ExpertScratch { logits, choices, .. } = &mut scratch.experts;
        choices.clear();
        for row in logits.read()?.slice::<f32>().chunks_exact(self.spec.count).take(tokens) {
            choose(&self.spec, row, choices);
        }
        Ok(())
    }

    /// Starts to read what the chosen experts need, so that it comes while attention computes.
    pub(crate) fn fetch(&self, tokens: usize, scratch: &mut Scratch) -> Result<(), EngineError> {
        for (index, expert) in self.experts.iter().enumerate() {
            let of = scratch.experts.choices.chunks_exact(self.spec.used).take(tokens);
            let served = of.filter(|choices| choices.iter().any(|choice| choice.expert == index)).count();
            if served > 0 {
                expert.fetch(served, scratch)?;
            }
        }
        Ok(())
    }

    /// Computes the chosen experts.
    pub(crate) fn forward(
        &self,
        activation: Activation,
        input: &FfnInput<'_>,
        scratch: &mut Scratch,
    ) -> Result<(), EngineError> {
        let len = input.tokens * self.width;
        scratch.experts.sum.write()?.slice_mut::<f32>()[..len].fill(0.0);
        let mut begun = mem::take(&mut scratch.experts.begun);
        let computed = self.compute(activation, input, scratch, &mut begun);
        for (expert, decided) in self.experts.iter().zip(begun.drain(..)) {
            expert.abandon(decided, scratch);
        }
        scratch.experts.begun = begun;
        computed?;
        let sum = scratch.experts.sum.read()?;
        let mut y = input.y.write()?;
        let y = &mut y.slice_mut::<f32>()[..len];
        if input.accumulate {
            y.iter_mut().zip(sum.slice::<f32>()).for_each(|(y, sum)| *y += sum);
        } else {
            y.copy_from_slice(&sum.slice()[..len]);
        }
        Ok(())
    }

    /// Adds up the experts' weighted results. What was decided and not computed is left in `begun`.
    fn compute(
        &self,
        activation: Activation,
        input: &FfnInput<'_>,
        scratch: &mut Scratch,
        begun: &mut Vec<Option<Decided>>,
    ) -> Result<(), EngineError> {
        // All experts start to read before the first computes, as far as there is room.
        let mut room = true;
        for (index, expert) in self.experts.iter().enumerate() {
            let mut decided = None;
            if room && expert.reads() && self.gather(index, input, &mut scratch.experts)? {
                decided = served(scratch, |own, scratch| expert.begin(activation, own, scratch))?;
                room = decided.as_ref().is_none_or(Decided::leaves_room);
            }
            begun.push(decided);
        }
        for (index, expert) in self.experts.iter().enumerate() {
            if self.gather(index, input, &mut scratch.experts)? {
                let decided = begun.get_mut(index).and_then(Option::take);
                served(scratch, |own, scratch| expert.finish(decided, activation, own, scratch))?;
                self.scatter(&scratch.experts)?;
            }
        }
        Ok(())
    }

    /// Puts the rows of the tokens that chose expert `index` together; whether there are any.
    fn gather(
        &self,
        index: usize,
        input: &FfnInput<'_>,
        scratch: &mut ExpertScratch,
    ) -> Result<bool, EngineError> {
        let ExpertScratch { choices, served, predict, h, x, .. } = scratch;
        let of_tokens = choices.chunks_exact(self.spec.used).take(input.tokens).enumerate();
        served.clear();
        served.extend(of_tokens.filter_map(|(token, choices)| {
            choices.iter().find(|choice| choice.expert == index).map(|choice| (token, choice.weight))
        }));
        predict.clear();
        predict.extend(served.iter().map(|(token, _)| input.predict.get(*token).is_some_and(|may| *may)));
        // The residual stream is for predictors, and often there is nothing to predict.
        let predicted = predict.iter().any(|may| *may).then_some((&input.x, x));
        for (from, to) in [(&input.h, h)].into_iter().chain(predicted) {
            let (from, mut to) = (from.read()?, to.write()?);
            for ((token, _), row) in served.iter().zip(to.slice_mut::<f32>().chunks_exact_mut(self.width)) {
                row.copy_from_slice(&from.slice::<f32>()[token * self.width..][..self.width]);
            }
        }
        Ok(!served.is_empty())
    }

    /// Adds the current expert's weighted results to the sums of the tokens it served.
    fn scatter(&self, scratch: &ExpertScratch) -> Result<(), EngineError> {
        let (y, mut sum) = (scratch.y.read()?, scratch.sum.write()?);
        let rows = y.slice::<f32>().chunks_exact(self.width);
        for ((token, weight), y) in scratch.served.iter().zip(rows) {
            let sum = &mut sum.slice_mut::<f32>()[token * self.width..][..self.width];
            sum.iter_mut().zip(y).for_each(|(sum, y)| *sum += weight * y);
        }
        Ok(())
    }
}

/// Calls an expert's feed-forward with the rows that were gathered for it.
fn served<R>(
    scratch: &mut Scratch,
    call: impl FnOnce(&FfnInput<'_>, &mut Scratch) -> Result<R, EngineError>,
) -> Result<R, EngineError> {
    let ExpertScratch { h, x, y, predict, served, .. } = &mut scratch.experts;
    let predict = mem::take(predict);
    let (h, x, y) = (h.clone(), x.clone(), y.clone());
    let own = FfnInput { tokens: served.len(), h, x, y, accumulate: false, predict: &predict };
    let result = call(&own, scratch);
    scratch.experts.predict = predict;
    result
}

/// Appends the experts of one token: the `used` greatest logits, the lower index among equals, by ascending index; their
/// weights are the gating's, divided by their sum. A logit that is no number makes all weights so: a unit's fault must
/// not look like a choice.
fn choose(spec: &ExpertSpec, logits: &[f32], choices: &mut Vec<Choice>) {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let gate = |logit: f32| match spec.gating {
        Gating::Softmax => math::exp(logit - max),
        Gating::Sigmoid => 1.0 / (1.0 + math::exp(-logit)),
    };
    let total = match spec.gating {
        Gating::Softmax => logits.iter().map(|logit| gate(*logit)).sum(),
        Gating::Sigmoid => 1.0,
    };
    let first = choices.len();
    for _ in 0..spec.used {
        let taken = |index: usize| choices[first..].iter().any(|choice| choice.expert == index);
        let free = logits.iter().enumerate().filter(|(index, _)| !taken(*index));
        let best = free.reduce(|best, next| if next.1 > best.1 { next } else { best });
        if let Some((expert, logit)) = best {
            choices.push(Choice { expert, weight: gate(*logit) / total });
        }
    }
    let chosen = &mut choices[first..];
    chosen.sort_unstable_by_key(|choice| choice.expert);
    let sum = chosen.iter().map(|choice| choice.weight).sum::<f32>();
    let sum = if sum < LEAST_SUM { LEAST_SUM } else { sum };
    let sound = logits.iter().all(|logit| logit.is_finite());
    chosen.iter_mut().for_each(|choice| choice.weight = if sound { choice.weight / sum } else { f32::NAN });
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chosen(used: usize, gating: Gating, logits: &[f32]) -> Vec<(usize, f32)> {
        let spec = ExpertSpec { count: logits.len(), used, neurons: 1, gating };
        let mut choices = Vec::new();
        choose(&spec, logits, &mut choices);
        choices.iter().map(|choice| (choice.expert, choice.weight)).collect()
    }

    fn close(got: &[(usize, f32)], want: &[(usize, f32)]) {
        assert_eq!(got.len(), want.len());
        for (got, want) in got.iter().zip(want) {
            assert!(got.0 == want.0 && (got.1 - want.1).abs() < 1e-6, "{got:?} instead of {want:?}");
        }
    }

    #[test]
    fn weights_of_the_chosen_sum_to_one() {
        close(&chosen(2, Gating::Softmax, &[2.0, 1.0, 0.0, -1.0]), &[(0, 0.731_058_6), (1, 0.268_941_4)]);
        close(&chosen(2, Gating::Softmax, &[-1.0, 0.0, 1.0, 2.0]), &[(2, 0.268_941_4), (3, 0.731_058_6)]);
        // 0.880797 and 0.731059 of the logistic function.
        close(&chosen(2, Gating::Sigmoid, &[2.0, 1.0, 0.0, -1.0]), &[(0, 0.546_449_2), (1, 0.453_550_8)]);
        close(&chosen(1, Gating::Sigmoid, &[-3.0, -2.0]), &[(1, 1.0)]);
    }

    #[test]
    fn among_equals_the_lower_index_is_chosen() {
        close(&chosen(2, Gating::Softmax, &[0.5, 3.0, 0.5, 0.5]), &[(0, 0.075_858_18), (1, 0.924_141_8)]);
        close(&chosen(3, Gating::Softmax, &[0.0; 8]), &[(0, 1.0 / 3.0), (1, 1.0 / 3.0), (2, 1.0 / 3.0)]);
    }

    #[test]
    fn what_is_nearly_nothing_is_not_blown_up() {
        let weights = chosen(2, Gating::Sigmoid, &[-30.0, -30.0, -31.0]);
        assert!(weights.iter().all(|(_, weight)| *weight < 1e-8), "{weights:?}");
    }

    #[test]
    fn a_logit_that_is_no_number_spoils_all_weights() {
        for logits in [[f32::NAN, 1.0, 2.0], [1.0, f32::INFINITY, 2.0], [f32::NAN; 3]] {
            for gating in [Gating::Softmax, Gating::Sigmoid] {
                assert!(chosen(1, gating, &logits).iter().all(|(_, weight)| weight.is_nan()), "{logits:?}");
            }
        }
    }
}
