//! Which unit gets which work, and what happens when one fails.
//!
//! A weight knows the units that can compute it, in the order in which they were named; the processor comes last and
//! takes what is left. A unit that fails a job is taken out for good: the job is done again by the next one, so a run
//! goes on with the tokens that it would have had. `strict` makes the failure the run's instead.

mod hot;
mod units;
mod weights;

pub(crate) use hot::HotBlock;
pub(crate) use units::Units;
pub use units::{Placement, UnitEvent};
pub(crate) use weights::{Asked, Recipe, Refused, Weights, WeightsKind, first_no};
