//! The arithmetic: tensors as numbers, and one run through a model's operations.

mod float;
mod geometry;
mod pointwise;
mod quant;

use std::sync::Arc;

use half::f16;

use crate::check::{Fuse, Step, Window};
use crate::codes::*;
use crate::compile::Plan;
use crate::operand::Shape;

/// Elements, widened for computing.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Data {
    /// F32 and F16.
    Floats(Vec<f32>),
    /// Bytes, signed or not.
    Small(Vec<i16>),
    /// 32-bit integers.
    Wide(Vec<i32>),
}

/// A tensor, or a scalar.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Tensor {
    pub(crate) dims: Vec<u32>,
    pub(crate) data: Data,
}

/// An operand of the operation at hand: its type and its value.
#[derive(Debug, Clone, Copy)]
struct Arg<'a> {
    shape: &'a Shape,
    tensor: &'a Tensor,
}

impl Arg<'_> {
    fn floats(&self) -> Outcome<&[f32]> {
        if let Data::Floats(v) = &self.tensor.data { Ok(v) } else { Err(OP_FAILED) }
    }

    fn small(&self) -> Outcome<&[i16]> {
        if let Data::Small(v) = &self.tensor.data { Ok(v) } else { Err(OP_FAILED) }
    }

    fn wide(&self) -> Outcome<&[i32]> {
        if let Data::Wide(v) = &self.tensor.data { Ok(v) } else { Err(OP_FAILED) }
    }

    fn is_float(&self) -> bool {
        matches!(self.tensor.data, Data::Floats(_))
    }
}

/// A number as F16 holds it.
fn rounded(value: f32) -> f32 {
    f16::from_f32(value).to_f32()
}

/// Bytes of an operand as numbers. With `relaxed`, F32 is read as F16 would hold it.
pub(crate) fn decode(kind: i32, dims: &[u32], bytes: &[u8], relaxed: bool) -> Outcome<Tensor> {
    let words = || bytes.as_chunks::<4>().0.iter();
    let data = match kind {
        TENSOR_FLOAT32 | FLOAT32 if relaxed => {
            Data::Floats(words().map(|b| rounded(f32::from_le_bytes(*b))).collect())
        }
        TENSOR_FLOAT32 | FLOAT32 => Data::Floats(words().map(|b| f32::from_le_bytes(*b)).collect()),
        TENSOR_FLOAT16 | FLOAT16 => {
            let halves = bytes.as_chunks::<2>().0.iter();
            Data::Floats(halves.map(|b| f16::from_le_bytes(*b).to_f32()).collect())
        }
        TENSOR_INT32 | INT32 | UINT32 => Data::Wide(words().map(|b| i32::from_le_bytes(*b)).collect()),
        TENSOR_QUANT8_ASYMM | BOOL | TENSOR_BOOL8 => {
            Data::Small(bytes.iter().map(|b| i16::from(*b)).collect())
        }
        TENSOR_QUANT8_ASYMM_SIGNED | TENSOR_QUANT8_SYMM | TENSOR_QUANT8_SYMM_PER_CHANNEL => {
            Data::Small(bytes.iter().map(|b| i16::from(b.cast_signed())).collect())
        }
        _ => return Err(OP_FAILED),
    };
    Ok(Tensor { dims: dims.to_vec(), data })
}

/// Numbers as the bytes of an operand.
pub(crate) fn encode(kind: i32, data: &Data, relaxed: bool) -> Outcome<Vec<u8>> {
    Ok(match (kind, data) {
        (TENSOR_FLOAT32, Data::Floats(v)) if relaxed => {
            v.iter().flat_map(|x| rounded(*x).to_le_bytes()).collect()
        }
        (TENSOR_FLOAT32, Data::Floats(v)) => v.iter().flat_map(|x| x.to_le_bytes()).collect(),
        (TENSOR_FLOAT16, Data::Floats(v)) => v.iter().flat_map(|x| f16::from_f32(*x).to_le_bytes()).collect(),
        (_, Data::Small(v)) => v.iter().map(|x| *x as u8).collect(),
        (_, Data::Wide(v)) => v.iter().flat_map(|x| x.to_le_bytes()).collect(),
        _ => return Err(OP_FAILED),
    })
}

/// Runs the operations in their order. `dims` are those of every operand; the outputs come as bytes.
pub(crate) fn run(plan: &Plan, dims: &[Vec<u32>], inputs: Vec<Tensor>) -> Outcome<Vec<Vec<u8>>> {
    let model = &plan.model;
    let mut values: Vec<Option<Arc<Tensor>>> = plan.constants.clone();
    for (index, tensor) in model.inputs.iter().zip(inputs) {
        *values.get_mut(*index as usize).ok_or(OP_FAILED)? = Some(Arc::new(tensor));
    }
    for (at, step) in &model.order {
        let operation = model.operations.get(*at).ok_or(OP_FAILED)?;
        let mut args = Vec::new();
        for index in &operation.inputs {
            let tensor = values.get(*index as usize).and_then(Option::as_deref).ok_or(OP_FAILED)?;
            let operand = model.operands.get(*index as usize).ok_or(OP_FAILED)?;
            args.push(Arg { shape: &operand.shape, tensor });
        }
        let output = *operation.outputs.first().ok_or(OP_FAILED)? as usize;
        let shape = &model.operands.get(output).ok_or(OP_FAILED)?.shape;
        let scales = operation.inputs.get(1).and_then(|i| model.operands.get(*i as usize));
        let scales = scales.and_then(|o| o.channels.as_ref()).map(|c| c.scales.as_slice());
        let dims = dims.get(output).ok_or(OP_FAILED)?;
        let data = compute(*step, &args, scales, shape, dims)?;
        // What lies between two operations has its type's precision, not more.
        let data = match data {
            Data::Floats(v) if shape.kind == TENSOR_FLOAT16 || model.relaxed => {
                Data::Floats(v.into_iter().map(rounded).collect())
            }
            other => other,
        };
        *values.get_mut(output).ok_or(OP_FAILED)? = Some(Arc::new(Tensor { dims: dims.clone(), data }));
    }
    let mut outputs = Vec::new();
    for index in &model.outputs {
        let tensor = values.get(*index as usize).and_then(Option::as_deref).ok_or(OP_FAILED)?;
        let kind = model.operands.get(*index as usize).ok_or(OP_FAILED)?.shape.kind;
        outputs.push(encode(kind, &tensor.data, model.relaxed)?);
    }
    Ok(outputs)
}

fn compute(step: Step, args: &[Arg], scales: Option<&[f32]>, y: &Shape, dims: &[u32]) -> Outcome<Data> {
    match (step, args) {
        (Step::FullyConnected(fuse), [x, w, bias, ..]) => product(x, None, w, bias, scales, y, fuse),
        (Step::Conv(window, fuse), [x, w, bias, ..]) => product(x, Some(window), w, bias, scales, y, fuse),
        (Step::Add(fuse), [a, b, ..]) => pointwise::pair(a, b, y, dims, fuse, |a, b| a + b),
        (Step::Mul(fuse), [a, b, ..]) => pointwise::pair(a, b, y, dims, fuse, |a, b| a * b),
        (Step::Logistic, [x]) => pointwise::each(x, y, |x| 1.0 / (1.0 + (-x).exp())),
        _ => Err(OP_FAILED),
    }
}

/// Rows times weights plus bias. A convolution is that too, once each window is laid out as a row.
fn product(
    x: &Arg,
    window: Option<Window>,
    w: &Arg,
    bias: &Arg,
    scales: Option<&[f32]>,
    y: &Shape,
    fuse: Fuse,
) -> Outcome<Data> {
    let (x_dims, w_dims) = (&x.tensor.dims, &w.tensor.dims);
    let k: usize = w_dims.iter().skip(1).map(|d| *d as usize).product();
    if x.is_float() {
        let rows;
        let rows = match window {
            None => x.floats()?,
            Some(window) => {
                rows = geometry::rows(x.floats()?, x_dims, w_dims, window, 0.0)?;
                &rows
            }
        };
        return Ok(Data::Floats(float::product(rows, w.floats()?, bias.floats()?, k, fuse)));
    }
    let rows;
    let rows = match window {
        None => x.small()?,
        Some(window) => {
            // What lies outside the image is zero, which the zero point stands for.
            rows = geometry::rows(x.small()?, x_dims, w_dims, window, x.shape.zero as i16)?;
            &rows
        }
    };
    let plane = quant::Plane { x: x.shape, w: w.shape, y, channels: scales, fuse };
    Ok(Data::Small(quant::product(rows, w.small()?, bias.wide()?, k, &plane)))
}
