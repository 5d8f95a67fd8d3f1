//! Descriptions of opaque buffers: which inputs and outputs of which compilations a buffer is for.

use std::sync::Mutex;

use crate::codes::*;
use crate::memory::{Opaque, Role};
use crate::operand::{Shape, merge};

/// A description, until and after it is finished.
#[derive(Debug, Default)]
pub(crate) struct MemoryDesc {
    roles: Vec<Role>,
    shape: Option<Shape>,
    dims: Vec<u32>,
    finished: bool,
}

impl MemoryDesc {
    fn open(&mut self) -> Outcome<&mut MemoryDesc> {
        if self.finished { Err(BAD_STATE) } else { Ok(self) }
    }

    /// One more use; all uses must be of one type and have dimensions that agree.
    pub(crate) fn add(&mut self, role: Role, shape: Shape, frequency: f32) -> Outcome {
        let desc = self.open()?;
        if !(frequency > 0.0 && frequency <= 1.0) || desc.roles.contains(&role) {
            return Err(BAD_DATA);
        }
        let shape = match &desc.shape {
            None => shape,
            Some(first) => first.with(Some(&shape))?,
        };
        merge(&shape.dims, &desc.dims)?;
        desc.shape = Some(shape);
        desc.roles.push(role);
        Ok(())
    }

    /// Dimensions that the uses leave open.
    pub(crate) fn set_dimensions(&mut self, dims: Vec<u32>) -> Outcome {
        let desc = self.open()?;
        let dims = merge(&desc.dims, &dims)?;
        if let Some(shape) = &desc.shape {
            merge(&shape.dims, &dims)?;
        }
        desc.dims = dims;
        Ok(())
    }

    /// No more changes.
    pub(crate) fn finish(&mut self) -> Outcome {
        let desc = self.open()?;
        if desc.roles.is_empty() {
            return Err(BAD_DATA);
        }
        desc.finished = true;
        Ok(())
    }

    /// A buffer of this description, without a value.
    pub(crate) fn buffer(&self) -> Outcome<Opaque> {
        let shape = self.shape.as_ref().filter(|_| self.finished).ok_or(BAD_STATE)?;
        let shape = Shape { dims: merge(&shape.dims, &self.dims)?, ..shape.clone() };
        // Buffers of open size are optional in the interface, and not offered here.
        shape.bytes()?.ok_or(OP_FAILED)?;
        Ok(Opaque { shape, roles: self.roles.clone(), data: Mutex::new(None) })
    }
}
