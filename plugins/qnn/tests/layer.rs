//! The feed-forward of a layer of SmolLM2, if its file is in the cache of models: three products by the unit, and SiLU
//! here. Without the file or a library the test is skipped, and says so.

mod common;

use std::collections::HashMap;
use std::path::Path;

use common::{cache, libraries, open};
use neuropil_plugin_abi as abi;
use neuropil_plugin_conformance::raw::Device;
use neuropil_plugin_conformance::sample::{Sample, relative_error};

const MODEL: &str = "SmolLM2-135M-Instruct.Q4_1.gguf";

/// Tokens of the prompt, whose embeddings are the input of the layer's norm.
const TOKENS: [usize; 8] = [1, 4093, 198, 2683, 359, 253, 5356, 5646];
const WIDTH: usize = 576;
const NEURONS: usize = 1536;

/// A file of GGUF, as far as this test needs it.
struct File {
    bytes: Vec<u8>,
    /// Type and place of each tensor.
    tensors: HashMap<String, (u32, usize)>,
}

impl File {
    fn open(path: &Path) -> File {
        let bytes = std::fs::read(path).unwrap();
        let mut at = 8;
        fn number<const N: usize>(bytes: &[u8], at: &mut usize) -> u64 {
            let mut wide = [0; 8];
            wide[..N].copy_from_slice(&bytes[*at..*at + N]);
            *at += N;
            u64::from_le_bytes(wide)
        }
        fn text(bytes: &[u8], at: &mut usize) -> String {
            let len = number::<8>(bytes, at) as usize;
            *at += len;
            String::from_utf8_lossy(&bytes[*at - len..*at]).into_owned()
        }
        /// Passes over a value of a type.
        fn pass(bytes: &[u8], at: &mut usize, kind: u64) {
            match kind {
                0 | 1 | 7 => *at += 1,
                2 | 3 => *at += 2,
                4..=6 => *at += 4,
                8 => drop(text(bytes, at)),
                9 => {
                    let (kind, count) = (number::<4>(bytes, at), number::<8>(bytes, at));
                    (0..count).for_each(|_| pass(bytes, at, kind));
                }
                _ => *at += 8,
            }
        }
        let (count, keys) = (number::<8>(&bytes, &mut at), number::<8>(&bytes, &mut at));
        for _ in 0..keys {
            text(&bytes, &mut at);
            let kind = number::<4>(&bytes, &mut at);
            pass(&bytes, &mut at, kind);
        }
        let mut tensors = HashMap::new();
        for _ in 0..count {
            let name = text(&bytes, &mut at);
            let rank = number::<4>(&bytes, &mut at) as usize;
            at += 8 * rank;
            let kind = number::<4>(&bytes, &mut at) as u32;
            tensors.insert(name, (kind, number::<8>(&bytes, &mut at) as usize));
        }
        let start = at.next_multiple_of(32);
        tensors.values_mut().for_each(|(_, offset)| *offset += start);
        File { bytes, tensors }
    }

    /// Values of a tensor, from one on.
    fn values(&self, name: &str, first: usize, count: usize) -> Vec<f64> {
        let (kind, offset) = self.tensors[name];
        let half = |at: usize| f64::from(half::f16::from_le_bytes([self.bytes[at], self.bytes[at + 1]]));
        let value = |index: usize| match kind {
            0 => {
                let at = offset + index * 4;
                f64::from(f32::from_le_bytes(self.bytes[at..at + 4].try_into().unwrap()))
            }
            // Q4_1: a scale, a minimum, 16 bytes of which the low halves come first.
            3 => {
                let (block, place) = (offset + index / 32 * 20, index % 32);
                let byte = self.bytes[block + 4 + place % 16];
                half(block) * f64::from(if place < 16 { byte & 15 } else { byte >> 4 }) + half(block + 2)
            }
            // Q8_0: a scale and 32 bytes.
            8 => {
                let block = offset + index / 32 * 34;
                half(block) * f64::from(self.bytes[block + 2 + index % 32] as i8)
            }
            _ => panic!("{name} has type {kind}"),
        };
        (first..first + count).map(value).collect()
    }
}

/// A matrix of these values in a scheme.
fn sample(scheme: u32, rows: usize, cols: usize, values: &[f64]) -> Sample {
    let mut sample = Sample::random(scheme, rows, cols, 1);
    (sample.data, sample.scales, sample.values) = (Vec::new(), Vec::new(), Vec::new());
    let mut nibbles = Vec::new();
    for row in values.chunks_exact(cols) {
        let full = if scheme == abi::NP_SCHEME_CHANNEL8 { 127.0 } else { 7.0 };
        let scale = (row.iter().fold(0f64, |most, v| most.max(v.abs())) / full) as f32;
        if matches!(scheme, abi::NP_SCHEME_CHANNEL8 | abi::NP_SCHEME_CHANNEL4) {
            sample.scales.extend(scale.to_le_bytes());
        }
        for value in row {
            let code = (value / f64::from(scale)).round();
            let worth = match scheme {
                abi::NP_SCHEME_F32 => {
                    sample.data.extend((*value as f32).to_le_bytes());
                    f64::from(*value as f32)
                }
                abi::NP_SCHEME_F16 => {
                    let value = half::f16::from_f64(*value);
                    sample.data.extend(value.to_le_bytes());
                    value.to_f64()
                }
                abi::NP_SCHEME_CHANNEL8 => {
                    sample.data.push(code as i8 as u8);
                    code * f64::from(scale)
                }
                _ => {
                    nibbles.push(code as i8 as u8 & 15);
                    code * f64::from(scale)
                }
            };
            sample.values.push(worth);
        }
    }
    sample.data.extend(nibbles.chunks(2).map(|pair| pair[0] | pair[1] << 4));
    sample
}

fn silu(gate: f64, up: f64) -> f64 {
    gate / (1.0 + (-gate).exp()) * up
}

/// The layer in 64-bit floats.
fn exact([gate, up, down]: &[Sample; 3], x: &[f64]) -> Vec<f64> {
    let hidden: Vec<f64> = gate.product(x).into_iter().zip(up.product(x)).map(|(g, u)| silu(g, u)).collect();
    down.product(&hidden)
}

/// The layer by the unit.
fn by_unit(device: &Device, [gate, up, down]: &[Sample; 3], x: &[f64]) -> Vec<f32> {
    let [gate, up, down] = [gate, up, down].map(|matrix| device.prepare(&[matrix]).unwrap());
    let x: Vec<f32> = x.iter().map(|x| *x as f32).collect();
    let both = device.matmul(&[&gate, &up], &x, TOKENS.len()).unwrap();
    let pairs = both[0].iter().zip(&both[1]);
    let hidden: Vec<f32> = pairs.map(|(g, u)| silu(f64::from(*g), f64::from(*u)) as f32).collect();
    device.matmul(&[&down], &hidden, TOKENS.len()).unwrap().remove(0)
}

#[test]
fn the_feed_forward_of_a_layer() {
    let path = cache().unwrap_or_default().join(MODEL);
    if !path.is_file() {
        println!("SKIPPED: there is no {}", path.display());
        return;
    }
    let units = libraries("libQnnHtp.so").into_iter().flat_map(|library| {
        ["f16", "a16", "a8"].map(|precision| (library.clone(), precision)).into_iter().collect::<Vec<_>>()
    });
    let units: Vec<_> =
        units.chain(libraries("libQnnCpu.so").into_iter().map(|path| (path, "f32"))).collect();
    if units.is_empty() {
        return;
    }
    let file = File::open(&path);
    for layer in [0, 15] {
        let name = |part: &str| format!("blk.{layer}.ffn_{part}.weight");
        let norm = file.values(&name("norm"), 0, WIDTH);
        let mut x = Vec::new();
        for token in TOKENS {
            let row = file.values("token_embd.weight", token * WIDTH, WIDTH);
            let mean = row.iter().map(|v| v * v).sum::<f64>() / WIDTH as f64;
            x.extend(row.iter().zip(&norm).map(|(v, n)| v / (mean + 1e-5).sqrt() * n));
        }
        let matrix = |part, rows, cols| (rows, cols, file.values(&name(part), 0, rows * cols));
        let matrices =
            [matrix("gate", NEURONS, WIDTH), matrix("up", NEURONS, WIDTH), matrix("down", WIDTH, NEURONS)];
        let of =
            |scheme| matrices.each_ref().map(|(rows, cols, values)| sample(scheme, *rows, *cols, values));
        let want = exact(&of(abi::NP_SCHEME_F32), &x);
        for (library, precision) in &units {
            let device = open(library, &[("precision", precision), ("tokens", "8")]).unwrap();
            for (scheme, what) in [
                (abi::NP_SCHEME_F32, "f32"),
                (abi::NP_SCHEME_F16, "f16"),
                (abi::NP_SCHEME_CHANNEL8, "W8"),
                (abi::NP_SCHEME_CHANNEL4, "W4"),
            ] {
                let bound = match (*precision, scheme) {
                    ("f32", abi::NP_SCHEME_F32 | abi::NP_SCHEME_F16) => 1e-6,
                    ("f16", abi::NP_SCHEME_F16) => 2e-3,
                    ("f32", _) | ("f16" | "a16" | "a8", abi::NP_SCHEME_F32 | abi::NP_SCHEME_F16) => continue,
                    ("f16", _) => 2e-3,
                    ("a16", _) => 0.02,
                    _ => 0.15,
                };
                let weights = of(scheme);
                let found = by_unit(&device, &weights, &x);
                let arithmetic = relative_error(&found, &exact(&weights, &x));
                let whole = relative_error(&found, &want);
                let driver = device.info().driver;
                let version = driver.split(" (").next().unwrap_or_default();
                println!(
                    "{version} layer {layer} {precision} {what}: {arithmetic:.1e} of arithmetic, {whole:.1e} in all"
                );
                assert!(arithmetic <= bound, "{precision} {what}: {arithmetic:e}");
            }
        }
    }
}
