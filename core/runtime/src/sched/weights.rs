//! A weight on the units that may compute it.
//!
//! It is prepared on the unit that comes first when the model is loaded, and on the next one only when that is needed: a
//! unit's memory is not spent on what may never happen.

use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use neuropil_device::{
    Buffer, ClusterJob, DType, Device, DeviceError, MatmulJob, OpShape, PreparedWeight, Support, WeightShape,
};

use crate::submit::Jobs;

use super::Units;

/// Most tokens of a decode step: products of no more stay at home, where a round trip costs nothing.
const FEW_TOKENS: usize = 8;

/// How far two units' results of a block may lie apart, in the norm of one of them: 8-bit activations stay well below.
const MOST_DIFFERENT: f64 = 0.12;

/// A token counts for at least one in so many parts of the mean token, in squares.
const LEAST_SHARE: f64 = 1e4;

/// Makes the weights of a unit, as often as it is asked.
pub(crate) type Recipe = Box<dyn Fn(&dyn Device) -> Result<Vec<PreparedWeight>, DeviceError> + Send + Sync>;

/// What weights are for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WeightsKind {
    /// Products: those of few tokens stay at home.
    Matmul,
    /// A block of neurons, with any number of tokens.
    Block,
}

/// Weights that one job needs together.
pub(crate) struct Weights {
    units: Arc<Units>,
    recipe: Recipe,
    kind: WeightsKind,
    /// In the order in which units are asked; the last is at home, if that takes them at all.
    places: Vec<Place>,
}

struct Place {
    unit: usize,
    prepared: OnceLock<Vec<PreparedWeight>>,
    /// Held while the weights are made: nobody makes them twice.
    making: Mutex<()>,
}

/// What is placed: for questions to units, and for reports.
pub(crate) struct Asked<'a> {
    /// What it is, as reports name it: `attn_qkv`.
    pub op: &'a str,
    pub dtype: DType,
    /// What a unit must be able to do.
    pub shapes: &'a [OpShape],
}

/// Why no unit takes some weights.
#[derive(Debug)]
pub(crate) enum Refused {
    /// Each unit's reason.
    Nobody(String),
    /// A unit that was named does not take it, and must.
    Strict(DeviceError),
    /// The weights cannot be had.
    Source(DeviceError),
}

impl Weights {
    /// Places weights: the first unit that takes them, and after it the others up to the home.
    ///
    /// # Errors
    /// [`Refused`].
    pub fn place(
        units: &Arc<Units>,
        kind: WeightsKind,
        asked: &Asked<'_>,
        recipe: Recipe,
    ) -> Result<Weights, Refused> {
        let mut weights = Weights { units: units.clone(), recipe, kind, places: Vec::new() };
        let mut reasons: Vec<String> = Vec::new();
        let before_home = 0..units.home();
        let after_home = units.home() + 1..units.devices().len();
        for unit in before_home.chain([units.home()]).chain(after_home) {
            // Who comes after the home is asked only for what the home refuses.
            if unit > units.home() && !weights.places.is_empty() {
                break;
            }
            if let Some(reason) = refusal(units, unit, asked) {
                if units.is_strict() && unit != units.home() && weights.places.is_empty() {
                    return Err(Refused::Strict(units.unsupported(unit, asked.op, &reason)));
                }
                reasons.push(format!("{}: {reason}", units.device(unit).info().name));
                continue;
            }
            let place = Place { unit, prepared: OnceLock::new(), making: Mutex::default() };
            let needed = match kind {
                WeightsKind::Matmul => weights.places.is_empty() || unit == units.home(),
                WeightsKind::Block => {
                    weights.places.is_empty() || unit == units.home() && units.checks_blocks()
                }
            };
            if !needed {
                weights.places.push(place);
                continue;
            }
            match place.prepare(units, &weights.recipe) {
                Ok(_) => weights.places.push(place),
                Err(error) if unit == units.home() => return Err(Refused::Source(error)),
                Err(error) => {
                    reasons.push(format!("{}: {error}", units.device(unit).info().name));
                    units.refuse(unit, error)?;
                }
            }
        }
        if weights.places.is_empty() {
            return Err(Refused::Nobody(reasons.join("; ")));
        }
        weights.report(asked, &reasons);
        Ok(weights)
    }

    fn report(&self, asked: &Asked<'_>, refused: &[String]) {
        let (Some(first), Some(last)) = (self.places.first(), self.places.last()) else { return };
        let units = &self.units;
        let name = format!("{} {}", asked.op, asked.dtype);
        let reason = match refused {
            [] if units.devices().len() == 1 => "it is the only unit".into(),
            [] => "it was named first".into(),
            refused => format!("others refuse: {}", refused.join("; ")),
        };
        match self.kind {
            WeightsKind::Matmul if first.unit != last.unit && last.unit == units.home() => {
                units.place(format!("{name}, prompts"), first.unit, reason);
                let few = format!("a step of {FEW_TOKENS} tokens and less is not worth the way");
                units.place(format!("{name}, decode"), last.unit, few);
            }
            _ => units.place(name, first.unit, reason),
        }
    }

    /// Bytes of what is prepared so far, on all units.
    pub fn bytes(&self) -> u64 {
        self.bytes_on(|_| true)
    }

    /// Bytes of what is prepared at home.
    pub fn home_bytes(&self) -> u64 {
        self.bytes_on(|unit| unit == self.units.home())
    }

    fn bytes_on(&self, counts: impl Fn(usize) -> bool) -> u64 {
        let places = self.places.iter().filter(|place| counts(place.unit));
        let weights = places.filter_map(|place| place.prepared.get()).flatten();
        weights.map(|weight| weight.bytes() as u64).fold(0, u64::saturating_add)
    }

    /// The place to begin with for a step of so many tokens.
    fn first(&self, tokens: usize) -> usize {
        let at_home = self.places.last().filter(|place| place.unit == self.units.home());
        match self.kind {
            WeightsKind::Matmul if tokens <= FEW_TOKENS && at_home.is_some() => self.places.len() - 1,
            _ => 0,
        }
    }

    /// Runs a job on the first unit that does it; the place where it was done. `job` makes it of the weights that
    /// [`Recipe`] made, `run` submits it and waits.
    fn run<J>(
        &self,
        tokens: usize,
        jobs: &mut Jobs,
        mut job: impl FnMut(&[PreparedWeight]) -> Result<J, DeviceError>,
        run: impl Fn(&mut Jobs, &dyn Device, J) -> Result<(), DeviceError>,
    ) -> Result<usize, DeviceError> {
        let last = self.places.len() - 1;
        for (index, place) in self.places.iter().enumerate().skip(self.first(tokens)) {
            if index < last && !self.units.is_in(place.unit) {
                continue;
            }
            let result = match place.prepare(&self.units, &self.recipe) {
                Ok(weights) => run(jobs, self.units.device(place.unit), job(weights)?),
                Err(error) => Err(error),
            };
            match result {
                Ok(()) => return Ok(index),
                Err(error) if index == last => return Err(error),
                Err(error) => self.units.fail(place.unit, error)?,
            }
        }
        Err(DeviceError::Dropped)
    }

    /// Runs a matmul of so many tokens; see [`Weights::place`] on where.
    ///
    /// # Errors
    /// Those of `job`, or of the last unit.
    pub fn matmul(
        &self,
        tokens: usize,
        jobs: &mut Jobs,
        job: impl FnMut(&[PreparedWeight]) -> Result<MatmulJob, DeviceError>,
    ) -> Result<(), DeviceError> {
        self.run(tokens, jobs, job, |jobs, device, job| jobs.matmul(device, job)).map(drop)
    }

    /// Runs a job on a block of neurons, whose sums go to `y` or are added to it. `job` is told where to write, and whether
    /// to add.
    ///
    /// # Errors
    /// As [`Weights::matmul`], and [`DeviceError::Wrong`].
    pub fn cluster(
        &self,
        tokens: usize,
        jobs: &mut Jobs,
        (y, accumulate): (&Buffer, bool),
        mut job: impl FnMut(&[PreparedWeight], &Buffer, bool) -> Result<ClusterJob, DeviceError>,
    ) -> Result<(), DeviceError> {
        let submit = |jobs: &mut Jobs, device: &dyn Device, job| jobs.cluster(device, job);
        let home = self.places.last().filter(|place| place.unit == self.units.home());
        let Some(home) = home.filter(|_| self.units.checks_blocks() && self.places.len() > 1) else {
            return self.run(tokens, jobs, |weights| job(weights, y, accumulate), submit).map(drop);
        };
        let before = Buffer::host(y.len())?;
        if accumulate {
            before.write()?.bytes_mut().copy_from_slice(y.read()?.bytes());
        }
        let done = self.run(tokens, jobs, |weights| job(weights, y, accumulate), submit)?;
        let unit = self.places[done].unit;
        if unit == home.unit {
            return Ok(());
        }
        let Some(all_checked) = self.units.count_block() else { return Ok(()) };
        let own = Buffer::host(y.len())?;
        let weights = home.prepare(&self.units, &self.recipe)?;
        jobs.cluster(self.units.device(home.unit), job(weights, &own, false)?)?;
        let Some(WeightShape::Neurons { width, .. }) = weights.first().map(PreparedWeight::shape) else {
            return Ok(());
        };
        let (before, own) = (before.read()?, own.read()?);
        let mut y = y.write()?;
        if agree(y.slice(), Some(before.slice()), own.slice(), (tokens, width)) {
            return Ok(());
        }
        self.units.wrong(unit, all_checked)?;
        let parts = before.slice::<f32>().iter().zip(own.slice::<f32>());
        y.slice_mut::<f32>().iter_mut().zip(parts).for_each(|(y, (before, own))| *y = before + own);
        Ok(())
    }
}

/// Why a unit does not take what is asked, if it does not.
pub(super) fn refusal(units: &Units, unit: usize, asked: &Asked<'_>) -> Option<String> {
    if !units.is_in(unit) {
        return Some("it was taken out".into());
    }
    first_no(units.device(unit), asked.shapes)
}

/// Why a device cannot do all of some operations, if it cannot.
pub(crate) fn first_no(device: &dyn Device, shapes: &[OpShape]) -> Option<String> {
    shapes.iter().find_map(|shape| match device.supports(shape) {
        Support::No(reason) => Some(reason),
        Support::Native | Support::Emulated => None,
    })
}

/// Whether what was added to `before`, or to nothing, is `own`, but for what arithmetic in few bits explains.
pub(super) fn agree(y: &[f32], before: Option<&[f32]>, own: &[f32], (tokens, width): (usize, usize)) -> bool {
    let len = (tokens * width).min(own.len());
    // A token may come to nothing, and the unit's to next to nothing.
    let least = own[..len].iter().map(|own| f64::from(*own).powi(2)).sum::<f64>()
        / (tokens.max(1) as f64 * LEAST_SHARE);
    (0..tokens).all(|token| {
        let (mut wrong, mut right) = (0f64, 0f64);
        for index in token * width..((token + 1) * width).min(len) {
            let (y, own, before) = (y[index], own[index], before.map_or(0.0, |before| before[index]));
            // What an addition loses is not the unit's doing.
            let lost = f64::from((y.abs() + before.abs()) * f32::EPSILON);
            wrong += ((f64::from(y) - f64::from(before) - f64::from(own)).abs() - lost).max(0.0).powi(2);
            right += f64::from(own).powi(2);
        }
        wrong <= MOST_DIFFERENT.powi(2) * right.max(least)
    })
}

impl Place {
    /// The weights on this unit, made when they are first needed.
    fn prepare(&self, units: &Units, recipe: &Recipe) -> Result<&[PreparedWeight], DeviceError> {
        if let Some(prepared) = self.prepared.get() {
            return Ok(prepared);
        }
        let _making = self.making.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(prepared) = self.prepared.get() {
            return Ok(prepared);
        }
        let prepared = recipe(units.device(self.unit))?;
        Ok(self.prepared.get_or_init(|| prepared))
    }
}
