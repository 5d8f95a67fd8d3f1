//! Memory that tensors are handed over in: aligned, and shared by all graphs of a unit.
//!
//! A unit has one buffer for each end of a graph and each size, in powers of two, so hundreds of graphs need the memory
//! of the largest. Where the library of Qualcomm's rpcmem is there, buffers are of it, and graphs name them by handle
//! instead of having them copied; otherwise they are ordinary memory.

use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError};

use libloading::Library;
use neuropil_plugin_sdk::Error;

/// The heap and the flags of rpcmem for memory that the DSP sees cached.
const HEAP: i32 = 25;
const FLAGS: u32 = 1;

/// The functions of rpcmem.
pub(crate) struct RpcMemory {
    alloc: unsafe extern "C" fn(i32, u32, i32) -> *mut c_void,
    to_fd: unsafe extern "C" fn(*mut c_void) -> i32,
    free: unsafe extern "C" fn(*mut c_void),
}

impl RpcMemory {
    /// The library of the system, if there is one with these functions. It stays loaded.
    pub fn load() -> Option<Arc<RpcMemory>> {
        // SAFETY: the library is one of the system's, which the QNN library loads too.
        let library = unsafe { Library::new("libcdsprpc.so") }.ok()?;
        // SAFETY: the functions have these types.
        let found = unsafe {
            RpcMemory {
                alloc: *library.get("rpcmem_alloc").ok()?,
                to_fd: *library.get("rpcmem_to_fd").ok()?,
                free: *library.get("rpcmem_free").ok()?,
            }
        };
        std::mem::forget(library);
        Some(Arc::new(found))
    }
}

/// A piece of memory of its own.
pub(crate) struct Piece {
    start: NonNull<u8>,
    len: usize,
    fd: Option<i32>,
    /// Frees it: of rpcmem, or ordinary.
    rpc: Option<Arc<RpcMemory>>,
    _words: Vec<u64>,
}

// SAFETY: the memory belongs to the piece, and is reached through it only.
unsafe impl Send for Piece {}

impl Drop for Piece {
    fn drop(&mut self) {
        if let Some(rpc) = &self.rpc {
            // SAFETY: it was allocated by rpcmem, and is freed once.
            unsafe { (rpc.free)(self.start.as_ptr().cast()) };
        }
    }
}

impl Piece {
    fn new(len: usize, rpc: Option<&Arc<RpcMemory>>) -> Result<Piece, Error> {
        if let Some(rpc) = rpc
            && let Ok(size) = i32::try_from(len)
        {
            // SAFETY: the function gives memory of that many bytes, or NULL; the second one only looks it up.
            unsafe {
                if let Some(start) = NonNull::new((rpc.alloc)(HEAP, FLAGS, size).cast::<u8>()) {
                    start.write_bytes(0, len);
                    let fd = Some((rpc.to_fd)(start.as_ptr().cast())).filter(|fd| *fd > 0);
                    return Ok(Piece { start, len, fd, rpc: Some(rpc.clone()), _words: Vec::new() });
                }
            }
        }
        let mut words: Vec<u64> = Vec::new();
        let refuse = |_| Error::out_of_memory(format!("there is no memory for a buffer of {len} bytes"));
        words.try_reserve_exact(len.div_ceil(8)).map_err(refuse)?;
        words.resize(len.div_ceil(8), 0);
        let start = NonNull::new(words.as_mut_ptr().cast()).unwrap_or(NonNull::dangling());
        Ok(Piece { start, len, fd: None, rpc: None, _words: words })
    }

    /// Its bytes; aligned to 8.
    pub fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: the memory has as many bytes, which were written, and belongs to this.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

/// A buffer that graphs share. Who uses it holds the lock.
pub(crate) struct Buffer {
    /// Which end of a graph it is for.
    end: usize,
    /// A descriptor by which the library can name it.
    pub fd: Option<i32>,
    pub len: usize,
    pub piece: Mutex<Piece>,
}

/// The buffers of a unit.
pub(crate) struct Buffers {
    rpc: Option<Arc<RpcMemory>>,
    list: Mutex<Vec<Arc<Buffer>>>,
}

impl Buffers {
    pub fn new(rpc: Option<Arc<RpcMemory>>) -> Buffers {
        Buffers { rpc, list: Mutex::new(Vec::new()) }
    }

    /// The buffer for an end of graphs, of at least `bytes`.
    pub fn get(&self, end: usize, bytes: usize) -> Result<Arc<Buffer>, Error> {
        let len = bytes.next_power_of_two().max(4096);
        let mut list = self.list.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(found) = list.iter().find(|buffer| buffer.end == end && buffer.len == len) {
            return Ok(found.clone());
        }
        let piece = Piece::new(len, self.rpc.as_ref())?;
        let buffer = Arc::new(Buffer { end, fd: piece.fd, len, piece: Mutex::new(piece) });
        list.push(buffer.clone());
        Ok(buffer)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn graphs_share_the_buffer_of_an_end() {
        let buffers = Buffers::new(RpcMemory::load());
        let first = buffers.get(0, 5000).unwrap();
        assert!(Arc::ptr_eq(&first, &buffers.get(0, 8192).unwrap()));
        assert!(!Arc::ptr_eq(&first, &buffers.get(1, 5000).unwrap()));
        assert!(!Arc::ptr_eq(&first, &buffers.get(0, 9000).unwrap()));
        let mut piece = first.piece.lock().unwrap();
        assert_eq!((piece.bytes().len(), piece.bytes().as_ptr().addr() % 8), (8192, 0));
    }
}
