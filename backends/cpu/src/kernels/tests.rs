//! Every instruction set against the scalar reference, bit by bit.

use super::*;
use crate::mem::Columns;
use crate::pack::pack;
use neuropil_device::DType;
use neuropil_device::quant::{quantize_row, reference};
use proptest::prelude::*;

/// Numbers that repeat from run to run.
struct Random(u64);

impl Random {
    fn bits(&mut self) -> u32 {
        self.0 = self.0.wrapping_mul(0x5851_F42D_4C95_7F2D).wrapping_add(0x1405_7B7E_F767_814F);
        (self.0 >> 32) as u32
    }
    /// In -1 to 1.
    fn unit(&mut self) -> f32 {
        self.bits() as i32 as f32 / 2f32.powi(31)
    }
}

/// What the weights and activations look like.
#[derive(Clone, Copy, Debug)]
enum Values {
    /// Weights as quantised from small numbers.
    Usual,
    /// Any bytes in a block, with any f16 as scale: huge, tiny, infinite, NaN.
    Wild,
}

#[derive(Clone, Copy, Debug)]
struct Case {
    dtype: DType,
    rows: usize,
    cols: usize,
    tokens: usize,
    values: Values,
    seed: u64,
}

impl Case {
    fn weights(&self, random: &mut Random) -> Vec<u8> {
        let mut bytes = vec![0; self.dtype.matrix_bytes(self.rows, self.cols).unwrap()];
        match self.values {
            Values::Usual => {
                for row in bytes.chunks_mut(self.dtype.row_bytes(self.cols).unwrap().max(1)) {
                    let w: Vec<f32> = (0..self.cols).map(|_| random.unit() * 0.1).collect();
                    quantize_row(self.dtype, &w, row);
                }
            }
            Values::Wild => bytes.fill_with(|| random.bits() as u8),
        }
        bytes
    }

    fn input(&self, random: &mut Random) -> Vec<f32> {
        let n = self.tokens * self.cols;
        match self.values {
            Values::Usual => (0..n).map(|_| random.unit() * 3.0).collect(),
            Values::Wild => (0..n)
                .map(|i| match random.bits() % 500 {
                    0 if i % 2 == 1 => f32::NAN,
                    1 => f32::MAX,
                    2..100 => 0.0,
                    _ => random.unit() * 2f32.powi((i / 32 % 200) as i32 - 100),
                })
                .collect(),
        }
    }

    fn check(&self) {
        let mut random = Random(self.seed);
        let (weights, x) = (self.weights(&mut random), self.input(&mut random));
        let before: Vec<f32> = (0..self.tokens * self.rows).map(|_| random.unit()).collect();
        let packed = pack(Isa::detect(), self.dtype, self.rows, self.cols, &weights, None).unwrap();
        let (mut acts, mut panels) = (Activations::new().unwrap(), Panels::new());
        let Case { dtype, rows, cols, tokens, .. } = *self;
        for accumulate in [false, true] {
            let mut want = before.clone();
            reference::matmul(dtype, &weights, rows, cols, tokens, &x, &mut want, accumulate);
            for isa in Isa::all_available() {
                let input = if dtype.quantizes_activations() {
                    acts.reserve(tokens, cols).unwrap();
                    acts.quantize(isa, &x);
                    Input::Quantized(&acts)
                } else if dtype.is_expanded() {
                    panels.reserve(1, cols).unwrap();
                    Input::Expanded(&x, &panels)
                } else {
                    Input::Floats(&x)
                };
                // The gap between tokens must stay as it was.
                let (stride, gap) = (rows + 3, -7.5f32);
                let mut y = vec![gap; tokens * stride];
                for (y, before) in y.chunks_mut(stride).zip(before.chunks(rows)) {
                    y[..rows].copy_from_slice(before);
                }
                let columns = Columns::new(&mut y, tokens, rows, stride);
                while let Some(range) = columns.claim(2) {
                    matmul_groups(isa, &packed, input, range, accumulate);
                }
                for (t, (y, want)) in y.chunks(stride).zip(want.chunks(rows)).enumerate() {
                    assert!(y[rows..].iter().all(|y| *y == gap), "{self:?} {isa:?} wrote past its rows");
                    for (r, (y, want)) in y.iter().zip(want).enumerate() {
                        let same = y.to_bits() == want.to_bits() || (y.is_nan() && want.is_nan());
                        assert!(
                            same,
                            "{self:?} {isa:?} accumulate {accumulate}: y[{t}, {r}] = {y}, not {want}"
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn every_shape_has_the_bits_of_the_reference() {
    let mut seed = 1;
    for dtype in DType::ALL {
        let widths: &[usize] = match dtype.block_elements() {
            1 => &[1, 31, 513],
            32 => &[32, 576, 1536],
            _ => &[256, 768, 2048],
        };
        for (i, rows) in [1, 4, 15, 17, 33].into_iter().enumerate() {
            for tokens in (1..=9).chain([33]) {
                let values = if tokens % 3 == 0 { Values::Wild } else { Values::Usual };
                seed += 1;
                Case { dtype, rows, cols: widths[(i + tokens) % 3], tokens, values, seed }.check();
            }
        }
    }
}

#[test]
fn extreme_codes_do_not_saturate() {
    for dtype in DType::ALL.into_iter().filter(|d| d.quantizes_activations()) {
        let (rows, cols) = (16, 512);
        for fill in [0x00, 0x7F, 0x80, 0xFF] {
            let row_bytes = dtype.row_bytes(cols).unwrap();
            let mut weights = vec![fill; rows * row_bytes];
            // Scales stay finite: 0x3C3C is 1.06.
            for block in weights.chunks_mut(dtype.block_bytes()) {
                let ends: &[usize] = match dtype {
                    DType::Q6_K => &[208],
                    DType::Q4_1 | DType::Q5_1 | DType::Q4_K | DType::Q5_K => &[0, 2],
                    _ => &[0],
                };
                for at in ends {
                    block[*at..at + 2].fill(0x3C);
                }
            }
            // One token, or the two of a pair.
            for x in [&[1.0][..], &[-1.0], &[1.0, -1.0]] {
                let tokens = x.len();
                let x: Vec<f32> = x.iter().flat_map(|x| vec![*x; cols]).collect();
                let mut want = vec![0.0; tokens * rows];
                reference::matmul(dtype, &weights, rows, cols, tokens, &x, &mut want, false);
                let packed = pack(Isa::detect(), dtype, rows, cols, &weights, None).unwrap();
                for isa in Isa::all_available() {
                    let mut acts = Activations::new().unwrap();
                    acts.reserve(tokens, cols).unwrap();
                    acts.quantize(isa, &x);
                    let mut y = vec![0.0; tokens * rows];
                    let range = Columns::new(&mut y, tokens, rows, rows).claim(1).unwrap();
                    matmul_groups(isa, &packed, Input::Quantized(&acts), range, false);
                    assert_eq!(y, want, "{dtype} {fill:x} {isa:?}");
                }
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, failure_persistence: None, ..Default::default() })]
    #[test]
    fn any_case_has_the_bits_of_the_reference(
        dtype in prop::sample::select(&DType::ALL[..]),
        rows in 1usize..40,
        blocks in 0usize..9,
        tokens in 1usize..12,
        wild in any::<bool>(),
        seed in any::<u64>(),
    ) {
        let values = if wild { Values::Wild } else { Values::Usual };
        Case { dtype, rows, cols: blocks * dtype.block_elements().max(64), tokens, values, seed }.check();
    }
}
