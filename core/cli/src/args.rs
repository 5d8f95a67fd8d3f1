//! The command line: verbs, and the groups of flags that verbs share.
//!
//! A flag exists only where it does something. Ranges are checked here, so that a wrong value is refused before a
//! model is loaded.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::builder::{OsStringValueParser, TypedValueParser};
use clap::{Args, Parser, Subcommand, ValueEnum};
use neuropil::model::KvType;
use neuropil::predict::Prediction;

use crate::budget::MemoryFlags;
use crate::error::EXIT_CODES;
use crate::verbs::{
    bench, calibrate, chat, convert, demo, devices, inspect, logits, perplexity, plugin, run, synth,
    tokenize, verify,
};

/// Most threads that may be asked for.
pub const MAX_THREADS: i64 = 4096;

/// Runs, inspects and measures language models in GGUF files.
#[derive(Parser)]
#[command(
    name = "neuropil",
    version,
    propagate_version = true,
    after_help = format!("Example:\n  neuropil run model.gguf -p \"Once upon a time\" -n 64\n\n{EXIT_CODES}")
)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub verb: Verb,
}

/// The verbs.
#[derive(Subcommand)]
pub enum Verb {
    /// Continue a text
    Run(Box<run::Args>),
    /// Talk with a model by its own template
    Chat(Box<chat::Args>),
    /// Get the default model, let it answer, and show where memory and time went
    Demo(Box<demo::Args>),
    /// List a file's metadata and tensors, and whether it runs
    Inspect(inspect::Args),
    /// Read every byte of a file and look for damage
    Verify(verify::Args),
    /// Turn a text on standard input into token ids, or ids back into text
    Tokenize(tokenize::Args),
    /// Show the logits after the last token of a prompt
    Logits(Box<logits::Args>),
    /// Measure how well a model predicts a text
    Perplexity(Box<perplexity::Args>),
    /// Measure speed as llama-bench does
    Bench(Box<bench::Args>),
    /// Turn a model into a neuron store, from which single neurons can be read
    Convert(Box<convert::Args>),
    /// Find out which neurons of a model fire, and write that into its neuron store
    Calibrate(calibrate::Args),
    /// Make a model with a real shape and a chosen sparsity, for benchmarks
    Synth(Box<synth::Args>),
    /// List the compute units and what they can do
    Devices(devices::Args),
    /// Test plugins, which bring compute units of their own
    Plugin(plugin::Args),
}

/// How the model runs.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Engine")]
pub struct EngineFlags {
    /// Compute threads; 0 chooses them by the cores and limits of the machine
    #[arg(short, long, default_value_t = 0, allow_negative_numbers = true,
        value_parser = clap::value_parser!(u32).range(0..=MAX_THREADS))]
    pub threads: u32,
    /// Most tokens to hold, prompt and answer together; default: as many as the model was made for
    #[arg(long, value_name = "N", allow_negative_numbers = true,
        value_parser = clap::value_parser!(u32).range(1..))]
    pub ctx: Option<u32>,
    /// Precision of the cache of keys and values
    #[arg(long, value_name = "TYPE", default_value = "f16")]
    pub kv: Kv,
    /// Units to run on, in order of preference: cpu, or plugin:PATH?key=value&key=value for a library that drives another
    /// unit; the processor takes what they do not
    #[arg(long, value_name = "NAMES", value_delimiter = ',', default_value = "cpu", value_parser = unit)]
    pub device: Vec<Unit>,
    /// Stop when a unit that was named cannot be used or fails, instead of going on without it
    #[arg(long)]
    pub strict: bool,
    /// How the neurons of a neuron store are chosen in decode
    #[arg(long, value_name = "HOW", default_value = "auto")]
    pub predict: Predict,
    /// Expand the weights to F32 and leave activations unquantised: slow, large, and as exact as the file
    #[arg(long)]
    pub exact: bool,
    #[command(flatten)]
    pub memory: MemoryFlags,
}

impl EngineFlags {
    /// The context asked for.
    pub fn context(&self) -> Option<usize> {
        self.ctx.map(|n| n as usize)
    }
}

/// Precisions of the cache of keys and values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Kv {
    /// Half precision
    F16,
    /// Single precision
    F32,
    /// 8 bits, with a scale for every 32 channels: about half the memory of f16
    #[value(name = "q8_0")]
    Q8_0,
}

impl Kv {
    /// The engine's name for it.
    pub fn kind(self) -> KvType {
        match self {
            Kv::F16 => KvType::F16,
            Kv::F32 => KvType::F32,
            Kv::Q8_0 => KvType::Q8_0,
        }
    }

    /// The name users type.
    pub fn name(self) -> &'static str {
        match self {
            Kv::F16 => "f16",
            Kv::F32 => "f32",
            Kv::Q8_0 => "q8_0",
        }
    }
}

/// How neurons are chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Predict {
    /// The predictors that the model brings; else, for a ReLU model, what reads least of its gate and of what calibrate
    /// found good enough; else calibrated thresholds; else all neurons
    Auto,
    /// All neurons
    Off,
    /// The store's predictors: the model's own, or those of calibrate --predictors
    Model,
    /// The exact gate stays in memory and decides; changes nothing in a ReLU model
    Gate,
    /// A copy of the gate in 4 bits stays in memory and decides
    Gate4,
    /// The exact gate, by calibrated thresholds
    Threshold,
}

impl Predict {
    /// The engine's name for it.
    pub fn kind(self) -> Prediction {
        match self {
            Predict::Auto => Prediction::Auto,
            Predict::Off => Prediction::Off,
            Predict::Model => Prediction::Model,
            Predict::Gate => Prediction::Gate,
            Predict::Gate4 => Prediction::Gate4,
            Predict::Threshold => Prediction::Threshold,
        }
    }
}

/// The units that `--device` knows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Unit {
    /// The processor
    Cpu,
    /// The unit that a plugin drives, or those of all plugins in a folder
    Plugin {
        /// The library or folder.
        path: PathBuf,
        /// `key=value&key=value`.
        options: String,
    },
}

/// Reads a unit's name.
pub fn unit(text: &str) -> Result<Unit, String> {
    if text == "cpu" {
        return Ok(Unit::Cpu);
    }
    let plugin = text.strip_prefix("plugin:").filter(|rest| !rest.is_empty() && !rest.starts_with('?'));
    let plugin = plugin.ok_or("it must be cpu or plugin:PATH, as in plugin:./libmy_npu.so?key=value")?;
    let (path, options) = plugin.split_once('?').unwrap_or((plugin, ""));
    Ok(Unit::Plugin { path: path.into(), options: options.into() })
}

/// How a raw text becomes tokens.
#[derive(Args, Clone, Copy, Debug)]
pub struct TextFlags {
    /// Read the names of special tokens in the text as those tokens
    #[arg(long)]
    pub parse_special: bool,
    /// Add no token that the file would begin or end a text with (BOS, EOS)
    #[arg(long)]
    pub no_special: bool,
}

/// How tokens are chosen, with the defaults of the library.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Sampling")]
pub struct SamplingFlags {
    /// Most tokens to generate; -1 goes on until the model ends or the context is full; other negative numbers are
    /// refused
    #[arg(short = 'n', value_name = "N", default_value_t = -1, allow_negative_numbers = true,
        value_parser = clap::value_parser!(i64).range(-1..))]
    pub count: i64,
    /// Temperature; 0 always takes the most likely token, the lower id of two
    #[arg(long, value_name = "F", default_value_t = 0.8, allow_negative_numbers = true, value_parser = not_negative)]
    pub temp: f32,
    /// Keep the N most likely tokens; 0 is off
    #[arg(long, value_name = "N", default_value_t = 40, allow_negative_numbers = true)]
    pub top_k: u32,
    /// Keep the most likely tokens that together have this probability; 0 keeps one token, 1 is off
    #[arg(long, value_name = "F", default_value_t = 0.95, allow_negative_numbers = true, value_parser = share)]
    pub top_p: f32,
    /// Keep tokens that are at least this likely in relation to the most likely one; 0 is off
    #[arg(long, value_name = "F", default_value_t = 0.05, allow_negative_numbers = true, value_parser = share)]
    pub min_p: f32,
    /// Make tokens that occurred less likely by this factor; 1 is off
    #[arg(long, value_name = "F", default_value_t = 1.0, allow_negative_numbers = true, value_parser = positive)]
    pub repeat_penalty: f32,
    /// How many tokens back the three penalties look, the prompt included; -1 is the whole context, 0 is off
    #[arg(long, value_name = "N", default_value_t = 64, allow_negative_numbers = true,
        value_parser = clap::value_parser!(i32).range(-1..))]
    pub repeat_last_n: i32,
    /// Subtracted from the logit of each token that occurred
    #[arg(long, value_name = "F", default_value_t = 0.0, allow_negative_numbers = true, value_parser = finite)]
    pub presence_penalty: f32,
    /// Subtracted from a token's logit once for each time that it occurred
    #[arg(long, value_name = "F", default_value_t = 0.0, allow_negative_numbers = true, value_parser = finite)]
    pub frequency_penalty: f32,
    /// Added to the logit of a token; may be repeated
    #[arg(long, value_name = "ID=BIAS", value_parser = bias, allow_hyphen_values = true)]
    pub logit_bias: Vec<(u32, f32)>,
    /// Seed of the random choice; default: another one each time (--json tells which)
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = whole)]
    pub seed: Option<u64>,
    /// Text that ends the generation and is not part of it; may be repeated
    #[arg(long, value_name = "TEXT", value_parser = stop(), allow_hyphen_values = true)]
    pub stop: Vec<String>,
    /// Go on after the model's end tokens
    #[arg(long)]
    pub ignore_eos: bool,
}

impl SamplingFlags {
    /// The most likely tokens, at most `count`.
    pub fn greedy(count: u32) -> SamplingFlags {
        SamplingFlags {
            count: count.into(),
            temp: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repeat_penalty: 1.0,
            repeat_last_n: 0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            logit_bias: Vec::new(),
            seed: Some(0),
            stop: Vec::new(),
            ignore_eos: false,
        }
    }
}

/// A GGUF file of a model.
#[derive(Args, Clone, Debug)]
pub struct ModelFile {
    /// A GGUF file; of a set of several, any one
    #[arg(value_name = "MODEL")]
    pub path: PathBuf,
}

fn number(text: &str) -> Result<f32, String> {
    text.trim().parse().map_err(|_| "it is not a number".to_owned())
}

fn finite(text: &str) -> Result<f32, String> {
    number(text).and_then(|n| if n.is_finite() { Ok(n) } else { Err("it must be a finite number".into()) })
}

fn not_negative(text: &str) -> Result<f32, String> {
    finite(text).and_then(|n| if n >= 0.0 { Ok(n) } else { Err("it must be 0 or more".into()) })
}

fn positive(text: &str) -> Result<f32, String> {
    finite(text).and_then(|n| if n > 0.0 { Ok(n) } else { Err("it must be more than 0".into()) })
}

fn share(text: &str) -> Result<f32, String> {
    finite(text).and_then(|n| if (0.0..=1.0).contains(&n) { Ok(n) } else { Err("it must be 0 to 1".into()) })
}

fn bias(text: &str) -> Result<(u32, f32), String> {
    let (id, bias) = text.split_once('=').ok_or("it must be a token id, =, and a number, as in 42=-1.5")?;
    let id =
        id.trim().parse().map_err(|_| format!("\"{id}\" is no token id, which are whole numbers from 0"))?;
    let bias = number(bias)?;
    if bias.is_nan() {
        return Err("the bias must be a number".into());
    }
    Ok((id, bias))
}

fn whole(text: &str) -> Result<u64, String> {
    text.trim().parse().map_err(|_| format!("it must be a whole number from 0 to {}", u64::MAX))
}

/// A text that must be UTF-8. The parser's own refusal would not name the flag.
pub fn text() -> impl TypedValueParser<Value = String> {
    OsStringValueParser::new().try_map(utf8)
}

fn stop() -> impl TypedValueParser<Value = String> {
    OsStringValueParser::new().try_map(|given| {
        utf8(given)
            .and_then(|text| if text.is_empty() { Err("it must not be empty".into()) } else { Ok(text) })
    })
}

fn utf8(given: OsString) -> Result<String, String> {
    given.into_string().map_err(|_| "it is not valid UTF-8; give it in UTF-8".into())
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_command_line_is_well_formed() {
        Cli::command().debug_assert();
    }

    #[test]
    fn every_verb_has_an_example() {
        for verb in Cli::command().get_subcommands() {
            let help = verb.get_after_help().map(ToString::to_string).unwrap_or_default();
            assert!(
                help.contains(&format!("neuropil {} ", verb.get_name())) || help.contains("neuropil devices")
            );
        }
    }

    #[test]
    fn biases_are_an_id_and_a_number() {
        assert_eq!(bias("7=-1.5"), Ok((7, -1.5)));
        assert!(
            ["7", "=1", "-1=2", "a=1", "1=b", "1=nan", "9223372036854775808=1"]
                .iter()
                .all(|t| bias(t).is_err())
        );
    }

    #[test]
    fn ranges_are_refused_before_anything_is_loaded() {
        let refused = |flags: &[&str]| {
            let line = ["neuropil", "run", "m.gguf"].iter().chain(flags);
            Cli::try_parse_from(line).is_err()
        };
        for flags in [
            ["-t", "4097"],
            ["-t", "100000"],
            ["--ctx", "0"],
            ["-n", "-2"],
            ["--temp", "-1"],
            ["--temp", "nan"],
            ["--top-p", "1.5"],
            ["--min-p", "-0.1"],
            ["--repeat-penalty", "0"],
            ["--repeat-last-n", "-2"],
            ["--kv", "q4_0"],
            ["--device", "wgpu"],
            ["--device", "plugin:"],
            ["--device", "cpu,plugin:?a=b"],
            ["--stop", ""],
            ["--samples", "0"],
            ["--memory", "lots"],
            ["--io", "aio"],
            ["--top-k", "-1"],
        ] {
            assert!(refused(&flags), "{flags:?}");
        }
        for flags in [
            ["-n", "-1"],
            ["-t", "0"],
            ["--kv", "q8_0"],
            ["--logit-bias", "3=-100"],
            ["--repeat-last-n", "-1"],
            ["-p", "-x"],
        ] {
            assert!(!refused(&flags), "{flags:?}");
        }
    }
}
