//! Memory that jobs share with devices, handed out as leases.
//!
//! An [`Arena`] is one aligned allocation cut into slots of equal size; a [`Buffer`] is an arena with one slot.
//! A lease is the only way to the bytes: any number of readers or one writer per slot, checked at run time. A job *owns* the leases of what it touches, so no safe code can race with a device that is still
//! working. The invariant behind the unsafe code is: a `&[u8]` into a slot exists
//! only while that slot's count is positive, a `&mut [u8]` only while it is [`WRITER`].
//!
//! Each slot has a count. That of a buffer is one atomic. Jobs pin a thousand neurons at a time, for which a thousand
//! atomic operations take as long as a thirtieth of the job; so the counts of an arena with several slots change under
//! one lock, by plain loads and stores.
//!
//! An arena may also lie over foreign bytes, such as a memory map of a file ([`Arena::mapped`]); it is read-only then.
//! Both kinds keep a pointer to their first slot, so the way to a slot is the same and has no branch.

#![allow(unsafe_code)]

use std::fmt;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytemuck::Pod;

use crate::{AlignedBytes, DeviceError};

/// Lease count of a slot that is being written.
const WRITER: i32 = -1;

/// What a lease is for.
#[derive(Clone, Copy)]
enum Access {
    Read,
    Write,
}

impl Access {
    /// The count with one lease more, if the slot allows it.
    #[inline]
    fn add(self, count: i32) -> Option<i32> {
        match self {
            Access::Read if count == WRITER => None,
            Access::Read => count.checked_add(1),
            Access::Write => (count == 0).then_some(WRITER),
        }
    }

    /// The count with one lease less.
    #[inline]
    fn remove(self, count: i32) -> Option<i32> {
        match self {
            Access::Read => Some(count - 1),
            Access::Write => Some(0),
        }
    }
}

/// Alignment of an arena's first slot: a page, so that direct reads and imports by a GPU need no copy.
pub const ARENA_ALIGNMENT: usize = 4096;

/// Least alignment of a slot: a cache line, so that writers of neighbouring slots do not share one.
pub const SLOT_ALIGNMENT: usize = 64;

/// Lists of pinned slots that an arena keeps for reuse: as many as jobs are under way at once, roughly.
const MOST_LISTS: usize = 64;

/// Who owns the bytes.
enum Owner {
    Arena(#[expect(dead_code, reason = "keeps the bytes alive")] AlignedBytes),
    Foreign(#[expect(dead_code, reason = "keeps the bytes alive")] Arc<dyn AsRef<[u8]> + Send + Sync>),
}

struct Memory {
    /// The first slot, somewhere in the owner's bytes.
    first: NonNull<u8>,
    owner: Owner,
    /// Distance between slots, a multiple of their alignment.
    stride: usize,
    slot_bytes: usize,
    /// Per slot: 0 free, n > 0 readers, [`WRITER`]. With several slots they change only while `lists` is locked.
    leases: Box<[AtomicI32]>,
    /// Empty lists for [`Arena::take_list`].
    lists: Mutex<Vec<Vec<u32>>>,
}

// SAFETY: the bytes are reached through leases only, which the counts in `leases` hand out to one writer or many
// readers; the lock, or acquire on taking and release on dropping a lease, order the accesses of different threads.
unsafe impl Send for Memory {}
// SAFETY: as for Send.
unsafe impl Sync for Memory {}
// A panic while a lease is held drops the lease, and what it left in the bytes is still bytes.
impl std::panic::RefUnwindSafe for Memory {}

/// Aligned memory cut into slots. Cheap to clone: clones share the memory.
#[derive(Clone)]
pub struct Arena {
    memory: Arc<Memory>,
}

impl Arena {
    /// Zeroed memory for `slots` slots of `slot_bytes` bytes each. Each slot starts at a multiple of `alignment`, and
    /// the first at one of [`ARENA_ALIGNMENT`] too.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`] when the size overflows or the allocator refuses.
    ///
    /// # Panics
    /// When `alignment` is no power of two or below [`SLOT_ALIGNMENT`].
    pub fn new(slots: usize, slot_bytes: usize, alignment: usize) -> Result<Arena, DeviceError> {
        assert!(
            alignment.is_power_of_two() && alignment >= SLOT_ALIGNMENT,
            "slots cannot be aligned to {alignment} bytes: it takes a power of two from {SLOT_ALIGNMENT} on"
        );
        let refuse =
            || DeviceError::OutOfMemory { device: "host".into(), bytes: slots.saturating_mul(slot_bytes) };
        let stride = slot_bytes.max(1).checked_next_multiple_of(alignment).ok_or_else(refuse)?;
        let bytes = stride.checked_mul(slots.max(1)).ok_or_else(refuse)?;
        let mut leases = Vec::new();
        leases.try_reserve_exact(slots).map_err(|_| refuse())?;
        leases.resize_with(slots, || AtomicI32::new(0));
        let bytes = AlignedBytes::aligned(bytes, alignment.max(ARENA_ALIGNMENT)).map_err(|_| refuse())?;
        let leases = leases.into_boxed_slice();
        let lists = Mutex::default();
        let (first, owner) = (bytes.start(), Owner::Arena(bytes));
        Ok(Arena { memory: Arc::new(Memory { first, owner, stride, slot_bytes, leases, lists }) })
    }

    /// A read-only arena over bytes of somebody else, such as a memory map: `slots` slots of `stride` bytes, one after
    /// the other, from byte `offset` on. Slots are aligned as the bytes are, so take [`ReadLease::bytes`] of them;
    /// [`ReadLease::slice`] panics where they are not aligned for its type.
    ///
    /// # Errors
    /// [`DeviceError::Mismatch`] when there are not as many bytes, [`DeviceError::OutOfMemory`] when the counts of
    /// leases are not to be had.
    pub fn mapped(
        memory: Arc<dyn AsRef<[u8]> + Send + Sync>,
        offset: usize,
        slots: usize,
        stride: usize,
    ) -> Result<Arena, DeviceError> {
        let bytes = (*memory).as_ref();
        let end = slots.checked_mul(stride).and_then(|bytes| bytes.checked_add(offset));
        let inside = end.and_then(|end| bytes.get(offset..end)).ok_or(DeviceError::Mismatch {
            what: "bytes of mapped memory",
            needed: end.unwrap_or(usize::MAX),
            found: bytes.len(),
        })?;
        let first = NonNull::from(inside).cast();
        let mut leases = Vec::new();
        leases
            .try_reserve_exact(slots)
            .map_err(|_| DeviceError::OutOfMemory { device: "host".into(), bytes: slots })?;
        leases.resize_with(slots, || AtomicI32::new(0));
        let (leases, lists) = (leases.into_boxed_slice(), Mutex::default());
        let owner = Owner::Foreign(memory);
        Ok(Arena { memory: Arc::new(Memory { first, owner, stride, slot_bytes: stride, leases, lists }) })
    }

    /// Number of slots.
    pub fn slots(&self) -> usize {
        self.memory.leases.len()
    }

    /// Bytes of one slot.
    pub fn slot_bytes(&self) -> usize {
        self.memory.slot_bytes
    }

    /// Bytes from the start of a slot to that of the next.
    pub fn stride(&self) -> usize {
        self.memory.stride
    }

    /// Leases a slot for reading.
    ///
    /// # Errors
    /// [`DeviceError::Leased`] while somebody writes it.
    ///
    /// # Panics
    /// When there is no such slot.
    pub fn read(&self, slot: usize) -> Result<ReadLease, DeviceError> {
        self.memory.lease(self.run(&(slot..slot + 1)), Access::Read)?;
        Ok(ReadLease { memory: self.memory.clone(), slot, count: 1, len: self.memory.slot_bytes })
    }

    /// Leases neighbouring slots for reading, as one slice of [`Arena::stride`] bytes per slot.
    ///
    /// # Errors
    /// [`DeviceError::Leased`] while somebody writes one of them; then none is leased.
    ///
    /// # Panics
    /// When there are no such slots; then none is leased.
    pub fn read_run(&self, slots: Range<usize>) -> Result<ReadLease, DeviceError> {
        self.memory.lease(self.run(&slots), Access::Read)?;
        let (count, len) = (slots.len(), slots.len() * self.memory.stride);
        Ok(ReadLease { memory: self.memory.clone(), slot: slots.start, count, len })
    }

    /// Leases a slot for writing.
    ///
    /// # Errors
    /// [`DeviceError::Leased`] while somebody reads or writes it, [`DeviceError::ReadOnly`] for foreign bytes.
    ///
    /// # Panics
    /// When there is no such slot.
    pub fn write(&self, slot: usize) -> Result<WriteLease, DeviceError> {
        self.memory.check_writable()?;
        self.memory.lease(self.run(&(slot..slot + 1)), Access::Write)?;
        Ok(WriteLease { memory: self.memory.clone(), slot, count: 1, len: self.memory.slot_bytes })
    }

    /// Leases neighbouring slots for writing, as one slice of [`Arena::stride`] bytes per slot. So slots whose size is
    /// a multiple of their alignment lie in it without a gap, and one long read can fill them.
    ///
    /// # Errors
    /// As [`Arena::write`]; then none is leased.
    ///
    /// # Panics
    /// When there are no such slots; then none is leased.
    pub fn write_run(&self, slots: Range<usize>) -> Result<WriteLease, DeviceError> {
        self.memory.check_writable()?;
        self.memory.lease(self.run(&slots), Access::Write)?;
        let (count, len) = (slots.len(), slots.len() * self.memory.stride);
        Ok(WriteLease { memory: self.memory.clone(), slot: slots.start, count, len })
    }

    /// Gives the memory of whole pages inside these neighbouring slots back to the system, where that can be done (on
    /// Linux). The contents of the slots are unspecified from then on: what they were, or zero.
    ///
    /// # Errors
    /// As [`Arena::write_run`]; then nothing is given back.
    ///
    /// # Panics
    /// When there are no such slots.
    pub fn discard(&self, slots: Range<usize>) -> Result<(), DeviceError> {
        self.write_run(slots)?.discard();
        Ok(())
    }

    /// An empty list to fill for [`Arena::pin`]. The list of pins that were dropped comes back from here with its
    /// capacity, so a job that pins slots allocates nothing once as many jobs have run.
    pub fn take_list(&self) -> Vec<u32> {
        self.memory.lists().pop().unwrap_or_default()
    }

    /// Leases many slots for reading with one handle, so that a cluster of neurons costs one reference count. The
    /// list is best one from [`Arena::take_list`]; the arena keeps it when the pins are dropped.
    ///
    /// # Errors
    /// [`DeviceError::Leased`] while somebody writes one of them; then none is leased.
    ///
    /// # Panics
    /// When there is no such slot; then none is leased.
    pub fn pin(&self, slots: Vec<u32>) -> Result<PinnedSlots, DeviceError> {
        let count = self.slots();
        // Before the first lease: a panic between two would leave some taken for ever.
        if let Some(slot) = slots.iter().find(|slot| **slot as usize >= count) {
            panic!("there is no slot {slot} among {count}");
        }
        match self.memory.lease(slots.iter().map(|slot| *slot as usize), Access::Read) {
            Ok(()) => Ok(PinnedSlots { memory: self.memory.clone(), slots }),
            Err(error) => {
                self.memory.keep(slots);
                Err(error)
            }
        }
    }

    /// The slots of a run, each of which is there.
    fn run(&self, slots: &Range<usize>) -> Range<usize> {
        let count = self.slots();
        assert!(slots.start <= slots.end && slots.end <= count, "there are no slots {slots:?} among {count}");
        slots.clone()
    }
}

impl fmt::Debug for Arena {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Arena({} x {} bytes)", self.slots(), self.slot_bytes())
    }
}

/// Changes a count if `change` allows it. With `alone` nobody else changes it meanwhile.
#[inline]
fn update(lease: &AtomicI32, alone: bool, change: impl Fn(i32) -> Option<i32>) -> Result<(), DeviceError> {
    if alone {
        lease.store(change(lease.load(Ordering::Relaxed)).ok_or(DeviceError::Leased)?, Ordering::Relaxed);
        return Ok(());
    }
    let result = lease.fetch_update(Ordering::AcqRel, Ordering::Relaxed, change);
    result.map(|_| ()).map_err(|_| DeviceError::Leased)
}

impl Memory {
    fn check_writable(&self) -> Result<(), DeviceError> {
        match self.owner {
            Owner::Arena(_) => Ok(()),
            Owner::Foreign(_) => Err(DeviceError::ReadOnly),
        }
    }

    fn lists(&self) -> MutexGuard<'_, Vec<Vec<u32>>> {
        self.lists.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The lock under which counts change, where it takes one.
    fn alone(&self) -> Option<MutexGuard<'_, Vec<Vec<u32>>>> {
        (self.leases.len() > 1).then(|| self.lists())
    }

    /// Takes a lease of each of these slots, which are there, or of none.
    fn lease(&self, slots: impl Iterator<Item = usize> + Clone, access: Access) -> Result<(), DeviceError> {
        let lock = self.alone();
        for (taken, slot) in slots.clone().enumerate() {
            if let Err(error) = update(&self.leases[slot], lock.is_some(), |count| access.add(count)) {
                drop(lock);
                self.release(slots.take(taken), access);
                return Err(error);
            }
        }
        Ok(())
    }

    /// Gives up a lease of each of these slots.
    fn release(&self, slots: impl Iterator<Item = usize>, access: Access) {
        let lock = self.alone();
        for slot in slots {
            // Nothing refuses a lease less.
            let _ = update(&self.leases[slot], lock.is_some(), |count| access.remove(count));
        }
    }

    /// Keeps a list for reuse, unless there are many already.
    fn keep(&self, mut list: Vec<u32>) {
        list.clear();
        let mut lists = self.lists();
        if lists.len() < MOST_LISTS {
            lists.push(list);
        }
    }

    #[inline]
    fn slot(&self, slot: usize) -> NonNull<u8> {
        // SAFETY: `slot` is at most the number of slots (checked when the lease was taken), so this stays inside the
        // owner's bytes or is their end. They do not move: an arena's are its own, and foreign ones were borrowed
        // from a value that `owner` keeps shared, so nobody can have changed or freed them.
        unsafe { self.first.add(slot * self.stride) }
    }

    /// `len` bytes from the start of `slot` on.
    #[inline]
    fn bytes(&self, slot: usize, len: usize) -> &[u8] {
        // SAFETY: called by leases that hold a read count on all slots that the range touches, or are their only
        // writer; initialised by zeroing, or by who made the foreign bytes.
        unsafe { std::slice::from_raw_parts(self.slot(slot).as_ptr(), len) }
    }
}

/// Read access to one slot or a run of neighbours, until dropped.
pub struct ReadLease {
    memory: Arc<Memory>,
    slot: usize,
    count: usize,
    len: usize,
}

impl ReadLease {
    /// The bytes of the slot; of a run, [`Arena::stride`] bytes per slot.
    pub fn bytes(&self) -> &[u8] {
        self.memory.bytes(self.slot, self.len)
    }

    /// The bytes as a slice of `T`; a remainder smaller than one `T` is left out.
    pub fn slice<T: Pod>(&self) -> &[T] {
        typed(self.bytes())
    }
}

impl Drop for ReadLease {
    fn drop(&mut self) {
        self.memory.release(self.slot..self.slot + self.count, Access::Read);
    }
}

/// Exclusive access to one slot or a run of neighbours, until dropped.
pub struct WriteLease {
    memory: Arc<Memory>,
    slot: usize,
    count: usize,
    len: usize,
}

impl WriteLease {
    /// The slots.
    pub fn slots(&self) -> Range<usize> {
        self.slot..self.slot + self.count
    }

    /// The bytes of the slot; of a run, [`Arena::stride`] bytes per slot.
    pub fn bytes(&self) -> &[u8] {
        self.memory.bytes(self.slot, self.len)
    }

    /// The bytes, to be written.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: this lease is the only one of its slots, and `&mut self` makes this borrow the lease's only one. The
        // range ends before the next slot, and the memory is not foreign, or there were no such lease.
        unsafe { std::slice::from_raw_parts_mut(self.memory.slot(self.slot).as_ptr(), self.len) }
    }

    #[cfg(target_os = "linux")]
    fn discard(mut self) {
        let page = rustix::param::page_size();
        let bytes = self.bytes_mut();
        let skip = bytes.as_ptr().addr().next_multiple_of(page) - bytes.as_ptr().addr();
        let Some(bytes) = bytes.get_mut(skip..) else { return };
        let whole = bytes.len() / page * page;
        if whole > 0 {
            // SAFETY: the pages lie in memory that this lease alone may touch and that came from the allocator, so
            // reading zeros, or what was there, is all that can happen. A refusal only leaves the memory taken.
            let _ = unsafe {
                rustix::mm::madvise(bytes.as_mut_ptr().cast(), whole, rustix::mm::Advice::LinuxDontNeed)
            };
        }
    }

    #[cfg(not(target_os = "linux"))]
    fn discard(self) {}

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
        self.memory.release(self.slot..self.slot + self.count, Access::Write);
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

    /// Bytes of each slot.
    pub fn slot_bytes(&self) -> usize {
        self.memory.slot_bytes
    }

    /// The bytes of the `index`th pinned slot.
    ///
    /// # Panics
    /// When fewer slots are pinned.
    #[inline]
    pub fn bytes(&self, index: usize) -> &[u8] {
        self.memory.bytes(self.slots[index] as usize, self.memory.slot_bytes)
    }
}

impl Drop for PinnedSlots {
    fn drop(&mut self) {
        let slots = std::mem::take(&mut self.slots);
        self.memory.release(slots.iter().map(|slot| *slot as usize), Access::Read);
        self.memory.keep(slots);
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
        Ok(Buffer { arena: Arena::new(1, bytes, ARENA_ALIGNMENT)? })
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
        let arena = Arena::new(4, 100, 64).unwrap();
        let writer = arena.write(2).unwrap();
        assert!(arena.pin(vec![0, 1, 2]).is_err());
        drop(writer);
        let pins = arena.pin(vec![0, 1, 2]).unwrap();
        assert_eq!((pins.len(), pins.bytes(1).len()), (3, 100));
        assert!(arena.write(1).is_err());
        drop(pins);
        assert!(arena.write(1).is_ok());
        let lists = [arena.take_list(), arena.take_list(), arena.take_list()];
        assert_eq!(
            lists.each_ref().map(|list| (list.is_empty(), list.capacity() > 0)),
            [(true, true), (true, true), (true, false)]
        );
    }

    #[test]
    fn many_threads_never_see_a_slot_half_written() {
        let arena = Arena::new(3, 4096, 64).unwrap();
        let buffer = Buffer::host(4096).unwrap();
        std::thread::scope(|scope| {
            for seed in 0..4u8 {
                let (arena, buffer) = (&arena, &buffer);
                scope.spawn(move || {
                    for turn in 0..500 {
                        if let Ok(mut slot) = arena.write(turn % 3) {
                            slot.bytes_mut().fill(seed);
                        }
                        if let Ok(mut all) = buffer.write() {
                            all.bytes_mut().fill(seed);
                        }
                        let same = |bytes: &[u8]| assert!(bytes.iter().all(|byte| *byte == bytes[0]));
                        if let Ok(pins) = arena.pin(vec![2, 1]) {
                            (0..2).for_each(|index| same(pins.bytes(index)));
                        }
                        if let Ok(lease) = buffer.read() {
                            same(lease.bytes());
                        }
                    }
                });
            }
        });
        assert!(arena.write_run(0..3).is_ok() && buffer.write().is_ok(), "all leases were given back");
    }

    #[test]
    fn a_pin_of_a_slot_that_is_not_there_takes_nothing() {
        let arena = Arena::new(2, 8, 64).unwrap();
        let caught = std::panic::catch_unwind(|| arena.pin(vec![0, 1, 2]).map(drop));
        assert!(caught.is_err());
        assert!(arena.write(0).is_ok() && arena.write(1).is_ok());
    }

    #[test]
    fn small_slots_lie_close_and_only_the_arena_starts_a_page() {
        let arena = Arena::new(3, 100, 64).unwrap();
        let at = |slot| arena.read(slot).unwrap().bytes().as_ptr().addr();
        assert_eq!((at(0) % ARENA_ALIGNMENT, at(1) - at(0), at(2) - at(0)), (0, 128, 256));
        let arena = Arena::new(2, 1, 8192).unwrap();
        let at = |slot| arena.read(slot).unwrap().bytes().as_ptr().addr();
        assert_eq!((at(0) % 8192, at(1) - at(0)), (0, 8192));
    }

    #[test]
    fn a_run_is_one_slice_and_taken_whole_or_not_at_all() {
        let arena = Arena::new(6, 512, 512).unwrap();
        let reader = arena.read(3).unwrap();
        assert_eq!(arena.write_run(1..5).err(), Some(DeviceError::Leased));
        drop(reader);
        let mut run = arena.write_run(1..5).unwrap();
        assert_eq!(run.bytes().len(), 4 * 512);
        run.bytes_mut().fill(3);
        assert!(arena.read(0).is_ok() && arena.read(5).is_ok());
        assert!(arena.read(1).is_err() && arena.read(4).is_err() && arena.read_run(4..6).is_err());
        assert!(arena.write(5).is_ok(), "a run that was refused took nothing");
        drop(run);
        let (a, b) = (arena.read_run(0..3).unwrap(), arena.read(2).unwrap());
        assert!(a.bytes()[..512].iter().all(|b| *b == 0) && a.bytes()[512..].iter().all(|b| *b == 3));
        assert!(arena.write(2).is_err() && b.bytes() == &a.bytes()[1024..]);
        drop((a, b));
        assert!(arena.write_run(0..6).is_ok() && arena.write_run(6..6).unwrap().bytes().is_empty());
        let small = Arena::new(3, 100, 64).unwrap();
        assert_eq!(small.write_run(0..3).unwrap().bytes().len(), 3 * small.stride());
        assert!(std::panic::catch_unwind(|| small.write_run(2..4).map(drop)).is_err());
        assert!(small.write_run(0..3).is_ok());
    }

    #[test]
    fn discarded_slots_are_zero_or_as_they_were_and_their_neighbours_untouched() {
        let arena = Arena::new(8, 6144, 512).unwrap();
        arena.write_run(0..8).unwrap().bytes_mut().fill(7);
        let reader = arena.read(4).unwrap();
        assert_eq!(arena.discard(2..6), Err(DeviceError::Leased));
        assert!(reader.bytes().iter().all(|b| *b == 7));
        drop(reader);
        arena.discard(2..6).unwrap();
        let all = arena.read_run(0..8).unwrap();
        let (before, rest) = all.bytes().split_at(2 * 6144);
        let (between, after) = rest.split_at(4 * 6144);
        assert!(before.iter().chain(after).all(|b| *b == 7));
        if cfg!(target_os = "linux") {
            assert!(between.iter().filter(|b| **b == 0).count() >= 4 * 4096);
        }
        drop(all);
        assert!(arena.discard(0..0).is_ok() && arena.discard(0..8).is_ok());
    }

    #[test]
    fn mapped_bytes_are_read_in_place_and_never_written() {
        let bytes: Arc<Vec<u8>> = Arc::new((0..100).collect());
        let arena = Arena::mapped(bytes.clone(), 10, 9, 10).unwrap();
        assert_eq!((arena.slots(), arena.slot_bytes(), arena.stride()), (9, 10, 10));
        assert_eq!(arena.read(8).unwrap().bytes(), &bytes[90..]);
        assert_eq!(arena.read_run(1..4).unwrap().bytes(), &bytes[20..50]);
        assert_eq!(arena.pin(vec![2, 0]).unwrap().bytes(0).as_ptr(), bytes[30..].as_ptr());
        assert_eq!(arena.write(0).err(), Some(DeviceError::ReadOnly));
        assert_eq!(arena.write_run(0..2).err(), Some(DeviceError::ReadOnly));
        assert_eq!(arena.discard(0..2), Err(DeviceError::ReadOnly));
        for (offset, slots, stride) in [(11, 9, 10), (101, 0, 1), (0, usize::MAX, 2), (usize::MAX, 1, 1)] {
            let error = Arena::mapped(bytes.clone(), offset, slots, stride).err();
            assert!(matches!(error, Some(DeviceError::Mismatch { .. })), "{offset} {slots} {stride}");
        }
    }

    #[test]
    fn a_size_that_cannot_be_had_is_an_error() {
        assert!(matches!(Arena::new(usize::MAX, 4096, 64), Err(DeviceError::OutOfMemory { .. })));
        assert!(matches!(Buffer::host(usize::MAX - 5000), Err(DeviceError::OutOfMemory { .. })));
    }
}
