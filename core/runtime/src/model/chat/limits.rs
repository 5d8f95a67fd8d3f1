//! How large and how nested a template may be, and the stack that this takes.
//!
//! The template engine bounds how deep brackets and blocks nest, but not how long a chain of operators, filters or
//! `elif` is, and its parser, its compiler and its destructors recurse once per link. So the links are counted before
//! it sees the source. The count follows the engine's lexer exactly where a tag ends: reading an end where there is
//! none would start the count anew.

use super::ChatError;

/// The longest source, in bytes. Templates of released models have up to 17 KB.
const MAX_SOURCE: usize = 256 << 10;

/// Most operators, brackets and words of operators in one tag. Templates of released models have up to 100.
const MAX_LINKS: usize = 1000;

/// Most `elif` in one template. Templates of released models have up to 20.
const MAX_ELIF: usize = 1000;

/// Words that nest expressions.
const WORDS: [&str; 7] = ["not", "and", "or", "if", "else", "in", "is"];

/// Stack for parsing, and for values as deep as the smallest budget allows.
const STACK: usize = 64 << 20;

/// Stack for a step: a step makes a value at most one level deeper, and printing a level takes less than this.
const STACK_PER_STEP: usize = if cfg!(debug_assertions) { 2048 } else { 512 };

/// What rendering a conversation may use; a step or 64 bytes cost 1. Templates of released models take up to some
/// hundreds for a message and read its text a few times. Some look through all messages for each, at ten a look.
pub(super) fn fuel(messages: usize, bytes: usize) -> u64 {
    let looks = messages.saturating_mul(messages).saturating_mul(16);
    let steps = messages.saturating_mul(2000).saturating_add(looks).saturating_add(bytes / 2);
    steps.saturating_add(50_000).min(4_000_000) as u64
}

/// Does `work` on a thread whose stack is large enough for templates within the limits and a budget of `fuel`. All
/// that may be deep must be freed there, so `work` gives back only flat things.
pub(super) fn on_large_stack<T: Send>(
    fuel: u64,
    work: impl FnOnce() -> Result<T, ChatError> + Send,
) -> Result<T, ChatError> {
    let stack = usize::try_from(fuel).unwrap_or(usize::MAX).saturating_mul(STACK_PER_STEP).max(STACK);
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().name("chat template".into()).stack_size(stack);
        let thread = thread
            .spawn_scoped(scope, work)
            .map_err(|error| ChatError::NoThread { reason: error.to_string() })?;
        thread.join().unwrap_or_else(|_| {
            Err(ChatError::Failed { line: 0, reason: "the template engine stopped unexpectedly".into() })
        })
    })
}

/// Refuses a source that could nest too deeply.
pub(super) fn check(source: &str) -> Result<(), ChatError> {
    let too_complex = |what, limit| Err(ChatError::TooComplex { what, limit });
    if source.len() > MAX_SOURCE {
        return too_complex("bytes", MAX_SOURCE);
    }
    let mut elif = 0;
    // Brackets that are open; the engine's lexer carries them from tag to tag.
    let mut open = 0_i64;
    let mut rest = source.as_bytes();
    while let Some(at) = rest.windows(2).position(|pair| matches!(pair, b"{{" | b"{%" | b"{#")) {
        let kind = rest[at + 1];
        rest = &rest[at + 2..];
        if kind == b'#' {
            rest = after(rest, b"#}");
            continue;
        }
        if let Some(raw) = raw_tag(rest, b"raw", kind) {
            rest = after_raw(raw);
            continue;
        }
        // The sign after the opening belongs to it.
        rest = rest.strip_prefix(b"-").or(rest.strip_prefix(b"+")).unwrap_or(rest);
        let end: &[u8] = if kind == b'%' { b"%}" } else { b"}}" };
        let mut links = 0;
        while let Some((&byte, tail)) = rest.split_first() {
            let unsigned = if matches!(byte, b'-' | b'+') { tail } else { rest };
            if open == 0 && unsigned.starts_with(end) {
                rest = &unsigned[2..];
                break;
            }
            let len = match byte {
                b'"' | b'\'' => string_len(rest),
                b'_' | b'0'..=b'9' | b'a'..=b'z' | b'A'..=b'Z' | 0x80.. => {
                    let name = |b: &&u8| matches!(b, b'_' | b'0'..=b'9' | b'a'..=b'z' | b'A'..=b'Z' | 0x80..);
                    let len = rest.iter().take_while(name).count();
                    links += usize::from(WORDS.iter().any(|word| word.as_bytes() == &rest[..len]));
                    elif += usize::from(&rest[..len] == b"elif");
                    len
                }
                _ => {
                    match byte {
                        b'(' | b'[' | b'{' => open += 1,
                        b')' | b']' | b'}' => open -= 1,
                        _ => {}
                    }
                    links += usize::from(!byte.is_ascii_whitespace() && !matches!(byte, b',' | b':'));
                    1
                }
            };
            rest = rest.get(len..).unwrap_or_default();
            if links > MAX_LINKS {
                return too_complex("operators in one tag", MAX_LINKS);
            }
            if elif > MAX_ELIF {
                return too_complex("elif", MAX_ELIF);
            }
        }
    }
    Ok(())
}

/// What follows the first `end`.
fn after<'a>(text: &'a [u8], end: &[u8]) -> &'a [u8] {
    let at = text.windows(end.len()).position(|window| window == end);
    at.map_or(&[], |at| &text[at + end.len()..])
}

/// What follows the tag `name`, if `text`, which follows the opening `{%`, is that tag.
fn raw_tag<'a>(text: &'a [u8], name: &[u8], kind: u8) -> Option<&'a [u8]> {
    let text = text.strip_prefix(b"-").or(text.strip_prefix(b"+")).unwrap_or(text).trim_ascii_start();
    let text = text.strip_prefix(name)?.trim_ascii_start();
    let text = text.strip_prefix(b"-").or(text.strip_prefix(b"+")).unwrap_or(text);
    text.strip_prefix(b"%}").filter(|_| kind == b'%')
}

/// What follows the end of a raw block.
fn after_raw(text: &[u8]) -> &[u8] {
    let mut rest = text;
    while !rest.is_empty() {
        rest = after(rest, b"{%");
        if let Some(end) = raw_tag(rest, b"endraw", b'%') {
            return end;
        }
    }
    rest
}

/// The length of the string that begins here, with its quotes.
fn string_len(text: &[u8]) -> usize {
    let (mut at, mut escaped) = (1, false);
    while let Some(&byte) = text.get(at) {
        at += 1;
        if !escaped && byte == text[0] {
            break;
        }
        escaped = !escaped && byte == b'\\';
    }
    at
}
