//! Weights in the unit's own form, and products with them.
//!
//! Float and group schemes multiply with F32 activations, F16 with activations rounded to F16. The channel schemes are
//! integer: a token's activations get one scale and codes of 16 or 8 bits, a row's sum of code products is exact, and
//! outlier columns are a second sum with a scale of its own.

use half::f16;

use neuropil_plugin_sdk::{GROUP, Matrix, Scheme, f16_at, f32_at, int4_at};

/// Columns whose code products are added up in 32 bits: 127 · 32767 · 256 fits.
const SPAN: usize = 256;

/// Outlier columns.
pub(crate) struct Outliers {
    pub columns: Vec<usize>,
    pub codes: Vec<i8>,
    pub scales: Vec<f32>,
}

/// How a matrix is written down.
pub(crate) enum Form {
    /// Values, and whether activations are rounded to F16.
    Float(Vec<f32>, bool),
    /// Codes, and per group a scale and a minimum.
    Group(Vec<i8>, Vec<(f32, f32)>),
    /// Codes, a scale per row, and outliers.
    Channel(Vec<i8>, Vec<f32>, Option<Outliers>),
}

/// A matrix; the lengths of its form fit its rows and columns.
pub(crate) struct Elements {
    pub rows: usize,
    pub cols: usize,
    pub form: Form,
}

/// A token's input, as the matrix needs it.
struct Token {
    values: Vec<f32>,
    codes: Vec<i16>,
    scale: f32,
}

impl Elements {
    pub fn new(matrix: &Matrix<'_>) -> Elements {
        let (rows, cols) = (matrix.rows, matrix.cols);
        let count = rows * cols;
        let bytes = || matrix.data.iter().map(|code| *code as i8).collect();
        let nibbles = || (0..count).map(|i| int4_at(matrix.data, i)).collect();
        let halves = |bytes: &[u8], i: usize| if bytes.is_empty() { 0.0 } else { f16_at(bytes, i) };
        let groups =
            || (0..count / GROUP).map(|i| (f16_at(matrix.scales, i), halves(matrix.mins, i))).collect();
        let scales = || (0..rows).map(|row| f32_at(matrix.scales, row)).collect();
        let form = match matrix.scheme {
            Scheme::Group8 => Form::Group(bytes(), groups()),
            Scheme::Group4 => Form::Group(nibbles(), groups()),
            Scheme::Group4Min => {
                let codes: Vec<i8> = nibbles();
                Form::Group(codes.iter().map(|code| code & 15).collect(), groups())
            }
            Scheme::Channel8 => Form::Channel(bytes(), scales(), None),
            Scheme::Channel4 => {
                let outliers = matrix.outliers.map(|from| Outliers {
                    columns: from.columns.iter().map(|column| *column as usize).collect(),
                    codes: from.data.iter().map(|code| *code as i8).collect(),
                    scales: (0..rows).map(|row| f32_at(from.scales, row)).collect(),
                });
                Form::Channel(nibbles(), scales(), outliers)
            }
            scheme => {
                let mut values = vec![0.0; count];
                values.chunks_exact_mut(cols).enumerate().for_each(|(row, out)| matrix.widen_row(row, out));
                Form::Float(values, scheme == Scheme::F16)
            }
        };
        Elements { rows, cols, form }
    }

    /// Bytes that it takes.
    pub fn bytes(&self) -> u64 {
        let bytes = match &self.form {
            Form::Float(values, _) => values.len() * 4,
            Form::Group(codes, groups) => codes.len() + groups.len() * 8,
            Form::Channel(codes, scales, outliers) => {
                let outliers = outliers.as_ref().map_or(0, |o| o.codes.len() + o.scales.len() * 4);
                codes.len() + scales.len() * 4 + outliers
            }
        };
        bytes as u64
    }

    fn token(&self, x: &[f32], limit: f32) -> Token {
        match &self.form {
            Form::Float(_, false) | Form::Group(..) => {
                Token { values: x.to_vec(), codes: Vec::new(), scale: 1.0 }
            }
            Form::Float(_, true) => {
                let values = x.iter().map(|x| f16::from_f32(*x).to_f32()).collect();
                Token { values, codes: Vec::new(), scale: 1.0 }
            }
            Form::Channel(..) => {
                // A value that is no number must not become one.
                let finite = x.iter().all(|x| x.is_finite());
                let amax = x.iter().fold(0f32, |amax, x| amax.max(x.abs()));
                let scale = if finite { amax / limit } else { f32::NAN };
                let inverse = if scale > 0.0 { 1.0 / scale } else { 0.0 };
                let code = |x: &f32| (x * inverse).round().clamp(-limit, limit) as i16;
                Token { values: Vec::new(), codes: x.iter().map(code).collect(), scale }
            }
        }
    }

    /// `y[t, r] = Σ_c w[r, c] · x[t, c]`, the tokens shared out among the threads of the machine.
    pub fn multiply(&self, x: &[f32], y: &mut [f32], limit: f32) {
        let tokens = x.len() / self.cols;
        let work = tokens.saturating_mul(self.rows).saturating_mul(self.cols);
        let threads =
            if work < 1 << 22 { 1 } else { std::thread::available_parallelism().map_or(1, usize::from) };
        let each = tokens.div_ceil(threads).max(1);
        let parts = x.chunks(each * self.cols).zip(y.chunks_mut(each * self.rows));
        if threads == 1 || tokens == 1 {
            return parts.for_each(|(x, y)| self.part(x, y, limit));
        }
        std::thread::scope(|scope| parts.for_each(|(x, y)| drop(scope.spawn(|| self.part(x, y, limit)))));
    }

    /// Some tokens: a row of the weights serves all of them before the next one.
    fn part(&self, x: &[f32], y: &mut [f32], limit: f32) {
        let tokens: Vec<Token> = x.chunks_exact(self.cols).map(|x| self.token(x, limit)).collect();
        for row in 0..self.rows {
            for (token, y) in tokens.iter().zip(y.chunks_exact_mut(self.rows)) {
                y[row] = self.dot(row, token);
            }
        }
    }

    fn dot(&self, row: usize, x: &Token) -> f32 {
        let of_row = row * self.cols..(row + 1) * self.cols;
        match &self.form {
            Form::Float(values, _) => dot(&values[of_row], &x.values),
            Form::Group(codes, groups) => {
                let groups = &groups[row * self.cols / GROUP..];
                let each = codes[of_row].as_chunks::<GROUP>().0.iter().zip(x.values.as_chunks::<GROUP>().0);
                let sums = each.zip(groups).map(|((codes, x), (scale, min))| {
                    let product: f32 = codes.iter().zip(x).map(|(code, x)| f32::from(*code) * x).sum();
                    if *min == 0.0 { scale * product } else { scale * product + min * x.iter().sum::<f32>() }
                });
                sums.sum()
            }
            Form::Channel(codes, scales, outliers) => {
                let sum = code_dot(&codes[of_row], &x.codes);
                let outliers = outliers.as_ref().map_or(0.0, |o| {
                    let count = o.columns.len();
                    let codes = &o.codes[row * count..][..count];
                    let products = codes
                        .iter()
                        .zip(&o.columns)
                        .map(|(code, c)| i64::from(*code) * i64::from(x.codes[*c]));
                    o.scales[row] * products.sum::<i64>() as f32
                });
                x.scale * (scales[row] * sum as f32 + outliers)
            }
        }
    }
}

/// Eight sums side by side, so that the compiler can use vectors.
fn dot(a: &[f32], b: &[f32]) -> f32 {
    let (a, a_rest) = a.as_chunks::<8>();
    let (b, b_rest) = b.as_chunks::<8>();
    let mut sums = [0f32; 8];
    for (a, b) in a.iter().zip(b) {
        for ((sum, a), b) in sums.iter_mut().zip(a).zip(b) {
            *sum += a * b;
        }
    }
    sums.iter().sum::<f32>() + a_rest.iter().zip(b_rest).map(|(a, b)| a * b).sum::<f32>()
}

fn code_dot(codes: &[i8], x: &[i16]) -> i64 {
    let spans = codes.chunks(SPAN).zip(x.chunks(SPAN));
    let sums = spans.map(|(codes, x)| {
        let sum: i32 = codes.iter().zip(x).map(|(code, x)| i32::from(*code) * i32::from(*x)).sum();
        i64::from(sum)
    });
    sums.sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use neuropil_plugin_sdk::Outliers as From;

    /// Numbers that look random, from -1 to 1.
    fn noise(count: usize, seed: u32) -> Vec<f32> {
        let mut state = seed;
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / 8_388_608.0 - 1.0
        };
        (0..count).map(|_| next()).collect()
    }

    #[test]
    fn products_of_each_scheme_are_those_of_its_elements() {
        let (rows, cols, tokens) = (33, 64, 3);
        let x = noise(tokens * cols, 1);
        let codes: Vec<u8> = noise(rows * cols * 4, 2).iter().map(|v| (v * 127.0) as i8 as u8).collect();
        let halves: Vec<u8> =
            noise(rows * cols, 3).iter().flat_map(|v| f16::from_f32(*v).to_le_bytes()).collect();
        let singles: Vec<u8> = noise(rows * cols, 4).iter().flat_map(|v| v.to_le_bytes()).collect();
        for scheme in Scheme::ALL {
            let [data, scales, mins] = scheme.bytes(rows, cols).unwrap();
            let float = |bits| if bits == 32 { &singles } else { &halves };
            let channel = matches!(scheme, Scheme::Channel8 | Scheme::Channel4);
            let outliers = From { columns: &[5, 63], data: &codes[..rows * 2], scales: &singles[..rows * 4] };
            let matrix = Matrix {
                scheme,
                rows,
                cols,
                data: &if scheme.bits() > 8 { float(scheme.bits()) } else { &codes }[..data],
                scales: &if channel { &singles } else { &halves }[..scales],
                mins: &halves[..mins],
                outliers: (scheme == Scheme::Channel4).then_some(outliers),
            };
            matrix.check().unwrap();
            let mut y = vec![0.0; tokens * rows];
            Elements::new(&matrix).multiply(&x, &mut y, 32767.0);
            let mut row = vec![0.0; cols];
            for r in 0..rows {
                matrix.widen_row(r, &mut row);
                for t in 0..tokens {
                    let pairs = row.iter().zip(&x[t * cols..]);
                    let exact: f64 = pairs.clone().map(|(w, x)| f64::from(*w) * f64::from(*x)).sum();
                    let size: f64 = pairs.map(|(w, x)| f64::from((w * x).abs())).sum();
                    let error = (f64::from(y[t * rows + r]) - exact).abs() / size;
                    assert!(error < 5e-4, "{scheme:?} {r} {t}: {error}");
                }
            }
        }
    }
}
