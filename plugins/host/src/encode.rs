//! From the types of model files to the schemes of the border, row by row, so that a weight is in memory once.
//!
//! Q8_0, Q4_0 and Q4_1 are only taken apart: the same codes and scales, in the border's order. Every other type is
//! widened and rounded anew.

use half::f16;
use neuropil_device::quant::{dequantize_row, quantize_row};
use neuropil_device::{AlignedBytes, DType, DeviceError, Matrix};

use crate::Scheme;
use crate::scheme::GROUP;

/// Bytes of a weight that are read at a time, about.
const PIECE: usize = 1 << 20;

/// Largest value that F16 holds.
const MOST_F16: f32 = 65504.0;

/// Columns of a [`Scheme::Channel4`] matrix that keep 8 bits.
#[derive(Debug)]
pub struct Outliers {
    /// Which, ascending.
    pub columns: Vec<u32>,
    /// 8-bit codes `[rows, columns]`.
    pub codes: AlignedBytes,
    /// A scale per row.
    pub scales: Vec<f32>,
}

/// A matrix as it goes over the border.
#[derive(Debug)]
pub struct Encoded {
    /// How it is written down.
    pub scheme: Scheme,
    /// Outputs.
    pub rows: usize,
    /// Inputs.
    pub cols: usize,
    /// Elements or codes.
    pub data: AlignedBytes,
    /// Scales, F16 or F32 as the scheme says.
    pub scales: AlignedBytes,
    /// Minima, F16.
    pub mins: AlignedBytes,
    /// Outliers, if there are any.
    pub outliers: Option<Outliers>,
}

fn reserve<T: Clone>(count: usize, value: T) -> Result<Vec<T>, DeviceError> {
    let mut list = Vec::new();
    list.try_reserve_exact(count).map_err(|_| out_of_memory(count.saturating_mul(size_of::<T>())))?;
    list.resize(count, value);
    Ok(list)
}

fn out_of_memory(bytes: usize) -> DeviceError {
    DeviceError::OutOfMemory { device: "host".into(), bytes }
}

/// Calls `take` with every row in turn, as it lies in the file.
fn each_row(
    matrix: &Matrix<'_>,
    mut take: impl FnMut(usize, &[u8]) -> Result<(), DeviceError>,
) -> Result<(), DeviceError> {
    let bytes = matrix.data.len() / matrix.rows;
    let rows = (PIECE / bytes.max(1)).clamp(1, matrix.rows);
    let mut piece = reserve(rows * bytes, 0u8)?;
    for first in (0..matrix.rows).step_by(rows) {
        let piece = &mut piece[..rows.min(matrix.rows - first) * bytes];
        matrix.data.read(first * bytes, piece)?;
        for (row, data) in piece.chunks_exact(bytes).enumerate() {
            take(first + row, data)?;
        }
    }
    Ok(())
}

impl Encoded {
    /// Writes `matrix` down in `scheme`. Of 1000 columns `outliers` keep 8 bits, where the scheme has outliers.
    ///
    /// # Errors
    /// [`DeviceError::Shape`] for a matrix that is not whole or does not fit the scheme, [`DeviceError::OutOfMemory`],
    /// [`DeviceError::Source`].
    pub fn new(matrix: &Matrix<'_>, scheme: Scheme, outliers: usize) -> Result<Encoded, DeviceError> {
        matrix.check()?;
        let (rows, cols) = (matrix.rows, matrix.cols);
        let bytes = matrix.data.len();
        let sizes = scheme.bytes(rows, cols);
        let sizes = sizes.ok_or(DeviceError::Shape { dtype: matrix.dtype, rows, cols, bytes })?;
        let zeroed = |bytes| AlignedBytes::zeroed(bytes).map_err(|_| out_of_memory(bytes));
        let [data, scales, mins] = sizes.map(zeroed);
        let mut out =
            Encoded { scheme, rows, cols, data: data?, scales: scales?, mins: mins?, outliers: None };
        if scheme == Scheme::Channel4 {
            let columns = outlier_columns(matrix, (cols * outliers).div_ceil(1000))?;
            if !columns.is_empty() {
                let codes = zeroed(rows * columns.len())?;
                out.outliers = Some(Outliers { columns, codes, scales: reserve(rows, 0f32)? });
            }
        }
        let mut wide = reserve(cols, 0f32)?;
        let block = scheme.block_type();
        let mut blocks = reserve(block.and_then(|block| block.row_bytes(cols)).unwrap_or(0), 0u8)?;
        each_row(matrix, |row, bytes| {
            match block {
                Some(block) if block == matrix.dtype => out.take_apart(row, block, bytes),
                Some(DType::Q8_0) if matrix.dtype == DType::Q4_0 => out.widen_codes(row, bytes),
                Some(block) => {
                    dequantize_row(matrix.dtype, bytes, &mut wide);
                    quantize_row(block, &wide, &mut blocks);
                    out.take_apart(row, block, &blocks);
                }
                None => {
                    dequantize_row(matrix.dtype, bytes, &mut wide);
                    out.put_row(row, &mut wide);
                }
            }
            Ok(())
        })?;
        Ok(out)
    }

    /// Memory that it takes.
    pub fn bytes(&self) -> usize {
        let outliers = self.outliers.as_ref().map_or(0, |o| o.codes.as_ref().len() + 4 * o.scales.len());
        self.data.as_ref().len() + self.scales.as_ref().len() + self.mins.as_ref().len() + outliers
    }

    fn row_of(bytes: &mut AlignedBytes, rows: usize, row: usize) -> &mut [u8] {
        let each = bytes.as_ref().len() / rows;
        &mut bytes.as_mut()[row * each..][..each]
    }

    /// Codes, scales and minima of a row of blocks.
    fn take_apart(&mut self, row: usize, block: DType, blocks: &[u8]) {
        let data = Self::row_of(&mut self.data, self.rows, row);
        let scales = Self::row_of(&mut self.scales, self.rows, row);
        let mins = Self::row_of(&mut self.mins, self.rows, row);
        for (g, block_bytes) in blocks.chunks_exact(block.block_bytes()).enumerate() {
            scales[2 * g..2 * g + 2].copy_from_slice(&block_bytes[..2]);
            let head = if block == DType::Q4_1 { 4 } else { 2 };
            if block == DType::Q4_1 {
                mins[2 * g..2 * g + 2].copy_from_slice(&block_bytes[2..4]);
            }
            let codes = &block_bytes[head..];
            if block == DType::Q8_0 {
                data[g * GROUP..][..GROUP].copy_from_slice(codes);
                continue;
            }
            // A code of Q4_0 is 8 more than its value; in two's complement that is the highest bit turned.
            let turn = if block == DType::Q4_0 { 8 } else { 0 };
            let code = |i: usize| (if i < 16 { codes[i] & 15 } else { codes[i - 16] >> 4 }) ^ turn;
            for (i, byte) in data[g * GROUP / 2..][..GROUP / 2].iter_mut().enumerate() {
                *byte = code(2 * i) | code(2 * i + 1) << 4;
            }
        }
    }

    /// Blocks of Q4_0 as those of Q8_0 with the same scale: the codes keep their values.
    fn widen_codes(&mut self, row: usize, blocks: &[u8]) {
        let data = Self::row_of(&mut self.data, self.rows, row);
        let scales = Self::row_of(&mut self.scales, self.rows, row);
        for (g, block) in blocks.chunks_exact(DType::Q4_0.block_bytes()).enumerate() {
            scales[2 * g..2 * g + 2].copy_from_slice(&block[..2]);
            for (i, byte) in block[2..].iter().enumerate() {
                data[g * GROUP + i] = (byte & 15).wrapping_sub(8);
                data[g * GROUP + 16 + i] = (byte >> 4).wrapping_sub(8);
            }
        }
    }

    /// A row of values in one of the other schemes. What goes to the outliers is set to 0 in `values`.
    fn put_row(&mut self, row: usize, values: &mut [f32]) {
        if let Some(outliers) = &mut self.outliers {
            let count = outliers.columns.len();
            let mut kept = outliers.columns.iter().map(|column| values[*column as usize]);
            let scale = kept.clone().fold(0f32, |most, v| most.max(v.abs())) / 127.0;
            outliers.scales[row] = scale;
            let codes = &mut outliers.codes.as_mut()[row * count..][..count];
            codes.iter_mut().zip(&mut kept).for_each(|(code, v)| *code = quantize(v, scale, 127.0) as u8);
            outliers.columns.iter().for_each(|column| values[*column as usize] = 0.0);
        }
        let data = Self::row_of(&mut self.data, self.rows, row);
        match self.scheme {
            Scheme::F32 => {
                let places = data.as_chunks_mut::<4>().0.iter_mut();
                places.zip(values).for_each(|(place, v)| *place = v.to_le_bytes());
            }
            Scheme::F16 => {
                let narrow = |v: f32| f16::from_f32(v.clamp(-MOST_F16, MOST_F16)).to_le_bytes();
                let places = data.as_chunks_mut::<2>().0.iter_mut();
                places.zip(values).for_each(|(place, v)| *place = narrow(*v));
            }
            Scheme::Channel8 => {
                let scale = values.iter().fold(0f32, |most, v| most.max(v.abs())) / 127.0;
                data.iter_mut().zip(values).for_each(|(code, v)| *code = quantize(*v, scale, 127.0) as u8);
                Self::row_of(&mut self.scales, self.rows, row).copy_from_slice(&scale.to_le_bytes());
            }
            _ => {
                let scale = best_scale(values);
                let code = |v: f32| quantize(v, scale, 7.0) as u8 & 15;
                for (byte, pair) in data.iter_mut().zip(values.as_chunks::<2>().0) {
                    *byte = code(pair[0]) | code(pair[1]) << 4;
                }
                Self::row_of(&mut self.scales, self.rows, row).copy_from_slice(&scale.to_le_bytes());
            }
        }
    }

    /// Widens row `row` to `out`, which has a value per column: what the unit is told, not what the file says.
    ///
    /// # Panics
    /// When there is no such row, or `out` has another length.
    pub fn widen_row(&self, row: usize, out: &mut [f32]) {
        assert!(row < self.rows && out.len() == self.cols, "row {row} of {} x {}", self.rows, self.cols);
        let part = |bytes: &'_ AlignedBytes| {
            let each = bytes.as_ref().len() / self.rows;
            row * each..(row + 1) * each
        };
        let data = &self.data.as_ref()[part(&self.data)];
        let scales = &self.scales.as_ref()[part(&self.scales)];
        let mins = &self.mins.as_ref()[part(&self.mins)];
        let half = |bytes: &[u8], i: usize| f16::from_le_bytes([bytes[2 * i], bytes[2 * i + 1]]).to_f32();
        let single = |bytes: &[u8], i: usize| f32::from_le_bytes(bytes.as_chunks().0[i]);
        let nibble = |i: usize| data[i / 2] >> (4 * (i % 2)) & 15;
        let signed = |i: usize| f32::from((nibble(i) << 4) as i8 >> 4);
        for (i, out) in out.iter_mut().enumerate() {
            *out = match self.scheme {
                Scheme::F32 => single(data, i),
                Scheme::F16 => half(data, i),
                Scheme::Group8 => half(scales, i / GROUP) * f32::from(data[i] as i8),
                Scheme::Group4 => half(scales, i / GROUP) * signed(i),
                Scheme::Group4Min => half(scales, i / GROUP) * f32::from(nibble(i)) + half(mins, i / GROUP),
                Scheme::Channel8 => single(scales, 0) * f32::from(data[i] as i8),
                Scheme::Channel4 => single(scales, 0) * signed(i),
            };
        }
        if let Some(outliers) = &self.outliers {
            let codes = &outliers.codes.as_ref()[row * outliers.columns.len()..];
            for (column, code) in outliers.columns.iter().zip(codes) {
                out[*column as usize] = outliers.scales[row] * f32::from(*code as i8);
            }
        }
    }
}

fn quantize(value: f32, scale: f32, limit: f32) -> i8 {
    if scale > 0.0 { (value / scale).round().clamp(-limit, limit) as i8 } else { 0 }
}

/// The scale of a row in 4 bits: of some that cut the row's peak, the one with the least squared error.
fn best_scale(values: &[f32]) -> f32 {
    let most = values.iter().fold(0f32, |most, v| most.max(v.abs()));
    let loss = |scale: f32| -> f32 {
        let errors = values.iter().map(|v| v - scale * f32::from(quantize(*v, scale, 7.0)));
        errors.map(|error| error * error).sum()
    };
    let scales = (0..8).map(|step| most / 7.0 * (1.0 - 0.07 * step as f32));
    scales
        .map(|scale| (loss(scale), scale))
        .min_by(|a, b| a.0.total_cmp(&b.0))
        .map_or(0.0, |(_, scale)| scale)
}

/// The columns whose weights stand out of their rows most: by the mean of the fourth power of what a weight is in
/// standard deviations of its row.
fn outlier_columns(matrix: &Matrix<'_>, count: usize) -> Result<Vec<u32>, DeviceError> {
    if count == 0 || u32::try_from(matrix.cols).is_err() {
        return Ok(Vec::new());
    }
    let mut wide = reserve(matrix.cols, 0f32)?;
    let mut scores = reserve(matrix.cols, 0f32)?;
    each_row(matrix, |_, bytes| {
        dequantize_row(matrix.dtype, bytes, &mut wide);
        let variance = wide.iter().map(|v| v * v).sum::<f32>() / matrix.cols as f32;
        if variance > 0.0 {
            scores.iter_mut().zip(&wide).for_each(|(score, v)| *score += (v * v / variance).powi(2));
        }
        Ok(())
    })?;
    let mut columns: Vec<u32> = (0..matrix.cols as u32).collect();
    let count = count.min(columns.len());
    columns.sort_by(|a, b| scores[*b as usize].total_cmp(&scores[*a as usize]));
    columns.truncate(count);
    columns.sort_unstable();
    Ok(columns)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn values(count: usize) -> Vec<f32> {
        (0..count).map(|i| ((i * 37 + 11) % 101) as f32 / 50.0 - 1.0).collect()
    }

    fn relative_error(dtype: DType, scheme: Scheme, outliers: usize, values: &[f32]) -> f32 {
        let (rows, cols) = (4, values.len() / 4);
        let mut bytes = vec![0; dtype.matrix_bytes(rows, cols).unwrap()];
        let each = bytes.len() / rows;
        for (x, out) in values.chunks_exact(cols).zip(bytes.chunks_exact_mut(each)) {
            quantize_row(dtype, x, out);
        }
        let encoded = Encoded::new(&Matrix { dtype, rows, cols, data: &bytes }, scheme, outliers).unwrap();
        let (mut got, mut want) = (vec![0.0; cols], vec![0.0; cols]);
        let mut sums = (0.0, 0.0);
        for (row, bytes) in bytes.chunks_exact(each).enumerate() {
            encoded.widen_row(row, &mut got);
            dequantize_row(dtype, bytes, &mut want);
            for (got, want) in got.iter().zip(&want) {
                sums = (sums.0 + (got - want) * (got - want), sums.1 + want * want);
            }
        }
        (sums.0 / sums.1).sqrt()
    }

    #[test]
    fn types_with_a_scheme_of_their_own_keep_every_bit() {
        for (dtype, scheme) in [
            (DType::F32, Scheme::F32),
            (DType::F16, Scheme::F16),
            (DType::BF16, Scheme::F32),
            (DType::Q8_0, Scheme::Group8),
            (DType::Q4_0, Scheme::Group4),
            (DType::Q4_0, Scheme::Group8),
            (DType::Q4_1, Scheme::Group4Min),
            (DType::Q4_K, Scheme::F32),
        ] {
            assert_eq!(relative_error(dtype, scheme, 0, &values(4 * 256)), 0.0, "{dtype}");
        }
    }

    #[test]
    fn other_schemes_are_as_close_as_their_bits_allow() {
        for (scheme, bound) in [
            (Scheme::F16, 3e-4),
            (Scheme::Group8, 4e-3),
            (Scheme::Group4, 0.08),
            (Scheme::Group4Min, 0.08),
            (Scheme::Channel8, 4e-3),
            (Scheme::Channel4, 0.08),
        ] {
            let error = relative_error(DType::F32, scheme, 0, &values(4 * 64));
            assert!(error < bound, "{scheme:?}: {error}");
        }
    }

    #[test]
    fn outliers_save_the_columns_beside_them() {
        let mut values = values(4 * 64);
        values.chunks_exact_mut(64).for_each(|row| row[13] = 20.0);
        let without = relative_error(DType::F32, Scheme::Channel4, 0, &values);
        let with = relative_error(DType::F32, Scheme::Channel4, 10, &values);
        assert!(with < 0.025 && without > 0.1, "{with} {without}");
    }

    #[test]
    fn a_width_that_does_not_fit_and_bytes_that_are_not_there_are_errors() {
        let data = vec![0u8; 4 * 33];
        let matrix = Matrix { dtype: DType::F32, rows: 1, cols: 33, data: &data };
        for scheme in [Scheme::Group8, Scheme::Channel4] {
            assert!(matches!(Encoded::new(&matrix, scheme, 0), Err(DeviceError::Shape { .. })));
        }
        let matrix = Matrix { cols: 32, ..matrix };
        assert!(matches!(Encoded::new(&matrix, Scheme::F32, 0), Err(DeviceError::Shape { .. })));
    }
}
