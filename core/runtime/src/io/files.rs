//! Files that are read by position, opened once.
//!
//! A descriptor stays with the file it was opened on, so a model that is replaced by renaming another over it is read to
//! the end as it was. Whether the file itself was rewritten is told by [`Files::changed`]. Whether direct reads work,
//! and with which blocks, is found by trying: file systems accept the flag and refuse the read, or need larger blocks
//! than their device.

use std::fs::{File, Metadata};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::gguf::Stamp;

use super::IoError;

/// A set of files that can be read by position, from any thread. Faults are put in by wrapping one.
pub trait ReadAt: Send + Sync {
    /// Number of files.
    fn files(&self) -> usize;

    /// Name of a file, for messages.
    fn path(&self, file: usize) -> &Path;

    /// One attempt to read at byte `offset`; it may bring fewer bytes than fit, and 0 at the end of the file.
    ///
    /// # Errors
    /// Whatever the system says, interruptions too.
    fn read_at(&self, file: usize, out: &mut [u8], offset: u64) -> io::Result<usize>;

    /// Bytes of the file now.
    ///
    /// # Errors
    /// Whatever the system says.
    fn size(&self, file: usize) -> io::Result<u64>;

    /// What offsets, lengths and memory must be multiples of.
    fn alignment(&self) -> usize;

    /// Whether reads go past the system's page cache.
    fn direct(&self) -> bool;
}

/// Open files.
#[derive(Debug)]
pub struct Files {
    list: Vec<Opened>,
    alignment: usize,
    direct: bool,
}

#[derive(Debug)]
struct Opened {
    path: PathBuf,
    file: File,
    size: u64,
    stamp: Stamp,
}

impl Files {
    /// Opens the files for direct reads where that works, else for reads through the page cache.
    ///
    /// # Errors
    /// [`IoError::Open`] or [`IoError::NotAFile`].
    pub fn open<P: AsRef<Path>>(paths: &[P]) -> Result<Files, IoError> {
        let mut files = Files { list: Vec::new(), alignment: 1, direct: !paths.is_empty() };
        for path in paths {
            let opened = Opened::new(path.as_ref())?;
            match opened.go_direct() {
                Some(alignment) => files.alignment = files.alignment.max(alignment),
                None => files.direct = false,
            }
            files.list.push(opened);
        }
        Ok(files)
    }

    /// Opens the files for reads through the page cache.
    ///
    /// # Errors
    /// As [`Files::open`].
    pub fn open_buffered<P: AsRef<Path>>(paths: &[P]) -> Result<Files, IoError> {
        let list = paths.iter().map(|path| Opened::new(path.as_ref())).collect::<Result<_, _>>()?;
        Ok(Files { list, alignment: 1, direct: false })
    }

    /// A file whose size or time of change is not what it was when it was opened, if there is one. What was read from
    /// it may be of two versions then.
    pub fn changed(&self) -> Option<&Path> {
        let changed = |opened: &&Opened| Stamp::of(&opened.file).map_or(true, |now| now != opened.stamp);
        self.list.iter().find(changed).map(|opened| opened.path.as_path())
    }

    /// What tells the files from others, as they were when they were opened.
    pub(crate) fn stamps(&self) -> impl Iterator<Item = Stamp> {
        self.list.iter().map(|opened| opened.stamp)
    }

    /// The files themselves.
    #[cfg(target_os = "linux")]
    pub(super) fn descriptors(&self) -> impl Iterator<Item = std::os::fd::BorrowedFd<'_>> {
        self.list.iter().map(|opened| std::os::fd::AsFd::as_fd(&opened.file))
    }

    fn opened(&self, file: usize) -> io::Result<&Opened> {
        self.list.get(file).ok_or_else(|| io::Error::from(io::ErrorKind::NotFound))
    }
}

impl Opened {
    /// Anything but a regular file is refused before it is opened, since opening a pipe waits for its writer.
    fn new(path: &Path) -> Result<Opened, IoError> {
        let error = |source| IoError::Open { file: path.into(), source: Arc::new(source) };
        let regular = |metadata: Metadata| match metadata.is_file() {
            true => Ok(metadata),
            false => Err(IoError::NotAFile { file: path.into() }),
        };
        std::fs::metadata(path).map_err(error).and_then(regular)?;
        let file = File::open(path).map_err(error)?;
        let metadata = file.metadata().map_err(error).and_then(regular)?;
        Ok(Opened { path: path.into(), size: metadata.len(), stamp: Stamp::from(&metadata), file })
    }

    /// Makes reads direct and returns the alignment that they need, or leaves the file as it was.
    #[cfg(any(target_os = "linux", target_os = "android"))]
    fn go_direct(&self) -> Option<usize> {
        use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
        let flags = fcntl_getfl(&self.file).ok()?;
        fcntl_setfl(&self.file, flags | OFlags::DIRECT).ok()?;
        let found = [512, 4096].into_iter().find(|alignment| self.try_read(*alignment));
        if found.is_none() {
            fcntl_setfl(&self.file, flags).ok()?;
        }
        found
    }

    #[cfg(not(any(target_os = "linux", target_os = "android")))]
    fn go_direct(&self) -> Option<usize> {
        None
    }

    /// Whether a read works whose offset, length and memory are multiples of `alignment` and of nothing more.
    #[cfg(any(target_os = "linux", target_os = "android"))]
    fn try_read(&self, alignment: usize) -> bool {
        let Ok(buffer) = neuropil_device::Buffer::host(2 * alignment) else { return false };
        let Ok(mut lease) = buffer.write() else { return false };
        let offset = if self.size >= 2 * alignment as u64 { alignment as u64 } else { 0 };
        let Some(out) = lease.bytes_mut().get_mut(alignment..) else { return false };
        loop {
            match read_once(&self.file, out, offset) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                got => return got.is_ok(),
            }
        }
    }
}

impl ReadAt for Files {
    fn files(&self) -> usize {
        self.list.len()
    }

    fn path(&self, file: usize) -> &Path {
        self.list.get(file).map_or(Path::new("?"), |opened| &opened.path)
    }

    fn read_at(&self, file: usize, out: &mut [u8], offset: u64) -> io::Result<usize> {
        read_once(&self.opened(file)?.file, out, offset)
    }

    fn size(&self, file: usize) -> io::Result<u64> {
        Ok(self.opened(file)?.file.metadata()?.len())
    }

    fn alignment(&self) -> usize {
        self.alignment
    }

    fn direct(&self) -> bool {
        self.direct
    }
}

/// One positioned read, which may be short.
fn read_once(file: &File, out: &mut [u8], offset: u64) -> io::Result<usize> {
    #[cfg(unix)]
    return std::os::unix::fs::FileExt::read_at(file, out, offset);
    #[cfg(windows)]
    return match std::os::windows::fs::FileExt::seek_read(file, out, offset) {
        // ERROR_HANDLE_EOF: a read that begins at the end of the file.
        Err(error) if error.raw_os_error() == Some(38) => Ok(0),
        got => got,
    };
}
