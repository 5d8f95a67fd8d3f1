//! The vocabulary as a GGUF file has it.

use crate::gguf::{GgufError, Metadata};

use super::{TextList, TokenizerError, Vocabulary};

/// Why a file's vocabulary cannot be read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum VocabularyError {
    /// A key has the wrong type.
    #[error(transparent)]
    Gguf(#[from] GgufError),
    /// It does not fit in memory.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
}

impl Vocabulary {
    /// Reads the keys `tokenizer.ggml.*`; `None` when the file has no vocabulary.
    ///
    /// # Errors
    /// [`VocabularyError`], naming a key of the wrong type.
    pub fn from_metadata(metadata: &Metadata) -> Result<Option<Vocabulary>, VocabularyError> {
        let Some(model) = metadata.str("tokenizer.ggml.model")?.filter(|model| *model != "no_vocab") else {
            return Ok(None);
        };
        let texts = |key: &str| -> Result<TextList, VocabularyError> {
            let strings = metadata.strings(key)?;
            Ok(TextList::collect(strings.iter().flat_map(|list| list.iter()))?)
        };
        let text = |key: &str| metadata.str(key).map(|text| text.map(str::to_string));
        Ok(Some(Vocabulary {
            model: model.into(),
            pre: text("tokenizer.ggml.pre")?,
            name: text("general.name")?,
            tokens: texts("tokenizer.ggml.tokens")?,
            scores: metadata.f32s("tokenizer.ggml.scores")?.map(<[f32]>::to_vec),
            types: metadata.i32s("tokenizer.ggml.token_type")?.map(<[i32]>::to_vec),
            merges: texts("tokenizer.ggml.merges")?,
            bos: metadata.u32("tokenizer.ggml.bos_token_id")?,
            eos: metadata.u32("tokenizer.ggml.eos_token_id")?,
            eot: metadata.u32("tokenizer.ggml.eot_token_id")?,
            eom: metadata.u32("tokenizer.ggml.eom_token_id")?,
            unk: metadata.u32("tokenizer.ggml.unknown_token_id")?,
            add_bos: metadata.bool("tokenizer.ggml.add_bos_token")?,
            add_eos: metadata.bool("tokenizer.ggml.add_eos_token")?,
            add_space_prefix: metadata.bool("tokenizer.ggml.add_space_prefix")?,
        }))
    }
}
