//! The parts of a neuron's bundle.

use std::ops::BitOr;

/// A set of parts of a bundle.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Parts(u8);

impl Parts {
    /// No part.
    pub const NONE: Parts = Parts(0);
    /// The row of gate.
    pub const GATE: Parts = Parts(1);
    /// The rows of up and down.
    pub const UP_DOWN: Parts = Parts(2);
    /// All there is.
    pub const BOTH: Parts = Parts(3);

    /// Whether there is none.
    #[inline]
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// Whether all of `other` are among these.
    #[inline]
    pub fn contains(self, other: Parts) -> bool {
        self.0 & other.0 == other.0
    }

    /// Those that are in both.
    #[inline]
    pub fn common(self, other: Parts) -> Parts {
        Parts(self.0 & other.0)
    }

    /// These without those of `other`.
    #[inline]
    pub fn without(self, other: Parts) -> Parts {
        Parts(self.0 & !other.0)
    }
}

impl BitOr for Parts {
    type Output = Parts;

    #[inline]
    fn bitor(self, other: Parts) -> Parts {
        Parts(self.0 | other.0)
    }
}

/// Which parts of a neuron are there, and which are being read, in one byte.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct PartStates(u8);

impl PartStates {
    /// None is there, and these are being read.
    #[inline]
    pub(super) fn reading(parts: Parts) -> PartStates {
        PartStates(parts.0 << 2)
    }

    #[inline]
    pub(super) fn ready(self) -> Parts {
        Parts(self.0 & 3)
    }

    #[inline]
    pub(super) fn loading(self) -> Parts {
        Parts(self.0 >> 2)
    }

    /// These are being read from now on.
    #[inline]
    pub(super) fn begin(&mut self, parts: Parts) {
        self.0 |= parts.0 << 2;
    }

    /// These are no longer being read, and are there if that went well.
    #[inline]
    pub(super) fn end(&mut self, parts: Parts, ok: bool) {
        self.0 &= !(parts.0 << 2);
        self.0 |= if ok { parts.0 } else { 0 };
    }
}
