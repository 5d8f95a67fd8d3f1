//! Rotary frequencies: one angle per pair and position, stretched as the file says.
//!
//! The frequencies are computed once in f64; a step's table of cosines and sines is shared by all layers and heads.

use std::f64::consts::TAU;

use crate::gguf::Metadata;

use super::{ModelError, ModelSpec};

/// How the rotary frequencies are stretched for contexts longer than the model was trained on.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum RopeScaling {
    /// Not at all.
    None,
    /// Every position counts as `position / factor`.
    Linear {
        /// The factor, above 0.
        factor: f64,
    },
    /// YaRN: low frequencies are stretched, high ones kept, the magnitude raised by `0.1 ln(factor) + 1`.
    Yarn {
        /// The factor, above 0.
        factor: f64,
        /// Positions the model was trained on.
        original_context: f64,
        /// Further factor on the magnitude.
        attention_factor: f64,
    },
    /// Llama 3's: low frequencies divided by `factor`, high ones kept, a ramp between.
    Llama3 {
        /// The factor, above 0.
        factor: f64,
        /// Wavelengths above `original_context / low_freq_factor` are stretched.
        low_freq_factor: f64,
        /// Wavelengths below `original_context / high_freq_factor` are kept.
        high_freq_factor: f64,
        /// Positions the model was trained on.
        original_context: f64,
    },
}

impl RopeScaling {
    /// Reads the `rope.scaling` keys of an architecture.
    ///
    /// # Errors
    /// [`ModelError::Key`] for an unknown type or an impossible factor.
    pub fn read(metadata: &Metadata, architecture: &str, context: usize) -> Result<RopeScaling, ModelError> {
        let key = |name: &str| format!("{architecture}.rope.scaling.{name}");
        let number = |name: &str, default: f64| -> Result<f64, ModelError> {
            let value = metadata.f32(&key(name))?.map_or(default, f64::from);
            if value.is_finite() && value > 0.0 {
                return Ok(value);
            }
            Err(ModelError::key(&key(name), value, "it must be a positive number"))
        };
        let original = metadata.u64(&key("original_context_length"))?.unwrap_or(context as u64) as f64;
        match metadata.str(&key("type"))? {
            // Old files have the factor alone.
            None => match metadata.f32(&format!("{architecture}.rope.scale_linear"))? {
                None | Some(0.0 | 1.0) => Ok(RopeScaling::None),
                Some(factor) if factor.is_finite() && factor > 0.0 => {
                    Ok(RopeScaling::Linear { factor: f64::from(factor) })
                }
                Some(factor) => {
                    let key = format!("{architecture}.rope.scale_linear");
                    Err(ModelError::key(&key, factor, "it must be a positive number"))
                }
            },
            Some("none") => Ok(RopeScaling::None),
            Some("linear") => Ok(RopeScaling::Linear { factor: number("factor", 1.0)? }),
            Some("yarn") => Ok(RopeScaling::Yarn {
                factor: number("factor", 1.0)?,
                original_context: original.max(1.0),
                attention_factor: number("attn_factor", 1.0)?,
            }),
            Some("llama3") => Ok(RopeScaling::Llama3 {
                factor: number("factor", 1.0)?,
                low_freq_factor: number("low_freq_factor", 1.0)?,
                high_freq_factor: number("high_freq_factor", 4.0)?,
                original_context: original.max(1.0),
            }),
            Some(other) => {
                let known = "known are: none linear yarn llama3";
                Err(ModelError::key(&key("type"), other, known))
            }
        }
    }
}

/// What to say about a model whose positions should be stretched, but whose file does not say how: Llama 3.1 and later
/// come with `rope_freqs.weight`, and conversions from before it was known lack it.
pub(super) fn missing_factors(spec: &ModelSpec, metadata: &Metadata, has_factors: bool) -> Option<String> {
    let llama3 = metadata.str("tokenizer.ggml.pre").ok().flatten() == Some("llama-bpe");
    let long = spec.context > 8192 && spec.rope_base >= 500_000.0;
    let silent = llama3 && long && !has_factors && spec.rope_scaling == RopeScaling::None;
    silent.then(|| {
        let context = spec.context;
        format!(
            "a Llama 3 model with a context of {context}, but without rope_freqs.weight: long prompts will be \
             misread; convert the model again with a newer converter"
        )
    })
}

/// The angles of a model.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct RopeTable {
    /// Radians per position, for each pair.
    frequencies: Vec<f64>,
    /// Factor on cosines and sines.
    magnitude: f64,
}

impl RopeTable {
    /// The angles of `spec`; `factors` are the divisors of `rope_freqs.weight`, one per pair, if the file has them
    /// (they replace the scaling keys, as those who write them intend).
    pub fn new(spec: &ModelSpec, factors: Option<&[f32]>) -> RopeTable {
        let base = f64::from(spec.rope_base);
        let dim = spec.rope_dim as f64;
        let plain = (0..spec.rope_dim / 2).map(|pair| base.powf(-2.0 * pair as f64 / dim));
        if let Some(factors) = factors {
            let frequencies = plain.zip(factors).map(|(f, factor)| f / f64::from(*factor)).collect();
            return RopeTable { frequencies, magnitude: 1.0 };
        }
        match spec.rope_scaling {
            RopeScaling::None => RopeTable { frequencies: plain.collect(), magnitude: 1.0 },
            RopeScaling::Linear { factor } => {
                RopeTable { frequencies: plain.map(|f| f / factor).collect(), magnitude: 1.0 }
            }
            RopeScaling::Yarn { factor, original_context, attention_factor } => {
                // The pair whose wavelength makes `turns` turns within the original context.
                let pair_of = |turns: f64| dim * (original_context / (turns * TAU)).ln() / (2.0 * base.ln());
                let low = pair_of(32.0).floor().max(0.0);
                let high = pair_of(1.0).ceil().min(dim - 1.0);
                let frequencies = plain.enumerate().map(|(pair, f)| {
                    let keep = 1.0 - ((pair as f64 - low) / (high - low).max(0.001)).clamp(0.0, 1.0);
                    f / factor * (1.0 - keep) + f * keep
                });
                let magnitude = attention_factor * (1.0 + 0.1 * factor.ln());
                RopeTable { frequencies: frequencies.collect(), magnitude }
            }
            RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_context } => {
                let frequencies = plain.map(|f| {
                    let turns = original_context * f / TAU;
                    let keep = (turns - low_freq_factor) / (high_freq_factor - low_freq_factor);
                    let keep = keep.clamp(0.0, 1.0);
                    f / factor * (1.0 - keep) + f * keep
                });
                RopeTable { frequencies: frequencies.collect(), magnitude: 1.0 }
            }
        }
    }

    /// Rotated pairs per head.
    pub fn pairs(&self) -> usize {
        self.frequencies.len()
    }

    /// Appends the (cos, sin) of each pair at `position` to a step's table.
    pub fn extend(&self, position: usize, table: &mut Vec<[f32; 2]>) {
        table.extend(self.frequencies.iter().map(|f| {
            let (sin, cos) = (position as f64 * f).sin_cos();
            [(cos * self.magnitude) as f32, (sin * self.magnitude) as f32]
        }));
    }
}

#[cfg(test)]
mod tests {
    use neuropil_device::{Activation, ActivationKind};

    use super::*;

    fn spec(base: f32, dim: usize, rope_scaling: RopeScaling) -> ModelSpec {
        ModelSpec {
            architecture: "llama".into(),
            name: String::new(),
            layers: 1,
            width: dim,
            neurons: 1,
            heads: 1,
            kv_heads: 1,
            head_dim: dim,
            vocab: 1,
            context: 8192,
            norm_eps: 1e-5,
            rope_base: base,
            rope_dim: dim,
            rope_adjacent: true,
            rope_scaling,
            window: None,
            experts: None,
            activation: Activation::new(ActivationKind::Silu),
        }
    }

    #[test]
    fn llama3_divides_low_frequencies_only() {
        let scaling = RopeScaling::Llama3 {
            factor: 32.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_context: 8192.0,
        };
        let plain = RopeTable::new(&spec(500_000.0, 64, RopeScaling::None), None);
        let scaled = RopeTable::new(&spec(500_000.0, 64, scaling), None);
        let divisors: Vec<f64> =
            plain.frequencies.iter().zip(&scaled.frequencies).map(|(a, b)| a / b).collect();
        for (pair, divisor) in divisors.iter().enumerate() {
            let want = match pair {
                0..=14 => 1.0,
                15 => 1.6513,
                16 => 3.2923,
                17 => 9.6667,
                _ => 32.0,
            };
            assert!((divisor / want - 1.0).abs() < 1e-4, "pair {pair}: {divisor} instead of {want}");
        }
        let factors: Vec<f32> = divisors.iter().map(|d| *d as f32).collect();
        let from_file = RopeTable::new(&spec(500_000.0, 64, RopeScaling::None), Some(&factors));
        for (a, b) in from_file.frequencies.iter().zip(&scaled.frequencies) {
            assert!((a / b - 1.0).abs() < 1e-6);
        }
    }

    #[test]
    fn yarn_raises_the_magnitude_once() {
        for (factor, want) in [(4.0, 1.138629), (16.0, 1.277259), (40.0, 1.368888)] {
            let scaling = RopeScaling::Yarn { factor, original_context: 4096.0, attention_factor: 1.0 };
            let table = RopeTable::new(&spec(10_000.0, 64, scaling), None);
            let mut at_zero = Vec::new();
            table.extend(0, &mut at_zero);
            assert!((f64::from(at_zero[0][0]) - want).abs() < 1e-5);
            // The fastest pair is kept, the slowest stretched in full.
            assert!((table.frequencies[0] - 1.0).abs() < 1e-12);
            let slowest = 10_000f64.powf(-62.0 / 64.0);
            assert!((table.frequencies[31] * factor / slowest - 1.0).abs() < 1e-12);
        }
    }

    #[test]
    fn linear_scaling_divides_the_position() {
        let plain = RopeTable::new(&spec(10_000.0, 64, RopeScaling::None), None);
        let scaled = RopeTable::new(&spec(10_000.0, 64, RopeScaling::Linear { factor: 4.0 }), None);
        for position in [0usize, 1, 7, 100] {
            for (a, b) in plain.frequencies.iter().zip(&scaled.frequencies) {
                assert!((position as f64 / 4.0 * a - position as f64 * b).abs() < 1e-12);
            }
        }
    }
}
