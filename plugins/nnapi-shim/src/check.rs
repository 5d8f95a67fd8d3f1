//! What an operation asks of its operands: their number, types, ranks, scales, constants and dimensions.
//!
//! Types are looked at when the operation is added, as the real library does; constants and dimensions when the model is
//! finished, since only then they must be there; dimensions once more for each execution, since inputs may leave them open.

use crate::codes::*;
use crate::model::{Operand, Operation, Value};

/// What happens to a sum before it becomes an output.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Fuse {
    None,
    Relu,
    Relu1,
    Relu6,
}

impl Fuse {
    fn of(code: i32) -> Outcome<Fuse> {
        Ok(match code {
            0 => Fuse::None,
            1 => Fuse::Relu,
            2 => Fuse::Relu1,
            3 => Fuse::Relu6,
            _ => return Err(BAD_DATA),
        })
    }

    /// The least and the largest value that pass.
    pub(crate) fn range(self) -> (f32, f32) {
        match self {
            Fuse::None => (f32::NEG_INFINITY, f32::INFINITY),
            Fuse::Relu => (0.0, f32::INFINITY),
            Fuse::Relu1 => (-1.0, 1.0),
            Fuse::Relu6 => (0.0, 6.0),
        }
    }
}

/// How the border of an image is treated.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Padding {
    /// Left, right, top, bottom.
    Explicit([u32; 4]),
    /// The output has one element per stride.
    Same,
    /// Nothing outside the image.
    Valid,
}

/// The geometry of a convolution; pairs are (height, width).
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Window {
    pub(crate) padding: Padding,
    pub(crate) stride: (u32, u32),
    pub(crate) dilation: (u32, u32),
}

impl Window {
    /// Elements before the image and positions of the filter, along one axis (0 height, 1 width).
    pub(crate) fn along(&self, axis: usize, size: u32, filter: u32) -> Outcome<(u32, u32)> {
        let pick = |pair: (u32, u32)| if axis == 0 { pair.0 } else { pair.1 };
        let (stride, dilation) = (pick(self.stride), pick(self.dilation));
        let reach = filter.checked_sub(1).and_then(|f| f.checked_mul(dilation)).ok_or(BAD_DATA)? + 1;
        let (before, after) = match self.padding {
            Padding::Explicit([_, _, top, bottom]) if axis == 0 => (top, bottom),
            Padding::Explicit([left, right, ..]) => (left, right),
            Padding::Valid => (0, 0),
            Padding::Same => {
                let total = ((size.div_ceil(stride) - 1) * stride + reach).saturating_sub(size);
                (total / 2, total - total / 2)
            }
        };
        let padded = size.checked_add(before).and_then(|s| s.checked_add(after)).ok_or(BAD_DATA)?;
        let room = padded.checked_sub(reach).ok_or(BAD_DATA)?;
        Ok((before, room / stride + 1))
    }
}

/// An operation with its constant arguments read.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Step {
    FullyConnected(Fuse),
    Conv(Window, Fuse),
    Add(Fuse),
    Mul(Fuse),
    Logistic,
    /// Exists, but no device here does it.
    Unknown,
}

const ACTIVATIONS: [i32; 4] =
    [TENSOR_FLOAT32, TENSOR_FLOAT16, TENSOR_QUANT8_ASYMM, TENSOR_QUANT8_ASYMM_SIGNED];

fn is_float(kind: i32) -> bool {
    [TENSOR_FLOAT32, TENSOR_FLOAT16].contains(&kind)
}

fn ensure(fine: bool) -> Outcome {
    if fine { Ok(()) } else { Err(BAD_DATA) }
}

fn rank_is(operand: &Operand, rank: usize) -> Outcome {
    ensure(operand.shape.dims.is_empty() || operand.shape.dims.len() == rank)
}

/// Where the flag for the order of channels would stand, when the operation has one: 7 for implicit padding, 10 for
/// explicit. `None` for a wrong number of arguments.
fn conv_form(inputs: &[&Operand]) -> Option<(bool, usize)> {
    let flag_at_7 = inputs.get(7).is_some_and(|o| o.shape.kind == BOOL);
    match inputs.len() {
        7 => Some((true, 7)),
        8 | 10 if flag_at_7 => Some((true, 7)),
        10 | 11 | 13 => Some((false, 10)),
        _ => None,
    }
}

/// The types, ranks and scales that an operation asks for.
pub(crate) fn signature(kind: i32, inputs: &[&Operand], outputs: &[&Operand]) -> Outcome {
    match kind {
        FULLY_CONNECTED => {
            let ([x, w, bias, fuse], [y]) = (inputs, outputs) else { return Err(BAD_DATA) };
            ensure(w.shape.kind == x.shape.kind && fuse.shape.kind == INT32)?;
            ensure(x.shape.dims.is_empty() || x.shape.dims.len() >= 2)?;
            rank_is(w, 2)?;
            rank_is(y, 2)?;
            weighted(x, w, bias, y)
        }
        CONV_2D => {
            let ([x, w, bias, rest @ ..], [y]) = (inputs, outputs) else { return Err(BAD_DATA) };
            let (_, flag) = conv_form(inputs).ok_or(BAD_DATA)?;
            for (at, argument) in rest.iter().enumerate() {
                ensure(argument.shape.kind == if at + 3 == flag { BOOL } else { INT32 })?;
            }
            let per_channel = w.shape.kind == TENSOR_QUANT8_SYMM_PER_CHANNEL && !is_float(x.shape.kind);
            ensure(w.shape.kind == x.shape.kind || per_channel)?;
            rank_is(x, 4)?;
            rank_is(w, 4)?;
            rank_is(y, 4)?;
            weighted(x, w, bias, y)
        }
        ADD | MUL => {
            let ([a, b, fuse], [y]) = (inputs, outputs) else { return Err(BAD_DATA) };
            ensure(ACTIVATIONS.contains(&a.shape.kind) && fuse.shape.kind == INT32)?;
            ensure(b.shape.kind == a.shape.kind && y.shape.kind == a.shape.kind)?;
            ensure(a.shape.dims.len() <= 4 && b.shape.dims.len() <= 4)?;
            let product = a.shape.scale * b.shape.scale;
            ensure(kind == ADD || is_float(a.shape.kind) || y.shape.scale > product)
        }
        LOGISTIC => {
            let ([x], [y]) = (inputs, outputs) else { return Err(BAD_DATA) };
            ensure(ACTIVATIONS.contains(&x.shape.kind) && y.shape.kind == x.shape.kind)?;
            let zero = if x.shape.kind == TENSOR_QUANT8_ASYMM { 0 } else { -128 };
            ensure(is_float(x.shape.kind) || y.shape.scale == 1.0 / 256.0 && y.shape.zero == zero)
        }
        // The other operations exist in the interface; what they ask for is not known here.
        0..=105 => Ok(()),
        _ => Err(BAD_DATA),
    }
}

/// The rules that both products share.
fn weighted(x: &Operand, w: &Operand, bias: &Operand, y: &Operand) -> Outcome {
    ensure(ACTIVATIONS.contains(&x.shape.kind) && y.shape.kind == x.shape.kind)?;
    rank_is(bias, 1)?;
    if is_float(x.shape.kind) {
        return ensure(bias.shape.kind == x.shape.kind);
    }
    ensure(bias.shape.kind == TENSOR_INT32)?;
    // With a scale per channel, the bias has one per channel too and carries none itself.
    if w.shape.kind == TENSOR_QUANT8_SYMM_PER_CHANNEL {
        return ensure(bias.shape.scale == 0.0);
    }
    let product = x.shape.scale * w.shape.scale;
    ensure((product - bias.shape.scale).abs() <= 1e-6 * product.min(bias.shape.scale))
}

/// Reads the constant arguments of an operation.
///
/// # Errors
/// `BAD_DATA` when one is missing, is not a constant, or is out of its range.
pub(crate) fn arguments(operation: &Operation, operands: &[Operand]) -> Outcome<Step> {
    let of = |at: usize| {
        let index = operation.inputs.get(at).ok_or(BAD_DATA)?;
        operands.get(*index as usize).ok_or(BAD_DATA)
    };
    let number = |at: usize| of(at)?.constant_i32();
    let size = |at: usize| u32::try_from(number(at)?).map_err(|_| BAD_DATA);
    let positive = |at: usize| size(at).and_then(|n| if n > 0 { Ok(n) } else { Err(BAD_DATA) });
    let fuse = |at: usize| Fuse::of(number(at)?);
    // None of the operations that are computed here has an argument that may be missing.
    for at in 0..operation.inputs.len() {
        ensure(!matches!(of(at)?.value, Value::Missing))?;
    }
    Ok(match operation.kind {
        FULLY_CONNECTED => Step::FullyConnected(fuse(3)?),
        ADD => Step::Add(fuse(2)?),
        MUL => Step::Mul(fuse(2)?),
        LOGISTIC => Step::Logistic,
        CONV_2D => {
            let filter = of(1)?;
            if let Some(channels) = &filter.channels {
                // A filter is [out, height, width, in]: the scales belong to its outputs.
                ensure(channels.dimension == 0)?;
            }
            let inputs = (0..operation.inputs.len()).map(of).collect::<Outcome<Vec<_>>>()?;
            let (implicit, flag) = conv_form(&inputs).ok_or(BAD_DATA)?;
            let padding = match (implicit, number(3)?) {
                (true, 1) => Padding::Same,
                (true, 2) => Padding::Valid,
                (true, _) => return Err(BAD_DATA),
                (false, _) => Padding::Explicit([size(3)?, size(4)?, size(5)?, size(6)?]),
            };
            if inputs.len() > flag && of(flag)?.constant_bool()? {
                return Ok(Step::Unknown);
            }
            let dilation = match inputs.len() > flag + 1 {
                true => (positive(flag + 2)?, positive(flag + 1)?),
                false => (1, 1),
            };
            let stride = (positive(flag - 2)?, positive(flag - 3)?);
            Step::Conv(Window { padding, stride, dilation }, fuse(flag - 1)?)
        }
        _ => Step::Unknown,
    })
}

impl Step {
    /// The dimensions of the output; all inputs have theirs known.
    pub(crate) fn output(&self, inputs: &[&[u32]]) -> Outcome<Vec<u32>> {
        match (self, inputs) {
            (Step::FullyConnected(_), [x, w, bias, ..]) => {
                let ([units, k], [biases]) = (w, bias) else { return Err(BAD_DATA) };
                let elements: u64 = x.iter().map(|d| u64::from(*d)).product();
                ensure(units == biases && *k > 0 && elements.is_multiple_of(u64::from(*k)))?;
                // Rank 2 must have the weights' width itself; higher ranks are cut into rows of it.
                ensure(x.len() > 2 || x.last() == Some(k))?;
                Ok(vec![u32::try_from(elements / u64::from(*k)).map_err(|_| BAD_DATA)?, *units])
            }
            (Step::Conv(window, _), [x, w, bias, ..]) => {
                let ([n, h, width, depth], [out, fh, fw, fd], [biases]) = (x, w, bias) else {
                    return Err(BAD_DATA);
                };
                ensure(depth == fd && out == biases)?;
                let (_, rows) = window.along(0, *h, *fh)?;
                let (_, columns) = window.along(1, *width, *fw)?;
                Ok(vec![*n, rows, columns, *out])
            }
            (Step::Add(_) | Step::Mul(_), [a, b, ..]) => broadcast(a, b),
            (Step::Logistic, [x, ..]) => Ok(x.to_vec()),
            _ => Err(OP_FAILED),
        }
    }
}

/// The dimensions of two tensors that are stretched over each other, aligned at their last dimension.
pub(crate) fn broadcast(a: &[u32], b: &[u32]) -> Outcome<Vec<u32>> {
    let rank = a.len().max(b.len());
    let at = |dims: &[u32], i: usize| (i + dims.len()).checked_sub(rank).and_then(|j| dims.get(j).copied());
    (0..rank)
        .map(|i| match (at(a, i).unwrap_or(1), at(b, i).unwrap_or(1)) {
            (x, y) if x == y || y == 1 => Ok(x),
            (1, y) => Ok(y),
            _ => Err(BAD_DATA),
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_count_their_positions() {
        let window = |padding, stride| Window { padding, stride: (stride, stride), dilation: (1, 1) };
        assert_eq!(window(Padding::Valid, 1).along(0, 5, 3), Ok((0, 3)));
        assert_eq!(window(Padding::Same, 2).along(0, 5, 3), Ok((1, 3)));
        assert_eq!(window(Padding::Explicit([1, 2, 0, 0]), 1).along(1, 4, 3), Ok((1, 5)));
        assert_eq!(window(Padding::Valid, 1).along(0, 2, 3), Err(BAD_DATA));
    }

    #[test]
    fn tensors_stretch_over_each_other() {
        assert_eq!(broadcast(&[2, 3], &[3]), Ok(vec![2, 3]));
        assert_eq!(broadcast(&[2, 1], &[1, 4]), Ok(vec![2, 4]));
        assert_eq!(broadcast(&[2, 3], &[2]), Err(BAD_DATA));
    }
}
