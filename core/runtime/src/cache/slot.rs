//! What is known of one slot.

use super::parts::PartStates;

/// The slot of a neuron that is not in memory, and the neuron of a slot that is free.
pub(super) const NONE: u32 = u32::MAX;

/// What is known of one slot, in 8 bytes: a cluster touches as many of them as it has neurons.
#[derive(Clone, Copy, Debug)]
pub(super) struct Slot {
    pub neuron: u32,
    pub holds: u16,
    pub parts: PartStates,
    /// Whether the policy has it.
    pub cold: bool,
}

impl Slot {
    pub(super) fn free() -> Slot {
        Slot { neuron: NONE, holds: 0, parts: PartStates::default(), cold: false }
    }

    /// Whether somebody uses or fills it.
    #[inline]
    pub(super) fn is_held(&self) -> bool {
        self.holds > 0 || !self.parts.loading().is_empty()
    }
}
