//! Quantising and dequantising against blocks made by an outside oracle (`ggml/generate.py`).

use neuropil_device::DType;
use neuropil_device::quant::{dequantize_row, quantize_row};

fn bytes(hex: &str) -> Vec<u8> {
    assert!(hex.len().is_multiple_of(2));
    (0..hex.len()).step_by(2).map(|i| u8::from_str_radix(&hex[i..i + 2], 16).unwrap()).collect()
}

fn floats(hex: &str) -> Vec<f32> {
    bytes(hex).as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
}

fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|x| x.to_bits()).collect()
}

#[test]
fn blocks_have_the_bits_of_ggml() {
    let mut seen = Vec::new();
    for line in include_str!("ggml/blocks.txt").lines() {
        let fields: Vec<&str> = line.split(' ').collect();
        let [what, name, from, to] = fields[..] else { panic!("bad line: {line}") };
        let dtype = DType::ALL.into_iter().find(|d| d.name() == name).unwrap();
        match what {
            "dequantize" => {
                let want = floats(to);
                let mut out = vec![0.0; want.len()];
                dequantize_row(dtype, &bytes(from), &mut out);
                assert_eq!(bits(&out), bits(&want), "dequantize {dtype}");
                seen.push(dtype);
            }
            "quantize" => {
                let mut out = vec![0; to.len() / 2];
                quantize_row(dtype, &floats(from), &mut out);
                assert_eq!(out, bytes(to), "quantize {dtype}");
            }
            other => panic!("unknown line {other}"),
        }
    }
    assert!(DType::ALL.iter().all(|d| seen.contains(d)), "every type has a block: {seen:?}");
}
