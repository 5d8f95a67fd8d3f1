//! The options of the plugin.

use neuropil_plugin_sdk::{Error, Options};

const KEYS: [&str; 5] = ["library", "device", "tokens", "exact", "threads"];

/// What the user asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Settings {
    /// The library of the runtime, or its folder.
    pub library: Option<String>,
    /// The device to use.
    pub device: Option<String>,
    /// The token counts of graphs; empty for graphs of any count, `None` for what suits the device.
    pub tokens: Option<Vec<u64>>,
    /// Whether to compute as the weights say, without rounding of inputs; `None` for what suits the device.
    pub exact: Option<bool>,
    /// Threads of the CPU device; 0 for its own choice.
    pub threads: u32,
}

impl Settings {
    /// Reads options.
    pub fn new(options: &Options) -> Result<Settings, Error> {
        options.check(&KEYS)?;
        let exact = match options.get("exact") {
            None => None,
            Some("yes") => Some(true),
            Some("no") => Some(false),
            Some(other) => return Err(Error::invalid(format!("option exact={other} is neither yes nor no"))),
        };
        Ok(Settings {
            library: options.get("library").map(str::to_string),
            device: options.get("device").map(str::to_string),
            tokens: match options.get("tokens") {
                Some("any") => Some(Vec::new()),
                _ => options.ascending("tokens", 1 << 20)?,
            },
            exact,
            threads: options.number("threads", 0)?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(pairs: &[(&str, &str)]) -> Result<Settings, Error> {
        Settings::new(&pairs.iter().map(|(key, value)| (key.to_string(), value.to_string())).collect())
    }

    #[test]
    fn options_are_read_and_refused() {
        let none = settings(&[]).unwrap();
        assert_eq!((none.tokens, none.exact, none.threads), (None, None, 0));
        let some = settings(&[("tokens", "1+32+128"), ("exact", "no"), ("threads", "2")]).unwrap();
        assert_eq!((some.tokens, some.exact, some.threads), (Some(vec![1, 32, 128]), Some(false), 2));
        assert_eq!(settings(&[("tokens", "any")]).unwrap().tokens, Some(Vec::new()));
        for (key, value) in [
            ("tokens", ""),
            ("tokens", "0"),
            ("tokens", "8+8"),
            ("tokens", "8+1"),
            ("tokens", "1,x"),
            ("tokens", "99999999999"),
            ("exact", "true"),
            ("threads", "-1"),
            ("folder", "x"),
        ] {
            assert!(settings(&[(key, value)]).is_err(), "{key}={value}");
        }
    }
}
