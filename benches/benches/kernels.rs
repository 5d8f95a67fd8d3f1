//! Speed of the matmul kernels on one thread, per weight type.
//!
//! `cargo bench -p neuropil-benches --bench kernels [-- TYPE ISA]` prints, for a weight of over 100 MB, the bytes
//! read per second with 1 token (the bound is memory), and for one that stays in the cache the operations per second
//! with 8, 64 and 256 tokens; and how many activations are quantised in a second. Each type is measured twice: with no
//! activations that stand out, and with some in one block of 20, which are multiplied twice. Figures are medians.

use neuropil_cpu::kernels::{Activations, Input, Panels, matmul_groups};
use neuropil_cpu::pack::{Packed, pack};
use neuropil_cpu::{Columns, Isa};
use neuropil_device::DType;
use neuropil_device::quant::{ACT_BLOCK, quantize_row};
use std::hint::black_box;
use std::time::{Duration, Instant};

/// Median seconds of a call; at least 5 calls and about a quarter of a second.
fn median(mut f: impl FnMut()) -> f64 {
    f();
    let (start, mut times) = (Instant::now(), Vec::new());
    while times.len() < 5 || start.elapsed() < Duration::from_millis(250) {
        let t = Instant::now();
        f();
        times.push(t.elapsed().as_secs_f64());
    }
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

/// A weight whose rows are all the same quantised wave, and how fast it was packed in bytes per second.
fn weight(dtype: DType, rows: usize, cols: usize) -> (Packed, f64) {
    let wave: Vec<f32> = (0..cols).map(|k| (k as f32 * 0.7).sin() * 0.1).collect();
    let mut row = vec![0; dtype.row_bytes(cols).expect("a valid width")];
    quantize_row(dtype, &wave, &mut row);
    let bytes = row.repeat(rows);
    // The first packing also pays for fresh memory, as a load does not when it recycles.
    let fresh = pack(dtype, rows, cols, &bytes, None).expect("memory for a bench");
    let start = Instant::now();
    let packed = pack(dtype, rows, cols, &bytes, Some(fresh)).expect("memory for a bench");
    (packed, bytes.len() as f64 / start.elapsed().as_secs_f64())
}

/// Activations, of which some blocks stand out of each row.
fn activations(tokens: usize, cols: usize, outliers: bool) -> Vec<f32> {
    let factor = |i: usize| if outliers && i % cols / ACT_BLOCK % 20 == 7 { 30.0 } else { 1.0 };
    (0..tokens * cols).map(|i| (i as f32 * 0.1).sin() * factor(i)).collect()
}

fn seconds(isa: Isa, w: &Packed, tokens: usize, outliers: bool) -> f64 {
    let (rows, cols) = (w.rows(), w.cols());
    let x = activations(tokens, cols, outliers);
    let mut acts = Activations::new().expect("memory for a bench");
    let mut y = vec![0.0; tokens * rows];
    let mut panels = Panels::new();
    panels.reserve(1, cols).expect("memory for a bench");
    if w.dtype().quantizes_activations() {
        acts.reserve(tokens, cols).expect("memory for a bench");
        acts.quantize(isa, &x);
    }
    median(|| {
        let input = match w.dtype() {
            dtype if dtype.quantizes_activations() => Input::Quantized(&acts),
            dtype if dtype.is_expanded() => Input::Expanded(&x, &panels),
            _ => Input::Floats(&x),
        };
        let columns = Columns::new(&mut y, tokens, rows, rows);
        while let Some(range) = columns.claim(8) {
            matmul_groups(isa, w, input, range, false);
        }
        black_box(&mut y);
    })
}

/// Activations quantised in a second.
fn quantise_speed(isa: Isa, cols: usize, outliers: bool) -> f64 {
    let tokens = 64;
    let x = activations(tokens, cols, outliers);
    let mut acts = Activations::new().expect("memory for a bench");
    acts.reserve(tokens, cols).expect("memory for a bench");
    let time = median(|| {
        acts.quantize(isa, &x);
        black_box(&mut acts);
    });
    x.len() as f64 / time
}

fn main() {
    let wanted: Vec<String> = std::env::args().skip(1).filter(|a| !a.starts_with("--")).collect();
    let chosen = |name: &str| wanted.iter().any(|w| w == name);
    let any_of = |names: &[&str]| names.iter().any(|n| chosen(n));
    let isas: Vec<Isa> = Isa::all_available();
    let isa_names: Vec<&str> = isas.iter().map(|i| i.name()).collect();
    let type_names: Vec<&str> = DType::ALL.iter().map(|d| d.name()).collect();
    println!(
        "isa            type  stand out  pack GB/s | 1 token GB/s | GOP/s at 8      64     256 tokens | quantise G/s"
    );
    for isa in isas {
        if if any_of(&isa_names) { !chosen(isa.name()) } else { isa != Isa::detect() } {
            continue;
        }
        for dtype in DType::ALL {
            if any_of(&type_names) && !chosen(dtype.name()) {
                continue;
            }
            let cols = 4096;
            let rows = (128 << 20) / dtype.row_bytes(cols).expect("a valid width") / 16 * 16;
            let (large, pack_speed) = weight(dtype, rows, cols);
            let (small, ..) = weight(dtype, 512, cols);
            for outliers in [false, true] {
                if outliers && !dtype.quantizes_activations() {
                    continue;
                }
                let stream = large.bytes().len() as f64 / seconds(isa, &large, 1, outliers);
                let gops = [8, 64, 256].map(|tokens| {
                    2.0 * (512 * cols * tokens) as f64 / seconds(isa, &small, tokens, outliers) * 1e-9
                });
                println!(
                    "{:<14} {:<5} {:>9}  {:>9.2} | {:>12.1} | {:>10.0} {:>7.0} {:>7.0}        | {:>12.2}",
                    isa.name(),
                    dtype.name(),
                    if outliers { "5 %" } else { "none" },
                    pack_speed * 1e-9,
                    stream * 1e-9,
                    gops[0],
                    gops[1],
                    gops[2],
                    quantise_speed(isa, cols, outliers) * 1e-9,
                );
            }
        }
    }
}
