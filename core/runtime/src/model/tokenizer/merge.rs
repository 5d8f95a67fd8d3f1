//! The merge loop that SPM and BPE share.
//!
//! Both begin with a row of small symbols and join, again and again, the neighbours whose pair has the lowest order,
//! the leftmost among equals. A heap over a linked list does that in n log n steps and no recursion, so one word of
//! a hundred thousand letters is no attack. Only the order of a pair differs: the rank of a merge in BPE, the score of
//! the joined text in SPM.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::TokenizerError;
use super::error::reserve;
use super::index::NONE;

/// A stretch of the text that is one piece so far. `piece` is [`NONE`] where the vocabulary has no such text.
#[derive(Clone, Copy, Debug)]
pub(super) struct Symbol {
    pub start: u32,
    pub len: u32,
    pub piece: u32,
    prev: u32,
    next: u32,
}

impl Symbol {
    /// The bytes from this symbol's start to the end of `right`, which follows it.
    pub fn join(&self, right: &Symbol) -> std::ops::Range<usize> {
        self.start as usize..right.start as usize + right.len as usize
    }
}

/// Two neighbours that may be joined. Ordered by what comes first.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Candidate {
    order: u32,
    left: u32,
    /// Bytes of both. A candidate whose neighbours have changed since has another sum, and is skipped.
    len: u32,
    piece: u32,
}

/// The loop and its memory, which is kept from word to word.
#[derive(Default)]
pub(super) struct Merger {
    symbols: Vec<Symbol>,
    heap: BinaryHeap<Reverse<Candidate>>,
}

impl Merger {
    /// Forgets the last word and makes room for one of `symbols` symbols.
    pub fn begin(&mut self, symbols: usize) -> Result<(), TokenizerError> {
        self.symbols.clear();
        self.heap.clear();
        reserve(&mut self.symbols, symbols, "the text's symbols")?;
        // Each symbol gives at most one pair at first, and each merge takes one symbol and gives two.
        let pairs = symbols.saturating_mul(3);
        self.heap.try_reserve(pairs).map_err(|_| TokenizerError::OutOfMemory {
            what: "the text's pairs",
            bytes: pairs.saturating_mul(size_of::<Candidate>()),
        })
    }

    /// Adds the next symbol of the word.
    pub fn push(&mut self, start: usize, len: usize, piece: u32) {
        let at = self.symbols.len() as u32;
        if let Some(last) = self.symbols.last_mut() {
            last.next = at;
        }
        let prev = at.checked_sub(1).unwrap_or(NONE);
        self.symbols.push(Symbol { start: start as u32, len: len as u32, piece, prev, next: NONE });
    }

    /// Joins until no pair is left. `pair` gives the order (lowest first) and the piece of two neighbours.
    pub fn run(&mut self, mut pair: impl FnMut(&Symbol, &Symbol) -> Option<(u32, u32)>) {
        for left in 1..self.symbols.len() as u32 {
            self.offer(left - 1, &mut pair);
        }
        while let Some(Reverse(best)) = self.heap.pop() {
            let left = self.symbols[best.left as usize];
            if left.len == 0 || left.next == NONE {
                continue;
            }
            let right = self.symbols[left.next as usize];
            if left.len + right.len != best.len {
                continue;
            }
            self.symbols[left.next as usize].len = 0;
            if right.next != NONE {
                self.symbols[right.next as usize].prev = best.left;
            }
            self.symbols[best.left as usize] =
                Symbol { len: best.len, piece: best.piece, next: right.next, ..left };
            if left.prev != NONE {
                self.offer(left.prev, &mut pair);
            }
            self.offer(best.left, &mut pair);
        }
    }

    fn offer(&mut self, left: u32, pair: &mut impl FnMut(&Symbol, &Symbol) -> Option<(u32, u32)>) {
        let l = &self.symbols[left as usize];
        if l.next == NONE {
            return;
        }
        let r = &self.symbols[l.next as usize];
        if let Some((order, piece)) = pair(l, r) {
            self.heap.push(Reverse(Candidate { order, left, len: l.len + r.len, piece }));
        }
    }

    /// What is left, in the order of the text.
    pub fn symbols(&self) -> impl Iterator<Item = &Symbol> {
        self.symbols.iter().filter(|symbol| symbol.len != 0)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;
    use proptest::prelude::*;

    /// The definition, step by step: look at all pairs, join the best.
    fn slow(mut pieces: Vec<u32>, table: &HashMap<(u32, u32), (u32, u32)>) -> Vec<u32> {
        loop {
            let best = pieces
                .windows(2)
                .enumerate()
                .filter_map(|(at, w)| table.get(&(w[0], w[1])).map(|&(order, piece)| (order, at, piece)))
                .min();
            let Some((_, at, piece)) = best else { return pieces };
            pieces[at] = piece;
            pieces.remove(at + 1);
        }
    }

    fn fast(pieces: &[u32], table: &HashMap<(u32, u32), (u32, u32)>) -> Vec<u32> {
        let mut merger = Merger::default();
        merger.begin(pieces.len()).unwrap();
        for (at, &piece) in pieces.iter().enumerate() {
            merger.push(at, 1, piece);
        }
        merger.run(|l, r| table.get(&(l.piece, r.piece)).copied());
        merger.symbols().map(|symbol| symbol.piece).collect()
    }

    proptest! {
        #[test]
        fn joins_as_the_definition_says(
            pieces in prop::collection::vec(0u32..4, 0..80),
            rules in prop::collection::vec((0u32..12, 0u32..12, 0u32..6), 0..24),
        ) {
            let table: HashMap<_, _> = rules
                .into_iter()
                .enumerate()
                .map(|(i, (l, r, order))| ((l, r), (order, 4 + (i as u32 % 8))))
                .collect();
            prop_assert_eq!(fast(&pieces, &table), slow(pieces, &table));
        }
    }

    #[test]
    fn long_runs_equal_the_slow_way() {
        let table = HashMap::from([((0, 0), (0, 1)), ((1, 1), (1, 2)), ((2, 2), (2, 3)), ((3, 0), (3, 4))]);
        for n in [1, 2, 3, 1021, 1024, 1031] {
            assert_eq!(fast(&vec![0; n], &table), slow(vec![0; n], &table), "{n} letters");
        }
    }
}
