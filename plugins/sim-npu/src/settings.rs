//! The options, read and checked.

use std::time::Duration;

use neuropil_plugin_sdk::{Error, Options, Scheme};

use crate::fault::Fault;

/// Every key.
const KEYS: [&str; 12] = [
    "units",
    "buckets",
    "schemes",
    "outliers",
    "activations",
    "clusters",
    "latency_us",
    "compile_ms",
    "memory",
    "fault",
    "fault_columns",
    "hang_ms",
];

/// Every scheme with the name that `schemes` takes.
const SCHEMES: [(&str, Scheme); 7] = [
    ("f32", Scheme::F32),
    ("f16", Scheme::F16),
    ("group8", Scheme::Group8),
    ("group4", Scheme::Group4),
    ("group4m", Scheme::Group4Min),
    ("channel8", Scheme::Channel8),
    ("channel4", Scheme::Channel4),
];

/// Units, buckets and bytes at most: more is a slip of the pen.
const MOST: u64 = 64;

/// What the options say.
#[derive(Debug)]
pub(crate) struct Settings {
    pub units: usize,
    /// Ascending; none for any count.
    pub buckets: Vec<u64>,
    pub schemes: Vec<Scheme>,
    pub outliers: bool,
    /// The greatest code of an activation: 32767 or 127.
    pub activation_limit: f32,
    pub clusters: bool,
    pub latency: Duration,
    pub compile: Duration,
    pub memory: u64,
    pub fault: Fault,
}

impl Settings {
    pub fn new(options: &Options) -> Result<Settings, Error> {
        options.check(&KEYS)?;
        let switch = |key: &str| match options.get(key) {
            None | Some("on") => Ok(true),
            Some("off") => Ok(false),
            Some(text) => Err(refuse(key, text, "on or off")),
        };
        let units = options.number("units", 1u64)?;
        if units > MOST {
            return Err(Error::invalid(format!("option units={units}: at most {MOST}")));
        }
        let buckets = match options.get("buckets") {
            Some("any") => Vec::new(),
            _ => options.ascending("buckets", 1 << 20)?.unwrap_or_else(|| vec![1, 16, 128]),
        };
        let schemes = match options.get("schemes") {
            None => Scheme::ALL.to_vec(),
            Some(text) => {
                let known = |name| SCHEMES.iter().find(|(n, _)| *n == name).map(|(_, scheme)| *scheme);
                let schemes: Vec<Scheme> = text.split('+').filter_map(known).collect();
                if schemes.len() != text.split('+').count() {
                    return Err(refuse("schemes", text, &SCHEMES.map(|(name, _)| name).join("+")));
                }
                schemes
            }
        };
        let activation_limit = match options.number("activations", 16u32)? {
            16 => 32767.0,
            8 => 127.0,
            bits => return Err(refuse("activations", &bits.to_string(), "16 or 8")),
        };
        Ok(Settings {
            units: units as usize,
            buckets,
            schemes,
            outliers: switch("outliers")?,
            activation_limit,
            clusters: switch("clusters")?,
            latency: Duration::from_micros(options.number("latency_us", 0)?),
            compile: Duration::from_millis(options.number("compile_ms", 0)?),
            memory: options.number("memory", 0)?,
            fault: Fault::new(options)?,
        })
    }
}

fn refuse(key: &str, text: &str, choice: &str) -> Error {
    Error::invalid(format!("option {key}={text} is not known: choose {choice}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(pairs: &[(&str, &str)]) -> Result<Settings, Error> {
        Settings::new(&pairs.iter().map(|(k, v)| (k.to_string(), v.to_string())).collect())
    }

    #[test]
    fn what_is_not_understood_is_refused() {
        let some = settings(&[("buckets", "2+8"), ("schemes", "f16+channel4"), ("outliers", "off")]).unwrap();
        assert_eq!((some.buckets, some.schemes), (vec![2, 8], vec![Scheme::F16, Scheme::Channel4]));
        assert!(!some.outliers && some.clusters);
        for (key, value) in [
            ("bucket", "1"),
            ("buckets", "8+2"),
            ("buckets", "0"),
            ("buckets", ""),
            ("schemes", "q4"),
            ("outliers", "yes"),
            ("activations", "4"),
            ("units", "1000"),
            ("fault", "nan"),
            ("fault", "nan@open"),
            ("fault", "nan@load_plan"),
            ("fault", "sad@matmul"),
            ("fault", "error@close"),
            ("fault", "error@matmul:0"),
        ] {
            let error = settings(&[(key, value)]).unwrap_err();
            assert!(error.text.contains(key), "{key}={value}: {error}");
        }
    }
}
