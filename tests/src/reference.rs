//! A forward pass of a toy model that reads like the formulas, in f64 and without a cache.
//!
//! It is the yardstick for the engine, so it takes no short cut that the engine takes: every token is computed
//! from the whole prefix, from the values that the stored bytes mean.

use crate::toy::{EPSILON, Layer, RopeScaling, Toy, ToyModel, Weight};

/// The logits after each token: one row per token, one value per word of the vocabulary.
///
/// # Panics
/// When a token is outside the vocabulary.
pub fn logits(model: &ToyModel, tokens: &[u32]) -> Vec<Vec<f64>> {
    let embed = |t: &u32| row(&model.token_embd, *t as usize).iter().map(|v| f64::from(*v)).collect();
    let mut x: Vec<Vec<f64>> = tokens.iter().map(embed).collect();
    for (index, layer) in model.layers.iter().enumerate() {
        let input = x.clone();
        let normed = each(&x, |x| rms_norm(x, &layer.attn_norm));
        add(&mut x, &attention(model, index, &normed));
        let normed = each(&x, |x| rms_norm(x, &layer.ffn_norm));
        // SmallThinker's router sees the layer's input, every other one what the experts see.
        let routed = if model.toy.architecture == "smallthinker" { &input } else { &normed };
        let computed: Vec<_> =
            normed.iter().zip(routed).map(|(x, routed)| feed_forward(&model.toy, layer, x, routed)).collect();
        add(&mut x, &computed);
    }
    let output = model.output.as_ref().unwrap_or(&model.token_embd);
    each(&x, |x| multiply(output, &rms_norm(x, &model.output_norm)))
}

/// One step of greedy decoding.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Step {
    /// The token with the greatest logit, the lowest id among equals.
    pub token: u32,
    /// By how much it leads: another implementation may differ from here on when its error is about as large.
    pub gap: f64,
}

/// Greedy decoding of `count` tokens after a prompt.
pub fn greedy(model: &ToyModel, prompt: &[u32], count: usize) -> Vec<Step> {
    let mut tokens = prompt.to_vec();
    let mut steps = Vec::new();
    for _ in 0..count {
        let step = best(logits(model, &tokens).last().expect("the prompt has a token"));
        tokens.push(step.token);
        steps.push(step);
    }
    steps
}

/// The best token of one row of logits.
pub fn best(logits: &[f64]) -> Step {
    let (mut token, mut top, mut second) = (0, f64::NEG_INFINITY, f64::NEG_INFINITY);
    for (id, logit) in logits.iter().enumerate() {
        if *logit > top {
            (token, top, second) = (id, *logit, top);
        } else {
            second = second.max(*logit);
        }
    }
    Step { token: token as u32, gap: top - second }
}

/// The hidden value of a neuron: `activation(gate) * up`. The cut-off counts for the ReLU family only.
///
/// # Panics
/// When there is no activation of that name.
pub fn activate(name: &str, threshold: f64, gate: f64, up: f64) -> f64 {
    let relu = |x: f64| if x > threshold { x } else { 0.0 };
    match name {
        "silu" => gate / (1.0 + (-gate).exp()) * up,
        "gelu" => {
            let inner = (2.0 / std::f64::consts::PI).sqrt() * (gate + 0.044715 * gate.powi(3));
            0.5 * gate * (1.0 + inner.tanh()) * up
        }
        "relu" => relu(gate) * up,
        "relu2" => relu(gate).powi(2) * up,
        "drelu" => relu(gate) * relu(up),
        "linear" => gate * up,
        _ => panic!("no activation is called {name}"),
    }
}

/// `w · x`.
pub fn multiply(w: &Weight, x: &[f64]) -> Vec<f64> {
    assert_eq!(w.cols, x.len(), "{} does not fit its input", w.name);
    let dot = |row: &[f32]| row.iter().zip(x).map(|(w, x)| f64::from(*w) * x).sum();
    w.values.chunks_exact(w.cols).map(dot).collect()
}

fn row(w: &Weight, index: usize) -> &[f32] {
    &w.values[index * w.cols..][..w.cols]
}

fn each(rows: &[Vec<f64>], f: impl Fn(&[f64]) -> Vec<f64>) -> Vec<Vec<f64>> {
    rows.iter().map(|r| f(r)).collect()
}

fn add(x: &mut [Vec<f64>], y: &[Vec<f64>]) {
    x.iter_mut().flatten().zip(y.iter().flatten()).for_each(|(x, y)| *x += y);
}

fn rms_norm(x: &[f64], weight: &Weight) -> Vec<f64> {
    let mean = x.iter().map(|v| v * v).sum::<f64>() / x.len() as f64;
    let scale = 1.0 / (mean + f64::from(EPSILON)).sqrt();
    x.iter().zip(&weight.values).map(|(v, w)| v * scale * f64::from(*w)).collect()
}

fn feed_forward(toy: &Toy, layer: &Layer, x: &[f64], routed: &[f64]) -> Vec<f64> {
    let Some(router) = &layer.ffn_gate_inp else {
        return neurons(toy, [&layer.ffn_gate, &layer.ffn_up, &layer.ffn_down], x);
    };
    let mut sum = vec![0.0; x.len()];
    for (expert, weight) in route(toy, &multiply(router, routed)) {
        let [gate, up, down] =
            [&layer.ffn_gate, &layer.ffn_up, &layer.ffn_down].map(|weight| weight.expert(expert));
        let y = neurons(toy, [&gate, &up, &down], x);
        sum.iter_mut().zip(y).for_each(|(sum, y)| *sum += weight * y);
    }
    sum
}

/// The experts of a token and what each counts.
///
/// # Panics
/// When the toy has no experts, or a gating that is not known.
pub fn route(toy: &Toy, logits: &[f64]) -> Vec<(usize, f64)> {
    let experts = toy.experts.expect("a toy with experts");
    let scores: Vec<f64> = match experts.gating {
        None | Some(1) => {
            let total: f64 = logits.iter().map(|logit| logit.exp()).sum();
            logits.iter().map(|logit| logit.exp() / total).collect()
        }
        Some(2) => logits.iter().map(|logit| 1.0 / (1.0 + (-logit).exp())).collect(),
        Some(other) => panic!("no gating is called {other}"),
    };
    let mut order: Vec<usize> = (0..experts.count).collect();
    // A stable sort: the lower index comes first among equals.
    order.sort_by(|a, b| scores[*b].total_cmp(&scores[*a]));
    order.truncate(experts.used);
    let total: f64 = order.iter().map(|expert| scores[*expert]).sum();
    order.into_iter().map(|expert| (expert, scores[expert] / total)).collect()
}

fn neurons(toy: &Toy, [gate, up, down]: [&Weight; 3], x: &[f64]) -> Vec<f64> {
    let (gate, up) = (multiply(gate, x), multiply(up, x));
    let (name, threshold) = (toy.activation(), f64::from(toy.threshold.unwrap_or(0.0)));
    let hidden: Vec<f64> = gate.iter().zip(&up).map(|(g, u)| activate(name, threshold, *g, *u)).collect();
    multiply(down, &hidden)
}

fn attention(model: &ToyModel, index: usize, x: &[Vec<f64>]) -> Vec<Vec<f64>> {
    let (toy, layer) = (&model.toy, &model.layers[index]);
    let window = toy.sliding_window.filter(|_| !toy.sees_all(index));
    let dim = toy.head_dim();
    let rotated = |w: &Weight| -> Vec<Vec<f64>> {
        let turn = |(position, x): (usize, &Vec<f64>)| {
            let mut y = multiply(w, x);
            if !toy.sees_all(index) {
                y.chunks_exact_mut(dim).for_each(|head| rotate(model, position, head));
            }
            y
        };
        x.iter().enumerate().map(turn).collect()
    };
    let (q, k, v) = (rotated(&layer.attn_q), rotated(&layer.attn_k), each(x, |x| multiply(&layer.attn_v, x)));
    let attend = |i: usize| {
        let first = window.map_or(0, |window| (i + 1).saturating_sub(window));
        let mut out = Vec::with_capacity(toy.heads * dim);
        for head in 0..toy.heads {
            // Query heads share a key head in groups that lie side by side.
            let kv = head / (toy.heads / toy.kv_heads) * dim..;
            let q = &q[i][head * dim..][..dim];
            let score = |j: usize| {
                let k = &k[j][kv.clone()][..dim];
                q.iter().zip(k).map(|(q, k)| q * k).sum::<f64>() / (dim as f64).sqrt()
            };
            let scores: Vec<f64> = (first..=i).map(score).collect();
            let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let weights: Vec<f64> = scores.iter().map(|s| (s - max).exp()).collect();
            let total: f64 = weights.iter().sum();
            let channel = |c: usize| {
                weights.iter().zip(&v[first..=i]).map(|(w, v)| w * v[kv.start + c]).sum::<f64>() / total
            };
            out.extend((0..dim).map(channel));
        }
        multiply(&layer.attn_output, &out)
    };
    (0..x.len()).map(attend).collect()
}

/// Turns each pair of channels of one head by its angle at a position.
fn rotate(model: &ToyModel, position: usize, head: &mut [f64]) {
    let pairs = model.toy.rope_dims() / 2;
    for pair in 0..pairs {
        let (angle, magnitude) = angle(model, position as f64, pair);
        let (sin, cos) = angle.sin_cos();
        let (a, b) = if model.toy.rope_adjacent { (2 * pair, 2 * pair + 1) } else { (pair, pair + pairs) };
        let (x, y) = (head[a] * magnitude, head[b] * magnitude);
        (head[a], head[b]) = (x * cos - y * sin, x * sin + y * cos);
    }
}

/// The angle of a pair at a position, and the factor on its length (YaRN's, else 1).
fn angle(model: &ToyModel, position: f64, pair: usize) -> (f64, f64) {
    let toy = &model.toy;
    let (base, dims) = (f64::from(toy.rope_base), toy.rope_dims() as f64);
    let plain = position * base.powf(-2.0 * pair as f64 / dims);
    match toy.rope_scaling {
        RopeScaling::None => (plain, 1.0),
        RopeScaling::Linear { factor } => (plain / f64::from(factor), 1.0),
        RopeScaling::Llama3 { .. } => {
            let divisor = model.rope_freqs.as_ref().map_or(1.0, |w| f64::from(w.values[pair]));
            (plain / divisor, 1.0)
        }
        RopeScaling::Yarn { factor, original } => {
            // The pair that makes `turns` turns over the original context.
            let at = |turns: f64| {
                dims * (original as f64 / (turns * std::f64::consts::TAU)).ln() / (2.0 * base.ln())
            };
            let low = at(32.0).floor().max(0.0);
            let high = at(1.0).ceil().min(dims - 1.0);
            let slow = ((pair as f64 - low) / (high - low).max(0.001)).clamp(0.0, 1.0);
            let factor = f64::from(factor);
            (plain * (slow / factor + 1.0 - slow), 1.0 + 0.1 * factor.ln())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::toy::{BOS, tokens};
    use neuropil_device::DType;

    fn prompt(text: &str) -> Vec<u32> {
        [vec![BOS], tokens(text)].concat()
    }

    fn furthest(a: &[Vec<f64>], b: &[Vec<f64>]) -> f64 {
        a.iter().flatten().zip(b.iter().flatten()).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max)
    }

    #[test]
    fn logits_are_lively() {
        for (tied, activation) in [(false, "silu"), (true, "silu"), (false, "relu2"), (false, "drelu")] {
            let model = Toy { tied, activation: Some(activation), ..Toy::default() }.model();
            let rows = logits(&model, &prompt("a lively toy"));
            let gaps: Vec<f64> = rows.iter().map(|r| best(r).gap).collect();
            let mean = gaps.iter().sum::<f64>() / gaps.len() as f64;
            assert!((0.3..8.0).contains(&mean), "tied {tied}, {activation}: {gaps:?}");
            let largest = rows.iter().flatten().fold(0.0, |a: f64, v| a.max(v.abs()));
            assert!((4.0..60.0).contains(&largest), "tied {tied}, {activation}: {largest}");
            let mut tokens: Vec<u32> = greedy(&model, &prompt("a"), 8).iter().map(|s| s.token).collect();
            tokens.sort_unstable();
            tokens.dedup();
            assert!(tokens.len() > 1, "tied {tied}, {activation}: {tokens:?}");
        }
    }

    #[test]
    fn a_prefix_does_not_see_what_follows() {
        let model = Toy::default().model();
        let all = logits(&model, &prompt("abcdef"));
        let part = logits(&model, &prompt("abc"));
        assert_eq!(all[..4], part[..]);
    }

    #[test]
    fn both_pairings_are_one_function() {
        let model = Toy { layers: 1, rope_dims: Some(48), ..Toy::default() }.model();
        let twin = model.neox_twin();
        let text = prompt("pairs of channels");
        let want = logits(&model, &text);
        assert!(furthest(&want, &logits(&twin, &text)) < 1e-9);
        let mut wrong = twin.clone();
        wrong.toy.rope_adjacent = true;
        let wrong = logits(&wrong, &text);
        assert!(furthest(&want[..1], &wrong[..1]) < 1e-9, "position 0 cannot tell");
        assert!(furthest(&want[1..], &wrong[1..]) > 0.1);
    }

    #[test]
    fn a_window_as_long_as_the_text_is_no_window() {
        let toy = |window| Toy { layers: 1, sliding_window: window, ..Toy::default() }.model();
        let text = prompt("windowed");
        let whole = logits(&toy(None), &text);
        assert_eq!(whole, logits(&toy(Some(9)), &text));
        let cut = logits(&toy(Some(4)), &text);
        assert_eq!(whole[..4], cut[..4]);
        assert!(furthest(&whole[4..5], &cut[4..5]) > 1e-3);
        // One layer sees exactly the last four tokens, at positions that only differ by a common turn.
        let tail = logits(&toy(None), &text[5..]);
        assert!(furthest(&cut[8..], &tail[3..]) < 1e-9);
    }

    #[test]
    fn angles_of_the_scalings() {
        let toy = |scaling| Toy { head_dim: Some(64), rope_scaling: scaling, ..Toy::default() }.model();
        let (plain, linear) = (toy(RopeScaling::None), toy(RopeScaling::Linear { factor: 4.0 }));
        for (position, pair) in [(0.0, 0), (1.0, 3), (7.0, 9), (100.0, 31)] {
            let (a, b) = (angle(&plain, position / 4.0, pair).0, angle(&linear, position, pair).0);
            assert!((a - b).abs() < 1e-12);
        }
        for (factor, want) in [(4.0, 1.138629), (16.0, 1.277259), (40.0, 1.368888)] {
            let yarn = toy(RopeScaling::Yarn { factor, original: 4096 });
            assert!((angle(&yarn, 3.0, 0).1 - want).abs() < 1e-6);
            assert!((angle(&yarn, 3.0, 0).0 - 3.0).abs() < 1e-12, "fast pairs stay");
            let slowest = angle(&plain, 3.0, 31).0 / f64::from(factor);
            assert!((angle(&yarn, 3.0, 31).0 - slowest).abs() < 1e-12, "slow pairs are stretched");
        }
    }

    #[test]
    fn every_type_stays_near_the_f32_model() {
        let text = prompt("types");
        let want = logits(&Toy::default().model(), &text);
        for dtype in DType::ALL {
            let got = logits(&Toy { dtypes: vec![("", dtype)], ..Toy::default() }.model(), &text);
            let bound = match dtype {
                DType::F32 | DType::F16 | DType::BF16 => 0.3,
                DType::Q2_K | DType::Q3_K => 24.0,
                _ => 12.0,
            };
            let off = furthest(&want, &got);
            assert!(off < bound && (off > 0.0 || dtype == DType::F32), "{dtype}: {off}");
        }
    }
}
