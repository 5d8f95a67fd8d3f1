//! The memory of a layer of experts: who was chosen, and the rows of the tokens that one expert serves.
//!
//! An expert computes its tokens as one small dense batch, so their rows are gathered first. The sum over experts has
//! a buffer of its own: the residual stream stays as it was until all experts are done, because predictors read it.

use neuropil_device::{Buffer, DeviceError};

use super::neurons::Decided;

/// One expert that a token uses.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Choice {
    /// Which one.
    pub expert: usize,
    /// What its result counts.
    pub weight: f32,
}

/// Lengths of the buffers, per token.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct ExpertShape {
    /// Experts of a layer; 0 when no layer has any.
    pub experts: usize,
    /// Experts that a token uses.
    pub used: usize,
}

/// Buffers and lists, kept from layer to layer and step to step.
pub(crate) struct ExpertScratch {
    shape: ExpertShape,
    /// The router's results `[tokens, experts]`.
    pub logits: Buffer,
    /// The chosen ones, `used` per token, experts ascending.
    pub choices: Vec<Choice>,
    /// The tokens that the current expert serves, ascending, and what it counts for each.
    pub served: Vec<(usize, f32)>,
    /// `FfnInput::predict` of the served tokens.
    pub predict: Vec<bool>,
    /// What the experts decided, before they compute.
    pub begun: Vec<Option<Decided>>,
    /// Normed stream of the served tokens `[tokens, width]`.
    pub h: Buffer,
    /// Residual stream of the served tokens `[tokens, width]`.
    pub x: Buffer,
    /// The expert's results for them `[tokens, width]`.
    pub y: Buffer,
    /// Weighted sum over the experts so far, all tokens `[tokens, width]`.
    pub sum: Buffer,
}

impl ExpertScratch {
    pub(crate) fn new(shape: ExpertShape) -> Result<ExpertScratch, DeviceError> {
        let empty = Buffer::host(0)?;
        Ok(ExpertScratch {
            shape,
            logits: empty.clone(),
            choices: Vec::new(),
            served: Vec::new(),
            predict: Vec::new(),
            begun: Vec::new(),
            h: empty.clone(),
            x: empty.clone(),
            y: empty.clone(),
            sum: empty,
        })
    }

    /// Makes room for `tokens` tokens. Does nothing for models without experts.
    pub(crate) fn reserve(&mut self, tokens: usize, width: usize) -> Result<(), DeviceError> {
        let ExpertShape { experts, used } = self.shape;
        if experts == 0 {
            return Ok(());
        }
        let floats = |len: usize| Buffer::host(tokens.saturating_mul(len).saturating_mul(4));
        let refuse =
            |_| DeviceError::OutOfMemory { device: "host".into(), bytes: tokens.saturating_mul(used) };
        self.logits = floats(experts)?;
        self.h = floats(width)?;
        self.x = floats(width)?;
        self.y = floats(width)?;
        self.sum = floats(width)?;
        // Cleared first: room is asked for beyond what a list holds.
        self.choices.clear();
        self.choices.try_reserve(tokens.saturating_mul(used)).map_err(refuse)?;
        self.served.clear();
        self.served.try_reserve(tokens).map_err(refuse)?;
        self.predict.clear();
        self.predict.try_reserve(tokens).map_err(refuse)
    }

    /// Bytes of the buffers.
    pub(crate) fn bytes(&self) -> usize {
        [&self.logits, &self.h, &self.x, &self.y, &self.sum].iter().map(|b| b.len()).sum()
    }
}
