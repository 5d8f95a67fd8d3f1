//! The text that a model is calibrated on, as chunks of tokens: some to learn from, some to check with.

use crate::engine::Engine;
use crate::model::tokenizer::EncodeOptions;

use super::CalibrateError;

/// Tokens of a chunk.
pub(super) const CHUNK: usize = 512;
/// Every so many chunks one is held out.
const HELD_OUT: usize = 5;

/// Chunks of tokens, each of [`CHUNK`].
pub(super) struct Text {
    /// To learn from.
    pub learn: Vec<Vec<u32>>,
    /// To measure what was learned.
    pub check: Vec<Vec<u32>>,
}

impl Text {
    /// At most `most` chunks of a text, spread over it evenly.
    pub(super) fn new(engine: &Engine, text: &[u8], most: usize) -> Result<Text, CalibrateError> {
        let tokenizer = engine.tokenizer()?;
        let options = EncodeOptions { add_special: false, parse_special: false };
        let tokens = tokenizer.encode(text, options).map_err(crate::engine::EngineError::from)?;
        let size = CHUNK.min(engine.spec().context);
        let bos = tokenizer.bos().filter(|_| tokenizer.adds_bos());
        let there = tokens.len() / size;
        if there < 2 * HELD_OUT {
            return Err(CalibrateError::ShortText { tokens: tokens.len(), needed: 2 * HELD_OUT * size });
        }
        let count = there.min(most.max(2 * HELD_OUT));
        let mut all = Text { learn: Vec::new(), check: Vec::new() };
        for index in 0..count {
            let start = index * there / count * size;
            let mut chunk = tokens[start..start + size].to_vec();
            if let (Some(bos), Some(first)) = (bos, chunk.first_mut()) {
                *first = bos;
            }
            let to = if index % HELD_OUT == HELD_OUT - 1 { &mut all.check } else { &mut all.learn };
            to.push(chunk);
        }
        Ok(all)
    }
}
