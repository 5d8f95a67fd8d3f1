//! Weights as they come over the border, after every length was checked.

use half::f16;

use neuropil_plugin_abi as abi;

use crate::Error;

/// How the elements of a matrix are written down; the header draws each.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u32)]
#[non_exhaustive]
pub enum Scheme {
    /// Single precision.
    F32 = abi::NP_SCHEME_F32,
    /// Half precision.
    F16 = abi::NP_SCHEME_F16,
    /// 8-bit codes with a scale per group (Q8_0).
    Group8 = abi::NP_SCHEME_GROUP8,
    /// 4-bit two's complement codes with a scale per group (Q4_0).
    Group4 = abi::NP_SCHEME_GROUP4,
    /// 4-bit codes 0 to 15 with a scale and a minimum per group (Q4_1).
    Group4Min = abi::NP_SCHEME_GROUP4M,
    /// 8-bit codes with a scale per row.
    Channel8 = abi::NP_SCHEME_CHANNEL8,
    /// 4-bit two's complement codes with a scale per row, and maybe outlier columns of 8 bits.
    Channel4 = abi::NP_SCHEME_CHANNEL4,
}

/// Columns that share a scale in the group schemes.
pub const GROUP: usize = 32;

impl Scheme {
    /// Every scheme.
    pub const ALL: [Scheme; 7] = [
        Scheme::F32,
        Scheme::F16,
        Scheme::Group8,
        Scheme::Group4,
        Scheme::Group4Min,
        Scheme::Channel8,
        Scheme::Channel4,
    ];

    pub(crate) fn from_number(number: u32) -> Option<Scheme> {
        Scheme::ALL.into_iter().find(|scheme| *scheme as u32 == number)
    }

    /// The name for people.
    pub fn name(self) -> &'static str {
        match self {
            Scheme::F32 => "f32",
            Scheme::F16 => "f16",
            Scheme::Group8 => "group int8",
            Scheme::Group4 => "group int4",
            Scheme::Group4Min => "group int4 with minimum",
            Scheme::Channel8 => "per-channel int8",
            Scheme::Channel4 => "per-channel int4",
        }
    }

    /// Columns that share a scale; 0 for the schemes without groups.
    pub fn group(self) -> usize {
        if matches!(self, Scheme::Group8 | Scheme::Group4 | Scheme::Group4Min) { GROUP } else { 0 }
    }

    /// Bits of an element in `data`.
    pub fn bits(self) -> usize {
        match self {
            Scheme::F32 => 32,
            Scheme::F16 => 16,
            Scheme::Group8 | Scheme::Channel8 => 8,
            Scheme::Group4 | Scheme::Group4Min | Scheme::Channel4 => 4,
        }
    }

    /// Bytes of `data`, `scales` and `mins` of a matrix; `None` when the width does not fit or the size overflows.
    pub fn bytes(self, rows: usize, cols: usize) -> Option<[usize; 3]> {
        let row_bits = cols.checked_mul(self.bits())?;
        if !row_bits.is_multiple_of(8) || self.group() != 0 && !cols.is_multiple_of(self.group()) {
            return None;
        }
        let data = (row_bits / 8).checked_mul(rows)?;
        let groups = cols.checked_div(self.group()).unwrap_or(0).checked_mul(rows)?.checked_mul(2)?;
        match self {
            Scheme::F32 | Scheme::F16 => Some([data, 0, 0]),
            Scheme::Group8 | Scheme::Group4 => Some([data, groups, 0]),
            Scheme::Group4Min => Some([data, groups, groups]),
            Scheme::Channel8 | Scheme::Channel4 => Some([data, rows.checked_mul(4)?, 0]),
        }
    }
}

/// Columns of a [`Scheme::Channel4`] matrix that matter too much for 4 bits. Their codes in `data` are 0.
#[derive(Clone, Copy, Debug)]
pub struct Outliers<'a> {
    /// Which columns, ascending.
    pub columns: &'a [u32],
    /// 8-bit codes `[rows, columns.len()]`.
    pub data: &'a [u8],
    /// F32 `[rows]`.
    pub scales: &'a [u8],
}

/// A matrix, row after row. The lengths of its parts are right: the SDK has checked them.
#[derive(Clone, Copy, Debug)]
pub struct Matrix<'a> {
    /// How it is written down.
    pub scheme: Scheme,
    /// Outputs; at least 1.
    pub rows: usize,
    /// Inputs; at least 1.
    pub cols: usize,
    /// The elements or codes.
    pub data: &'a [u8],
    /// The scales, F16 or F32 as the scheme says.
    pub scales: &'a [u8],
    /// The minima, F16; empty but for [`Scheme::Group4Min`].
    pub mins: &'a [u8],
    /// Only where [`crate::PluginDevice::query`] said that they are welcome.
    pub outliers: Option<Outliers<'a>>,
}

impl Matrix<'_> {
    /// Checks that the parts have the lengths of the scheme and shape.
    ///
    /// # Errors
    /// [`crate::Code::Invalid`].
    pub fn check(&self) -> Result<(), Error> {
        let (rows, cols, scheme) = (self.rows, self.cols, self.scheme);
        let what = || format!("a {rows} x {cols} matrix of {}", scheme.name());
        let Some(want) = scheme.bytes(rows, cols).filter(|_| rows > 0 && cols > 0) else {
            return Err(Error::invalid(format!("{} cannot be", what())));
        };
        let found = [self.data.len(), self.scales.len(), self.mins.len()];
        if found != want {
            let text = format!("{} has {want:?} bytes of data, scales and minima, not {found:?}", what());
            return Err(Error::invalid(text));
        }
        let Some(outliers) = self.outliers else { return Ok(()) };
        let count = outliers.columns.len();
        let ascending = outliers.columns.windows(2).all(|pair| pair[0] < pair[1]);
        let inside = outliers.columns.last().is_none_or(|last| (*last as usize) < cols);
        let lengths = Some(outliers.data.len()) == rows.checked_mul(count)
            && Some(outliers.scales.len()) == rows.checked_mul(4);
        if scheme != Scheme::Channel4 || !ascending || !inside || !lengths {
            return Err(Error::invalid(format!("the outliers of {} do not fit it", what())));
        }
        Ok(())
    }

    /// Widens row `row` to `out`, which has one value per column; outliers are in their places.
    ///
    /// # Panics
    /// When there is no such row, or `out` has another length.
    pub fn widen_row(&self, row: usize, out: &mut [f32]) {
        assert!(row < self.rows && out.len() == self.cols, "row {row} of {} x {}", self.rows, self.cols);
        let bytes = self.data.len() / self.rows;
        let data = &self.data[row * bytes..][..bytes];
        let first_group = row * self.cols.checked_div(self.scheme.group()).unwrap_or(0);
        match self.scheme {
            Scheme::F32 => out.iter_mut().enumerate().for_each(|(i, o)| *o = f32_at(data, i)),
            Scheme::F16 => out.iter_mut().enumerate().for_each(|(i, o)| *o = f16_at(data, i)),
            Scheme::Group8 => {
                for (i, out) in out.iter_mut().enumerate() {
                    *out = f16_at(self.scales, first_group + i / GROUP) * f32::from(data[i] as i8);
                }
            }
            Scheme::Group4 => {
                for (i, out) in out.iter_mut().enumerate() {
                    *out = f16_at(self.scales, first_group + i / GROUP) * f32::from(int4_at(data, i));
                }
            }
            Scheme::Group4Min => {
                for (i, out) in out.iter_mut().enumerate() {
                    let code = f32::from(int4_at(data, i) & 15);
                    let group = first_group + i / GROUP;
                    *out = f16_at(self.scales, group) * code + f16_at(self.mins, group);
                }
            }
            Scheme::Channel8 => {
                let scale = f32_at(self.scales, row);
                out.iter_mut().zip(data).for_each(|(o, code)| *o = scale * f32::from(*code as i8));
            }
            Scheme::Channel4 => {
                let scale = f32_at(self.scales, row);
                out.iter_mut().enumerate().for_each(|(i, o)| *o = scale * f32::from(int4_at(data, i)));
            }
        }
        if let Some(outliers) = self.outliers {
            let (scale, count) = (f32_at(outliers.scales, row), outliers.columns.len());
            for (column, code) in outliers.columns.iter().zip(&outliers.data[row * count..]) {
                out[*column as usize] += scale * f32::from(*code as i8);
            }
        }
    }
}

/// The `index`th F32 of `bytes`.
///
/// # Panics
/// When there are fewer.
pub fn f32_at(bytes: &[u8], index: usize) -> f32 {
    f32::from_le_bytes(bytes.as_chunks().0[index])
}

/// The `index`th F16 of `bytes`.
///
/// # Panics
/// When there are fewer.
pub fn f16_at(bytes: &[u8], index: usize) -> f32 {
    f16::from_le_bytes(bytes.as_chunks().0[index]).to_f32()
}

/// The `index`th 4-bit two's complement code of `bytes`.
///
/// # Panics
/// When there are fewer.
pub fn int4_at(bytes: &[u8], index: usize) -> i8 {
    let byte = bytes[index / 2];
    let high = if index.is_multiple_of(2) { byte << 4 } else { byte };
    high as i8 >> 4
}

/// What [`crate::PluginDevice::prepare`] takes. The bytes may be used until it returns.
#[derive(Clone, Copy, Debug)]
pub struct WeightSource<'a> {
    /// For logs; may be empty.
    pub name: &'a str,
    /// The matrices.
    pub matrices: Matrices<'a>,
}

/// The matrices of a weight.
#[derive(Clone, Copy, Debug)]
#[expect(clippy::large_enum_variant, reason = "one lives per call, and it is only borrowed")]
pub enum Matrices<'a> {
    /// One, for [`crate::PluginDevice::matmul`].
    One(Matrix<'a>),
    /// A block of neurons, for [`crate::PluginDevice::cluster`]. The shapes fit together.
    Neurons {
        /// One row per neuron.
        gate: Matrix<'a>,
        /// One row per neuron.
        up: Matrix<'a>,
        /// One column per neuron.
        down: Matrix<'a>,
    },
}

/// What a prepared weight is. The SDK keeps it and checks jobs by it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shape {
    /// For [`crate::PluginDevice::matmul`].
    Matrix {
        /// Outputs.
        rows: usize,
        /// Inputs.
        cols: usize,
    },
    /// For [`crate::PluginDevice::cluster`].
    Neurons {
        /// Neurons of the block.
        neurons: usize,
        /// Width of the model.
        width: usize,
    },
}

impl WeightSource<'_> {
    /// The shape, when the matrices are right.
    ///
    /// # Errors
    /// [`crate::Code::Invalid`].
    pub fn shape(&self) -> Result<Shape, Error> {
        match &self.matrices {
            Matrices::One(matrix) => {
                matrix.check()?;
                Ok(Shape::Matrix { rows: matrix.rows, cols: matrix.cols })
            }
            Matrices::Neurons { gate, up, down } => {
                for matrix in [gate, up, down] {
                    matrix.check()?;
                }
                let (neurons, width) = (gate.rows, gate.cols);
                if (up.rows, up.cols) != (neurons, width) || (down.rows, down.cols) != (width, neurons) {
                    let text = format!(
                        "a block of {neurons} x {width} gates, {} x {} ups and {} x {} downs does not fit together",
                        up.rows, up.cols, down.rows, down.cols
                    );
                    return Err(Error::invalid(text));
                }
                Ok(Shape::Neurons { neurons, width })
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn matrix(scheme: Scheme, data: &[u8], scales: &[u8], mins: &[u8], cols: usize) -> Vec<f32> {
        let matrix = Matrix { scheme, rows: 1, cols, data, scales, mins, outliers: None };
        matrix.check().unwrap();
        let mut out = vec![0.0; cols];
        matrix.widen_row(0, &mut out);
        out
    }

    #[test]
    fn elements_of_each_scheme() {
        let half = f16::from_f32(0.5).to_le_bytes();
        let min = f16::from_f32(-1.0).to_le_bytes();
        let one = 0.5f32.to_le_bytes();
        let codes = [[0xf8u8].repeat(16), vec![0]].concat();
        assert_eq!(matrix(Scheme::F32, &one, &[], &[], 1), [0.5]);
        assert_eq!(matrix(Scheme::F16, &half, &[], &[], 1), [0.5]);
        assert_eq!(matrix(Scheme::Group8, &[0xff; 32], &half, &[], 32), [-0.5; 32]);
        assert_eq!(matrix(Scheme::Group4, &codes[..16], &half, &[], 32)[..3], [-4.0, -0.5, -4.0]);
        assert_eq!(matrix(Scheme::Group4Min, &codes[..16], &half, &min, 32)[..2], [3.0, 6.5]);
        assert_eq!(matrix(Scheme::Channel8, &[2, 0x81], &one, &[], 2), [1.0, -63.5]);
        assert_eq!(matrix(Scheme::Channel4, &[0x7f], &one, &[], 2), [-0.5, 3.5]);
    }

    #[test]
    fn outliers_are_added_in_their_columns() {
        let (one, two) = (1f32.to_le_bytes(), 2f32.to_le_bytes());
        let outliers = Outliers { columns: &[1], data: &[0xf0], scales: &two };
        let mut m = Matrix {
            scheme: Scheme::Channel4,
            rows: 1,
            cols: 2,
            data: &[3],
            scales: &one,
            mins: &[],
            outliers: Some(outliers),
        };
        m.check().unwrap();
        let mut out = [0.0; 2];
        m.widen_row(0, &mut out);
        assert_eq!(out, [3.0, -32.0]);
        for columns in [&[2][..], &[1, 1], &[]] {
            m.outliers = Some(Outliers { columns, ..outliers });
            assert!(m.check().is_err(), "{columns:?}");
        }
    }

    #[test]
    fn sizes_that_cannot_be_are_refused() {
        assert_eq!(Scheme::Group4.bytes(2, 64), Some([64, 8, 0]));
        for (scheme, rows, cols) in [
            (Scheme::Group4, 1, 33),
            (Scheme::Channel4, 1, 3),
            (Scheme::F32, usize::MAX, 2),
            (Scheme::Channel8, usize::MAX / 2, 1),
            (Scheme::F32, 0, 4),
        ] {
            let m = Matrix { scheme, rows, cols, data: &[], scales: &[], mins: &[], outliers: None };
            assert!(m.check().is_err(), "{scheme:?}");
        }
    }
}
