//! How far a changed model's predictions are from the dense model's.
//!
//! The loss on a text would tell too, but what one layer adds to it is smaller than its noise on a few hundred tokens. The
//! divergence of whole distributions is not: it is 0 without a change and grows with any.

use crate::engine::{Engine, EngineError, SessionOptions};
use crate::model::sampler::log_sum_exp;

use super::memory::room;
use super::{CalibrateError, CalibrateProgress};

/// Of the second half of a chunk, every so many positions are compared.
const EVERY: usize = 2;

/// Takes the logits at one position.
type Take<'a> = dyn FnMut(&[f32]) -> Result<(), EngineError> + Sync + 'a;

/// The dense model's distributions at some positions of some chunks.
pub(super) struct Reference {
    chunks: Vec<Vec<u32>>,
    /// Log-probabilities, chunk after chunk, position after position.
    rows: Vec<Vec<f32>>,
}

impl Reference {
    /// Runs the chunks through the dense model.
    pub(super) fn new(engine: &Engine, chunks: &[Vec<u32>]) -> Result<Reference, CalibrateError> {
        let mut rows = Vec::new();
        for chunk in chunks {
            each(engine, chunk, &mut |logits| {
                let sum = log_sum_exp(logits) as f32;
                let mut row = room(logits.len())?;
                row.extend(logits.iter().map(|logit| logit - sum));
                rows.push(row);
                Ok(())
            })?;
        }
        Ok(Reference { chunks: chunks.to_vec(), rows })
    }

    /// The mean divergence of the engine's distributions from these, in nats.
    pub(super) fn divergence(
        &self,
        engine: &Engine,
        what: &str,
        progress: &mut CalibrateProgress<'_>,
    ) -> Result<f64, CalibrateError> {
        let mut rows = self.rows.iter();
        let mut sum = 0.0;
        for (done, chunk) in self.chunks.iter().enumerate() {
            if !progress(what, done as u64, self.chunks.len() as u64) {
                return Err(CalibrateError::Cancelled);
            }
            each(engine, chunk, &mut |logits| {
                let Some(dense) = rows.next() else { return Ok(()) };
                let total = log_sum_exp(logits) as f32;
                let terms =
                    dense.iter().zip(logits).map(|(p, logit)| f64::from(p.exp() * (p - (logit - total))));
                sum += terms.sum::<f64>();
                Ok(())
            })?;
        }
        let mean = sum / self.rows.len().max(1) as f64;
        if mean.is_finite() { Ok(mean) } else { Err(CalibrateError::NotANumber) }
    }
}

/// Hands over the logits at the positions of a chunk that are compared.
fn each(engine: &Engine, chunk: &[u32], take: &mut Take<'_>) -> Result<(), EngineError> {
    let mut session = engine.session(SessionOptions { sparse_prompt: true, ..SessionOptions::default() })?;
    session.prefill_scored(chunk, chunk.len() / 2, &mut |at, logits| {
        if at % EVERY == 0 { take(logits) } else { Ok(()) }
    })
}
