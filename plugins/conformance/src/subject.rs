//! What is tested: a unit, seen through the C border or through the contract of `neuropil-device`.

use neuropil_device::{ActivationKind, Stage};

use crate::case::Cases;
use crate::raw::{Cluster, Failure};
use crate::reference::Elements;
use crate::sample::{Fill, Kind};

/// An operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    /// Products.
    Matmul,
    /// A stage of the feed-forward of a block of neurons, whose down matrix is of another kind or not.
    Cluster(Stage, ActivationKind, Kind),
}

/// A question to a unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Question {
    /// What.
    pub op: Op,
    /// The weight, or gate and up.
    pub kind: Kind,
    /// Outputs, or neurons.
    pub rows: usize,
    /// Inputs, or the width.
    pub cols: usize,
    /// Tokens.
    pub tokens: usize,
}

/// A job for a block of neurons.
#[derive(Clone, Copy, Debug)]
pub struct Stroke<'a> {
    /// Which part.
    pub stage: Stage,
    /// The non-linearity.
    pub activation: ActivationKind,
    /// Its cut.
    pub threshold: f32,
    /// Tokens.
    pub tokens: usize,
    /// `[tokens, width]`; empty for `Down`.
    pub x: &'a [f32],
    /// `[tokens, neurons]`: what an earlier stage left, or nothing of meaning; empty for `Fused`.
    pub hidden: &'a [f32],
    /// Values of y; 0 for a stage without a sum.
    pub y: usize,
}

/// A matrix that a subject can prepare.
pub trait Sampled {
    /// What its elements are worth.
    fn elements(&self) -> Elements<'_>;
}

/// A unit that is tested.
///
/// The functions check what they can see: that outputs, which are filled with NaN before, are written whole and nothing
/// beside them, and that inputs stay as they are. A breach is a [`Failure`] too.
pub trait Subject: Sync {
    /// A matrix in a form that it takes.
    type Sample: Sampled + Send + Sync;
    /// A prepared weight. It is given back when it is dropped.
    type Weight<'a>: Sync + Send
    where
        Self: 'a;

    /// The kinds of weights to test.
    fn kinds(&self) -> Vec<Kind>;

    /// The token counts that it takes; none for any.
    fn buckets(&self) -> &[usize];

    /// Whether it takes calls from many threads at once.
    fn is_parallel(&self) -> bool;

    /// Whether it does something.
    ///
    /// # Errors
    /// No, with the reason.
    fn ask(&self, question: &Question) -> Result<(), Failure>;

    /// A matrix.
    fn sample(&self, kind: Kind, shape: (usize, usize), fill: Fill, seed: u64) -> Self::Sample;

    /// Prepares a matrix, or gate, up and down.
    ///
    /// # Errors
    /// What the unit says.
    fn prepare(&self, samples: &[&Self::Sample]) -> Result<Self::Weight<'_>, Failure>;

    /// Multiplies one input with some weights.
    ///
    /// # Errors
    /// What the unit says, or a breach.
    fn matmul(
        &self,
        weights: &[&Self::Weight<'_>],
        x: &[f32],
        tokens: usize,
    ) -> Result<Vec<Vec<f32>>, Failure>;

    /// Runs a stage.
    ///
    /// # Errors
    /// As above.
    fn cluster(&self, weight: &Self::Weight<'_>, stroke: &Stroke<'_>) -> Result<Cluster, Failure>;

    /// Adds the cases of a group that only this kind of subject has.
    fn own_cases<'a>(&'a self, group: &str, cases: &mut Cases<'a>);
}
