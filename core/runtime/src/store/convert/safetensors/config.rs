//! `config.json` to the keys of GGUF.

use std::path::Path;

use serde_json::Value;

use super::super::ConvertError;
use super::super::source::{MAX_EXPERTS, MAX_LAYERS, MAX_WIDTH};
use super::{shown_value, whole};
use crate::gguf::Pairs;
use crate::store::keys;

/// What the configuration says.
pub(super) struct Config {
    pub pairs: Pairs,
    pub layers: u64,
    pub width: u64,
    pub heads: u64,
    pub kv_heads: u64,
    pub experts: u64,
    /// Whether the embeddings are the output matrix too.
    pub tied: bool,
    /// What slow pairs are divided by, where it is not one factor for all (Llama 3).
    pub rope_divisors: Option<Vec<f32>>,
    pub bos: Option<u64>,
    pub eos: Option<u64>,
}

/// Architectures by the name of their class: the name in GGUF, and the activation if it is not by `hidden_act`.
const ARCHITECTURES: [(&str, &str, Option<&str>); 5] = [
    ("LlamaForCausalLM", "llama", None),
    ("MistralForCausalLM", "llama", None),
    ("MixtralForCausalLM", "llama", None),
    ("SparseLlamaForCausalLM", "llama", None),
    ("BambooForCausalLM", "bamboo", Some("drelu")),
];

impl Config {
    pub(super) fn read(config: &Value, path: &Path) -> Result<Config, ConvertError> {
        let refused = |reason: String| ConvertError::Source { file: path.into(), reason };
        let class = config.get("architectures").and_then(|list| list.get(0)).and_then(Value::as_str);
        let known = ARCHITECTURES.iter().find(|(name, ..)| Some(*name) == class);
        let Some((_, architecture, activation)) = known else {
            let names: Vec<&str> = ARCHITECTURES.iter().map(|(name, ..)| *name).collect();
            let found = shown_value(config.get("architectures"));
            return Err(refused(format!("its architecture is {found}; {} are converted", names.join(", "))));
        };
        let required = |key: &str, most: u64| -> Result<u64, ConvertError> {
            let found = whole(config, key).filter(|n| (1..=most).contains(n));
            found.ok_or_else(|| {
                refused(format!("{key} is {}, where 1 to {most} is needed", shown_value(config.get(key))))
            })
        };
        let layers = required("num_hidden_layers", MAX_LAYERS.into())?;
        let width = required("hidden_size", MAX_WIDTH)?;
        let heads = required("num_attention_heads", 1 << 16)?;
        let kv_heads = match config.get("num_key_value_heads") {
            None | Some(Value::Null) => heads,
            Some(_) => required("num_key_value_heads", heads)?,
        };
        let experts = match config.get("num_local_experts") {
            None | Some(Value::Null) => 0,
            Some(_) => required("num_local_experts", MAX_EXPERTS)?,
        };
        let mut pairs = Pairs::new();
        pairs.set("general.architecture", *architecture);
        if let Some(name) = path.parent().and_then(Path::file_name).and_then(|name| name.to_str()) {
            pairs.set("general.name", name);
        }
        let number = |pairs: &mut Pairs, key: &str, n: u64| {
            pairs.set(&format!("{architecture}.{key}"), u32::try_from(n).unwrap_or(u32::MAX));
        };
        let float =
            |pairs: &mut Pairs, key: &str, x: f64| pairs.set(&format!("{architecture}.{key}"), x as f32);
        number(&mut pairs, "block_count", layers);
        number(&mut pairs, "context_length", required("max_position_embeddings", 1 << 31)?);
        number(&mut pairs, "embedding_length", width);
        number(&mut pairs, "feed_forward_length", required("intermediate_size", 1 << 31)?);
        number(&mut pairs, "attention.head_count", heads);
        number(&mut pairs, "attention.head_count_kv", kv_heads);
        number(&mut pairs, "vocab_size", required("vocab_size", 1 << 31)?);
        let head_dim = match config.get("head_dim") {
            None | Some(Value::Null) if heads <= width => width / heads,
            _ => required("head_dim", 1 << 16)?,
        };
        number(&mut pairs, "rope.dimension_count", head_dim);
        if head_dim.checked_mul(heads) != Some(width) {
            number(&mut pairs, "attention.key_length", head_dim);
            number(&mut pairs, "attention.value_length", head_dim);
        }
        if let Some(window) = whole(config, "sliding_window") {
            number(&mut pairs, "attention.sliding_window", window);
        }
        if experts > 0 {
            number(&mut pairs, "expert_count", experts);
            number(&mut pairs, "expert_used_count", required("num_experts_per_tok", experts)?);
        }
        let epsilon = config.get("rms_norm_eps").and_then(Value::as_f64).unwrap_or(1e-6);
        float(&mut pairs, "attention.layer_norm_rms_epsilon", epsilon);
        let scaling = config.get("rope_scaling").filter(|v| !v.is_null());
        let theta = config.get("rope_theta").and_then(Value::as_f64).unwrap_or(10_000.0);
        float(&mut pairs, "rope.freq_base", theta);
        let mut rope_divisors = None;
        if let Some(scaling) = scaling {
            let kind = scaling.get("rope_type").or(scaling.get("type")).and_then(Value::as_str);
            let of =
                |key: &str| scaling.get(key).and_then(Value::as_f64).filter(|x| x.is_finite() && *x > 0.0);
            let factor = of("factor").ok_or_else(|| refused("rope_scaling has no factor".into()))?;
            match kind {
                Some(kind @ ("linear" | "yarn")) => {
                    pairs.set(&format!("{architecture}.rope.scaling.type"), kind);
                    float(&mut pairs, "rope.scaling.factor", factor);
                    if let Some(original) = whole(scaling, "original_max_position_embeddings") {
                        number(&mut pairs, "rope.scaling.original_context_length", original);
                    }
                }
                Some("llama3") => {
                    let numbers =
                        ["low_freq_factor", "high_freq_factor", "original_max_position_embeddings"].map(of);
                    let [Some(low), Some(high), Some(original)] = numbers else {
                        return Err(refused("rope_scaling of llama3 lacks one of its four numbers".into()));
                    };
                    if low >= high {
                        let reason = format!(
                            "low_freq_factor of rope_scaling is {low}, which is not below high_freq_factor, {high}"
                        );
                        return Err(refused(reason));
                    }
                    rope_divisors = Some(llama3(theta, head_dim, factor, low, high, original));
                }
                _ => {
                    let found = shown_value(scaling.get("rope_type").or(scaling.get("type")));
                    return Err(refused(format!(
                        "rope_scaling is {found}; linear, yarn and llama3 are converted"
                    )));
                }
            }
        }
        let act = config.get("hidden_act").and_then(Value::as_str).unwrap_or("silu");
        let named = match (activation, act) {
            (Some(name), _) => Some(*name),
            (None, "silu") => None,
            (None, "relu") => Some("relu"),
            (None, "fatrelu") => {
                let cut = config.get("hidden_act_param").and_then(Value::as_f64).unwrap_or(0.0);
                pairs.set(keys::ACTIVATION_THRESHOLD, cut as f32);
                Some("relu")
            }
            (None, "relu2" | "relu_squared") => Some("relu2"),
            (None, "drelu") => Some("drelu"),
            (None, other) => {
                let other = crate::shown::shown(other);
                return Err(refused(format!(
                    "hidden_act is \"{other}\"; silu, relu, fatrelu, relu2 and drelu are converted"
                )));
            }
        };
        if let Some(name) = named {
            pairs.set(keys::ACTIVATION, name);
        }
        for key in ["attention_bias", "mlp_bias"] {
            if config.get(key).and_then(Value::as_bool) == Some(true) {
                return Err(refused(format!("{key} is true, and biases are not converted")));
            }
        }
        let token = |key: &str| match config.get(key) {
            Some(Value::Array(ids)) => ids.first().and_then(Value::as_u64),
            other => other.and_then(Value::as_u64),
        };
        let tied = config.get("tie_word_embeddings").and_then(Value::as_bool).unwrap_or(false);
        let (bos, eos) = (token("bos_token_id"), token("eos_token_id"));
        Ok(Config { pairs, layers, width, heads, kv_heads, experts, tied, rope_divisors, bos, eos })
    }
}

/// What each pair's frequency is divided by: 1 for fast pairs, the factor for slow ones, and a ramp between.
fn llama3(theta: f64, head_dim: u64, factor: f64, low: f64, high: f64, original: f64) -> Vec<f32> {
    let of = |pair: u64| {
        let frequency = theta.powf(-(2.0 * pair as f64) / head_dim as f64);
        let wavelength = 2.0 * std::f64::consts::PI / frequency;
        if wavelength < original / high {
            1.0
        } else if wavelength > original / low {
            factor
        } else {
            let smooth = (original / wavelength - low) / (high - low);
            1.0 / ((1.0 - smooth) / factor + smooth)
        }
    };
    (0..head_dim / 2).map(|pair| of(pair) as f32).collect()
}
