//! Large pieces of aligned memory, on huge pages where the system has them.
//!
//! A neuron is read from a random place of gigabytes. With pages of 4 KiB each read first waits for the page table,
//! which on a virtual machine is walked twice; with huge pages it does not. So everything that holds weights is made
//! of these bytes.

#![allow(unsafe_code)]

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ptr::NonNull;

/// The request of this many bytes could not be met.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0} more bytes of memory are not to be had")]
pub struct OutOfMemory(pub usize);

const ALIGN: usize = 64;
/// Buffers from this size on begin on a huge page.
const HUGE_FROM: usize = 8 << 20;
const HUGE_PAGE: usize = 2 << 20;

/// Owned bytes that start on a cache line, and on a huge page when they are many.
#[derive(Debug)]
pub struct AlignedBytes {
    base: NonNull<u8>,
    layout: Layout,
    offset: usize,
    len: usize,
}

// SAFETY: the bytes are owned and are only reached through references to self.
unsafe impl Send for AlignedBytes {}
// SAFETY: as above.
unsafe impl Sync for AlignedBytes {}

impl AlignedBytes {
    /// `len` zero bytes. Large buffers take no memory until they are written.
    ///
    /// # Errors
    /// When they are not to be had.
    pub fn zeroed(len: usize) -> Result<Self, OutOfMemory> {
        Self::aligned(len, ALIGN)
    }

    /// `len` zero bytes that start at a multiple of `align`, a power of two.
    pub(crate) fn aligned(len: usize, align: usize) -> Result<Self, OutOfMemory> {
        let align = if len >= HUGE_FROM { align.max(HUGE_PAGE) } else { align };
        // An allocator can give zero pages without writing them only for small alignments, hence the slack.
        let layout = len
            .checked_add(align)
            .and_then(|size| Layout::from_size_align(size, 16).ok())
            .ok_or(OutOfMemory(len))?;
        // SAFETY: the size is not 0, because the alignment is added.
        let base = NonNull::new(unsafe { alloc_zeroed(layout) }).ok_or(OutOfMemory(len))?;
        let offset = base.as_ptr().addr().next_multiple_of(align) - base.as_ptr().addr();
        let mut bytes = AlignedBytes { base, layout, offset, len };
        if len >= HUGE_FROM {
            bytes.ask_for_huge_pages();
        }
        Ok(bytes)
    }

    /// Where the bytes begin.
    pub(crate) fn start(&self) -> NonNull<u8> {
        // SAFETY: the offset is within the allocation.
        unsafe { self.base.add(self.offset) }
    }

    /// Makes this buffer `len` bytes long: in place when it is large enough and not wastefully large, else anew.
    /// The contents are unspecified.
    ///
    /// # Errors
    /// When they are not to be had; the buffer is gone then.
    pub fn resized(mut self, len: usize) -> Result<Self, OutOfMemory> {
        let capacity = self.layout.size() - self.offset;
        if len <= capacity && capacity / 2 <= len + 4096 {
            self.len = len;
            return Ok(self);
        }
        drop(self);
        Self::zeroed(len)
    }

    #[cfg(target_os = "linux")]
    fn ask_for_huge_pages(&mut self) {
        let whole = self.len / HUGE_PAGE * HUGE_PAGE;
        // SAFETY: the range is page-aligned and inside this allocation; the advice changes no contents. A refusal
        // only costs speed.
        let _ = unsafe {
            rustix::mm::madvise(self.as_mut_ptr().cast(), whole, rustix::mm::Advice::LinuxHugepage)
        };
    }

    #[cfg(not(target_os = "linux"))]
    fn ask_for_huge_pages(&mut self) {}

    #[cfg(target_os = "linux")]
    fn as_mut_ptr(&mut self) -> *mut u8 {
        self.as_mut().as_mut_ptr()
    }
}

impl AsRef<[u8]> for AlignedBytes {
    fn as_ref(&self) -> &[u8] {
        // SAFETY: offset + len is within the allocation, which was zeroed when it was made.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr().add(self.offset), self.len) }
    }
}

impl AsMut<[u8]> for AlignedBytes {
    fn as_mut(&mut self) -> &mut [u8] {
        // SAFETY: offset + len is within the allocation, which was zeroed when it was made.
        unsafe { std::slice::from_raw_parts_mut(self.base.as_ptr().add(self.offset), self.len) }
    }
}

impl Drop for AlignedBytes {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout in `zeroed`.
        unsafe { dealloc(self.base.as_ptr(), self.layout) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_aligned_zero_and_recycled() {
        for len in [0, 1, 63, 4096, 9 << 20] {
            let mut bytes = AlignedBytes::zeroed(len).unwrap();
            assert_eq!(bytes.as_ref().len(), len);
            assert!(bytes.as_ref().as_ptr().addr().is_multiple_of(64));
            assert!(bytes.as_ref().iter().all(|b| *b == 0));
            bytes.as_mut().fill(7);
            let at = bytes.as_ref().as_ptr();
            let bytes = bytes.resized(len - len / 4).unwrap();
            assert_eq!((bytes.as_ref().as_ptr(), bytes.as_ref().len()), (at, len - len / 4));
            assert_eq!(bytes.resized(len * 5 + 3000).unwrap().as_ref().len(), len * 5 + 3000);
        }
        assert_eq!(AlignedBytes::zeroed(usize::MAX).unwrap_err(), OutOfMemory(usize::MAX));
        assert_eq!(AlignedBytes::zeroed(isize::MAX as usize - 8).unwrap_err().0, isize::MAX as usize - 8);
    }
}
