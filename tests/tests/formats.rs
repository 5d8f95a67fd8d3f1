//! The device crate's reading and writing of the element types against a second implementation.

use neuropil_device::{DType, quant};
use neuropil_tests::codec;
use proptest::prelude::*;

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn any_bytes_read_alike(bytes in proptest::collection::vec(any::<u8>(), 2 * 210)) {
        for dtype in DType::ALL {
            let (elements, size) = codec::block(dtype);
            let bytes = &bytes[..bytes.len() / size * size];
            let mut got = vec![0.0; bytes.len() / size * elements];
            quant::dequantize_row(dtype, bytes, &mut got);
            for (got, want) in got.iter().zip(codec::decode(dtype, bytes)) {
                prop_assert!(got.to_bits() == want.to_bits() || got.is_nan() && want.is_nan(), "{dtype}: {got} {want}");
            }
        }
    }

    #[test]
    fn its_quantiser_is_no_worse_than_the_simplest(x in proptest::collection::vec(-3.0f32..3.0, 256)) {
        for dtype in DType::ALL {
            let (elements, size) = codec::block(dtype);
            let mut bytes = vec![0; x.len() / elements * size];
            quant::quantize_row(dtype, &x, &mut bytes);
            let off = |bytes: &[u8]| -> f32 {
                x.iter().zip(codec::decode(dtype, bytes)).map(|(a, b)| (a - b) * (a - b)).sum()
            };
            let (got, simple) = (off(&bytes), off(&codec::encode(dtype, &x)));
            prop_assert!(got <= 1.2 * simple + 1e-6, "{dtype}: {got} {simple}");
        }
    }
}
