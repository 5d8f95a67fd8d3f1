//! The options of the plugin.

use neuropil_plugin_sdk::{Error, Options};

const KEYS: [&str; 9] =
    ["library", "device", "precision", "relaxed", "int8", "widen", "preference", "cache", "tokens"];

/// Token counts of graphs, unless the user says others: decoding, a short prompt, a long one in pieces.
const TOKENS: [u64; 3] = [1, 32, 128];

/// Which device to use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Wish {
    /// An accelerator, or what comes closest; never NNAPI's own reference on the CPU.
    Auto,
    Accelerator,
    Gpu,
    Cpu,
    /// The device of this name.
    Named(String),
}

/// The type of numbers in a graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Precision {
    F32,
    F16,
}

/// What the user asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Settings {
    pub library: String,
    pub device: Wish,
    /// The type of graphs; `None` for that of the weight.
    pub precision: Option<Precision>,
    /// Whether F32 graphs may be computed in F16; `None` for what suits the device.
    pub relaxed: Option<bool>,
    /// Whether 8-bit codes per row stay codes, with activations of 8 bits.
    pub int8: bool,
    /// Whether codes that NNAPI does not know are widened to floats.
    pub widen: bool,
    /// NNAPI's number of a preference.
    pub preference: i32,
    /// The folder of compiled graphs.
    pub cache: Option<String>,
    /// The token counts of graphs, ascending.
    pub tokens: Vec<u64>,
}

impl Settings {
    /// Reads options.
    pub fn new(options: &Options) -> Result<Settings, Error> {
        options.check(&KEYS)?;
        let on_off = &[("on", true), ("off", false)];
        Ok(Settings {
            library: options.get("library").unwrap_or("libneuralnetworks.so").to_string(),
            device: match options.get("device") {
                None | Some("auto") => Wish::Auto,
                Some("accelerator") => Wish::Accelerator,
                Some("gpu") => Wish::Gpu,
                Some("cpu") => Wish::Cpu,
                Some(name) => Wish::Named(name.to_string()),
            },
            precision: choose(options, "precision", &[("f32", Precision::F32), ("f16", Precision::F16)])?,
            relaxed: choose(options, "relaxed", on_off)?,
            int8: choose(options, "int8", on_off)?.unwrap_or(false),
            widen: choose(options, "widen", on_off)?.unwrap_or(false),
            preference: choose(options, "preference", &[("low_power", 0), ("fast", 1), ("sustained", 2)])?
                .unwrap_or(2),
            cache: options.get("cache").map(str::to_string),
            tokens: options.ascending("tokens", 1 << 16)?.unwrap_or_else(|| TOKENS.to_vec()),
        })
    }
}

/// The value of a key that has few.
fn choose<T: Copy>(options: &Options, key: &str, values: &[(&str, T)]) -> Result<Option<T>, Error> {
    let Some(text) = options.get(key) else { return Ok(None) };
    let found = values.iter().find(|(name, _)| *name == text);
    found.map(|(_, value)| Some(*value)).ok_or_else(|| {
        let names: Vec<&str> = values.iter().map(|(name, _)| *name).collect();
        Error::invalid(format!("option {key}={text} is none of {}", names.join(", ")))
    })
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
        assert_eq!(
            (none.library.as_str(), none.device, none.precision),
            ("libneuralnetworks.so", Wish::Auto, None)
        );
        assert_eq!((none.int8, none.widen, none.preference), (false, false, 2));
        assert_eq!((none.tokens, none.relaxed, none.cache), (vec![1, 32, 128], None, None));
        let some = settings(&[
            ("device", "google-edgetpu"),
            ("precision", "f16"),
            ("relaxed", "on"),
            ("int8", "on"),
            ("widen", "on"),
            ("preference", "low_power"),
            ("tokens", "1+8"),
        ])
        .unwrap();
        assert_eq!(
            (some.device, some.precision),
            (Wish::Named("google-edgetpu".into()), Some(Precision::F16))
        );
        assert_eq!((some.relaxed, some.int8, some.widen), (Some(true), true, true));
        assert_eq!((some.preference, some.tokens), (0, vec![1, 8]));
        for (key, value) in [
            ("tokens", ""),
            ("tokens", "any"),
            ("tokens", "0"),
            ("tokens", "8+1"),
            ("tokens", "99999999"),
            ("precision", "int8"),
            ("relaxed", "yes"),
            ("int8", "yes"),
            ("preference", "1"),
            ("exact", "yes"),
        ] {
            let error = settings(&[(key, value)]).unwrap_err();
            assert!(error.text.contains(key), "{key}={value}: {}", error.text);
        }
        let text = settings(&[("precision", "int8")]).unwrap_err().text;
        assert_eq!(text, "option precision=int8 is none of f32, f16");
    }
}
