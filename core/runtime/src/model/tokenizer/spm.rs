//! SPM: join the characters of a text by the score of what they make.
//!
//! The pair whose joined text has the highest score goes first; a text that is no token is never made. What stays
//! without a token is written as bytes.

use super::error::reserve;
use super::index::NONE;
use super::merge::Merger;
use super::{Pieces, SPACE_MARK, TokenizerError, Vocabulary};

pub(super) struct Spm {
    /// Per token, ascending where scores descend.
    order: Vec<u32>,
    /// The longest token, in bytes: nothing longer is worth looking up.
    longest: usize,
    /// Per byte: what stands for it when no token holds it; [`NONE`] when nothing does.
    bytes: [u32; 256],
    add_space_prefix: bool,
}

impl Spm {
    pub fn new(vocabulary: &Vocabulary, pieces: &Pieces) -> Result<Self, TokenizerError> {
        let scores = vocabulary.scores.as_ref().ok_or(TokenizerError::Missing {
            key: "tokenizer.ggml.scores",
            why: "an SPM vocabulary merges by score",
        })?;
        if let Some(index) = scores.iter().position(|score| score.is_nan()) {
            return Err(TokenizerError::Score { index });
        }
        let bytes = std::array::from_fn(|byte| {
            let raw = || pieces.find(&[byte as u8]).filter(|&id| pieces.may_come_from_text(id));
            pieces.byte_token(byte as u8).or_else(raw).or(vocabulary.unk).unwrap_or(NONE)
        });
        Ok(Self {
            order: scores.iter().map(|&score| descending(score)).collect(),
            longest: pieces.texts.iter().map(<[u8]>::len).max().unwrap_or(0),
            bytes,
            add_space_prefix: vocabulary.add_space_prefix.unwrap_or(true),
        })
    }

    pub fn add_space_prefix(&self) -> bool {
        self.add_space_prefix
    }

    /// Appends the ids of `text`, which holds no special tokens. `first` says that it begins the text or follows a
    /// special token.
    pub fn encode(
        &self,
        pieces: &Pieces,
        text: &[u8],
        first: bool,
        ids: &mut Vec<u32>,
    ) -> Result<(), TokenizerError> {
        let spaces = text.iter().filter(|&&byte| byte == b' ').count();
        let mut marked = Vec::new();
        reserve(&mut marked, text.len() + 2 * spaces + SPACE_MARK.len(), "the text")?;
        if first && self.add_space_prefix {
            marked.extend_from_slice(SPACE_MARK.as_bytes());
        }
        for &byte in text {
            match byte {
                b' ' => marked.extend_from_slice(SPACE_MARK.as_bytes()),
                _ => marked.push(byte),
            }
        }

        let piece = |bytes: &[u8]| {
            if bytes.len() > self.longest {
                return NONE;
            }
            pieces.find(bytes).filter(|&id| pieces.may_come_from_text(id)).unwrap_or(NONE)
        };
        let mut merger = Merger::default();
        merger.begin(marked.len())?;
        let mut at = 0;
        while at < marked.len() {
            // Invalid UTF-8 ends up as symbols that are no tokens, and so as bytes.
            let len = character_length(marked[at]).min(marked.len() - at);
            merger.push(at, len, piece(&marked[at..at + len]));
            at += len;
        }
        merger.run(|left, right| {
            let id = piece(&marked[left.join(right)]);
            self.order.get(id as usize).map(|&order| (order, id))
        });
        for symbol in merger.symbols() {
            if symbol.piece != NONE {
                ids.push(symbol.piece);
                continue;
            }
            for &byte in &marked[symbol.start as usize..(symbol.start + symbol.len) as usize] {
                match self.bytes[byte as usize] {
                    NONE => return Err(TokenizerError::NoToken { byte }),
                    id => ids.push(id),
                }
            }
        }
        Ok(())
    }
}

/// Maps scores to integers so that the highest score comes first; both zeros are one.
fn descending(score: f32) -> u32 {
    let bits = (score + 0.0).to_bits();
    let ascending = if bits >> 31 == 1 { !bits } else { bits | 1 << 31 };
    !ascending
}

/// The length that the first byte of a character announces.
fn character_length(first: u8) -> usize {
    match first >> 4 {
        0xC | 0xD => 2,
        0xE => 3,
        0xF => 4,
        _ => 1,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn higher_scores_come_first() {
        let scores = [f32::INFINITY, 3.0, 0.5, 0.0, -0.0, -1e-9, -1.0, -1000.0, f32::NEG_INFINITY];
        let orders: Vec<_> = scores.map(descending).into();
        assert!(orders.is_sorted());
        assert_eq!(descending(0.0), descending(-0.0));
    }
}
