//! One open file: its map for the header and tables, and positioned reads for weights.
//!
//! Weights are read, not mapped: reads land in memory that the budget counts, a bad disk is an error and not a
//! signal, and a shrunk file is an error too. A positioned read has no shared file offset, so any number of
//! threads may read one file.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use super::error::{GgufError, shown};
use super::map::Map;
use super::stamp::Stamp;
use super::tensor::TensorInfo;

/// A file of the set.
pub(super) struct Shard {
    pub(super) path: PathBuf,
    file: File,
    map: Map,
    /// Taken when the file was opened.
    pub(super) stamp: Stamp,
}

impl Shard {
    /// Opens and maps the file. Anything but a regular file is refused before it is opened, since opening a pipe
    /// waits for its writer.
    pub(super) fn open(path: &Path) -> Result<Shard, GgufError> {
        let io_error = |source| GgufError::Io { file: path.into(), source };
        if !std::fs::metadata(path).map_err(io_error)?.is_file() {
            return Err(GgufError::NotAFile { file: path.into() });
        }
        let file = File::open(path).map_err(io_error)?;
        let stamp = Stamp::of(&file).map_err(io_error)?;
        let map = Map::new(&file).map_err(io_error)?;
        Ok(Shard { path: path.into(), file, map, stamp })
    }

    /// Whether nobody has written to the file since it was opened.
    pub(super) fn unchanged(&self) -> Result<(), GgufError> {
        match Stamp::of(&self.file) {
            Ok(stamp) if stamp == self.stamp => Ok(()),
            Ok(_) => Err(GgufError::Changed { file: self.path.clone() }),
            Err(source) => Err(GgufError::Io { file: self.path.clone(), source }),
        }
    }

    /// The whole file, mapped.
    pub(super) fn bytes(&self) -> &[u8] {
        self.map.bytes()
    }

    /// Reads the bytes of `tensor` from its byte `from` on, as many as `out` takes.
    pub(super) fn read(&self, tensor: &TensorInfo, from: u64, out: &mut [u8]) -> Result<(), GgufError> {
        let got = read_at(&self.file, out, tensor.offset.saturating_add(from))
            .map_err(|source| GgufError::Io { file: self.path.clone(), source })?;
        if got < out.len() {
            return Err(GgufError::Truncated {
                file: self.path.clone(),
                tensor: shown(&tensor.name),
                end: tensor.end(),
                len: tensor.offset.saturating_add(from).saturating_add(got as u64),
            });
        }
        Ok(())
    }

    /// Tells the system that the cached pages of `tensor` will not be needed soon. Advice only: it cannot fail.
    pub(super) fn release(&self, tensor: &TensorInfo) {
        #[cfg(any(target_os = "linux", target_os = "android"))]
        if let Some(len) = std::num::NonZeroU64::new(tensor.bytes) {
            let advice = rustix::fs::Advice::DontNeed;
            // Advice that the file system does not take is no loss.
            let _ = rustix::fs::fadvise(&self.file, tensor.offset, Some(len), advice);
        }
        #[cfg(not(any(target_os = "linux", target_os = "android")))]
        let _ = tensor;
    }
}

/// One positioned read, which may be short.
fn read_once(file: &File, out: &mut [u8], at: u64) -> io::Result<usize> {
    #[cfg(unix)]
    return std::os::unix::fs::FileExt::read_at(file, out, at);
    #[cfg(windows)]
    return std::os::windows::fs::FileExt::seek_read(file, out, at);
}

/// Reads from byte `at` of a file on until `out` is full or the file ends; returns bytes read.
pub(crate) fn read_at(file: &File, out: &mut [u8], at: u64) -> io::Result<usize> {
    read_fully(|out, at| read_once(file, out, at), out, at)
}

/// Repeats `read` over short reads and interruptions until `out` is full or the file ends; returns bytes read.
fn read_fully(
    mut read: impl FnMut(&mut [u8], u64) -> io::Result<usize>,
    out: &mut [u8],
    at: u64,
) -> io::Result<usize> {
    let mut done = 0;
    while let Some(rest) = out.get_mut(done..).filter(|rest| !rest.is_empty()) {
        match read(rest, at.saturating_add(done as u64)) {
            Ok(0) => break,
            Ok(got) => done += got,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(done)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_and_interrupted_reads_are_continued() {
        let source: Vec<u8> = (0..200).collect();
        let mut calls = 0;
        let read = |out: &mut [u8], at: u64| {
            calls += 1;
            if calls % 3 == 0 {
                return Err(io::ErrorKind::Interrupted.into());
            }
            let take = out.len().min(7).min(source.len() - at as usize);
            out[..take].copy_from_slice(&source[at as usize..at as usize + take]);
            Ok(take)
        };
        let mut out = [0; 100];
        assert_eq!(read_fully(read, &mut out, 50).unwrap(), 100);
        assert_eq!(out[..], source[50..150]);
    }

    #[test]
    fn the_end_of_the_file_and_a_bad_disk_are_told_apart() {
        let mut left = 30;
        let ends = |out: &mut [u8], _| {
            let take = out.len().min(left);
            left -= take;
            Ok(take)
        };
        assert_eq!(read_fully(ends, &mut [0; 100], 0).unwrap(), 30);
        let breaks = |_: &mut [u8], _| Err(io::Error::from_raw_os_error(5));
        assert_eq!(read_fully(breaks, &mut [0; 100], 0).unwrap_err().raw_os_error(), Some(5));
    }
}
