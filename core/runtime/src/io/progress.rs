//! What to do after an attempt to transfer bytes: go on, give up, or be content. Pure, so that every engine has the
//! same patience and it can be tested without one.
//!
//! Storage may give less than was asked for, and a direct read must go on at a whole block, so bytes of the last block
//! are then read again. That is why "the file ends" cannot be told from an attempt that brought nothing new alone; the
//! file's size decides.

use std::io;

use super::read::Piece;

/// Attempts in a row that bring nothing before a transfer fails, so that nothing hangs for ever.
const MOST_TRIES: u32 = 1000;

/// The system's number for a failed transfer.
pub(super) const EIO: i32 = if cfg!(windows) { 1117 } else { 5 };

/// How far a transfer is.
#[derive(Debug)]
pub(super) struct Progress {
    start: u64,
    need: usize,
    alignment: usize,
    /// Bytes from `start` on that are there.
    valid: usize,
    /// Attempts since there was something new.
    tries: u32,
    /// Whether the device has failed once.
    failed: bool,
}

/// What to do next.
#[derive(Debug)]
pub(super) enum Next {
    /// All that is needed is there.
    Done,
    /// Try again from [`Progress::resume`] on.
    Again,
    /// The file ends early: it has so many bytes.
    Ends(u64),
    /// Storage failed.
    Failed(io::Error),
}

impl Progress {
    pub(super) fn new(piece: &Piece, alignment: usize) -> Progress {
        let need = piece.skip + piece.len;
        Progress { start: piece.start, need, alignment, valid: 0, tries: 0, failed: false }
    }

    /// Byte of the transfer to go on from, aligned.
    pub(super) fn resume(&self) -> usize {
        self.valid / self.alignment * self.alignment
    }

    /// Attempts in a row that brought nothing.
    pub(super) fn tries(&self) -> u32 {
        self.tries
    }

    /// Takes note of an attempt from [`Progress::resume`] on. `size` asks for the file's size.
    pub(super) fn after(&mut self, got: io::Result<usize>, size: impl FnOnce() -> io::Result<u64>) -> Next {
        let error = match got {
            Ok(got) => {
                let reach = self.resume().saturating_add(got);
                if reach >= self.need {
                    return Next::Done;
                }
                if reach > self.valid {
                    (self.valid, self.tries) = (reach, 0);
                    return Next::Again;
                }
                match size() {
                    Ok(size) if size < self.start.saturating_add(self.need as u64) => {
                        return Next::Ends(size);
                    }
                    Ok(_) => io::Error::new(io::ErrorKind::WouldBlock, "reads bring nothing"),
                    Err(error) => return Next::Failed(error),
                }
            }
            Err(error) => error,
        };
        let retry = match error.kind() {
            io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock => self.tries < MOST_TRIES,
            _ if error.raw_os_error() == Some(EIO) => !std::mem::replace(&mut self.failed, true),
            _ => false,
        };
        self.tries += 1;
        if retry { Next::Again } else { Next::Failed(error) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn progress(skip: usize, len: usize) -> Progress {
        Progress::new(&Piece { start: 1024, span: 2048, skip, from: 0, len }, 512)
    }

    fn errno(kind: i32) -> io::Result<usize> {
        Err(io::Error::from_raw_os_error(kind))
    }

    #[test]
    fn short_attempts_go_on_at_a_block_and_end_when_enough_is_there() {
        let mut it = progress(100, 1500);
        assert!(matches!(it.after(Ok(700), || panic!("not asked")), Next::Again));
        assert_eq!(it.resume(), 512);
        assert!(matches!(it.after(Ok(100), || Ok(9999)), Next::Again), "fewer than were there already");
        assert!(matches!(it.after(Ok(1087), || panic!("not asked")), Next::Again));
        assert!(matches!(it.after(Ok(64), || panic!("not asked")), Next::Done));
    }

    #[test]
    fn only_the_size_says_that_a_file_ends() {
        let mut it = progress(0, 2048);
        assert!(matches!(it.after(Ok(600), || panic!("not asked")), Next::Again));
        assert!(matches!(it.after(Ok(88), || Ok(1624)), Next::Ends(1624)));
        let mut it = progress(0, 2048);
        let mut tries = 0;
        while matches!(it.after(Ok(0), || Ok(5000)), Next::Again) {
            tries += 1;
        }
        assert_eq!(tries, MOST_TRIES);
    }

    #[test]
    fn a_failed_device_has_a_second_chance_and_no_third() {
        let mut it = progress(0, 10);
        assert!(matches!(it.after(errno(EIO), || Ok(0)), Next::Again));
        assert!(matches!(it.after(errno(EIO), || Ok(0)), Next::Failed(_)));
        let refused = Err(io::Error::from(io::ErrorKind::PermissionDenied));
        assert!(matches!(progress(0, 10).after(refused, || Ok(0)), Next::Failed(_)));
        let busy = Err(io::Error::from(io::ErrorKind::WouldBlock));
        assert!(matches!(progress(0, 10).after(busy, || Ok(0)), Next::Again));
    }
}
