//! Runs each matmul kernel once between two marks, for an emulator that logs every instruction.
//!
//! `benches/instruction_counts` builds this program for aarch64, counts, and prints a table. For each count the program prints
//! a line: instruction set, weight type, tokens, columns. Two widths are run, so that their difference is free of what
//! a call costs once.

use neuropil_cpu::kernels::{Activations, Input, matmul_groups};
use neuropil_cpu::pack::pack;
use neuropil_cpu::{Columns, Isa};
use neuropil_device::DType;
use std::hint::black_box;

/// Rows of a group, which is what is counted.
const ROWS: usize = 16;

// The marks differ, or the compiler would make one of them.
#[inline(never)]
fn count_from_here() {
    black_box(1);
}

#[inline(never)]
fn count_to_here() {
    black_box(2);
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut acts = Activations::new()?;
    for dtype in DType::ALL {
        for cols in [512, 1536] {
            let bytes = vec![0; dtype.matrix_bytes(ROWS, cols).ok_or("a valid shape")?];
            let w = pack(dtype, ROWS, cols, &bytes, None)?;
            for isa in Isa::all_available().into_iter().filter(|isa| *isa != Isa::Scalar) {
                for tokens in [1, 8] {
                    let (x, mut y) = (vec![0.0; tokens * cols], vec![0.0; tokens * ROWS]);
                    let mut input = Input::Floats(&x);
                    if dtype.is_quantized() {
                        acts.reserve(tokens, cols)?;
                        acts.quantize(isa, &x);
                        input = Input::Quantized(&acts);
                    }
                    let columns = Columns::new(&mut y, tokens, ROWS, ROWS);
                    let range = columns.claim(1).ok_or("one group of rows")?;
                    count_from_here();
                    matmul_groups(isa, &w, input, range, false);
                    count_to_here();
                    println!("{} {dtype} {tokens} {cols}", isa.name());
                }
            }
        }
    }
    Ok(())
}
