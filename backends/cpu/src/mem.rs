//! Outputs that several threads write.
//!
//! A pool's threads share one output and must not overlap. Instead of asking every caller for a proof, the
//! types here hand out each part once: a cursor that only grows is the proof. A thread that is late takes
//! fewer parts, so a stolen core costs little.

use std::marker::PhantomData;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::pack::GROUP_ROWS;

/// A cursor over `0..len` that hands out each position once.
#[derive(Debug)]
struct Cursor {
    next: AtomicUsize,
    len: usize,
}

impl Cursor {
    fn new(len: usize) -> Self {
        Cursor { next: AtomicUsize::new(0), len }
    }

    /// The next range; `end` chooses its end from its start and is clamped to at least one position.
    fn claim(&self, end: impl Fn(usize) -> usize) -> Option<Range<usize>> {
        let mut start = self.next.load(Ordering::Relaxed);
        while start < self.len {
            let stop = end(start).clamp(start + 1, self.len);
            match self.next.compare_exchange_weak(start, stop, Ordering::Relaxed, Ordering::Relaxed) {
                Ok(_) => return Some(start..stop),
                Err(now) => start = now,
            }
        }
        None
    }
}

/// A slice handed out in consecutive pieces, each once, to any thread.
#[derive(Debug)]
pub struct Claims<'a, T> {
    start: NonNull<T>,
    cursor: Cursor,
    slice: PhantomData<&'a mut [T]>,
}

// SAFETY: the pieces are disjoint, so this is as good as sending a piece to each thread.
unsafe impl<T: Send> Sync for Claims<'_, T> {}
// SAFETY: it stands for the exclusive borrow it was made from.
unsafe impl<T: Send> Send for Claims<'_, T> {}

impl<'a, T> Claims<'a, T> {
    /// Begins to hand out `slice`.
    pub fn new(slice: &'a mut [T]) -> Self {
        let cursor = Cursor::new(slice.len());
        Claims { start: NonNull::from(slice).cast(), cursor, slice: PhantomData }
    }

    /// The next piece with the index of its first element; `end` chooses the index where it ends from the index
    /// where it starts (clamped to at least one element). `None` when all is handed out.
    pub fn claim(&self, end: impl Fn(usize) -> usize) -> Option<(usize, &'a mut [T])> {
        let range = self.cursor.claim(end)?;
        // SAFETY: the range is inside the slice, which is borrowed exclusively for 'a, and the cursor gives no
        // position twice.
        let piece =
            unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr().add(range.start), range.len()) };
        Some((range.start, piece))
    }
}

/// An output `y[tokens, rows]` handed out in ranges of row groups, each once, to any thread.
#[derive(Debug)]
pub struct Columns<'a> {
    y: NonNull<f32>,
    tokens: usize,
    rows: usize,
    stride: usize,
    groups: Cursor,
    slice: PhantomData<&'a mut [f32]>,
}

// SAFETY: the ranges are disjoint, so this is as good as sending a part to each thread.
unsafe impl Sync for Columns<'_> {}
// SAFETY: it stands for the exclusive borrow it was made from.
unsafe impl Send for Columns<'_> {}

impl<'a> Columns<'a> {
    /// The output of `tokens` × `rows` values in `y`; token `t` begins at `t * stride`.
    ///
    /// # Panics
    /// When `y` is too short or the rows of two tokens would overlap.
    pub fn new(y: &'a mut [f32], tokens: usize, rows: usize, stride: usize) -> Self {
        assert!(rows <= stride || tokens <= 1, "{rows} rows overlap at stride {stride}");
        let need = match tokens.checked_sub(1) {
            Some(last) => last.checked_mul(stride).and_then(|at| at.checked_add(rows)),
            None => Some(0),
        };
        assert!(need.is_some_and(|need| need <= y.len()), "{} values hold no {tokens} x {rows}", y.len());
        let groups = Cursor::new(rows.div_ceil(GROUP_ROWS));
        Columns { y: NonNull::from(y).cast(), tokens, rows, stride, groups, slice: PhantomData }
    }

    /// The next `groups` groups of 16 rows (at least one); `None` when all are handed out.
    pub fn claim(&self, groups: usize) -> Option<ColumnRange<'a>> {
        Some(self.range(self.groups.claim(|start| start.saturating_add(groups))?))
    }

    /// Access to row groups that a cursor has handed out.
    fn range(&self, groups: Range<usize>) -> ColumnRange<'a> {
        let rows = groups.start * GROUP_ROWS..self.rows.min(groups.end * GROUP_ROWS);
        ColumnRange { y: self.y, tokens: self.tokens, stride: self.stride, rows, groups, slice: PhantomData }
    }
}

/// Two outputs of the same shape, handed out together: the same row groups of both.
#[derive(Debug)]
pub(crate) struct ColumnPair<'a>(Columns<'a>, Columns<'a>);

impl<'a> ColumnPair<'a> {
    /// Pairs two outputs of which nothing has been claimed.
    ///
    /// # Panics
    /// When their shapes differ or one has been claimed from.
    pub fn new(mut a: Columns<'a>, mut b: Columns<'a>) -> Self {
        assert!((a.tokens, a.rows) == (b.tokens, b.rows), "a pair has one shape");
        assert!(*a.groups.next.get_mut() == 0 && *b.groups.next.get_mut() == 0, "a pair is whole");
        ColumnPair(a, b)
    }

    /// As [`Columns::claim`], for both.
    pub fn claim(&self, groups: usize) -> Option<(ColumnRange<'a>, ColumnRange<'a>)> {
        let range = self.0.groups.claim(|start| start.saturating_add(groups))?;
        Some((self.0.range(range.clone()), self.1.range(range)))
    }
}

/// Exclusive access to some row groups of an output, for every token.
#[derive(Debug)]
pub struct ColumnRange<'a> {
    y: NonNull<f32>,
    tokens: usize,
    stride: usize,
    rows: Range<usize>,
    groups: Range<usize>,
    slice: PhantomData<&'a mut [f32]>,
}

// SAFETY: it stands for an exclusive borrow of its part of the output.
unsafe impl Send for ColumnRange<'_> {}

impl ColumnRange<'_> {
    /// Tokens of the output.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// The rows that may be written.
    pub fn rows(&self) -> Range<usize> {
        self.rows.clone()
    }

    /// The same as groups of 16 rows; the last may be shorter.
    pub fn groups(&self) -> Range<usize> {
        self.groups.clone()
    }

    /// The same access for a shorter time.
    pub(crate) fn reborrow(&mut self) -> ColumnRange<'_> {
        ColumnRange { rows: self.rows.clone(), groups: self.groups.clone(), ..*self }
    }

    /// The same rows, counted from 0, for a shorter time.
    ///
    /// # Panics
    /// When there are no tokens or no rows.
    pub(crate) fn counted_from_zero(&mut self) -> ColumnRange<'_> {
        assert!(self.tokens > 0 && !self.rows.is_empty());
        // SAFETY: there is such a row, and `Columns::new` saw that the rows of a token are inside the slice.
        let y = unsafe { self.y.add(self.rows.start) };
        ColumnRange { y, rows: 0..self.rows.len(), groups: 0..self.groups.len(), ..*self }
    }

    /// The rows of one of its groups alone, counted from 0, for a shorter time.
    ///
    /// # Panics
    /// When there are no tokens or it has no such group.
    pub(crate) fn group(&mut self, group: usize) -> ColumnRange<'_> {
        assert!(self.tokens > 0 && self.groups.contains(&group));
        let first = group * GROUP_ROWS;
        let rows = 0..self.rows.end.min(first + GROUP_ROWS) - first;
        // SAFETY: a group has a row, and `Columns::new` saw that the rows of a token are inside the slice.
        let y = unsafe { self.y.add(first) };
        ColumnRange { y, rows, groups: 0..1, ..*self }
    }

    /// The rows of one token.
    pub(crate) fn token_mut(&mut self, token: usize) -> &mut [f32] {
        let at = self.at(token, self.rows.start);
        // SAFETY: the rows of a token are consecutive, and this range has them exclusively.
        unsafe { std::slice::from_raw_parts_mut(at, self.rows.len()) }
    }

    /// Where row `row` of token `token` lies. The rows of this range from `row` on follow it.
    pub(crate) fn at(&mut self, token: usize, row: usize) -> *mut f32 {
        assert!(token < self.tokens && self.rows.contains(&row));
        // SAFETY: checked above, and `Columns::new` saw that all tokens and rows are inside the slice.
        unsafe { self.y.as_ptr().add(token * self.stride + row) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_element_is_claimed_once_by_some_thread() {
        let mut counts = vec![0u8; 1000];
        let claims = Claims::new(&mut counts);
        std::thread::scope(|s| {
            for _ in 0..4 {
                s.spawn(|| {
                    while let Some((at, piece)) = claims.claim(|start| start + start % 7) {
                        assert!(at < 1000 && !piece.is_empty());
                        piece.iter_mut().for_each(|c| *c += 1);
                    }
                });
            }
        });
        assert!(counts.iter().all(|c| *c == 1));
    }

    #[test]
    fn column_ranges_cover_the_rows() {
        let mut y = [0.0; 2 * 40];
        let columns = Columns::new(&mut y, 2, 35, 40);
        let rows: Vec<_> = std::iter::from_fn(|| columns.claim(2)).map(|c| (c.rows(), c.groups())).collect();
        assert_eq!(rows, [(0..32, 0..2), (32..35, 2..3)]);
        assert!(Columns::new(&mut [], 0, 5, 5).claim(1).is_some());
        assert!(Columns::new(&mut [], 5, 0, 0).claim(1).is_none());
    }

    #[test]
    #[should_panic(expected = "hold no")]
    fn a_short_output_is_refused() {
        Columns::new(&mut [0.0; 9], 2, 5, 5);
    }
}
