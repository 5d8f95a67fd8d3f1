use std::time::{Duration, Instant};

use super::*;

const PLAIN: EncodeOptions = EncodeOptions { add_special: false, parse_special: false };
const PARSED: EncodeOptions = EncodeOptions { add_special: false, parse_special: true };
const WITH_BOS: EncodeOptions = EncodeOptions { add_special: true, parse_special: false };

fn list<T: AsRef<[u8]>>(texts: impl IntoIterator<Item = T>) -> TextList {
    TextList::collect(texts).unwrap()
}

/// An SPM vocabulary: `<unk> <s> </s>`, the bytes, then these pieces, the earlier the better.
fn spm_vocabulary(pieces: &[&str], bytes: bool) -> Vocabulary {
    let mut tokens: Vec<String> = ["<unk>", "<s>", "</s>"].map(String::from).into();
    let mut types = vec![2, 3, 3];
    if bytes {
        tokens.extend((0..256).map(|byte| format!("<0x{byte:02X}>")));
        types.resize(259, 6);
    }
    tokens.extend(pieces.iter().map(|piece| piece.to_string()));
    types.resize(tokens.len(), 1);
    let scores = (0..tokens.len()).map(|id| -(id as f32)).collect();
    Vocabulary {
        model: "llama".into(),
        tokens: list(&tokens),
        scores: Some(scores),
        types: Some(types),
        ..Default::default()
    }
}

const PIECES: [&str; 12] = ["▁word", "▁wo", "rd", "▁w", "or", "▁", "a", "b", "w", "o", "r", "d"];

pub(in crate::model) fn spm(change: impl FnOnce(&mut Vocabulary)) -> Tokenizer {
    let mut vocabulary = spm_vocabulary(&PIECES, true);
    change(&mut vocabulary);
    Tokenizer::new(vocabulary).unwrap()
}

/// The printable character for a byte, found as the published vocabularies order them.
fn spelled(byte: u8) -> String {
    let printable = |b: &u8| matches!(b, 0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF);
    let code = match printable(&byte) {
        true => u32::from(byte),
        false => 256 + (0..byte).filter(|b| !printable(b)).count() as u32,
    };
    char::from_u32(code).unwrap().to_string()
}

/// A byte-level BPE vocabulary: 256 bytes, what the merges make, `<|im_start|> <|im_end|>` and `<user>`.
pub(in crate::model) fn bpe_vocabulary(merges: &[&str]) -> Vocabulary {
    let mut tokens: Vec<String> = (0..=255).map(spelled).collect();
    tokens.extend(merges.iter().map(|merge| merge.replace(' ', "")));
    let mut types = vec![1; tokens.len()];
    tokens.extend(["<|im_start|>", "<|im_end|>", "<user>"].map(String::from));
    types.extend([3, 1, 4]);
    let eos = tokens.iter().position(|token| token == "<|im_end|>").map(|id| id as u32);
    Vocabulary {
        model: "gpt2".into(),
        pre: Some("gpt-2".into()),
        tokens: list(&tokens),
        types: Some(types),
        merges: list(merges),
        eos,
        ..Default::default()
    }
}

fn texts(tokenizer: &Tokenizer, ids: &[u32]) -> Vec<String> {
    let text = |&id: &u32| String::from_utf8_lossy(tokenizer.token_text(id).unwrap()).into_owned();
    ids.iter().map(text).collect()
}

fn encoded(tokenizer: &Tokenizer, text: &str, options: EncodeOptions) -> Vec<String> {
    texts(tokenizer, &tokenizer.encode(text, options).unwrap())
}

#[test]
fn spm_joins_by_score_and_falls_back_to_bytes() {
    let tokenizer = spm(|_| ());
    assert_eq!(encoded(&tokenizer, "word", WITH_BOS), ["<s>", "▁word"]);
    assert_eq!(encoded(&tokenizer, "aword or", PLAIN), ["▁", "a", "w", "o", "rd", "▁", "or"]);
    assert_eq!(encoded(&tokenizer, "aé", PLAIN), ["▁", "a", "<0xC3>", "<0xA9>"]);
    assert_eq!(encoded(&tokenizer, "", WITH_BOS), ["<s>"]);
}

#[test]
fn control_tokens_in_a_text_are_text() {
    // Here even the merges lead to "<s>": "s>" is a token, and "<" + "s>" is the control token's text.
    let mut vocabulary = spm_vocabulary(&["s>", "<", "s", ">"], true);
    vocabulary.add_space_prefix = Some(false);
    let tokenizer = Tokenizer::new(vocabulary).unwrap();
    assert_eq!(encoded(&tokenizer, "<s>", PLAIN), ["<", "s>"]);
    assert_eq!(encoded(&tokenizer, "<s>", PARSED), ["<s>"]);

    let tokenizer = Tokenizer::new(bpe_vocabulary(&["i m", "< |"])).unwrap();
    let ids = tokenizer.encode("<|im_start|>x<|im_end|>", PLAIN).unwrap();
    assert!(ids.iter().all(|&id| !tokenizer.is_control(id)), "{ids:?}");
    assert_eq!(tokenizer.decode(&ids).unwrap(), b"<|im_start|>x<|im_end|>");
    let parsed = encoded(&tokenizer, "<|im_start|>x<|im_end|>", PARSED);
    assert_eq!(parsed, ["<|im_start|>", "x", "<|im_end|>"]);
}

#[test]
fn end_tokens_are_control_tokens_whatever_the_file_says() {
    let tokenizer = Tokenizer::new(bpe_vocabulary(&["a b"])).unwrap();
    let end = tokenizer.find("<|im_end|>").unwrap();
    assert!(tokenizer.is_end(end) && tokenizer.is_control(end));
    assert!(!tokenizer.is_end(tokenizer.find("<|im_start|>").unwrap()));
    assert_eq!(tokenizer.ends(), [end]);
}

#[test]
fn user_defined_tokens_are_always_matched_and_shown() {
    let tokenizer = Tokenizer::new(bpe_vocabulary(&["a b"])).unwrap();
    for options in [PLAIN, PARSED] {
        assert_eq!(encoded(&tokenizer, "ab<user>ab", options), ["ab", "<user>", "ab"]);
    }
    assert_eq!(tokenizer.decode(&[tokenizer.find("<user>").unwrap()]).unwrap(), b"<user>");
}

#[test]
fn the_longest_special_token_wins() {
    let mut vocabulary = spm_vocabulary(&["<a>", "<a><b>", "<b>c", "x"], true);
    vocabulary.add_space_prefix = Some(false);
    vocabulary.types.as_mut().unwrap()[259..262].fill(3);
    let tokenizer = Tokenizer::new(vocabulary).unwrap();
    assert_eq!(encoded(&tokenizer, "<a><b>c<a>x", PARSED), ["<a><b>", "<0x63>", "<a>", "x"]);
}

#[test]
fn the_space_prefix_follows_the_legacy_rule() {
    let tokenizer = spm(|_| ());
    assert_eq!(encoded(&tokenizer, "<s> word", PARSED), ["<s>", "▁", "▁word"]);
    assert_eq!(encoded(&tokenizer, "<s>word", PARSED), ["<s>", "▁word"]);
    assert_eq!(encoded(&tokenizer, "a<s> b", PARSED), ["▁", "a", "<s>", "▁", "▁", "b"]);
    let tokenizer = spm(|vocabulary| vocabulary.add_space_prefix = Some(false));
    assert_eq!(encoded(&tokenizer, "<s> word", PARSED), ["<s>", "▁word"]);
    assert_eq!(encoded(&tokenizer, "<s>word", PARSED), ["<s>", "w", "o", "rd"]);
    assert_eq!(encoded(&tokenizer, "word", WITH_BOS), ["<s>", "w", "o", "rd"]);
    assert_eq!(encoded(&tokenizer, "a<s> b", PARSED), ["a", "<s>", "▁", "b"]);
}

#[test]
fn texts_come_back() {
    for prefix in [true, false] {
        let tokenizer = spm(|vocabulary| vocabulary.add_space_prefix = Some(prefix));
        for text in ["word", " word", "  a\nb", "é🦙", "", " "] {
            let ids = tokenizer.encode(text, WITH_BOS).unwrap();
            assert_eq!(tokenizer.decode_text(&ids).unwrap(), text.as_bytes(), "{text:?}");
        }
    }
}

#[test]
fn a_chat_prompt_begins_with_one_bos() {
    let tokenizer = spm(|_| ());
    for text in ["word", "<s>word", "<s><s>word"] {
        assert_eq!(
            texts(&tokenizer, &tokenizer.encode_guarded(text, '\u{F0000}').unwrap()),
            ["<s>", "▁word"]
        );
    }
    let tokenizer = spm(|vocabulary| vocabulary.add_bos = Some(false));
    assert_eq!(texts(&tokenizer, &tokenizer.encode_guarded("word", '\u{F0000}').unwrap()), ["▁word"]);
}

#[test]
fn a_newline_without_a_byte_token_is_its_raw_byte_else_unknown_else_an_error() {
    let with = |pieces: &[&str], unk: bool| {
        let mut vocabulary = spm_vocabulary(pieces, false);
        if !unk {
            vocabulary.tokens =
                list(std::iter::once("?").chain(["<s>", "</s>"]).chain(pieces.iter().copied()));
            vocabulary.types.as_mut().unwrap()[0] = 1;
        }
        Tokenizer::new(vocabulary).unwrap()
    };
    assert_eq!(encoded(&with(&["a", "b", "▁", "\n"], true), "a\nb", PLAIN), ["▁", "a", "\n", "b"]);
    assert_eq!(encoded(&with(&["a", "b", "▁"], true), "a\nb", PLAIN), ["▁", "a", "<unk>", "b"]);
    let error = with(&["a", "b", "▁"], false).encode("a\nb", PLAIN);
    assert_eq!(error, Err(TokenizerError::NoToken { byte: b'\n' }));
}

#[test]
fn a_vocabulary_of_letters_only_has_nothing_for_a_digit() {
    let letters: Vec<String> = ('a'..='z').chain('A'..='D').map(String::from).collect();
    let vocabulary = Vocabulary {
        model: "llama".into(),
        tokens: list(&letters),
        scores: Some(vec![0.0; 30]),
        add_space_prefix: Some(false),
        ..Default::default()
    };
    let tokenizer = Tokenizer::new(vocabulary).unwrap();
    assert_eq!(tokenizer.encode("abc", WITH_BOS), Ok(vec![0, 1, 2]));
    assert_eq!(tokenizer.encode("a1", PLAIN), Err(TokenizerError::NoToken { byte: b'1' }));
    // BPE drops what it has no token for.
    let vocabulary = Vocabulary {
        model: "gpt2".into(),
        pre: Some("gpt-2".into()),
        tokens: list(&letters),
        merges: list(["a b"]),
        ..Default::default()
    };
    assert_eq!(Tokenizer::new(vocabulary).unwrap().encode("ab1c", PLAIN), Ok(vec![0, 1, 2]));
}

#[test]
fn an_empty_text_is_bos_or_nothing() {
    assert_eq!(spm(|_| ()).encode("", WITH_BOS), Ok(vec![1]));
    assert_eq!(spm(|v| v.add_bos = Some(false)).encode("", WITH_BOS), Ok(vec![]));
    assert_eq!(Tokenizer::new(bpe_vocabulary(&["a b"])).unwrap().encode("", WITH_BOS), Ok(vec![]));
}

#[test]
fn invalid_utf8_is_read_and_never_fails() {
    let bytes = b"a\xE2\x82\xFFb\xF0";
    let ids = spm(|_| ()).encode(bytes, PLAIN).unwrap();
    assert_eq!(spm(|_| ()).decode_text(&ids).unwrap(), bytes);
    let tokenizer = Tokenizer::new(bpe_vocabulary(&["a b"])).unwrap();
    let ids = tokenizer.encode(bytes, PLAIN).unwrap();
    assert_eq!(tokenizer.decode(&ids).unwrap(), "a\u{FFFD}\u{FFFD}\u{FFFD}b\u{FFFD}".as_bytes());
}

#[test]
fn bpe_merges_by_rank_and_may_pass_through_texts_that_are_no_tokens() {
    let mut vocabulary = bpe_vocabulary(&["l o", "lo w", "Ġ low"]);
    // "lo" becomes another token's text, so the way to "low" leads through a text without a token.
    let texts: Vec<_> =
        vocabulary.tokens.iter().map(|t| if t == b"lo" { b"?!".to_vec() } else { t.to_vec() }).collect();
    vocabulary.tokens = list(&texts);
    let tokenizer = Tokenizer::new(vocabulary).unwrap();
    assert_eq!(encoded(&tokenizer, "low low lo", PLAIN), ["low", "Ġlow", "Ġ", "l", "o"]);
}

#[test]
fn vocabularies_that_do_not_fit_are_refused() {
    let error = |change: &dyn Fn(&mut Vocabulary)| {
        let mut vocabulary = bpe_vocabulary(&["a b"]);
        change(&mut vocabulary);
        Tokenizer::new(vocabulary).err().unwrap().to_string()
    };
    assert!(error(&|v| v.model = "t5".into()).contains("'t5'"));
    assert!(error(&|v| v.pre = Some("klingon".into())).contains("'klingon'"));
    assert!(error(&|v| v.tokens = TextList::new()).contains("tokenizer.ggml.tokens"));
    assert!(error(&|v| v.types = Some(vec![1])).contains("tokenizer.ggml.token_type has 1 entries"));
    assert!(error(&|v| v.eos = Some(99_999)).contains("tokenizer.ggml.eos_token_id is 99999"));
    assert!(error(&|v| v.merges = TextList::new()).contains("tokenizer.ggml.merges is missing"));
    assert!(error(&|v| v.merges = list(["a b", "ab"])).contains("entry 1"));
    assert!(error(&|v| v.add_bos = Some(true)).contains("tokenizer.ggml.bos_token_id is missing"));
    let mut vocabulary = spm_vocabulary(&[], true);
    vocabulary.scores = None;
    assert!(Tokenizer::new(vocabulary.clone()).err().unwrap().to_string().contains("scores is missing"));
    vocabulary.scores = Some(vec![f32::NAN; 300]);
    assert!(Tokenizer::new(vocabulary).err().unwrap().to_string().contains("entry 0"));
}

#[test]
fn a_missing_rule_name_is_said() {
    let tokenizer = Tokenizer::new(Vocabulary { pre: None, ..bpe_vocabulary(&["a b"]) }).unwrap();
    assert!(tokenizer.notes()[0].contains("tokenizer.ggml.pre is missing"));
}

#[test]
fn ids_past_the_vocabulary_have_no_bytes() {
    let tokenizer = spm(|_| ());
    let (id, word) = (tokenizer.len() as u32, tokenizer.find("▁word").unwrap());
    assert_eq!(tokenizer.decode(&[id, word, u32::MAX]), Ok(b" word".to_vec()));
    assert_eq!(tokenizer.decode_text(&[word, id]), Ok(b"word".to_vec()));
    assert_eq!(tokenizer.token_text(id), None);
    assert!(!tokenizer.is_end(id) && !tokenizer.is_control(id));
}

#[test]
fn a_files_own_words_stay_short_in_messages() {
    let long = "k\n".repeat(100_000);
    for change in [|v: &mut Vocabulary, long| v.model = long, |v: &mut Vocabulary, long| v.pre = Some(long)] {
        let mut vocabulary = bpe_vocabulary(&["a b"]);
        change(&mut vocabulary, long.clone());
        let message = Tokenizer::new(vocabulary).err().unwrap().to_string();
        assert!(message.len() < 1500 && !message.contains('\n'), "{message}");
    }
}

#[test]
fn phi_3_drops_whitespace_after_special_tokens() {
    let tokenizer = spm(|vocabulary| vocabulary.name = Some("Phi-3 mini".into()));
    assert_eq!(encoded(&tokenizer, "</s>\n word<s> a", PARSED), ["</s>", "▁word", "<s>", "▁", "▁", "a"]);
}

/// Tokenizes on a small stack and gives the ids and the time.
fn on_a_small_stack(tokenizer: Tokenizer, text: String) -> (Vec<u32>, Duration) {
    let work = move || {
        let start = Instant::now();
        let ids = tokenizer.encode(&text, PLAIN).unwrap();
        (ids, start.elapsed())
    };
    std::thread::Builder::new().stack_size(256 << 10).spawn(work).unwrap().join().unwrap()
}

#[test]
fn long_words_take_little_time_and_stack() {
    let doubling = ["A A", "AA AA", "AAAA AAAA", "Z Z", "Z ZZ", "Ġ Ġ", "ĠĠ ĠĠ"];
    // What repeated halving gives, written down.
    let runs = |n: usize| vec![n / 8, n % 8 / 4, n % 4 / 2, n % 2];
    let (ids, time) =
        on_a_small_stack(Tokenizer::new(bpe_vocabulary(&doubling)).unwrap(), "A".repeat(43_003));
    let counts: Vec<_> =
        [258, 257, 256, 65].iter().map(|want| ids.iter().filter(|id| *id == want).count()).collect();
    assert_eq!(counts, runs(43_003));
    assert!(ids.is_sorted_by(|a, b| a >= b));
    assert!(time < Duration::from_secs(5), "{time:?}");

    let cjk: String = (0..26_000).map(|i| char::from_u32(0x4E00 + i * 7919 % 20_000).unwrap()).collect();
    for text in ["Z".repeat(131_072), " ".repeat(131_072), cjk] {
        let tokenizer = Tokenizer::new(bpe_vocabulary(&doubling)).unwrap();
        let (ids, time) = on_a_small_stack(tokenizer, text.clone());
        assert!(time < Duration::from_secs(5), "{time:?}");
        let tokenizer = Tokenizer::new(bpe_vocabulary(&doubling)).unwrap();
        assert_eq!(tokenizer.decode(&ids).unwrap(), text.as_bytes());
        let (ids, time) = on_a_small_stack(spm(|_| ()), text.clone());
        assert!(time < Duration::from_secs(5), "{time:?}");
        assert_eq!(spm(|_| ()).decode_text(&ids).unwrap(), text.as_bytes());
    }
}
