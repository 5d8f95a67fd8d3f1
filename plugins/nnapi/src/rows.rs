//! Values of a job in the types of a form, and back.
//!
//! F16, and F32 that may be computed as F16: the row of a token is multiplied by a power of two, so that its largest value
//! lies between 1/2 and 1; large activations then neither overflow nor lose bits, and the product is multiplied back.
//!
//! Int8: the encodings of activations are a part of a compiled graph, so values are brought into fixed ranges.
//! - Values of a token that are more than 8 times its root mean square would leave few codes for the others. They are at
//!   most one in 64, and are multiplied here.
//! - The row of a token is divided by its largest value, or by 4 times its root mean square if that is more. Codes of x
//!   then span -1 to 1, and the mean square of a row is at most 1/16.
//! - Rows of the weight are divided by their length (see `pack`). An output of random signs then has a root mean square
//!   of at most 1/4, and codes of y span -1 to 1: four times that.
//! - An output may still lie outside, up to the length of the row of x. Its code is then the first or the last. These
//!   outputs, of random ones one in 16,000, are computed here, so nothing is ever cut off.

use half::f16;
use half::slice::HalfFloatSliceExt;

use crate::graph::Values;
use crate::pack::RowScales;

/// What a code of x is worth.
pub(crate) const INPUT_SCALE: f32 = 1.0 / 127.0;
/// What a code of y is worth.
pub(crate) const OUTPUT_SCALE: f32 = 1.0 / 127.0;

/// What 1 stands for in a row is at least so many times its root mean square.
const HEADROOM: f64 = 4.0;
/// Values of a row are outliers beyond so many times its root mean square.
const OUTLIER: f64 = 8.0;

/// What the row of each token is divided by.
fn factors(x: &[f32], cols: usize) -> Vec<f32> {
    x.chunks_exact(cols).map(|x| power_of_two_above(largest(x))).collect()
}

/// Multiplies rows by their factors again.
fn multiply(y: &mut [f32], factors: &[f32]) {
    let rows = (y.len() / factors.len().max(1)).max(1);
    for (y, factor) in y.chunks_exact_mut(rows).zip(factors) {
        y.iter_mut().for_each(|y| *y *= factor);
    }
}

/// The values of an F32 graph.
pub(crate) struct Floats<'a> {
    x: &'a [f32],
    cols: usize,
    y: &'a mut [f32],
    /// None when rows go as they are.
    factors: Vec<f32>,
}

impl<'a> Floats<'a> {
    /// `relaxed`: the graph may compute in F16, and input and output are both copied.
    pub fn new(x: &'a [f32], cols: usize, y: &'a mut [f32], relaxed: bool) -> Floats<'a> {
        let factors = if relaxed { factors(x, cols) } else { Vec::new() };
        Floats { x, cols, y, factors }
    }
}

impl Values for Floats<'_> {
    fn write(&mut self, x: &mut [u8]) {
        x.copy_from_slice(bytemuck::cast_slice(self.x));
        let x: &mut [f32] = bytemuck::cast_slice_mut(x);
        for (x, factor) in x.chunks_exact_mut(self.cols).zip(&self.factors) {
            x.iter_mut().for_each(|x| *x /= factor);
        }
    }

    fn read(&mut self, y: &[u8]) {
        bytemuck::cast_slice_mut(self.y).copy_from_slice(y);
        multiply(self.y, &self.factors);
    }
}

/// The values of an F16 graph.
pub(crate) struct Halves<'a> {
    x: &'a [f32],
    cols: usize,
    y: &'a mut [f32],
    /// What the row of each token was divided by.
    factors: Vec<f32>,
}

impl<'a> Halves<'a> {
    pub fn new(x: &'a [f32], cols: usize, y: &'a mut [f32]) -> Halves<'a> {
        Halves { x, cols, y, factors: factors(x, cols) }
    }
}

impl Values for Halves<'_> {
    fn write(&mut self, x: &mut [u8]) {
        let out: &mut [f16] = bytemuck::cast_slice_mut(x);
        let mut scaled = vec![0.0; self.cols];
        let rows = self.x.chunks_exact(self.cols).zip(out.chunks_exact_mut(self.cols));
        for ((x, out), factor) in rows.zip(&self.factors) {
            scaled.iter_mut().zip(x).for_each(|(scaled, x)| *scaled = x / factor);
            out.convert_from_f32_slice(&scaled);
        }
    }

    fn read(&mut self, y: &[u8]) {
        let found: &[f16] = bytemuck::cast_slice(y);
        found.convert_to_f32_slice(self.y);
        multiply(self.y, &self.factors);
    }
}

fn largest(x: &[f32]) -> f32 {
    x.iter().fold(0f32, |largest, x| largest.max(x.abs()))
}

/// A power of two above a value and at most twice it; 1 where there is none that divides well.
fn power_of_two_above(value: f32) -> f32 {
    let exponent = value.to_bits() >> 23;
    match exponent {
        32..224 => f32::from_bits((exponent + 1) << 23),
        _ => 1.0,
    }
}

/// The values of an int8 graph.
pub(crate) struct Codes<'a> {
    x: &'a [f32],
    cols: usize,
    y: &'a mut [f32],
    /// The codes of the weight `[rows, cols]`, and the scales of its rows.
    weight: &'a [u8],
    rows: &'a RowScales,
    /// Of each token.
    tokens: Vec<Token>,
    /// Turns int8 into uint8 around 128, or leaves it.
    flip: u8,
}

impl<'a> Codes<'a> {
    /// `weight` has one row of `cols` codes per scale of `rows`.
    pub fn new(
        x: &'a [f32],
        cols: usize,
        y: &'a mut [f32],
        (weight, rows): (&'a [u8], &'a RowScales),
        signed: bool,
    ) -> Codes<'a> {
        let tokens = x.chunks_exact(cols).map(Token::of).collect();
        Codes { x, cols, y, weight, rows, tokens, flip: if signed { 0 } else { 0x80 } }
    }
}

impl Values for Codes<'_> {
    fn write(&mut self, x: &mut [u8]) {
        let rows = self.x.chunks_exact(self.cols).zip(x.chunks_exact_mut(self.cols));
        for ((x, out), token) in rows.zip(&self.tokens) {
            let inverse = if token.scale > 0.0 { 1.0 / (token.scale * INPUT_SCALE) } else { 0.0 };
            for (x, out) in x.iter().zip(&mut *out) {
                let code = (x * inverse).round_ties_even().clamp(-127.0, 127.0) as i8;
                *out = code as u8 ^ self.flip;
            }
            for (col, _) in &token.outliers {
                out[*col] = self.flip;
            }
        }
    }

    fn read(&mut self, y: &[u8]) {
        let rows = self.rows.factors.len();
        let found = y.chunks_exact(rows).zip(self.y.chunks_exact_mut(rows));
        let given = self.tokens.iter().zip(self.x.chunks_exact(self.cols));
        for ((codes, y), (token, x)) in found.zip(given) {
            let one = token.scale * OUTPUT_SCALE;
            for ((code, y), factor) in codes.iter().zip(&mut *y).zip(&self.rows.factors) {
                *y = f32::from((code ^ self.flip) as i8) * factor * one;
            }
            let weight = || self.weight.chunks_exact(self.cols).zip(&self.rows.of_codes);
            if !token.outliers.is_empty() {
                for (y, (w, scale)) in y.iter_mut().zip(weight()) {
                    let terms = token.outliers.iter().map(|(col, x)| f32::from(w[*col] as i8) * x);
                    *y += terms.sum::<f32>() * scale;
                }
            }
            let outside = |code: u8| matches!((code ^ self.flip) as i8, i8::MIN | i8::MAX);
            if !token.scale.is_nan() && codes.iter().any(|code| outside(*code)) {
                for ((_, y), (w, scale)) in
                    codes.iter().zip(y).zip(weight()).filter(|((c, _), _)| outside(**c))
                {
                    let sum: f64 = w.iter().zip(x).map(|(w, x)| f64::from(*w as i8) * f64::from(*x)).sum();
                    *y = (sum * f64::from(*scale)) as f32;
                }
            }
        }
    }
}

/// How the row of a token goes into codes.
struct Token {
    /// What 1 stands for. NaN when the row is not finite.
    scale: f32,
    /// Columns with their values that are no codes.
    outliers: Vec<(usize, f32)>,
}

impl Token {
    fn of(x: &[f32]) -> Token {
        let square = |x: f32| f64::from(x) * f64::from(x);
        let mean = |squares: f64| (squares / x.len().max(1) as f64).sqrt();
        let mut squares: f64 = x.iter().map(|x| square(*x)).sum();
        if !squares.is_finite() {
            return Token { scale: f32::NAN, outliers: Vec::new() };
        }
        let mut most = f64::from(largest(x));
        let limit = mean(squares) * OUTLIER;
        let mut outliers = Vec::new();
        if most > limit {
            most = 0.0;
            for (col, x) in x.iter().enumerate() {
                if f64::from(x.abs()) > limit {
                    outliers.push((col, *x));
                    squares -= square(*x);
                } else {
                    most = most.max(f64::from(x.abs()));
                }
            }
        }
        match most.max(mean(squares.max(0.0)) * HEADROOM) {
            // There is nothing to divide by.
            scale if scale < 1e-30 => Token { scale: 0.0, outliers },
            scale => Token { scale: scale.min(f64::from(f32::MAX)) as f32, outliers },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Random(u64);

    impl Random {
        fn value(&mut self) -> f32 {
            self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (self.0 >> 40) as f32 / 8_388_608.0 - 1.0
        }

        /// About normal, of mean square 1.
        fn normal(&mut self) -> f32 {
            (0..12).map(|_| self.value() * 0.5).sum()
        }
    }

    /// A weight of one scale for all rows.
    fn row_scales(w: &[i8], cols: usize, scale: f32) -> RowScales {
        let length = |w: &[i8]| w.iter().map(|w| f32::from(*w).powi(2)).sum::<f32>().sqrt();
        let lengths: Vec<f32> = w.chunks_exact(cols).map(length).collect();
        RowScales {
            in_graph: lengths.iter().map(|length| 1.0 / length).collect(),
            factors: lengths.iter().map(|length| length * scale).collect(),
            of_codes: vec![scale; lengths.len()],
        }
    }

    /// What the convolution of NNAPI does with codes; gives the relative error, and how many codes lay outside.
    fn int8_product(x: &[f32], w: &[i8], cols: usize, signed: bool) -> (f64, usize) {
        let scales = row_scales(w, cols, 0.5);
        let rows = scales.in_graph.len();
        let (mut codes, mut out) = (vec![0; x.len()], vec![0; x.len() / cols * rows]);
        let mut y = vec![0f32; out.len()];
        let mut values = Codes::new(x, cols, &mut y, (bytemuck::cast_slice(w), &scales), signed);
        values.write(&mut codes);
        let mut outside = 0;
        for (codes, out) in codes.chunks_exact(cols).zip(out.chunks_exact_mut(rows)) {
            for ((w, out), scale) in w.chunks_exact(cols).zip(out).zip(&scales.in_graph) {
                let term = |(w, c): (&i8, &u8)| i32::from(*w) * i32::from((c ^ values.flip) as i8);
                let sum: i32 = w.iter().zip(codes).map(term).sum();
                let code = (sum as f32 * INPUT_SCALE * scale / OUTPUT_SCALE).round().clamp(-128.0, 127.0);
                outside += usize::from(code.abs() >= 127.0);
                *out = code as i8 as u8 ^ values.flip;
            }
        }
        values.read(&out);
        let (mut wrong, mut right) = (0f64, 0f64);
        for (x, y) in x.chunks_exact(cols).zip(y.chunks_exact(rows)) {
            for (w, y) in w.chunks_exact(cols).zip(y) {
                let want: f64 = w.iter().zip(x).map(|(w, x)| 0.5 * f64::from(*w) * f64::from(*x)).sum();
                wrong += (want - f64::from(*y)).powi(2);
                right += want * want;
            }
        }
        ((wrong / right).sqrt(), outside)
    }

    #[test]
    fn errors_of_int8_products() {
        let mut random = Random(1);
        let cols = 1024;
        let w: Vec<i8> = (0..512 * cols).map(|_| (random.value() * 127.0) as i8).collect();
        let flat: Vec<f32> = (0..2 * cols).map(|_| random.value()).collect();
        let normal: Vec<f32> = (0..2 * cols).map(|_| 30.0 * random.normal()).collect();
        let mut outliers = normal.clone();
        outliers.iter_mut().step_by(101).for_each(|x| *x *= 10.0);
        let mut peaks = normal.clone();
        (peaks[7], peaks[cols + 9]) = (3e4, -9e4);
        // A row of x that is a row of the weight has the largest output that there is.
        let alike: Vec<f32> = w[..cols].iter().map(|w| f32::from(*w)).collect();
        for (name, x, bound, most_outside) in [
            ("flat", &flat, 0.015, 2),
            ("normal", &normal, 0.015, 2),
            ("outliers", &outliers, 0.03, 2),
            ("peaks", &peaks, 0.015, 2),
            ("alike", &alike, 0.015, 3),
        ] {
            for signed in [true, false] {
                let (error, outside) = int8_product(x, &w, cols, signed);
                println!("{name}: error {error:.4}, {outside} outside");
                assert!(error < bound && outside <= most_outside, "{name}: error {error}, {outside} outside");
            }
        }
    }

    #[test]
    fn the_largest_output_of_the_widest_row_is_right() {
        let cols = 1 << 17;
        let (error, outside) = int8_product(&vec![1.0; cols], &vec![-127; cols], cols, true);
        assert!(error < 1e-6 && outside == 1, "error {error}, {outside} outside");
    }

    #[test]
    fn rows_of_zeros_and_of_what_is_no_number() {
        let x = [0.0, 0.0, f32::NAN, 1.0, f32::INFINITY, 1.0, 1e-40, 0.0];
        let mut y = [7.0; 4];
        let scales = row_scales(&[1, 1], 2, 1.0);
        let mut values = Codes::new(&x, 2, &mut y, (&[1, 1], &scales), true);
        let mut codes = [9; 8];
        values.write(&mut codes);
        assert_eq!(codes, [0; 8]);
        values.read(&[0, 0, 127, 0]);
        assert!(y[0] == 0.0 && y[1].is_nan() && y[2].is_nan() && y[3] == 0.0, "{y:?}");
    }

    #[test]
    fn halves_keep_large_and_small_rows() {
        let x = [3e5f32, -1e5, 1.0, 0.5, 2e-6, 1e-6, 0.0, 0.0];
        let mut halves = [f16::ZERO; 8];
        let mut y = [0.0; 8];
        let mut values = Halves::new(&x, 2, &mut y);
        values.write(bytemuck::cast_slice_mut(&mut halves));
        values.read(bytemuck::cast_slice(&halves));
        assert_eq!(values.factors, [524_288.0, 2.0, 2f32.powi(-18), 1.0]);
        for (x, y) in x.iter().zip(y) {
            assert!((x - y).abs() <= x.abs() / 1000.0, "{x} {y}");
        }
        let mut floats = [0f32; 8];
        let mut found = [0.0; 8];
        let mut values = Floats::new(&x, 2, &mut found, true);
        values.write(bytemuck::cast_slice_mut(&mut floats));
        assert!(floats.iter().all(|value| value.abs() <= 1.0));
        values.read(bytemuck::cast_slice(&floats));
        assert_eq!(found, x);
        let mut halves = [f16::ZERO; 2];
        let mut y = [0.0; 2];
        let mut values = Halves::new(&[f32::INFINITY, f32::NAN], 2, &mut y);
        values.write(bytemuck::cast_slice_mut(&mut halves));
        assert!(values.factors[0] == 1.0 && halves[0].is_infinite() && halves[1].is_nan());
    }
}
