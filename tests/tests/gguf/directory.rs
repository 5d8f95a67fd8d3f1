//! The tensor directory: names, shapes, types and extents.

use neuropil::gguf::{GgufError, MAX_TENSORS, TENSOR_TYPES, TypePolicy, parse};
use neuropil_device::DType;
use neuropil_tests::counting_alloc::peak_bytes;
use neuropil_tests::gguf_writer::GgufFile;

use crate::{MIB, one_vector, parsed, refused};

/// A file with one tensor "t" that has no data.
fn entry(dims: &[u64], type_id: u32) -> GgufFile {
    GgufFile::default().tensor("t", dims, type_id, Vec::new())
}

#[test]
fn every_supported_type_is_sized_by_its_blocks() {
    for kind in TENSOR_TYPES.iter().filter(|kind| kind.dtype.is_some()) {
        let dtype = kind.dtype.unwrap();
        let cols = 3 * dtype.block_elements();
        let data = vec![0; dtype.matrix_bytes(5, cols).unwrap()];
        let file = GgufFile::default().tensor("t", &[cols as u64, 5], kind.id, data.clone());
        let header = parsed(&file.bytes()).unwrap();
        let t = &header.tensors[0];
        assert_eq!((t.dtype, t.bytes, t.cols(), t.rows()), (Some(dtype), data.len() as u64, cols as u64, 5));
        assert_eq!(
            (t.elements(), t.type_name(), &t.dims[..]),
            (cols as u64 * 5, kind.name, &[cols as u64, 5][..])
        );
    }
    assert_eq!(TENSOR_TYPES.iter().filter(|kind| kind.dtype.is_some()).count(), DType::ALL.len());
}

#[test]
fn a_dimension_of_zero_is_refused() {
    for dims in [&[4, 0][..], &[0], &[0, 0, 0, 0]] {
        let bytes = entry(dims, 0).bytes();
        assert!(matches!(refused(&bytes), GgufError::ZeroDim { .. }));
    }
}

#[test]
fn a_scalar_is_one_element() {
    let file = GgufFile::default().f32_tensor("t", &[], &[2.0]);
    let header = parsed(&file.bytes()).unwrap();
    let t = &header.tensors[0];
    assert_eq!((&t.dims[..], t.cols(), t.rows(), t.bytes), (&[1][..], 1, 1, 4));
}

#[test]
fn more_than_four_dimensions_are_refused() {
    for n_dims in [5u32, 1000, u32::MAX] {
        let mut bytes = entry(&[1, 1, 1, 1], 0).bytes();
        let at = 24 + 8 + "t".len();
        bytes[at..at + 4].copy_from_slice(&n_dims.to_le_bytes());
        let (error, peak) = peak_bytes(|| refused(&bytes));
        assert!(matches!(error, GgufError::BadRank { n_dims: n, .. } if n == n_dims), "{error}");
        assert!(peak < 65536);
    }
}

#[test]
fn a_size_beyond_64_bits_is_an_error_not_a_small_size() {
    for dims in [&[1 << 40, 1 << 40][..], &[1 << 62], &[1 << 16; 4], &[u64::MAX, 2]] {
        let error = refused(&entry(dims, 0).bytes());
        assert!(matches!(&error, GgufError::SizeOverflow { tensor, .. } if tensor == "t"), "{error}");
    }
    // Representable, so the end of the file refuses it.
    assert!(matches!(refused(&entry(&[1 << 60], 0).bytes()), GgufError::Truncated { .. }));
}

#[test]
fn a_sum_of_sizes_beyond_64_bits_is_refused() {
    let mut file = GgufFile::default();
    for (index, offset) in [0, 1 << 62, 1 << 63, 3 << 62, 0].into_iter().enumerate() {
        file = file.tensor(&format!("t{index}"), &[1 << 60], 0, vec![0; 64]);
        file.tensors[index].offset = Some(offset);
    }
    let error = refused(&file.bytes());
    assert!(matches!(&error, GgufError::SizeOverflow { tensor, .. } if tensor == "t3"), "{error}");
}

#[test]
fn an_offset_that_wraps_or_leaves_the_file_is_refused() {
    for offset in [1 << 20, 1 << 63, u64::MAX - 31] {
        let mut file = one_vector(8);
        file.tensors[0].offset = Some(offset);
        let error = refused(&file.bytes());
        assert!(matches!(error, GgufError::Truncated { .. } | GgufError::SizeOverflow { .. }), "{error}");
    }
    let mut file = one_vector(8);
    file.tensors[0].offset = Some(4);
    assert!(matches!(refused(&file.bytes()), GgufError::Misaligned { offset: 4, alignment: 32, .. }));
}

#[test]
fn tensors_that_share_bytes_are_refused() {
    for (first, second) in [(0, 32), (32, 0), (0, 0)] {
        let mut file = one_vector(16).f32_tensor("u", &[16], &[0.0; 16]);
        file.tensors[0].offset = Some(first);
        file.tensors[1].offset = Some(second);
        let error = refused(&file.bytes());
        assert!(matches!(error, GgufError::Overlap { .. }), "{error}");
        let text = error.to_string();
        assert!(text.contains("\"t\"") && text.contains("\"u\""), "{text}");
    }
}

#[test]
fn gaps_and_any_order_of_tensors_are_fine() {
    let mut file = one_vector(8).f32_tensor("u", &[8], &[1.0; 8]).tensor("pad", &[32], 0, vec![0; 128]);
    file.tensors[0].offset = Some(96);
    file.tensors[1].offset = Some(0);
    file.tensors.truncate(2);
    let mut bytes = file.bytes();
    bytes.resize(bytes.len() + 64, 0);
    let header = parsed(&bytes).unwrap();
    assert_eq!(header.tensors[0].offset - header.tensors[1].offset, 96);
}

#[test]
fn a_tensor_name_that_appears_twice_is_refused() {
    let file = one_vector(8).f32_tensor("u", &[8], &[0.0; 8]).f32_tensor("t", &[8], &[0.0; 8]);
    let error = refused(&file.bytes());
    assert!(matches!(&error, GgufError::DuplicateTensor { tensor, .. } if tensor == "t"), "{error}");
}

#[test]
fn an_unsupported_type_is_named_and_still_listed() {
    let cases = [(16, "IQ2_XXS"), (21, "IQ3_S"), (34, "TQ1_0"), (4, "unknown"), (9999, "unknown")];
    for (id, name) in cases {
        let file = one_vector(8).tensor("odd", &[256], id, vec![0; 256]);
        let error = refused(&file.bytes());
        let text = error.to_string();
        assert!(matches!(&error, GgufError::UnsupportedType { type_id, .. } if *type_id == id), "{text}");
        let types = "F32 F16 Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2_K Q3_K Q4_K Q5_K Q6_K IQ4_NL IQ4_XS BF16 MXFP4";
        let parts = ["odd", &id.to_string(), name, types];
        assert!(parts.iter().all(|part| text.contains(part)), "{text}");
        let listed = parse(&file.bytes(), "test.gguf".as_ref(), TypePolicy::Any).unwrap();
        assert_eq!((listed.tensors[1].type_name(), listed.tensors[1].dtype), (name, None));
    }
}

#[test]
fn a_row_that_is_not_whole_blocks_is_refused_though_the_total_is() {
    for (cols, rows) in [(128, 2), (4544, 256), (1, 256)] {
        let file = GgufFile::default().tensor("t", &[cols, rows], 12, vec![0; (cols * rows) as usize]);
        let error = refused(&file.bytes());
        assert!(matches!(error, GgufError::RowNotWhole { block: 256, cols: c, .. } if c == cols), "{error}");
        let text = error.to_string();
        assert!(text.contains("Q4_K") && text.contains(&cols.to_string()), "{text}");
    }
}

#[test]
fn a_cut_file_is_told_with_tensor_end_and_length() {
    let rows = 64;
    let data = vec![0; rows * 34];
    let file = GgufFile::default().tensor("blk.0.ffn_up.weight", &[32, rows as u64], 8, data);
    let bytes = file.bytes();
    parsed(&bytes).unwrap();
    for cut in [1, 34, bytes.len() / 2] {
        let len = bytes.len() - cut;
        let text = refused(&bytes[..len]).to_string();
        let parts = ["blk.0.ffn_up.weight", &bytes.len().to_string(), &len.to_string(), "download it again"];
        assert!(parts.iter().all(|part| text.contains(part)), "{text}");
    }
}

#[test]
fn the_most_tensors_stay_within_the_memory_promise() {
    let mut file = GgufFile { alignment: 8, ..GgufFile::default() }
        .pair("general.alignment", neuropil_tests::gguf_writer::Value::U32(8));
    for index in 0..MAX_TENSORS {
        file = file.tensor(&format!("{index:x}"), &[2], 0, vec![0; 8]);
    }
    let bytes = file.bytes();
    let (header, peak) = peak_bytes(|| parsed(&bytes).unwrap());
    assert_eq!(header.tensors.len() as u64, MAX_TENSORS);
    assert!(peak < bytes.len() + 64 * MIB, "took {peak} bytes");
}
