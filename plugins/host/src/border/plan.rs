//! Prepared weights as bytes, and back.

use std::ffi::c_void;
use std::sync::{Mutex, PoisonError};

use neuropil_plugin_abi::{self as abi, AbiStruct, NpPlan, NpPrepared};

use super::unit::{Parts, Unit, WeightHandle};
use super::{Failure, call, not_offered};

/// What a plugin has written of a plan.
struct Written {
    bytes: Vec<u8>,
    most: usize,
    /// A piece was refused; what came after it is of no use.
    refused: bool,
}

impl Written {
    /// Takes the next piece, unless there is no room for it.
    ///
    /// # Safety
    /// `data` is NULL or has `bytes` bytes that can be read.
    unsafe fn take(&mut self, data: *const c_void, bytes: u64) -> bool {
        let room = self.most.saturating_sub(self.bytes.len());
        let bytes = usize::try_from(bytes).ok().filter(|bytes| *bytes <= room && !self.refused);
        let Some(bytes) = bytes.filter(|bytes| self.bytes.try_reserve(*bytes).is_ok()) else { return false };
        if bytes == 0 {
            return true;
        }
        if data.is_null() {
            return false;
        }
        // SAFETY: as of this function.
        self.bytes.extend_from_slice(unsafe { std::slice::from_raw_parts(data.cast::<u8>(), bytes) });
        true
    }
}

unsafe extern "C" fn write(context: *mut c_void, data: *const c_void, bytes: u64) -> i32 {
    // SAFETY: the context is that of the call under way, and the plugin vouches for the bytes.
    let taken = unsafe {
        let mut written = (*context.cast::<Mutex<Written>>()).lock().unwrap_or_else(PoisonError::into_inner);
        let taken = written.take(data, bytes);
        written.refused |= !taken;
        taken
    };
    i32::from(!taken)
}

impl Unit {
    /// Whether plans can be saved and loaded.
    pub fn has_plans(&self) -> bool {
        self.library.table.save_plan.is_some() && self.library.table.load_plan.is_some()
    }

    /// A weight of this unit as bytes, at most `most`.
    pub fn save_plan(&self, weight: &WeightHandle, most: usize) -> Result<Vec<u8>, Failure> {
        let function = self.library.table.save_plan.ok_or_else(|| not_offered("save_plan"))?;
        let most = most.min(isize::MAX as usize);
        let written = Mutex::new(Written { bytes: Vec::new(), most, refused: false });
        let context = (&raw const written).cast_mut().cast();
        // SAFETY: the unit is open, the weight is its own, and what is written to lives until the call returns.
        call(|status| unsafe { function(self.device, weight.weight, context, Some(write), status) })?;
        let written = written.into_inner().unwrap_or_else(PoisonError::into_inner);
        if written.refused {
            return Err(Failure::new(abi::NP_CANCELLED, "the plan is larger than there is room for"));
        }
        Ok(written.bytes)
    }

    /// The weight that `save_plan` made of these parts.
    pub fn load_plan(&self, plan: &[u8], parts: &Parts<'_>) -> Result<WeightHandle, Failure> {
        let function = self.library.table.load_plan.ok_or_else(|| not_offered("load_plan"))?;
        let plan = NpPlan { data: plan.as_ptr().cast(), data_bytes: plan.len() as u64, ..NpPlan::new() };
        let mut prepared = NpPrepared::new();
        // SAFETY: the unit is open, and the bytes live until the call returns.
        call(|status| unsafe { function(self.device, &plan, &mut prepared, status) })?;
        WeightHandle::new(&prepared, parts)
            .ok_or_else(|| Failure::new(abi::NP_INTERNAL, "load_plan gave no weight"))
    }
}
