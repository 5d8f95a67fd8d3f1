//! A compilation: settings first, then a plan that no longer needs the client's memory.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use crate::cache::{self, Found};
use crate::codes::*;
use crate::model::{Model, Phase, Value};
use crate::ops::{Tensor, decode};
use crate::peek::Checksum;
use crate::world::{World, find};

/// Where a compilation is in its life.
#[derive(Debug, Clone)]
pub(crate) enum Stage {
    Open,
    Finishing,
    Finished(Arc<Plan>),
    Failed,
}

/// A compilation.
#[derive(Debug)]
pub(crate) struct Compilation {
    pub(crate) model: usize,
    /// The devices asked for; all of them when the client named none.
    pub(crate) devices: Vec<usize>,
    /// The client named the devices.
    pub(crate) chosen: bool,
    pub(crate) caching: Option<(PathBuf, [u8; TOKEN])>,
    /// Nanoseconds; 0 is for ever.
    pub(crate) timeout: u64,
    pub(crate) stage: Stage,
}

/// A model made ready: its structure without values, and the constants as numbers.
#[derive(Debug)]
pub(crate) struct Plan {
    pub(crate) model: Model,
    pub(crate) constants: Vec<Option<Arc<Tensor>>>,
    /// The names of the devices it was made for.
    pub(crate) devices: Vec<String>,
    /// Deadlines are kept, which takes a device of level 30.
    pub(crate) deadlines: bool,
}

impl Compilation {
    /// Nothing may be changed once the compilation is finished.
    pub(crate) fn open(&mut self) -> Outcome<&mut Compilation> {
        if matches!(self.stage, Stage::Open) { Ok(self) } else { Err(BAD_STATE) }
    }

    /// The plan: there is none before the end, nor after a failure.
    pub(crate) fn plan(&self) -> Outcome<Arc<Plan>> {
        match &self.stage {
            Stage::Finished(plan) => Ok(plan.clone()),
            Stage::Failed => Err(BAD_DATA),
            Stage::Open | Stage::Finishing => Err(BAD_STATE),
        }
    }

    /// Exactly one device, named by the client, as deadlines and measurements ask for.
    pub(crate) fn one_device(&self) -> Outcome {
        if self.chosen && self.devices.len() == 1 { Ok(()) } else { Err(BAD_DATA) }
    }
}

impl World {
    /// A compilation of a finished model for these devices.
    pub(crate) fn compile_for(
        &mut self,
        model: *const std::ffi::c_void,
        devices: Vec<usize>,
        chosen: bool,
    ) -> Outcome<usize> {
        if find(&mut self.models, &mut self.log, model)?.phase != Phase::Finished {
            return Err(BAD_STATE);
        }
        let handle = self.fresh();
        let (timeout, stage, caching) = (0, Stage::Open, None);
        let compilation = Compilation { model: model.addr(), devices, chosen, caching, timeout, stage };
        self.compilations.insert(handle, compilation);
        Ok(handle)
    }

    /// The first half of finishing: how long the device pretends to work, and whether the deadline passes meanwhile.
    pub(crate) fn begin_finish(&mut self, handle: *const std::ffi::c_void) -> Outcome<(Duration, bool)> {
        let hang = Duration::from_millis(self.settings.faults.of_compilation());
        let devices = &self.devices;
        let compilation = find(&mut self.compilations, &mut self.log, handle)?.open()?;
        compilation.stage = Stage::Finishing;
        let keeps = compilation.devices.iter().all(|d| devices.get(d).is_some_and(|d| d.level >= 30));
        let limit = Duration::from_nanos(compilation.timeout);
        let late = keeps && !limit.is_zero() && hang > limit;
        Ok((if late { limit } else { hang }, late))
    }

    /// The second half: the plan is made, unless a failure was already found.
    pub(crate) fn end_finish(&mut self, handle: usize, failure: Option<i32>) -> Outcome {
        let plan = match failure {
            Some(code) => Err(code),
            None => self.make_plan(handle),
        };
        let compilation = self.compilations.get_mut(&handle).ok_or(BAD_STATE)?;
        match plan {
            Ok(plan) => {
                compilation.stage = Stage::Finished(Arc::new(plan));
                self.log.count("compilations.done");
                Ok(())
            }
            Err(code) => {
                compilation.stage = Stage::Failed;
                Err(code)
            }
        }
    }

    fn make_plan(&mut self, handle: usize) -> Outcome<Plan> {
        let compilation = self.compilations.get(&handle).ok_or(BAD_STATE)?;
        let Some(model) = self.models.get(&compilation.model) else {
            self.log.violation("order", "a compilation was finished after its model was freed".into());
            return Err(BAD_STATE);
        };
        let devices: Vec<_> = compilation.devices.iter().filter_map(|d| self.devices.get(d)).collect();
        let names: Vec<String> = devices.iter().map(|d| d.name.to_string_lossy().into()).collect();
        if devices.len() != compilation.devices.len() || names.contains(&self.settings.unavailable) {
            return Err(UNAVAILABLE_DEVICE);
        }
        if self.settings.faults.is_dead {
            return Err(DEAD_OBJECT);
        }
        let supported = |at: usize| devices.iter().any(|d| d.supports(&self.settings, model, at));
        if !(0..model.operations.len()).all(supported) {
            return Err(BAD_DATA);
        }
        if model.constant_changed() {
            let text = "a large constant changed, or is gone, before the compilation was finished";
            self.log.violation("constant_changed", text.into());
            return Err(BAD_DATA);
        }
        let versions: Vec<_> = devices.iter().map(|d| d.version).collect();
        let digest = digest(model, &format!("{names:?}{versions:?}"));
        let from_cache =
            compilation.caching.as_ref().map(|(folder, token)| cache::load(folder, token, digest));
        let deadlines = devices.iter().all(|d| d.level >= 30);
        let (bytes, fresh) = match &from_cache {
            Some(Found::Good(bytes)) => (bytes.clone(), false),
            _ => {
                let all: Option<Vec<_>> = model.operands.iter().map(|o| o.value.bytes()).collect();
                (all.ok_or(BAD_DATA)?, true)
            }
        };
        let constants = constants(model, &bytes)?;
        let plan = Plan { model: model.without_values(), constants, devices: names, deadlines };
        match &from_cache {
            Some(Found::Good(_)) => self.log.count("compilations.from_cache"),
            Some(Found::Corrupt) => self.log.count("cache.corrupt"),
            Some(Found::Other) => {
                let text = "one token was used for two models";
                self.log.violation("token_collision", text.into());
            }
            Some(Found::Nothing) | None => {}
        }
        if let Some((folder, token)) = compilation.caching.as_ref().filter(|_| fresh) {
            // A folder that cannot be written costs the cache, not the compilation.
            if cache::store(folder, token, digest, &bytes).is_ok() {
                self.log.count("cache.written");
            }
        }
        Ok(plan)
    }
}

/// A number for the model's structure, its constants and the devices.
fn digest(model: &Model, devices: &str) -> u64 {
    let mut sum = Checksum::new();
    for operand in &model.operands {
        sum.add(format!("{:?}{:?}{}", operand.shape, operand.channels, operand.value.sum()).as_bytes());
    }
    let graph = (&model.operations, &model.inputs, &model.outputs, model.relaxed, devices);
    sum.add(format!("{graph:?}").as_bytes());
    sum.value()
}

/// The constants as numbers; operands that are none have no bytes.
fn constants(model: &Model, bytes: &[Vec<u8>]) -> Outcome<Vec<Option<Arc<Tensor>>>> {
    let one = |(operand, bytes): (&crate::model::Operand, &Vec<u8>)| match operand.value {
        Value::Unset | Value::Missing => Ok(None),
        _ if operand.shape.bytes()? != Some(bytes.len()) => Err(BAD_DATA),
        _ => {
            let tensor = decode(operand.shape.kind, &operand.shape.dims, bytes, model.relaxed)?;
            Ok(Some(Arc::new(tensor)))
        }
    };
    model.operands.iter().zip(bytes).map(one).collect()
}
