//! The read-only memory map of a model file.
//!
//! A map makes parsing one pass over memory and lets tables be read in place. It has one weakness that no check
//! can remove: if another process makes the file *shorter* while it is mapped, touching the lost part ends this
//! process with a bus error, and if it rewrites the file, the bytes change under the reader. Replace a model file
//! by renaming a new one over it, never by writing into it. Weights that compute do not go through the map; they
//! are read into owned memory.

#![allow(unsafe_code)]

use std::fs::File;
use std::io;

use memmap2::Mmap;

/// The whole of a file, as bytes.
pub(super) struct Map(Mmap);

impl Map {
    /// Maps `file` from its first to its last byte.
    pub(super) fn new(file: &File) -> io::Result<Map> {
        // SAFETY: the map is read-only and private to this module's owner, which keeps the file open beside it.
        // That no other process shortens or rewrites the file is the condition stated at the top of this module.
        let map = unsafe { Mmap::map(file) }?;
        Ok(Map(map))
    }

    /// The bytes of the file as it was when it was mapped.
    pub(super) fn bytes(&self) -> &[u8] {
        &self.0
    }
}
