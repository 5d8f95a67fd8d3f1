//! The part of a memory budget that keys and values may take: what is left, and then what neurons give up.
//!
//! A page of keys and values holds a [`Taken`], so memory is counted for exactly as long as it is there.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use crate::pipeline::Storage;

use super::{MemoryPlan, ModelError};

/// Memory for keys and values, shared by the sessions of an engine.
pub(crate) struct Room {
    plan: MemoryPlan,
    storage: Option<Arc<Storage>>,
    taken: Mutex<u64>,
}

/// Some bytes of a room; given back when dropped.
pub(crate) struct Taken {
    room: Option<Arc<Room>>,
    bytes: u64,
}

impl Room {
    pub fn new(plan: MemoryPlan, storage: Option<Arc<Storage>>) -> Room {
        Room { plan, storage, taken: Mutex::new(0) }
    }

    /// Takes some bytes of a room; of no room, everything is to be had.
    ///
    /// # Errors
    /// [`ModelError::ContextMemory`] when neither the budget nor the neurons have so much left.
    pub fn take(room: Option<&Arc<Room>>, bytes: u64) -> Result<Taken, ModelError> {
        if let Some(room) = room {
            let mut taken = room.taken.lock().unwrap_or_else(PoisonError::into_inner);
            let all = taken.saturating_add(bytes);
            room.fit(all)?;
            *taken = all;
        }
        Ok(Taken { room: room.cloned(), bytes })
    }

    /// Makes the neurons fit beside `kv` bytes.
    fn fit(&self, kv: u64) -> Result<(), ModelError> {
        let left = self.plan.budget.saturating_sub(self.plan.fixed);
        let refused = || ModelError::ContextMemory { budget: self.plan.budget, keys: kv };
        let (Some(storage), Some(neurons)) = (&self.storage, &self.plan.neurons) else {
            return if kv <= left { Ok(()) } else { Err(refused()) };
        };
        let slots = (left.saturating_sub(kv) / neurons.slot_bytes as u64) as usize;
        if slots < neurons.least {
            return Err(refused());
        }
        storage.resize(slots.min(neurons.cached)).map_err(|_| refused())
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        if let Some(room) = &self.room {
            let mut taken = room.taken.lock().unwrap_or_else(PoisonError::into_inner);
            *taken -= self.bytes;
            // More room for neurons: where that cannot be had now, it comes with the next page.
            let _ = room.fit(*taken);
        }
    }
}

impl fmt::Debug for Room {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Room({:?})", self.plan)
    }
}

impl fmt::Debug for Taken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Taken({} bytes)", self.bytes)
    }
}
