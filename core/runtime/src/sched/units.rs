//! The units of an engine, and which of them are still in.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use neuropil_device::{Device, DeviceError};

use super::Refused;

/// Where one kind of work goes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placement {
    /// The work, and the type of its weights: `attn_qkv q4_0, prompts`.
    pub op: String,
    /// The name of the unit.
    pub unit: String,
    /// Why there.
    pub reason: String,
    /// Weights of which this is true.
    pub weights: usize,
}

/// Something that happened to a unit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnitEvent {
    /// The name of the unit.
    pub unit: String,
    /// Why it was taken out.
    pub reason: String,
}

impl fmt::Display for UnitEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "unit {} taken out: {}; its work goes to the next unit", self.unit, self.reason)
    }
}

/// The units of an engine.
pub(crate) struct Units {
    /// In the order in which they were named.
    units: Vec<Unit>,
    /// The one that takes what nobody else does.
    home: usize,
    /// A unit that fails ends the run.
    strict: bool,
    /// After how many blocks one is computed at home too; 0 for never.
    check_every: u32,
    /// Blocks since then.
    unchecked: AtomicU32,
    /// Blocks that were compared.
    checks: AtomicU32,
    events: Mutex<Vec<UnitEvent>>,
    placements: Mutex<Vec<Placement>>,
}

struct Unit {
    device: Arc<dyn Device>,
    out: AtomicBool,
}

impl Units {
    /// In the order in which they were named; number `home` takes what is small, what is in the way of every token, and
    /// what no other unit takes. `missing` could not be had in the first place.
    pub fn new(devices: &[Arc<dyn Device>], home: usize, missing: Vec<UnitEvent>) -> Units {
        let unit = |device: &Arc<dyn Device>| Unit { device: device.clone(), out: AtomicBool::new(false) };
        let units = devices.iter().map(unit).collect();
        Units {
            units,
            home,
            strict: false,
            check_every: 0,
            unchecked: AtomicU32::new(0),
            checks: AtomicU32::new(0),
            events: Mutex::new(missing),
            placements: Mutex::default(),
        }
    }

    /// Whether a failing unit ends the run.
    pub fn strict(mut self, strict: bool) -> Units {
        self.strict = strict;
        self
    }

    /// After how many blocks one is computed at home too; 0 for never.
    pub fn cross_check(mut self, every: u32) -> Units {
        self.check_every = every;
        self
    }

    /// Whether blocks are compared at all.
    pub fn checks_blocks(&self) -> bool {
        self.check_every > 0
    }

    /// A job or a weight that failed on a unit: the unit is taken out, unless it was not its fault.
    ///
    /// # Errors
    /// The error, when nobody else can do better.
    pub fn fail(&self, unit: usize, error: DeviceError) -> Result<(), DeviceError> {
        match error {
            // The file, or the process, has the trouble.
            error @ (DeviceError::Source { .. } | DeviceError::Leased) => return Err(error),
            error if self.strict => return Err(error),
            // It may have room for the next one.
            DeviceError::OutOfMemory { .. } => {}
            error => self.take_out(unit, &error),
        }
        Ok(())
    }

    /// Counts a block that another unit computed; whether it is to be checked, and whether all before it were.
    pub fn count_block(&self) -> Option<bool> {
        if self.check_every == 0 {
            return None;
        }
        let before = self.unchecked.fetch_add(1, Ordering::Relaxed);
        // Every other time one more is let pass, so that it is not the same layer's turn for ever.
        let late = if self.check_every > 1 { self.checks.load(Ordering::Relaxed) % 2 } else { 0 };
        if before.saturating_add(1) < self.check_every.saturating_add(late) {
            return None;
        }
        self.unchecked.store(0, Ordering::Relaxed);
        self.checks.fetch_add(1, Ordering::Relaxed);
        Some(self.check_every == 1)
    }

    /// All devices, in the order in which they were named.
    pub fn devices(&self) -> impl ExactSizeIterator<Item = &Arc<dyn Device>> {
        self.units.iter().map(|unit| &unit.device)
    }

    /// The number of the unit that takes what nobody else does.
    pub fn home(&self) -> usize {
        self.home
    }

    /// The unit of this number.
    ///
    /// # Panics
    /// When there is no such unit.
    pub fn device(&self, unit: usize) -> &dyn Device {
        &*self.units[unit].device
    }

    /// Whether a failing unit ends the run.
    pub fn is_strict(&self) -> bool {
        self.strict
    }

    /// Whether a unit still takes work.
    pub fn is_in(&self, unit: usize) -> bool {
        self.units.get(unit).is_some_and(|unit| !unit.out.load(Ordering::Relaxed))
    }

    /// Gives no more work to a unit.
    pub fn take_out(&self, unit: usize, error: &DeviceError) {
        let Some(unit) = self.units.get(unit) else { return };
        if !unit.out.swap(true, Ordering::Relaxed) {
            let event = UnitEvent { unit: unit.device.info().name.clone(), reason: error.to_string() };
            lock(&self.events).push(event);
        }
    }

    /// A weight that a unit does not take: the unit stays in with what it holds, or is taken out if it failed.
    ///
    /// # Errors
    /// [`Refused`] when that ends the load.
    pub fn refuse(&self, unit: usize, error: DeviceError) -> Result<(), Refused> {
        match error {
            error @ DeviceError::Source { .. } => return Err(Refused::Source(error)),
            error if self.strict => return Err(Refused::Strict(error)),
            DeviceError::OutOfMemory { .. } | DeviceError::Unsupported { .. } | DeviceError::Shape { .. } => {
            }
            error => self.take_out(unit, &error),
        }
        Ok(())
    }

    /// What a unit says that does not take something.
    pub fn unsupported(&self, unit: usize, op: &str, reason: &str) -> DeviceError {
        let device = self.device(unit).info().name.clone();
        DeviceError::Unsupported { device, what: format!("{op}: {reason}") }
    }

    /// A comparison found a unit's result to be wrong: it is taken out. Sessions that were decoding with it before may hold
    /// keys and values that it spoiled.
    ///
    /// # Errors
    /// [`DeviceError::Wrong`] when that ends the run: its other results were not looked at, or it must.
    pub fn wrong(&self, unit: usize, all_checked: bool) -> Result<(), DeviceError> {
        let wrong = DeviceError::Wrong { device: self.device(unit).info().name.clone() };
        if !self.strict {
            self.take_out(unit, &wrong);
        }
        if self.strict || !all_checked { Err(wrong) } else { Ok(()) }
    }

    /// What happened so far.
    pub fn events(&self) -> Vec<UnitEvent> {
        lock(&self.events).clone()
    }

    /// Remembers where some work goes.
    pub fn place(&self, op: String, unit: usize, reason: String) {
        let unit = self.device(unit).info().name.clone();
        let mut placements = lock(&self.placements);
        match placements.iter_mut().find(|p| p.op == op && p.unit == unit && p.reason == reason) {
            Some(placement) => placement.weights += 1,
            None => placements.push(Placement { op, unit, reason, weights: 1 }),
        }
    }

    /// What to say about units that take nothing of the model.
    pub fn idle(&self) -> Vec<String> {
        let placements = lock(&self.placements);
        let others = self.units.iter().enumerate().filter(|(unit, _)| *unit < self.home && self.is_in(*unit));
        let names = others.map(|(_, unit)| &unit.device.info().name);
        let idle = names.filter(|name| !placements.iter().any(|placement| placement.unit == **name));
        idle.map(|name| {
            let why = placements.iter().find(|placement| placement.reason.contains(name.as_str()));
            let why = why.map_or_else(String::new, |placement| format!(" ({})", placement.reason));
            format!("unit {name} takes nothing of this model{why}")
        })
        .collect()
    }

    /// Where the work goes, as decided when the model was loaded.
    pub fn placements(&self) -> Vec<Placement> {
        lock(&self.placements).clone()
    }
}

fn lock<T>(list: &Mutex<Vec<T>>) -> MutexGuard<'_, Vec<T>> {
    list.lock().unwrap_or_else(PoisonError::into_inner)
}
