//! Functions of single elements, and of pairs of elements of two tensors stretched over each other.

use super::{Arg, Data, quant};
use crate::check::Fuse;
use crate::codes::*;
use crate::operand::Shape;

/// The values that an operand stands for.
fn values(arg: &Arg) -> Outcome<Vec<f32>> {
    if arg.is_float() {
        return Ok(arg.floats()?.to_vec());
    }
    let zero = arg.shape.zero as i16;
    Ok(arg.small()?.iter().map(|q| f32::from(q - zero) * arg.shape.scale).collect())
}

fn output(values: Vec<f32>, y: &Shape, fuse: Fuse) -> Data {
    let (low, high) = fuse.range();
    match y.kind {
        TENSOR_FLOAT32 | TENSOR_FLOAT16 => {
            Data::Floats(values.into_iter().map(|v| v.clamp(low, high)).collect())
        }
        _ => Data::Small(quant::quantised(&values, y, fuse)),
    }
}

/// A function of each element.
pub(super) fn each(x: &Arg, y: &Shape, function: fn(f32) -> f32) -> Outcome<Data> {
    Ok(output(values(x)?.into_iter().map(function).collect(), y, Fuse::None))
}

/// A function of each pair.
pub(super) fn pair(
    a: &Arg,
    b: &Arg,
    y: &Shape,
    dims: &[u32],
    fuse: Fuse,
    function: fn(f32, f32) -> f32,
) -> Outcome<Data> {
    let (left, right) = (values(a)?, values(b)?);
    let count: usize = dims.iter().map(|d| *d as usize).product();
    let pick = |from: &[f32], of: &[u32], at: usize| {
        let (mut rest, mut step, mut place) = (at, 1usize, 0usize);
        for (i, dim) in dims.iter().rev().enumerate() {
            let coordinate = rest % *dim as usize;
            rest /= *dim as usize;
            // A dimension of one, or a missing one, is stretched.
            let own = of.iter().rev().nth(i).map_or(1, |d| *d as usize);
            if own > 1 {
                place += coordinate * step;
            }
            step *= own;
        }
        from.get(place).copied().ok_or(OP_FAILED)
    };
    let pairs = (0..count)
        .map(|at| Ok(function(pick(&left, &a.tensor.dims, at)?, pick(&right, &b.tensor.dims, at)?)));
    Ok(output(pairs.collect::<Outcome<Vec<f32>>>()?, y, fuse))
}
