//! A packed matrix as bytes, and back.
//!
//! The SDK has checked that the bytes are those that were saved. They are read with care all the same: an index that is
//! out of range would panic in a product much later.

use neuropil_plugin_sdk::{Error, GROUP, Shape};

use crate::elements::{Elements, Form, Outliers};

const FLOAT: u64 = 1;
const HALF: u64 = 2;
const GROUPS: u64 = 3;
const CHANNEL: u64 = 4;

/// Writes a matrix.
pub(crate) fn save(from: &Elements, write: &mut dyn FnMut(&[u8]) -> Result<(), Error>) -> Result<(), Error> {
    let (kind, outliers) = match &from.form {
        Form::Float(_, false) => (FLOAT, 0),
        Form::Float(_, true) => (HALF, 0),
        Form::Group(..) => (GROUPS, 0),
        Form::Channel(_, _, outliers) => (CHANNEL, outliers.as_ref().map_or(0, |o| o.columns.len())),
    };
    for number in [kind, from.rows as u64, from.cols as u64, outliers as u64] {
        write(&number.to_le_bytes())?;
    }
    let codes = |codes: &[i8]| codes.iter().map(|code| *code as u8).collect::<Vec<u8>>();
    let singles = |values: &[f32]| values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>();
    match &from.form {
        Form::Float(values, _) => write(&singles(values)),
        Form::Group(values, groups) => {
            write(&codes(values))?;
            write(&singles(&groups.iter().flat_map(|(scale, min)| [*scale, *min]).collect::<Vec<f32>>()))
        }
        Form::Channel(values, scales, outliers) => {
            write(&codes(values))?;
            write(&singles(scales))?;
            let Some(outliers) = outliers else { return Ok(()) };
            let columns = outliers.columns.iter().flat_map(|column| (*column as u64).to_le_bytes());
            write(&columns.collect::<Vec<u8>>())?;
            write(&codes(&outliers.codes))?;
            write(&singles(&outliers.scales))
        }
    }
}

fn damaged() -> Error {
    Error::invalid("the saved plan does not fit this unit")
}

/// Reads what is left of a plan.
struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn take(&mut self, count: usize, each: usize) -> Result<&[u8], Error> {
        let bytes = count.checked_mul(each).ok_or_else(damaged)?;
        let (taken, rest) = self.0.split_at_checked(bytes).ok_or_else(damaged)?;
        self.0 = rest;
        Ok(taken)
    }

    fn numbers(&mut self, count: usize) -> Result<Vec<usize>, Error> {
        let words = self.take(count, 8)?.as_chunks::<8>().0.iter();
        words.map(|word| usize::try_from(u64::from_le_bytes(*word)).map_err(|_| damaged())).collect()
    }

    fn codes(&mut self, count: usize) -> Result<Vec<i8>, Error> {
        Ok(self.take(count, 1)?.iter().map(|code| *code as i8).collect())
    }

    fn singles(&mut self, count: usize) -> Result<Vec<f32>, Error> {
        Ok(self.take(count, 4)?.as_chunks::<4>().0.iter().map(|v| f32::from_le_bytes(*v)).collect())
    }

    fn matrix(&mut self, needed: (usize, usize)) -> Result<Elements, Error> {
        let numbers = self.numbers(4)?;
        let [kind, rows, cols, outliers] = numbers[..] else { return Err(damaged()) };
        if (rows, cols) != needed {
            return Err(damaged());
        }
        let count = rows.checked_mul(cols).ok_or_else(damaged)?;
        let form = match kind as u64 {
            FLOAT | HALF => Form::Float(self.singles(count)?, kind as u64 == HALF),
            GROUPS if cols.is_multiple_of(GROUP) => {
                let codes = self.codes(count)?;
                let pairs = self.singles(count / GROUP * 2)?;
                Form::Group(codes, pairs.as_chunks::<2>().0.iter().map(|pair| (pair[0], pair[1])).collect())
            }
            CHANNEL => {
                let (codes, scales) = (self.codes(count)?, self.singles(rows)?);
                Form::Channel(codes, scales, self.outliers(rows, cols, outliers)?)
            }
            _ => return Err(damaged()),
        };
        Ok(Elements { rows, cols, form })
    }

    fn outliers(&mut self, rows: usize, cols: usize, count: usize) -> Result<Option<Outliers>, Error> {
        if count == 0 {
            return Ok(None);
        }
        let columns = self.numbers(count)?;
        if columns.iter().any(|column| *column >= cols) {
            return Err(damaged());
        }
        let codes = self.codes(rows.checked_mul(count).ok_or_else(damaged)?)?;
        Ok(Some(Outliers { columns, codes, scales: self.singles(rows)? }))
    }
}

/// The matrix of a plan, or gate, up and down.
pub(crate) fn load(plan: &[u8], shape: Shape) -> Result<Vec<Elements>, Error> {
    let mut reader = Reader(plan);
    let parts = match shape {
        Shape::Matrix { rows, cols } => vec![reader.matrix((rows, cols))?],
        Shape::Neurons { neurons, width } => vec![
            reader.matrix((neurons, width))?,
            reader.matrix((neurons, width))?,
            reader.matrix((width, neurons))?,
        ],
    };
    if reader.0.is_empty() { Ok(parts) } else { Err(damaged()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_form_comes_back_and_every_cut_is_refused() {
        let (rows, cols) = (2, 64);
        let codes: Vec<i8> = (0..128).map(|i| (i * 5 % 251) as i8).collect();
        let floats: Vec<f32> = (0..128).map(|i| i as f32 / 3.0).collect();
        let outliers = Outliers { columns: vec![0, 63], codes: vec![1, -2, 3, -4], scales: vec![0.5, 2.0] };
        let forms = [
            Form::Float(floats.clone(), false),
            Form::Float(floats, true),
            Form::Group(codes.clone(), vec![(0.5, 0.25), (1.0, 0.0), (2.0, 3.0), (4.0, -1.0)]),
            Form::Channel(codes.clone(), vec![1.0, 2.0], None),
            Form::Channel(codes, vec![1.0, 2.0], Some(outliers)),
        ];
        let x: Vec<f32> = (0..cols).map(|i| (i * 7 % 13) as f32 - 6.0).collect();
        for form in forms {
            let from = Elements { rows, cols, form };
            let mut plan = Vec::new();
            save(&from, &mut |piece| {
                plan.extend_from_slice(piece);
                Ok(())
            })
            .unwrap();
            let shape = Shape::Matrix { rows, cols };
            let back = load(&plan, shape).unwrap();
            assert_eq!(back[0].bytes(), from.bytes());
            let (mut got, mut want) = ([0.0; 2], [0.0; 2]);
            back[0].multiply(&x, &mut got, 127.0);
            from.multiply(&x, &mut want, 127.0);
            assert_eq!(got, want);
            for cut in 0..plan.len() {
                assert!(load(&plan[..cut], shape).is_err(), "{cut}");
            }
            assert!(load(&plan, Shape::Matrix { rows: 1, cols }).is_err());
            assert!(load(&[&plan[..], &[0]].concat(), shape).is_err());
        }
    }
}
