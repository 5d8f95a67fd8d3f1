//! The vocabulary as a model file holds it, in plain fields.
//!
//! The tokenizer takes this and not a file, so that tests and other formats can make one by hand. Hundreds of
//! thousands of tokens and merges come with a model; a [`TextList`] keeps them in one allocation each instead of one
//! per text.

use super::error::{TokenizerError, reserve};

/// The most bytes that the texts of one list may have in all.
const LIMIT: usize = 1 << 30;

/// Many short byte strings, one after the other in one buffer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TextList {
    bytes: Vec<u8>,
    ends: Vec<u32>,
}

impl TextList {
    /// An empty list.
    pub fn new() -> Self {
        Self::default()
    }

    /// Collects `texts` in order.
    ///
    /// # Errors
    /// `TooLong` over 1 GiB in all, `OutOfMemory`.
    pub fn collect<T: AsRef<[u8]>>(texts: impl IntoIterator<Item = T>) -> Result<Self, TokenizerError> {
        let mut list = Self::new();
        for text in texts {
            list.push(text.as_ref())?;
        }
        Ok(list)
    }

    /// Adds one text at the end.
    ///
    /// # Errors
    /// `TooLong` over 1 GiB in all, `OutOfMemory`.
    pub fn push(&mut self, text: &[u8]) -> Result<(), TokenizerError> {
        let end = self.bytes.len().saturating_add(text.len());
        if end > LIMIT {
            return Err(TokenizerError::TooLong { what: "a vocabulary", bytes: end });
        }
        reserve(&mut self.bytes, text.len(), "the vocabulary")?;
        reserve(&mut self.ends, 1, "the vocabulary")?;
        self.bytes.extend_from_slice(text);
        self.ends.push(end as u32);
        Ok(())
    }

    /// The text at `index`, from 0.
    pub fn get(&self, index: usize) -> Option<&[u8]> {
        let end = *self.ends.get(index)? as usize;
        let start = if index == 0 { 0 } else { self.ends[index - 1] as usize };
        self.bytes.get(start..end)
    }

    /// How many texts there are.
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// The texts in order.
    pub fn iter(&self) -> impl Iterator<Item = &[u8]> {
        (0..self.len()).filter_map(|index| self.get(index))
    }
}

/// A vocabulary: the keys `tokenizer.ggml.*` of a GGUF file, under the same names.
#[derive(Clone, Debug, Default)]
pub struct Vocabulary {
    /// `tokenizer.ggml.model`: `llama` (SPM), `gpt2` (byte-level BPE) or `gemma4` (BPE over characters).
    pub model: String,
    /// `tokenizer.ggml.pre`: which rules split a text before BPE merges. SPM ignores it.
    pub pre: Option<String>,
    /// `general.name`. Only one thing depends on it: in a Phi-3 model whitespace after a special token is dropped.
    pub name: Option<String>,
    /// `tokenizer.ggml.tokens`: the text of each token; the position is the id.
    pub tokens: TextList,
    /// `tokenizer.ggml.scores`: one per token; SPM merges the highest first.
    pub scores: Option<Vec<f32>>,
    /// `tokenizer.ggml.token_type`: 1 normal, 2 unknown, 3 control, 4 user-defined, 5 unused, 6 byte. Without it all
    /// tokens are normal.
    pub types: Option<Vec<i32>>,
    /// `tokenizer.ggml.merges`: `left right`, the first is merged first.
    pub merges: TextList,
    /// `tokenizer.ggml.bos_token_id`.
    pub bos: Option<u32>,
    /// `tokenizer.ggml.eos_token_id`.
    pub eos: Option<u32>,
    /// `tokenizer.ggml.eot_token_id`.
    pub eot: Option<u32>,
    /// `tokenizer.ggml.eom_token_id`.
    pub eom: Option<u32>,
    /// `tokenizer.ggml.unknown_token_id`.
    pub unk: Option<u32>,
    /// `tokenizer.ggml.add_bos_token`. Without it: yes for SPM and for rules that say so (Llama 3), else no.
    pub add_bos: Option<bool>,
    /// `tokenizer.ggml.add_eos_token`. Without it: no.
    pub add_eos: Option<bool>,
    /// `tokenizer.ggml.add_space_prefix`. Without it: yes for SPM. BPE ignores it.
    pub add_space_prefix: Option<bool>,
}
