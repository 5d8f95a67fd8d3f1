//! Matrix products on the kernels, with weights and activations that are the same in every run.

use neuropil_cpu::kernels::{Activations, Input, Panels, matmul_groups};
use neuropil_cpu::pack::{Packed, pack};
use neuropil_cpu::{Columns, Isa, Pool};
use neuropil_device::DType;
use neuropil_device::quant::{ACT_BLOCK, quantize_row};

use crate::measure::seconds;

/// The bytes of a weight whose rows are all the same quantised wave.
fn rows_of(dtype: DType, rows: usize, cols: usize) -> Vec<u8> {
    let wave: Vec<f32> = (0..cols).map(|k| (k as f32 * 0.7).sin() * 0.1).collect();
    let mut row = vec![0; dtype.row_bytes(cols).expect("a valid width")];
    quantize_row(dtype, &wave, &mut row);
    row.repeat(rows)
}

/// A packed weight.
///
/// # Panics
/// When the shape is none of the type, or there is no memory.
pub fn weight(dtype: DType, rows: usize, cols: usize) -> Packed {
    pack(Isa::detect(), dtype, rows, cols, &rows_of(dtype, rows, cols), None).expect("memory for a bench")
}

/// A packed weight, and how many of its bytes were packed in a second.
///
/// # Panics
/// When the shape is none of the type, or there is no memory.
pub fn timed_weight(dtype: DType, rows: usize, cols: usize) -> (Packed, f64) {
    let bytes = rows_of(dtype, rows, cols);
    // The first packing also pays for fresh memory, as a load does not when it recycles.
    let mut packed = Some(pack(Isa::detect(), dtype, rows, cols, &bytes, None).expect("memory for a bench"));
    let time = seconds(|| {
        packed =
            Some(pack(Isa::detect(), dtype, rows, cols, &bytes, packed.take()).expect("memory for a bench"));
    });
    (packed.expect("packed again"), bytes.len() as f64 / time)
}

/// Activations, of which with `outliers` one block in 20 stands out of its row.
pub fn activations(tokens: usize, cols: usize, outliers: bool) -> Vec<f32> {
    let factor = |i: usize| if outliers && i % cols / ACT_BLOCK % 20 == 7 { 30.0 } else { 1.0 };
    (0..tokens * cols).map(|i| (i as f32 * 0.1).sin() * factor(i)).collect()
}

/// Activations quantised, for the same tokens again and again.
pub struct Quantise {
    isa: Isa,
    x: Vec<f32>,
    acts: Activations,
}

impl Quantise {
    /// Of `tokens` × `cols` activations.
    ///
    /// # Panics
    /// When there is no memory.
    pub fn new(isa: Isa, tokens: usize, cols: usize, outliers: bool) -> Quantise {
        let mut acts = Activations::new().expect("memory for a bench");
        acts.reserve(tokens, cols).expect("memory for a bench");
        Quantise { isa, x: activations(tokens, cols, outliers), acts }
    }

    /// On all threads of the pool.
    pub fn run(&mut self, pool: &Pool) {
        let parts = self.acts.parts(&self.x);
        pool.run("bench", pool.threads(), &|_| while parts.quantize_next(self.isa) {});
    }
}

/// A product `x · wᵀ`, ready to run again and again.
pub struct Product<'a> {
    weight: &'a Packed,
    tokens: usize,
    input: Quantise,
    panels: Panels,
    y: Vec<f32>,
}

impl<'a> Product<'a> {
    /// Of a weight with so many tokens, whose activations are quantised already where the weight asks for it. A weight
    /// that is widened can be multiplied by as many threads as the machine has.
    ///
    /// # Panics
    /// When there is no memory.
    pub fn new(isa: Isa, weight: &'a Packed, tokens: usize, outliers: bool) -> Product<'a> {
        let mut input = Quantise::new(isa, tokens, weight.cols(), outliers);
        input.acts.quantize(isa, &input.x);
        let mut panels = Panels::new();
        if weight.dtype().is_expanded() {
            let threads = std::thread::available_parallelism().map_or(1, usize::from);
            panels.reserve(threads, weight.cols()).expect("memory for a bench");
        }
        Product { weight, tokens, input, panels, y: vec![0.0; tokens * weight.rows()] }
    }

    /// On all threads of the pool, cut as the CPU backend cuts a large product.
    pub fn run(&mut self, pool: &Pool) {
        let Product { weight, tokens, input, panels, y } = self;
        let groups = pool.chunk_len(weight.groups(), 4).next_multiple_of(4);
        let columns = Columns::new(y, *tokens, weight.rows(), weight.rows());
        let input_of = || match weight.dtype() {
            dtype if dtype.quantizes_activations() => Input::Quantized(&input.acts),
            dtype if dtype.is_expanded() => Input::Expanded(&input.x, panels),
            _ => Input::Floats(&input.x),
        };
        pool.run("bench", weight.groups().div_ceil(groups), &|_| {
            if let Some(range) = columns.claim(groups) {
                matmul_groups(input.isa, weight, input_of(), range, false);
            }
        });
        std::hint::black_box(y);
    }

    /// Multiplications and additions of a run.
    pub fn operations(&self) -> f64 {
        2.0 * (self.weight.rows() * self.weight.cols() * self.tokens) as f64
    }
}
