//! A reader of stores, written from `FORMAT.md` alone.

use half::f16;
use neuropil::gguf::{Array, Gguf, Value};
use neuropil_device::DType;
use neuropil_tests::codec;

/// The three rows of a neuron.
#[derive(Clone, Debug, PartialEq)]
pub struct Neuron {
    pub gate: Vec<f32>,
    pub up: Vec<f32>,
    pub down: Vec<f32>,
}

/// A store, with its layout worked out from its keys.
pub struct Reading {
    pub gguf: Gguf,
    pub read_unit: usize,
    width: usize,
    gate_types: Vec<u32>,
    down_types: Vec<u32>,
    gate_bytes: Vec<u32>,
    strides: Vec<u32>,
}

impl Reading {
    pub fn open(path: &std::path::Path) -> Reading {
        let gguf = Gguf::open_header(path).unwrap();
        let number = |key: &str| gguf.metadata().require_u32(key).unwrap();
        let numbers = |key: &str| gguf.metadata().u32s(key).unwrap().unwrap().to_vec();
        assert_eq!(number("neuropil.store.version"), 1);
        assert_eq!(number("neuropil.store.group"), 1);
        assert_eq!(number("general.alignment"), 4096);
        let architecture = gguf.metadata().require_str("general.architecture").unwrap();
        let reading = Reading {
            read_unit: number("neuropil.store.read_unit") as usize,
            width: number(&format!("{architecture}.embedding_length")) as usize,
            gate_types: numbers("neuropil.store.gate_type"),
            down_types: numbers("neuropil.store.down_type"),
            gate_bytes: numbers("neuropil.store.gate_bytes"),
            strides: numbers("neuropil.store.stride"),
            gguf,
        };
        reading.check_file();
        reading
    }

    /// Places, gaps and checksums.
    fn check_file(&self) {
        let bytes = std::fs::read(self.gguf.path()).unwrap();
        let Some(Value::Array(Array::U32(checksums))) = self.gguf.metadata().get("neuropil.checksum") else {
            panic!("there are checksums");
        };
        assert_eq!(checksums.len(), self.gguf.tensors().len());
        let mut end = None;
        let mut bundles_begun = false;
        for (tensor, checksum) in self.gguf.tensors().iter().zip(checksums) {
            assert_eq!(tensor.offset % 4096, 0, "{}", tensor.name);
            if let Some(end) = end {
                assert!(bytes[end as usize..tensor.offset as usize].iter().all(|b| *b == 0));
            }
            end = Some(tensor.end());
            let data = &bytes[tensor.offset as usize..tensor.end() as usize];
            assert_eq!(crc32(data), *checksum, "{}", tensor.name);
            bundles_begun |= tensor.name.contains("ffn_bundle");
            assert_eq!(tensor.name.contains("ffn_bundle"), bundles_begun, "bundles come last");
        }
        assert_eq!(bytes.len() % 4096, 0);
    }

    pub fn layers(&self) -> usize {
        self.strides.len()
    }

    pub fn types(&self, layer: usize) -> (DType, DType) {
        (dtype(self.gate_types[layer]), dtype(self.down_types[layer]))
    }

    /// The neurons of a layer by position.
    pub fn neurons(&self, layer: usize, expert: Option<usize>) -> Vec<Neuron> {
        let name = match expert {
            None => format!("blk.{layer}.ffn_bundle.weight"),
            Some(expert) => format!("blk.{layer}.ffn_bundle.{expert}.weight"),
        };
        let tensor = self.gguf.tensor(&name).unwrap();
        assert_eq!(tensor.type_name(), "I8");
        let data = self.gguf.data(tensor);
        let (stride, gate_bytes) = (self.strides[layer] as usize, self.gate_bytes[layer] as usize);
        let (gate, down) = self.types(layer);
        let up = |n: usize, to: usize| n.div_ceil(to) * to;
        let (gate_row, down_row) = (row_bytes(gate, self.width), row_bytes(down, self.width));
        assert_eq!(gate_bytes, up(gate_row, self.read_unit));
        let down_at = gate_bytes + up(gate_row, 64);
        assert_eq!(stride, up(down_at + down_row, self.read_unit));
        assert_eq!(tensor.dims[..], [stride as u64, (data.len() / stride) as u64]);
        data.chunks(stride)
            .map(|bundle| {
                let rows = [(0, gate_row), (gate_bytes, gate_row), (down_at, down_row)];
                let mut pads = bundle.to_vec();
                rows.iter().for_each(|(at, len)| pads[*at..at + len].fill(0));
                assert!(pads.iter().all(|b| *b == 0), "pads are zero");
                let row = |i: usize, dtype| decode(dtype, &bundle[rows[i].0..][..rows[i].1], self.width);
                Neuron { gate: row(0, gate), up: row(1, gate), down: row(2, down) }
            })
            .collect()
    }

    /// Original index to position.
    pub fn perm(&self, layer: usize) -> Vec<usize> {
        let tensor = self.gguf.tensor(&format!("blk.{layer}.ffn_perm")).unwrap();
        assert_eq!(tensor.type_name(), "I32");
        let values = self.gguf.data(tensor).as_chunks::<4>().0;
        values.iter().map(|v| i32::from_le_bytes(*v) as usize).collect()
    }
}

fn dtype(id: u32) -> DType {
    DType::ALL.into_iter().find(|dtype| codec::type_id(*dtype) == id).unwrap()
}

/// Bits of a code; f16 of each group, f16 of each block, bytes of each group.
fn parts(dtype: DType) -> Option<(usize, usize, usize, usize)> {
    Some(match dtype {
        DType::Q4_0 => (4, 1, 0, 0),
        DType::Q4_1 => (4, 2, 0, 0),
        DType::Q5_0 => (5, 1, 0, 0),
        DType::Q5_1 => (5, 2, 0, 0),
        DType::Q8_0 => (8, 1, 0, 0),
        DType::Q4_K => (4, 0, 2, 2),
        DType::Q5_K => (5, 0, 2, 2),
        DType::Q6_K => (6, 0, 1, 2),
        _ => return None,
    })
}

/// Bytes of a row of a bundle.
pub fn row_bytes(dtype: DType, cols: usize) -> usize {
    let (elements, bytes) = codec::block(dtype);
    let Some((bits, group_halves, block_halves, group_bytes)) = parts(dtype) else {
        return cols / elements * bytes;
    };
    let (groups, blocks) = (cols / 32, cols / elements);
    groups * (32 * bits / 8 + 2 * group_halves + group_bytes) + blocks * 2 * block_halves
}

/// The values of a row of a bundle.
fn decode(dtype: DType, row: &[u8], cols: usize) -> Vec<f32> {
    let Some((bits, group_halves, block_halves, _)) = parts(dtype) else { return codec::decode(dtype, row) };
    let (groups, blocks) = (cols / 32, cols / codec::block(dtype).0);
    let low = if bits == 8 { 32 } else { 16 };
    let planes = if bits == 8 { 0 } else { bits - 4 };
    let group_half = groups * (low + 4 * planes);
    let block_half = group_half + 2 * groups * group_halves;
    let group_byte = block_half + 2 * blocks * block_halves;
    assert_eq!(row.len(), row_bytes(dtype, cols));
    let half = |at: usize| f16::from_le_bytes([row[at], row[at + 1]]).to_f32();
    let value = |col: usize| {
        let (group, i) = (col / 32, col % 32);
        let block = group / (groups / blocks);
        let mut code = match bits {
            8 => i32::from(row[32 * group + i] as i8),
            _ => i32::from(row[16 * group + i % 16] >> (i / 16 * 4) & 15),
        };
        for plane in 0..planes {
            // That of code 4j + i is bit j of byte i.
            let byte = row[groups * (low + 4 * plane) + 4 * group + i % 4];
            code |= i32::from(byte >> (i / 4) & 1) << (4 + plane);
        }
        let of_group = |n: usize| half(group_half + 2 * (groups * n + group));
        let block_scale = |n: usize| half(block_half + 2 * (blocks * n + block));
        let byte = |n: usize| row[group_byte + groups * n + group];
        match dtype {
            DType::Q4_0 => of_group(0) * (code - 8) as f32,
            DType::Q5_0 => of_group(0) * (code - 16) as f32,
            DType::Q8_0 => of_group(0) * code as f32,
            DType::Q4_1 | DType::Q5_1 => of_group(0) * code as f32 + of_group(1),
            DType::Q4_K | DType::Q5_K => {
                block_scale(0) * f32::from(byte(0)) * code as f32 - block_scale(1) * f32::from(byte(1))
            }
            _ => block_scale(0) * f32::from(byte(i / 16) as i8) * (code - 32) as f32,
        }
    };
    (0..cols).map(value).collect()
}

/// CRC-32 (IEEE), bit by bit.
fn crc32(bytes: &[u8]) -> u32 {
    let step = |crc: u32| (0..8).fold(crc, |crc, _| (crc >> 1) ^ (0xEDB8_8320 & (crc & 1).wrapping_neg()));
    let table: Vec<u32> = (0..256).map(step).collect();
    !bytes.iter().fold(!0, |crc, b| (crc >> 8) ^ table[usize::from(crc as u8 ^ b)])
}

/// Their bits, so that comparing is exact.
pub fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}
