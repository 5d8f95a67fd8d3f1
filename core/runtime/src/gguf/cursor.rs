//! A place in the header's bytes.
//!
//! Every read of the parser goes through here, so there is one bounds check to get right. Lengths and counts out
//! of the file are compared with the bytes that are left *before* anything is reserved or looped over.

use std::fmt::Display;
use std::path::Path;

use super::error::GgufError;

/// Reads little-endian values from the front of a file.
#[derive(Clone)]
pub(super) struct Cursor<'a> {
    /// The file up to the header limit.
    bytes: &'a [u8],
    at: usize,
    /// Whether the header limit, not the end of the file, ends `bytes`.
    capped: bool,
    pub(super) file: &'a Path,
}

impl<'a> Cursor<'a> {
    /// A cursor at the start of `bytes`, which may not pass `limit`.
    pub(super) fn new(bytes: &'a [u8], limit: usize, file: &'a Path) -> Cursor<'a> {
        let capped = bytes.len() > limit;
        Cursor { bytes: bytes.get(..limit).unwrap_or(bytes), at: 0, capped, file }
    }

    /// Bytes read so far.
    pub(super) fn at(&self) -> u64 {
        self.at as u64
    }

    fn left(&self) -> u64 {
        (self.bytes.len() - self.at) as u64
    }

    /// Checks that `count` elements of at least `each` bytes can follow.
    pub(super) fn expect(&self, count: u64, each: u64, what: &dyn Display) -> Result<(), GgufError> {
        let needed = count.saturating_mul(each);
        if needed <= self.left() {
            return Ok(());
        }
        let (file, what) = (self.file.to_path_buf(), what.to_string());
        if self.capped {
            let limit = self.bytes.len() as u64;
            return Err(GgufError::HeaderTooLarge { file, what, limit });
        }
        Err(GgufError::HeaderCut { file, what, at: self.at(), needed, left: self.left() })
    }

    /// The next `count` bytes.
    pub(super) fn take(&mut self, count: u64, what: &dyn Display) -> Result<&'a [u8], GgufError> {
        self.expect(count, 1, what)?;
        // `expect` found the count to be no more than the bytes left, so it fits a usize.
        let taken = self.bytes.get(self.at..self.at + count as usize).unwrap_or_default();
        self.at += taken.len();
        Ok(taken)
    }

    /// The next `N` bytes as an array.
    pub(super) fn array<const N: usize>(&mut self, what: &dyn Display) -> Result<[u8; N], GgufError> {
        let taken = self.take(N as u64, what)?;
        Ok(taken.first_chunk().copied().unwrap_or([0; N]))
    }

    /// The next 32-bit number.
    pub(super) fn u32(&mut self, what: &dyn Display) -> Result<u32, GgufError> {
        Ok(u32::from_le_bytes(self.array(what)?))
    }

    /// The next 64-bit number.
    pub(super) fn u64(&mut self, what: &dyn Display) -> Result<u64, GgufError> {
        Ok(u64::from_le_bytes(self.array(what)?))
    }

    /// The next string: a 64-bit length and that many bytes.
    pub(super) fn string(&mut self, what: &dyn Display) -> Result<&'a [u8], GgufError> {
        let len = self.u64(what)?;
        self.take(len, what)
    }

    /// A copy of `text` in memory of its own.
    pub(super) fn owned(&self, text: &str) -> Result<String, GgufError> {
        let mut owned = String::new();
        if owned.try_reserve_exact(text.len()).is_err() {
            return Err(GgufError::OutOfMemory { file: self.file.into(), bytes: text.len() as u64 });
        }
        owned.push_str(text);
        Ok(owned)
    }

    /// A vector with room for exactly `count` elements, or an error.
    pub(super) fn reserve<T>(&self, count: u64) -> Result<Vec<T>, GgufError> {
        reserve(count, self.file)
    }
}

/// A vector with room for exactly `count` elements, or an error that names `file`.
pub(crate) fn reserve<T>(count: u64, file: &Path) -> Result<Vec<T>, GgufError> {
    let refused = || GgufError::OutOfMemory {
        file: file.to_path_buf(),
        bytes: count.saturating_mul(size_of::<T>() as u64),
    };
    let mut out = Vec::new();
    out.try_reserve_exact(usize::try_from(count).map_err(|_| refused())?).map_err(|_| refused())?;
    Ok(out)
}
