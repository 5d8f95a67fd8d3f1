//! A ring of pieces of memory through which layers pass whole: prompts, and models without sparsity.
//!
//! All neurons of a layer are needed, in order, and everybody knows what comes after them. So the reads are long, run
//! some pieces ahead of the computation, and go on over the border of a layer (PowerInfer-2 section 4.1.1). What is in
//! the cache is left alone: a prompt must not drive out what decoding needs.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use neuropil_device::DeviceError;

/// Pieces of a ring: one that is computed, and those that are read meanwhile.
pub(crate) const PIECES: usize = 4;

/// What lies in a piece: neurons of a unit from a position on.
pub(super) type Key = (usize, usize);

/// The state of a piece.
#[derive(Clone, Copy, Debug, Default)]
struct Piece {
    holds: Option<Key>,
    /// Reads that have not arrived.
    missing: usize,
    failed: bool,
}

/// What has arrived; shared with the thread that reads.
#[derive(Default)]
pub(super) struct Arrivals {
    pieces: Mutex<[Piece; PIECES]>,
    changed: Condvar,
    /// Nobody reads any more. Written under the lock.
    broken: AtomicBool,
}

impl Arrivals {
    fn lock(&self) -> MutexGuard<'_, [Piece; PIECES]> {
        self.pieces.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// One read of a piece is done.
    pub fn arrived(&self, piece: usize, ok: bool) {
        if let Some(piece) = self.lock().get_mut(piece) {
            piece.missing = piece.missing.saturating_sub(1);
            piece.failed |= !ok;
        }
    }

    /// Wakes who waits.
    pub fn tell(&self) {
        self.changed.notify_all();
    }

    /// Nobody reads any more: who waits, now or later, is told that reads have failed.
    pub fn give_up(&self) {
        let pieces = self.lock();
        self.broken.store(true, Ordering::Relaxed);
        drop(pieces);
        self.tell();
    }
}

/// See the module.
pub(crate) struct Ring {
    /// Slots of the arena.
    slots: Range<usize>,
    arrivals: Arc<Arrivals>,
    /// Held by whoever passes a layer through.
    user: Mutex<()>,
}

impl Ring {
    /// A ring over these slots.
    pub fn new(slots: Range<usize>) -> Result<Ring, DeviceError> {
        if slots.len() < PIECES {
            return Err(DeviceError::Mismatch {
                what: "slots of a ring",
                needed: PIECES,
                found: slots.len(),
            });
        }
        Ok(Ring { slots, arrivals: Arc::default(), user: Mutex::default() })
    }

    pub(super) fn arrivals(&self) -> Arc<Arrivals> {
        self.arrivals.clone()
    }

    /// Neurons of a piece.
    pub fn len(&self) -> usize {
        self.slots.len() / PIECES
    }

    /// The slots of a piece.
    pub fn slots(&self, piece: usize) -> Range<usize> {
        let start = self.slots.start + piece * self.len();
        start..start + self.len()
    }

    /// Whether nobody reads any more.
    pub(super) fn is_broken(&self) -> bool {
        self.arrivals.broken.load(Ordering::Relaxed)
    }

    /// The right to pass a layer through.
    pub(super) fn enter(&self) -> MutexGuard<'_, ()> {
        self.user.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The piece that holds this, is about to, or has failed to.
    pub(super) fn find(&self, key: Key) -> Option<usize> {
        self.arrivals.lock().iter().position(|piece| piece.holds == Some(key))
    }

    /// Forgets what could not be read ahead, so that it is tried again now that it is needed.
    pub(super) fn forget_failures(&self) {
        let mut pieces = self.arrivals.lock();
        for piece in pieces.iter_mut().filter(|piece| piece.failed) {
            // Reads that are still under way keep the piece from being taken.
            *piece = Piece { missing: piece.missing, ..Piece::default() };
        }
    }

    /// Takes a piece for new contents: one that holds none of what is `wanted` and for which no read is under way.
    pub(super) fn take(&self, key: Key, wanted: &[Key]) -> Option<usize> {
        let mut pieces = self.arrivals.lock();
        let free = |piece: &Piece| piece.missing == 0 && piece.holds.is_none_or(|key| !wanted.contains(&key));
        let index = pieces.iter().position(free)?;
        pieces[index] = Piece { holds: Some(key), missing: 0, failed: false };
        Some(index)
    }

    /// How many reads will fill a piece.
    pub fn expect(&self, piece: usize, reads: usize) {
        self.arrivals.lock()[piece].missing = reads;
    }

    /// A piece cannot be filled.
    pub(super) fn abandon(&self, piece: usize) {
        self.arrivals.lock()[piece] = Piece::default();
    }

    /// Waits until a piece is complete; whether its reads were well.
    pub(super) fn wait(&self, piece: usize) -> bool {
        let mut pieces = self.arrivals.lock();
        while pieces[piece].missing > 0 && !self.is_broken() {
            pieces = self.arrivals.changed.wait(pieces).unwrap_or_else(PoisonError::into_inner);
        }
        if pieces[piece].missing > 0 {
            return false;
        }
        if pieces[piece].failed {
            pieces[piece] = Piece::default();
            return false;
        }
        true
    }

    /// Waits until some piece has no reads under way, or all have none. False when nobody reads any more.
    pub(super) fn wait_any(&self) -> bool {
        let pieces = self.arrivals.lock();
        let busy = pieces.iter().filter(|piece| piece.missing > 0).count();
        let done = |pieces: &mut [Piece; PIECES]| pieces.iter().filter(|p| p.missing > 0).count() >= busy;
        let _pieces = self
            .arrivals
            .changed
            .wait_while(pieces, |pieces| busy > 0 && done(pieces) && !self.is_broken())
            .unwrap_or_else(PoisonError::into_inner);
        !self.is_broken()
    }
}
