//! Inputs of a graph from the values of a job, and back: the scaling of tokens that `product` tells of.

use half::f16;

use crate::product::{Numbers, Part, largest_code};
use crate::tensor::Element;

/// How often the inputs of a token may be halved because its results left the range of the graph.
pub(crate) const MOST_HALVINGS: u32 = 8;

/// Results are as large as chance has it; as a multiple of what chance has on average, they are hardly ever larger.
const SAFE: f32 = 6.0;

/// How a token goes into a graph, and comes out of it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Token {
    /// What values are multiplied with.
    pub into: f32,
    /// What results are multiplied with.
    pub back: f32,
}

/// Scales of a token: its largest value becomes 1, or less where results could leave the range of the graph; and half of
/// that for each of `halvings`. What is not a number makes all results so.
fn token(values: impl Iterator<Item = f32> + Clone, numbers: Numbers, halvings: u32) -> Token {
    if values.clone().any(|value| !value.is_finite()) {
        return Token { into: 0.0, back: f32::NAN };
    }
    let mut largest = values.clone().fold(0f32, |largest, value| largest.max(value.abs()));
    if largest == 0.0 {
        // Exactly nothing, whatever the graph makes of it.
        return Token { into: 0.0, back: 0.0 };
    }
    if let Some(bound) = numbers.bound() {
        let mut count = 0f32;
        let squares: f32 = values.inspect(|_| count += 1.0).map(|value| (value / largest).powi(2)).sum();
        // Results are at most the length of the token, and about its length by the root of its width.
        let expected = squares.sqrt() * (SAFE / count.sqrt()).min(1.0);
        largest *= (expected / bound).max(1.0);
    } else {
        // A power of two loses nothing.
        largest = f32::from_bits(largest.to_bits() & 0x7f80_0000);
    }
    // So that the inverse of it is a number too.
    let largest = largest.clamp(f32::MIN_POSITIVE, f32::MAX / 4.0);
    let half = 0.5f32.powi(halvings as i32);
    Token { into: half / largest, back: largest / half }
}

/// Fills an input `[tokens, part.width()]` from `x`, and says how each token went into it.
pub(crate) fn write(
    part: &Part,
    x: &[f32],
    cols: usize,
    halvings: &[u32],
    numbers: Numbers,
    out: &mut [u8],
) -> Vec<Token> {
    let width = part.width() * numbers.elements()[0].bytes();
    let rows = x.chunks_exact(cols).zip(out.chunks_exact_mut(width)).zip(halvings);
    let scaled = rows.map(|((x, out), halvings)| match part.columns.is_empty() {
        true => write_token(x.iter().copied(), numbers, *halvings, out),
        false => {
            let at = |column: &u32| x.get(*column as usize).copied().unwrap_or(0.0);
            write_token(part.columns.iter().map(at), numbers, *halvings, out)
        }
    });
    scaled.collect()
}

fn write_token(
    values: impl Iterator<Item = f32> + Clone,
    numbers: Numbers,
    halvings: u32,
    out: &mut [u8],
) -> Token {
    let token = match numbers {
        // Nothing is gained by scaling these.
        Numbers::F32 => Token { into: 1.0, back: 1.0 },
        _ => token(values.clone(), numbers, halvings),
    };
    let element = numbers.elements()[0];
    let into = token.into;
    let largest = largest_code(element) as f32;
    // Inputs beyond the columns are zeros, as are their weights.
    let values = values.chain(std::iter::repeat(0.0));
    let code = |value: f32| ((value * into) * largest).round() + (largest + 1.0);
    match element {
        Element::F16 => {
            for (out, value) in out.as_chunks_mut().0.iter_mut().zip(values) {
                *out = f16::from_f32(value * into).to_le_bytes();
            }
        }
        Element::U16 => {
            for (out, value) in out.as_chunks_mut().0.iter_mut().zip(values) {
                *out = (code(value) as u16).to_le_bytes();
            }
        }
        Element::U8 => {
            for (out, value) in out.iter_mut().zip(values) {
                *out = code(value) as u8;
            }
        }
        _ => {
            for (out, value) in out.as_chunks_mut().0.iter_mut().zip(values) {
                *out = value.to_le_bytes();
            }
        }
    }
    token
}

/// Takes an output `[tokens, rows]` to `y`, or adds it to what is there. Gives the tokens whose results have left the
/// range of the graph.
pub(crate) fn read(
    part: &Part,
    from: &[u8],
    numbers: Numbers,
    tokens: &[Token],
    y: &mut [f32],
    add: bool,
) -> Vec<usize> {
    let rows = y.len() / tokens.len().max(1);
    let element = numbers.elements()[1];
    let largest = largest_code(element);
    let unit = 1.0 / largest as f32;
    let mut outside = Vec::new();
    for (index, token) in tokens.iter().enumerate() {
        let (Some(y), Some(from)) = (
            y.get_mut(index * rows..(index + 1) * rows),
            from.get(index * rows * element.bytes()..(index + 1) * rows * element.bytes()),
        ) else {
            break;
        };
        // The ends of the range: what lies beyond it is cut to them.
        let mut cut = false;
        let value = |code: i32, cut: &mut bool| {
            *cut |= code == 0 || code == 2 * largest + 1;
            (code - largest - 1) as f32 * unit
        };
        let mut take = |row: usize, value: f32| {
            let factor = part.factors.get(row).copied().unwrap_or(1.0);
            let value = value * factor * token.back;
            y[row] = if add { y[row] + value } else { value };
        };
        match element {
            Element::F16 => {
                for (row, bytes) in from.as_chunks().0.iter().enumerate() {
                    let value = f16::from_le_bytes(*bytes).to_f32();
                    cut |= value.is_infinite();
                    take(row, value);
                }
            }
            Element::U16 => {
                for (row, bytes) in from.as_chunks().0.iter().enumerate() {
                    take(row, value(i32::from(u16::from_le_bytes(*bytes)), &mut cut));
                }
            }
            Element::U8 => {
                for (row, byte) in from.iter().enumerate() {
                    take(row, value(i32::from(*byte), &mut cut));
                }
            }
            _ => {
                for (row, bytes) in from.as_chunks().0.iter().enumerate() {
                    take(row, f32::from_le_bytes(*bytes));
                }
            }
        }
        if cut && !token.back.is_nan() {
            outside.push(index);
        }
    }
    outside
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Writes one token and reads it back as if the graph were the identity.
    fn round_trip(values: &[f32], numbers: Numbers, halvings: u32) -> Vec<f32> {
        let part = Part { columns: Vec::new(), cols: values.len(), factors: vec![2.0; values.len()] };
        let mut bytes = vec![0; part.width() * numbers.elements()[0].bytes()];
        let tokens = write(&part, values, values.len(), &[halvings], numbers, &mut bytes);
        let mut y = vec![0.0; values.len()];
        read(&part, &bytes, numbers, &tokens, &mut y, false);
        y
    }

    #[test]
    fn what_goes_in_comes_out() {
        let values = [0.0, 3.5, -7.0, 1e-3, 6.9];
        for (numbers, bound) in
            [(Numbers::F32, 0.0), (Numbers::F16, 7e-3), (Numbers::A16, 2e-3), (Numbers::A8, 0.2)]
        {
            let y = round_trip(&values, numbers, 0);
            assert_eq!(y[0], 0.0);
            for (y, value) in y.iter().zip(values) {
                assert!((y - 2.0 * value).abs() <= bound, "{numbers:?} {value}: {y}");
            }
        }
        let y = round_trip(&values, Numbers::A16, 2);
        assert!((y[2] + 14.0).abs() < 8e-3 && y[0] == 0.0, "{y:?}");
        assert_eq!(round_trip(&[0.0; 3], Numbers::A16, 0), [0.0; 3]);
        for numbers in [Numbers::F16, Numbers::A16, Numbers::A8] {
            assert!(round_trip(&[1.0, f32::NAN], numbers, 0)[0].is_nan());
            assert!(round_trip(&[f32::INFINITY, 1.0], numbers, 0)[1].is_nan());
            assert!(round_trip(&[1e-45, 0.0], numbers, 0)[0].is_finite());
            assert!(round_trip(&[1e38, 0.0], numbers, 0)[0].is_finite());
        }
    }

    #[test]
    fn columns_are_gathered_and_results_added() {
        let part = Part { columns: vec![0, 2], cols: 2, factors: Vec::new() };
        let mut bytes = vec![0; 8];
        assert_eq!(part.width(), 2, "without factors");
        let x = [1.0, 9.0, -0.5, 0.0, 9.0, 2.0];
        let tokens = write(&part, &x, 3, &[0, 0], Numbers::A16, &mut bytes);
        let codes: Vec<u16> = bytes.as_chunks().0.iter().map(|b| u16::from_le_bytes(*b)).collect();
        // The results are at most the length of the token, for which there is room of half a unit.
        assert_eq!(codes[2..], [32768, 32768 + 16384]);
        assert!(codes[0] > 32768 + 14000 && codes[1] < 32768 - 7000, "{codes:?}");
        let mut y = [10.0; 4];
        assert_eq!(read(&part, &bytes, Numbers::A16, &tokens, &mut y, true), [] as [usize; 0]);
        assert!((y[0] - 11.0).abs() < 1e-4 && (y[3] - 12.0).abs() < 1e-4, "{y:?}");
        bytes[2..4].fill(0xff);
        bytes[6..8].fill(0);
        assert_eq!(read(&part, &bytes, Numbers::A16, &tokens, &mut y, true), [0, 1], "the ends of the range");
    }
}
