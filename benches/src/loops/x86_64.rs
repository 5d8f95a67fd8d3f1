//! The loops for x86-64: AVX2 and AVX-512, with what a machine has of VNNI and BF16.

use std::arch::asm;
use std::arch::x86_64::*;
use std::hint::black_box;

use super::{Arithmetic, Order, PAGE, Reader};

pub fn readers() -> Vec<Reader> {
    let mut all = Vec::new();
    if is_x86_feature_detected!("avx2") {
        all.push(Reader { name: "32-byte loads", run: read_256 });
    }
    if is_x86_feature_detected!("avx512f") {
        all.push(Reader { name: "64-byte loads", run: read_512 });
    }
    all
}

pub fn arithmetic() -> Vec<Arithmetic> {
    let mut all = Vec::new();
    if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
        all.push(Arithmetic { name: "fma 256", values: "f32", operations: 2 * 8 * 12, run: fma_256 });
        all.push(Arithmetic {
            name: "maddubs 256",
            values: "int8",
            operations: 2 * 32 * 8,
            run: maddubs_256,
        });
    }
    if is_x86_feature_detected!("avxvnni") {
        all.push(Arithmetic { name: "dpbusd 256", values: "int8", operations: 2 * 32 * 12, run: dpbusd_256 });
    }
    if is_x86_feature_detected!("avx512f") {
        all.push(Arithmetic { name: "fma 512", values: "f32", operations: 2 * 16 * 16, run: fma_512 });
        if is_x86_feature_detected!("avx512vnni") {
            all.push(Arithmetic {
                name: "dpbusd 512",
                values: "int8",
                operations: 2 * 64 * 16,
                run: dpbusd_512,
            });
        }
        if is_x86_feature_detected!("avx512bf16") {
            let name = "dpbf16ps 512";
            all.push(Arithmetic { name, values: "bf16", operations: 2 * 32 * 16, run: dpbf16_512 });
        }
    }
    all
}

/// Where the streams of a chunk are: `S` of them, `span` bytes apart.
fn span<const S: usize>(bytes: &[u8], order: Order) -> usize {
    if order.far { bytes.len() / S } else { PAGE }
}

fn read_256(bytes: &[u8], order: Order) {
    // SAFETY: handed out only where the machine has AVX2.
    unsafe {
        match order.streams {
            8 => stream_256::<8>(bytes, order),
            4 => stream_256::<4>(bytes, order),
            2 => stream_256::<2>(bytes, order),
            _ => stream_256::<1>(bytes, order),
        }
    }
}

#[target_feature(enable = "avx2")]
fn stream_256<const S: usize>(bytes: &[u8], order: Order) {
    let span = span::<S>(bytes, order);
    let mut sums = [_mm256_setzero_si256(); S];
    for streams in bytes.chunks_exact(S * span) {
        for at in (0..span).step_by(256) {
            for (s, sum) in sums.iter_mut().enumerate() {
                let from = streams[s * span + at..][..256].as_ptr();
                for line in 0..4 {
                    if order.ahead > 0 {
                        let ahead = from.wrapping_add(64 * line + order.ahead).cast();
                        _mm_prefetch::<_MM_HINT_T0>(ahead);
                    }
                    for half in 0..2 {
                        // SAFETY: within the 256 bytes.
                        let value = unsafe { _mm256_loadu_si256(from.add(64 * line + 32 * half).cast()) };
                        *sum = _mm256_xor_si256(*sum, value);
                    }
                }
            }
        }
    }
    black_box(sums);
}

fn read_512(bytes: &[u8], order: Order) {
    // SAFETY: handed out only where the machine has AVX-512.
    unsafe {
        match order.streams {
            8 => stream_512::<8>(bytes, order),
            4 => stream_512::<4>(bytes, order),
            2 => stream_512::<2>(bytes, order),
            _ => stream_512::<1>(bytes, order),
        }
    }
}

#[target_feature(enable = "avx512f")]
fn stream_512<const S: usize>(bytes: &[u8], order: Order) {
    let span = span::<S>(bytes, order);
    let mut sums = [_mm512_setzero_si512(); S];
    for streams in bytes.chunks_exact(S * span) {
        for at in (0..span).step_by(256) {
            for (s, sum) in sums.iter_mut().enumerate() {
                let from = streams[s * span + at..][..256].as_ptr();
                for line in 0..4 {
                    if order.ahead > 0 {
                        let ahead = from.wrapping_add(64 * line + order.ahead).cast();
                        _mm_prefetch::<_MM_HINT_T0>(ahead);
                    }
                    // SAFETY: within the 256 bytes.
                    let value = unsafe { _mm512_loadu_si512(from.add(64 * line).cast()) };
                    *sum = _mm512_xor_si512(*sum, value);
                }
            }
        }
    }
    black_box(sums);
}

fn fma_256(steps: usize) {
    #[target_feature(enable = "avx2,fma")]
    fn run(steps: usize) {
        let (a, b) = black_box((_mm256_set1_ps(0.5), _mm256_set1_ps(0.25)));
        let mut sums = black_box([_mm256_setzero_ps(); 12]);
        for _ in 0..steps {
            for sum in &mut sums {
                *sum = _mm256_fmadd_ps(a, b, *sum);
            }
        }
        black_box(sums);
    }
    // SAFETY: handed out only where the machine has AVX2 and FMA.
    unsafe { run(steps) }
}

fn fma_512(steps: usize) {
    #[target_feature(enable = "avx512f")]
    fn run(steps: usize) {
        let (a, b) = black_box((_mm512_set1_ps(0.5), _mm512_set1_ps(0.25)));
        let mut sums = black_box([_mm512_setzero_ps(); 16]);
        for _ in 0..steps {
            for sum in &mut sums {
                *sum = _mm512_fmadd_ps(a, b, *sum);
            }
        }
        black_box(sums);
    }
    // SAFETY: handed out only where the machine has AVX-512.
    unsafe { run(steps) }
}

/// Two weights with four tokens, as a kernel without VNNI multiplies them: three instructions for 32 products.
fn maddubs_256(steps: usize) {
    #[target_feature(enable = "avx2")]
    fn run(steps: usize) {
        let ones = black_box(_mm256_set1_epi16(1));
        let mut weights = black_box([_mm256_set1_epi8(3), _mm256_set1_epi8(4)]);
        let tokens = black_box([_mm256_set1_epi8(1); 4]);
        let mut sums = black_box([[_mm256_setzero_si256(); 4]; 2]);
        for _ in 0..steps {
            for (weight, sums) in weights.iter_mut().zip(&mut sums) {
                // SAFETY: no instruction. The compiler must think that the weight changes, or it moves the products
                // out of the loop.
                unsafe {
                    asm!("/* {0} */", inout(ymm_reg) * weight, options(nomem, nostack, preserves_flags))
                };
                for (sum, token) in sums.iter_mut().zip(tokens) {
                    let pairs = _mm256_maddubs_epi16(*weight, token);
                    *sum = _mm256_add_epi32(*sum, _mm256_madd_epi16(pairs, ones));
                }
            }
        }
        black_box(sums);
    }
    // SAFETY: handed out only where the machine has AVX2.
    unsafe { run(steps) }
}

fn dpbusd_256(steps: usize) {
    #[target_feature(enable = "avx2,avxvnni")]
    fn run(steps: usize) {
        let (a, b) = black_box((_mm256_set1_epi8(3), _mm256_set1_epi8(1)));
        let mut sums = black_box([_mm256_setzero_si256(); 12]);
        for _ in 0..steps {
            for sum in &mut sums {
                *sum = _mm256_dpbusd_avx_epi32(*sum, a, b);
            }
        }
        black_box(sums);
    }
    // SAFETY: handed out only where the machine has AVX-VNNI.
    unsafe { run(steps) }
}

fn dpbusd_512(steps: usize) {
    #[target_feature(enable = "avx512f,avx512vnni")]
    fn run(steps: usize) {
        let (a, b) = black_box((_mm512_set1_epi8(3), _mm512_set1_epi8(1)));
        let mut sums = black_box([_mm512_setzero_si512(); 16]);
        for _ in 0..steps {
            for sum in &mut sums {
                *sum = _mm512_dpbusd_epi32(*sum, a, b);
            }
        }
        black_box(sums);
    }
    // SAFETY: handed out only where the machine has AVX-512 VNNI.
    unsafe { run(steps) }
}

fn dpbf16_512(steps: usize) {
    #[target_feature(enable = "avx512f,avx512bf16")]
    fn run(steps: usize) {
        let half = _mm512_cvtne2ps_pbh(_mm512_set1_ps(0.5), _mm512_set1_ps(0.5));
        let (a, b) = black_box((half, half));
        let mut sums = black_box([_mm512_setzero_ps(); 16]);
        for _ in 0..steps {
            for sum in &mut sums {
                *sum = _mm512_dpbf16_ps(*sum, a, b);
            }
        }
        black_box(sums);
    }
    // SAFETY: handed out only where the machine has AVX-512 BF16.
    unsafe { run(steps) }
}
