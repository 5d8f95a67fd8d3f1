//! A model while it is built: operands, operations, inputs, outputs, and the checks when it is finished.

use std::collections::BTreeSet;
use std::sync::Arc;

use crate::check::{Step, arguments, signature};
use crate::codes::*;
use crate::memory::Region;
use crate::operand::{Channels, Shape, is_scalar, merge};
use crate::peek::{Checksum, checksum_at, copy_from};

/// The value of a constant operand.
#[derive(Debug, Clone)]
pub(crate) enum Value {
    /// Not a constant.
    Unset,
    /// An optional operand that is left out.
    Missing,
    /// Copied when it was set.
    Copied(Vec<u8>),
    /// Still in the client's memory, with its checksum of then.
    Borrowed { address: usize, len: usize, sum: u64 },
    /// In a memory object, with its checksum of then.
    InMemory { memory: usize, region: Arc<Region>, offset: usize, len: usize, sum: u64 },
}

/// One operand.
#[derive(Debug, Clone)]
pub(crate) struct Operand {
    pub(crate) shape: Shape,
    pub(crate) channels: Option<Channels>,
    pub(crate) value: Value,
}

/// One operation, by the indices of its operands.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Operation {
    pub(crate) kind: i32,
    pub(crate) inputs: Vec<u32>,
    pub(crate) outputs: Vec<u32>,
}

/// Where a model is in its life.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Phase {
    Building,
    Finished,
    /// It could not be finished and never will be.
    Invalid,
}

/// A model.
#[derive(Debug)]
pub(crate) struct Model {
    pub(crate) operands: Vec<Operand>,
    pub(crate) operations: Vec<Operation>,
    pub(crate) inputs: Vec<u32>,
    pub(crate) outputs: Vec<u32>,
    pub(crate) relaxed: bool,
    pub(crate) phase: Phase,
    /// Operations in an order in which they can be computed, with their arguments; filled when finished.
    pub(crate) order: Vec<(usize, Step)>,
}

impl Operand {
    /// The bytes of a constant that is small.
    fn constant(&self) -> Outcome<&[u8]> {
        match &self.value {
            Value::Copied(bytes) => Ok(bytes),
            _ => Err(BAD_DATA),
        }
    }

    /// A constant integer.
    pub(crate) fn constant_i32(&self) -> Outcome<i32> {
        Ok(i32::from_le_bytes(self.constant()?.try_into().map_err(|_| BAD_DATA)?))
    }

    /// A constant truth value.
    pub(crate) fn constant_bool(&self) -> Outcome<bool> {
        match self.constant()? {
            [0] => Ok(false),
            [1] => Ok(true),
            _ => Err(BAD_DATA),
        }
    }
}

impl Value {
    fn is_constant(&self) -> bool {
        !matches!(self, Value::Unset)
    }

    /// The checksum of the value as it was set.
    pub(crate) fn sum(&self) -> u64 {
        match self {
            Value::Unset | Value::Missing => 0,
            Value::Copied(bytes) => Checksum::of(bytes),
            Value::Borrowed { sum, .. } | Value::InMemory { sum, .. } => *sum,
        }
    }

    /// Whether the value is still there and as it was when it was set.
    pub(crate) fn is_unchanged(&self) -> bool {
        match self {
            Value::Borrowed { address, len, sum } => checksum_at(*address, *len) == Some(*sum),
            Value::InMemory { region, offset, len, sum, .. } => region.checksum(*offset, *len) == Ok(*sum),
            _ => true,
        }
    }

    /// A copy of the value; `None` when it changed or is gone since it was set.
    pub(crate) fn bytes(&self) -> Option<Vec<u8>> {
        let (bytes, now, then) = match self {
            Value::Unset | Value::Missing => return Some(Vec::new()),
            Value::Copied(bytes) => return Some(bytes.clone()),
            Value::Borrowed { address, len, sum } => {
                let (bytes, now) = copy_from(*address, *len)?;
                (bytes, now, sum)
            }
            Value::InMemory { region, offset, len, sum, .. } => {
                let bytes = region.read(*offset, *len).ok()?;
                let now = Checksum::of(&bytes);
                (bytes, now, sum)
            }
        };
        (now == *then).then_some(bytes)
    }
}

impl Model {
    pub(crate) fn new() -> Model {
        Model {
            operands: Vec::new(),
            operations: Vec::new(),
            inputs: Vec::new(),
            outputs: Vec::new(),
            relaxed: false,
            phase: Phase::Building,
            order: Vec::new(),
        }
    }

    /// Nothing may be changed once the model is finished.
    pub(crate) fn building(&mut self) -> Outcome<&mut Model> {
        if self.phase == Phase::Building { Ok(self) } else { Err(BAD_STATE) }
    }

    fn get(&self, index: u32) -> Outcome<&Operand> {
        self.operands.get(index as usize).ok_or(BAD_DATA)
    }

    fn all(&self, indices: &[u32]) -> Outcome<Vec<&Operand>> {
        indices.iter().map(|i| self.get(*i)).collect()
    }

    /// The types of an operation's tensors.
    pub(crate) fn kinds_of(&self, operation: &Operation) -> Vec<i32> {
        let all = operation.inputs.iter().chain(&operation.outputs);
        all.filter_map(|i| self.get(*i).ok()).map(|o| o.shape.kind).filter(|k| !is_scalar(*k)).collect()
    }

    /// Older libraries want the output's scale above the product of the scales of input and weights.
    pub(crate) fn scales_were_ordered(&self, operation: &Operation) -> bool {
        let scale = |list: &[u32], at: usize| list.get(at).and_then(|i| self.get(*i).ok()).map(|o| &o.shape);
        match (scale(&operation.inputs, 0), scale(&operation.inputs, 1), scale(&operation.outputs, 0)) {
            (Some(x), Some(w), Some(y)) if x.kind == TENSOR_QUANT8_ASYMM && w.kind == x.kind => {
                ![FULLY_CONNECTED, CONV_2D].contains(&operation.kind) || y.scale > x.scale * w.scale
            }
            _ => true,
        }
    }

    /// Sets a constant; its length must be that of its type.
    pub(crate) fn set_value(&mut self, index: i32, len: usize, value: Value) -> Outcome {
        let index = u32::try_from(index).map_err(|_| BAD_DATA)?;
        let operand = self.building()?.operands.get_mut(index as usize).ok_or(BAD_DATA)?;
        if !matches!(value, Value::Missing) && operand.shape.bytes()? != Some(len) {
            return Err(BAD_DATA);
        }
        operand.value = value;
        Ok(())
    }

    /// Sets the scales of a tensor with one per channel.
    pub(crate) fn set_channels(&mut self, index: i32, channels: Channels) -> Outcome {
        let index = usize::try_from(index).map_err(|_| BAD_DATA)?;
        let operand = self.building()?.operands.get_mut(index).ok_or(BAD_DATA)?;
        let dim = operand.shape.dims.get(channels.dimension).copied();
        let positive = channels.scales.iter().all(|s| s.is_finite() && *s > 0.0);
        let counted = dim.is_some_and(|d| d > 0 && d as usize == channels.scales.len());
        if operand.shape.kind != TENSOR_QUANT8_SYMM_PER_CHANNEL || !positive || !counted {
            return Err(BAD_DATA);
        }
        operand.channels = Some(channels);
        Ok(())
    }

    /// Adds an operation, whose operands must be there already.
    pub(crate) fn add_operation(&mut self, operation: Operation) -> Outcome {
        let model = self.building()?;
        let (inputs, outputs) = (model.all(&operation.inputs)?, model.all(&operation.outputs)?);
        signature(operation.kind, &inputs, &outputs)?;
        model.operations.push(operation);
        Ok(())
    }

    /// Says which operands are the model's inputs and outputs: at least one of each, each once, no constants.
    pub(crate) fn identify(&mut self, inputs: Vec<u32>, outputs: Vec<u32>) -> Outcome {
        let model = self.building()?;
        let different: BTreeSet<&u32> = inputs.iter().chain(&outputs).collect();
        let constant = |o: &&Operand| o.value.is_constant();
        if inputs.is_empty()
            || outputs.is_empty()
            || different.len() != inputs.len() + outputs.len()
            || model.all(&inputs)?.iter().any(constant)
            || model.all(&outputs)?.iter().any(constant)
        {
            return Err(BAD_DATA);
        }
        (model.inputs, model.outputs) = (inputs, outputs);
        Ok(())
    }

    /// Checks the whole; a model that fails can not be mended.
    pub(crate) fn finish(&mut self) -> Outcome {
        self.building()?;
        let outcome = self.check();
        self.phase = if outcome.is_ok() { Phase::Finished } else { Phase::Invalid };
        outcome
    }

    fn check(&mut self) -> Outcome {
        if self.inputs.is_empty() || self.outputs.is_empty() {
            return Err(BAD_DATA);
        }
        self.check_sources()?;
        self.order = self.sorted()?;
        self.dimensions(&|_| None, false).map(|_| ())
    }

    /// Every operand has one source and some use.
    fn check_sources(&self) -> Outcome {
        let mut sources = vec![0u32; self.operands.len()];
        let mut uses = sources.clone();
        let bump = |counts: &mut Vec<u32>, indices: &[u32]| {
            for index in indices {
                if let Some(count) = counts.get_mut(*index as usize) {
                    *count += 1;
                }
            }
        };
        bump(&mut sources, &self.inputs);
        bump(&mut uses, &self.outputs);
        for operation in &self.operations {
            bump(&mut sources, &operation.outputs);
            bump(&mut uses, &operation.inputs);
        }
        for ((operand, produced), used) in self.operands.iter().zip(sources).zip(uses) {
            let channels = operand.shape.kind == TENSOR_QUANT8_SYMM_PER_CHANNEL;
            let once = produced + u32::from(operand.value.is_constant()) == 1;
            if !once || used == 0 || channels != operand.channels.is_some() {
                return Err(BAD_DATA);
            }
        }
        Ok(())
    }

    /// The operations in an order in which each finds its inputs; none when they form a circle.
    fn sorted(&self) -> Outcome<Vec<(usize, Step)>> {
        let mut ready: BTreeSet<u32> = self.inputs.iter().copied().collect();
        let constants = self.operands.iter().enumerate().filter(|(_, o)| o.value.is_constant());
        ready.extend(constants.map(|(i, _)| i as u32));
        let mut waiting: Vec<usize> = (0..self.operations.len()).collect();
        let mut order = Vec::new();
        while !waiting.is_empty() {
            let before = waiting.len();
            for at in std::mem::take(&mut waiting) {
                let operation = self.operations.get(at).ok_or(BAD_DATA)?;
                if operation.inputs.iter().all(|i| ready.contains(i)) {
                    ready.extend(&operation.outputs);
                    order.push((at, arguments(operation, &self.operands)?));
                } else {
                    waiting.push(at);
                }
            }
            if waiting.len() == before {
                return Err(BAD_DATA);
            }
        }
        Ok(order)
    }

    /// The dimensions of every operand, as far as they follow from the inputs' (`of_input` by position).
    ///
    /// # Errors
    /// When an operation's dimensions do not fit, or, with `all`, when some stay open.
    pub(crate) fn dimensions(
        &self,
        of_input: &dyn Fn(usize) -> Option<Vec<u32>>,
        all: bool,
    ) -> Outcome<Vec<Vec<u32>>> {
        let mut dims: Vec<Vec<u32>> = self.operands.iter().map(|o| o.shape.dims.clone()).collect();
        for (position, index) in self.inputs.iter().enumerate() {
            if let (Some(given), Some(slot)) = (of_input(position), dims.get_mut(*index as usize)) {
                *slot = merge(slot, &given)?;
            }
        }
        for (at, step) in &self.order {
            let operation = self.operations.get(*at).ok_or(BAD_DATA)?;
            let known = |i: &u32| {
                let shape = &self.get(*i)?.shape;
                let dims = dims.get(*i as usize).ok_or(BAD_DATA)?;
                Ok(is_scalar(shape.kind) || !dims.is_empty() && dims.iter().all(|d| *d > 0))
            };
            let all_known = operation.inputs.iter().map(known).collect::<Outcome<Vec<bool>>>()?;
            if all_known.contains(&false) || *step == Step::Unknown {
                if all {
                    return Err(BAD_DATA);
                }
                continue;
            }
            let inputs: Vec<&[u32]> =
                operation.inputs.iter().filter_map(|i| dims.get(*i as usize)).map(Vec::as_slice).collect();
            let output = step.output(&inputs)?;
            for index in &operation.outputs {
                if let Some(slot) = dims.get_mut(*index as usize) {
                    *slot = merge(slot, &output)?;
                }
            }
        }
        Ok(dims)
    }

    /// The structure alone, which needs nothing of the client's.
    pub(crate) fn without_values(&self) -> Model {
        let bare = |o: &Operand| Operand { value: Value::Unset, ..o.clone() };
        Model {
            operands: self.operands.iter().map(bare).collect(),
            operations: self.operations.clone(),
            inputs: self.inputs.clone(),
            outputs: self.outputs.clone(),
            relaxed: self.relaxed,
            phase: self.phase,
            order: self.order.clone(),
        }
    }

    /// Whether a large constant changed or is gone.
    pub(crate) fn constant_changed(&self) -> bool {
        !self.operands.iter().all(|o| o.value.is_unchanged())
    }

    /// Whether a constant lies in this memory object.
    pub(crate) fn uses_memory(&self, handle: usize) -> bool {
        self.operands.iter().any(|o| matches!(&o.value, Value::InMemory { memory, .. } if *memory == handle))
    }
}
