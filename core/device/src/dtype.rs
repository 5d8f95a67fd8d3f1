//! Element types of weights, with the geometry of their blocks.
//!
//! A quantised type stores a *block* of elements in a fixed number of bytes; a matrix row is a whole number of
//! blocks. Everything that sizes memory goes through [`DType::row_bytes`], so a width that does not fit the
//! block is refused once, here, and not discovered by a kernel.

use std::fmt;

/// The type of the elements of a weight. The block formats are those of GGUF.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[allow(missing_docs)] // the variants are the names of the formats
#[allow(non_camel_case_types)]
pub enum DType {
    F32,
    F16,
    BF16,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q4_K,
    Q5_K,
    Q6_K,
    Q2_K,
    Q3_K,
    IQ4_NL,
    IQ4_XS,
    MXFP4,
}

impl DType {
    /// Every type, in the order of declaration.
    pub const ALL: [DType; 16] = [
        DType::F32,
        DType::F16,
        DType::BF16,
        DType::Q4_0,
        DType::Q4_1,
        DType::Q5_0,
        DType::Q5_1,
        DType::Q8_0,
        DType::Q4_K,
        DType::Q5_K,
        DType::Q6_K,
        DType::Q2_K,
        DType::Q3_K,
        DType::IQ4_NL,
        DType::IQ4_XS,
        DType::MXFP4,
    ];

    /// Elements in one block; 1 for the plain float types.
    pub const fn block_elements(self) -> usize {
        match self {
            DType::F32 | DType::F16 | DType::BF16 => 1,
            DType::Q4_0 | DType::Q4_1 | DType::Q5_0 | DType::Q5_1 | DType::Q8_0 => 32,
            DType::IQ4_NL | DType::MXFP4 => 32,
            DType::Q4_K | DType::Q5_K | DType::Q6_K => 256,
            DType::Q2_K | DType::Q3_K | DType::IQ4_XS => 256,
        }
    }

    /// Bytes of one block.
    pub const fn block_bytes(self) -> usize {
        match self {
            DType::F32 => 4,
            DType::F16 | DType::BF16 => 2,
            DType::Q4_0 => 18,
            DType::Q4_1 => 20,
            DType::Q5_0 => 22,
            DType::Q5_1 => 24,
            DType::Q8_0 => 34,
            DType::Q4_K => 144,
            DType::Q5_K => 176,
            DType::Q6_K => 210,
            DType::Q2_K => 84,
            DType::Q3_K => 110,
            DType::IQ4_NL => 18,
            DType::IQ4_XS => 136,
            DType::MXFP4 => 17,
        }
    }

    /// Bytes of one row of `cols` elements; `None` when the row is not a whole number of blocks or overflows.
    pub const fn row_bytes(self, cols: usize) -> Option<usize> {
        if !cols.is_multiple_of(self.block_elements()) {
            return None;
        }
        (cols / self.block_elements()).checked_mul(self.block_bytes())
    }

    /// Bytes of a `rows` × `cols` matrix; `None` as for [`DType::row_bytes`].
    pub const fn matrix_bytes(self, rows: usize, cols: usize) -> Option<usize> {
        match self.row_bytes(cols) {
            Some(row) => row.checked_mul(rows),
            None => None,
        }
    }

    /// Whether products with this type quantise their activations to 8 bits (see [`crate::quant`]).
    pub const fn quantizes_activations(self) -> bool {
        self.block_elements() > 1 && !self.is_expanded()
    }

    /// Whether products widen blocks of this type to F32 and go on as with F32 weights (see [`crate::quant`]).
    pub const fn is_expanded(self) -> bool {
        matches!(self, DType::Q2_K | DType::Q3_K | DType::IQ4_NL | DType::IQ4_XS | DType::MXFP4)
    }

    /// The name users type: `f32`, `q4_0`, `q4_k`.
    pub const fn name(self) -> &'static str {
        match self {
            DType::F32 => "f32",
            DType::F16 => "f16",
            DType::BF16 => "bf16",
            DType::Q4_0 => "q4_0",
            DType::Q4_1 => "q4_1",
            DType::Q5_0 => "q5_0",
            DType::Q5_1 => "q5_1",
            DType::Q8_0 => "q8_0",
            DType::Q4_K => "q4_k",
            DType::Q5_K => "q5_k",
            DType::Q6_K => "q6_k",
            DType::Q2_K => "q2_k",
            DType::Q3_K => "q3_k",
            DType::IQ4_NL => "iq4_nl",
            DType::IQ4_XS => "iq4_xs",
            DType::MXFP4 => "mxfp4",
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_is_whole_blocks() {
        assert_eq!(DType::Q4_K.row_bytes(128), None);
        assert_eq!(DType::Q4_K.row_bytes(4544), None);
        assert_eq!(DType::Q4_K.row_bytes(4608), Some(18 * 144));
        assert_eq!(DType::Q8_0.row_bytes(64), Some(68));
        assert_eq!(DType::F32.row_bytes(usize::MAX), None);
        assert_eq!(DType::F32.matrix_bytes(usize::MAX, 4), None);
    }
}
