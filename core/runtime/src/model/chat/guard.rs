//! Keeps what a message says from becoming control tokens.
//!
//! A template joins its own control tokens and the messages to one text, in which they can no longer be told apart.
//! So the messages go in with a mark, a character that occurs in none of them, inside every text that would be a
//! control token. Templates trim, cut, split and compare messages; all of that still works, because a message
//! without such texts goes in as it is. After the template, the tokenizer looks for control tokens, which a mark
//! breaks, and then takes the marks out. A text of one character has no inside; two marks before it break it.
//!
//! - Where a message begins with the end of a control token's text, or ends with the beginning of one, the mark
//!   stands there too, so that a neighbour cannot complete it.
//! - A template may also cut something out of the middle of a message, or change its case, and so make a control
//!   token. Therefore a conversation that holds the first or the last character of such a text anywhere is rendered a
//!   second time, with marks around all those characters. If that has other control tokens, it is what counts: no
//!   longer exactly what the template meant, but safe.
//!
//! The mark is drawn at random from a private-use plane, so that a template cannot name it.

use std::hash::{BuildHasher, RandomState};

use super::Message;
use crate::model::tokenizer::Tokenizer;

/// The first code point of plane 15, and how many there are to choose from.
const FIRST: u32 = 0xF_0000;
const COUNT: u32 = 0xFFFD;

/// A character that occurs in no message.
pub(super) struct Guard {
    mark: char,
}

impl Guard {
    /// Chooses the mark.
    pub fn choose(messages: &[Message]) -> Self {
        let absent =
            |mark: &char| !messages.iter().any(|m| m.content.contains(*mark) || m.role.contains(*mark));
        let start = RandomState::new().hash_one(messages.len()) as u32 % COUNT;
        let marks = (0..COUNT).filter_map(|at| char::from_u32(FIRST + (start + at) % COUNT));
        // Messages that hold a whole plane of private characters have none left that is theirs alone: U+FFFE is no
        // character, so nobody writes it.
        Self { mark: marks.take(64).find(absent).unwrap_or('\u{FFFE}') }
    }

    pub fn mark(&self) -> char {
        self.mark
    }

    /// The messages' contents with marks where they could be read as control tokens.
    pub fn contents(&self, tokenizer: &Tokenizer, messages: &[Message]) -> Vec<String> {
        messages.iter().map(|message| self.guarded(tokenizer, &message.content)).collect()
    }

    fn guarded(&self, tokenizer: &Tokenizer, content: &str) -> String {
        let core = content.trim();
        let start = content.len() - content.trim_start().len();
        let end = start + core.len();
        let mut out = String::with_capacity(content.len() + 8);
        let mut after = false;
        for (at, character) in content.char_indices() {
            let here = tokenizer.guarded_length_at(&content[at..]);
            let edge = at == start && !core.is_empty() && tokenizer.ends_guarded(core);
            if here == Some(character.len_utf8()) {
                out.extend([self.mark, self.mark]);
            } else if after || edge {
                out.push(self.mark);
            }
            out.push(character);
            after = here.is_some_and(|length| length > character.len_utf8());
            if at + character.len_utf8() == end && !core.is_empty() && tokenizer.begins_guarded(core) {
                after = true;
            }
        }
        if after {
            out.push(self.mark);
        }
        out
    }

    /// The messages' contents with marks around all characters with which a control token's text begins or ends;
    /// `None` when there are none.
    pub fn strict_contents(&self, tokenizer: &Tokenizer, messages: &[Message]) -> Option<Vec<String>> {
        let ends = tokenizer.guarded_ends();
        if !messages.iter().any(|message| message.content.contains(|c| ends.contains(&c))) {
            return None;
        }
        let marked = |content: &str| {
            let mut out = String::with_capacity(content.len() + content.len() / 4);
            for character in content.chars() {
                match ends.contains(&character) {
                    true => out.extend([self.mark, self.mark, character, self.mark]),
                    false => out.push(character),
                }
            }
            out
        };
        Some(messages.iter().map(|message| marked(&message.content)).collect())
    }
}
