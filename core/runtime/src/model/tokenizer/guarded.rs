//! Texts of which a part is guarded: control tokens are read everywhere but where a mark breaks them.
//!
//! See the module of chat templates for why. The text is tokenized as one text without the marks, so that without any
//! guarded control token the ids are those of plain parsing.

use std::collections::HashSet;

use super::error::reserve;
use super::special::{Fragment, Role};
use super::{NONE, Tokenizer, TokenizerError, special};

impl Tokenizer {
    /// The ids of `text`, whose control tokens are parsed where no `mark` breaks them. Where the vocabulary asks for
    /// BOS there is exactly one at the start.
    pub(crate) fn encode_guarded(&self, text: &str, mark: char) -> Result<Vec<u32>, TokenizerError> {
        self.check_length(text.len())?;
        let mut ids = Vec::new();
        reserve(&mut ids, text.len() / 2 + 2, "the text's ids")?;
        let mut after_special = true;
        for fragment in self.fragments(text, mark) {
            let range = match fragment {
                Fragment::Token(id) => {
                    ids.push(id);
                    after_special = true;
                    continue;
                }
                Fragment::Text(range) => range,
            };
            let part = text.get(range).unwrap_or_default();
            if !part.contains(mark) {
                self.encode_text(part.as_bytes(), &mut after_special, &mut ids)?;
                continue;
            }
            // Without its marks this part may hold control tokens again, which are text here.
            let part = part.replace(mark, "");
            let inner = self.cutter.cut(part.as_bytes(), false, |_, text| {
                self.pieces
                    .find(text)
                    .filter(|&id| self.pieces.role(id) == Some(Role::UserDefined) && !self.is_guarded(id))
                    .unwrap_or(NONE)
            });
            for fragment in inner {
                match fragment {
                    Fragment::Token(id) => {
                        ids.push(id);
                        after_special = true;
                    }
                    Fragment::Text(range) => {
                        self.encode_text(&part.as_bytes()[range], &mut after_special, &mut ids)?
                    }
                }
            }
        }
        if let Some(bos) = self.bos.filter(|_| self.add_bos) {
            let written = ids.iter().take_while(|&&id| id == bos).count();
            match written {
                0 => ids.insert(0, bos),
                _ => drop(ids.drain(1..written)),
            }
        }
        Ok(ids)
    }

    /// The guarded tokens that parsing finds in `text`, in order.
    pub(crate) fn guarded_tokens(&self, text: &str, mark: char) -> Vec<u32> {
        let token = |fragment| match fragment {
            Fragment::Token(id) if self.is_guarded(id) => Some(id),
            _ => None,
        };
        self.fragments(text, mark).into_iter().filter_map(token).collect()
    }

    /// Cuts special tokens out of `text`. A mark inside a token's text breaks it; a token of one character has no
    /// inside and is broken by two marks before it.
    fn fragments(&self, text: &str, mark: char) -> Vec<Fragment> {
        let marks = String::from_iter([mark, mark]);
        self.cutter.cut(text.as_bytes(), true, |before, token| {
            let broken = before.ends_with(marks.as_bytes())
                && std::str::from_utf8(token).is_ok_and(|token| token.chars().count() == 1);
            if broken { NONE } else { self.special(token, true) }
        })
    }

    /// Whether `id` structures a conversation: control tokens, and those that are shown although they are.
    fn is_guarded(&self, id: u32) -> bool {
        let structures = || self.pieces.texts.get(id as usize).is_some_and(special::structures);
        self.pieces
            .role(id)
            .is_some_and(|role| role.is_hidden() || (role == Role::UserDefined && structures()))
    }

    /// The length of the longest guarded token whose text `text` begins with.
    pub(crate) fn guarded_length_at(&self, text: &str) -> Option<usize> {
        let guarded = |length: &usize| {
            let found = text.as_bytes().get(..*length).and_then(|text| self.pieces.find(text));
            found.is_some_and(|id| self.is_guarded(id))
        };
        self.cutter.lengths(*text.as_bytes().first()?).find(guarded)
    }

    /// The texts of the guarded tokens.
    fn guarded_texts(&self) -> impl Iterator<Item = &[u8]> {
        (0..self.len() as u32).filter(|&id| self.is_guarded(id)).filter_map(|id| self.token_text(id))
    }

    /// The characters with which the texts of guarded tokens begin or end, in upper and lower case.
    pub(crate) fn guarded_ends(&self) -> HashSet<char> {
        let ends = self.guarded_texts().filter_map(|text| std::str::from_utf8(text).ok());
        let ends = ends.flat_map(|text| text.chars().next().into_iter().chain(text.chars().next_back()));
        ends.flat_map(|c| [c].into_iter().chain(c.to_lowercase()).chain(c.to_uppercase())).collect()
    }

    /// Whether `text` begins with the end of a guarded token's text: text before it could complete the token.
    pub(crate) fn ends_guarded(&self, text: &str) -> bool {
        let text = text.as_bytes();
        self.guarded_texts().any(|token| (1..token.len()).any(|at| text.starts_with(&token[at..])))
    }

    /// Whether `text` ends with the beginning of a guarded token's text: text after it could complete the token.
    pub(crate) fn begins_guarded(&self, text: &str) -> bool {
        let text = text.as_bytes();
        self.guarded_texts().any(|token| (1..token.len()).any(|at| text.ends_with(&token[..at])))
    }
}
