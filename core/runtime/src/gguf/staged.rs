//! A file that appears whole, or not at all.
//!
//! Writing goes to a temporary name in the same folder; only a file that is complete and synced is renamed to its final
//! name. The temporary name follows from the final one, so what a killed process left behind is found, taken over and
//! removed by the next one that writes there; a lock tells such a remainder from the work of a process that still lives.
//! On a file system without locks nothing does, so a temporary file that is there already is left alone, and another
//! name is taken.
//!
//! The size is known before the first byte. So a disk without room for it, or a limit on the size of files, is seen at the
//! start and not after an hour; and a limit never gets to end the process with its signal. What is written is brought to
//! the disk on the way, in a thread that does nothing else: at the end only a little is left to wait for.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{self, Seek, Write};
use std::path::{Path, PathBuf};
use std::thread::{self, JoinHandle};

use super::write::WriteError;

/// Bytes that are gathered before a write.
const CHUNK: usize = 4 << 20;
/// Bytes that are written before they are brought to the disk.
const SYNCED: usize = 256 << 20;
/// How often a name is tried that others take and give up meanwhile.
const TRIES: usize = 100;

/// A file in the making. Dropped before [`Staged::commit`], it leaves nothing behind.
pub(super) struct Staged {
    path: PathBuf,
    temporary: PathBuf,
    file: File,
    buffer: Vec<u8>,
    /// Bytes since the last call of [`Staged::sync`] that did something.
    unsynced: usize,
    syncing: Option<JoinHandle<io::Result<()>>>,
    committed: bool,
}

impl Staged {
    /// Begins a file of `bytes` bytes that will be called `path`.
    pub(super) fn create(path: &Path, bytes: u64) -> Result<Staged, WriteError> {
        Staged::create_with(path, bytes, File::try_lock)
    }

    fn create_with(path: &Path, bytes: u64, lock: Lock) -> Result<Staged, WriteError> {
        if path.exists() && !path.is_file() {
            return Err(WriteError::NotAFile { file: path.into() });
        }
        let Some(name) = path.file_name() else { return Err(WriteError::NotAFile { file: path.into() }) };
        let mut buffer = Vec::new();
        if buffer.try_reserve_exact(CHUNK).is_err() {
            return Err(WriteError::OutOfMemory { file: path.into(), bytes: CHUNK as u64 });
        }
        let hidden = |mark: &str| {
            let mut hidden = std::ffi::OsString::from(".");
            hidden.push(name);
            hidden.push(mark);
            hidden.push(".tmp");
            path.with_file_name(hidden)
        };
        let (temporary, file) = take(path, hidden, lock)?;
        let path = path.to_path_buf();
        let staged = Staged { path, temporary, file, buffer, unsynced: 0, syncing: None, committed: false };
        staged.check_limit(bytes)?;
        staged.file.set_len(0).map_err(|error| staged.failed(error, bytes))?;
        staged.reserve(bytes)?;
        Ok(staged)
    }

    /// The final name.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Writes at the end of what was written.
    pub(super) fn write(&mut self, mut bytes: &[u8]) -> Result<(), WriteError> {
        while !bytes.is_empty() {
            // Whole chunks go past the buffer, so that a large piece is not copied once more.
            let whole = if self.buffer.is_empty() { bytes.len() / CHUNK * CHUNK } else { 0 };
            let take = bytes.len().min(if whole > 0 { whole } else { CHUNK - self.buffer.len() });
            let (now, later) = bytes.split_at(take);
            if whole > 0 {
                self.file.write_all(now).map_err(|error| self.failed(error, take as u64))?;
                self.sync(take)?;
            } else {
                self.buffer.extend_from_slice(now);
                if self.buffer.len() == CHUNK {
                    self.flush()?;
                }
            }
            bytes = later;
        }
        Ok(())
    }

    fn flush(&mut self) -> Result<(), WriteError> {
        let bytes = self.buffer.len() as u64;
        self.file.write_all(&self.buffer).map_err(|error| self.failed(error, bytes))?;
        self.buffer.clear();
        self.sync(bytes as usize)
    }

    /// Has what was written brought to the disk while more is being written, `bytes` more than at the last call.
    fn sync(&mut self, bytes: usize) -> Result<(), WriteError> {
        self.unsynced += bytes;
        if self.unsynced < SYNCED || self.syncing.as_ref().is_some_and(|thread| !thread.is_finished()) {
            return Ok(());
        }
        self.unsynced = 0;
        self.synced()?;
        // A thread or a handle that cannot be had is no loss: all is synced at the end.
        if let Ok(file) = self.file.try_clone() {
            self.syncing = thread::Builder::new().spawn(move || file.sync_data()).ok();
        }
        Ok(())
    }

    /// Waits for the thread that syncs. An error of the disk is told once, so it must not be lost here.
    fn synced(&mut self) -> Result<(), WriteError> {
        let done = self.syncing.take().map(JoinHandle::join);
        let failed = || Err(io::Error::other("the thread that syncs has ended"));
        done.map_or(Ok(()), |done| done.unwrap_or_else(|_| failed())).map_err(|error| self.failed(error, 0))
    }

    /// Overwrites bytes where they lie, and gives the file its name once it is on the disk.
    pub(super) fn commit(mut self, patches: &[(u64, Vec<u8>)]) -> Result<(), WriteError> {
        self.flush()?;
        self.synced()?;
        let fail = |error| self.failed(error, 0);
        let mut file = &self.file;
        for (at, bytes) in patches {
            file.seek(io::SeekFrom::Start(*at)).and_then(|_| file.write_all(bytes)).map_err(fail)?;
        }
        self.file.sync_all().map_err(fail)?;
        std::fs::rename(&self.temporary, &self.path).map_err(fail)?;
        self.committed = true;
        // The name is as lasting as the bytes once the folder is synced. Not every file system can; none of them loses
        // a whole file for it.
        let folder = self.path.parent().filter(|folder| !folder.as_os_str().is_empty());
        if let Ok(folder) = File::open(folder.unwrap_or(Path::new("."))) {
            let _ = folder.sync_all();
        }
        Ok(())
    }

    /// Refuses a size over the limit of the process, where the system has one.
    fn check_limit(&self, bytes: u64) -> Result<(), WriteError> {
        #[cfg(any(target_os = "linux", target_os = "android"))]
        {
            let limit = rustix::process::getrlimit(rustix::process::Resource::Fsize).current;
            if limit.is_some_and(|limit| bytes > limit) {
                return Err(WriteError::NoSpace { file: self.path.clone(), bytes });
            }
        }
        let _ = bytes;
        Ok(())
    }

    /// Takes the room on the disk, where the file system can.
    fn reserve(&self, bytes: u64) -> Result<(), WriteError> {
        #[cfg(any(target_os = "linux", target_os = "android"))]
        if bytes > 0 {
            let flags = rustix::fs::FallocateFlags::empty();
            if let Err(error) = rustix::fs::fallocate(&self.file, flags, 0, bytes) {
                let error = io::Error::from(error);
                if is_full(&error) {
                    return Err(self.failed(error, bytes));
                }
            }
        }
        let _ = bytes;
        Ok(())
    }

    fn failed(&self, source: io::Error, bytes: u64) -> WriteError {
        let file = self.path.clone();
        if is_full(&source) { WriteError::NoSpace { file, bytes } } else { WriteError::Io { file, source } }
    }
}

impl Drop for Staged {
    fn drop(&mut self) {
        if !self.committed {
            // Still locked, so nobody else's file is removed. One that cannot be removed is taken over by the next writer.
            let _ = std::fs::remove_file(&self.temporary);
        }
    }
}

/// How a file is locked.
type Lock = fn(&File) -> Result<(), TryLockError>;

/// Opens and locks a temporary file, taking over what a dead process left. `hidden` gives its name, with a mark in it.
fn take(path: &Path, hidden: impl Fn(&str) -> PathBuf, lock: Lock) -> Result<(PathBuf, File), WriteError> {
    let failed = |source: io::Error| {
        let file = path.to_path_buf();
        if is_full(&source) {
            WriteError::NoSpace { file, bytes: 0 }
        } else {
            WriteError::Io { file, source }
        }
    };
    let mut temporary = hidden("");
    for attempt in 0..TRIES {
        let created = options().create_new(true).open(&temporary);
        let is_new = created.is_ok();
        let opened = match created {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => options().open(&temporary),
            created => created,
        };
        let file = match opened {
            Ok(file) => file,
            Err(error)
                if error.kind() == io::ErrorKind::NotFound
                    && temporary.parent().is_some_and(Path::exists) =>
            {
                continue;
            }
            Err(error) => return Err(failed(error)),
        };
        match lock(&file) {
            // The one that held the lock may have renamed or removed the file in the meantime.
            Ok(()) if same_file(&file, &temporary) => return Ok((temporary, file)),
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Err(WriteError::Busy { file: path.into() }),
            Err(TryLockError::Error(_)) if is_new => return Ok((temporary, file)),
            Err(TryLockError::Error(_)) => temporary = hidden(&format!(".{}-{attempt}", std::process::id())),
        }
    }
    Err(WriteError::Busy { file: path.into() })
}

fn options() -> OpenOptions {
    let mut options = OpenOptions::new();
    options.read(true).write(true);
    #[cfg(unix)]
    {
        // A link of that name, put there by somebody else, must not lead the bytes elsewhere.
        use std::os::unix::fs::OpenOptionsExt;
        options.custom_flags(rustix::fs::OFlags::NOFOLLOW.bits() as i32);
    }
    options
}

#[cfg(unix)]
fn same_file(file: &File, path: &Path) -> bool {
    use std::os::unix::fs::MetadataExt;
    let of = |metadata: io::Result<std::fs::Metadata>| metadata.ok().map(|m| (m.dev(), m.ino()));
    let opened = of(file.metadata());
    opened.is_some() && opened == of(std::fs::symlink_metadata(path))
}

#[cfg(not(unix))]
fn same_file(_: &File, path: &Path) -> bool {
    path.exists()
}

/// Whether an error means that the disk, a quota or a limit leaves no room.
fn is_full(error: &io::Error) -> bool {
    use io::ErrorKind;
    matches!(error.kind(), ErrorKind::StorageFull | ErrorKind::QuotaExceeded | ErrorKind::FileTooLarge)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder(name: &str) -> PathBuf {
        let folder = std::env::temp_dir().join(format!("neuropil-staged-{}-{name}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        folder
    }

    #[test]
    fn what_is_dropped_leaves_nothing_and_what_is_committed_is_whole() {
        let folder = folder("whole");
        let path = folder.join("f");
        let mut staged = Staged::create(&path, 10 << 20).unwrap();
        staged.write(b"half").unwrap();
        assert!(matches!(Staged::create(&path, 1), Err(WriteError::Busy { .. })));
        drop(staged);
        assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 0);

        std::fs::write(folder.join(".f.tmp"), vec![7; 100]).unwrap();
        let bytes: Vec<u8> = (0..CHUNK * 2 + 77).map(|i| (i % 251) as u8).collect();
        let mut staged = Staged::create(&path, bytes.len() as u64).unwrap();
        let (a, b) = bytes.split_at(1000);
        staged.write(a).unwrap();
        staged.write(b).unwrap();
        staged.commit(&[(3, b"xyz".to_vec())]).unwrap();
        let mut want = bytes;
        want[3..6].copy_from_slice(b"xyz");
        assert!(std::fs::read(&path).unwrap() == want);
        assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 1);
        std::fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn without_locks_two_writers_have_two_files() {
        let folder = folder("unlocked");
        let path = folder.join("f");
        let unlocked: Lock = |_| Err(TryLockError::Error(io::ErrorKind::Unsupported.into()));
        let mut writers =
            [0u8, 1, 2].map(|i| (i, Staged::create_with(&path, 4, unlocked).unwrap())).into_iter();
        for (i, mut staged) in writers.by_ref().take(2) {
            staged.write(&[i; 4]).unwrap();
            staged.commit(&[]).unwrap();
            assert_eq!(std::fs::read(&path).unwrap(), [i; 4]);
        }
        drop(writers);
        assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 1);
        std::fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn a_full_disk_is_seen_at_the_start() {
        let folder = folder("full");
        let error = Staged::create(&folder.join("f"), 1 << 60).err();
        assert!(matches!(error, Some(WriteError::NoSpace { .. })), "{error:?}");
        assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 0);
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
