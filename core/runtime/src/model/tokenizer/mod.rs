//! From text to token ids and back, by the vocabulary in the model file.
//!
//! Two families cover the models that run here. *SPM* (`llama`) joins the letters of a text by the score of what they
//! make, and writes bytes for what it does not know. *BPE* (`gpt2`) first splits the text into words by rules of the
//! model, then joins bytes by a list of merges. Ids equal llama.cpp's.
//!
//! The merge loop is written here, not taken from the `tokenizers` crate: that crate cannot express SPM by scores,
//! splits with a backtracking engine that long words and long runs of spaces defeat, and wants every token and merge
//! as a `String`, which would take most of the load time of a small model.
//!
//! Stated rules:
//! - *Special tokens in a text* are text unless [`EncodeOptions::parse_special`] is set. Tokens that the file calls
//!   user-defined are always matched. The longest special token is matched first. Merging never makes a control token.
//! - *Invalid UTF-8* never fails. SPM keeps the bytes (they become byte tokens). BPE reads each invalid byte as
//!   U+FFFD.
//! - *A byte without a token*: SPM takes `<0xXX>`, else the token that is that raw byte, else the unknown token, else
//!   it is a [`TokenizerError::NoToken`]. BPE drops it, as llama.cpp does.
//! - *The space prefix* of SPM (the legacy rule): with `add_space_prefix` (the default) one space goes before the
//!   text and before each stretch of text after a special token, so `<s>word` and `<s> word` differ by one space
//!   token. Without it, none is added anywhere.
//! - *Two tokens with one text*: the lower id is used.

mod bpe;
mod error;
mod guarded;
mod index;
mod merge;
mod metadata;
mod special;
mod split;
mod spm;
mod vocabulary;

pub use error::TokenizerError;
pub use metadata::VocabularyError;
pub use vocabulary::{TextList, Vocabulary};

use bpe::Bpe;
use error::reserve;
use index::{NONE, TextIndex};
use special::{Cutter, Fragment, Role};
use spm::Spm;

use crate::shown::shown;

/// The longest text that can be encoded, in bytes.
const MAX_TEXT: usize = 1 << 30;

/// What SPM writes for a space.
const SPACE_MARK: &str = "\u{2581}";

/// How to read a text. The default adds nothing and parses nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EncodeOptions {
    /// Add BOS and EOS where the file says so.
    pub add_special: bool,
    /// Read the texts of control tokens as those tokens. Only for text that no user wrote.
    pub parse_special: bool,
}

/// How the pieces of a text are joined.
enum Family {
    Spm(Box<Spm>),
    Bpe(Bpe),
}

/// A tokenizer. `Send + Sync`; encoding and decoding share it freely.
pub struct Tokenizer {
    family: Family,
    pieces: Pieces,
    cutter: Cutter,
    ends: Vec<u32>,
    bos: Option<u32>,
    eos: Option<u32>,
    add_bos: bool,
    add_eos: bool,
    notes: Vec<String>,
}

/// The texts of a vocabulary, with what each is. Texts that only occur inside merges follow after the tokens.
struct Pieces {
    texts: TextList,
    index: TextIndex,
    roles: Vec<Role>,
    /// Whether no two tokens have the same text.
    unique: bool,
}

impl Pieces {
    /// The piece with this text.
    fn find(&self, text: &[u8]) -> Option<u32> {
        self.index.get(&self.texts, text)
    }

    /// The role of a token; pieces that are no tokens have none.
    fn role(&self, id: u32) -> Option<Role> {
        self.roles.get(id as usize).copied()
    }

    /// Whether text may become this piece without parsing special tokens.
    fn may_come_from_text(&self, id: u32) -> bool {
        !matches!(self.role(id), Some(Role::Control | Role::Unknown | Role::Byte))
    }

    /// The token `<0xXX>` of a byte.
    fn byte_token(&self, byte: u8) -> Option<u32> {
        self.find(format!("<0x{byte:02X}>").as_bytes()).filter(|&id| self.role(id).is_some())
    }
}

impl Tokenizer {
    /// Builds a tokenizer. Takes some 10 ms for 50,000 tokens.
    ///
    /// # Errors
    /// A [`TokenizerError`] that names the key of the file which is missing, unknown or does not fit the others.
    pub fn new(vocabulary: Vocabulary) -> Result<Self, TokenizerError> {
        let mut vocabulary = vocabulary;
        let tokens = vocabulary.tokens.len();
        check(&vocabulary)?;
        let mut index = TextIndex::with_room(tokens)?;
        let mut unique = true;
        for id in 0..tokens as u32 {
            if vocabulary.tokens.get(id as usize).is_some_and(|text| !text.is_empty()) {
                unique &= index.insert(&vocabulary.tokens, id)? == id;
            }
        }
        let find = |text: &str| index.get(&vocabulary.tokens, text.as_bytes());
        if vocabulary.model == "llama" {
            // The format's defaults, where these ids are what the defaults mean.
            let default = |id: u32, text| find(text).filter(|&found| found == id);
            vocabulary.bos = vocabulary.bos.or(default(1, "<s>"));
            vocabulary.eos = vocabulary.eos.or(default(2, "</s>"));
            vocabulary.unk = vocabulary.unk.or(default(0, "<unk>"));
        }
        let find = |text: &str| index.get(&vocabulary.tokens, text.as_bytes());
        let (roles, ends) = special::roles(&vocabulary, find);
        let cutter = Cutter::new(&vocabulary, &roles, find);
        let mut notes = Vec::new();
        let texts = std::mem::take(&mut vocabulary.tokens);
        let mut pieces = Pieces { texts, index, roles, unique };
        let (family, default_bos) = match vocabulary.model.as_str() {
            "llama" => (Family::Spm(Box::new(Spm::new(&vocabulary, &pieces)?)), true),
            _ => {
                let bpe = Bpe::new(&vocabulary, &mut pieces, &mut notes)?;
                let add_bos = bpe.add_bos();
                (Family::Bpe(bpe), add_bos)
            }
        };
        // Gemma 4 does not work without BOS, whatever its file says.
        let add_bos = match vocabulary.add_bos {
            _ if vocabulary.model == "gemma4" => true,
            Some(add) => add,
            None => default_bos && vocabulary.bos.is_some(),
        };
        let add_eos = vocabulary.add_eos.unwrap_or(false);
        let missing = |key, why| Err(TokenizerError::Missing { key, why });
        if add_bos && vocabulary.bos.is_none() {
            return missing("tokenizer.ggml.bos_token_id", "tokenizer.ggml.add_bos_token asks for it");
        }
        if add_eos && vocabulary.eos.is_none() {
            return missing("tokenizer.ggml.eos_token_id", "tokenizer.ggml.add_eos_token asks for it");
        }
        Ok(Self {
            family,
            pieces,
            cutter,
            ends,
            bos: vocabulary.bos,
            eos: vocabulary.eos,
            add_bos,
            add_eos,
            notes,
        })
    }

    /// The ids of `text`. See the module's rules for special tokens and invalid UTF-8.
    ///
    /// # Errors
    /// `NoToken`, `TooLong` over 1 GiB, `OutOfMemory`.
    pub fn encode(&self, text: impl AsRef<[u8]>, options: EncodeOptions) -> Result<Vec<u32>, TokenizerError> {
        let text = text.as_ref();
        self.check_length(text.len())?;
        let mut ids = Vec::new();
        // Rarely more than a token per two bytes; more is reserved when needed.
        reserve(&mut ids, text.len() / 2 + 2, "the text's ids")?;
        if options.add_special && self.add_bos {
            ids.extend(self.bos);
        }
        let fragments =
            self.cutter.cut(text, options.parse_special, |_, text| self.special(text, options.parse_special));
        let mut after_special = true;
        for fragment in fragments {
            match fragment {
                Fragment::Token(id) => {
                    ids.push(id);
                    after_special = true;
                }
                Fragment::Text(range) => self.encode_text(&text[range], &mut after_special, &mut ids)?,
            }
        }
        if options.add_special && self.add_eos {
            ids.extend(self.eos);
        }
        Ok(ids)
    }

    fn check_length(&self, bytes: usize) -> Result<(), TokenizerError> {
        match bytes > MAX_TEXT {
            true => Err(TokenizerError::TooLong { what: "a text", bytes }),
            false => Ok(()),
        }
    }

    /// The special token that is `text`, of all kinds or of the user-defined ones, else [`NONE`].
    fn special(&self, text: &[u8], all: bool) -> u32 {
        let wanted =
            |id: u32| self.pieces.role(id).is_some_and(|r| r == Role::UserDefined || (all && r.is_hidden()));
        self.pieces.find(text).filter(|&id| wanted(id)).unwrap_or(NONE)
    }

    /// Appends the ids of a text without special tokens.
    fn encode_text(
        &self,
        text: &[u8],
        after_special: &mut bool,
        ids: &mut Vec<u32>,
    ) -> Result<(), TokenizerError> {
        match &self.family {
            Family::Spm(spm) => spm.encode(&self.pieces, text, *after_special, ids)?,
            Family::Bpe(bpe) => bpe.encode(&self.pieces, text, ids)?,
        }
        *after_special = false;
        Ok(())
    }

    /// Appends the bytes of token `id` to `out`; they may be part of a character. Control tokens have none. Nor have
    /// ids past the vocabulary: models round the number of their logits up, and may draw one that means nothing.
    ///
    /// # Errors
    /// None today.
    pub fn decode_token(&self, id: u32, out: &mut Vec<u8>) -> Result<(), TokenizerError> {
        match self.pieces.role(id) {
            Some(role) if role.is_hidden() || role == Role::Unused => Ok(()),
            _ => self.decode_token_shown(id, out),
        }
    }

    /// As [`decode_token`](Self::decode_token), with the texts of control tokens.
    ///
    /// # Errors
    /// None today.
    pub fn decode_token_shown(&self, id: u32, out: &mut Vec<u8>) -> Result<(), TokenizerError> {
        let Some(role) = self.pieces.role(id) else { return Ok(()) };
        let Some(text) = self.pieces.texts.get(id as usize) else { return Ok(()) };
        match (role, &self.family) {
            (Role::Byte, _) if byte_of(text).is_some() => out.extend(byte_of(text)),
            (Role::Normal | Role::Byte, Family::Spm(_)) => unmark_spaces(text, out),
            (Role::Normal | Role::Byte, Family::Bpe(bpe)) => bpe.decode(text, out),
            _ => out.extend_from_slice(text),
        }
        Ok(())
    }

    /// The bytes of `ids`, one after the other: the text of a continuation. They may end within a character.
    ///
    /// # Errors
    /// None today.
    pub fn decode(&self, ids: &[u32]) -> Result<Vec<u8>, TokenizerError> {
        let mut bytes = Vec::new();
        ids.iter().try_for_each(|&id| self.decode_token(id, &mut bytes))?;
        Ok(bytes)
    }

    /// The text that [`encode`](Self::encode) would give `ids` for: as [`decode`](Self::decode), without the spaces
    /// that the space prefix put in.
    ///
    /// # Errors
    /// None today.
    pub fn decode_text(&self, ids: &[u32]) -> Result<Vec<u8>, TokenizerError> {
        let prefix = matches!(&self.family, Family::Spm(spm) if spm.add_space_prefix());
        let (mut bytes, mut after_special) = (Vec::new(), true);
        for &id in ids {
            let start = bytes.len();
            self.decode_token(id, &mut bytes)?;
            let special = self.pieces.role(id).is_some_and(|r| r == Role::UserDefined || r.is_hidden());
            if prefix && after_special && !special && bytes.get(start) == Some(&b' ') {
                bytes.remove(start);
            }
            after_special = special;
        }
        Ok(bytes)
    }

    /// How many tokens the vocabulary has.
    pub fn len(&self) -> usize {
        self.pieces.roles.len()
    }

    /// Never: a vocabulary without tokens is refused.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The token that begins a text.
    pub fn bos(&self) -> Option<u32> {
        self.bos
    }

    /// The token that ends a text.
    pub fn eos(&self) -> Option<u32> {
        self.eos
    }

    /// Whether [`encode`](Self::encode) with `add_special` begins with BOS.
    pub fn adds_bos(&self) -> bool {
        self.add_bos
    }

    /// Whether `id` ends a generation: EOS, end of turn, end of message.
    pub fn is_end(&self, id: u32) -> bool {
        self.ends.binary_search(&id).is_ok()
    }

    /// The tokens that end a generation, ascending.
    pub fn ends(&self) -> &[u32] {
        &self.ends
    }

    /// Whether `id` is a control token, whose text is not shown.
    pub fn is_control(&self, id: u32) -> bool {
        self.pieces.role(id).is_some_and(Role::is_hidden)
    }

    /// The text of `id` as the file has it.
    pub fn token_text(&self, id: u32) -> Option<&[u8]> {
        self.pieces.role(id)?;
        self.pieces.texts.get(id as usize)
    }

    /// The token whose text in the file is `text`.
    pub fn find(&self, text: impl AsRef<[u8]>) -> Option<u32> {
        self.pieces.find(text.as_ref()).filter(|&id| self.pieces.role(id).is_some())
    }

    /// What the user should know about this vocabulary, in sentences. Usually nothing.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }
}

/// Checks that lists and ids fit each other.
fn check(vocabulary: &Vocabulary) -> Result<(), TokenizerError> {
    let tokens = vocabulary.tokens.len();
    if !["llama", "gpt2", "gemma4"].contains(&vocabulary.model.as_str()) {
        let model = shown(&vocabulary.model);
        return Err(TokenizerError::UnknownModel { model, known: "llama, gpt2, gemma4".to_owned() });
    }
    if tokens == 0 {
        return Err(TokenizerError::Empty);
    }
    let lists = [
        ("tokenizer.ggml.scores", vocabulary.scores.as_ref().map(Vec::len)),
        ("tokenizer.ggml.token_type", vocabulary.types.as_ref().map(Vec::len)),
    ];
    for (key, found) in lists {
        if let Some(found) = found.filter(|&found| found < tokens) {
            return Err(TokenizerError::Length { key, found, tokens });
        }
    }
    let ids = [
        ("tokenizer.ggml.bos_token_id", vocabulary.bos),
        ("tokenizer.ggml.eos_token_id", vocabulary.eos),
        ("tokenizer.ggml.eot_token_id", vocabulary.eot),
        ("tokenizer.ggml.eom_token_id", vocabulary.eom),
        ("tokenizer.ggml.unknown_token_id", vocabulary.unk),
    ];
    for (key, id) in ids {
        if let Some(id) = id.filter(|&id| id as usize >= tokens) {
            return Err(TokenizerError::SpecialId { key, id, tokens });
        }
    }
    Ok(())
}

/// The byte of a token `<0xXX>`.
fn byte_of(text: &[u8]) -> Option<u8> {
    let digits = text.strip_prefix(b"<0x")?.strip_suffix(b">")?;
    u8::from_str_radix(std::str::from_utf8(digits).ok().filter(|d| d.len() == 2)?, 16).ok()
}

/// Appends `text` with SPM's marks turned back into spaces.
fn unmark_spaces(text: &[u8], out: &mut Vec<u8>) {
    let mut rest = text;
    while let Some((&byte, tail)) = rest.split_first() {
        match rest.strip_prefix(SPACE_MARK.as_bytes()) {
            Some(tail) => {
                out.push(b' ');
                rest = tail;
            }
            None => {
                out.push(byte);
                rest = tail;
            }
        }
    }
}

#[cfg(test)]
pub(in crate::model) mod tests;
