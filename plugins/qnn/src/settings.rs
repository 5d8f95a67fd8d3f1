//! The options of the plugin.

use neuropil_plugin_sdk::{Error, Options};

use crate::product::{Numbers, Op};

const KEYS: [&str; 7] = ["library", "precision", "op", "tokens", "soc", "power", "cache"];

/// Token counts of graphs, unless the user says others. Each graph has the weight for itself, so they are few.
const TOKENS: [u64; 2] = [1, 128];

/// How fast the DSP is asked to run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Power {
    /// As the system likes.
    Default,
    /// Between the others.
    Balanced,
    /// As fast as it can, as long as the unit is open.
    Burst,
}

/// What the user asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Settings {
    /// The QNN library of a backend, or its folder.
    pub library: Option<String>,
    /// The numbers of activations; `None` for what suits the backend.
    pub precision: Option<Numbers>,
    /// The operation.
    pub op: Op,
    /// The token counts of graphs.
    pub tokens: Vec<u64>,
    /// The chip that graphs are prepared for; `None` for the one at hand.
    pub soc: Option<u32>,
    /// How fast.
    pub power: Power,
    /// The folder of compiled weights.
    pub cache: Option<String>,
}

/// The value of a key among some.
fn choice<T: Copy>(options: &Options, key: &str, values: &[(&str, T)]) -> Result<Option<T>, Error> {
    let Some(text) = options.get(key) else { return Ok(None) };
    match values.iter().find(|(name, _)| *name == text) {
        Some((_, value)) => Ok(Some(*value)),
        None => {
            let names: Vec<&str> = values.iter().map(|(name, _)| *name).collect();
            Err(Error::invalid(format!("option {key}={text} is not one of {}", names.join(", "))))
        }
    }
}

impl Settings {
    /// Reads options.
    pub fn new(options: &Options) -> Result<Settings, Error> {
        options.check(&KEYS)?;
        let precisions =
            [("f32", Numbers::F32), ("f16", Numbers::F16), ("a16", Numbers::A16), ("a8", Numbers::A8)];
        let powers = [("default", Power::Default), ("balanced", Power::Balanced), ("burst", Power::Burst)];
        let text = |key| options.get(key).map(str::to_string);
        Ok(Settings {
            library: text("library"),
            precision: choice(options, "precision", &precisions)?,
            op: choice(options, "op", &[("fc", Op::FullyConnected), ("conv", Op::Convolution)])?
                .unwrap_or(Op::FullyConnected),
            tokens: options.ascending("tokens", 1 << 16)?.unwrap_or_else(|| TOKENS.to_vec()),
            soc: options.get("soc").map(|_| options.number("soc", 0)).transpose()?,
            power: choice(options, "power", &powers)?.unwrap_or(Power::Default),
            cache: text("cache"),
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
        assert_eq!((none.tokens, none.precision, none.soc), (TOKENS.to_vec(), None, None));
        assert_eq!((none.op, none.power), (Op::FullyConnected, Power::Default));
        let some =
            settings(&[("tokens", "1+4"), ("precision", "a8"), ("op", "conv"), ("soc", "57")]).unwrap();
        assert_eq!((some.tokens, some.precision, some.soc), (vec![1, 4], Some(Numbers::A8), Some(57)));
        assert_eq!(some.op, Op::Convolution);
        assert_eq!(settings(&[("tokens", "1+4")]).unwrap().tokens, [1, 4]);
        for (key, value) in [
            ("tokens", ""),
            ("tokens", "any"),
            ("tokens", "0"),
            ("tokens", "8+8"),
            ("tokens", "99999999"),
            ("precision", "w4"),
            ("op", "matmul"),
            ("soc", "SM8650"),
            ("power", "fast"),
            ("device", "x"),
        ] {
            assert!(settings(&[(key, value)]).is_err(), "{key}={value}");
        }
    }
}
