//! From the bytes of tokens to text that may be shown at once.
//!
//! A token may hold part of a character, and part of a stop text. What is handed out is never taken back: bytes wait
//! until their character is whole, and text waits while it could still become a stop text. However the bytes are cut
//! into tokens, the joined output is the same:
//!
//! - each invalid byte sequence is one U+FFFD (of a broken character, its longest valid beginning counts as one), and
//!   so is an unfinished character at the very end: the text is what `String::from_utf8_lossy` gives for all bytes;
//! - it ends before the first place where a stop text begins. If several begin at once or overlap, the earliest
//!   beginning counts; a stop text that is complete waits while an earlier one can still be completed.
//!
//! The stop texts are matched by one small automaton each (Knuth, Morris and Pratt), so a hostile stop text costs no
//! more than a plain one. Whoever needs the raw bytes has them: they are what is pushed.

/// What one push gives.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Step {
    /// Text to show now; may be empty.
    pub text: String,
    /// A stop text is complete: the output is over, later pushes give nothing.
    pub stopped: bool,
}

/// Turns the bytes of one sequence's tokens into text. See the module's rules.
#[derive(Clone, Debug)]
pub struct TextStream {
    characters: Characters,
    stops: Vec<Stop>,
    /// Text that is whole but may be part of a stop text.
    held: String,
    /// Where in `held` a complete stop text begins.
    found: Option<usize>,
    stopped: bool,
}

impl TextStream {
    /// A stream that ends at any of `stops`; empty ones are left out.
    pub fn new(stops: Vec<String>) -> Self {
        let stops = stops.into_iter().filter(|stop| !stop.is_empty()).map(Stop::new).collect();
        Self { characters: Characters::default(), stops, held: String::new(), found: None, stopped: false }
    }

    /// Takes the bytes of one token and gives the text that is certain now.
    pub fn push(&mut self, bytes: &[u8]) -> Step {
        if self.stopped {
            return Step { text: String::new(), stopped: true };
        }
        let seen = self.held.len();
        self.characters.push(bytes, &mut self.held);
        self.advance(seen)
    }

    /// Ends the stream: no more bytes will come. Gives what was held back.
    pub fn finish(&mut self) -> Step {
        if self.stopped {
            return Step { text: String::new(), stopped: true };
        }
        let seen = self.held.len();
        self.characters.finish(&mut self.held);
        let step = self.advance(seen);
        if self.stopped {
            return step;
        }
        self.stopped = true;
        let stopped = self.found.is_some();
        self.held.truncate(self.found.unwrap_or(self.held.len()));
        Step { text: step.text + &std::mem::take(&mut self.held), stopped }
    }

    /// Matches `held` from byte `seen` on and hands out what no stop text can claim.
    fn advance(&mut self, seen: usize) -> Step {
        let mut waiting = self.held.len();
        for at in seen..self.held.len() {
            waiting = at + 1;
            for stop in &mut self.stops {
                if stop.push(self.held.as_bytes()[at]) {
                    let start = at + 1 - stop.text.len();
                    self.found = Some(self.found.map_or(start, |found| found.min(start)));
                }
                waiting = waiting.min(at + 1 - stop.matched);
            }
            if self.found.is_some_and(|found| waiting >= found) {
                break;
            }
        }
        if seen == self.held.len() {
            // Nothing new: what waits still waits.
            let longest = self.stops.iter().map(|stop| stop.matched).max().unwrap_or(0);
            waiting = self.held.len() - longest.min(self.held.len());
        }
        if let Some(found) = self.found.filter(|&found| waiting >= found) {
            self.stopped = true;
            self.held.truncate(found);
            return Step { text: std::mem::take(&mut self.held), stopped: true };
        }
        let text: String = self.held.drain(..waiting).collect();
        self.found = self.found.map(|found| found - waiting);
        Step { text, stopped: false }
    }
}

/// One stop text and how much of it the text ends with.
#[derive(Clone, Debug)]
struct Stop {
    text: Vec<u8>,
    /// Per length matched: the longest shorter beginning that is also matched.
    shorter: Vec<usize>,
    matched: usize,
}

impl Stop {
    fn new(text: String) -> Self {
        let text = text.into_bytes();
        let mut shorter = vec![0; text.len() + 1];
        let mut k = 0;
        for at in 1..text.len() {
            while k > 0 && text[at] != text[k] {
                k = shorter[k];
            }
            k += usize::from(text[at] == text[k]);
            shorter[at + 1] = k;
        }
        Self { text, shorter, matched: 0 }
    }

    /// Takes the next byte; true when the stop text is complete.
    fn push(&mut self, byte: u8) -> bool {
        while self.matched > 0 && self.text[self.matched] != byte {
            self.matched = self.shorter[self.matched];
        }
        self.matched += usize::from(self.text[self.matched] == byte);
        let complete = self.matched == self.text.len();
        if complete {
            self.matched = self.shorter[self.matched];
        }
        complete
    }
}

/// Joins bytes to characters; holds at most three bytes.
#[derive(Clone, Debug, Default)]
struct Characters {
    pending: Vec<u8>,
}

impl Characters {
    fn push(&mut self, bytes: &[u8], out: &mut String) {
        self.pending.extend_from_slice(bytes);
        let mut rest = self.pending.as_slice();
        loop {
            let (valid, invalid) = match std::str::from_utf8(rest) {
                Ok(valid) => (valid, None),
                Err(error) => {
                    let (valid, tail) = rest.split_at(error.valid_up_to());
                    (std::str::from_utf8(valid).unwrap_or_default(), Some((tail, error.error_len())))
                }
            };
            out.push_str(valid);
            match invalid {
                Some((tail, Some(len))) => {
                    out.push(char::REPLACEMENT_CHARACTER);
                    rest = &tail[len..];
                }
                Some((tail, None)) => break rest = tail,
                None => break rest = &[],
            }
        }
        let kept = rest.len();
        self.pending.drain(..self.pending.len() - kept);
    }

    fn finish(&mut self, out: &mut String) {
        if !self.pending.is_empty() {
            self.pending.clear();
            out.push(char::REPLACEMENT_CHARACTER);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Pushes `chunks`; gives the steps' texts and whether a stop text was met.
    fn run(stops: &[&str], chunks: &[&[u8]]) -> (Vec<String>, bool) {
        let mut stream = TextStream::new(stops.iter().map(|s| s.to_string()).collect());
        let mut texts: Vec<_> = chunks.iter().map(|chunk| stream.push(chunk).text).collect();
        let last = stream.finish();
        texts.push(last.text);
        (texts, last.stopped)
    }

    /// The definition, on all bytes at once.
    fn whole(stops: &[&str], bytes: &[u8]) -> (String, bool) {
        let text = String::from_utf8_lossy(bytes);
        let cut = stops.iter().filter(|s| !s.is_empty()).filter_map(|s| text.find(s)).min();
        (text[..cut.unwrap_or(text.len())].to_owned(), cut.is_some())
    }

    #[test]
    fn an_emoji_in_parts_comes_out_whole() {
        for chunks in [vec![&b"a\xF0\x9F"[..], b"\xA6\x99b"], vec![b"a\xF0", b"\x9F", b"\xA6", b"\x99", b"b"]]
        {
            let (texts, _) = run(&[], &chunks);
            assert_eq!(texts.concat(), "a🦙b");
            assert!(texts.iter().all(|text| !text.contains('\u{FFFD}')));
        }
    }

    #[test]
    fn a_lone_invalid_byte_is_one_replacement_and_the_stream_goes_on() {
        assert_eq!(run(&[], &["ä".as_bytes(), b"\x85", b"ok"]).0, ["ä", "\u{FFFD}", "ok", ""]);
    }

    #[test]
    fn an_unfinished_character_at_the_end_is_one_replacement() {
        assert_eq!(run(&[], &[b"a", b"\xF0\x9F\xA6"]).0, ["a", "", "\u{FFFD}"]);
    }

    #[test]
    fn a_stop_text_across_tokens_is_never_shown() {
        assert_eq!(
            run(&["DEFGHIJ"], &[b"abc", b"DEF", b"G", b"HI", b"J", b"x"]),
            (["abc", "", "", "", "", "", ""].map(String::from).into(), true)
        );
        assert_eq!(run(&["DEFG"], &[b"DE", b"Fx"]).0, ["", "DEFx", ""]);
        assert_eq!(run(&["DEFG"], &[b"aDEF"]).0, ["a", "DEF"]);
    }

    #[test]
    fn of_several_stop_texts_the_earliest_beginning_counts() {
        for (text, want) in [("xabcd", "x"), ("xabcx", "xa"), ("xabc", "xa"), ("abc", "a")] {
            let chunks: Vec<_> = text.as_bytes().chunks(1).collect();
            let (texts, stopped) = run(&["abcd", "bc"], &chunks);
            assert_eq!((texts.concat().as_str(), stopped), (want, true), "{text}");
        }
    }

    #[test]
    fn after_the_stop_nothing_comes() {
        let mut stream = TextStream::new(vec!["!".into()]);
        assert_eq!(stream.push(b"hi!there"), Step { text: "hi".into(), stopped: true });
        assert_eq!(stream.push(b"more"), Step { text: String::new(), stopped: true });
        assert_eq!(stream.finish(), Step { text: String::new(), stopped: true });
    }

    proptest! {
        #[test]
        fn any_chunking_gives_the_same_text(
            bytes in prop::collection::vec(
                prop::sample::select(vec![b'a', b'b', 0xC3, 0xA4, 0xF0, 0x9F, 0xA6, 0x99, 0x85, 0xFF]), 0..24),
            cuts in prop::collection::vec(1usize..5, 0..24),
            stops in prop::collection::vec("[abä\u{FFFD}]{0,4}", 0..4),
        ) {
            let stops: Vec<_> = stops.iter().map(String::as_str).collect();
            let (mut chunks, mut rest) = (Vec::new(), bytes.as_slice());
            for cut in cuts {
                let (chunk, tail) = rest.split_at(cut.min(rest.len()));
                chunks.push(chunk);
                rest = tail;
            }
            chunks.push(rest);
            let (texts, stopped) = run(&stops, &chunks);
            prop_assert_eq!((texts.concat(), stopped), whole(&stops, &bytes));
        }
    }
}
