//! Names out of a file, fit for a message.
//!
//! A message never carries control characters or a megabyte of text, whatever the file says.

/// The most characters of a name that a message shows.
const MOST: usize = 60;

/// A name out of a file: escaped, and shortened to 60 characters.
pub(crate) fn shown(name: &str) -> String {
    let mut text: String = name.chars().take(MOST).flat_map(char::escape_debug).collect();
    if name.chars().nth(MOST).is_some() {
        text.push('…');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_and_unprintable_names_stay_short_and_readable() {
        assert_eq!(shown("blk.0"), "blk.0");
        assert_eq!(shown("a\u{1B}[2J\n"), "a\\u{1b}[2J\\n");
        assert_eq!(shown(&"ä".repeat(100_000)), "ä".repeat(60) + "…");
    }
}
