//! Products of floats. Sums are F32, in the order of the elements: accurate enough to judge a client by, and repeatable.

use crate::check::Fuse;

/// `rows` of `k` elements, times weights of `k` elements per output, plus the bias.
pub(super) fn product(rows: &[f32], weights: &[f32], bias: &[f32], k: usize, fuse: Fuse) -> Vec<f32> {
    let (low, high) = fuse.range();
    let mut out = Vec::with_capacity(rows.len() / k.max(1) * bias.len());
    for row in rows.chunks_exact(k) {
        for (weight, bias) in weights.chunks_exact(k).zip(bias) {
            let sum = row.iter().zip(weight).fold(0.0f32, |sum, (x, w)| sum + x * w);
            out.push((sum + bias).clamp(low, high));
        }
    }
    out
}
