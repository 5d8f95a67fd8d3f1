//! Llama models small enough to check by hand: every shape, type and option of a stock file, random weights.
//!
//! A [`Toy`] is the description, a [`ToyModel`] its weights. Each tensor is drawn from the seed and its own name, so
//! changing one option leaves the other tensors as they are, and two models that should agree can be compared.
//! Gains are chosen so that attention is uneven, no layer drowns the others and the best logit leads by about 1.

use neuropil_device::DType;

use crate::codec;

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
    /// `neuropil.ffn_activation`: `silu`, `gelu`, `relu`, `relu2`, `drelu`; `silu` and not written when `None`.
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

/// One tensor: as stored, and the values that stands for.
#[derive(Clone, Debug)]
pub struct Weight {
    /// Name in the file.
    pub name: String,
    /// Type in the file.
    pub dtype: DType,
    /// Rows: outputs. 1 for a vector.
    pub rows: usize,
    /// Columns: inputs.
    pub cols: usize,
    /// The bytes in the file.
    pub bytes: Vec<u8>,
    /// What the bytes mean, row after row.
    pub values: Vec<f32>,
}

impl Weight {
    /// Stores values in a type.
    pub fn new(name: &str, dtype: DType, rows: usize, cols: usize, values: &[f32]) -> Weight {
        let bytes = codec::encode(dtype, values);
        let values = codec::decode(dtype, &bytes);
        Weight { name: name.into(), dtype, rows, cols, bytes, values }
    }

    /// The rows in another order: row `i` of the result is row `from(i)`.
    fn reordered(&self, from: impl Fn(usize) -> usize) -> Weight {
        let size = self.bytes.len() / self.rows;
        let bytes = (0..self.rows).flat_map(|i| &self.bytes[from(i) * size..][..size]).copied().collect();
        let values = (0..self.rows).flat_map(|i| &self.values[from(i) * self.cols..][..self.cols]).copied();
        Weight { bytes, values: values.collect(), name: self.name.clone(), ..*self }
    }
}

/// The tensors of one layer, named as in the file.
#[derive(Clone, Debug)]
#[allow(missing_docs)] // the fields are the tensors' names
pub struct Layer {
    pub attn_norm: Weight,
    pub attn_q: Weight,
    pub attn_k: Weight,
    pub attn_v: Weight,
    pub attn_output: Weight,
    pub ffn_norm: Weight,
    pub ffn_gate: Weight,
    pub ffn_up: Weight,
    pub ffn_down: Weight,
}

impl Layer {
    /// The tensors in the order of the file.
    pub fn weights(&self) -> [&Weight; 9] {
        let Layer { attn_norm, attn_q, attn_k, attn_v, attn_output, ffn_norm, ffn_gate, ffn_up, ffn_down } =
            self;
        [attn_norm, attn_q, attn_k, attn_v, attn_output, ffn_norm, ffn_gate, ffn_up, ffn_down]
    }
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

    /// Draws the weights.
    ///
    /// # Panics
    /// When a row is not a whole number of blocks of its type.
    pub fn model(&self) -> ToyModel {
        let (width, ffn) = (self.width, self.ffn);
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
                ffn_gate: matrix("ffn_gate", ffn, width, 1.0),
                ffn_up: matrix("ffn_up", ffn, width, 1.0),
                ffn_down: matrix("ffn_down", width, ffn, 5.0),
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

/// Numbers that are the same everywhere and for ever (xorshift64*).
struct Random(u64);

impl Random {
    fn new(seed: u64, name: &str) -> Random {
        let mix = |h: u64, b: u8| (h ^ u64::from(b)).wrapping_mul(0x0000_0100_0000_01b3);
        let hash = seed.to_le_bytes().into_iter().chain(name.bytes()).fold(0xcbf2_9ce4_8422_2325, mix);
        Random(hash | 1)
    }

    /// From -1 to 1.
    fn uniform(&mut self) -> f32 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        let bits = self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 40;
        bits as f32 / (1u64 << 23) as f32 - 1.0
    }

    /// Mean 0, variance 1, nearly normal: a sum of three uniform numbers.
    fn normal(&mut self) -> f32 {
        self.uniform() + self.uniform() + self.uniform()
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
