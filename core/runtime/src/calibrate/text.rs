//! The text that a model is calibrated on, as chunks of tokens: some to learn from, some to choose by,
//! some to check with.

use crate::engine::Engine;
use crate::model::tokenizer::EncodeOptions;

use super::CalibrateError;

/// Tokens of a chunk.
pub(super) const CHUNK: usize = 512;
/// Tokens that a chunk must have.
const LEAST: usize = 64;
/// Of so many chunks one is for choices and one is held out.
const HELD_OUT: usize = 5;
/// Most chunks that choices are made by: each choice runs all of them.
const TRIED: usize = 4;

/// Chunks of tokens, each of [`CHUNK`].
pub(super) struct Text {
    /// To learn from.
    pub learn: Vec<Vec<u32>>,
    /// To try choices on.
    pub tries: Vec<Vec<u32>>,
    /// To measure the result: nothing is chosen by them.
    pub check: Vec<Vec<u32>>,
}

impl Text {
    /// At most `most` chunks of a text, spread over it evenly.
    pub(super) fn new(engine: &Engine, text: &[u8], most: usize) -> Result<Text, CalibrateError> {
        let tokenizer = engine.tokenizer()?;
        let options = EncodeOptions { add_special: false, parse_special: false };
        let tokens = tokenizer.encode(text, options).map_err(crate::engine::EngineError::from)?;
        let context = engine.spec().context;
        if context < LEAST {
            return Err(CalibrateError::ShortContext { context, needed: LEAST });
        }
        let size = CHUNK.min(context);
        let bos = tokenizer.bos().filter(|_| tokenizer.adds_bos());
        let there = tokens.len() / size;
        if there < 2 * HELD_OUT {
            return Err(CalibrateError::ShortText { tokens: tokens.len(), needed: 2 * HELD_OUT * size });
        }
        let count = there.min(most.max(2 * HELD_OUT));
        let mut all = Text { learn: Vec::new(), tries: Vec::new(), check: Vec::new() };
        for index in 0..count {
            let start = index * there / count * size;
            let mut chunk = tokens[start..start + size].to_vec();
            if let (Some(bos), Some(first)) = (bos, chunk.first_mut()) {
                *first = bos;
            }
            let to = match index % HELD_OUT {
                2 => &mut all.tries,
                4 => &mut all.check,
                _ => &mut all.learn,
            };
            to.push(chunk);
        }
        // Those that choices are made by come from all over the text too.
        let (count, mut index) = (all.tries.len(), 0);
        let few = TRIED.min(count);
        all.tries.retain(|_| {
            let kept = (index * few) % count < few;
            index += 1;
            kept
        });
        Ok(all)
    }
}
