//! From a row of logits to the next token.
//!
//! The stages and their order are fixed, and are llama.cpp's: logit bias, penalties, top-k, top-p, min-p, temperature,
//! draw. There is no chain to build, so none without a stage that selects.
//!
//! Stated rules:
//! - *Temperature* below 1e-6 (0 included) takes the highest logit after bias and penalties; ties go to the lower id.
//! - *Penalties* count every token of the last `repeat_last_n` tokens of the history, prompt tokens included, line ends
//!   like any other. A repeat penalty divides positive logits and multiplies the others, once however often the
//!   token occurs, so a seen token never gets likelier; presence and frequency penalties are subtracted.
//! - *top-p* keeps the fewest tokens whose probability reaches it, at least one. *min-p* keeps tokens at least that
//!   fraction as likely as the likeliest. Both look at probabilities before temperature.
//! - *NaN* anywhere in the row is an error. *Minus infinity* is never drawn; a row of nothing else is an error. *Plus
//!   infinity* wins over everything, the lower id first.
//! - The same seed and the same logits give the same tokens on every platform: no function of a system's
//!   mathematics library is used. The default seed comes from the clock; [`Sampler::seed`] tells it.

mod error;
mod maths;
mod nucleus;
mod select;

pub use error::SamplerError;
pub use maths::log_sum_exp;
pub use select::top;

use maths::{Random, exp};
use select::{Candidate, by_rank};

/// Below this, temperature is 0.
const COLDEST: f32 = 1e-6;

/// A larger bias says nothing more and costs the digits of the logits.
const MAX_BIAS: f32 = 1e6;

/// How to sample. The default is llama.cpp's: temperature 0.8, top-k 40, top-p 0.95, min-p 0.05, penalties off.
#[derive(Clone, Debug, PartialEq)]
pub struct SamplerOptions {
    /// 0 takes the likeliest token; 1 is the model's own distribution. Not negative.
    pub temperature: f32,
    /// Keeps the `top_k` likeliest tokens; 0 is off.
    pub top_k: u32,
    /// From 0 (keeps one token) to 1 (off).
    pub top_p: f32,
    /// From 0 (off) to 1.
    pub min_p: f32,
    /// Above 0; 1 is off.
    pub repeat_penalty: f32,
    /// How many of the latest tokens the three penalties look at; 0 is none, -1 all.
    pub repeat_last_n: i32,
    /// Subtracted from the logit of every token seen; 0 is off.
    pub presence_penalty: f32,
    /// Subtracted as often as the token was seen; 0 is off.
    pub frequency_penalty: f32,
    /// Added to the logits of these tokens; minus infinity forbids a token. Within ±1e6 else.
    pub logit_bias: Vec<(u32, f32)>,
    /// Where the random numbers start. Without it, from the clock.
    pub seed: Option<u64>,
}

impl Default for SamplerOptions {
    fn default() -> Self {
        Self {
            temperature: 0.8,
            top_k: 40,
            top_p: 0.95,
            min_p: 0.05,
            repeat_penalty: 1.0,
            repeat_last_n: 64,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            logit_bias: Vec::new(),
            seed: None,
        }
    }
}

impl SamplerOptions {
    /// Always the likeliest token.
    pub fn greedy() -> Self {
        Self { temperature: 0.0, ..Self::default() }
    }

    fn check(&self, n_vocab: usize) -> Result<(), SamplerError> {
        let finite = |option, value: f32, ok: bool, range| match value.is_finite() && ok {
            true => Ok(()),
            false => Err(SamplerError::Option { option, value: value.into(), range }),
        };
        let share = |value: f32| (0.0..=1.0).contains(&value);
        finite("temperature", self.temperature, self.temperature >= 0.0, "0 or more")?;
        finite("top_p", self.top_p, share(self.top_p), "between 0 and 1")?;
        finite("min_p", self.min_p, share(self.min_p), "between 0 and 1")?;
        finite("repeat_penalty", self.repeat_penalty, self.repeat_penalty > 0.0, "above 0")?;
        finite("presence_penalty", self.presence_penalty, true, "a finite number")?;
        finite("frequency_penalty", self.frequency_penalty, true, "a finite number")?;
        if self.repeat_last_n < -1 {
            let (option, value) = ("repeat_last_n", self.repeat_last_n.into());
            return Err(SamplerError::Option { option, value, range: "-1 or more" });
        }
        for &(id, bias) in &self.logit_bias {
            if id as usize >= n_vocab {
                return Err(SamplerError::BiasToken { id, n_vocab });
            }
            if bias != f32::NEG_INFINITY {
                finite(
                    "logit_bias",
                    bias,
                    bias.abs() <= MAX_BIAS,
                    "between -1e6 and 1e6, or minus infinity",
                )?;
            }
        }
        Ok(())
    }

    fn penalises(&self) -> bool {
        let off = self.repeat_penalty == 1.0 && self.presence_penalty == 0.0 && self.frequency_penalty == 0.0;
        self.repeat_last_n != 0 && !off
    }
}

/// Draws tokens for one sequence. Allocates nothing after the first token.
#[derive(Clone, Debug)]
pub struct Sampler {
    options: SamplerOptions,
    n_vocab: usize,
    seed: u64,
    random: Random,
    /// The difference to the highest logit at which a token is `min_p` as likely.
    min_p_cut: f32,
    /// The row after bias and penalties, when there are any.
    row: Vec<f32>,
    /// How often each token was seen; zero between calls.
    counts: Vec<u32>,
    /// What may be drawn; empty when that is every token.
    candidates: Vec<Candidate>,
    /// The weight of each candidate, or of each token.
    weights: Vec<f32>,
    bins: Vec<f64>,
    edge: Vec<Candidate>,
}

impl Sampler {
    /// A sampler for rows of `n_vocab` logits.
    ///
    /// # Errors
    /// `Option` and `BiasToken` name the option that is out of range.
    pub fn new(options: SamplerOptions, n_vocab: usize) -> Result<Self, SamplerError> {
        options.check(n_vocab)?;
        let seed = options.seed.unwrap_or_else(|| {
            let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
            since.map_or(0, |time| time.as_nanos() as u64)
        });
        let counts = if options.penalises() { vec![0; n_vocab] } else { Vec::new() };
        Ok(Self {
            n_vocab,
            seed,
            random: Random(seed),
            min_p_cut: min_p_cut(options.min_p),
            row: Vec::new(),
            counts,
            candidates: Vec::new(),
            weights: Vec::new(),
            bins: Vec::new(),
            edge: Vec::new(),
            options,
        })
    }

    /// The seed in use.
    pub fn seed(&self) -> u64 {
        self.seed
    }

    /// The options in use.
    pub fn options(&self) -> &SamplerOptions {
        &self.options
    }

    /// Draws the next token. `history` is the sequence so far, prompt included; ids outside the vocabulary are not
    /// counted.
    ///
    /// # Errors
    /// `Length`, `NotANumber`, `NothingLeft`.
    pub fn sample(&mut self, logits: &[f32], history: &[u32]) -> Result<u32, SamplerError> {
        if let Some(certain) = self.select(logits, history)? {
            return Ok(certain);
        }
        // Sums of blocks first, so that a draw from a long list walks few numbers.
        const BLOCK: usize = 64;
        self.bins.clear();
        self.bins.extend(self.weights.chunks(BLOCK).map(sum));
        let mut left = self.random.unit() * self.bins.iter().sum::<f64>();
        let mut block = 0;
        while block + 1 < self.bins.len() && left >= self.bins[block] {
            left -= self.bins[block];
            block += 1;
        }
        let mut drawn = None;
        for at in block * BLOCK..self.weights.len().min((block + 1) * BLOCK) {
            let weight = f64::from(self.weights[at]);
            if weight > 0.0 {
                drawn = Some(at);
                if left < weight {
                    break;
                }
                left -= weight;
            }
        }
        // Rounding can lead into a block without weight; the likeliest token has weight 1.
        let likeliest = || self.weights.iter().position(|&weight| weight == 1.0);
        drawn.or_else(likeliest).map(|at| self.token(at)).ok_or(SamplerError::NothingLeft)
    }

    /// The token that the weight at `at` belongs to.
    fn token(&self, at: usize) -> u32 {
        self.candidates.get(at).map_or(at as u32, |candidate| candidate.0)
    }

    /// The tokens that [`sample`](Self::sample) would draw from and their probabilities, likeliest first. Draws
    /// nothing.
    ///
    /// # Errors
    /// As [`sample`](Self::sample).
    pub fn distribution(&mut self, logits: &[f32], history: &[u32]) -> Result<Vec<(u32, f32)>, SamplerError> {
        if let Some(certain) = self.select(logits, history)? {
            return Ok(vec![(certain, 1.0)]);
        }
        let sum = sum(&self.weights);
        let weights = self.weights.iter().enumerate().filter(|(_, weight)| **weight > 0.0);
        let mut list: Vec<_> =
            weights.map(|(at, &weight)| (self.token(at), (f64::from(weight) / sum) as f32)).collect();
        list.sort_by(by_rank);
        Ok(list)
    }

    /// All stages up to the draw. Gives the token if there is no choice, else leaves `candidates` and `weights`.
    fn select(&mut self, logits: &[f32], history: &[u32]) -> Result<Option<u32>, SamplerError> {
        if logits.len() != self.n_vocab {
            return Err(SamplerError::Length { found: logits.len(), n_vocab: self.n_vocab });
        }
        if let Some(id) = first_nan(logits) {
            return Err(SamplerError::NotANumber { id });
        }
        let mut row = std::mem::take(&mut self.row);
        let changed = !self.options.logit_bias.is_empty() || self.options.penalises();
        if changed {
            row.clear();
            row.extend_from_slice(logits);
            self.adjust(&mut row, history);
        }
        let result = self.narrow(if changed { &row } else { logits });
        self.row = row;
        result
    }

    /// Bias and penalties.
    fn adjust(&mut self, row: &mut [f32], history: &[u32]) {
        for &(id, bias) in &self.options.logit_bias {
            if let Some(logit) = row.get_mut(id as usize) {
                *logit = if bias == f32::NEG_INFINITY { bias } else { *logit + bias };
            }
        }
        if !self.options.penalises() {
            return;
        }
        let last = usize::try_from(self.options.repeat_last_n).unwrap_or(usize::MAX);
        let seen = &history[history.len().saturating_sub(last)..];
        for &id in seen {
            if let Some(count) = self.counts.get_mut(id as usize) {
                *count += 1;
            }
        }
        for &id in seen {
            let (Some(count), Some(logit)) = (self.counts.get_mut(id as usize), row.get_mut(id as usize))
            else {
                continue;
            };
            let count = std::mem::take(count);
            if count > 0 {
                let repeat = self.options.repeat_penalty;
                *logit = if *logit > 0.0 { *logit / repeat } else { *logit * repeat };
                *logit -= count as f32 * self.options.frequency_penalty + self.options.presence_penalty;
            }
        }
    }

    /// Top-k, top-p, min-p and temperature on a row without NaN.
    fn narrow(&mut self, row: &[f32]) -> Result<Option<u32>, SamplerError> {
        let max = maximum(row);
        if max == f32::NEG_INFINITY {
            return Err(SamplerError::NothingLeft);
        }
        let options = &self.options;
        if options.temperature < COLDEST || max == f32::INFINITY || options.top_k == 1 || options.top_p == 0.0
        {
            return Ok(row.iter().position(|&logit| logit == max).map(|id| id as u32));
        }
        let (candidates, weights) = (&mut self.candidates, &mut self.weights);
        let (filter_p, cut) = (options.top_p < 1.0, max + self.min_p_cut);
        candidates.clear();
        if options.top_k > 0 && (options.top_k as usize) < row.len() {
            select::best(row, options.top_k as usize, candidates);
            candidates.sort_unstable_by(by_rank);
            if filter_p {
                weigh(candidates.iter().map(|candidate| candidate.1), max, 1.0, weights);
                let goal = f64::from(options.top_p) * sum(weights);
                candidates.truncate(nucleus::count(weights, goal));
            }
            candidates.truncate(candidates.partition_point(|candidate| candidate.1 >= cut));
        } else if filter_p || options.min_p > 0.0 {
            let mut goal = f64::INFINITY;
            if filter_p {
                weigh(row.iter().copied(), max, 1.0, weights);
                goal = f64::from(options.top_p) * sum(weights);
            }
            // Both filters keep a head of the ranking, so the shorter head decides and min-p may go first.
            select::at_least(row, cut, candidates);
            if filter_p {
                nucleus::keep(candidates, max, goal, weights, &mut self.bins, &mut self.edge);
            }
        }
        let scale = 1.0 / options.temperature;
        match candidates.is_empty() {
            true => weigh(row.iter().copied(), max, scale, weights),
            false => weigh(candidates.iter().map(|candidate| candidate.1), max, scale, weights),
        }
        Ok(None)
    }
}

/// Writes the exponentials of the scaled differences to the maximum.
fn weigh(logits: impl Iterator<Item = f32>, max: f32, scale: f32, weights: &mut Vec<f32>) {
    weights.clear();
    weights.extend(logits.map(|logit| exp((logit - max) * scale)));
}

/// The sum of a list, eight sums side by side.
fn sum(weights: &[f32]) -> f64 {
    let (chunks, rest) = weights.as_chunks::<8>();
    let mut lanes = [0.0; 8];
    for chunk in chunks {
        for (lane, &weight) in lanes.iter_mut().zip(chunk) {
            *lane += f64::from(weight);
        }
    }
    lanes.iter().sum::<f64>() + rest.iter().map(|&weight| f64::from(weight)).sum::<f64>()
}

/// The lowest difference to the maximum whose exponential is still `min_p`.
fn min_p_cut(min_p: f32) -> f32 {
    if min_p <= 0.0 {
        return f32::NEG_INFINITY;
    }
    let (mut below, mut enough) = (-104.0, 0.0);
    loop {
        let middle = (below + enough) / 2.0;
        if middle <= below || middle >= enough {
            return enough;
        }
        if exp(middle) >= min_p { enough = middle } else { below = middle }
    }
}

/// The highest logit. Eight at a time, so that it costs little on long rows.
fn maximum(row: &[f32]) -> f32 {
    let mut lanes = [f32::NEG_INFINITY; 8];
    let (chunks, rest) = row.as_chunks::<8>();
    for chunk in chunks {
        for (lane, &logit) in lanes.iter_mut().zip(chunk) {
            *lane = if logit > *lane { logit } else { *lane };
        }
    }
    lanes.iter().chain(rest).copied().fold(f32::NEG_INFINITY, f32::max)
}

/// The first NaN of a row.
fn first_nan(row: &[f32]) -> Option<u32> {
    // Counting has no exit and so runs eight at a time; looking for the place is only for rows that have one.
    let count: u32 = row.iter().map(|logit| u32::from(logit.is_nan())).sum();
    if count == 0 { None } else { row.iter().position(|logit| logit.is_nan()).map(|id| id as u32) }
}

#[cfg(test)]
mod tests;
