//! What the residual stream of a synthetic model holds, column by column.
//!
//! ```text
//!  0        32                                                                            width
//!  ├─ ones ─┼─ local ──────────────┬─ topic ─────────────┼─ token ──────────┼─ nothing ────┤
//!             a running mean of      the mean of the       a code of the
//!             the last tokens        first few tokens      token alone
//! ```
//!
//! *Ones* holds one large constant, so that a gate row has a threshold without a bias, and a mark of the BOS token. No
//! layer writes to it. The other parts are signs, random for each token and of one size, so that every stream is equally
//! long. The first attention layer that knows positions makes the running means: its scores depend on the distance
//! alone, and fall by −ln ρ for each position. So the local part is an AR(1) series with coefficient ρ.
//!
//! With a predictor each part is cut in two: columns that the predictor sees, and columns hidden from it. The share of
//! the energy in the hidden ones is the noise that it works with.
//!
//! All sizes here are in units of the constant; the three parts together have the length of the constant.

use super::Shape;
use super::firing::Preset;
use super::normal::bisect;
use super::row::BLOCK;

/// What a token's own embedding adds to a mean, in shares of the mean's size.
const OWN: f64 = 0.05;

/// Each token counts for so much of the one before in the topic.
const TOPIC_DECAY: f64 = 0.7;

/// How often two bytes of a text are the same. Equal tokens add up, so bytes are smaller than words, or else a prompt
/// would make every neuron loud.
const SAME_BYTES: f64 = 0.07;

/// The most that adjacent local parts are alike.
const MOST_LOCAL: f64 = 0.99;

/// The most columns that running means take.
const MOST_MEANS: usize = 1024;

/// What layers add to the stream, each, in shares of its size.
pub(super) const LAYER_SHARE: f64 = 0.02;

/// A stretch of columns whose signs have one size.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Slice {
    /// The first column, a multiple of 32.
    pub start: usize,
    /// Columns, a multiple of 32.
    pub len: usize,
    /// Size of an embedding's values.
    pub size: f64,
    /// The same of BOS.
    pub bos_size: f64,
    /// The same of a byte.
    pub byte_size: f64,
    /// Whether a predictor sees it.
    pub seen: bool,
    /// Whether it is of the part of the token alone, which the output matrix reads.
    pub token: bool,
}

/// A head that makes running means: how its score falls with distance, and what it does with BOS.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Mean {
    /// Score lost for each position of distance; negative where distant tokens count most.
    pub slope: f64,
    /// Score of BOS above the others'.
    pub bos: f64,
    /// Whether the slope is for BOS too.
    pub bos_falls: bool,
    /// Factor on the mean of what the embeddings hold.
    pub gain: f64,
}

/// The columns of the stream, and what makes their contents.
#[derive(Clone, Debug)]
pub(super) struct Stream {
    /// The stretches, ascending.
    pub slices: Vec<Slice>,
    /// For each KV head that makes means, from head 0 and column 32 on, which one.
    pub heads: Vec<Mean>,
    /// Energy of an embedding, without the constant.
    pub embedded: f64,
}

/// One running mean: energy 1 is that of the constant.
#[derive(Clone, Copy, Debug)]
struct Blend {
    energy: f64,
    own: f64,
    gain: f64,
    /// Energy of the mean of many tokens of energy 1.
    square: f64,
}

impl Blend {
    /// The size of a byte in that of a word.
    fn byte(&self) -> f64 {
        (1.0 + SAME_BYTES * (1.0 / self.square - 1.0)).sqrt().recip()
    }
}

/// The local part with this energy whose adjacent values have this cosine, and ρ.
fn local(energy: f64, cosine: f64) -> (Blend, f64) {
    let own = OWN * energy.sqrt();
    let gain = |rho: f64| {
        // (own + G(1−ρ))² + G²(1−ρ)²ρ²/(1−ρ²) = energy
        let (first, square) = (1.0 - rho, (1.0 - rho) / (1.0 + rho));
        let half = own * first;
        ((half * half + square * (energy - own * own)).sqrt() - half) / square
    };
    let alike = |rho: f64| {
        let g = gain(rho) * (1.0 - rho);
        ((own + g) * g * rho + g * g * rho.powi(3) / (1.0 - rho * rho)) / energy
    };
    let rho = bisect([0.003, 0.997], |rho| alike(rho) < cosine);
    (Blend { energy, own, gain: gain(rho), square: (1.0 - rho) / (1.0 + rho) }, rho)
}

fn topic(energy: f64) -> Blend {
    let own = OWN * energy.sqrt();
    let square = (1.0 - TOPIC_DECAY) / (1.0 + TOPIC_DECAY);
    Blend { energy, own, gain: ((energy - own * own) / square).sqrt(), square }
}

impl Stream {
    /// The stream in which adjacent tokens have this cosine. `seen_columns` of a predictor see the share `seen` of the
    /// energy.
    pub(super) fn new(
        shape: &Shape,
        preset: &Preset,
        cosine: f64,
        predictor: Option<(usize, f64)>,
    ) -> Stream {
        let of_topic = preset.topic.min(0.5 * cosine);
        let white = preset.white.min(1.0 - of_topic - (cosine - of_topic) / MOST_LOCAL);
        let of_local = 1.0 - of_topic - white;
        let (local, rho) = local(of_local, (cosine - of_topic) / of_local);
        let topic = topic(of_topic);

        let token_columns = if shape.width < 1024 { 64 } else { 256 };
        let room = shape.width.saturating_sub(BLOCK + token_columns).min(MOST_MEANS);
        let heads = (room / shape.head_dim).min(shape.kv_heads);
        let topic_heads = if of_topic > 0.0 { (heads / 4).max(1) } else { 0 };
        let columns = [(heads - topic_heads) * shape.head_dim, topic_heads * shape.head_dim, token_columns];

        let seen = share_out(predictor.map_or(0, |(columns, _)| columns / BLOCK), columns);
        let share = predictor.map_or(0.0, |(_, share)| share);
        let own = [local.own, topic.own, white.sqrt()];
        // BOS is a mean of many tokens, those that were before the text.
        let bos = [local.own * local.square.sqrt(), topic.own * topic.square.sqrt(), white.sqrt()];
        let byte = [local.own * local.byte(), topic.own * topic.byte(), white.sqrt()];
        let (mut slices, mut start) = (Vec::new(), BLOCK);
        for part in 0..3 {
            let seen = seen[part] * BLOCK;
            for (len, share, seen) in [(seen, share, true), (columns[part] - seen, 1.0 - share, false)] {
                let share = if predictor.is_none() { 1.0 } else { share };
                let each = if len == 0 { 0.0 } else { (share / len as f64).sqrt() };
                let [size, bos_size, byte_size] = [own, bos, byte].map(|sizes| sizes[part] * each);
                if len > 0 {
                    slices.push(Slice { start, len, size, bos_size, byte_size, seen, token: part == 2 });
                }
                start += len;
            }
        }

        let embedded = own.iter().map(|own| own * own).sum::<f64>();
        // The norm before attention divides by the root mean square of the embedding.
        let norm = ((1.0 + embedded) / 2.0).sqrt();
        let mean = |slope: f64, bos: f64, blend: &Blend| {
            let gain = if blend.energy > 0.0 { blend.gain / blend.own * norm } else { 0.0 };
            Mean { slope, bos, bos_falls: slope > 0.0, gain }
        };
        // BOS has the weight of all tokens before it; in the topic, where distant tokens count, of all after the last.
        let local = mean(-rho.ln(), -(1.0 - rho).ln(), &local);
        let topic = mean(TOPIC_DECAY.ln(), (TOPIC_DECAY / (1.0 - TOPIC_DECAY)).ln(), &topic);
        let mut means = vec![local; heads - topic_heads];
        means.resize(heads, topic);
        Stream { slices, heads: means, embedded }
    }

    /// Energy of what the feed-forward of a layer reads, without the constant.
    pub(super) fn energy(&self, layer: usize, first_rotating: usize) -> f64 {
        let start = if layer < first_rotating { self.embedded } else { 1.0 };
        start + 2.0 * layer as f64 * LAYER_SHARE * LAYER_SHARE
    }

    /// The columns that a predictor sees.
    pub(super) fn seen(&self) -> Vec<usize> {
        let slices = self.slices.iter().filter(|slice| slice.seen);
        slices.flat_map(|slice| slice.start..slice.start + slice.len).collect()
    }
}

/// Blocks that a predictor sees in each part: at least one, at most half, and otherwise in proportion.
fn share_out(mut blocks: usize, columns: [usize; 3]) -> [usize; 3] {
    let most = columns.map(|columns| columns / BLOCK / 2);
    let mut seen = [0; 3];
    while blocks > 0 {
        let open = (0..3).filter(|part| seen[*part] < most[*part]);
        // The part of which the smallest share is seen comes next.
        let Some(next) = open.min_by_key(|part| seen[*part] * 4096 / most[*part]) else { break };
        seen[next] += 1;
        blocks -= 1;
    }
    seen
}

#[cfg(test)]
mod tests {
    use super::super::firing::PRESETS;
    use super::super::shapes::SHAPES;
    use super::*;

    #[test]
    fn every_shape_has_room_for_its_parts() {
        for shape in SHAPES {
            for preset in &PRESETS {
                for predictor in [None, Some((96, 0.9)), Some((992, 0.99))] {
                    let stream = Stream::new(&shape, preset, 0.9, predictor);
                    let last = stream.slices.last().unwrap();
                    assert!(last.start + last.len <= shape.width, "{}", shape.name);
                    assert!(!stream.heads.is_empty() && stream.heads.len() <= shape.kv_heads);
                    assert!(stream.slices.iter().all(|s| s.start.is_multiple_of(32) && s.size.is_finite()));
                    let energy: f64 = stream.slices.iter().map(|s| s.len as f64 * s.size * s.size).sum();
                    assert!((energy - stream.embedded).abs() < 1e-9, "{}: {energy}", shape.name);
                    assert!(predictor.is_none() == stream.seen().is_empty());
                    assert!(stream.seen().len() <= predictor.map_or(0, |(columns, _)| columns));
                }
            }
        }
    }

    #[test]
    fn a_running_mean_has_the_energy_and_the_cosine_asked_for() {
        for (energy, cosine) in [(0.9, 0.5), (0.78, 0.95), (1.0, 0.02)] {
            let (blend, rho) = local(energy, cosine);
            let weight = |age: i32| {
                let own = if age == 0 { blend.own } else { 0.0 };
                own + blend.gain * (1.0 - rho) * rho.powi(age)
            };
            let sum = |lag: i32| (0..5000).map(|age| weight(age) * weight(age + lag)).sum::<f64>();
            assert!((sum(0) - energy).abs() < 1e-6);
            assert!((sum(1) / energy - cosine).abs() < 1e-6, "{cosine}");
        }
    }
}
