//! Models small enough to check by hand: every architecture, shape, type and option of a stock file, random weights.
//!
//! A [`Toy`] is the description, a [`ToyModel`] its weights. Each tensor is drawn from the seed and its own name, so
//! changing one option leaves the other tensors as they are, and two models that should agree can be compared.
//! Gains are chosen so that attention is uneven, no layer drowns the others and the best logit leads by about 1.

mod file;
mod named;
mod weights;

use neuropil_device::DType;

pub use named::named;
use weights::Random;
pub use weights::{Layer, Weight};

/// How positions are stretched.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum RopeScaling {
    /// Not at all.
    None,
    /// Position `p` turns like `p / factor`.
    Linear {
        /// The divisor.
        factor: f32,
    },
    /// Llama 3: slow pairs are stretched, fast ones kept, by the divisors in `rope_freqs.weight`.
    Llama3 {
        /// Divisor of the slowest pairs.
        factor: f32,
        /// Turns over the original context below which a pair is slow.
        low: f32,
        /// Turns above which it is fast.
        high: f32,
        /// The original context.
        original: usize,
    },
    /// YaRN: a ramp between the two, and a factor on the magnitude.
    Yarn {
        /// Divisor of the slowest pairs.
        factor: f32,
        /// The original context.
        original: usize,
    },
}

/// Experts instead of one feed-forward.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ToyExperts {
    /// How many.
    pub count: usize,
    /// How many a token uses.
    pub used: usize,
    /// Neurons of each, written to the file; [`Toy::ffn`] and not written when `None`.
    pub neurons: Option<usize>,
    /// `expert_gating_func`: 1 for softmax, 2 for the logistic function; softmax and not written when `None`.
    pub gating: Option<u32>,
}

/// A model to build; `Toy { heads: 6, ..Toy::default() }`.
#[derive(Clone, Debug)]
pub struct Toy {
    /// `general.architecture`, and the prefix of the keys.
    pub architecture: &'static str,
    /// Layers.
    pub layers: usize,
    /// Width of the residual stream.
    pub width: usize,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads.
    pub kv_heads: usize,
    /// Channels per head, written to the file; `width / heads` and not written when `None`.
    pub head_dim: Option<usize>,
    /// Neurons per layer.
    pub ffn: usize,
    /// Context length.
    pub context: usize,
    /// Base of the rotation.
    pub rope_base: f32,
    /// Channels per head that turn; all when `None`.
    pub rope_dims: Option<usize>,
    /// Pairs are neighbours, as in Llama's files, or else halves of a head (NeoX).
    pub rope_adjacent: bool,
    /// Stretching of positions.
    pub rope_scaling: RopeScaling,
    /// Keys that a query sees, its own included; all when `None`.
    pub sliding_window: Option<usize>,
    /// The embeddings are the output matrix too.
    pub tied: bool,
    /// Experts, if any.
    pub experts: Option<ToyExperts>,
    /// Width inside the predictors of firing neurons, if the file has some.
    pub predictor_rank: Option<usize>,
    /// `neuropil.ffn_activation`: `silu`, `gelu`, `relu`, `relu2`, `drelu`; the architecture's and not written when
    /// `None`.
    pub activation: Option<&'static str>,
    /// `neuropil.ffn_activation_threshold`.
    pub threshold: Option<f32>,
    /// Types of tensors by a part of their name; the first entry that fits decides, F32 when none does. Norms stay
    /// F32.
    pub dtypes: Vec<(&'static str, DType)>,
    /// `tokenizer.chat_template`.
    pub chat_template: Option<String>,
    /// `tokenizer.ggml.add_bos_token`; not written when `None`.
    pub add_bos: Option<bool>,
    /// `tokenizer.ggml.add_space_prefix`; not written when `None`.
    pub add_space_prefix: Option<bool>,
    /// Where the weights come from.
    pub seed: u64,
}

impl Default for Toy {
    fn default() -> Self {
        Toy {
            architecture: "llama",
            layers: 2,
            width: 256,
            heads: 4,
            kv_heads: 2,
            head_dim: None,
            ffn: 512,
            context: 128,
            rope_base: 10_000.0,
            rope_dims: None,
            rope_adjacent: true,
            rope_scaling: RopeScaling::None,
            sliding_window: None,
            tied: false,
            experts: None,
            predictor_rank: None,
            activation: None,
            threshold: None,
            dtypes: Vec::new(),
            chat_template: None,
            add_bos: Some(true),
            add_space_prefix: Some(false),
            seed: 1,
        }
    }
}

/// Tokens of the vocabulary: four special ones, then one per byte.
pub const VOCABULARY: usize = 260;
/// Unknown.
pub const UNK: u32 = 0;
/// Beginning of text.
pub const BOS: u32 = 1;
/// End of text.
pub const EOS: u32 = 2;
/// A control token, `<|end|>`.
pub const END: u32 = 3;
/// Epsilon of the norms.
pub const EPSILON: f32 = 1e-5;

/// The tokens of a text, one per byte, without BOS.
pub fn tokens(text: &str) -> Vec<u32> {
    text.bytes().map(|b| END + 1 + u32::from(b)).collect()
}

/// A toy with its weights.
#[derive(Clone, Debug)]
pub struct ToyModel {
    /// What it was built from.
    pub toy: Toy,
    /// Embeddings, `VOCABULARY` rows.
    pub token_embd: Weight,
    /// The layers.
    pub layers: Vec<Layer>,
    /// The last norm.
    pub output_norm: Weight,
    /// The output matrix, unless tied.
    pub output: Option<Weight>,
    /// Frequency divisors, one per pair (Llama 3 scaling).
    pub rope_freqs: Option<Weight>,
}

impl Toy {
    /// Channels per head.
    pub fn head_dim(&self) -> usize {
        self.head_dim.unwrap_or(self.width / self.heads)
    }

    /// Rotated channels per head.
    pub fn rope_dims(&self) -> usize {
        self.rope_dims.unwrap_or(self.head_dim())
    }

    /// Neurons of a layer, or of each of its experts.
    pub fn neurons(&self) -> usize {
        self.experts.and_then(|experts| experts.neurons).unwrap_or(self.ffn)
    }

    /// The non-linearity: what the file says, or what its architecture means.
    pub fn activation(&self) -> &'static str {
        self.activation.unwrap_or(match self.architecture {
            "bamboo" | "turbosparsemixtral" => "drelu",
            "smallthinker" => "relu",
            _ => "silu",
        })
    }

    /// Whether a layer sees all positions and does not rotate although the model has a window.
    pub fn sees_all(&self, layer: usize) -> bool {
        self.architecture == "smallthinker" && self.sliding_window.is_some() && layer.is_multiple_of(4)
    }

    /// Draws the weights.
    ///
    /// # Panics
    /// When a row is not a whole number of blocks of its type.
    pub fn model(&self) -> ToyModel {
        let width = self.width;
        let (q, kv) = (self.heads * self.head_dim(), self.kv_heads * self.head_dim());
        let layer = |n: usize| {
            let norm = |name: &str| self.norm(&format!("blk.{n}.{name}.weight"));
            let matrix = |name: &str, rows, cols, gain| {
                self.matrix(&format!("blk.{n}.{name}.weight"), rows, cols, gain)
            };
            Layer {
                attn_norm: norm("attn_norm"),
                attn_q: matrix("attn_q", q, width, 1.5),
                attn_k: matrix("attn_k", kv, width, 1.0),
                attn_v: matrix("attn_v", kv, width, 1.0),
                attn_output: matrix("attn_output", width, q, 3.0),
                ffn_norm: norm("ffn_norm"),
                ffn_gate: self.feed_forward(n, "gate", self.neurons(), width, 1.0),
                ffn_up: self.feed_forward(n, "up", self.neurons(), width, 1.0),
                ffn_down: self.feed_forward(n, "down", width, self.neurons(), 5.0),
                ffn_gate_inp: self.experts.map(|e| matrix("ffn_gate_inp", e.count, width, 2.0)),
                predictors: self.predictors(n),
            }
        };
        let embd = |name: &str| self.matrix(name, VOCABULARY, width, 4.0);
        ToyModel {
            token_embd: embd("token_embd.weight"),
            layers: (0..self.layers).map(layer).collect(),
            output_norm: self.norm("output_norm.weight"),
            output: (!self.tied).then(|| embd("output.weight")),
            rope_freqs: self.rope_freqs(),
            toy: self.clone(),
        }
    }

    /// A matrix of a layer's feed-forward, or those of all its experts.
    fn feed_forward(&self, layer: usize, part: &str, rows: usize, cols: usize, gain: f32) -> Weight {
        match self.experts {
            None => self.matrix(&format!("blk.{layer}.ffn_{part}.weight"), rows, cols, gain),
            Some(ToyExperts { count, .. }) => {
                let name = format!("blk.{layer}.ffn_{part}_exps.weight");
                let all = self.matrix(&name, count * rows, cols, gain);
                Weight { experts: Some(count), ..all }
            }
        }
    }

    fn predictors(&self, layer: usize) -> Vec<[Weight; 2]> {
        let Some(rank) = self.predictor_rank else { return Vec::new() };
        let of = |suffix: String| {
            [("fc1", rank, self.width), ("fc2", self.neurons(), rank)].map(|(part, rows, cols)| {
                self.matrix(&format!("blk.{layer}.{part}{suffix}.weight"), rows, cols, 1.0)
            })
        };
        match self.experts {
            None => vec![of(String::new())],
            Some(experts) => (0..experts.count).map(|expert| of(format!(".{expert}"))).collect(),
        }
    }

    fn norm(&self, name: &str) -> Weight {
        let mut random = Random::new(self.seed, name);
        let values: Vec<f32> = (0..self.width).map(|_| 1.0 + 0.1 * random.normal()).collect();
        Weight::new(name, DType::F32, 1, self.width, &values)
    }

    /// A matrix that turns inputs of size 1 into outputs of size `gain`.
    fn matrix(&self, name: &str, rows: usize, cols: usize, gain: f32) -> Weight {
        let dtype = self.dtypes.iter().find(|(part, _)| name.contains(part)).map_or(DType::F32, |(_, t)| *t);
        let mut random = Random::new(self.seed, name);
        let scale = gain / (cols as f32).sqrt();
        let values: Vec<f32> = (0..rows * cols).map(|_| scale * random.normal()).collect();
        Weight::new(name, dtype, rows, cols, &values)
    }

    fn rope_freqs(&self) -> Option<Weight> {
        let RopeScaling::Llama3 { factor, low, high, original } = self.rope_scaling else { return None };
        let dims = self.rope_dims();
        let divisor = |pair: usize| {
            let wavelength = std::f32::consts::TAU * self.rope_base.powf(2.0 * pair as f32 / dims as f32);
            let turns = original as f32 / wavelength;
            let fast = ((turns - low) / (high - low)).clamp(0.0, 1.0);
            1.0 / ((1.0 - fast) / factor + fast)
        };
        let values: Vec<f32> = (0..dims / 2).map(divisor).collect();
        Some(Weight::new("rope_freqs.weight", DType::F32, 1, values.len(), &values))
    }
}

impl ToyModel {
    /// The tensors in the order of the file.
    pub fn weights(&self) -> Vec<&Weight> {
        let mut all = vec![&self.token_embd];
        all.extend(&self.rope_freqs);
        all.extend(self.layers.iter().flat_map(Layer::weights));
        all.push(&self.output_norm);
        all.extend(&self.output);
        all
    }

    /// The same function with the other pairing of rotated channels: rows of Q and K are put in the other order.
    pub fn neox_twin(&self) -> ToyModel {
        assert!(self.toy.rope_adjacent, "the twin is made from neighbours to halves");
        let (dim, pairs) = (self.toy.head_dim(), self.toy.rope_dims() / 2);
        let from = |row: usize| {
            let (head, channel) = (row / dim * dim, row % dim);
            head + match channel {
                c if c < pairs => 2 * c,
                c if c < 2 * pairs => 2 * (c - pairs) + 1,
                c => c,
            }
        };
        let mut twin = self.clone();
        twin.toy.rope_adjacent = false;
        for layer in &mut twin.layers {
            layer.attn_q = layer.attn_q.reordered(from);
            layer.attn_k = layer.attn_k.reordered(from);
        }
        twin
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn llama3_divisors_are_the_published_ones() {
        let toy = Toy {
            head_dim: Some(64),
            rope_base: 500_000.0,
            rope_scaling: RopeScaling::Llama3 { factor: 32.0, low: 1.0, high: 4.0, original: 8192 },
            ..Toy::default()
        };
        let divisors = toy.rope_freqs().unwrap().values;
        assert!(divisors[..15].iter().all(|d| *d == 1.0));
        for (pair, want) in [(15, 1.6513), (16, 3.2923), (17, 9.6667)] {
            assert!((divisors[pair] - want).abs() < 1e-3 * want, "{pair}: {}", divisors[pair]);
        }
        assert!(divisors[18..].iter().all(|d| (*d - 32.0).abs() < 1e-4));
    }

    #[test]
    fn an_option_changes_its_own_tensors_only() {
        let (a, b) = (Toy::default().model(), Toy { tied: true, ffn: 256, ..Toy::default() }.model());
        assert_eq!(a.token_embd.bytes, b.token_embd.bytes);
        assert_eq!(a.layers[1].attn_q.bytes, b.layers[1].attn_q.bytes);
        assert_ne!(a.layers[0].attn_q.bytes, a.layers[1].attn_q.bytes);
        assert_ne!(a.token_embd.bytes, Toy { seed: 2, ..Toy::default() }.model().token_embd.bytes);
    }
}
