//! Products of bytes with scales: exact integer sums, then one rounding to the output's codes.

use crate::check::Fuse;
use crate::codes::TENSOR_QUANT8_ASYMM;
use crate::operand::Shape;

/// The scales around a product.
#[derive(Debug)]
pub(super) struct Plane<'a> {
    pub(super) x: &'a Shape,
    pub(super) w: &'a Shape,
    pub(super) y: &'a Shape,
    /// The weights' scales, one per output, in place of the single one.
    pub(super) channels: Option<&'a [f32]>,
    pub(super) fuse: Fuse,
}

/// The codes that a type has.
fn codes(kind: i32) -> (i64, i64) {
    if kind == TENSOR_QUANT8_ASYMM { (0, 255) } else { (-128, 127) }
}

/// The nearest code of a value in units of the output's scale.
fn nearest(steps: f64, y: &Shape, low: i64, high: i64) -> i16 {
    let code = steps.round().clamp(-1e9, 1e9) as i64 + i64::from(y.zero);
    code.clamp(low, high) as i16
}

/// The codes that a fused function leaves.
fn fused(y: &Shape, fuse: Fuse) -> (i64, i64) {
    let (low, high) = codes(y.kind);
    let (least, most) = fuse.range();
    let code = |value: f32, otherwise: i64| match value.is_finite() {
        true => i64::from(nearest(f64::from(value) / f64::from(y.scale), y, low, high)),
        false => otherwise,
    };
    (code(least, low), code(most, high))
}

/// `rows` of `k` codes, times weights of `k` codes per output, plus the bias, as codes of the output.
pub(super) fn product(rows: &[i16], weights: &[i16], bias: &[i32], k: usize, plane: &Plane) -> Vec<i16> {
    let (x_zero, w_zero) = (i32::from(plane.x.zero as i16), i32::from(plane.w.zero as i16));
    let (low, high) = fused(plane.y, plane.fuse);
    let mut out = Vec::with_capacity(rows.len() / k.max(1) * bias.len());
    for row in rows.chunks_exact(k) {
        for (channel, (weight, bias)) in weights.chunks_exact(k).zip(bias).enumerate() {
            // The sum of 255 * 255 * k stays below 2^31 for k up to 33000; pieces keep it so for every k.
            let pieces = row.chunks(16384).zip(weight.chunks(16384));
            let sum: i64 = pieces
                .map(|(x, w)| {
                    let products =
                        x.iter().zip(w).map(|(x, w)| (i32::from(*x) - x_zero) * (i32::from(*w) - w_zero));
                    i64::from(products.sum::<i32>())
                })
                .sum();
            let scale = plane.channels.and_then(|s| s.get(channel).copied()).unwrap_or(plane.w.scale);
            let unit = f64::from(plane.x.scale) * f64::from(scale) / f64::from(plane.y.scale);
            out.push(nearest((sum + i64::from(*bias)) as f64 * unit, plane.y, low, high));
        }
    }
    out
}

/// Values as codes of the output, after a fused function.
pub(super) fn quantised(values: &[f32], y: &Shape, fuse: Fuse) -> Vec<i16> {
    let (low, high) = fused(y, fuse);
    values.iter().map(|v| nearest(f64::from(*v) / f64::from(y.scale), y, low, high)).collect()
}
