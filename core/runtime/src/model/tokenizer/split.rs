//! How a text is cut into words before BPE joins letters: the rules behind `tokenizer.ggml.pre`.
//!
//! A rule set is one or more expressions, applied one after the other: each cuts the pieces of the one before into
//! its matches and what lies between. The published expressions need a look-ahead, `\s+(?!\S)`, and so a
//! backtracking engine, which a prompt of a hundred thousand spaces can bring to its limit. Here that part is done
//! by hand and the rest runs on an engine that is linear in the text: a run of whitespace that something follows
//! gives its last character back to the next word.

use regex::Regex;

use super::TokenizerError;
use crate::shown::shown;

/// What happens to whitespace at the end of a match, where text follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Tail {
    /// Nothing.
    Keep,
    /// The last whitespace character of a run goes to the next word.
    Give,
    /// The same, but not a line end: the expression has a branch for runs that end in one.
    GiveButLineEnds,
}

/// One expression of a rule set.
type Step = (&'static str, Tail);

/// A rule set and the names it goes by.
struct Rules {
    names: &'static [&'static str],
    steps: &'static [Step],
    /// A word that is a token as a whole is not built from merges.
    whole_words: bool,
    /// Whether a text begins with BOS when the file does not say.
    add_bos: bool,
}

const DIGIT: Step = (r"\p{N}", Tail::Keep);
const GPT2: Step = (r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+", Tail::Give);
const LLAMA3: Step = (
    r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+",
    Tail::GiveButLineEnds,
);
const QWEN2: Step = (
    r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+",
    Tail::GiveButLineEnds,
);
const QWEN35: Step = (
    r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+",
    Tail::GiveButLineEnds,
);
const TEKKEN: Step = (
    r"[^\r\n\p{L}\p{N}]?[\p{L}--a-z]*[\p{L}--A-Z]+|[^\r\n\p{L}\p{N}]?[\p{L}--a-z]+[\p{L}--A-Z]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+",
    Tail::GiveButLineEnds,
);
const GPT4O: Step = (
    r"[^\r\n\p{L}\p{N}]?[\p{L}--a-z]*[\p{L}--A-Z]+(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])?|[^\r\n\p{L}\p{N}]?[\p{L}--a-z]+[\p{L}--A-Z]*(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+",
    Tail::GiveButLineEnds,
);
/// The letters with case of an older Unicode version, as DeepSeek's list has them.
const DEEPSEEK_LETTERS: Step = (
    r"\s?[\p{Lu}\p{Ll}\p{Lt}--\x{560}-\x{588}\x{10C7}\x{10CD}-\x{10FF}\x{1C80}-\x{1C8A}\x{2C7C}-\x{2C7D}\x{2D00}-\x{2D2D}\x{A790}-\x{AB68}\x{10570}-\x{105BC}\x{10D50}-\x{10D85}\x{16E40}-\x{16EFF}\x{1D400}-\x{1D7CB}\x{1DF00}-\x{1DF2A}]+",
    Tail::Keep,
);

const LINE_ENDS: Step = (r"[\r\n]", Tail::Keep);
const CJK: Step = (r"[\x{800}-\x{9FA5}\x{AC00}-\x{D7FF}]+", Tail::Keep);

const ALL: [Rules; 13] = [
    Rules {
        names: &["llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"],
        steps: &[LLAMA3],
        whole_words: true,
        add_bos: true,
    },
    Rules {
        names: &["dbrx", "smaug-bpe", "chatglm-bpe"],
        steps: &[LLAMA3],
        whole_words: false,
        add_bos: false,
    },
    Rules { names: &["glm4"], steps: &[LLAMA3], whole_words: true, add_bos: false },
    Rules {
        names: &["smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"],
        steps: &[DIGIT, GPT2],
        whole_words: false,
        add_bos: false,
    },
    Rules {
        names: &[
            "gpt-2",
            "phi-2",
            "mpt",
            "olmo",
            "jais",
            "trillion",
            "granite-docling",
            "gigachat",
            "mellum",
            "exaone4",
        ],
        steps: &[GPT2],
        whole_words: false,
        add_bos: false,
    },
    Rules {
        names: &["qwen2", "deepseek-r1-qwen", "stablelm2", "hunyuan", "megrez", "grok-2"],
        steps: &[QWEN2],
        whole_words: false,
        add_bos: false,
    },
    Rules { names: &["qwen35"], steps: &[QWEN35], whole_words: false, add_bos: false },
    Rules { names: &["tekken"], steps: &[TEKKEN], whole_words: true, add_bos: true },
    Rules { names: &["gpt-4o", "llama4"], steps: &[GPT4O], whole_words: false, add_bos: false },
    Rules {
        names: &["deepseek-llm"],
        steps: &[
            LINE_ENDS,
            DEEPSEEK_LETTERS,
            (r"\s?[!-/:-~\x{FF01}-\x{FF0F}\x{FF1A}-\x{FF5E}\x{2018}-\x{201F}\x{3000}-\x{3002}]+", Tail::Keep),
            (r"\s+$", Tail::Keep),
            CJK,
            (r"\p{N}+", Tail::Keep),
        ],
        whole_words: false,
        add_bos: false,
    },
    Rules {
        names: &["deepseek-coder"],
        steps: &[LINE_ENDS, (r"\s?\p{L}+", Tail::Keep), (r"\s?\p{P}+", Tail::Keep), CJK, DIGIT],
        whole_words: false,
        add_bos: false,
    },
    Rules {
        names: &["falcon"],
        steps: &[(r"[\p{P}$+<=>^~|`]+", Tail::Keep), GPT2, (r"[0-9][0-9][0-9]", Tail::Keep)],
        whole_words: false,
        add_bos: false,
    },
    Rules {
        names: &["default"],
        steps: &[
            (r"[\p{P}$+<=>^~|]+", Tail::Keep),
            GPT2,
            (r"\p{N}+", Tail::Keep),
            (r"[0-9][0-9][0-9]", Tail::Keep),
        ],
        whole_words: false,
        add_bos: false,
    },
];

/// SPM-like vocabularies are merged over whole lines.
const LINES: Step = (r"[^\n]+|\n+", Tail::Keep);

/// Cuts texts into words.
pub(super) struct Splitter {
    steps: Vec<(Regex, Tail)>,
    /// See [`Rules`].
    pub whole_words: bool,
    /// See [`Rules`].
    pub add_bos: bool,
}

impl Splitter {
    /// The rules that `pre` names.
    pub fn named(pre: &str) -> Result<Self, TokenizerError> {
        let rules = ALL.iter().find(|rules| rules.names.contains(&pre)).ok_or_else(|| {
            let known: Vec<_> = ALL.iter().flat_map(|rules| rules.names).copied().collect();
            TokenizerError::UnknownPre { pre: shown(pre), known: known.join(", ") }
        })?;
        Ok(Self::compile(rules.steps, rules.whole_words, rules.add_bos))
    }

    /// Words are lines.
    pub fn lines() -> Self {
        Self::compile(&[LINES], false, true)
    }

    fn compile(steps: &[Step], whole_words: bool, add_bos: bool) -> Self {
        let compile = |&(expression, tail): &Step| {
            let regex =
                Regex::new(expression).unwrap_or_else(|error| unreachable!("built-in rules: {error}"));
            (regex, tail)
        };
        Self { steps: steps.iter().map(compile).collect(), whole_words, add_bos }
    }

    /// Calls `word` for each word of `text`, in order; together they are the text.
    pub fn split<E>(&self, text: &str, word: &mut impl FnMut(&str) -> Result<(), E>) -> Result<(), E> {
        split(&self.steps, text, word)
    }
}

/// Recursion is as deep as there are steps, six at most.
fn split<E>(
    steps: &[(Regex, Tail)],
    text: &str,
    word: &mut impl FnMut(&str) -> Result<(), E>,
) -> Result<(), E> {
    let Some(((regex, tail), rest)) = steps.split_first() else { return word(text) };
    let mut at = 0;
    while let Some(found) = regex.find_at(text, at) {
        if found.start() > at {
            split(rest, &text[at..found.start()], word)?;
        }
        let end = found.end() - given_back(found.as_str(), *tail, found.end() == text.len());
        split(rest, &text[found.start()..end], word)?;
        at = end;
    }
    if at < text.len() {
        split(rest, &text[at..], word)?;
    }
    Ok(())
}

/// Bytes at the end of a match that belong to the next word. A match that ends in whitespace is all whitespace, or
/// ends in the line ends after punctuation.
fn given_back(found: &str, tail: Tail, at_end: bool) -> usize {
    let Some(last) = found.chars().next_back().filter(|c| c.is_whitespace()) else { return 0 };
    let kept = match tail {
        Tail::Keep => true,
        Tail::Give => false,
        Tail::GiveButLineEnds => matches!(last, '\r' | '\n'),
    };
    if at_end || kept || found.len() == last.len_utf8() { 0 } else { last.len_utf8() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn words(pre: &str, text: &str) -> Vec<String> {
        words_by(&Splitter::named(pre).unwrap(), text)
    }

    fn words_by(splitter: &Splitter, text: &str) -> Vec<String> {
        let mut words = Vec::new();
        let mut collect = |word: &str| {
            words.push(word.to_owned());
            Ok::<(), ()>(())
        };
        splitter.split(text, &mut collect).unwrap();
        words
    }

    #[test]
    fn whitespace_gives_its_last_character_to_the_next_word() {
        assert_eq!(words("gpt-2", "a   b"), ["a", "  ", " b"]);
        assert_eq!(words("gpt-2", "a \n\n b  "), ["a", " \n\n", " b", "  "]);
        assert_eq!(words("gpt-2", "a\n\nb"), ["a", "\n", "\n", "b"]);
        assert_eq!(words("llama-bpe", "a\n\nb"), ["a", "\n\n", "b"]);
        assert_eq!(words("llama-bpe", "a \n  b"), ["a", " \n", " ", " b"]);
        assert_eq!(words("llama-bpe", "a.\n\n  "), ["a", ".\n\n", "  "]);
        assert_eq!(words("llama-bpe", "\t\tx"), ["\t", "\tx"]);
    }

    #[test]
    fn numbers_and_contractions() {
        assert_eq!(words("llama-bpe", "12345 I'Ll"), ["123", "45", " I", "'Ll"]);
        assert_eq!(words("smollm", "a 12's"), ["a", " ", "1", "2", "'s"]);
        assert_eq!(words("qwen2", "x12"), ["x", "1", "2"]);
        assert_eq!(words("tekken", "HelloWorld ÄbC"), ["Hello", "World", " Äb", "C"]);
        assert_eq!(words("gpt-4o", "don't 1234"), ["don't", " ", "123", "4"]);
    }

    #[test]
    fn every_rule_set_compiles_and_no_name_is_twice() {
        let mut names: Vec<_> = ALL.iter().flat_map(|rules| rules.names).collect();
        for name in &names {
            Splitter::named(name).unwrap();
        }
        let all = names.len();
        names.sort();
        names.dedup();
        assert_eq!(names.len(), all);
    }

    #[test]
    fn unknown_rules_are_named_with_the_known_ones() {
        let error = Splitter::named("klingon").err().unwrap().to_string();
        assert!(
            error.contains("'klingon'") && error.contains("llama-bpe") && error.contains("smollm"),
            "{error}"
        );
    }

    #[test]
    fn words_are_the_text() {
        for rules in &ALL {
            let splitter = Splitter::named(rules.names[0]).unwrap();
            proptest!(|(text in "[ \\n\\ta-zA-Z0-9'.ß今\u{3000}]{0,40}")| {
                prop_assert_eq!(words_by(&splitter, &text).concat(), text);
            });
        }
    }
}
