//! Which tokens are special, and where they occur in a text.
//!
//! A file says the type of each token, but not reliably: end-of-turn tokens are often stored as ordinary ones. As
//! llama.cpp does, a short list of well-known texts decides for them; otherwise a chat model would never stop, and
//! its end token could be written by a user as plain text.
//!
//! Special tokens are cut out of a text before anything else happens to it: the longest first, equal lengths from
//! left to right. One pass per distinct length needs no trie and stays linear in the text whatever it holds.

use std::collections::BTreeMap;
use std::ops::Range;

use super::index::NONE;
use super::vocabulary::Vocabulary;

/// What a token is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Role {
    Normal,
    Unknown,
    Control,
    UserDefined,
    Unused,
    Byte,
}

impl Role {
    fn from_type(number: i32) -> Self {
        match number {
            1 => Self::Normal,
            2 => Self::Unknown,
            3 => Self::Control,
            4 => Self::UserDefined,
            6 => Self::Byte,
            _ => Self::Unused,
        }
    }

    /// Whether the token's text may only stand for the token when special tokens are parsed, and is not shown.
    pub fn is_hidden(self) -> bool {
        matches!(self, Self::Control | Self::Unknown)
    }
}

/// A token with one of these texts ends a turn or a document, whatever type the file gives it.
const END: [&str; 33] = [
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|flush|>",
    "<|calls|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "</s>",
    "<|eom_id|>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "[EOS]",
    "<|end_of_text|>",
    "<end_of_utterance>",
    "<eos>",
    "<turn|>",
    "<|tool_response>",
    "<｜end▁of▁sentence｜>",
    "[e~[",
    // Padding and separators of fill-in-the-middle models: they come where the filled part is over.
    "<|fim_pad|>",
    "<fim-pad>",
    "<fim_pad>",
    "<PAD>",
    "[PAD]",
    "<|fim_repo|>",
    "<|repo_name|>",
    "<fim-repo>",
    "<REPO>",
    "<reponame>",
    "<|file_sep|>",
];

/// A token with one of these texts is a control token, whatever type the file gives it.
const CONTROL: [&str; 22] = [
    "<|fim_prefix|>",
    "<fim-prefix>",
    "<fim_prefix>",
    "<｜fim▁begin｜>",
    "<PRE>",
    "▁<PRE>",
    "<|code_prefix|>",
    "<|fim_suffix|>",
    "<fim-suffix>",
    "<fim_suffix>",
    "<｜fim▁hole｜>",
    "<SUF>",
    "▁<SUF>",
    "<|code_suffix|>",
    "<|fim_middle|>",
    "<fim-middle>",
    "<fim_middle>",
    "<｜fim▁end｜>",
    "<MID>",
    "▁<MID>",
    "<|code_middle|>",
    "<|prefix|>",
];

/// Tokens that structure an answer and are shown, although the file may call them control tokens.
const SHOWN: [&str; 4] = ["<|channel|>", "<|message|>", "<|start|>", "<|constrain|>"];

/// Whether this is a text of a token that structures a conversation, whether it is shown or not.
pub(super) fn structures(text: &[u8]) -> bool {
    SHOWN.iter().chain(&END).any(|known| known.as_bytes() == text)
}

/// The role of every token, and the ids that end a generation, ascending. `find` gives the id of a text.
pub(super) fn roles(vocabulary: &Vocabulary, find: impl Fn(&str) -> Option<u32>) -> (Vec<Role>, Vec<u32>) {
    let mut roles = vec![Role::Normal; vocabulary.tokens.len()];
    if let Some(types) = &vocabulary.types {
        roles.iter_mut().zip(types).for_each(|(role, &number)| *role = Role::from_type(number));
    }
    let mut set = |text: &str, role| {
        let id = find(text)?;
        *roles.get_mut(id as usize)? = role;
        Some(id)
    };
    CONTROL.iter().for_each(|text| _ = set(text, Role::Control));
    let mut ends: Vec<(u32, &str)> =
        END.iter().filter_map(|text| Some((set(text, Role::Control)?, *text))).collect();
    SHOWN.iter().for_each(|text| _ = set(text, Role::UserDefined));

    // Two families use a text of the list for something else.
    let has = |ends: &[(u32, &str)], text| ends.iter().any(|end| end.1 == text);
    let calls = has(&ends, "<|call|>") || has(&ends, "<|calls|>");
    if calls && (has(&ends, "<|return|>") || has(&ends, "<|flush|>")) {
        ends.retain(|end| end.1 != "<|end|>");
        set("<|end|>", Role::UserDefined);
    }
    if has(&ends, "<|tool_response>") {
        ends.retain(|end| end.1 != "</s>");
        set("</s>", Role::Normal);
    }
    let named = [vocabulary.eos, vocabulary.eot, vocabulary.eom];
    let mut ends: Vec<u32> = ends.into_iter().map(|end| end.0).chain(named.into_iter().flatten()).collect();
    ends.sort_unstable();
    ends.dedup();
    (roles, ends)
}

/// A part of a text: bytes still to be tokenized, or a special token.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Fragment {
    Text(Range<usize>),
    Token(u32),
}

/// The special tokens of one length.
struct Length {
    bytes: usize,
    /// Bit b is set when one of them begins with byte b.
    first: [u64; 4],
}

impl Length {
    fn begins_with(&self, byte: u8) -> bool {
        self.first[byte as usize / 64] >> (byte % 64) & 1 == 1
    }
}

/// Cuts special tokens out of texts.
pub(super) struct Cutter {
    /// Longest first: user-defined tokens only, and all special tokens.
    user: Vec<Length>,
    all: Vec<Length>,
    /// Whether whitespace after a special token is dropped, and the tokens for which it is not.
    trim: bool,
    untrimmed: Vec<u32>,
}

impl Cutter {
    /// `find` gives the id of a text.
    pub fn new(vocabulary: &Vocabulary, roles: &[Role], find: impl Fn(&str) -> Option<u32>) -> Self {
        let lengths = |wanted: &dyn Fn(Role) -> bool| {
            let mut map = BTreeMap::<usize, [u64; 4]>::new();
            for (text, _) in vocabulary.tokens.iter().zip(roles).filter(|(_, role)| wanted(**role)) {
                if let Some(&byte) = text.first() {
                    map.entry(text.len()).or_default()[byte as usize / 64] |= 1 << (byte % 64);
                }
            }
            map.into_iter().rev().map(|(bytes, first)| Length { bytes, first }).collect()
        };
        let name = vocabulary.name.as_deref().unwrap_or_default().to_lowercase();
        Self {
            user: lengths(&|role| role == Role::UserDefined),
            all: lengths(&|role| role == Role::UserDefined || role.is_hidden()),
            trim: name.contains("phi-3") || name.contains("phi3"),
            untrimmed: ["<unk>", "<s>", "<|endoftext|>"].into_iter().filter_map(find).collect(),
        }
    }

    /// The lengths of the special tokens that begin with `first`, longest first.
    pub fn lengths(&self, first: u8) -> impl Iterator<Item = usize> {
        self.all.iter().filter(move |length| length.begins_with(first)).map(|length| length.bytes)
    }

    /// Cuts `text`. `find` is given what stands before a place and the bytes there, and gives the id of those bytes if
    /// they are a special token of the wanted kind, else [`NONE`].
    pub fn cut(&self, text: &[u8], all: bool, find: impl Fn(&[u8], &[u8]) -> u32) -> Vec<Fragment> {
        let mut fragments = Vec::new();
        if !text.is_empty() {
            fragments.push(Fragment::Text(0..text.len()));
        }
        let mut next = Vec::new();
        for length in if all { &self.all } else { &self.user } {
            for fragment in fragments.drain(..) {
                match fragment {
                    Fragment::Text(range) => self.cut_range(text, range, length, &find, &mut next),
                    token => next.push(token),
                }
            }
            std::mem::swap(&mut fragments, &mut next);
        }
        fragments
    }

    fn cut_range(
        &self,
        text: &[u8],
        range: Range<usize>,
        length: &Length,
        find: &impl Fn(&[u8], &[u8]) -> u32,
        out: &mut Vec<Fragment>,
    ) {
        let (mut from, mut at) = (range.start, range.start);
        while at + length.bytes <= range.end {
            let id = if length.begins_with(text[at]) {
                find(&text[..at], &text[at..at + length.bytes])
            } else {
                NONE
            };
            if id == NONE {
                at += 1;
                continue;
            }
            if from < at {
                out.push(Fragment::Text(from..at));
            }
            out.push(Fragment::Token(id));
            at += length.bytes;
            if self.trim && !self.untrimmed.contains(&id) {
                let space = |b: &u8| b.is_ascii_whitespace() || *b == 0x0B;
                at += text[at..range.end].iter().take_while(|b| space(b)).count();
            }
            from = at;
        }
        if from < range.end {
            out.push(Fragment::Text(from..range.end));
        }
    }
}
