//! Memory that the driver shares with us: weights, the inputs and outputs of jobs, and what a host imports.
//!
//! Ordinary memory would be copied by the runtime for each job. What has a file descriptor is mapped by the driver once,
//! and read and written where it lies.

use std::ffi::c_void;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::ptr;
use std::sync::Arc;

use neuropil_plugin_sdk::Error;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use crate::library::{Opaque, Runtime};
use crate::runtime::Owned;

/// `PROT_READ | PROT_WRITE`.
const READ_WRITE: i32 = 3;

/// Memory as NNAPI knows it.
pub(crate) struct DriverMemory {
    object: Owned,
    /// Where the region begins in the object.
    base: usize,
    bytes: usize,
}

impl DriverMemory {
    /// A region of what is behind a file descriptor, which NNAPI duplicates.
    pub fn from_fd(
        runtime: &Arc<Runtime>,
        fd: i32,
        offset: usize,
        bytes: usize,
    ) -> Result<Arc<DriverMemory>, Error> {
        // Files are mapped from whole pages on.
        let base = offset % rustix::param::page_size();
        let functions = &runtime.functions;
        let size = bytes.checked_add(base).ok_or_else(|| Error::invalid("the region is beyond counting"))?;
        // SAFETY: the function checks the descriptor and writes a new object.
        let object = Owned::new(runtime, "share memory", functions.memory_free, |object| unsafe {
            (functions.memory_from_fd)(size, READ_WRITE, fd, offset - base, object)
        })?;
        Ok(Arc::new(DriverMemory { object, base, bytes }))
    }

    /// A region of an `AHardwareBuffer` of plain bytes, which stays alive for as long as this.
    pub fn from_hardware_buffer(
        runtime: &Arc<Runtime>,
        buffer: *mut c_void,
        base: usize,
        bytes: usize,
    ) -> Result<Arc<DriverMemory>, Error> {
        let functions = &runtime.functions;
        let make = functions.memory_from_buffer.filter(|_| !buffer.is_null());
        let make = make.ok_or_else(|| Error::unsupported("there is no hardware buffer to share"))?;
        // SAFETY: the host says that this is a hardware buffer; the function writes a new object.
        let object =
            Owned::new(runtime, "share a hardware buffer", functions.memory_free, |object| unsafe {
                make(buffer, object)
            })?;
        Ok(Arc::new(DriverMemory { object, base, bytes }))
    }

    /// Memory of zeros that nobody has touched, so that it takes no room.
    pub fn blank(runtime: &Arc<Runtime>, bytes: usize) -> Result<Arc<DriverMemory>, Error> {
        DriverMemory::from_fd(runtime, file(runtime, bytes)?.as_raw_fd(), 0, bytes)
    }

    pub fn object(&self) -> Opaque {
        self.object.object()
    }
}

/// Some bytes of a memory.
#[derive(Clone)]
pub(crate) struct Place {
    pub memory: Arc<DriverMemory>,
    offset: usize,
    bytes: usize,
}

impl Place {
    pub fn new(memory: &Arc<DriverMemory>, offset: usize, bytes: usize) -> Result<Place, Error> {
        match offset.checked_add(bytes) {
            Some(end) if end <= memory.bytes => Ok(Place { memory: memory.clone(), offset, bytes }),
            _ => Err(Error::invalid(format!("{bytes} bytes at {offset} are outside of the memory"))),
        }
    }

    /// Offset and length in NNAPI's object.
    pub fn range(&self) -> (usize, usize) {
        (self.memory.base + self.offset, self.bytes)
    }
}

/// Our own memory that the driver can reach too.
pub(crate) struct Shared {
    data: *mut u8,
    bytes: usize,
    pub memory: Arc<DriverMemory>,
}

// SAFETY: the mapping belongs to this value alone, and is reached through its borrows.
unsafe impl Send for Shared {}
// SAFETY: as above.
unsafe impl Sync for Shared {}

impl Shared {
    /// Memory of zeros; `bytes` is at least 1.
    pub fn new(runtime: &Arc<Runtime>, bytes: usize) -> Result<Shared, Error> {
        let file = file(runtime, bytes)?;
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at a place of the system's choice.
        let data = unsafe { mmap(ptr::null_mut(), bytes, protection, MapFlags::SHARED, &file, 0) }
            .map_err(|error| no_memory(bytes, error))?;
        // From here on the mapping has an owner.
        let unmapped = Mapping(data, bytes);
        let memory = DriverMemory::from_fd(runtime, file.as_raw_fd(), 0, bytes)?;
        std::mem::forget(unmapped);
        Ok(Shared { data: data.cast(), bytes, memory })
    }

    pub fn len(&self) -> usize {
        self.bytes
    }

    /// The bytes. The driver writes them only while an execution runs that was given this memory.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: the mapping has as many bytes and lives as long as this; executions that write it hold the only
        // reference to its owner while they run.
        unsafe { std::slice::from_raw_parts(self.data, self.bytes) }
    }

    /// The bytes, to be written before an execution runs.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and the borrow is the only one.
        unsafe { std::slice::from_raw_parts_mut(self.data, self.bytes) }
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        drop(Mapping(self.data.cast(), self.bytes));
    }
}

/// A mapping that goes when it is dropped.
struct Mapping(*mut c_void, usize);

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the mapping is one of ours, and nobody borrows its bytes any more. It fails for wrong addresses only.
        let _ = unsafe { munmap(self.0, self.1) };
    }
}

/// A file of so many zeros that has no place in the file system.
fn file(runtime: &Runtime, bytes: usize) -> Result<OwnedFd, Error> {
    if let Some(create) = runtime.shared_memory {
        // SAFETY: the name is a text; the function gives a new descriptor, or a negative number.
        let fd = unsafe { create(c"neuropil".as_ptr(), bytes) };
        if fd < 0 {
            return Err(Error::out_of_memory(format!("there are no {bytes} bytes of shared memory")));
        }
        // SAFETY: the descriptor is new and ours.
        return Ok(unsafe { OwnedFd::from_raw_fd(fd) });
    }
    let file = memfd_create("neuropil", MemfdFlags::CLOEXEC).map_err(|error| no_memory(bytes, error))?;
    ftruncate(&file, bytes as u64).map_err(|error| no_memory(bytes, error))?;
    Ok(file)
}

fn no_memory(bytes: usize, error: rustix::io::Errno) -> Error {
    Error::out_of_memory(format!("there are no {bytes} bytes of shared memory: {error}"))
        .with_vendor_code(i64::from(error.raw_os_error()))
}
