//! The type of an operand and the bytes it takes. Every rule that one operand can break alone is here.

use crate::codes::*;

/// The scales of a tensor with one per channel.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Channels {
    pub(crate) dimension: usize,
    pub(crate) scales: Vec<f32>,
}

/// Type, dimensions and quantisation of an operand. A dimension of 0, or no dimensions on a tensor, is not known yet.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Shape {
    pub(crate) kind: i32,
    pub(crate) dims: Vec<u32>,
    pub(crate) scale: f32,
    pub(crate) zero: i32,
}

/// Bytes of one element; `None` for a type that does not exist here.
fn element_size(kind: i32) -> Option<usize> {
    Some(match kind {
        FLOAT32 | INT32 | UINT32 | TENSOR_FLOAT32 | TENSOR_INT32 => 4,
        FLOAT16 | TENSOR_FLOAT16 | TENSOR_QUANT16_SYMM | TENSOR_QUANT16_ASYMM => 2,
        BOOL | TENSOR_BOOL8 | TENSOR_QUANT8_ASYMM | TENSOR_QUANT8_SYMM_PER_CHANNEL => 1,
        TENSOR_QUANT8_SYMM | TENSOR_QUANT8_ASYMM_SIGNED => 1,
        _ => return None,
    })
}

/// Whether the type is a single value.
pub(crate) fn is_scalar(kind: i32) -> bool {
    [FLOAT32, INT32, UINT32, BOOL, FLOAT16].contains(&kind)
}

impl Shape {
    /// Reads the C struct and checks it.
    ///
    /// # Safety
    /// `from` is NULL or points to a type whose dimensions can be read.
    pub(crate) unsafe fn read(from: *const OperandType) -> Outcome<Shape> {
        // SAFETY: the caller vouches for the pointer, NULL aside.
        let from = unsafe { from.as_ref() }.ok_or(UNEXPECTED_NULL)?;
        // SAFETY: the caller vouches for the dimensions.
        let dims = unsafe { crate::world::list(from.dimensions, from.dimension_count) }?;
        let shape = Shape { kind: from.kind, dims, scale: from.scale, zero: from.zero_point };
        shape.check()?;
        Ok(shape)
    }

    /// The rules that the type sets for dimensions, scale and zero point.
    fn check(&self) -> Outcome {
        element_size(self.kind).ok_or(BAD_DATA)?;
        if is_scalar(self.kind) && !self.dims.is_empty() || !self.scale.is_finite() || self.scale < 0.0 {
            return Err(BAD_DATA);
        }
        let quantised = self.scale > 0.0;
        let fine = match self.kind {
            TENSOR_QUANT8_ASYMM => quantised && (0..=255).contains(&self.zero),
            TENSOR_QUANT8_ASYMM_SIGNED => quantised && (-128..=127).contains(&self.zero),
            TENSOR_QUANT16_ASYMM => quantised && (0..=65535).contains(&self.zero),
            TENSOR_QUANT8_SYMM | TENSOR_QUANT16_SYMM => quantised && self.zero == 0,
            TENSOR_INT32 => self.zero == 0,
            _ => !quantised && self.zero == 0,
        };
        self.bytes()?;
        if fine { Ok(()) } else { Err(BAD_DATA) }
    }

    /// Bytes of the value; `None` while some dimension is not known.
    ///
    /// # Errors
    /// When the size does not fit an unsigned 32-bit number, which is the library's limit.
    pub(crate) fn bytes(&self) -> Outcome<Option<usize>> {
        let size = element_size(self.kind).ok_or(BAD_DATA)?;
        let mut product = size as u64;
        for dim in self.dims.iter().filter(|d| **d > 0) {
            product = product.checked_mul(u64::from(*dim)).ok_or(BAD_DATA)?;
        }
        if product > u64::from(u32::MAX) {
            return Err(BAD_DATA);
        }
        let known = is_scalar(self.kind) || !self.dims.is_empty() && self.dims.iter().all(|d| *d > 0);
        Ok(known.then_some(product as usize))
    }

    /// This shape with the dimensions that `given` makes known; everything else must be equal.
    pub(crate) fn with(&self, given: Option<&Shape>) -> Outcome<Shape> {
        let Some(given) = given else { return Ok(self.clone()) };
        if given.kind != self.kind || given.scale != self.scale || given.zero != self.zero {
            return Err(BAD_DATA);
        }
        Ok(Shape { dims: merge(&self.dims, &given.dims)?, ..self.clone() })
    }
}

/// Dimensions that two descriptions agree on; 0 and an empty list say nothing.
pub(crate) fn merge(a: &[u32], b: &[u32]) -> Outcome<Vec<u32>> {
    if a.is_empty() || b.is_empty() {
        return Ok(if a.is_empty() { b } else { a }.to_vec());
    }
    if a.len() != b.len() {
        return Err(BAD_DATA);
    }
    a.iter()
        .zip(b)
        .map(|(x, y)| match (*x, *y) {
            (0, y) => Ok(y),
            (x, 0) => Ok(x),
            (x, y) if x == y => Ok(x),
            _ => Err(BAD_DATA),
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape(kind: i32, dims: &[u32], scale: f32, zero: i32) -> Shape {
        Shape { kind, dims: dims.to_vec(), scale, zero }
    }

    #[test]
    fn types_set_their_rules() {
        let fine = [
            shape(TENSOR_FLOAT32, &[2, 3], 0.0, 0),
            shape(TENSOR_QUANT8_ASYMM, &[2], 0.5, 255),
            shape(TENSOR_QUANT8_ASYMM_SIGNED, &[2], 0.5, -128),
            shape(TENSOR_QUANT8_SYMM_PER_CHANNEL, &[2], 0.0, 0),
            shape(TENSOR_INT32, &[2], 0.25, 0),
            shape(INT32, &[], 0.0, 0),
        ];
        let wrong = [
            shape(TENSOR_FLOAT32, &[2, 3], 1.0, 0),
            shape(TENSOR_FLOAT32, &[65536, 65536], 0.0, 0),
            shape(TENSOR_QUANT8_ASYMM, &[2], 0.0, 0),
            shape(TENSOR_QUANT8_ASYMM, &[2], 0.5, 256),
            shape(TENSOR_QUANT8_ASYMM, &[2], f32::NAN, 0),
            shape(TENSOR_QUANT8_ASYMM_SIGNED, &[2], 0.5, -129),
            shape(TENSOR_QUANT8_SYMM_PER_CHANNEL, &[2], 0.5, 0),
            shape(TENSOR_INT32, &[2], 0.25, 1),
            shape(INT32, &[1], 0.0, 0),
            shape(99, &[1], 0.0, 0),
        ];
        assert!(fine.iter().all(|s| s.check().is_ok()));
        assert!(wrong.iter().all(|s| s.check() == Err(BAD_DATA)));
    }

    #[test]
    fn open_dimensions_have_no_size_yet() {
        assert_eq!(shape(TENSOR_FLOAT16, &[0, 3], 0.0, 0).bytes(), Ok(None));
        assert_eq!(shape(TENSOR_FLOAT16, &[2, 3], 0.0, 0).bytes(), Ok(Some(12)));
        assert_eq!(merge(&[0, 3], &[2, 3]), Ok(vec![2, 3]));
        assert_eq!(merge(&[1, 3], &[2, 3]), Err(BAD_DATA));
    }
}
