//! A row of weights in the making: codes of four bits and a scale for every 32 of them.
//!
//! Q4_0 holds exactly this, so what has to be exact (a sign, one large value) is, and a row of random codes costs no
//! search for scales. Other types are made from the values.

use neuropil_device::{DType, quant};

/// Codes of a block.
pub(super) const BLOCK: usize = 32;

/// The standard deviation of [`random_codes`].
pub(super) const CODE_DEVIATION: f64 = 4.183_300_132_670_378;

/// Two codes of zero.
const ZEROS: u8 = 0x88;

/// A row. Code i of a block is in the low nibble of byte i, code i + 16 in the high one; 8 stands for zero.
pub(super) struct Row {
    codes: Vec<[u8; BLOCK / 2]>,
    scales: Vec<f32>,
    values: Vec<f32>,
    file: Vec<u8>,
}

impl Row {
    /// A row of zeros.
    pub(super) fn new(cols: usize) -> Row {
        let blocks = cols / BLOCK;
        Row {
            codes: vec![[ZEROS; BLOCK / 2]; blocks],
            scales: vec![0.0; blocks],
            values: Vec::new(),
            file: Vec::new(),
        }
    }

    /// Makes it a row of `cols` zeros.
    pub(super) fn reset(&mut self, cols: usize) {
        let blocks = cols / BLOCK;
        self.codes.clear();
        self.codes.resize(blocks, [ZEROS; BLOCK / 2]);
        self.scales.clear();
        self.scales.resize(blocks, 0.0);
    }

    /// Blocks.
    pub(super) fn blocks(&self) -> usize {
        self.codes.len()
    }

    /// Sets all codes of a block.
    pub(super) fn set_block(&mut self, block: usize, codes: [u8; BLOCK / 2], scale: f32) {
        (self.codes[block], self.scales[block]) = (codes, scale);
    }

    /// Sets one code, -8 to 7, and the scale of its block.
    pub(super) fn set_code(&mut self, col: usize, code: i8, scale: f32) {
        let (block, i) = (col / BLOCK, col % BLOCK);
        let byte = &mut self.codes[block][i % 16];
        let nibble = (code + 8) as u8 & 15;
        *byte = if i < 16 { (*byte & 0xf0) | nibble } else { (*byte & 0x0f) | nibble << 4 };
        self.scales[block] = scale;
    }

    /// Sets one value, exact to the precision of a half; the others of its block are zero.
    pub(super) fn set_value(&mut self, col: usize, value: f32) {
        self.set_code(col, 7, value / 7.0);
    }

    /// A code, -8 to 7.
    #[cfg(test)]
    pub(super) fn code(&self, col: usize) -> i8 {
        code_of(&self.codes[col / BLOCK], col % BLOCK)
    }

    /// Writes the row as it is in a file.
    pub(super) fn write(&mut self, dtype: DType, out: &mut [u8]) {
        if dtype == DType::Q4_0 {
            for ((codes, scale), out) in self.codes.iter().zip(&self.scales).zip(out.chunks_exact_mut(18)) {
                out[..2].copy_from_slice(&half::f16::from_f32(*scale).to_le_bytes());
                out[2..].copy_from_slice(codes);
            }
            return;
        }
        self.values.clear();
        for (codes, scale) in self.codes.iter().zip(&self.scales) {
            self.values.extend((0..BLOCK).map(|i| f32::from(code_of(codes, i)) * scale));
        }
        quant::quantize_row(dtype, &self.values, out);
    }

    /// Writes the row as it is in a bundle.
    pub(super) fn write_bundled(&mut self, dtype: DType, out: &mut [u8]) {
        let cols = self.codes.len() * BLOCK;
        if dtype == DType::Q4_0 {
            let (codes, scales) = out.split_at_mut(cols / 2);
            codes.copy_from_slice(self.codes.as_flattened());
            for (scale, out) in self.scales.iter().zip(scales.chunks_exact_mut(2)) {
                out.copy_from_slice(&half::f16::from_f32(*scale).to_le_bytes());
            }
            return;
        }
        let mut file = std::mem::take(&mut self.file);
        file.resize(dtype.row_bytes(cols).unwrap_or(0), 0);
        self.write(dtype, &mut file);
        quant::bundle_row(dtype, cols, &file, out);
        self.file = file;
    }
}

/// Code `i` of a block, -8 to 7.
pub(super) fn code_of(codes: &[u8; BLOCK / 2], i: usize) -> i8 {
    let byte = codes[i % 16];
    (if i < 16 { byte & 15 } else { byte >> 4 }) as i8 - 8
}

/// Sixteen codes from -7 to 7 out of random bits. They are symmetric around zero, so that their sum has no drift.
#[inline]
pub(super) fn random_codes(bits: u64) -> u64 {
    const LOW: u64 = 0x1111_1111_1111_1111;
    // A nibble of 0 would be -8, which has no counterpart: it becomes 8, a code of zero.
    let any = bits | bits >> 1;
    let any = (any | any >> 2) & LOW;
    bits | (any ^ LOW) << 3
}

/// A block of codes of one size with random signs: bit i of `bits` gives that of code i.
pub(super) fn sign_codes(bits: u64) -> [u8; BLOCK / 2] {
    std::array::from_fn(|i| {
        let nibble =
            |bit: usize| if bits >> bit & 1 == 1 { 8 + SIGN_CODE as u8 } else { 8 - SIGN_CODE as u8 };
        nibble(i) | nibble(i + 16) << 4
    })
}

/// The size of the codes of [`sign_codes`].
pub(super) const SIGN_CODE: i8 = 7;

#[cfg(test)]
mod tests {
    use super::super::random::Key;
    use super::*;

    #[test]
    fn random_codes_are_symmetric_and_have_their_deviation() {
        let key = Key::new(1, 2, 3, 4);
        let mut counts = [0f64; 16];
        for i in 0..100_000 {
            let codes = random_codes(key.at(i));
            (0..16).for_each(|n| counts[(codes >> (4 * n) & 15) as usize] += 1.0 / 1.6e6);
        }
        assert_eq!(counts[0], 0.0);
        let moment =
            |power| counts.iter().enumerate().map(|(n, c)| c * (n as f64 - 8.0).powi(power)).sum::<f64>();
        assert!(moment(1).abs() < 0.02);
        assert!((moment(2).sqrt() - CODE_DEVIATION).abs() < 0.01);
    }

    #[test]
    fn a_row_has_the_same_values_in_a_file_and_in_a_bundle() {
        let key = Key::new(1, 2, 3, 4);
        for dtype in [DType::Q4_0, DType::Q8_0, DType::F16] {
            let mut row = Row::new(64);
            let bits = [random_codes(key.at(0)), random_codes(key.at(1))];
            row.set_block(0, bytemuck::cast(bits), 0.25);
            row.set_value(37, -1.75);
            assert_eq!(row.code(37), 7);
            let mut file = vec![0; dtype.row_bytes(64).unwrap()];
            row.write(dtype, &mut file);
            let mut bundled = vec![0; quant::bundle_row_bytes(dtype, 64).unwrap()];
            row.write_bundled(dtype, &mut bundled);
            let (mut a, mut b) = (vec![0.0; 64], vec![0.0; 64]);
            quant::dequantize_row(dtype, &file, &mut a);
            quant::dequantize_bundle_row(dtype, &bundled, &mut b);
            assert_eq!(a, b);
            for (col, value) in a.iter().enumerate() {
                let want = if col < 32 {
                    0.25 * f32::from(row.code(col))
                } else if col == 37 {
                    -1.75
                } else {
                    0.0
                };
                assert!((value - want).abs() < 0.08, "{dtype} {col}: {value} {want}");
            }
        }
    }

    #[test]
    fn signs_are_of_one_size() {
        let codes = sign_codes(0b1001);
        let found: Vec<i8> = (0..5).map(|i| code_of(&codes, i)).collect();
        assert_eq!(found, [7, -7, -7, 7, -7]);
    }
}
