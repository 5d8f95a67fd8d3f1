//! Finds wrong results of products for next to nothing.
//!
//! For random signs `r`, `r · (W x) = (r W) · x`. The right side costs one row once `r W` is known, so every result of
//! every product can be checked, however large the matrix (Freivalds' check). A tile that went missing, a channel with
//! another one's scale or last job's output moves the left side by about its own size; rounding moves it by the error
//! that the unit showed in its self-test, and that is allowed many times over.
//!
//! A unit that quantises its inputs rounds them in steps of the largest, so its error grows with that and not with the
//! inputs' norm. What is allowed is measured with inputs as large as the largest everywhere. So of units with 8-bit inputs
//! only gross faults are found where inputs have outliers; of those that compute in floats or with 16 bits, tiles are.

use neuropil_device::DeviceError;

use crate::Encoded;

/// How often the error of the self-test is allowed. Its inputs are spread evenly, for which rounding in steps comes to
/// about twice what it does here.
const MARGIN: f64 = 8.0;
/// The least error that is allowed.
const LEAST: f64 = 1e-4;
/// The error of a unit that was not tested.
const UNTESTED: f64 = 0.06;

/// What the results of one matrix are checked with.
pub(crate) struct Projection {
    /// `r W`, per column.
    sums: Vec<f32>,
    /// The sum of the squares of each column.
    squares: Vec<f32>,
    /// The sum of all squares.
    square: f64,
    /// The error that the unit has.
    error: f64,
}

impl Projection {
    /// For a matrix on a unit that had this error in its self-test, if it was tested.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`].
    pub fn new(matrix: &Encoded, error: Option<f64>) -> Result<Projection, DeviceError> {
        let zeros = || {
            let mut list = Vec::new();
            let bytes = matrix.cols.saturating_mul(4);
            let refused = list.try_reserve_exact(matrix.cols);
            refused.map_err(|_| DeviceError::OutOfMemory { device: "host".into(), bytes })?;
            list.resize(matrix.cols, 0f32);
            Ok(list)
        };
        let (mut row, mut sums, mut squares) = (zeros()?, zeros()?, zeros()?);
        for index in 0..matrix.rows {
            matrix.widen_row(index, &mut row);
            let sign = sign(index);
            for ((value, sum), square) in row.iter().zip(&mut sums).zip(&mut squares) {
                *sum += sign * value;
                *square += value * value;
            }
        }
        let square = squares.iter().map(|square| f64::from(*square)).sum();
        Ok(Projection { sums, squares, square, error: error.unwrap_or(UNTESTED) })
    }

    /// Whether `y`, `[tokens, rows]`, may be the product with `x`, `[tokens, cols]`.
    pub fn fits(&self, x: &[f32], y: &[f32]) -> bool {
        let cols = self.sums.len();
        let rows = y.len() / (x.len() / cols).max(1);
        x.chunks_exact(cols).zip(y.chunks_exact(rows.max(1))).all(|(x, y)| {
            let (mut want, mut terms, mut largest) = (0f64, 0f64, 0f64);
            for ((x, sum), square) in x.iter().zip(&self.sums).zip(&self.squares) {
                let x = f64::from(*x);
                want += x * f64::from(*sum);
                terms += x * x * f64::from(*square);
                largest = largest.max(x.abs());
            }
            let found: f64 = y.iter().enumerate().map(|(row, y)| f64::from(sign(row) * y)).sum();
            let deviation = (found - want).abs();
            // Sums that are not finite are looked at elsewhere.
            let allowed = (LEAST * terms.sqrt()).max(MARGIN * self.error * largest * self.square.sqrt());
            !deviation.is_finite() || deviation <= allowed + f64::from(f32::MIN_POSITIVE)
        })
    }
}

/// The sign of a row: as good as random, and always the same.
fn sign(row: usize) -> f32 {
    let mixed = (row as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let mixed = (mixed ^ (mixed >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    if mixed >> 63 == 0 { 1.0 } else { -1.0 }
}

#[cfg(test)]
mod tests {
    use neuropil_device::{DType, Matrix};

    use super::*;
    use crate::Scheme;

    #[test]
    fn right_results_pass_and_a_wrong_tile_does_not() {
        let (rows, cols, tokens) = (192, 64, 3);
        let value = |i: usize| ((i * 7919 + 13) % 1009) as f32 / 504.5 - 1.0;
        let values: Vec<f32> = (0..rows * cols).map(value).collect();
        let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        let matrix = Matrix { dtype: DType::F32, rows, cols, data: &bytes };
        let encoded = Encoded::new(&matrix, Scheme::F32, 0).unwrap();
        let x: Vec<f32> = (0..tokens * cols).map(|i| value(i + 5)).collect();
        let products = |x: &[f32]| -> Vec<f32> {
            let row = |w: &[f32], x: &[f32]| w.iter().zip(x).map(|(w, x)| w * x).sum();
            x.chunks_exact(cols).flat_map(|x| values.chunks_exact(cols).map(move |w| row(w, x))).collect()
        };
        let y = products(&x);
        let exact = Projection::new(&encoded, Some(1e-6)).unwrap();
        let coarse = Projection::new(&encoded, Some(4e-3)).unwrap();
        assert!(exact.fits(&x, &y) && coarse.fits(&x, &y));
        let wrong_tile = |y: &[f32]| {
            let mut wrong = y.to_vec();
            wrong[..16].iter_mut().for_each(|v| *v = 1.0 - 3.0 * *v);
            wrong
        };
        let zeros = vec![0.0; x.len()];
        assert!(exact.fits(&zeros, &vec![0.0; y.len()]) && !exact.fits(&zeros, &y));
        for spoil in [|v: &mut f32| *v = 0.0, |v: &mut f32| *v = 1.0 - 3.0 * *v, |v: &mut f32| *v *= 1.01] {
            let mut wrong = y.clone();
            wrong[rows..rows + 16].iter_mut().for_each(spoil);
            assert!(!exact.fits(&x, &wrong));
        }
        // Inputs of 16 bits and one that is large: rounding in its steps is no fault.
        let mut large = x.clone();
        large[7] = 400.0;
        let mut rounded = large.clone();
        rounded[..cols].iter_mut().for_each(|x| *x = (*x / 400.0 * 32767.0).round() * 400.0 / 32767.0);
        let sixteen = Projection::new(&encoded, Some(1.5e-5)).unwrap();
        assert!(
            sixteen.fits(&large, &products(&rounded))
                && !sixteen.fits(&large, &wrong_tile(&products(&large)))
        );
        // What 8-bit activations do is no fault; the results of another token are.
        let noisy: Vec<f32> = y.iter().enumerate().map(|(i, y)| y + 0.05 * value(3 * i)).collect();
        assert!(!exact.fits(&x, &noisy) && coarse.fits(&x, &noisy));
        let mut moved = y.clone();
        moved.rotate_right(rows);
        assert!(!coarse.fits(&x, &moved));
    }
}
