//! A model's numbers, read from the file's keys and checked before anything is sized by them.

use neuropil_device::{Activation, ActivationKind};

use crate::gguf::Metadata;

use super::ModelError;
use super::rope::RopeScaling;
use super::smallthinker::FULL_EVERY;

/// Widths and heads are bounded so that every product of a few of them fits 64 bits.
const MAX_DIMENSION: u64 = 1 << 24;

/// What an architecture means without saying so in keys.
struct Habits {
    activation: ActivationKind,
    /// Pairs of rotated channels are neighbours, not halves of a head.
    rope_adjacent: bool,
    /// A model of it has experts.
    experts: bool,
    /// Its files say how the router's results become weights; softmax where they don't.
    names_gating: bool,
}

impl Habits {
    fn of(architecture: &str) -> Habits {
        let llama = Habits {
            activation: ActivationKind::Silu,
            rope_adjacent: true,
            experts: false,
            names_gating: false,
        };
        match architecture {
            "bamboo" => Habits { activation: ActivationKind::Drelu, ..llama },
            "turbosparsemixtral" => Habits { activation: ActivationKind::Drelu, experts: true, ..llama },
            "smallthinker" => Habits {
                activation: ActivationKind::Relu,
                rope_adjacent: false,
                experts: true,
                names_gating: true,
            },
            _ => llama,
        }
    }
}

/// How a router's results become weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gating {
    /// The softmax over all experts.
    Softmax,
    /// The logistic function of each.
    Sigmoid,
}

/// The experts of a model's feed-forward layers. The weights of those that a token uses are divided by their sum.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertSpec {
    /// Experts per layer.
    pub count: usize,
    /// Experts that a token uses, 1 to `count`.
    pub used: usize,
    /// Neurons of each.
    pub neurons: usize,
    /// From the router's results to weights.
    pub gating: Gating,
}

/// What a model of the `llama` family looks like.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelSpec {
    /// `general.architecture`.
    pub architecture: String,
    /// `general.name`, or nothing.
    pub name: String,
    /// Transformer blocks.
    pub layers: usize,
    /// Width of the residual stream.
    pub width: usize,
    /// Neurons of each feed-forward layer.
    pub neurons: usize,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads; divides `heads`.
    pub kv_heads: usize,
    /// Channels per head.
    pub head_dim: usize,
    /// Entries of the vocabulary.
    pub vocab: usize,
    /// Positions the model was made for.
    pub context: usize,
    /// Epsilon of the RMS norms.
    pub norm_eps: f32,
    /// Base of the rotary frequencies.
    pub rope_base: f32,
    /// Rotated channels per head, even.
    pub rope_dim: usize,
    /// Rotated pairs are neighbours (`2i, 2i+1`) rather than halves of a head.
    pub rope_adjacent: bool,
    /// How the rotary frequencies are stretched.
    pub rope_scaling: RopeScaling,
    /// Positions that attention sees, the token's own included; `None` for all. Some architectures have layers that
    /// see all positions in spite of it.
    pub window: Option<usize>,
    /// The experts, if feed-forward layers are cut into some.
    pub experts: Option<ExpertSpec>,
    /// The feed-forward's non-linearity.
    pub activation: Activation,
}

impl ModelSpec {
    /// Reads the keys of architecture `architecture`. Where the file has no `vocab_size`, its vocabulary is counted.
    ///
    /// # Errors
    /// [`ModelError::Gguf`] for a missing or wrongly typed key, [`ModelError::Key`] for a value that cannot be.
    pub fn read(metadata: &Metadata, architecture: &str) -> Result<ModelSpec, ModelError> {
        let key = |name: &str| format!("{architecture}.{name}");
        let required = |name: &str| -> Result<usize, ModelError> {
            let key = key(name);
            dimension(&key, metadata.require_u64(&key)?)
        };
        let optional = |name: &str| -> Result<Option<usize>, ModelError> {
            let key = key(name);
            metadata.u64(&key)?.map(|value| dimension(&key, value)).transpose()
        };

        let layers = required("block_count")?;
        let width = required("embedding_length")?;
        let neurons = required("feed_forward_length")?;
        let heads = required("attention.head_count")?;
        let kv_heads = optional("attention.head_count_kv")?.unwrap_or(heads);
        if !heads.is_multiple_of(kv_heads) {
            let reason = format!("it must divide the {heads} query heads");
            return Err(ModelError::key(&key("attention.head_count_kv"), kv_heads, reason));
        }
        let head_dim = match optional("attention.key_length")? {
            Some(length) => length,
            None if width.is_multiple_of(heads) => width / heads,
            None => {
                let reason = format!("the width {width} is not a multiple, and there is no key_length");
                return Err(ModelError::key(&key("attention.head_count"), heads, reason));
            }
        };
        if let Some(value) = optional("attention.value_length")?
            && value != head_dim
        {
            let reason = format!("only the key's length, {head_dim}, is supported");
            return Err(ModelError::key(&key("attention.value_length"), value, reason));
        }
        let rope_dim = optional("rope.dimension_count")?.unwrap_or(head_dim);
        if rope_dim > head_dim || !rope_dim.is_multiple_of(2) {
            let reason = format!("it must be even and at most the head's {head_dim} channels");
            return Err(ModelError::key(&key("rope.dimension_count"), rope_dim, reason));
        }
        let context = required("context_length")?;
        let positive = |name: &str, default: Option<f32>| -> Result<f32, ModelError> {
            let key = key(name);
            let value = match (metadata.f32(&key)?, default) {
                (Some(value), _) => value,
                (None, Some(default)) => default,
                (None, None) => metadata.require_f32(&key)?,
            };
            if value.is_finite() && value > 0.0 {
                return Ok(value);
            }
            Err(ModelError::key(&key, value, "it must be a positive number"))
        };
        let habits = Habits::of(architecture);
        Ok(ModelSpec {
            architecture: architecture.into(),
            name: metadata.str("general.name")?.unwrap_or_default().into(),
            layers,
            width,
            neurons,
            heads,
            kv_heads,
            head_dim,
            vocab: match (optional("vocab_size")?, metadata.strings("tokenizer.ggml.tokens")?) {
                (Some(size), _) => size,
                (None, Some(tokens)) => dimension("tokenizer.ggml.tokens", tokens.len() as u64)?,
                (None, None) => required("vocab_size")?,
            },
            context,
            norm_eps: positive("attention.layer_norm_rms_epsilon", None)?,
            rope_base: positive("rope.freq_base", Some(10000.0))?,
            rope_dim,
            rope_adjacent: habits.rope_adjacent,
            rope_scaling: RopeScaling::read(metadata, architecture, context)?,
            window: window(metadata, architecture)?,
            experts: experts(metadata, architecture, &habits, neurons)?,
            activation: activation(metadata, habits.activation)?,
        })
    }
}

/// The sliding window; files write 0 for none.
fn window(metadata: &Metadata, architecture: &str) -> Result<Option<usize>, ModelError> {
    let key = format!("{architecture}.attention.sliding_window");
    let window = metadata.u64(&key)?.filter(|window| *window > 0);
    let window = window.map(|window| dimension(&key, window)).transpose()?;
    if architecture == "smallthinker" {
        // Which layers see all positions is part of the architecture; a file that says otherwise is not understood.
        let key = format!("{architecture}.attention.sliding_window_pattern");
        if let Some(pattern) = metadata.u64(&key)?.filter(|pattern| *pattern != FULL_EVERY as u64) {
            return Err(ModelError::key(&key, pattern, format!("only {FULL_EVERY} is supported")));
        }
    }
    Ok(window)
}

/// The experts, if there are any; each has `neurons` neurons where no key says otherwise.
fn experts(
    metadata: &Metadata,
    architecture: &str,
    habits: &Habits,
    neurons: usize,
) -> Result<Option<ExpertSpec>, ModelError> {
    let [count_key, used_key, neurons_key, gating_key] =
        ["expert_count", "expert_used_count", "expert_feed_forward_length", "expert_gating_func"]
            .map(|name| format!("{architecture}.{name}"));
    let count = match habits.experts {
        true => metadata.require_u64(&count_key)?,
        false => match metadata.u64(&count_key)? {
            None | Some(0) => return Ok(None),
            Some(count) => count,
        },
    };
    let count = dimension(&count_key, count)?;
    let used = dimension(&used_key, metadata.require_u64(&used_key)?)?;
    if used > count {
        return Err(ModelError::key(&used_key, used, format!("there are only {count} experts")));
    }
    let neurons = match metadata.u64(&neurons_key)? {
        Some(neurons) => dimension(&neurons_key, neurons)?,
        None => neurons,
    };
    let gating = match habits.names_gating {
        true => Some(metadata.require_u64(&gating_key)?),
        false => metadata.u64(&gating_key)?,
    };
    let gating = match gating {
        None | Some(1) => Gating::Softmax,
        Some(2) => Gating::Sigmoid,
        Some(other) => {
            return Err(ModelError::key(&gating_key, other, "known are: 1 (softmax), 2 (sigmoid)"));
        }
    };
    Ok(Some(ExpertSpec { count, used, neurons, gating }))
}

/// The non-linearity: `default` is the architecture's; `neuropil.ffn_activation` names another.
fn activation(metadata: &Metadata, default: ActivationKind) -> Result<Activation, ModelError> {
    const KEY: &str = "neuropil.ffn_activation";
    const THRESHOLD: &str = "neuropil.ffn_activation_threshold";
    let kind = match metadata.str(KEY)? {
        None => default,
        Some(name) => ActivationKind::from_name(name).ok_or_else(|| {
            let names = ActivationKind::NAMES.map(|(name, _)| name).join(" ");
            ModelError::key(KEY, name, format!("known are: {names}"))
        })?,
    };
    let threshold = metadata.f32(THRESHOLD)?.unwrap_or(0.0);
    if !(threshold.is_finite() && threshold >= 0.0) {
        return Err(ModelError::key(THRESHOLD, threshold, "it must be zero or a positive number"));
    }
    Ok(Activation { kind, threshold })
}

fn dimension(key: &str, value: u64) -> Result<usize, ModelError> {
    if value == 0 || value > MAX_DIMENSION {
        return Err(ModelError::key(key, value, format!("it must be 1 to {MAX_DIMENSION}")));
    }
    Ok(value as usize)
}
