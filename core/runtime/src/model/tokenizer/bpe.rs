//! BPE: split a text into words, then join the bytes (or characters) of each word by a list of merges.
//!
//! Merges are kept as pairs of numbers. A text that a merge makes and that is no token gets a number of its own, so
//! joining never compares texts. In byte-level vocabularies each byte is spelled as a printable character; only the
//! table of 256 pieces knows that.

use std::borrow::Cow;
use std::collections::HashMap;

use super::index::NONE;
use super::merge::Merger;
use super::split::Splitter;
use super::{Pieces, SPACE_MARK, TokenizerError, Vocabulary, unmark_spaces};

/// From two neighbouring pieces to the rank of their merge and the piece they make.
type Merges = HashMap<(u32, u32), (u32, u32)>;

pub(super) struct Bpe {
    splitter: Splitter,
    merges: Merges,
    units: Units,
}

/// What the smallest symbols of a word are.
enum Units {
    /// Bytes, spelled as characters. Holds the piece of each byte.
    Bytes(Box<[u32; 256]>),
    /// Characters, with spaces marked as in SPM. Holds the token for each byte of what has no piece.
    Characters(Box<[u32; 256]>),
}

impl Bpe {
    /// Reads the merges; texts that only occur in them are added to `pieces`.
    pub fn new(
        vocabulary: &Vocabulary,
        pieces: &mut Pieces,
        notes: &mut Vec<String>,
    ) -> Result<Self, TokenizerError> {
        let characters = vocabulary.model == "gemma4";
        let splitter = match vocabulary.pre.as_deref() {
            _ if characters => Splitter::lines(),
            Some(pre) => Splitter::named(pre)?,
            None => {
                notes.push(
                    "tokenizer.ggml.pre is missing: text is split by the rules named 'default', which may differ \
                     from those the model was trained with; convert the model again"
                        .to_owned(),
                );
                Splitter::named("default")?
            }
        };
        let merges = read_merges(vocabulary, pieces)?;
        let units = if characters {
            Units::Characters(Box::new(std::array::from_fn(|byte| {
                pieces.byte_token(byte as u8).unwrap_or(NONE)
            })))
        } else {
            let mut spelling = [0; 4];
            Units::Bytes(Box::new(std::array::from_fn(|byte| {
                let text = spell(byte as u8).encode_utf8(&mut spelling);
                pieces.find(text.as_bytes()).filter(|&id| pieces.may_come_from_text(id)).unwrap_or(NONE)
            })))
        };
        Ok(Self { splitter, merges, units })
    }

    /// Whether a text begins with BOS when the file does not say.
    pub fn add_bos(&self) -> bool {
        self.splitter.add_bos
    }

    /// Appends the ids of `text`, which holds no special tokens.
    pub fn encode(&self, pieces: &Pieces, text: &[u8], ids: &mut Vec<u32>) -> Result<(), TokenizerError> {
        let mut text = readable(text)?;
        if matches!(self.units, Units::Characters(_)) {
            text = Cow::Owned(text.replace(' ', SPACE_MARK));
        }
        let mut merger = Merger::default();
        let mut spelled = Vec::new();
        self.splitter.split(&text, &mut |word| {
            if let Some(id) = self.whole_word(pieces, word, &mut spelled) {
                ids.push(id);
                return Ok(());
            }
            merger.begin(word.len())?;
            match &self.units {
                Units::Bytes(table) => {
                    word.bytes().enumerate().for_each(|(at, byte)| merger.push(at, 1, table[byte as usize]));
                }
                Units::Characters(_) => {
                    for (at, character) in word.char_indices() {
                        let len = character.len_utf8();
                        let found = pieces.find(&word.as_bytes()[at..at + len]);
                        let found = found.filter(|&id| pieces.may_come_from_text(id));
                        merger.push(at, len, found.unwrap_or(NONE));
                    }
                }
            }
            merger.run(|left, right| self.merges.get(&(left.piece, right.piece)).copied());
            let table = match &self.units {
                Units::Bytes(table) | Units::Characters(table) => table,
            };
            for symbol in merger.symbols() {
                let id = symbol.piece;
                if pieces.role(id).is_some() && pieces.may_come_from_text(id) {
                    ids.push(id);
                    continue;
                }
                let range = symbol.start as usize..(symbol.start + symbol.len) as usize;
                let bytes = word.as_bytes()[range].iter().map(|&byte| table[byte as usize]);
                ids.extend(bytes.filter(|&id| pieces.role(id).is_some()));
            }
            Ok(())
        })
    }

    /// The token that is this word, for vocabularies that look before they merge.
    fn whole_word(&self, pieces: &Pieces, word: &str, spelled: &mut Vec<u8>) -> Option<u32> {
        let text = match self.units {
            Units::Bytes(_) if self.splitter.whole_words => {
                spelled.clear();
                let mut buffer = [0; 4];
                word.bytes().for_each(|byte| {
                    spelled.extend_from_slice(spell(byte).encode_utf8(&mut buffer).as_bytes())
                });
                spelled.as_slice()
            }
            Units::Characters(_) if word.starts_with('\n') => word.as_bytes(),
            _ => return None,
        };
        pieces.find(text).filter(|&id| pieces.role(id).is_some() && pieces.may_come_from_text(id))
    }

    /// Appends the bytes that the text of a normal token spells.
    pub fn decode(&self, text: &[u8], out: &mut Vec<u8>) {
        match self.units {
            Units::Characters(_) => unmark_spaces(text, out),
            Units::Bytes(_) => {
                for character in String::from_utf8_lossy(text).chars() {
                    match unspell(character) {
                        Some(byte) => out.push(byte),
                        None => out.extend_from_slice(character.encode_utf8(&mut [0; 4]).as_bytes()),
                    }
                }
            }
        }
    }
}

fn read_merges(vocabulary: &Vocabulary, pieces: &mut Pieces) -> Result<Merges, TokenizerError> {
    let list = &vocabulary.merges;
    if list.is_empty() {
        let why = "a BPE vocabulary joins by merges";
        return Err(TokenizerError::Missing { key: "tokenizer.ggml.merges", why });
    }
    let mut merges = Merges::new();
    merges.try_reserve(list.len()).map_err(|_| TokenizerError::OutOfMemory {
        what: "the merges",
        bytes: list.len().saturating_mul(size_of::<[u32; 4]>()),
    })?;
    let number = |pieces: &mut Pieces, text: &[u8]| {
        if let Some(id) = pieces.find(text) {
            return Ok(id);
        }
        let id = pieces.texts.len() as u32;
        pieces.texts.push(text)?;
        pieces.index.insert(&pieces.texts, id)
    };
    let (mut joined, mut made) = (Vec::new(), 0);
    for (rank, merge) in list.iter().enumerate() {
        // The first byte belongs to the left side, whatever it is.
        let space = merge.iter().skip(1).position(|&byte| byte == b' ').map(|at| at + 1);
        let (left, right) = space
            .map(|at| (&merge[..at], &merge[at + 1..]))
            .filter(|(_, right)| !right.is_empty())
            .ok_or(TokenizerError::Merge { index: rank })?;
        joined.clear();
        joined.extend_from_slice(left);
        joined.extend_from_slice(right);
        let pair = (number(pieces, left)?, number(pieces, right)?);
        // Vocabularies mostly list what merges make in the order of the merges, which saves looking it up.
        let next = made + 1;
        made = match pieces.unique && pieces.texts.get(next as usize) == Some(&joined) {
            true => next,
            false => number(pieces, &joined)?,
        };
        merges.entry(pair).or_insert((rank as u32, made));
    }
    Ok(merges)
}

/// The text with U+FFFD for each invalid byte.
fn readable(bytes: &[u8]) -> Result<Cow<'_, str>, TokenizerError> {
    let mut rest = bytes;
    let mut text = String::new();
    loop {
        match std::str::from_utf8(rest) {
            Ok(valid) if text.is_empty() => return Ok(Cow::Borrowed(valid)),
            Ok(valid) => {
                text.push_str(valid);
                return Ok(Cow::Owned(text));
            }
            Err(error) => {
                if text.is_empty() {
                    let room = bytes.len().saturating_mul(3);
                    let failed = |_| TokenizerError::OutOfMemory { what: "the text", bytes: room };
                    text.try_reserve(room).map_err(failed)?;
                }
                let (valid, invalid) = rest.split_at(error.valid_up_to());
                text.push_str(std::str::from_utf8(valid).unwrap_or_default());
                text.push(char::REPLACEMENT_CHARACTER);
                rest = &invalid[1..];
            }
        }
    }
}

/// The character that spells a byte: itself where it is printable Latin-1, else one from U+0100 on.
fn spell(byte: u8) -> char {
    let code = u32::from(byte);
    let code = match byte {
        0x00..=0x20 => 0x100 + code,
        0x7F..=0xA0 => 0x100 + code - 0x7F + 0x21,
        0xAD => 0x143,
        _ => code,
    };
    char::from_u32(code).unwrap_or(char::REPLACEMENT_CHARACTER)
}

/// The byte that a character spells.
fn unspell(character: char) -> Option<u8> {
    let code = u32::from(character);
    let byte = match code {
        0x100..=0x120 => code - 0x100,
        0x121..=0x142 => code - 0x121 + 0x7F,
        0x143 => 0xAD,
        _ => code,
    };
    u8::try_from(byte).ok().filter(|&byte| spell(byte) == character)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spelling_is_one_to_one() {
        let mut seen = std::collections::HashSet::new();
        for byte in 0..=255 {
            assert!(seen.insert(spell(byte)));
            assert_eq!(unspell(spell(byte)), Some(byte));
        }
        assert_eq!((spell(b' '), spell(b'\n'), spell(b'A'), spell(0xFF)), ('Ġ', 'Ċ', 'A', 'ÿ'));
        assert_eq!((unspell('\u{144}'), unspell(' ')), (None, None));
    }

    #[test]
    fn each_invalid_byte_becomes_one_replacement() {
        assert_eq!(readable("häm".as_bytes()).unwrap(), "häm");
        assert_eq!(readable(b"a\xE2\x82b\xFF").unwrap(), "a\u{FFFD}\u{FFFD}b\u{FFFD}");
        assert_eq!(readable(b"\xF0\x9F").unwrap(), "\u{FFFD}\u{FFFD}");
    }
}
