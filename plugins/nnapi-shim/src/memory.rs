//! Memory objects: a mapped part of a file, or a buffer that only the library sees into.
//!
//! A mapping lives as long as anything refers to it, whatever the client frees, so a breach of order is counted and no crash.

use std::fs::File;
use std::os::fd::{BorrowedFd, OwnedFd, RawFd};
use std::sync::{Arc, Mutex, PoisonError};

use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use crate::codes::*;
use crate::operand::Shape;
use crate::peek::Checksum;

/// A part of a file in memory.
#[derive(Debug)]
pub(crate) struct Region {
    address: usize,
    len: usize,
    protection: ProtFlags,
    file: File,
    /// Bytes that the file must have.
    end: u64,
}

/// A buffer of the library, made for some inputs and outputs.
#[derive(Debug)]
pub(crate) struct Opaque {
    pub(crate) shape: Shape,
    pub(crate) roles: Vec<Role>,
    /// The value, once there is one.
    pub(crate) data: Mutex<Option<Vec<u8>>>,
}

/// What a buffer may be used for: an input or output of a compilation, by position.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Role {
    pub(crate) compilation: usize,
    pub(crate) index: usize,
    pub(crate) output: bool,
}

/// A memory object.
#[derive(Debug, Clone)]
pub(crate) enum Memory {
    Mapped(Arc<Region>),
    Opaque(Arc<Opaque>),
}

impl Region {
    /// Maps `size` bytes of a file from `offset` on. The descriptor is duplicated.
    pub(crate) fn map(size: usize, protect: i32, fd: RawFd, offset: usize) -> Outcome<Region> {
        let bits = u32::try_from(protect).map_err(|_| BAD_DATA)?;
        let protection = ProtFlags::from_bits(bits).ok_or(BAD_DATA)?;
        let page = rustix::param::page_size();
        let allowed = ProtFlags::READ | ProtFlags::WRITE;
        if size == 0 || fd < 0 || !offset.is_multiple_of(page) || !allowed.contains(protection) {
            return Err(BAD_DATA);
        }
        // SAFETY: the descriptor is borrowed for the duplication only; a closed one makes that fail.
        let copy: OwnedFd =
            unsafe { BorrowedFd::borrow_raw(fd) }.try_clone_to_owned().map_err(|_| BAD_DATA)?;
        let end = (offset as u64).checked_add(size as u64).ok_or(BAD_DATA)?;
        let file = File::from(copy);
        if file.metadata().map_err(|_| UNMAPPABLE)?.len() < end {
            return Err(BAD_DATA);
        }
        // SAFETY: a new mapping, placed by the kernel, of a file that is at least that long.
        let address =
            unsafe { mmap(std::ptr::null_mut(), size, protection, MapFlags::SHARED, &file, offset as u64) };
        let address = address.map_err(|_| UNMAPPABLE)?.expose_provenance();
        Ok(Region { address, len: size, protection, file, end })
    }

    /// The bytes of the mapping.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// The address of a byte of the mapping.
    pub(crate) fn address(&self, offset: usize) -> usize {
        self.address + offset
    }

    /// The range can be touched: inside, allowed, and the file was not cut since.
    fn check(&self, offset: usize, len: usize, need: ProtFlags) -> Outcome {
        let inside = offset.checked_add(len).is_some_and(|end| end <= self.len);
        let long = self.file.metadata().is_ok_and(|m| m.len() >= self.end);
        if !inside {
            return Err(BAD_DATA);
        }
        if long && self.protection.contains(need) { Ok(()) } else { Err(UNMAPPABLE) }
    }

    fn pointer(&self, offset: usize) -> *mut u8 {
        std::ptr::with_exposed_provenance_mut(self.address + offset)
    }

    /// A copy of some bytes.
    pub(crate) fn read(&self, offset: usize, len: usize) -> Outcome<Vec<u8>> {
        self.check(offset, len, ProtFlags::READ)?;
        let mut bytes = vec![0u8; len];
        // SAFETY: the range is inside a readable mapping. Other processes may write there, so it is copied, never borrowed.
        unsafe { std::ptr::copy_nonoverlapping(self.pointer(offset).cast_const(), bytes.as_mut_ptr(), len) };
        Ok(bytes)
    }

    /// Puts bytes in.
    pub(crate) fn write(&self, offset: usize, bytes: &[u8]) -> Outcome {
        self.check(offset, bytes.len(), ProtFlags::WRITE)?;
        // SAFETY: the range is inside a writable mapping, and `bytes` is no part of it.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.pointer(offset), bytes.len()) };
        Ok(())
    }

    /// The checksum of some bytes.
    pub(crate) fn checksum(&self, offset: usize, len: usize) -> Outcome<u64> {
        Ok(Checksum::of(&self.read(offset, len)?))
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: this mapping was made by `map`, and nothing refers to it any more.
        let _ = unsafe { munmap(self.pointer(0).cast(), self.len) };
    }
}

impl Opaque {
    /// The value.
    pub(crate) fn get(&self) -> Option<Vec<u8>> {
        self.data.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// A new value, or none after a failure.
    pub(crate) fn put(&self, value: Option<Vec<u8>>) {
        *self.data.lock().unwrap_or_else(PoisonError::into_inner) = value;
    }
}

impl Memory {
    /// Copies one object over another of the same size.
    pub(crate) fn copy_to(&self, to: &Memory) -> Outcome {
        let bytes = match self {
            Memory::Mapped(region) => region.read(0, region.len())?,
            Memory::Opaque(opaque) => opaque.get().ok_or(BAD_DATA)?,
        };
        let size = match to {
            Memory::Mapped(region) => region.len(),
            Memory::Opaque(opaque) => opaque.shape.bytes()?.ok_or(BAD_DATA)?,
        };
        match to {
            _ if bytes.len() != size => Err(BAD_DATA),
            Memory::Mapped(region) => region.write(0, &bytes),
            Memory::Opaque(opaque) => {
                opaque.put(Some(bytes));
                Ok(())
            }
        }
    }
}
