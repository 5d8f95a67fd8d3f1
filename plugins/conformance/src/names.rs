//! Choosing cases by name: patterns with `*`, filters, and lists of cases that are known to fail.

use crate::report::{GROUPS, Report, Status};

/// Whether a text is what a pattern says, in which `*` stands for any text.
pub fn matches(pattern: &str, text: &str) -> bool {
    let mut parts = pattern.split('*');
    let first = parts.next().unwrap_or_default();
    let Some(mut rest) = text.strip_prefix(first) else { return false };
    let Some(last) = parts.next_back() else { return rest.is_empty() };
    for part in parts {
        match rest.find(part) {
            Some(at) => rest = &rest[at + part.len()..],
            None => return false,
        }
    }
    rest.ends_with(last)
}

/// Which cases run: all, those of a group, or those whose id is what a pattern says.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Filter(Option<String>);

impl Filter {
    /// All cases.
    pub fn all() -> Filter {
        Filter(None)
    }

    /// The cases of a group (`matmul`), or those of a pattern (`*/group4/*`).
    ///
    /// # Errors
    /// A sentence with the groups, for a word that is none.
    pub fn new(text: &str) -> Result<Filter, String> {
        match text {
            text if GROUPS.contains(&text) => Ok(Filter(Some(format!("{text}/*")))),
            text if text.contains(['*', '/']) => Ok(Filter(Some(text.into()))),
            text => Err(format!(
                "there is no group {text}: choose among {}, or a pattern of case names such as matmul/*/group4/*",
                GROUPS.join(" ")
            )),
        }
    }

    /// What [`Filter::new`] makes the same filter of.
    pub fn text(&self) -> &str {
        self.0.as_deref().unwrap_or("*")
    }

    /// Whether the case of this id runs.
    pub fn takes(&self, id: &str) -> bool {
        self.0.as_deref().is_none_or(|pattern| matches(pattern, id))
    }
}

/// Cases that are known to fail: `ID  # reason`, one a line; an id may be a pattern.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Expectations(Vec<(String, String)>);

impl Expectations {
    /// Reads a list. Empty lines and lines that begin with `#` count for nothing.
    ///
    /// # Errors
    /// A sentence with the line that has no reason.
    pub fn parse(text: &str) -> Result<Expectations, String> {
        let mut list = Vec::new();
        for (index, line) in text.lines().map(str::trim).enumerate() {
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            let parts = line.split_once('#').map(|(id, reason)| (id.trim(), reason.trim()));
            match parts {
                Some((id, reason)) if !reason.is_empty() && !id.contains(char::is_whitespace) => {
                    list.push((id.into(), reason.into()));
                }
                _ => {
                    return Err(format!(
                        "line {}, \"{line}\", is not a case and a reason: write ID  # reason",
                        index + 1
                    ));
                }
            }
        }
        Ok(Expectations(list))
    }

    /// Why a case is expected to fail, if it is.
    pub fn reason(&self, id: &str) -> Option<&str> {
        self.0.iter().find(|(pattern, _)| matches(pattern, id)).map(|(_, reason)| reason.as_str())
    }

    /// Compares a report with the list: of the cases in it, what failed becomes an expected failure, and what passed a
    /// failure. Cases that the unit does not do stay what they are.
    ///
    /// # Errors
    /// A sentence with the first line that names no case of the unit.
    pub fn apply(&self, report: &mut Report) -> Result<(), String> {
        let names_none = |pattern: &str| !report.known.iter().any(|id| matches(pattern, id));
        if let Some((pattern, _)) = self.0.iter().find(|(pattern, _)| names_none(pattern))
            && !report.known.is_empty()
        {
            return Err(format!("{pattern} names no case: take the line out, or correct it"));
        }
        for case in &mut report.cases {
            let Some(reason) = self.reason(&case.id) else { continue };
            match &case.status {
                Status::Failed(failure) => case.status = Status::Expected(failure.clone()),
                Status::Passed => {
                    case.status = Status::Failed(format!(
                        "it passed, but is listed as failing ({reason}): take it off the list"
                    ));
                }
                Status::Expected(_) | Status::Unsupported(_) => {}
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::CaseReport;

    #[test]
    fn a_star_is_any_text() {
        for (pattern, text) in [
            ("a/b", "a/b"),
            ("*", ""),
            ("a/*", "a/b/c"),
            ("*/c", "a/b/c"),
            ("a/*/c", "a/b/b/c"),
            ("*b*c*", "abbc"),
            ("a**c", "ac"),
            ("*aba", "ababa"),
        ] {
            assert!(matches(pattern, text), "{pattern} {text}");
        }
        for (pattern, text) in
            [("a", "ab"), ("a/*/c", "a/c"), ("*b*c*b", "abc"), ("aba*aba", "aba"), ("", "a")]
        {
            assert!(!matches(pattern, text), "{pattern} {text}");
        }
    }

    #[test]
    fn a_filter_is_a_group_or_a_pattern() {
        assert!(Filter::new("matmul").unwrap().takes("matmul/x") && Filter::all().takes("x"));
        assert!(!Filter::new("matmul").unwrap().takes("matmuls/x"));
        assert!(Filter::new("*/f16/*").unwrap().takes("matmul/f16/1"));
        assert!(Filter::new("matmuls").unwrap_err().contains("info buffer weight matmul"));
    }

    #[test]
    fn what_is_listed_must_fail() {
        let case = |id: &str, status| CaseReport { id: id.into(), status, error: None, ns: None };
        let report = || Report {
            known: ["a/1", "a/2", "b/1", "b/2"].map(String::from).to_vec(),
            cases: vec![
                case("a/1", Status::Failed("wrong".into())),
                case("a/2", Status::Passed),
                case("b/1", Status::Unsupported("no".into())),
            ],
        };
        let list = "# known\n\na/1  # ticket 3\nb/*# never\n";
        let mut one = report();
        Expectations::parse(list).unwrap().apply(&mut one).unwrap();
        assert_eq!((one.passed(), one.failed(), one.expected(), one.unsupported()), (1, 0, 1, 1));
        let mut two = report();
        Expectations::parse("a/*  # both").unwrap().apply(&mut two).unwrap();
        assert_eq!((two.failed(), two.expected()), (1, 1));
        assert!(
            two.summary().contains("a/2: it passed, but is listed as failing (both)"),
            "{}",
            two.summary()
        );
        let unknown = Expectations::parse("c/1 # x").unwrap().apply(&mut report()).unwrap_err();
        assert!(unknown.contains("c/1 names no case"), "{unknown}");
        for line in ["a/1", "a/1 #", "a/1 b # x"] {
            assert!(Expectations::parse(line).unwrap_err().contains("line 1"), "{line}");
        }
    }
}
