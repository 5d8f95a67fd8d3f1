//! `tokenizer.json` and `tokenizer_config.json` to the keys `tokenizer.ggml.*`.
//!
//! Two kinds are known. One writes bytes as letters and splits text by a pattern (`gpt2`); the pattern must be one that
//! has a name in GGUF. The other marks spaces and falls back to bytes (`llama`); its merges become scores, in whose order
//! the same pieces are joined.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::Value;

use super::super::ConvertError;
use super::config::Config;
use super::files::json;
use super::shown_value;
use crate::gguf::{Array, Pairs, Strings};

/// The most bytes of `tokenizer.json`.
const MAX_BYTES: u64 = 48 << 20;
/// The most tokens.
const MAX_TOKENS: u64 = 1 << 21;

/// Kinds of tokens, as GGUF numbers them.
const NORMAL: i32 = 1;
const UNKNOWN: i32 = 2;
const CONTROL: i32 = 3;
const USER: i32 = 4;
const UNUSED: i32 = 5;
const BYTE: i32 = 6;

/// Patterns that split text into words, with the names that GGUF has for them.
const PATTERNS: [(&str, &str); 4] = [
    (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        "llama-bpe",
    ),
    (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        "qwen2",
    ),
    (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        "tekken",
    ),
    (r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+", "gpt-2"),
];

/// Reads the tokenizer of a folder; a folder without one gives a model that runs on token ids.
pub(super) fn read(folder: &Path, pairs: &mut Pairs, config: &Config) -> Result<(), ConvertError> {
    let path = folder.join("tokenizer.json");
    if !path.is_file() {
        if folder.join("tokenizer.model").is_file() {
            let reason = "the vocabulary is in tokenizer.model alone; save it as tokenizer.json with the transformers package";
            return Err(ConvertError::Source { file: folder.into(), reason: reason.into() });
        }
        return Ok(());
    }
    let refused = |reason: String| ConvertError::Source { file: path.clone(), reason };
    let document = json(&path, MAX_BYTES)?;
    let model = document.get("model").filter(|model| model.is_object());
    let model = model.ok_or_else(|| refused("it has no model".into()))?;
    if model.get("type").and_then(Value::as_str).is_some_and(|kind| kind != "BPE") {
        let reason = format!("its model is {}; BPE is converted", shown_value(model.get("type")));
        return Err(refused(reason));
    }
    let vocabulary = model.get("vocab").and_then(Value::as_object);
    let vocabulary = vocabulary.ok_or_else(|| refused("its model has no vocab".into()))?;
    let merges = merges(model).ok_or_else(|| refused("its merges are no pairs of pieces".into()))?;
    let by_bytes = model.get("byte_fallback").and_then(Value::as_bool) == Some(true);

    let mut tokens: BTreeMap<u64, (&str, i32)> = BTreeMap::new();
    for (text, id) in vocabulary {
        let id = id
            .as_u64()
            .filter(|id| *id < MAX_TOKENS)
            .ok_or_else(|| refused("an id of its vocab is wrong".into()))?;
        let kind = if by_bytes && is_byte(text) { BYTE } else { NORMAL };
        tokens.insert(id, (text, kind));
    }
    let unknown = model.get("unk_token").and_then(Value::as_str);
    for token in document.get("added_tokens").and_then(Value::as_array).into_iter().flatten() {
        let (id, text) =
            (token.get("id").and_then(Value::as_u64), token.get("content").and_then(Value::as_str));
        let (Some(id), Some(text)) = (id.filter(|id| *id < MAX_TOKENS), text) else {
            return Err(refused("one of its added_tokens has no id or no content".into()));
        };
        let special = token.get("special").and_then(Value::as_bool) == Some(true);
        let kind = match special {
            true if by_bytes && Some(text) == unknown => UNKNOWN,
            true => CONTROL,
            false => USER,
        };
        tokens.insert(id, (text, kind));
    }
    let count = tokens.keys().next_back().map_or(0, |last| last + 1);
    let known =
        pairs.get("general.architecture").and_then(|a| a.text()).map(str::to_owned).unwrap_or_default();
    let rows = pairs.get(&format!("{known}.vocab_size")).and_then(|v| v.unsigned()).unwrap_or(count);
    if count == 0 || count > rows {
        return Err(refused(format!("it has {count} tokens, and config.json says that there are {rows}")));
    }
    // Rows of the embeddings that no token has are given one each, so that ids and rows agree.
    let texts: Vec<String> = (0..rows.min(MAX_TOKENS))
        .map(|id| tokens.get(&id).map_or_else(|| format!("[PAD{id}]"), |(text, _)| (*text).to_owned()))
        .collect();
    let kinds: Vec<i32> =
        (0..texts.len() as u64).map(|id| tokens.get(&id).map_or(UNUSED, |(_, kind)| *kind)).collect();
    let strings = |texts: &mut dyn Iterator<Item = &str>| -> Result<Array, ConvertError> {
        let strings = Strings::of(texts.map(str::as_bytes));
        strings.map(Array::Str).ok_or_else(|| refused("its texts are larger than a header may be".into()))
    };
    pairs.set("tokenizer.ggml.model", if by_bytes { "llama" } else { "gpt2" });
    if by_bytes {
        let scores = scores(&texts, &merges);
        pairs.set("tokenizer.ggml.scores", scores);
        pairs.set("tokenizer.ggml.add_space_prefix", prepends(&document));
    } else {
        let name = pattern(&document).ok_or_else(|| {
            let found = shown_value(document.get("pre_tokenizer"));
            refused(format!("it splits text in a way that has no name in GGUF: {found}"))
        })?;
        pairs.set("tokenizer.ggml.pre", name);
        let joined: Vec<String> = merges.iter().map(|(a, b)| format!("{a} {b}")).collect();
        let merges = strings(&mut joined.iter().map(String::as_str))?;
        pairs.set("tokenizer.ggml.merges", crate::gguf::Value::Array(merges));
    }
    let all = strings(&mut texts.iter().map(String::as_str))?;
    pairs.set("tokenizer.ggml.tokens", crate::gguf::Value::Array(all));
    pairs.set("tokenizer.ggml.token_type", kinds);
    special(folder, pairs, config, &texts, &document, unknown)
}

/// The merges, as pairs or as two pieces with a space between.
fn merges(model: &Value) -> Option<Vec<(&str, &str)>> {
    fn pair(merge: &Value) -> Option<(&str, &str)> {
        match merge {
            Value::String(text) => text.split_once(' '),
            Value::Array(two) => match &two[..] {
                [a, b] => Some((a.as_str()?, b.as_str()?)),
                _ => None,
            },
            _ => None,
        }
    }
    match model.get("merges") {
        None | Some(Value::Null) => Some(Vec::new()),
        Some(merges) => merges.as_array()?.iter().map(pair).collect(),
    }
}

/// A score for each token, so that pieces are joined in the order of the merges.
fn scores(texts: &[String], merges: &[(&str, &str)]) -> Vec<f32> {
    let mut ranks: BTreeMap<String, usize> = BTreeMap::new();
    for (rank, (a, b)) in merges.iter().enumerate() {
        ranks.entry(format!("{a}{b}")).or_insert(rank);
    }
    texts.iter().map(|text| ranks.get(text).map_or(0.0, |rank| -(*rank as f32))).collect()
}

/// Whether a token stands for one byte: `<0x0A>`.
fn is_byte(text: &str) -> bool {
    let hex = text.strip_prefix("<0x").and_then(|rest| rest.strip_suffix('>'));
    hex.is_some_and(|hex| hex.len() == 2 && u8::from_str_radix(hex, 16).is_ok())
}

/// The steps of a pre-tokenizer or a normaliser.
fn steps<'a>(document: &'a Value, part: &str, inner: &str) -> Vec<&'a Value> {
    match document.get(part) {
        None | Some(Value::Null) => Vec::new(),
        Some(step) => match step.get(inner).and_then(Value::as_array) {
            Some(steps) => steps.iter().collect(),
            None => vec![step],
        },
    }
}

/// Whether text begins with a space that the user did not write.
fn prepends(document: &Value) -> bool {
    let kind = |step: &Value, name: &str| step.get("type").and_then(Value::as_str) == Some(name);
    let normaliser = steps(document, "normalizer", "normalizers").iter().any(|step| kind(step, "Prepend"));
    let splitter = steps(document, "pre_tokenizer", "pretokenizers").iter().any(|step| {
        kind(step, "Metaspace") && step.get("prepend_scheme").and_then(Value::as_str) != Some("never")
    });
    normaliser || splitter
}

/// GGUF's name of how text is split into words.
fn pattern(document: &Value) -> Option<&'static str> {
    let steps = steps(document, "pre_tokenizer", "pretokenizers");
    let kind = |step: &Value| step.get("type").and_then(Value::as_str).unwrap_or_default().to_owned();
    let kinds: Vec<String> = steps.iter().map(|step| kind(step)).collect();
    let uses_own = |step: &Value| step.get("use_regex").and_then(Value::as_bool) != Some(false);
    match (&kinds.iter().map(String::as_str).collect::<Vec<_>>()[..], &steps[..]) {
        (["ByteLevel"], [bytes]) if uses_own(bytes) => Some("gpt-2"),
        (["Digits", "ByteLevel"], [digits, bytes]) if uses_own(bytes) => {
            let each = digits.get("individual_digits").and_then(Value::as_bool) == Some(true);
            each.then_some("smollm")
        }
        (["Split", "ByteLevel"], [split, bytes]) if !uses_own(bytes) => {
            let found = split.get("pattern")?.get("Regex")?.as_str()?;
            PATTERNS.iter().find(|(pattern, _)| *pattern == found).map(|(_, name)| *name)
        }
        _ => None,
    }
}

/// The special tokens, and the template for messages.
fn special(
    folder: &Path,
    pairs: &mut Pairs,
    config: &Config,
    texts: &[String],
    document: &Value,
    unknown: Option<&str>,
) -> Result<(), ConvertError> {
    let path = folder.join("tokenizer_config.json");
    let settings = if path.is_file() { json(&path, 16 << 20)? } else { Value::Null };
    let id_of = |text: &str| texts.iter().position(|t| t == text).map(|id| id as u64);
    let named = |key: &str| {
        let token = settings.get(key)?;
        id_of(token.as_str().or_else(|| token.get("content")?.as_str())?)
    };
    for (key, id) in [
        ("bos", named("bos_token").or(config.bos)),
        ("eos", named("eos_token").or(config.eos)),
        ("unknown", named("unk_token").or(unknown.and_then(id_of))),
        ("padding", named("pad_token")),
    ] {
        if let Some(id) = id.filter(|id| *id < texts.len() as u64) {
            pairs.set(&format!("tokenizer.ggml.{key}_token_id"), id as u32);
        }
    }
    let setting = |key: &str| settings.get(key).and_then(Value::as_bool);
    let template = steps(document, "post_processor", "processors");
    let begins = template.iter().filter_map(|step| step.get("single")?.as_array()?.first());
    let adds_bos = begins.clone().any(|first| first.get("SpecialToken").is_some());
    pairs.set("tokenizer.ggml.add_bos_token", setting("add_bos_token").unwrap_or(adds_bos));
    pairs.set("tokenizer.ggml.add_eos_token", setting("add_eos_token").unwrap_or(false));
    let template = match settings.get("chat_template") {
        Some(Value::Array(named)) => {
            let is_default = |entry: &&Value| entry.get("name").and_then(Value::as_str) == Some("default");
            named.iter().find(is_default).and_then(|entry| entry.get("template"))
        }
        other => other,
    };
    if let Some(template) = template.and_then(Value::as_str) {
        pairs.set("tokenizer.chat_template", template);
    }
    Ok(())
}
