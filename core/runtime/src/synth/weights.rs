//! The weights of a synthetic model, row by row.
//!
//! A gate row is random, and its first block holds one value: with the constant of the stream that is the neuron's
//! threshold. Up and down rows are random; down rows write nothing to the constant, and so little to the rest that the
//! last layer reads nearly what the first one does. Attention is random and faint but for the layer that makes the
//! running means (see [`super::stream`]). A predictor is a part of the gate: its first layer takes the columns that it
//! sees apart, each as a pair with either sign because a ReLU follows, and its second layer repeats the gate's codes.
//!
//! The most likely token after token i is token i + a constant, modulo the vocabulary: a greedy text walks through all
//! of it, and no two adjacent tokens have anything in common.

use neuropil_device::ActivationKind;

use super::firing::{Firing, threshold, union};
use super::normal::rectified_square;
use super::random::Key;
use super::row::{BLOCK, CODE_DEVIATION, Row, SIGN_CODE, code_of, random_codes, sign_codes};
use super::stream::{LAYER_SHARE, Mean, Stream};
use super::vocabulary::{self, BOS, FIRST_WORD};
use super::{Predictor, Shape};

/// The kinds of random numbers.
mod tag {
    pub(super) const EMBEDDING: u64 = 1;
    pub(super) const ATTENTION: u64 = 2;
    pub(super) const GATE: u64 = 3;
    pub(super) const UP: u64 = 4;
    pub(super) const DOWN: u64 = 5;
    pub(super) const ROUTER: u64 = 6;
    pub(super) const ORDER: u64 = 7;
    pub(super) const PROMPT: u64 = 8;
    pub(super) const POPULAR: u64 = 9;
}

/// BOS is marked by this share of the constant, one code of a block whose largest is the constant.
const MARK: f64 = 1.0 / 7.0;

/// Size of the output matrix's values.
const OUTPUT: f32 = 0.15;

/// Deviation of a router's logits.
const ROUTER: f64 = 2.0;

/// A matrix of attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Projection {
    Query,
    Key,
    Value,
    Output,
}

/// A matrix of a feed-forward layer, by neuron.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Part {
    Gate,
    Up,
    /// The row of one neuron.
    Down,
}

/// What there is to know of one neuron.
#[derive(Clone, Copy, Debug)]
struct Neuron {
    /// Thresholds of gate and up, in deviations.
    gate: f32,
    up: f32,
    /// How often it fires.
    frequency: f32,
}

/// The neurons of the layers that share a distribution.
#[derive(Clone)]
struct Group {
    neurons: Vec<Neuron>,
    /// Scale of the codes of down rows.
    down: f32,
}

/// Makes the rows of all tensors.
#[derive(Clone)]
pub(super) struct Weights {
    pub(super) shape: Shape,
    pub(super) predictor: Option<Predictor>,
    stream: Stream,
    firing: Firing,
    skew: f64,
    seed: u64,
    /// Of the layers in the first group of distributions, and of the others.
    groups: [Group; 2],
    /// Columns that the predictor sees, and its correlation with the gate.
    seen: Vec<usize>,
    correlation: f64,
    /// The numbers of the layers whose neurons are made: not all, when a part of a model is.
    neuron_layers: Vec<usize>,
}

impl Weights {
    /// The weights of `shape` that fire as `firing` says, in a stream where adjacent tokens have what it asks for.
    pub(super) fn new(
        shape: Shape,
        (stream, firing): (Stream, Firing),
        predictor: Option<(Predictor, f64)>,
        skew: f64,
        seed: u64,
    ) -> Weights {
        let drelu = shape.activation.kind == ActivationKind::Drelu;
        let group = |layer: usize| {
            let frequencies = firing.layer(layer);
            let mut square = 0.0;
            let neurons = (0..shape.neurons).map(|position| {
                let frequency = frequencies.at(position, shape.neurons);
                let (gate, up) = (threshold(frequency.gate), threshold(frequency.up));
                square += rectified_square(gate) * if drelu { rectified_square(up) } else { 1.0 };
                let up = if drelu { up } else { 0.0 };
                Neuron { gate: gate as f32, up: up as f32, frequency: frequency.both as f32 }
            });
            let neurons = neurons.collect();
            // The results of several experts are averaged.
            let used = shape.experts.map_or(1, |experts| experts.used) as f64;
            let length = (shape.width as f64 * square / used).sqrt();
            let down = LAYER_SHARE * constant(&shape) / length / CODE_DEVIATION;
            Group { neurons, down: down as f32 }
        };
        let groups = [group(0), group(shape.layers - 1)];
        let (predictor, correlation) = predictor.unzip();
        let neuron_layers = (0..shape.layers).collect();
        let seen = stream.seen();
        let correlation = correlation.unwrap_or(0.0);
        Weights { shape, predictor, stream, firing, skew, seed, groups, seen, correlation, neuron_layers }
    }

    /// A cut of the model: attention of its first layers, and the neurons of some layers.
    pub(super) fn cut(&self, neuron_layers: Vec<usize>) -> Weights {
        let mut cut = self.clone();
        cut.shape.layers = neuron_layers.len();
        cut.neuron_layers = neuron_layers;
        cut
    }

    fn group(&self, layer: usize) -> &Group {
        let same = std::ptr::eq(self.firing.layer(self.neuron_layers[layer]), self.firing.layer(0));
        &self.groups[usize::from(!same)]
    }

    fn key(&self, tag: u64, layer: usize, expert: usize) -> Key {
        Key::new(self.seed, tag, layer, expert)
    }

    /// The deviation of random values that turns the normed stream into values of deviation 1.
    fn unit(&self) -> f64 {
        (2.0 / self.shape.width as f64).sqrt()
    }

    /// A row of the embedding.
    pub(super) fn embedding(&self, token: usize, row: &mut Row) {
        row.reset(self.shape.width);
        let constant = constant(&self.shape);
        row.set_value(0, constant as f32);
        if token == BOS {
            row.set_code(1, 1, (constant * MARK) as f32);
        }
        let signs = self.key(tag::EMBEDDING, 0, 0).row(token);
        for slice in &self.stream.slices {
            let size = match token {
                BOS => slice.bos_size,
                token if token < FIRST_WORD => slice.byte_size,
                _ => slice.size,
            };
            for block in slice.start / BLOCK..(slice.start + slice.len) / BLOCK {
                let scale = constant * size / f64::from(SIGN_CODE);
                row.set_block(block, sign_codes(signs.at(block)), scale as f32);
            }
        }
    }

    /// A row of the output matrix: what the token before this one is known by.
    pub(super) fn output(&self, token: usize, row: &mut Row) {
        row.reset(self.shape.width);
        let Some(before) = vocabulary::before(token, self.shape.vocab) else { return };
        let signs = self.key(tag::EMBEDDING, 0, 0).row(before);
        for slice in self.stream.slices.iter().filter(|slice| slice.token) {
            for block in slice.start / BLOCK..(slice.start + slice.len) / BLOCK {
                row.set_block(block, sign_codes(signs.at(block)), OUTPUT / f32::from(SIGN_CODE));
            }
        }
    }

    /// A row of an attention matrix.
    pub(super) fn attention(&self, which: Projection, layer: usize, index: usize, row: &mut Row) {
        let Shape { width, heads, kv_heads, head_dim, .. } = self.shape;
        let q = heads * head_dim;
        let cols = if which == Projection::Output { q } else { width };
        row.reset(cols);
        let makes_means = layer == self.shape.first_rotating();
        let (head, channel) = (index / head_dim, index % head_dim);
        let shared = heads / kv_heads;
        match which {
            Projection::Output if makes_means => {
                let Some(column) = index.checked_sub(BLOCK) else { return };
                let (head, channel) = (column / head_dim, column % head_dim);
                if let Some(mean) = self.stream.heads.get(head) {
                    row.set_value(head * shared * head_dim + channel, mean.gain as f32);
                }
            }
            Projection::Output => {
                if index >= BLOCK {
                    let length = (0.5 * width as f64 * q as f64).sqrt();
                    let deviation = LAYER_SHARE * constant(&self.shape) / length;
                    self.random(tag::ATTENTION + 16 * which as u64, layer, index, 0, deviation, row);
                }
            }
            Projection::Query if makes_means && head.is_multiple_of(shared) => {
                match self.stream.heads.get(head / shared) {
                    Some(mean) => self.query(mean, channel, row),
                    None => self.faint(which, layer, index, row),
                }
            }
            Projection::Key | Projection::Value if makes_means && head < self.stream.heads.len() => {
                if which == Projection::Value {
                    row.set_value(BLOCK + index, 1.0);
                } else if let Some(mean) = self.stream.heads.get(head) {
                    self.key_row(mean, channel, row);
                }
            }
            _ => self.faint(which, layer, index, row),
        }
    }

    fn faint(&self, which: Projection, layer: usize, index: usize, row: &mut Row) {
        let tag = tag::ATTENTION + 16 * which as u64;
        self.random(tag, layer, index, 1, self.unit(), row);
    }

    /// The two pairs of rotated channels that scores are made with: that of the slope, and that of BOS; the first with
    /// its angle per position.
    fn pairs(&self) -> ([usize; 2], f64) {
        let Shape { head_dim, rope_base, context, .. } = self.shape;
        let angle = |pair: usize| f64::from(rope_base).powf(-2.0 * pair as f64 / head_dim as f64);
        // A sine of the distance, slow enough to stand for the distance itself in the whole context.
        let last = head_dim / 2 - 1;
        let slope = (0..last).find(|pair| angle(*pair) * context as f64 <= 2.5).unwrap_or(last - 1);
        ([slope, last], angle(slope))
    }

    /// Both channels of a pair.
    fn channels(&self, pair: usize) -> [usize; 2] {
        if self.shape.rope_adjacent() {
            [2 * pair, 2 * pair + 1]
        } else {
            [pair, pair + self.shape.head_dim / 2]
        }
    }

    /// What a query and a key hold for the slope and for BOS; the products are scores times the root of the head.
    fn score(&self, mean: &Mean) -> ([f64; 2], f64) {
        let root = (self.shape.head_dim as f64).sqrt();
        let (_, angle) = self.pairs();
        let slope = mean.slope / angle * root;
        ([slope.abs().sqrt().copysign(slope), slope.abs().sqrt()], mean.bos * root)
    }

    /// The constant, as the norm of the first attention layers leaves it.
    fn normed_constant(&self) -> f64 {
        (self.shape.width as f64 / (1.0 + self.stream.embedded)).sqrt()
    }

    fn query(&self, mean: &Mean, channel: usize, row: &mut Row) {
        let ([slope, bos], _) = self.pairs();
        let ([query, _], boost) = self.score(mean);
        // Turned a quarter against the key: the product is the sine of the distance, which falls from 0.
        if channel == self.channels(slope)[1] {
            row.set_value(0, (query / self.normed_constant()) as f32);
        } else if channel == self.channels(bos)[0] {
            row.set_value(0, (boost / BOS_KEY / self.normed_constant()) as f32);
        }
    }

    fn key_row(&self, mean: &Mean, channel: usize, row: &mut Row) {
        let ([slope, bos], _) = self.pairs();
        let ([_, key], _) = self.score(mean);
        if channel == self.channels(slope)[0] {
            let value = (key / self.normed_constant()) as f32;
            row.set_code(0, 1, value);
            if !mean.bos_falls {
                // What the mark takes away is all that BOS has.
                row.set_code(1, -7, value);
            }
        } else if channel == self.channels(bos)[0] {
            row.set_value(1, (BOS_KEY / MARK / self.normed_constant()) as f32);
        }
    }

    /// The row of a neuron.
    pub(super) fn neuron(&self, part: Part, layer: usize, expert: usize, position: usize, row: &mut Row) {
        row.reset(self.shape.width);
        let group = self.group(layer);
        let neuron = group.neurons[position];
        let number = self.neuron_layers[layer];
        let (tag, deviation) = match part {
            Part::Gate => (tag::GATE, self.unit()),
            Part::Up => (tag::UP, self.unit()),
            Part::Down => (tag::DOWN, f64::from(group.down) * CODE_DEVIATION),
        };
        self.random_of(self.key(tag, number, expert), position, 1, deviation, row);
        let threshold = match part {
            Part::Gate => neuron.gate,
            Part::Up => neuron.up,
            Part::Down => return,
        };
        // The cut of FATReLU is in units of the gate.
        let cut = f64::from(self.shape.activation.threshold);
        row.set_value(0, (-self.unit() * (f64::from(threshold) * self.energy(layer).sqrt() - cut)) as f32);
    }

    /// A value of the stream's constant counts as one deviation of the gate for each unit of this root.
    fn energy(&self, layer: usize) -> f64 {
        self.stream.energy(layer, self.shape.first_rotating())
    }

    /// A row of a predictor's first layer.
    pub(super) fn predictor_first(&self, index: usize, row: &mut Row) {
        row.reset(self.shape.width);
        if index == 0 {
            row.set_value(0, 1.0);
        } else if let Some(pair) = index.checked_sub(BLOCK)
            && let Some(column) = self.seen.get(pair / 2)
        {
            row.set_value(*column, if pair.is_multiple_of(2) { 1.0 } else { -1.0 });
        }
    }

    /// A row of a predictor's second layer, that of one neuron.
    pub(super) fn predictor_second(&self, layer: usize, expert: usize, position: usize, row: &mut Row) {
        let Some(predictor) = self.predictor else { return };
        row.reset(predictor.rank);
        let neuron = self.group(layer).neurons[position];
        let unit = self.unit();
        let threshold = f64::from(neuron.gate) * self.correlation * self.energy(layer).sqrt();
        row.set_value(0, (-unit * threshold) as f32);
        let gate = self.key(tag::GATE, self.neuron_layers[layer], expert).row(position);
        for (columns, block) in self.seen.chunks(BLOCK / 2).zip(1..row.blocks()) {
            let Some(first) = columns.first() else { continue };
            let codes = block_codes(gate, first / BLOCK);
            let mut pairs = [0x88; BLOCK / 2];
            for (pair, column) in columns.iter().enumerate() {
                let code = code_of(&codes, column % BLOCK);
                for (i, code) in [(2 * pair, code), (2 * pair + 1, -code)] {
                    let nibble = (code + 8) as u8;
                    let byte = &mut pairs[i % 16];
                    *byte = if i < 16 { *byte & 0xf0 | nibble } else { *byte & 0x0f | nibble << 4 };
                }
            }
            row.set_block(block, pairs, (unit / CODE_DEVIATION) as f32);
        }
    }

    /// A row of a router.
    pub(super) fn router(&self, layer: usize, expert: usize, row: &mut Row) {
        row.reset(self.shape.width);
        let number = self.neuron_layers[layer];
        self.random(tag::ROUTER, number, expert, 1, ROUTER * self.unit(), row);
        if self.skew > 0.0 {
            // With the constant of the stream this is the same for all tokens.
            let experts = self.shape.expert_count();
            let rank = shuffled(self.key(tag::POPULAR, number, 0).row(0), experts)[expert];
            let popular = threshold((f64::from(rank) + 0.5) / experts as f64);
            row.set_value(0, (self.skew * ROUTER * popular / constant(&self.shape)) as f32);
        }
    }

    /// Where the neurons of a layer stood before they were sorted.
    pub(super) fn order(&self, layer: usize, expert: usize) -> Vec<i32> {
        shuffled(self.key(tag::ORDER, self.neuron_layers[layer], expert).row(0), self.shape.neurons)
    }

    /// How often the neurons of a layer fire, for a batch of so many tokens.
    pub(super) fn counts(&self, layer: usize, batch: usize) -> Vec<f32> {
        let neurons = &self.group(layer).neurons;
        neurons.iter().map(|n| union(f64::from(n.frequency), batch) as f32).collect()
    }

    /// Down as a matrix of an ordinary file, where a row runs over neurons: one output channel.
    pub(super) fn down_channel(&self, layer: usize, expert: usize, channel: usize, row: &mut Row) {
        row.reset(self.shape.neurons);
        if channel >= BLOCK {
            let deviation = f64::from(self.group(layer).down) * CODE_DEVIATION;
            let key = self.key(tag::DOWN, self.neuron_layers[layer], expert);
            self.random_of(key, channel, 0, deviation, row);
        }
    }

    fn random(&self, tag: u64, layer: usize, index: usize, first: usize, deviation: f64, row: &mut Row) {
        self.random_of(self.key(tag, layer, 0), index, first, deviation, row);
    }

    /// Fills the blocks of a row from block `first` on.
    fn random_of(&self, key: Key, index: usize, first: usize, deviation: f64, row: &mut Row) {
        let (key, scale) = (key.row(index), (deviation / CODE_DEVIATION) as f32);
        for block in first..row.blocks() {
            row.set_block(block, block_codes(key, block), scale);
        }
    }
}

/// The numbers up to `count`, shuffled.
fn shuffled(key: Key, count: usize) -> Vec<i32> {
    let mut order: Vec<i32> = (0..count as i32).collect();
    for i in (1..order.len()).rev() {
        order.swap(i, key.below(i, i + 1));
    }
    order
}

/// What the key of BOS holds in its pair, large enough for a half to be exact.
const BOS_KEY: f64 = 8.0;

/// The constant of the stream: half of the energy of a stream whose root mean square is 1.
fn constant(shape: &Shape) -> f64 {
    (shape.width as f64 / 2.0).sqrt()
}

#[inline]
fn block_codes(key: Key, block: usize) -> [u8; BLOCK / 2] {
    let halves = [key.at(2 * block), key.at(2 * block + 1)].map(|bits| random_codes(bits).to_le_bytes());
    let mut codes = [0; BLOCK / 2];
    codes[..8].copy_from_slice(&halves[0]);
    codes[8..].copy_from_slice(&halves[1]);
    codes
}

/// Tokens that make sense as a prompt: words of the vocabulary, chosen at random.
pub(super) fn prompt(seed: u64, sequence: usize, vocab: usize, count: usize) -> Vec<u32> {
    let key = Key::new(seed, tag::PROMPT, 0, 0).row(sequence);
    let word = |i| (FIRST_WORD + key.below(i, vocab - FIRST_WORD)) as u32;
    std::iter::once(BOS as u32).chain((0..count).map(word)).collect()
}

#[cfg(test)]
mod tests {
    use super::super::{PRESETS, Synth, SynthOptions};
    use super::*;

    fn weights(name: &str) -> Weights {
        let mut options = SynthOptions::new(Shape::named(name).unwrap(), PRESETS[0]);
        options.predictor = Some(Predictor { rank: 288, recall: 0.9 });
        Synth::new(options).unwrap().weights
    }

    fn codes(row: &Row, cols: usize) -> Vec<i8> {
        (0..cols).map(|col| row.code(col)).collect()
    }

    #[test]
    fn a_cut_has_the_neurons_of_the_whole() {
        let whole = weights("toy-experts");
        let cut = whole.cut(vec![0, 3]);
        let (mut a, mut b) = (Row::new(0), Row::new(0));
        for part in [Part::Gate, Part::Up, Part::Down] {
            whole.neuron(part, 3, 2, 17, &mut a);
            cut.neuron(part, 1, 2, 17, &mut b);
            assert_eq!(codes(&a, 512), codes(&b, 512));
        }
        whole.attention(Projection::Query, 1, 5, &mut a);
        cut.attention(Projection::Query, 1, 5, &mut b);
        assert_eq!(codes(&a, 512), codes(&b, 512));
        assert_eq!((whole.shape.layers, cut.shape.layers), (4, 2));
    }

    #[test]
    fn a_predictor_repeats_the_gate_in_pairs() {
        let weights = weights("toy");
        let (mut gate, mut second, mut first) = (Row::new(0), Row::new(0), Row::new(0));
        weights.neuron(Part::Gate, 1, 0, 9, &mut gate);
        weights.predictor_second(1, 0, 9, &mut second);
        assert_eq!(weights.seen.len(), 128);
        for (pair, column) in weights.seen.iter().enumerate() {
            let code = gate.code(*column);
            let at = BLOCK + 2 * pair;
            assert_eq!((second.code(at), second.code(at + 1)), (code, -code));
            weights.predictor_first(at, &mut first);
            assert_eq!(first.code(*column), 7);
        }
    }

    #[test]
    fn nothing_is_written_to_the_constant() {
        let weights = weights("toy");
        let mut row = Row::new(0);
        weights.neuron(Part::Down, 1, 0, 9, &mut row);
        assert_eq!(codes(&row, 32), [0; 32]);
        for channel in [0, 31] {
            for layer in [0, 1] {
                weights.attention(Projection::Output, layer, channel, &mut row);
                assert!(codes(&row, 512).iter().all(|code| *code == 0));
            }
            weights.down_channel(1, 0, channel, &mut row);
            assert!(codes(&row, 1024).iter().all(|code| *code == 0));
        }
    }

    #[test]
    fn the_order_is_an_order() {
        let mut order = weights("toy").order(2, 0);
        assert_ne!(order[..3], [0, 1, 2]);
        order.sort_unstable();
        assert!(order.iter().enumerate().all(|(i, position)| i as i32 == *position));
    }
}
