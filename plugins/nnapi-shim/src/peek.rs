//! Client memory, read without trust. A client promises that a large constant stays where it is; a client that breaks the
//! promise must be counted, not crash the process. The kernel reads the address on our behalf and says when it is gone.

use std::fs::File;
use std::os::unix::fs::FileExt;

/// Bytes read in one go; a multiple of a hash word.
const CHUNK: usize = 1 << 20;

/// A running checksum over bytes, eight at a time. Not for secrets.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Checksum(u64);

impl Checksum {
    /// The checksum of nothing.
    pub(crate) fn new() -> Checksum {
        Checksum(0x9E37_79B9_7F4A_7C15)
    }

    /// Takes more bytes in. Pieces are padded with zeros to whole words, and their length counts.
    pub(crate) fn add(&mut self, bytes: &[u8]) {
        let (words, rest) = bytes.as_chunks::<8>();
        let mut last = [0u8; 8];
        for (to, from) in last.iter_mut().zip(rest) {
            *to = *from;
        }
        let length = (bytes.len() as u64).to_le_bytes();
        for word in words.iter().chain([&last, &length]) {
            let mixed = (self.0 ^ u64::from_le_bytes(*word)).wrapping_mul(0xD6E8_FEB8_6659_FD93);
            self.0 = mixed.rotate_left(29);
        }
    }

    /// The checksum of bytes, in the pieces in which [`walk`] takes them.
    pub(crate) fn of(bytes: &[u8]) -> u64 {
        let mut sum = Checksum::new();
        for piece in bytes.chunks(CHUNK) {
            sum.add(piece);
        }
        sum.value()
    }

    /// The number.
    pub(crate) fn value(self) -> u64 {
        self.0 ^ (self.0 >> 32)
    }
}

/// Calls `each` with the bytes at an address of this process, piece by piece; `None` when some cannot be read.
fn walk(address: usize, len: usize, each: &mut dyn FnMut(&[u8])) -> Option<()> {
    let memory = File::open("/proc/self/mem").ok()?;
    let mut buffer = vec![0u8; len.min(CHUNK)];
    let mut done = 0;
    while done < len {
        let piece = buffer.get_mut(..(len - done).min(CHUNK))?;
        let at = u64::try_from(address.checked_add(done)?).ok()?;
        memory.read_exact_at(piece, at).ok()?;
        each(piece);
        done += piece.len();
    }
    Some(())
}

/// The checksum of `len` bytes at `address`; `None` when they cannot be read.
pub(crate) fn checksum_at(address: usize, len: usize) -> Option<u64> {
    let mut sum = Checksum::new();
    walk(address, len, &mut |piece| sum.add(piece))?;
    Some(sum.value())
}

/// A copy of `len` bytes at `address` with its checksum; `None` when they cannot be read.
pub(crate) fn copy_from(address: usize, len: usize) -> Option<(Vec<u8>, u64)> {
    let mut sum = Checksum::new();
    let mut bytes = Vec::new();
    bytes.try_reserve_exact(len).ok()?;
    walk(address, len, &mut |piece| {
        sum.add(piece);
        bytes.extend_from_slice(piece);
    })?;
    Some((bytes, sum.value()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gone_memory_is_told_not_touched() {
        assert!(checksum_at(16, 8).is_none());
        assert!(copy_from(usize::MAX - 4, 8).is_none());
    }

    #[test]
    fn a_copy_has_the_bytes_and_the_same_checksum() {
        let bytes: Vec<u8> = (0..3_000_001u32).map(|i| (i * 7) as u8).collect();
        let (copy, sum) = copy_from(bytes.as_ptr() as usize, bytes.len()).expect("it is readable");
        assert_eq!(copy, bytes);
        assert_eq!(Some(sum), checksum_at(bytes.as_ptr() as usize, bytes.len()));
        let mut other = bytes.clone();
        other[2_000_000] ^= 1;
        assert_ne!(Some(sum), checksum_at(other.as_ptr() as usize, other.len()));
    }
}
