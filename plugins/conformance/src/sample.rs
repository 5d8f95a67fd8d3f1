//! Matrices of every scheme with chosen codes, and what they are worth in 64-bit floats.

use half::f16;
use neuropil_device::DType;
use neuropil_plugin_abi::{self as abi, AbiStruct, NpMatrix};

/// Columns that share a scale.
pub const GROUP: usize = 32;

/// The schemes of this version, with names.
pub const SCHEMES: [(u32, &str); 7] = [
    (abi::NP_SCHEME_F32, "f32"),
    (abi::NP_SCHEME_F16, "f16"),
    (abi::NP_SCHEME_GROUP8, "group8"),
    (abi::NP_SCHEME_GROUP4, "group4"),
    (abi::NP_SCHEME_GROUP4M, "group4m"),
    (abi::NP_SCHEME_CHANNEL8, "channel8"),
    (abi::NP_SCHEME_CHANNEL4, "channel4"),
];

/// A form of weights that is tested.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A scheme of the border.
    Scheme(u32),
    /// 4-bit codes per channel with outlier columns of 8 bits.
    Outliers,
    /// A type of model files, as the devices of neuropil take it.
    Type(DType),
}

impl Kind {
    /// Every kind: those of the border, then those of model files.
    pub fn all() -> impl Iterator<Item = Kind> {
        Kind::of_border().into_iter().chain(DType::ALL.map(Kind::Type))
    }

    /// The kinds of the border.
    pub fn of_border() -> Vec<Kind> {
        SCHEMES.iter().map(|(scheme, _)| Kind::Scheme(*scheme)).chain([Kind::Outliers]).collect()
    }

    /// Its name in the ids of cases.
    pub fn name(self) -> &'static str {
        match self {
            Kind::Scheme(scheme) => {
                SCHEMES.iter().find(|(number, _)| *number == scheme).map_or("unknown", |(_, name)| name)
            }
            Kind::Outliers => "channel4+outliers",
            Kind::Type(dtype) => dtype.name(),
        }
    }

    /// The number of its scheme at the border.
    pub fn scheme(self) -> u32 {
        match self {
            Kind::Scheme(scheme) => scheme,
            Kind::Outliers => abi::NP_SCHEME_CHANNEL4,
            Kind::Type(_) => 0,
        }
    }

    /// Columns are a multiple of this.
    pub fn granularity(self) -> usize {
        match self {
            Kind::Type(dtype) => dtype.block_elements(),
            _ if group(self.scheme()) > 0 => GROUP,
            _ if self.scheme() == abi::NP_SCHEME_CHANNEL4 => 2,
            _ => 1,
        }
    }

    /// Whether its elements are floats, and no codes.
    pub fn is_float(self) -> bool {
        match self {
            Kind::Type(dtype) => dtype.block_elements() == 1,
            _ => matches!(self.scheme(), abi::NP_SCHEME_F32 | abi::NP_SCHEME_F16),
        }
    }
}

/// What a matrix is filled with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fill {
    /// Random numbers.
    Random,
    /// Nothing: codes of 0.
    Zeros,
    /// The greatest code everywhere.
    Greatest,
    /// The least code everywhere.
    Least,
    /// The greatest and the least in turn.
    Checkered,
    /// Codes that go up from element to element, so that each place has another one than its neighbours.
    Rising,
    /// Random numbers in one row, 0 elsewhere.
    OneRow,
    /// Random numbers in one column, 0 elsewhere.
    OneColumn,
}

impl Fill {
    /// Every fill with its name.
    pub const ALL: [(Fill, &'static str); 8] = [
        (Fill::Random, "random"),
        (Fill::Zeros, "zeros"),
        (Fill::Greatest, "greatest"),
        (Fill::Least, "least"),
        (Fill::Checkered, "checkered"),
        (Fill::Rising, "rising"),
        (Fill::OneRow, "one-row"),
        (Fill::OneColumn, "one-column"),
    ];

    /// The value of a place, from -1 to 1.
    pub fn value(self, (row, col): (usize, usize), (rows, cols): (usize, usize), random: &mut Random) -> f32 {
        let drawn = random.value();
        match self {
            Fill::Random => drawn,
            Fill::Zeros => 0.0,
            Fill::Greatest => 1.0,
            Fill::Least => -1.0,
            Fill::Checkered => {
                if (row + col).is_multiple_of(2) {
                    1.0
                } else {
                    -1.0
                }
            }
            Fill::Rising => ((row * 5 + col * 3) % 31) as f32 / 15.0 - 1.0,
            Fill::OneRow => {
                if row == rows / 2 {
                    drawn
                } else {
                    0.0
                }
            }
            Fill::OneColumn => {
                if col == cols / 2 {
                    drawn
                } else {
                    0.0
                }
            }
        }
    }
}

/// The columns that share a scale in a scheme; 0 for none.
pub fn group(scheme: u32) -> u64 {
    let grouped = [abi::NP_SCHEME_GROUP8, abi::NP_SCHEME_GROUP4, abi::NP_SCHEME_GROUP4M];
    if grouped.contains(&scheme) { GROUP as u64 } else { 0 }
}

/// Random numbers that are the same in every run.
pub struct Random(u64);

impl Random {
    /// Begins with a seed.
    pub fn new(seed: u64) -> Random {
        Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 32
    }

    /// From -1 to 1.
    pub fn value(&mut self) -> f32 {
        (self.next() as f64 / f64::from(u32::MAX) * 2.0 - 1.0) as f32
    }

    /// As many values from -1 to 1.
    pub fn values(&mut self, len: usize) -> Vec<f32> {
        (0..len).map(|_| self.value()).collect()
    }
}

/// Outlier columns: which, their codes and their scales.
type Outliers = (Vec<u32>, Vec<u8>, Vec<u8>);

/// A matrix.
pub struct Sample {
    /// `NP_SCHEME_*`.
    pub scheme: u32,
    /// Outputs.
    pub rows: usize,
    /// Inputs.
    pub cols: usize,
    /// The bytes of the scheme.
    pub data: Vec<u8>,
    /// The bytes of its scales.
    pub scales: Vec<u8>,
    /// The bytes of its minima.
    pub mins: Vec<u8>,
    outliers: Option<Outliers>,
    /// What the elements are worth.
    pub values: Vec<f64>,
}

impl Sample {
    /// A matrix of random codes, whose elements lie around -1 to 1.
    pub fn random(scheme: u32, rows: usize, cols: usize, seed: u64) -> Sample {
        Sample::filled(scheme, rows, cols, Fill::Random, seed)
    }

    /// A matrix of chosen codes. Scales are random.
    pub fn filled(scheme: u32, rows: usize, cols: usize, fill: Fill, seed: u64) -> Sample {
        let mut random = Random::new(seed);
        let mut sample = Sample {
            scheme,
            rows,
            cols,
            data: Vec::new(),
            scales: Vec::new(),
            mins: Vec::new(),
            outliers: None,
            values: Vec::with_capacity(rows * cols),
        };
        let mut nibbles = Vec::new();
        let (mut scale, mut min) = (0.0, 0.0);
        for index in 0..rows * cols {
            let (row, col) = (index / cols, index % cols);
            match group(scheme) {
                0 if matches!(scheme, abi::NP_SCHEME_CHANNEL8 | abi::NP_SCHEME_CHANNEL4) && col == 0 => {
                    let full = if scheme == abi::NP_SCHEME_CHANNEL8 { 127.0 } else { 8.0 };
                    let of_row = (0.6 + 0.4 * random.value()) / full;
                    sample.scales.extend(of_row.to_le_bytes());
                    scale = f64::from(of_row);
                }
                32 if col.is_multiple_of(GROUP) => {
                    let full = if scheme == abi::NP_SCHEME_GROUP8 { 127.0 } else { 8.0 };
                    let of_group = f16::from_f32((0.6 + 0.4 * random.value()) / full);
                    sample.scales.extend(of_group.to_le_bytes());
                    scale = of_group.to_f64();
                    if scheme == abi::NP_SCHEME_GROUP4M {
                        let of_group = f16::from_f32(-0.8 + 0.2 * random.value());
                        sample.mins.extend(of_group.to_le_bytes());
                        min = of_group.to_f64();
                    }
                }
                _ => {}
            }
            let drawn = fill.value((row, col), (rows, cols), &mut random);
            let code = |least: f32, greatest: f32| {
                let code = if drawn < 0.0 { -drawn * least } else { drawn * greatest };
                code.round() as i64
            };
            let value = match scheme {
                abi::NP_SCHEME_F32 => {
                    sample.data.extend(drawn.to_le_bytes());
                    f64::from(drawn)
                }
                abi::NP_SCHEME_F16 => {
                    let value = f16::from_f32(drawn);
                    sample.data.extend(value.to_le_bytes());
                    value.to_f64()
                }
                abi::NP_SCHEME_GROUP8 | abi::NP_SCHEME_CHANNEL8 => {
                    let code = code(-127.0, 127.0);
                    sample.data.push(code as u8);
                    scale * code as f64
                }
                abi::NP_SCHEME_GROUP4M => {
                    let code = (code(-8.0, 7.0) + 8) as u8;
                    nibbles.push(code);
                    scale * f64::from(code) + min
                }
                _ => {
                    let code = code(-8.0, 7.0);
                    nibbles.push(code as u8 & 15);
                    scale * code as f64
                }
            };
            sample.values.push(value);
        }
        sample.data.extend(nibbles.chunks(2).map(|pair| pair[0] | pair[1] << 4));
        sample
    }

    /// The same matrix of per-channel 4-bit codes with outlier columns: the first, the middle and the last.
    pub fn with_outliers(mut self, seed: u64) -> Sample {
        let mut random = Random::new(seed);
        let mut columns = vec![0, self.cols as u32 / 2, self.cols as u32 - 1];
        columns.dedup();
        let (mut data, mut scales) = (Vec::new(), Vec::new());
        for row in 0..self.rows {
            let scale = 0.02f32 + 0.01 * random.value();
            scales.extend(scale.to_le_bytes());
            for column in &columns {
                let code = (127.0 * random.value()).round() as i64;
                let index = row * self.cols + *column as usize;
                data.push(code as u8);
                self.data[index / 2] &= if index.is_multiple_of(2) { 0xf0 } else { 0x0f };
                self.values[index] = f64::from(scale) * code as f64;
            }
        }
        self.outliers = Some((columns, data, scales));
        self
    }

    /// As the header has it. It borrows the bytes.
    pub fn matrix(&self) -> NpMatrix {
        let mut matrix = NpMatrix {
            scheme: self.scheme,
            rows: self.rows as u64,
            cols: self.cols as u64,
            group: group(self.scheme),
            data: self.data.as_ptr().cast(),
            data_bytes: self.data.len() as u64,
            scales: self.scales.as_ptr().cast(),
            scales_bytes: self.scales.len() as u64,
            mins: self.mins.as_ptr().cast(),
            mins_bytes: self.mins.len() as u64,
            ..NpMatrix::new()
        };
        if let Some((columns, data, scales)) = &self.outliers {
            matrix.outlier_count = columns.len() as u64;
            matrix.outlier_columns = columns.as_ptr();
            (matrix.outlier_data, matrix.outlier_scales) = (data.as_ptr().cast(), scales.as_ptr().cast());
        }
        matrix
    }

    /// `x · wᵀ` in 64-bit floats.
    pub fn product(&self, x: &[f64]) -> Vec<f64> {
        x.chunks_exact(self.cols)
            .flat_map(|x| {
                let row = move |w: &[f64]| w.iter().zip(x).map(|(w, x)| w * x).sum();
                self.values.chunks_exact(self.cols).map(row)
            })
            .collect()
    }
}

/// The length of what is wrong over the length of what is right; infinite when a value is not a number.
pub fn relative_error(found: &[f32], want: &[f64]) -> f64 {
    assert_eq!(found.len(), want.len());
    let wrong: f64 = found.iter().zip(want).map(|(f, w)| (f64::from(*f) - w).powi(2)).sum();
    let right: f64 = want.iter().map(|w| w * w).sum();
    let error = (wrong / right.max(1e-300)).sqrt();
    if error.is_nan() { f64::INFINITY } else { error }
}
