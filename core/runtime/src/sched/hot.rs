//! The neurons of a layer that fire most, as one block on a unit, while the processor computes the others
//! (PowerInfer-2 section 4.1.2).
//!
//! All of the block is computed for every token: a unit with static graphs cannot leave neurons out. Its sums come while
//! the processor works, and are added to those of the others. When the unit fails, the processor computes all neurons, as
//! if there had never been a block; so nothing is needed for that but what is there anyway.

use std::sync::Arc;

use neuropil_device::{Activation, Buffer, ClusterJob, ClusterWeights, DeviceError, PreparedWeight, Stage};

use crate::predict::grow;
use crate::submit::Jobs;

use super::Units;
use super::weights::{Asked, Recipe, Refused, agree, refusal};

/// The first neurons of a layer on a unit.
pub(crate) struct HotBlock {
    units: Arc<Units>,
    unit: usize,
    weight: PreparedWeight,
    /// How many.
    pub count: usize,
    width: usize,
}

impl HotBlock {
    /// Places the first `count` neurons on the first unit before the home that takes them; on none if nobody does.
    ///
    /// # Errors
    /// [`Refused`].
    pub fn place(
        units: &Arc<Units>,
        (count, width): (usize, usize),
        asked: &Asked<'_>,
        recipe: &Recipe,
    ) -> Result<Option<HotBlock>, Refused> {
        for unit in 0..units.home() {
            let prepared = match refusal(units, unit, asked) {
                Some(reason) => Err(units.unsupported(unit, asked.op, &reason)),
                None => recipe(units.device(unit)),
            };
            match prepared.map(|weights| weights.into_iter().next()) {
                Ok(Some(weight)) => {
                    units.place(format!("{} {}", asked.op, asked.dtype), unit, "it was named first".into());
                    return Ok(Some(HotBlock { units: units.clone(), unit, weight, count, width }));
                }
                Ok(None) => {}
                Err(error) => units.refuse(unit, error)?,
            }
        }
        Ok(None)
    }

    /// Whether its unit still takes work.
    pub fn is_in(&self) -> bool {
        self.units.is_in(self.unit)
    }

    /// Memory that it takes.
    pub fn bytes(&self) -> u64 {
        self.weight.bytes() as u64
    }

    /// Starts to compute `tokens` rows of `x` into `y`.
    ///
    /// # Errors
    /// When the buffers are in use.
    pub fn begin(
        &self,
        jobs: &mut Jobs,
        activation: Activation,
        tokens: usize,
        x: &Buffer,
        y: &mut Buffer,
    ) -> Result<(), DeviceError> {
        let y = grow(y, tokens * self.width)?;
        let job = ClusterJob {
            stage: Stage::Fused,
            tokens,
            activation,
            weights: ClusterWeights::Block(self.weight.clone()),
            x: x.read()?,
            hidden: None,
            y: Some(y.write()?),
            accumulate: false,
        };
        jobs.begin(self.units.device(self.unit), job);
        Ok(())
    }

    /// Waits for the block; whether its sums are in the buffer. If not, the unit was taken out. `own` computes the same
    /// on the processor, for a comparison when it is time.
    ///
    /// # Errors
    /// The unit's if that ends the run, and [`DeviceError::Wrong`].
    pub fn finish(
        &self,
        jobs: &mut Jobs,
        tokens: usize,
        y: &Buffer,
        own: impl FnOnce(&mut Jobs) -> Result<Buffer, DeviceError>,
    ) -> Result<bool, DeviceError> {
        match jobs.end(self.units.device(self.unit)) {
            Ok(()) => {}
            Err(error) => return self.units.fail(self.unit, error).map(|()| false),
        }
        let Some(all_checked) = self.units.count_block() else { return Ok(true) };
        let own = own(jobs)?;
        let (found, own) = (y.read()?, own.read()?);
        if agree(found.slice(), None, own.slice(), (tokens, self.width)) {
            return Ok(true);
        }
        self.units.wrong(self.unit, all_checked).map(|()| false)
    }
}
