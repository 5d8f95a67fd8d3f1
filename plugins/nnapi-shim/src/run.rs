//! One run of an execution, without the world's lock: read the inputs, compute, spoil what a test wants spoilt, write.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use half::f16;

use crate::codes::*;
use crate::compile::Plan;
use crate::execution::{Bound, Place};
use crate::faults::Injected;
use crate::operand::{Shape, merge};
use crate::ops::{decode, run};
use crate::peek::{checksum_at, copy_from};

/// A run that was allowed to start.
#[derive(Debug)]
pub(crate) struct Job {
    pub(crate) execution: usize,
    pub(crate) burst: Option<usize>,
    pub(crate) plan: Arc<Plan>,
    pub(crate) inputs: Vec<Bound>,
    pub(crate) outputs: Vec<Bound>,
    pub(crate) timeout: u64,
    pub(crate) injected: Injected,
}

/// What came out of a run.
#[derive(Debug, Default)]
pub(crate) struct Done {
    pub(crate) code: i32,
    /// The dimensions of each output and whether its buffer was large enough; empty after other failures.
    pub(crate) outputs: Vec<(Vec<u32>, bool)>,
    pub(crate) nanos: u64,
    pub(crate) violations: Vec<String>,
}

impl Job {
    /// Runs to the end, which is always an answer.
    pub(crate) fn run(&self) -> Done {
        let start = Instant::now();
        let mut done = Done::default();
        let outcome = catch_unwind(AssertUnwindSafe(|| self.work(&mut done)));
        done.code = match outcome {
            Ok(Ok(())) => NO_ERROR,
            Ok(Err(code)) => code,
            Err(_) => {
                done.violations.push("the stand-in panicked while it computed".into());
                OP_FAILED
            }
        };
        done.nanos = u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX);
        if done.code != NO_ERROR {
            // A failed run leaves buffers of the library without a value.
            for output in &self.outputs {
                if let Place::Opaque { opaque, .. } = &output.place {
                    opaque.put(None);
                }
            }
        }
        done
    }

    fn work(&self, done: &mut Done) -> Outcome {
        self.hang()?;
        if let Some(code) = self.injected.code {
            return Err(code);
        }
        let model = &self.plan.model;
        let given = |at: usize| self.inputs.get(at).map(|b| b.shape.dims.clone());
        let dims = model.dimensions(&given, true)?;
        let shape_of = |index: &u32| -> Outcome<Shape> {
            let dims = dims.get(*index as usize).ok_or(OP_FAILED)?.clone();
            let shape = &model.operands.get(*index as usize).ok_or(OP_FAILED)?.shape;
            Ok(Shape { dims, ..shape.clone() })
        };
        let mut sizes = Vec::new();
        for (bound, index) in self.outputs.iter().zip(&model.outputs) {
            let shape = shape_of(index)?;
            merge(&shape.dims, &bound.shape.dims)?;
            let size = shape.bytes()?.ok_or(OP_FAILED)?;
            done.outputs.push((shape.dims, size <= bound.len));
            sizes.push(size);
        }
        if done.outputs.iter().any(|(_, fits)| !fits) {
            return Err(OUTPUT_INSUFFICIENT_SIZE);
        }
        let mut inputs = Vec::new();
        for (bound, index) in self.inputs.iter().zip(&model.inputs) {
            let shape = shape_of(index)?;
            let bytes = read(bound, shape.bytes()?.ok_or(OP_FAILED)?, done)?;
            inputs.push(decode(shape.kind, &shape.dims, &bytes, model.relaxed)?);
        }
        let outputs = run(&self.plan, &dims, inputs)?;
        for ((bound, mut bytes), size) in self.outputs.iter().zip(outputs).zip(sizes) {
            if bytes.len() != size {
                return Err(OP_FAILED);
            }
            self.spoil(bound.shape.kind, &mut bytes);
            write(bound, &bytes, done)?;
        }
        Ok(())
    }

    /// Pretends to work for as long as a test wants, or until the client's deadline.
    fn hang(&self) -> Outcome {
        let hang = Duration::from_millis(self.injected.hang_ms);
        let limit = Duration::from_nanos(self.timeout);
        let late = self.plan.deadlines && !limit.is_zero() && hang > limit;
        std::thread::sleep(if late { limit } else { hang });
        if late { Err(MISSED_DEADLINE_TRANSIENT) } else { Ok(()) }
    }

    /// The outputs as a broken device would leave them.
    fn spoil(&self, kind: i32, bytes: &mut [u8]) {
        if self.injected.nan {
            bytes.fill(0xFF);
        }
        if self.injected.tile {
            spoil_tile(kind, bytes);
        }
    }
}

/// Makes the last 64 elements wrong by far, and leaves them numbers.
fn spoil_tile(kind: i32, bytes: &mut [u8]) {
    match kind {
        TENSOR_FLOAT32 => {
            for element in bytes.as_chunks_mut::<4>().0.iter_mut().rev().take(64) {
                let value = f32::from_le_bytes(*element);
                *element = (value + value.abs() + 1.0).to_le_bytes();
            }
        }
        TENSOR_FLOAT16 => {
            for element in bytes.as_chunks_mut::<2>().0.iter_mut().rev().take(64) {
                let value = f16::from_le_bytes(*element).to_f32();
                *element = f16::from_f32(value + value.abs() + 1.0).to_le_bytes();
            }
        }
        _ => {
            for byte in bytes.iter_mut().rev().take(64) {
                *byte ^= 0x40;
            }
        }
    }
}

/// The bytes of an input.
fn read(bound: &Bound, size: usize, done: &mut Done) -> Outcome<Vec<u8>> {
    match &bound.place {
        Place::Address(at) => {
            let bytes = copy_from(*at, size).map(|(bytes, _)| bytes);
            if bytes.is_none() {
                done.violations.push("an input's buffer cannot be read".into());
            }
            bytes.ok_or(UNMAPPABLE)
        }
        Place::Region { region, offset, .. } => region.read(*offset, size),
        Place::Opaque { opaque, .. } => opaque.get().filter(|v| v.len() == size).ok_or(OP_FAILED),
    }
}

/// Puts an output where the client wants it.
fn write(bound: &Bound, bytes: &[u8], done: &mut Done) -> Outcome {
    match &bound.place {
        Place::Address(at) => {
            if checksum_at(*at, bytes.len()).is_none() {
                done.violations.push("an output's buffer is gone".into());
                return Err(UNMAPPABLE);
            }
            let to = std::ptr::with_exposed_provenance_mut::<u8>(*at);
            // SAFETY: the client promised that this buffer of at least as many bytes lives until the run ends, and that
            // nothing else of the execution lies over it, which was checked.
            unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
            Ok(())
        }
        Place::Region { region, offset, .. } => region.write(*offset, bytes),
        Place::Opaque { opaque, .. } => {
            opaque.put(Some(bytes.to_vec()));
            Ok(())
        }
    }
}
