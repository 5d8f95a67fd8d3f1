//! What a plugin says of its units, and what the host asks and tells it.

use std::collections::BTreeMap;
use std::str::FromStr;
use std::time::Duration;

use neuropil_plugin_abi as abi;

use crate::{ActivationKind, Error, Scheme, Stage};

/// The kind of a unit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u32)]
#[non_exhaustive]
pub enum DeviceKind {
    /// None of the others.
    #[default]
    Other = abi::NP_KIND_OTHER,
    /// Threads of a CPU.
    Cpu = abi::NP_KIND_CPU,
    /// A graphics processor.
    Gpu = abi::NP_KIND_GPU,
    /// A neural processor.
    Npu = abi::NP_KIND_NPU,
}

/// What a unit is. `DeviceInfo { name, kind, ..Default::default() }` is a good start.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeviceInfo {
    /// For people: the product and what matters of it.
    pub name: String,
    /// Who makes it.
    pub vendor: String,
    /// Versions of the driver and the vendor's libraries.
    pub driver: String,
    /// A saved plan is given back only under an equal text. Empty: plans are never saved.
    pub compatibility: String,
    /// The kind of unit.
    pub kind: DeviceKind,
    /// Memory for weights in bytes; 0 when unknown.
    pub memory_bytes: u64,
    /// Whether it takes calls from many threads at once. Without it the SDK lets one job at a time through.
    pub parallel: bool,
    /// Kinds of memory that [`crate::PluginDevice::import`] takes: `NP_MEMORY_*` of the header, as bits.
    pub memory_kinds: u32,
    /// Alignment of imported memory in bytes, a power of two; 0 when any will do.
    pub memory_alignment: u64,
    /// The only token counts of jobs, ascending. Empty: any count. The SDK refuses others.
    pub token_buckets: Vec<u64>,
}

/// Can the unit do this? The numbers are as the host says them, and may be huge.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Query {
    /// A product of a matrix `[rows, cols]`.
    Matmul {
        /// How the matrix comes.
        scheme: Scheme,
        /// Outputs.
        rows: usize,
        /// Inputs.
        cols: usize,
        /// Tokens.
        tokens: usize,
    },
    /// A stage of a feed-forward.
    Cluster {
        /// How gate and up come.
        scheme: Scheme,
        /// How down comes.
        down_scheme: Scheme,
        /// The stage.
        stage: Stage,
        /// The non-linearity.
        activation: ActivationKind,
        /// Neurons of the block.
        neurons: usize,
        /// Width of the model.
        width: usize,
        /// Tokens.
        tokens: usize,
    },
}

/// Yes, and how. A no is an error with [`crate::Code::Unsupported`] and the reason.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Support {
    /// By a detour that costs time.
    pub emulated: bool,
    /// With outlier columns (see [`crate::Outliers`]) where the scheme may have them.
    pub outliers: bool,
}

impl Support {
    /// A kernel of the unit.
    pub const NATIVE: Support = Support { emulated: false, outliers: false };
    /// A detour.
    pub const EMULATED: Support = Support { emulated: true, outliers: false };
}

/// How a job ran.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// The unit read the input where it lies.
    pub zero_copy_input: bool,
    /// The unit wrote every output where it lies.
    pub zero_copy_output: bool,
    /// Time that the unit itself worked; zero when unknown.
    pub device_time: Duration,
}

/// The settings that a user gave, such as `library=/path/of/the/vendor`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Options {
    values: BTreeMap<String, String>,
}

impl Options {
    /// The value of a key.
    pub fn get(&self, key: &str) -> Option<&str> {
        self.values.get(key).map(String::as_str)
    }

    /// The value of a key as a number, or `default` when the key is not there.
    ///
    /// # Errors
    /// [`crate::Code::Invalid`] when the value is no such number.
    pub fn number<T: FromStr>(&self, key: &str, default: T) -> Result<T, Error> {
        match self.get(key) {
            None => Ok(default),
            Some(text) => text
                .parse()
                .map_err(|_| Error::invalid(format!("option {key}={text} is not a number that it takes"))),
        }
    }

    /// Token counts, or other numbers: ascending, from 1 to `most`, joined by `+`, for a comma ends a unit on the command
    /// line; `None` when the key is not there.
    ///
    /// # Errors
    /// [`crate::Code::Invalid`] when the value is something else.
    pub fn ascending(&self, key: &str, most: u64) -> Result<Option<Vec<u64>>, Error> {
        let Some(text) = self.get(key) else { return Ok(None) };
        let parse = |part: &str| part.parse().ok().filter(|number| (1..=most).contains(number));
        let numbers: Option<Vec<u64>> = text.split('+').map(parse).collect();
        let rising = |numbers: &Vec<u64>| numbers.windows(2).all(|pair| pair[0] < pair[1]);
        let refuse = || {
            Error::invalid(format!(
                "option {key}={text} is no list of ascending numbers up to {most} such as 1+32"
            ))
        };
        numbers.filter(rising).map(Some).ok_or_else(refuse)
    }

    /// Every key with its value.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &str)> {
        self.values.iter().map(|(key, value)| (key.as_str(), value.as_str()))
    }

    /// Checks that there are no keys but these.
    ///
    /// # Errors
    /// [`crate::Code::Invalid`] with the keys that there are.
    pub fn check(&self, known: &[&str]) -> Result<(), Error> {
        match self.values.keys().find(|key| !known.contains(&key.as_str())) {
            None => Ok(()),
            Some(key) if known.is_empty() => {
                Err(Error::invalid(format!("there is no option {key}: this plugin takes none")))
            }
            Some(key) => {
                Err(Error::invalid(format!("there is no option {key}: choose among {}", known.join(", "))))
            }
        }
    }
}

impl FromIterator<(String, String)> for Options {
    fn from_iter<I: IntoIterator<Item = (String, String)>>(pairs: I) -> Options {
        Options { values: pairs.into_iter().collect() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_are_found_counted_and_refused() {
        let options: Options = [("a".into(), "7".into()), ("b".into(), "x".into())].into_iter().collect();
        assert_eq!((options.get("a"), options.get("c")), (Some("7"), None));
        assert_eq!((options.number("a", 1u64), options.number("c", 1u64)), (Ok(7), Ok(1)));
        assert_eq!(options.number("b", 1u64).unwrap_err().text, "option b=x is not a number that it takes");
        assert_eq!(options.check(&["a", "b"]), Ok(()));
        assert_eq!(options.check(&["b"]).unwrap_err().text, "there is no option a: choose among b");
    }
}
