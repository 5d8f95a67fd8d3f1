//! A weight in the bytes of a form.

use half::f16;
use half::slice::HalfFloatSliceExt;
use neuropil_plugin_sdk::{Error, Matrix, Scheme, f32_at};

use crate::form::Form;

/// What belongs to an int8 weight besides its codes; empty for floats.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct RowScales {
    /// The scale of each row in the graph: rows have length 1 there.
    pub in_graph: Vec<f32>,
    /// What an output of that is worth.
    pub factors: Vec<f32>,
    /// What a code is worth.
    pub of_codes: Vec<f32>,
}

/// Writes the elements or codes of a matrix to `out`, which has the bytes of the form.
pub(crate) fn pack(matrix: &Matrix<'_>, form: Form, out: &mut [u8]) -> Result<RowScales, Error> {
    let fits = || Error::internal("a weight has other bytes than its graph");
    let out = out.get_mut(..matrix.rows * matrix.cols * form.value_bytes()).ok_or_else(fits)?;
    match (form, matrix.scheme) {
        (Form::F32, Scheme::F32) | (Form::F16, Scheme::F16) => {
            out.copy_from_slice(matrix.data);
            Ok(RowScales::default())
        }
        (Form::F32, _) => {
            let out = bytemuck::try_cast_slice_mut::<u8, f32>(out).map_err(|_| fits())?;
            for (row, out) in out.chunks_exact_mut(matrix.cols).enumerate() {
                matrix.widen_row(row, out);
            }
            Ok(RowScales::default())
        }
        (Form::F16, _) => {
            let out = bytemuck::try_cast_slice_mut::<u8, f16>(out).map_err(|_| fits())?;
            let mut wide = vec![0.0; matrix.cols];
            for (row, out) in out.chunks_exact_mut(matrix.cols).enumerate() {
                matrix.widen_row(row, &mut wide);
                out.convert_from_f32_slice(&wide);
                if out.iter().zip(&wide).any(|(half, wide)| wide.is_finite() && half.is_infinite()) {
                    return Err(Error::unsupported("the weight has values beyond the range of F16"));
                }
            }
            Ok(RowScales::default())
        }
        (Form::Int8 { .. }, _) => {
            out.copy_from_slice(matrix.data);
            let mut scales = RowScales::default();
            for (row, codes) in matrix.data.chunks_exact(matrix.cols).enumerate() {
                let squares: i64 = codes.iter().map(|code| i64::from(*code as i8).pow(2)).sum();
                // NNAPI wants scales above 0; a row of zeros may have any.
                let length = if squares == 0 { 1.0 } else { (squares as f64).sqrt() as f32 };
                scales.in_graph.push(1.0 / length);
                scales.of_codes.push(f32_at(matrix.scales, row));
                scales.factors.push(length * f32_at(matrix.scales, row));
            }
            Ok(scales)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn matrix<'a>(scheme: Scheme, cols: usize, data: &'a [u8], scales: &'a [u8]) -> Matrix<'a> {
        Matrix { scheme, rows: 2, cols, data, scales, mins: &[], outliers: None }
    }

    #[test]
    fn rows_of_codes_get_length_one() {
        let scales: Vec<u8> = [-2f32, 5.0].into_iter().flat_map(f32::to_le_bytes).collect();
        let codes = [3, 0xfc, 0, 0];
        let mut out = [9; 5];
        let found =
            pack(&matrix(Scheme::Channel8, 2, &codes, &scales), Form::Int8 { signed: true }, &mut out);
        let want =
            RowScales { in_graph: vec![0.2, 1.0], factors: vec![-10.0, 5.0], of_codes: vec![-2.0, 5.0] };
        assert_eq!((found, out), (Ok(want), [3, 0xfc, 0, 0, 9]));
    }

    #[test]
    fn floats_are_copied_or_converted() {
        let values: Vec<u8> = [1.5f32, -2.0].into_iter().flat_map(f32::to_le_bytes).collect();
        let halves: Vec<u8> =
            [1.5f32, -2.0].into_iter().flat_map(|v| f16::from_f32(v).to_le_bytes()).collect();
        let wide = |out: &mut Vec<f32>| bytemuck::cast_slice_mut::<f32, u8>(out).to_vec();
        for (scheme, data) in [(Scheme::F32, &values), (Scheme::F16, &halves)] {
            let mut out = vec![0f32; 2];
            pack(&matrix(scheme, 1, data, &[]), Form::F32, bytemuck::cast_slice_mut(&mut out)).unwrap();
            assert_eq!(wide(&mut out), values);
            let mut out = vec![0u16; 2];
            pack(&matrix(scheme, 1, data, &[]), Form::F16, bytemuck::cast_slice_mut(&mut out)).unwrap();
            assert_eq!(bytemuck::cast_slice::<u16, u8>(&out), halves);
        }
        let large: Vec<u8> = [1.5f32, 70_000.0].into_iter().flat_map(f32::to_le_bytes).collect();
        let mut out = vec![0u16; 2];
        let refused =
            pack(&matrix(Scheme::F32, 1, &large, &[]), Form::F16, bytemuck::cast_slice_mut(&mut out));
        assert!(refused.unwrap_err().text.contains("beyond the range of F16"));
    }
}
