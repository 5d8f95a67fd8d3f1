//! The cases, one module per group, and what they share: shapes, token counts, inputs and weights.

pub mod buffer;
pub mod cluster;
pub mod completion;
pub mod device;
pub mod errors;
pub mod info;
pub mod matmul;
pub mod plan;
pub mod soak;
pub mod threads;
pub mod timing;
pub mod weight;

use std::cell::OnceCell;

use crate::bounds;
use crate::case::{Ended, Stop, compare};
use crate::raw::Failure;
use crate::reference::{Reference, widen};
use crate::sample::{Fill, Kind, Random};
use crate::subject::{Op, Question, Sampled, Subject};

/// Token counts of a unit that takes any.
const ANY: [usize; 4] = [1, 2, 5, 17];

/// More tokens than this take too long for a test.
const MOST_TOKENS: usize = 128;

/// Token counts to test: at most four that the unit takes, the least first.
pub fn tokens<S: Subject>(subject: &S) -> Vec<usize> {
    let buckets = subject.buckets();
    if buckets.is_empty() {
        return ANY.to_vec();
    }
    let few = buckets.iter().copied().filter(|tokens| *tokens <= MOST_TOKENS).count().max(1);
    let mut tokens = buckets[..few].to_vec();
    while tokens.len() > 4 {
        tokens.remove(tokens.len() / 2);
    }
    tokens
}

/// The least token count.
pub fn least<S: Subject>(subject: &S) -> usize {
    tokens(subject).first().copied().unwrap_or(1)
}

/// Rows and columns that a kind can have: odd ones too, and such as are no multiple of any tile.
pub fn shapes(kind: Kind) -> &'static [(usize, usize)] {
    match kind.granularity() {
        1 => &[(1, 1), (3, 5), (13, 33), (40, 64), (33, 100), (64, 127), (5, 257)],
        2 => &[(1, 2), (3, 6), (13, 34), (40, 64), (33, 100), (64, 126), (5, 258)],
        32 => &[(1, 32), (3, 64), (13, 96), (40, 64), (33, 160), (64, 128), (5, 352)],
        _ => &[(1, 256), (7, 512), (33, 256), (12, 768)],
    }
}

/// A shape that most units take, small.
pub fn plain(kind: Kind) -> (usize, usize) {
    if kind.granularity() > 64 { (40, 256) } else { (40, 64) }
}

/// What an input is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Values {
    Random,
    Zeros,
    Large,
    Tiny,
    Denormal,
    OneHot,
    Alternating,
    Cancelling,
}

impl Values {
    pub const ALL: [(Values, &'static str); 8] = [
        (Values::Random, "random"),
        (Values::Zeros, "zeros"),
        (Values::Large, "large"),
        (Values::Tiny, "tiny"),
        (Values::Denormal, "denormal"),
        (Values::OneHot, "one-hot"),
        (Values::Alternating, "alternating"),
        (Values::Cancelling, "cancelling"),
    ];

    /// `[tokens, cols]` of them.
    pub fn input(self, tokens: usize, cols: usize, seed: u64) -> Vec<f32> {
        let mut random = Random::new(seed);
        let mut x = random.values(tokens * cols);
        for (token, x) in x.chunks_exact_mut(cols).enumerate() {
            for (col, value) in x.iter_mut().enumerate() {
                *value = match self {
                    Values::Random => *value,
                    Values::Zeros => 0.0,
                    Values::Large => *value * 512.0,
                    Values::Tiny => *value * 1e-4,
                    Values::Denormal => *value * 1e-40,
                    Values::OneHot if col == (token * 7 + cols / 2) % cols => 2.0,
                    Values::OneHot => 0.0,
                    Values::Alternating => {
                        if col.is_multiple_of(2) {
                            1.0
                        } else {
                            -1.0
                        }
                    }
                    Values::Cancelling => *value + if col.is_multiple_of(2) { 30.0 } else { -30.0 },
                };
            }
        }
        x
    }
}

/// A weight and its matrix.
type Made<'a, S> = (<S as Subject>::Weight<'a>, <S as Subject>::Sample);

/// A weight that neighbouring cases share; it is made when the first of them needs it.
pub struct Shared<'a, S: Subject> {
    subject: &'a S,
    kind: Kind,
    shape: (usize, usize),
    made: OnceCell<Result<Made<'a, S>, Failure>>,
}

impl<'a, S: Subject> Shared<'a, S> {
    pub fn new(subject: &'a S, kind: Kind, shape: (usize, usize)) -> Shared<'a, S> {
        Shared { subject, kind, shape, made: OnceCell::new() }
    }

    /// The weight and what it is made of, if the unit takes it for so many tokens.
    pub fn get(&self, tokens: usize) -> Result<&Made<'a, S>, Stop> {
        ask_matmul(self.subject, self.kind, self.shape, tokens)?;
        let made = self.made.get_or_init(|| {
            let sample = self.subject.sample(self.kind, self.shape, Fill::Random, 1);
            self.subject.prepare(&[&sample]).map(|weight| (weight, sample))
        });
        made.as_ref().map_err(|failure| Stop::failed("prepare", failure))
    }
}

/// Asks for a product.
pub fn ask_matmul<S: Subject>(
    subject: &S,
    kind: Kind,
    (rows, cols): (usize, usize),
    tokens: usize,
) -> Result<(), Stop> {
    let question = Question { op: Op::Matmul, kind, rows, cols, tokens };
    subject.ask(&question).map_err(Stop::answer)
}

/// Asks for a product, prepares its weight, and gives both weight and matrix.
pub fn prepared<'a, S: Subject>(
    subject: &'a S,
    kind: Kind,
    shape: (usize, usize),
    (fill, seed): (Fill, u64),
) -> Result<Made<'a, S>, Stop> {
    ask_matmul(subject, kind, shape, least(subject))?;
    let sample = subject.sample(kind, shape, fill, seed);
    let weight = subject.prepare(&[&sample]).map_err(|failure| Stop::failed("prepare", &failure))?;
    Ok((weight, sample))
}

/// Multiplies with some weights.
pub fn multiply<S: Subject>(
    subject: &S,
    weights: &[&S::Weight<'_>],
    x: &[f32],
    tokens: usize,
) -> Result<Vec<Vec<f32>>, Stop> {
    subject.matmul(weights, x, tokens).map_err(|failure| Stop::failed("matmul", &failure))
}

/// What a product should be.
pub fn product_of<S: Sampled>(sample: &S, x: &[f32]) -> Reference {
    sample.elements().product(&widen(x))
}

/// Multiplies with one weight and random inputs, and compares.
pub fn check_product<S: Subject>(
    subject: &S,
    kind: Kind,
    (weight, sample): (&S::Weight<'_>, &S::Sample),
    tokens: usize,
    seed: u64,
) -> Ended {
    let x = Values::Random.input(tokens, sample.elements().cols, seed);
    let found = multiply(subject, &[weight], &x, tokens)?;
    let found = found.first().map_or(&[][..], |y| y);
    compare(&product_of(sample, &x), found, bounds::product(kind))
}
