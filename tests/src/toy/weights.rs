//! The tensors of a toy, and the numbers they are drawn from.

use neuropil_device::DType;

use crate::codec;

/// One tensor: as stored, and the values that stands for.
#[derive(Clone, Debug)]
pub struct Weight {
    /// Name in the file.
    pub name: String,
    /// Type in the file.
    pub dtype: DType,
    /// Rows: outputs. 1 for a vector; those of all experts, one after the other, where there are some.
    pub rows: usize,
    /// Columns: inputs.
    pub cols: usize,
    /// Experts whose matrices lie one after the other; the file then has a third dimension.
    pub experts: Option<usize>,
    /// The bytes in the file.
    pub bytes: Vec<u8>,
    /// What the bytes mean, row after row.
    pub values: Vec<f32>,
}

impl Weight {
    /// Stores values in a type.
    pub fn new(name: &str, dtype: DType, rows: usize, cols: usize, values: &[f32]) -> Weight {
        let bytes = codec::encode(dtype, values);
        let values = codec::decode(dtype, &bytes);
        Weight { name: name.into(), dtype, rows, cols, experts: None, bytes, values }
    }

    /// The dimensions in the file, fastest first.
    pub fn dims(&self) -> Vec<u64> {
        let (cols, rows) = (self.cols as u64, self.rows as u64);
        match self.experts {
            Some(experts) => vec![cols, rows / experts as u64, experts as u64],
            None if self.rows == 1 => vec![cols],
            None => vec![cols, rows],
        }
    }

    /// The matrix of one expert.
    pub fn expert(&self, index: usize) -> Weight {
        let rows = self.rows / self.experts.expect("a weight of experts");
        let part = self.reordered_to(rows, |row| index * rows + row);
        Weight { experts: None, ..part }
    }

    /// The rows in another order: row `i` of the result is row `from(i)`.
    pub(super) fn reordered(&self, from: impl Fn(usize) -> usize) -> Weight {
        self.reordered_to(self.rows, from)
    }

    fn reordered_to(&self, rows: usize, from: impl Fn(usize) -> usize) -> Weight {
        let size = self.bytes.len() / self.rows;
        let bytes = (0..rows).flat_map(|i| &self.bytes[from(i) * size..][..size]).copied().collect();
        let values = (0..rows).flat_map(|i| &self.values[from(i) * self.cols..][..self.cols]).copied();
        Weight { rows, bytes, values: values.collect(), name: self.name.clone(), ..*self }
    }
}

/// The tensors of one layer, named as in the file.
#[derive(Clone, Debug)]
#[allow(missing_docs)] // the fields are the tensors' names
pub struct Layer {
    pub attn_norm: Weight,
    pub attn_q: Weight,
    pub attn_k: Weight,
    pub attn_v: Weight,
    pub attn_output: Weight,
    pub ffn_norm: Weight,
    pub ffn_gate: Weight,
    pub ffn_up: Weight,
    pub ffn_down: Weight,
    /// The router, if the three before hold experts.
    pub ffn_gate_inp: Option<Weight>,
    /// `fc1` and `fc2`, of each expert where there are some.
    pub predictors: Vec<[Weight; 2]>,
}

impl Layer {
    /// The tensors in the order of the file.
    pub fn weights(&self) -> Vec<&Weight> {
        let Layer {
            attn_norm,
            attn_q,
            attn_k,
            attn_v,
            attn_output,
            ffn_norm,
            ffn_gate,
            ffn_up,
            ffn_down,
            ..
        } = self;
        let mut all = vec![attn_norm, attn_q, attn_k, attn_v, attn_output, ffn_norm];
        all.extend(&self.ffn_gate_inp);
        all.extend([ffn_gate, ffn_up, ffn_down]);
        all.extend(self.predictors.iter().flatten());
        all
    }
}

/// Numbers that are the same everywhere and for ever (xorshift64*).
pub(super) struct Random(u64);

impl Random {
    pub(super) fn new(seed: u64, name: &str) -> Random {
        let mix = |h: u64, b: u8| (h ^ u64::from(b)).wrapping_mul(0x0000_0100_0000_01b3);
        let hash = seed.to_le_bytes().into_iter().chain(name.bytes()).fold(0xcbf2_9ce4_8422_2325, mix);
        Random(hash | 1)
    }

    /// From -1 to 1.
    fn uniform(&mut self) -> f32 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        let bits = self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 40;
        bits as f32 / (1u64 << 23) as f32 - 1.0
    }

    /// Mean 0, variance 1, nearly normal: a sum of three uniform numbers.
    pub(super) fn normal(&mut self) -> f32 {
        self.uniform() + self.uniform() + self.uniform()
    }
}
