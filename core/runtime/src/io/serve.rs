//! Serves one read with positioned reads, on the caller's thread: what the portable engines do.

use std::sync::Arc;
use std::time::Duration;

use super::progress::{Next, Progress};
use super::read::{Piece, Read};
use super::{IoError, ReadAt};

/// Attempts that bring nothing before the thread sleeps between them.
const EAGER_TRIES: u32 = 8;

/// Most bytes of one attempt; systems have limits near 2 GiB.
const MOST: usize = 1 << 30;

/// Reads all of `read` into its targets. `bounce` is aligned memory, a multiple of the source's alignment long.
pub(super) fn serve(source: &dyn ReadAt, read: &mut Read, bounce: &mut [u8]) -> Result<(), IoError> {
    read.check(source.files())?;
    let alignment = source.alignment();
    if read.straight(alignment) {
        let (file, mut all) = (read.file, read.pieces(alignment, MOST));
        let out = read.straight_memory();
        return all.try_for_each(|piece| {
            transfer(source, file, &piece, out.get_mut(piece.from..).unwrap_or_default())
        });
    }
    for piece in read.pieces(alignment, bounce.len()) {
        transfer(source, read.file, &piece, bounce)?;
        read.deliver(piece.from, &bounce[piece.skip..piece.skip + piece.len]);
    }
    Ok(())
}

/// Reads one piece to the start of `out`.
fn transfer(source: &dyn ReadAt, file: usize, piece: &Piece, out: &mut [u8]) -> Result<(), IoError> {
    let mut progress = Progress::new(piece, source.alignment());
    loop {
        let resume = progress.resume();
        let out = out.get_mut(resume..piece.span).unwrap_or_default();
        let got = source.read_at(file, out, piece.start + resume as u64);
        let next = progress.after(got, || source.size(file));
        if let Some(result) = outcome(next, source, file, piece) {
            return result;
        }
        if progress.tries() > EAGER_TRIES {
            std::thread::sleep(Duration::from_micros(100));
        }
    }
}

/// The end of a transfer, unless it is to be tried again.
pub(super) fn outcome(
    next: Next,
    source: &dyn ReadAt,
    file: usize,
    piece: &Piece,
) -> Option<Result<(), IoError>> {
    let (path, offset, len) = (source.path(file), piece.start + piece.skip as u64, piece.len);
    match next {
        Next::Done => Some(Ok(())),
        Next::Again => None,
        Next::Ends(size) => Some(Err(IoError::Truncated { file: path.into(), offset, len, size })),
        Next::Failed(error) => {
            Some(Err(IoError::Read { file: path.into(), offset, len, source: Arc::new(error) }))
        }
    }
}
