//! Memory that jobs share with devices, handed out as leases.
//!
//! An [`Arena`] is one aligned allocation cut into slots of equal size; a [`Buffer`] is an arena with one slot.
//! A lease is the only way to the bytes: any number of readers or one writer per slot, checked at run time with
//! one atomic. A job *owns* the leases of what it touches, so no safe code can race with a device that is still
//! working. This module and nothing else in the crate is unsafe; its invariant is: a `&[u8]` into a slot exists
//! only while that slot's count is positive, a `&mut [u8]` only while it is [`WRITER`].

#![allow(unsafe_code)]

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, Ordering};

use bytemuck::Pod;

use crate::DeviceError;

/// Lease count of a slot that is being written.
const WRITER: i32 = -1;

/// Alignment of every slot: a page, so that direct reads and imports by a GPU need no copy.
pub const SLOT_ALIGNMENT: usize = 4096;

struct Memory {
    start: NonNull<u8>,
    layout: Layout,
    /// Distance between slots, a multiple of [`SLOT_ALIGNMENT`].
    stride: usize,
    slot_bytes: usize,
    /// Per slot: 0 free, n > 0 readers, [`WRITER`].
    leases: Box<[AtomicI32]>,
}

// SAFETY: the bytes are reached through leases only, which the atomics in `leases` hand out to one writer or many
// readers; acquire on taking and release on dropping a lease order the accesses of different threads.
unsafe impl Send for Memory {}
// SAFETY: as for Send.
unsafe impl Sync for Memory {}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: `start` came from `alloc_zeroed` with this layout, and no lease can be alive: each holds an Arc.
        unsafe { dealloc(self.start.as_ptr(), self.layout) }
    }
}

/// Aligned memory cut into slots. Cheap to clone: clones share the memory.
#[derive(Clone)]
pub struct Arena {
    memory: Arc<Memory>,
}

impl Arena {
    /// Zeroed memory for `slots` slots of `slot_bytes` bytes each.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`] when the size overflows or the allocator refuses.
    pub fn new(slots: usize, slot_bytes: usize) -> Result<Arena, DeviceError> {
        let refuse =
            || DeviceError::OutOfMemory { device: "host".into(), bytes: slots.saturating_mul(slot_bytes) };
        let stride = slot_bytes.max(1).checked_next_multiple_of(SLOT_ALIGNMENT).ok_or_else(refuse)?;
        let bytes = stride.checked_mul(slots.max(1)).ok_or_else(refuse)?;
        let layout = Layout::from_size_align(bytes, SLOT_ALIGNMENT).map_err(|_| refuse())?;
        let mut leases = Vec::new();
        leases.try_reserve_exact(slots).map_err(|_| refuse())?;
        leases.resize_with(slots, || AtomicI32::new(0));
        // SAFETY: the layout has a size of at least one page.
        let start = NonNull::new(unsafe { alloc_zeroed(layout) }).ok_or_else(refuse)?;
        let leases = leases.into_boxed_slice();
        Ok(Arena { memory: Arc::new(Memory { start, layout, stride, slot_bytes, leases }) })
    }

    /// Number of slots.
    pub fn slots(&self) -> usize {
        self.memory.leases.len()
    }

    /// Bytes of one slot.
    pub fn slot_bytes(&self) -> usize {
        self.memory.slot_bytes
    }

    /// Leases a slot for reading.
    ///
    /// # Errors
    /// [`DeviceError::Leased`] while somebody writes it.
    ///
    /// # Panics
    /// When there is no such slot.
    pub fn read(&self, slot: usize) -> Result<ReadLease, DeviceError> {
        add_reader(&self.memory.leases[slot])?;
        Ok(ReadLease { memory: self.memory.clone(), slot })
    }

    /// Leases a slot for writing.
    ///
    /// # Errors
    /// [`DeviceError::Leased`] while somebody reads or writes it.
    ///
    /// # Panics
    /// When there is no such slot.
    pub fn write(&self, slot: usize) -> Result<WriteLease, DeviceError> {
        self.memory.leases[slot]
            .compare_exchange(0, WRITER, Ordering::Acquire, Ordering::Relaxed)
            .map_err(|_| DeviceError::Leased)?;
        Ok(WriteLease { memory: self.memory.clone(), slot })
    }

    /// Leases many slots for reading with one handle, so that a cluster of neurons costs one reference count.
    /// The list comes back from [`PinnedSlots::unpin`] for reuse.
    ///
    /// # Errors
    /// [`DeviceError::Leased`] while somebody writes one of them; then none is leased.
    ///
    /// # Panics
    /// When there is no such slot.
    pub fn pin(&self, slots: Vec<u32>) -> Result<PinnedSlots, DeviceError> {
        for (taken, slot) in slots.iter().enumerate() {
            if let Err(error) = add_reader(&self.memory.leases[*slot as usize]) {
                for slot in &slots[..taken] {
                    self.memory.leases[*slot as usize].fetch_sub(1, Ordering::Release);
                }
                return Err(error);
            }
        }
        Ok(PinnedSlots { memory: self.memory.clone(), slots })
    }
}

impl fmt::Debug for Arena {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Arena({} x {} bytes)", self.slots(), self.slot_bytes())
    }
}

fn add_reader(lease: &AtomicI32) -> Result<(), DeviceError> {
    lease
        .fetch_update(Ordering::Acquire, Ordering::Relaxed, |n| (n != WRITER).then(|| n + 1))
        .map(|_| ())
        .map_err(|_| DeviceError::Leased)
}

impl Memory {
    fn slot(&self, slot: usize) -> NonNull<u8> {
        // SAFETY: `slot` is below the number of slots (checked when the lease was taken), so this stays inside.
        unsafe { self.start.add(slot * self.stride) }
    }

    fn bytes(&self, slot: usize) -> &[u8] {
        // SAFETY: called by leases that hold a read count on the slot, or its only writer; initialised by zeroing.
        unsafe { std::slice::from_raw_parts(self.slot(slot).as_ptr(), self.slot_bytes) }
    }
}

/// Read access to one slot, until dropped.
pub struct ReadLease {
    memory: Arc<Memory>,
    slot: usize,
}

impl ReadLease {
    /// The bytes of the slot.
    pub fn bytes(&self) -> &[u8] {
        self.memory.bytes(self.slot)
    }

    /// The slot as a slice of `T`; a remainder smaller than one `T` is left out.
    pub fn slice<T: Pod>(&self) -> &[T] {
        typed(self.bytes())
    }
}

impl Drop for ReadLease {
    fn drop(&mut self) {
        self.memory.leases[self.slot].fetch_sub(1, Ordering::Release);
    }
}

/// Exclusive access to one slot, until dropped.
pub struct WriteLease {
    memory: Arc<Memory>,
    slot: usize,
}

impl WriteLease {
    /// The bytes of the slot.
    pub fn bytes(&self) -> &[u8] {
        self.memory.bytes(self.slot)
    }

    /// The bytes of the slot, to be written.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: this lease is the slot's only one, and `&mut self` makes this borrow the lease's only one.
        unsafe {
            std::slice::from_raw_parts_mut(self.memory.slot(self.slot).as_ptr(), self.memory.slot_bytes)
        }
    }

    /// The slot as a slice of `T`.
    pub fn slice<T: Pod>(&self) -> &[T] {
        typed(self.bytes())
    }

    /// The slot as a slice of `T`, to be written.
    pub fn slice_mut<T: Pod>(&mut self) -> &mut [T] {
        let bytes = self.bytes_mut();
        let whole = bytes.len() / size_of::<T>() * size_of::<T>();
        bytemuck::cast_slice_mut(&mut bytes[..whole])
    }
}

impl Drop for WriteLease {
    fn drop(&mut self) {
        self.memory.leases[self.slot].store(0, Ordering::Release);
    }
}

/// Read access to many slots of one arena, until dropped.
pub struct PinnedSlots {
    memory: Arc<Memory>,
    slots: Vec<u32>,
}

impl PinnedSlots {
    /// Number of slots pinned.
    pub fn len(&self) -> usize {
        self.slots.len()
    }

    /// Whether no slot is pinned.
    pub fn is_empty(&self) -> bool {
        self.slots.is_empty()
    }

    /// The bytes of the `index`th pinned slot.
    ///
    /// # Panics
    /// When fewer slots are pinned.
    pub fn bytes(&self, index: usize) -> &[u8] {
        self.memory.bytes(self.slots[index] as usize)
    }

    /// Gives the leases up and returns the list for reuse.
    pub fn unpin(mut self) -> Vec<u32> {
        self.release();
        std::mem::take(&mut self.slots)
    }

    fn release(&self) {
        for slot in &self.slots {
            self.memory.leases[*slot as usize].fetch_sub(1, Ordering::Release);
        }
    }
}

impl Drop for PinnedSlots {
    fn drop(&mut self) {
        self.release();
    }
}

fn typed<T: Pod>(bytes: &[u8]) -> &[T] {
    bytemuck::cast_slice(&bytes[..bytes.len() / size_of::<T>() * size_of::<T>()])
}

/// One piece of host-visible memory: an [`Arena`] with one slot.
#[derive(Clone, Debug)]
pub struct Buffer {
    arena: Arena,
}

impl Buffer {
    /// Zeroed host memory.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`].
    pub fn host(bytes: usize) -> Result<Buffer, DeviceError> {
        Ok(Buffer { arena: Arena::new(1, bytes)? })
    }

    /// Size in bytes.
    pub fn len(&self) -> usize {
        self.arena.slot_bytes()
    }

    /// Whether the buffer has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Leases it for reading.
    ///
    /// # Errors
    /// [`DeviceError::Leased`] while somebody writes it.
    pub fn read(&self) -> Result<ReadLease, DeviceError> {
        self.arena.read(0)
    }

    /// Leases it for writing.
    ///
    /// # Errors
    /// [`DeviceError::Leased`] while somebody reads or writes it.
    pub fn write(&self) -> Result<WriteLease, DeviceError> {
        self.arena.write(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_writer_or_many_readers() {
        let buffer = Buffer::host(10).unwrap();
        let mut writer = buffer.write().unwrap();
        assert_eq!(buffer.read().err(), Some(DeviceError::Leased));
        assert_eq!(buffer.write().err(), Some(DeviceError::Leased));
        writer.slice_mut::<f32>().fill(2.0);
        drop(writer);
        let (a, b) = (buffer.read().unwrap(), buffer.read().unwrap());
        assert_eq!(a.slice::<f32>(), [2.0, 2.0]);
        assert_eq!(buffer.write().err(), Some(DeviceError::Leased));
        drop((a, b));
        assert!(buffer.write().is_ok());
    }

    #[test]
    fn pins_are_all_or_nothing_and_give_their_list_back() {
        let arena = Arena::new(4, 100).unwrap();
        let writer = arena.write(2).unwrap();
        assert!(arena.pin(vec![0, 1, 2]).is_err());
        drop(writer);
        let pins = arena.pin(vec![0, 1, 2]).unwrap();
        assert_eq!((pins.len(), pins.bytes(1).len()), (3, 100));
        assert!(arena.write(1).is_err());
        assert_eq!(pins.unpin(), [0, 1, 2]);
        assert!(arena.write(1).is_ok());
    }

    #[test]
    fn a_size_that_cannot_be_had_is_an_error() {
        assert!(matches!(Arena::new(usize::MAX, 4096), Err(DeviceError::OutOfMemory { .. })));
        assert!(matches!(Buffer::host(usize::MAX - 5000), Err(DeviceError::OutOfMemory { .. })));
    }
}
