//! The loops for aarch64: NEON, with what a machine has of dot products and matrix products.

use std::arch::aarch64::*;
use std::arch::asm;
use std::arch::is_aarch64_feature_detected;
use std::hint::black_box;

use super::{Arithmetic, Order, PAGE, Reader};

/// Sums that are kept apart, so that none waits for its last addition.
const SUMS: usize = 16;

pub fn readers() -> Vec<Reader> {
    vec![Reader { name: "16-byte loads", run: read_128 }]
}

pub fn arithmetic() -> Vec<Arithmetic> {
    let mut all = vec![Arithmetic { name: "fmla", values: "f32", operations: 2 * 4 * SUMS, run: fmla }];
    if is_aarch64_feature_detected!("dotprod") {
        all.push(Arithmetic { name: "sdot", values: "int8", operations: 2 * 16 * SUMS, run: sdot });
    }
    if is_aarch64_feature_detected!("i8mm") {
        all.push(Arithmetic { name: "smmla", values: "int8", operations: 2 * 32 * SUMS, run: smmla });
    }
    if is_aarch64_feature_detected!("bf16") {
        all.push(Arithmetic { name: "bfmmla", values: "bf16", operations: 2 * 16 * SUMS, run: bfmmla });
    }
    all
}

fn read_128(bytes: &[u8], order: Order) {
    match order.streams {
        8 => stream_128::<8>(bytes, order),
        4 => stream_128::<4>(bytes, order),
        2 => stream_128::<2>(bytes, order),
        _ => stream_128::<1>(bytes, order),
    }
}

fn stream_128<const S: usize>(bytes: &[u8], order: Order) {
    let span = if order.far { bytes.len() / S } else { PAGE };
    let mut sums = [[0u8; 16]; S].map(|zero| {
        // SAFETY: 16 bytes.
        unsafe { vld1q_u8(zero.as_ptr()) }
    });
    for streams in bytes.chunks_exact(S * span) {
        for at in (0..span).step_by(64) {
            for (s, sum) in sums.iter_mut().enumerate() {
                let from = streams[s * span + at..][..64].as_ptr();
                if order.ahead > 0 {
                    let ahead = from.wrapping_add(order.ahead);
                    // SAFETY: a prefetch may be of any address.
                    unsafe {
                        asm!("prfm pldl1keep, [{0}]", in(reg) ahead, options(nostack, preserves_flags))
                    };
                }
                for part in 0..4 {
                    // SAFETY: within the 64 bytes; every aarch64 has NEON.
                    *sum = unsafe { veorq_u8(*sum, vld1q_u8(from.add(16 * part))) };
                }
            }
        }
    }
    black_box(sums);
}

fn fmla(steps: usize) {
    // SAFETY: every aarch64 has NEON.
    unsafe {
        let (a, b) = black_box((vdupq_n_f32(0.5), vdupq_n_f32(0.25)));
        let mut sums = black_box([vdupq_n_f32(0.0); SUMS]);
        for _ in 0..steps {
            for sum in &mut sums {
                *sum = vfmaq_f32(*sum, a, b);
            }
        }
        black_box(sums);
    }
}

fn sdot(steps: usize) {
    #[target_feature(enable = "neon,dotprod")]
    fn run(steps: usize) {
        let (a, b) = black_box((vdupq_n_s8(3), vdupq_n_s8(1)));
        let mut sums = black_box([vdupq_n_s32(0); SUMS]);
        for _ in 0..steps {
            for sum in &mut sums {
                // SAFETY: registers only, and the function has the feature.
                unsafe {
                    asm!("sdot {0:v}.4s, {1:v}.16b, {2:v}.16b", inout(vreg) *sum, in(vreg) a, in(vreg) b,
                        options(pure, nomem, nostack, preserves_flags))
                };
            }
        }
        black_box(sums);
    }
    // SAFETY: handed out only where the machine has dot products.
    unsafe { run(steps) }
}

fn smmla(steps: usize) {
    #[target_feature(enable = "neon,i8mm")]
    fn run(steps: usize) {
        let (a, b) = black_box((vdupq_n_s8(3), vdupq_n_s8(1)));
        let mut sums = black_box([vdupq_n_s32(0); SUMS]);
        for _ in 0..steps {
            for sum in &mut sums {
                // SAFETY: registers only, and the function has the feature.
                unsafe {
                    asm!("smmla {0:v}.4s, {1:v}.16b, {2:v}.16b", inout(vreg) *sum, in(vreg) a, in(vreg) b,
                        options(pure, nomem, nostack, preserves_flags))
                };
            }
        }
        black_box(sums);
    }
    // SAFETY: handed out only where the machine has int8 matrix products.
    unsafe { run(steps) }
}

fn bfmmla(steps: usize) {
    #[target_feature(enable = "neon,bf16")]
    fn run(steps: usize) {
        let (a, b) = black_box((vdupq_n_u16(0x3f00), vdupq_n_u16(0x3e80)));
        let mut sums = black_box([vdupq_n_f32(0.0); SUMS]);
        for _ in 0..steps {
            for sum in &mut sums {
                // SAFETY: registers only, and the function has the feature.
                unsafe {
                    asm!("bfmmla {0:v}.4s, {1:v}.8h, {2:v}.8h", inout(vreg) *sum, in(vreg) a, in(vreg) b,
                        options(pure, nomem, nostack, preserves_flags))
                };
            }
        }
        black_box(sums);
    }
    // SAFETY: handed out only where the machine has BF16 matrix products.
    unsafe { run(steps) }
}
