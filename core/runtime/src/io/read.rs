//! A read, its targets, and how it is cut into transfers that storage accepts.
//!
//! Direct reads must begin and end at multiples of a block and go to aligned memory. A read that is so goes straight to
//! its target; any other becomes transfers of the covering blocks into buffers of the engine, from which its bytes are
//! copied. The cut is the same for all engines, so they give the same bytes.

use std::ops::{Deref, DerefMut};

use neuropil_device::WriteLease;

use super::IoError;

/// One read: `len` bytes at `offset` of file number `file`, put where `targets` say.
pub struct Read {
    /// Comes back with the result; the engine does not look at it.
    pub tag: u64,
    /// Index among the engine's files.
    pub file: usize,
    /// First byte.
    pub offset: u64,
    /// Bytes to read.
    pub len: usize,
    /// Where they go.
    pub targets: Targets,
}

/// Where a part of a read goes: `len` bytes from byte `from` of the read on go to byte `at` of the lease. Bytes of a
/// read that no target names are dropped.
pub struct Target {
    /// The memory.
    pub to: WriteLease,
    /// Byte of the lease's memory that is written first.
    pub at: usize,
    /// Byte of the read that goes there.
    pub from: usize,
    /// Bytes that go there.
    pub len: usize,
}

/// The targets of a read. One, the usual case, needs no allocation.
pub enum Targets {
    /// A single target.
    One(Target),
    /// Any number of targets.
    Many(Vec<Target>),
}

/// What became of a read. The targets come back; their bytes are those of the file if `result` is `Ok`, and else
/// unspecified.
pub struct Done {
    /// The read's tag.
    pub tag: u64,
    /// The read's targets. Empty if the kernel failed in a way that leaves open whether it still writes to them.
    pub targets: Targets,
    /// Whether all bytes are there.
    pub result: Result<(), IoError>,
}

impl Target {
    /// All `len` bytes of a read go to the first bytes of `to`.
    pub fn whole(to: WriteLease, len: usize) -> Target {
        Target { to, at: 0, from: 0, len }
    }
}

impl Targets {
    /// Adds a target.
    pub fn push(&mut self, target: Target) {
        match self {
            Targets::Many(targets) => targets.push(target),
            Targets::One(_) => {
                if let Targets::One(first) = std::mem::take(self) {
                    *self = Targets::Many(vec![first, target]);
                }
            }
        }
    }

    /// Adds those of another read.
    pub(crate) fn append(&mut self, more: Targets) {
        match more {
            Targets::One(target) => self.push(target),
            Targets::Many(targets) => targets.into_iter().for_each(|target| self.push(target)),
        }
    }
}

impl Default for Targets {
    fn default() -> Self {
        Targets::Many(Vec::new())
    }
}

impl From<Target> for Targets {
    fn from(target: Target) -> Self {
        Targets::One(target)
    }
}

impl From<Vec<Target>> for Targets {
    fn from(targets: Vec<Target>) -> Self {
        Targets::Many(targets)
    }
}

impl Deref for Targets {
    type Target = [Target];

    fn deref(&self) -> &[Target] {
        match self {
            Targets::One(target) => std::slice::from_ref(target),
            Targets::Many(targets) => targets,
        }
    }
}

impl DerefMut for Targets {
    fn deref_mut(&mut self) -> &mut [Target] {
        match self {
            Targets::One(target) => std::slice::from_mut(target),
            Targets::Many(targets) => targets,
        }
    }
}

/// A part of a read that is one transfer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Piece {
    /// Byte of the file where the transfer begins, aligned.
    pub(super) start: u64,
    /// Bytes to transfer, aligned.
    pub(super) span: usize,
    /// Bytes at its beginning that the read did not ask for.
    pub(super) skip: usize,
    /// First byte of the read that it brings.
    pub(super) from: usize,
    /// Bytes of the read that it brings.
    pub(super) len: usize,
}

impl Read {
    /// Whether the numbers fit together, so that the arithmetic on them is safe.
    pub(super) fn check(&self, files: usize) -> Result<(), IoError> {
        let misfit = |what| Err(IoError::Misfit { offset: self.offset, len: self.len, what });
        if self.file >= files {
            return Err(IoError::NoSuchFile { file: self.file, files });
        }
        // Half the range of file offsets, so that rounding up to a block cannot overflow.
        let end = self.offset.checked_add(self.len as u64).filter(|end| *end < 1 << 62);
        if end.is_none() || self.len > isize::MAX as usize / 2 {
            return misfit("the offsets of a file");
        }
        for target in self.targets.iter() {
            if target.from.checked_add(target.len).is_none_or(|end| end > self.len) {
                return misfit("a target, which names bytes beyond it");
            }
            if target.at.checked_add(target.len).is_none_or(|end| end > target.to.bytes().len()) {
                return misfit("a target, whose memory is too small");
            }
        }
        Ok(())
    }

    /// Whether this read can go straight to its target.
    pub(super) fn straight(&self, alignment: usize) -> bool {
        let [target] = &self.targets[..] else { return false };
        let whole = target.from == 0 && target.len == self.len;
        let memory = target.to.bytes().as_ptr().addr().wrapping_add(target.at);
        let aligned = [self.len, memory].into_iter().all(|number| number.is_multiple_of(alignment));
        whole && aligned && self.offset.is_multiple_of(alignment as u64)
    }

    /// The memory of a read that goes straight to its target.
    pub(super) fn straight_memory(&mut self) -> &mut [u8] {
        match &mut self.targets[..] {
            [target] => target.to.bytes_mut().get_mut(target.at..).unwrap_or_default(),
            _ => &mut [],
        }
    }

    /// The transfers of this read, of at most `most` bytes each, a multiple of `alignment`. None if it has no bytes. Those
    /// of a read that goes straight to its target bring nothing that it did not ask for.
    pub(super) fn pieces(&self, alignment: usize, most: usize) -> impl Iterator<Item = Piece> + use<> {
        let (offset, len) = (self.offset, self.len);
        let mut from = 0;
        std::iter::from_fn(move || {
            let left = len.checked_sub(from).filter(|left| *left > 0)?;
            let at = offset + from as u64;
            let skip = (at % alignment as u64) as usize;
            let span = (skip + left).next_multiple_of(alignment).min(most);
            let piece = Piece { start: at - skip as u64, span, skip, from, len: left.min(span - skip) };
            from += piece.len;
            Some(piece)
        })
    }

    /// Copies `bytes`, which are those of the read from byte `from` on, to the targets that want them.
    pub(super) fn deliver(&mut self, from: usize, bytes: &[u8]) {
        for target in self.targets.iter_mut() {
            let (begin, end) = (target.from.max(from), (target.from + target.len).min(from + bytes.len()));
            if begin < end {
                let at = target.at + (begin - target.from);
                target.to.bytes_mut()[at..at + (end - begin)]
                    .copy_from_slice(&bytes[begin - from..end - from]);
            }
        }
    }

    /// The read as it comes back.
    pub(super) fn done(self, result: Result<(), IoError>) -> Done {
        Done { tag: self.tag, targets: self.targets, result }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_cover_a_read_once_and_are_aligned() {
        for (offset, len) in
            [(0, 1), (5, 0), (511, 2), (512, 512), (700, 9000), (1 << 40, 4096), (4095, 8193)]
        {
            let read = Read { tag: 0, file: 0, offset, len, targets: Targets::default() };
            let mut at = 0;
            for piece in read.pieces(512, 2048) {
                assert!(piece.start.is_multiple_of(512) && piece.span.is_multiple_of(512), "{piece:?}");
                assert!(piece.span <= 2048 && piece.skip < 512 && piece.len > 0);
                assert!(piece.skip + piece.len <= piece.span);
                assert_eq!((piece.from, piece.start + piece.skip as u64), (at, offset + at as u64));
                at += piece.len;
            }
            assert_eq!(at, len);
        }
    }
}
