//! A vocabulary that makes a synthetic model usable: three control tokens, all bytes, and words that nobody knows.
//!
//! Any text becomes its bytes, since no word is made of tokens that a text could merge; what a model says is words.

use crate::gguf::{Array, Pairs, Strings, Value};

/// The token that begins a text.
pub(super) const BOS: usize = 1;

/// The first word.
pub(super) const FIRST_WORD: usize = 3 + 256;

const CONSONANTS: &[u8; 20] = b"bcdfghjklmnpqrstvwxz";
const VOWELS: &[u8; 5] = b"aeiou";

/// Writes the vocabulary's keys.
pub(super) fn add(vocab: usize, pairs: &mut Pairs) {
    let specials = ["<unk>", "<s>", "</s>"].map(String::from);
    let bytes = (0..=255).map(|byte: u8| format!("<0x{byte:02X}>"));
    let words = (0..vocab - FIRST_WORD).map(word);
    let tokens: Vec<String> = specials.into_iter().chain(bytes).chain(words).collect();
    let kind = |id: usize| match id {
        0 => 2,
        1 | 2 => 3,
        id if id < FIRST_WORD => 6,
        _ => 1,
    };
    let kinds: Vec<i32> = (0..vocab).map(kind).collect();
    let scores: Vec<f32> = (0..vocab).map(|id| -(id.saturating_sub(FIRST_WORD) as f32)).collect();
    // The words of the largest shape take 2 MiB, far below what a header may have.
    if let Some(tokens) = Strings::of(tokens.iter().map(String::as_bytes)) {
        pairs.set("tokenizer.ggml.tokens", Value::Array(Array::Str(tokens)));
    }
    pairs.set("tokenizer.ggml.model", "llama");
    pairs.set("tokenizer.ggml.scores", scores);
    pairs.set("tokenizer.ggml.token_type", kinds);
    for (key, id) in [("unknown", 0), ("bos", BOS as u32), ("eos", 2)] {
        pairs.set(&format!("tokenizer.ggml.{key}_token_id"), id);
    }
    pairs.set("tokenizer.ggml.add_bos_token", true);
    pairs.set("tokenizer.ggml.add_space_prefix", false);
}

/// Word `index`: a space, and a syllable for each digit of the index.
fn word(index: usize) -> String {
    let mut syllables = Vec::new();
    let mut rest = index;
    loop {
        let digit = rest % 100;
        syllables.push([CONSONANTS[digit / 5] as char, VOWELS[digit % 5] as char]);
        rest /= 100;
        if rest == 0 {
            break;
        }
        // Words of different lengths are different words.
        rest -= 1;
    }
    std::iter::once('\u{2581}').chain(syllables.into_iter().rev().flatten()).collect()
}

/// The token after which this one is the most likely; only words are ever likely.
pub(super) fn before(token: usize, vocab: usize) -> Option<usize> {
    let words = vocab - FIRST_WORD;
    let word = token.checked_sub(FIRST_WORD)?;
    Some(FIRST_WORD + (word + words - step(words)) % words)
}

/// How far the next word is: without a common divisor with the number of words, so that the walk meets all of them.
fn step(words: usize) -> usize {
    let divides = |mut a: usize, mut b: usize| {
        while b > 0 {
            (a, b) = (b, a % b);
        }
        a
    };
    (words * 618 / 1000..words).find(|step| divides(*step, words) == 1).unwrap_or(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_distinct() {
        let words: std::collections::BTreeSet<String> = (0..152_000).map(word).collect();
        assert_eq!(words.len(), 152_000);
        assert_eq!([word(0), word(99), word(100)], ["▁ba", "▁zu", "▁baba"]);
    }

    #[test]
    fn the_walk_meets_every_word() {
        for vocab in [512, 32000, 151_936] {
            let words = vocab - FIRST_WORD;
            let mut token = FIRST_WORD;
            for _ in 0..words - 1 {
                token = before(token, vocab).unwrap();
                assert!(token != FIRST_WORD && token < vocab);
            }
            assert_eq!(before(token, vocab), Some(FIRST_WORD));
            assert_eq!(before(5, vocab), None);
        }
    }
}
