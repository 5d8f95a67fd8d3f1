//! The tensor types of GGUF: their ids, names and block geometry.
//!
//! The table holds types that neuropil does not run too, so that `inspect` can size and name them and a refusal
//! can say what was found.

use neuropil_device::DType;

/// One tensor type of the format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TensorType {
    /// The id in the file.
    pub id: u32,
    /// The usual name: `Q4_K`.
    pub name: &'static str,
    /// Elements of one block.
    pub block_elements: u64,
    /// Bytes of one block.
    pub block_bytes: u64,
    /// The type that computes, if neuropil runs this one.
    pub dtype: Option<DType>,
}

const fn runs(id: u32, name: &'static str, dtype: DType) -> TensorType {
    let (block_elements, block_bytes) = (dtype.block_elements() as u64, dtype.block_bytes() as u64);
    TensorType { id, name, block_elements, block_bytes, dtype: Some(dtype) }
}

const fn known(id: u32, name: &'static str, block_elements: u64, block_bytes: u64) -> TensorType {
    TensorType { id, name, block_elements, block_bytes, dtype: None }
}

/// Every type that is known, by id. Ids that are absent were never given out or were withdrawn.
pub const TENSOR_TYPES: [TensorType; 35] = [
    runs(0, "F32", DType::F32),
    runs(1, "F16", DType::F16),
    runs(2, "Q4_0", DType::Q4_0),
    runs(3, "Q4_1", DType::Q4_1),
    runs(6, "Q5_0", DType::Q5_0),
    runs(7, "Q5_1", DType::Q5_1),
    runs(8, "Q8_0", DType::Q8_0),
    known(9, "Q8_1", 32, 36),
    runs(10, "Q2_K", DType::Q2_K),
    runs(11, "Q3_K", DType::Q3_K),
    runs(12, "Q4_K", DType::Q4_K),
    runs(13, "Q5_K", DType::Q5_K),
    runs(14, "Q6_K", DType::Q6_K),
    known(15, "Q8_K", 256, 292),
    known(16, "IQ2_XXS", 256, 66),
    known(17, "IQ2_XS", 256, 74),
    known(18, "IQ3_XXS", 256, 98),
    known(19, "IQ1_S", 256, 50),
    runs(20, "IQ4_NL", DType::IQ4_NL),
    known(21, "IQ3_S", 256, 110),
    known(22, "IQ2_S", 256, 82),
    runs(23, "IQ4_XS", DType::IQ4_XS),
    known(I8, "I8", 1, 1),
    known(25, "I16", 1, 2),
    known(I32, "I32", 1, 4),
    known(27, "I64", 1, 8),
    known(28, "F64", 1, 8),
    known(29, "IQ1_M", 256, 56),
    runs(30, "BF16", DType::BF16),
    known(34, "TQ1_0", 256, 54),
    known(35, "TQ2_0", 256, 66),
    runs(39, "MXFP4", DType::MXFP4),
    known(40, "NVFP4", 64, 36),
    known(41, "Q1_0", 128, 18),
    known(42, "Q2_0", 64, 18),
];

/// The id of I8, which computes nothing but holds the bundles of a neuron store.
pub const I8: u32 = 24;
/// The id of I32, which computes nothing but holds the lists of a neuron store.
pub const I32: u32 = 26;
/// Both of them.
pub(super) const DATA_TYPES: [u32; 2] = [I8, I32];

/// The type with this id, if it is known.
pub fn tensor_type(id: u32) -> Option<&'static TensorType> {
    TENSOR_TYPES.iter().find(|known| known.id == id)
}

/// The id of a type that computes.
pub fn tensor_id(dtype: DType) -> u32 {
    TENSOR_TYPES.iter().find(|known| known.dtype == Some(dtype)).map_or(0, |known| known.id)
}

/// The names of the types that neuropil runs, for messages.
pub(super) fn supported_names() -> String {
    let names: Vec<&str> = TENSOR_TYPES.iter().filter(|t| t.dtype.is_some()).map(|t| t.name).collect();
    names.join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_sorted_and_holds_every_dtype_once() {
        assert!(TENSOR_TYPES.is_sorted_by(|a, b| a.id < b.id));
        for dtype in DType::ALL {
            let entries: Vec<_> = TENSOR_TYPES.iter().filter(|t| t.dtype == Some(dtype)).collect();
            assert_eq!(entries.len(), 1, "{dtype}");
            assert_eq!(entries[0].name.to_lowercase(), dtype.name());
        }
    }

    #[test]
    fn every_block_has_elements_and_bytes() {
        assert!(TENSOR_TYPES.iter().all(|t| t.block_elements > 0 && t.block_bytes > 0));
    }
}
