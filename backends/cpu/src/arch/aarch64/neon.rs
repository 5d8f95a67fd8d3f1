//! NEON: a vector is a quarter of a group of 16 rows.
//!
//! The dot-product instruction is written as assembly, because its intrinsic is not stable. Without the extension,
//! products are summed in pairs of 16 bits, which always fit.

use crate::arch::format::{FloatFormat, Format};
use crate::arch::lanes::Lanes;
use crate::arch::{FloatRows, HostOp, Job, Kernels, passes, tile};
use std::arch::aarch64::*;
use std::arch::{asm, is_aarch64_feature_detected};

/// Proof that the machine has NEON.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Neon(());

impl Neon {
    /// The proof, if this machine has NEON.
    pub fn detect() -> Option<Self> {
        is_aarch64_feature_detected!("neon").then_some(Neon(()))
    }
}

/// Proof that the machine has NEON with the dot-product extension.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NeonDot(());

impl NeonDot {
    /// The proof, if this machine has the extension.
    pub fn detect() -> Option<Self> {
        (is_aarch64_feature_detected!("neon") && is_aarch64_feature_detected!("dotprod"))
            .then_some(NeonDot(()))
    }
}

impl Kernels for Neon {
    fn quantized<F: Format>(self, job: &mut Job<'_, '_>) {
        // SAFETY: self proves the features; the dispatch chose F by the weight.
        unsafe { quantized::<F>(job) }
    }
    fn floats<F: FloatFormat>(self, job: &mut Job<'_, '_>) {
        // SAFETY: as above.
        unsafe { floats::<F>(job) }
    }
    fn quantize(self, x: FloatRows, records: &mut [u8]) {
        // SAFETY: self proves the features; the caller checked the lengths.
        unsafe { quantize(x, records) }
    }
    fn host(self, op: HostOp<'_>) {
        // SAFETY: self proves the features.
        unsafe { host(op) }
    }
}

impl Kernels for NeonDot {
    fn quantized<F: Format>(self, job: &mut Job<'_, '_>) {
        // SAFETY: self proves the features; the dispatch chose F by the weight.
        unsafe { quantized_dot::<F>(job) }
    }
    fn floats<F: FloatFormat>(self, job: &mut Job<'_, '_>) {
        // SAFETY: as above.
        unsafe { floats::<F>(job) }
    }
    fn quantize(self, x: FloatRows, records: &mut [u8]) {
        // SAFETY: self proves the features; the caller checked the lengths.
        unsafe { quantize(x, records) }
    }
    fn host(self, op: HostOp<'_>) {
        // SAFETY: self proves the features.
        unsafe { host(op) }
    }
}

/// # Safety
/// The weight of the job has format F.
#[target_feature(enable = "neon")]
unsafe fn quantized<F: Format>(job: &mut Job<'_, '_>) {
    // SAFETY: the features are enabled here.
    unsafe { passes::run::<NeonLanes<false>, tile::Quantized<F>>(job) }
}

/// # Safety
/// The weight of the job has format F.
#[target_feature(enable = "neon,dotprod")]
unsafe fn quantized_dot<F: Format>(job: &mut Job<'_, '_>) {
    // SAFETY: the features are enabled here.
    unsafe { passes::run::<NeonLanes<true>, tile::Quantized<F>>(job) }
}

/// # Safety
/// The weight of the job has type F.
#[target_feature(enable = "neon")]
unsafe fn floats<F: FloatFormat>(job: &mut Job<'_, '_>) {
    // SAFETY: the features are enabled here.
    unsafe { passes::run::<NeonLanes<false>, tile::Floats<F>>(job) }
}

#[target_feature(enable = "neon")]
fn host(op: HostOp<'_>) {
    // SAFETY: the features are enabled here.
    unsafe { op.run::<NeonLanes<false>, 4>() }
}

/// # Safety
/// x and the records have matching lengths.
#[target_feature(enable = "neon")]
unsafe fn quantize(x: FloatRows, records: &mut [u8]) {
    // SAFETY: the features are enabled here.
    unsafe { tile::quantize::<NeonLanes<false>>(x, records) }
}

/// NEON vectors, with the dot-product extension where `DOT`.
struct NeonLanes<const DOT: bool>;

/// `acc + Σ w · q`, four products per row, with q from lane `LANE`.
#[inline]
#[target_feature(enable = "neon,dotprod")]
fn sdot<const LANE: i32>(mut acc: int32x4_t, w: int8x16_t, q: int8x16_t) -> int32x4_t {
    // SAFETY: the instruction only reads and writes these registers, and the feature is enabled.
    unsafe {
        asm!(
            "sdot {acc:v}.4s, {w:v}.16b, {q:v}.4b[{lane}]",
            acc = inout(vreg) acc,
            w = in(vreg) w,
            q = in(vreg) q,
            lane = const LANE,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    acc
}

/// The same with base NEON; `q` holds the same four codes four times. No code of q is -128.
#[inline]
#[target_feature(enable = "neon")]
fn dot_in_pairs(acc: int32x4_t, w: int8x16_t, q: int8x16_t) -> int32x4_t {
    let low = vmull_s8(vget_low_s8(w), vget_low_s8(q));
    vpadalq_s16(acc, vpaddq_s16(low, vmull_high_s8(w, q)))
}

// SAFETY of every pointer below: `Lanes` asks its caller for the bytes that the operation reads or writes.
impl<const DOT: bool> Lanes for NeonLanes<DOT> {
    const LANES: usize = 4;
    const SIGNED_BYTES: bool = true;
    type W = uint8x16_t;
    type I = int32x4_t;
    type F = float32x4_t;

    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn load_codes(p: *const u8) -> uint8x16_t {
        // SAFETY: p is good for 16 bytes.
        unsafe { vld1q_u8(p) }
    }
    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn low(w: uint8x16_t) -> uint8x16_t {
        vandq_u8(w, vdupq_n_u8(15))
    }
    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn high(w: uint8x16_t) -> uint8x16_t {
        vshrq_n_u8::<4>(w)
    }
    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn add_bit<const STEP: u32, const TO: u32>(w: uint8x16_t, plane: uint8x16_t) -> uint8x16_t {
        let shifted = vshlq_u8(plane, vdupq_n_s8(TO as i8 - STEP as i8));
        vorrq_u8(w, vandq_u8(shifted, vdupq_n_u8(1 << TO)))
    }
    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn dot<const BITS: u32, const N: usize>(
        w: &[uint8x16_t; N],
        q: *const u8,
        init: int32x4_t,
    ) -> int32x4_t {
        // Narrow codes are the same signed or unsigned; 8-bit ones lose their bias here.
        let signed =
            |w: uint8x16_t| vreinterpretq_s8_u8(if BITS == 8 { veorq_u8(w, vdupq_n_u8(0x80)) } else { w });
        let mut sum = init;
        for (n, w) in w.as_chunks::<4>().0.iter().enumerate() {
            let w = [signed(w[0]), signed(w[1]), signed(w[2]), signed(w[3])];
            // SAFETY: q is good for 4 bytes for each step.
            let q = unsafe { vld1q_s8(q.add(16 * n).cast()) };
            if DOT {
                // SAFETY: the functions that use DOT enable the extension.
                unsafe {
                    sum = sdot::<0>(sum, w[0], q);
                    sum = sdot::<1>(sum, w[1], q);
                    sum = sdot::<2>(sum, w[2], q);
                    sum = sdot::<3>(sum, w[3], q);
                }
            } else {
                let q = vreinterpretq_s32_s8(q);
                sum = dot_in_pairs(sum, w[0], vreinterpretq_s8_s32(vdupq_laneq_s32::<0>(q)));
                sum = dot_in_pairs(sum, w[1], vreinterpretq_s8_s32(vdupq_laneq_s32::<1>(q)));
                sum = dot_in_pairs(sum, w[2], vreinterpretq_s8_s32(vdupq_laneq_s32::<2>(q)));
                sum = dot_in_pairs(sum, w[3], vreinterpretq_s8_s32(vdupq_laneq_s32::<3>(q)));
            }
        }
        sum
    }
    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn splat_i(x: i32) -> int32x4_t {
        vdupq_n_s32(x)
    }
    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn to_f(x: int32x4_t) -> float32x4_t {
        vcvtq_f32_s32(x)
    }

    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn splat(x: f32) -> float32x4_t {
        vdupq_n_f32(x)
    }
    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn load_f32(p: *const u8) -> float32x4_t {
        // SAFETY: p is good for 16 bytes; a byte load needs no alignment.
        vreinterpretq_f32_u8(unsafe { vld1q_u8(p) })
    }
    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn load_f16(p: *const u8) -> float32x4_t {
        // SAFETY: p is good for 8 bytes; a byte load needs no alignment.
        vcvt_f32_f16(vreinterpret_f16_u8(unsafe { vld1_u8(p) }))
    }
    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn load_bf16(p: *const u8) -> float32x4_t {
        // SAFETY: p is good for 8 bytes; a byte load needs no alignment.
        let w = vreinterpret_u16_u8(unsafe { vld1_u8(p) });
        vreinterpretq_f32_u32(vshll_n_u16::<16>(w))
    }
    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn load_u8(p: *const u8) -> float32x4_t {
        // SAFETY: p is good for 4 bytes.
        let x = vreinterpret_u8_u32(vdup_n_u32(unsafe { p.cast::<u32>().read_unaligned() }));
        vcvtq_f32_u32(vmovl_u16(vget_low_u16(vmovl_u8(x))))
    }
    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn load_i8(p: *const u8) -> float32x4_t {
        // SAFETY: p is good for 4 bytes.
        let x = vreinterpret_s8_u32(vdup_n_u32(unsafe { p.cast::<u32>().read_unaligned() }));
        vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(x))))
    }
    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn store(p: *mut f32, x: float32x4_t) {
        // SAFETY: p is good for 16 bytes.
        unsafe { vst1q_f32(p, x) }
    }
    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn add(a: float32x4_t, b: float32x4_t) -> float32x4_t {
        vaddq_f32(a, b)
    }
    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn mul(a: float32x4_t, b: float32x4_t) -> float32x4_t {
        vmulq_f32(a, b)
    }
    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn max(a: float32x4_t, b: float32x4_t) -> float32x4_t {
        vbslq_f32(vcgtq_f32(a, b), a, b)
    }
    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn fma(a: float32x4_t, b: float32x4_t, c: float32x4_t) -> float32x4_t {
        vfmaq_f32(c, a, b)
    }
    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn zero_below(x: float32x4_t, low: float32x4_t, y: float32x4_t) -> float32x4_t {
        vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(y), vcltq_f32(x, low)))
    }
    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn power_of_two(x: float32x4_t) -> float32x4_t {
        let bits = vaddq_s32(vreinterpretq_s32_f32(x), vdupq_n_s32(127));
        vreinterpretq_f32_s32(vshlq_n_s32::<23>(bits))
    }

    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn max_magnitude(x: *const f32) -> u32 {
        let mut max = vdupq_n_u32(0);
        for n in 0..8 {
            // SAFETY: x is good for 32 floats.
            let x = vreinterpretq_u32_f32(unsafe { vld1q_f32(x.add(4 * n)) });
            max = vmaxq_u32(max, vandq_u32(x, vdupq_n_u32(0x7fff_ffff)));
        }
        vmaxvq_u32(max)
    }
    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn quantize(x: *const f32, id: f32, q: *mut u8) -> (i32, i32) {
        let four = |n: usize| {
            // SAFETY: x is good for 32 floats.
            let x = unsafe { vld1q_f32(x.add(4 * n)) };
            // Rounds to nearest, ties to even.
            vcvtnq_s32_f32(vmulq_n_f32(x, id))
        };
        let half = |n: usize| {
            let codes = [four(4 * n), four(4 * n + 1), four(4 * n + 2), four(4 * n + 3)];
            let low = vcombine_s16(vmovn_s32(codes[0]), vmovn_s32(codes[1]));
            let high = vcombine_s16(vmovn_s32(codes[2]), vmovn_s32(codes[3]));
            // SAFETY: q is good for 32 bytes.
            unsafe { vst1q_s8(q.add(16 * n).cast(), vcombine_s8(vmovn_s16(low), vmovn_s16(high))) };
            vaddvq_s32(vaddq_s32(vaddq_s32(codes[0], codes[1]), vaddq_s32(codes[2], codes[3])))
        };
        (half(0), half(1))
    }
}
