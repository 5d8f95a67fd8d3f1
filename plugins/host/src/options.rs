//! What a user says after the `?` of `plugin:PATH?key=value&key=value`: a few keys are the host's, all others go to the
//! plugin.

use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::{PluginError, Scheme};

/// How weights go to the unit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Weights {
    /// As they are in the file where the unit takes that, otherwise in the scheme that loses least and still is small.
    #[default]
    Auto,
    /// In this scheme or not at all.
    Scheme(Scheme),
}

/// Where weights that the unit has compiled are kept for the next time.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Plans {
    /// Where the program says ([`crate::PluginBackend::plans_in`]), otherwise nowhere.
    #[default]
    Default,
    /// Nowhere.
    Off,
    /// In this folder.
    Folder(PathBuf),
}

impl Plans {
    /// The folder.
    pub fn folder(&self) -> Option<&Path> {
        match self {
            Plans::Folder(folder) => Some(folder),
            Plans::Default | Plans::Off => None,
        }
    }
}

/// Settings of one plugin.
///
/// | key | default | |
/// |---|---|---|
/// | `weights` | `auto` | `auto`, or one of `f32 f16 group8 group4 group4m channel8 channel4` |
/// | `outliers` | 10 | of 1000 columns, how many stay 8 bits beside `channel4` |
/// | `deadline_ms` | 30000 | how long a job may take; opening the unit and preparing a weight may take ten times as long |
/// | `self_test` | `on` | `off` trusts the unit |
/// | `probe` | `on` | whether a program that can should let another process try the plugin first ([`crate::probe_in_child`]) |
/// | `unit` | 0 | which of the plugin's units to use |
/// | `plans` | the program's | the folder in which weights that the unit has compiled are kept, or `off`; for a plugin that saves and loads plans |
/// | `plans_mib` | 4096 | how much that folder may hold; what was not used for longest goes first |
#[derive(Clone, Debug, PartialEq)]
pub struct Options {
    /// How weights go to the unit.
    pub weights: Weights,
    /// Of 1000 columns, how many stay 8 bits beside 4-bit channels.
    pub outliers: usize,
    /// How long a job may take.
    pub deadline: Duration,
    /// Whether the unit is tested when it is opened.
    pub self_test: bool,
    /// Whether another process should try the plugin first.
    pub probe: bool,
    /// Which unit to use.
    pub unit: usize,
    /// Where compiled weights are kept.
    pub plans: Plans,
    /// Bytes that they may take there.
    pub plans_bytes: u64,
    /// What the plugin gets.
    pub plugin: Vec<(String, String)>,
}

/// The keys that are the host's; all others go to the plugin.
pub const HOST_KEYS: [&str; 8] =
    ["weights", "outliers", "deadline_ms", "self_test", "probe", "unit", "plans", "plans_mib"];

impl Default for Options {
    fn default() -> Options {
        Options {
            weights: Weights::Auto,
            outliers: 10,
            deadline: Duration::from_secs(30),
            self_test: true,
            probe: true,
            unit: 0,
            plans: Plans::Default,
            plans_bytes: 4 << 30,
            plugin: Vec::new(),
        }
    }
}

impl Options {
    /// Reads `key=value&key=value`; a key without `=` has an empty value.
    ///
    /// # Errors
    /// [`PluginError::Option`] for a value of a key of the host's that cannot be.
    pub fn parse(text: &str) -> Result<Options, PluginError> {
        let mut options = Options::default();
        for pair in text.split('&').filter(|pair| !pair.is_empty()) {
            let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
            let refuse = |choice| PluginError::Option { key: key.into(), value: value.into(), choice };
            let number = |range: std::ops::RangeInclusive<u64>, choice| {
                value.parse().ok().filter(|value| range.contains(value)).ok_or_else(|| refuse(choice))
            };
            match key {
                "weights" if value == "auto" => options.weights = Weights::Auto,
                "weights" => {
                    let scheme = Scheme::from_name(value);
                    let choice = "auto, f32, f16, group8, group4, group4m, channel8 or channel4";
                    options.weights = Weights::Scheme(scheme.ok_or_else(|| refuse(choice))?);
                }
                "outliers" => options.outliers = number(0..=1000, "a number from 0 to 1000")? as usize,
                "deadline_ms" => {
                    let most = 24 * 3600 * 1000;
                    options.deadline =
                        Duration::from_millis(number(1..=most, "milliseconds of at most a day")?);
                }
                "self_test" => options.self_test = switch(value).ok_or_else(|| refuse("on or off"))?,
                "probe" => options.probe = switch(value).ok_or_else(|| refuse("on or off"))?,
                "unit" => options.unit = number(0..=255, "a number from 0 to 255")? as usize,
                "plans" if value.is_empty() => return Err(refuse("a folder or off")),
                "plans" if value == "off" => options.plans = Plans::Off,
                "plans" => options.plans = Plans::Folder(value.into()),
                "plans_mib" => {
                    options.plans_bytes = number(1..=1 << 30, "a number of MiB from 1 to 1073741824")? << 20;
                }
                _ => options.plugin.push((key.into(), value.into())),
            }
        }
        Ok(options)
    }

    /// How long opening a unit and preparing a weight may take.
    pub(crate) fn long_deadline(&self) -> Duration {
        self.deadline.saturating_mul(10)
    }
}

fn switch(value: &str) -> Option<bool> {
    match value {
        "on" => Some(true),
        "off" => Some(false),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_of_the_host_are_taken_and_others_passed_on() {
        let options = Options::parse(
            "weights=channel4&a=b=c&deadline_ms=50&self_test=off&flag&outliers=3&probe=off&unit=2\
             &plans=/var/plans&plans_mib=3",
        )
        .unwrap();
        let plugin = [("a", "b=c"), ("flag", "")].map(|(k, v)| (k.to_string(), v.to_string())).to_vec();
        let weights = Weights::Scheme(Scheme::Channel4);
        let deadline = Duration::from_millis(50);
        assert_eq!(
            options,
            Options {
                weights,
                outliers: 3,
                deadline,
                self_test: false,
                probe: false,
                unit: 2,
                plans: Plans::Folder("/var/plans".into()),
                plans_bytes: 3 << 20,
                plugin
            }
        );
        assert_eq!(Options::parse("").unwrap(), Options::default());
        assert_eq!(Options::parse("plans=off").unwrap().plans, Plans::Off);
        for text in [
            "weights=q4",
            "deadline_ms=0",
            "deadline_ms=x",
            "self_test=1",
            "outliers=1001",
            "unit=-1",
            "plans=",
            "plans_mib=0",
        ] {
            let error = Options::parse(text).unwrap_err().to_string();
            assert!(error.starts_with(&format!("plugin option {text} cannot be: choose ")), "{error}");
        }
    }
}
