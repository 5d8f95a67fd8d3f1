//! NEON: a vector is a quarter of a group of 16 rows.
//!
//! Without an extension, products are summed in 16 bits as far as they fit. The dot-product extension sums four products
//! of a row at once; the 8-bit matrix extension multiplies 8 columns of two rows with those of two tokens. The
//! instructions of the extensions are written as assembly, because their intrinsics are not stable.

use crate::arch::lanes::Lanes;
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

/// Proof that the machine has NEON with the dot-product and the 8-bit matrix extension.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NeonI8mm(());

impl NeonI8mm {
    /// The proof, if this machine has the extensions.
    pub fn detect() -> Option<Self> {
        (NeonDot::detect().is_some() && is_aarch64_feature_detected!("i8mm")).then_some(NeonI8mm(()))
    }
}

kernels!(Neon, NeonLanes<BASE>, floats: NeonLanes<BASE>, 4, "neon");
kernels!(NeonDot, NeonLanes<DOT>, floats: NeonLanes<BASE>, 4, "neon,dotprod");
kernels!(NeonI8mm, NeonLanes<I8MM>, floats: NeonLanes<BASE>, 4, "neon,dotprod,i8mm");

/// NEON vectors with the products of an extension.
struct NeonLanes<const EXTENSION: u8>;
const BASE: u8 = 0;
const DOT: u8 = 1;
const I8MM: u8 = 2;

/// `acc + Σ w · q`, four products per row, with four q from lane `LANE`; w is signed.
///
/// # Safety
/// The extension is enabled.
#[inline(always)]
unsafe fn sdot<const LANE: i32>(mut acc: int32x4_t, w: int8x16_t, q: int8x16_t) -> int32x4_t {
    // SAFETY: the instruction only reads and writes these registers; the caller enabled the extension.
    unsafe {
        asm!(
            ".arch_extension dotprod",
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

/// The same for unsigned w.
///
/// # Safety
/// The extension is enabled.
#[inline(always)]
unsafe fn usdot<const LANE: i32>(mut acc: int32x4_t, w: uint8x16_t, q: int8x16_t) -> int32x4_t {
    // SAFETY: as for `sdot`.
    unsafe {
        asm!(
            ".arch_extension i8mm",
            "usdot {acc:v}.4s, {w:v}.16b, {q:v}.4b[{lane}]",
            acc = inout(vreg) acc,
            w = in(vreg) w,
            q = in(vreg) q,
            lane = const LANE,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    acc
}

/// The one of the two that takes fewer instructions: codes keep their bias where `usdot` exists.
///
/// # Safety
/// The extension is enabled.
#[inline(always)]
unsafe fn dot_lane<const EXTENSION: u8, const BITS: u32, const LANE: i32>(
    acc: int32x4_t,
    w: uint8x16_t,
    q: int8x16_t,
) -> int32x4_t {
    // SAFETY: as for this function.
    unsafe {
        if EXTENSION == I8MM { usdot::<LANE>(acc, w, q) } else { sdot::<LANE>(acc, signed::<BITS>(w), q) }
    }
}

/// `acc + w · qᵀ`: 8 products for each of 2 rows with each of 2 tokens.
///
/// # Safety
/// The extension is enabled.
#[inline(always)]
unsafe fn usmmla(mut acc: int32x4_t, w: uint8x16_t, q: int8x16_t) -> int32x4_t {
    // SAFETY: as for `sdot`.
    unsafe {
        asm!(
            ".arch_extension i8mm",
            "usmmla {acc:v}.4s, {w:v}.16b, {q:v}.16b",
            acc = inout(vreg) acc,
            w = in(vreg) w,
            q = in(vreg) q,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    acc
}

/// `init + Σ w · q` over N steps with base NEON, where `q` holds the four codes of a step four times.
///
/// # Safety
/// NEON is enabled.
#[inline(always)]
unsafe fn dot_in_pairs<const BITS: u32, const N: usize>(
    w: &[uint8x16_t; N],
    q: [int8x16_t; N],
    init: int32x4_t,
) -> int32x4_t {
    // SAFETY: as for this function.
    unsafe {
        // Sums of 16 bits as long as they fit, |q| ≤ 127: 2 · 127 · 15 · 8 steps, 2 · 127 · 31 · 4, 2 · 127 · 63 · 2 stay
        // below 2^15 when neighbours are added, and 127 · 128 · 2 as they are.
        let steps = match BITS {
            4 => 8,
            5 => 4,
            _ => 2,
        };
        let zero = vdupq_n_s16(0);
        let (mut low, mut high) = (zero, zero);
        let (mut sum, mut wide) = (init, [vdupq_n_s32(0); 2]);
        for step in 0..N {
            let (w, q) = (signed::<BITS>(w[step]), q[step]);
            if step % steps == 0 {
                low = vmull_s8(vget_low_s8(w), vget_low_s8(q));
                high = vmull_high_s8(w, q);
            } else {
                low = vmlal_s8(low, vget_low_s8(w), vget_low_s8(q));
                high = vmlal_high_s8(high, w, q);
            }
            if step % steps == steps - 1 {
                if BITS == 8 {
                    wide = [vpadalq_s16(wide[0], low), vpadalq_s16(wide[1], high)];
                } else {
                    sum = vpadalq_s16(sum, vpaddq_s16(low, high));
                }
            }
        }
        if BITS == 8 { vaddq_s32(sum, vpaddq_s32(wide[0], wide[1])) } else { sum }
    }
}

/// Narrow codes are the same signed or unsigned; 8-bit ones lose their bias here.
///
/// # Safety
/// NEON is enabled.
#[inline(always)]
unsafe fn signed<const BITS: u32>(w: uint8x16_t) -> int8x16_t {
    // SAFETY: as for this function.
    unsafe { vreinterpretq_s8_u8(if BITS == 8 { veorq_u8(w, vdupq_n_u8(0x80)) } else { w }) }
}

/// The four codes of one lane in each lane.
///
/// # Safety
/// NEON is enabled.
#[inline(always)]
unsafe fn lane<const LANE: i32>(q: int8x16_t) -> int8x16_t {
    // SAFETY: as for this function.
    unsafe { vreinterpretq_s8_s32(vdupq_laneq_s32::<LANE>(vreinterpretq_s32_s8(q))) }
}

// SAFETY of every pointer below: `Lanes` asks its caller for the bytes that the operation reads or writes.
impl<const EXTENSION: u8> Lanes for NeonLanes<EXTENSION> {
    const LANES: usize = 4;
    const SIGNED_BYTES: bool = EXTENSION != I8MM;
    const BY_LANE: bool = true;
    const FOURS: bool = true;
    type W = uint8x16_t;
    type I = int32x4_t;
    type F = float32x4_t;
    /// Offset and scale, and minimum, for each lane.
    type Table = ([float32x4_t; 2], Option<float32x4_t>);

    #[inline(always)]
    unsafe fn prefetch(p: *const u8) {
        // SAFETY: a prefetch of any address is harmless.
        unsafe { asm!("prfm pldl1keep, [{p}]", p = in(reg) p, options(nostack, readonly, preserves_flags)) }
    }
    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn turn(rows: &[*const u8; 16], at: usize, to: *mut u8) {
        for quarter in 0..4 {
            // SAFETY: each row is good for 16 bytes from `at` on, and `to` for 256.
            unsafe {
                let row = |r: usize| vreinterpretq_u32_u8(vld1q_u8(rows[4 * quarter + r].add(at)));
                let (a, b, c, d) = (row(0), row(1), row(2), row(3));
                let pairs = [vtrn1q_u32(a, b), vtrn2q_u32(a, b), vtrn1q_u32(c, d), vtrn2q_u32(c, d)];
                let pairs = pairs.map(|v| vreinterpretq_u64_u32(v));
                let words = [
                    vtrn1q_u64(pairs[0], pairs[2]),
                    vtrn1q_u64(pairs[1], pairs[3]),
                    vtrn2q_u64(pairs[0], pairs[2]),
                    vtrn2q_u64(pairs[1], pairs[3]),
                ];
                for (j, words) in words.into_iter().enumerate() {
                    vst1q_u8(to.add(64 * j + 16 * quarter), vreinterpretq_u8_u64(words));
                }
            }
        }
    }
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
    #[inline(always)]
    unsafe fn add_bit<const STEP: u32, const TO: u32>(w: uint8x16_t, plane: uint8x16_t) -> uint8x16_t {
        let mut sum = w;
        // SAFETY: NEON is enabled; the instruction only reads and writes these registers. Written as intrinsics it
        // becomes two.
        unsafe {
            let shifted = match TO as i32 - STEP as i32 {
                5 => vshlq_n_u8::<5>(plane),
                4 => vshlq_n_u8::<4>(plane),
                3 => vshlq_n_u8::<3>(plane),
                2 => vshlq_n_u8::<2>(plane),
                1 => vshlq_n_u8::<1>(plane),
                0 => plane,
                -1 => vshrq_n_u8::<1>(plane),
                -2 => vshrq_n_u8::<2>(plane),
                _ => vshrq_n_u8::<3>(plane),
            };
            asm!(
                "bit {w:v}.16b, {shifted:v}.16b, {mask:v}.16b",
                w = inout(vreg) sum,
                shifted = in(vreg) shifted,
                mask = in(vreg) vdupq_n_u8(1 << TO),
                options(pure, nomem, nostack, preserves_flags)
            );
        }
        sum
    }
    #[inline(always)]
    unsafe fn dot<const BITS: u32, const N: usize, const EIGHTS: usize>(
        w: &[uint8x16_t; N],
        q: *const u8,
        init: int32x4_t,
    ) -> int32x4_t {
        assert!(EIGHTS == 8, "the tokens of a taller tile are multiplied in pairs");
        // SAFETY: q is good for 4 bytes for each step; whoever uses an extension enables it.
        unsafe {
            let q = |n: usize| vld1q_s8(q.add(16 * n).cast());
            if EXTENSION == BASE {
                let steps: [int8x16_t; N] = std::array::from_fn(|step| match step % 4 {
                    0 => lane::<0>(q(step / 4)),
                    1 => lane::<1>(q(step / 4)),
                    2 => lane::<2>(q(step / 4)),
                    _ => lane::<3>(q(step / 4)),
                });
                return dot_in_pairs::<BITS, N>(w, steps, init);
            }
            let mut sum = init;
            for (n, w) in w.as_chunks::<4>().0.iter().enumerate() {
                let q = q(n);
                sum = dot_lane::<EXTENSION, BITS, 0>(sum, w[0], q);
                sum = dot_lane::<EXTENSION, BITS, 1>(sum, w[1], q);
                sum = dot_lane::<EXTENSION, BITS, 2>(sum, w[2], q);
                sum = dot_lane::<EXTENSION, BITS, 3>(sum, w[3], q);
            }
            sum
        }
    }
    #[inline(always)]
    unsafe fn dot_pair<const BITS: u32, const N: usize>(
        w: &[uint8x16_t; N],
        q: *const u8,
        start: Option<*const i32>,
    ) -> [int32x4_t; 2] {
        // SAFETY: q is good for 8 bytes for each step, and start for two numbers (a byte load needs no alignment); whoever
        // uses an extension enables it.
        unsafe {
            let q = |n: usize| vld1q_s8(q.add(16 * n).cast());
            let start = match start {
                Some(start) => vreinterpret_s32_u8(vld1_u8(start.cast())),
                None => vdup_n_s32(0),
            };
            if EXTENSION == I8MM {
                let mut sums = [vcombine_s32(start, start); 2];
                for (n, w) in w.as_chunks::<2>().0.iter().enumerate() {
                    let (q, steps) = (q(n), [vreinterpretq_u32_u8(w[0]), vreinterpretq_u32_u8(w[1])]);
                    // 8 columns of the first two rows, and of the last two.
                    let first = vreinterpretq_u8_u32(vzip1q_u32(steps[0], steps[1]));
                    let last = vreinterpretq_u8_u32(vzip2q_u32(steps[0], steps[1]));
                    sums = [usmmla(sums[0], first, q), usmmla(sums[1], last, q)];
                }
                return [vuzp1q_s32(sums[0], sums[1]), vuzp2q_s32(sums[0], sums[1])];
            }
            let mut sums = [vdupq_lane_s32::<0>(start), vdupq_lane_s32::<1>(start)];
            if EXTENSION == BASE {
                let first: [int8x16_t; N] = std::array::from_fn(|step| match step % 2 {
                    0 => lane::<0>(q(step / 2)),
                    _ => lane::<1>(q(step / 2)),
                });
                let second: [int8x16_t; N] = std::array::from_fn(|step| match step % 2 {
                    0 => lane::<2>(q(step / 2)),
                    _ => lane::<3>(q(step / 2)),
                });
                return [
                    dot_in_pairs::<BITS, N>(w, first, sums[0]),
                    dot_in_pairs::<BITS, N>(w, second, sums[1]),
                ];
            }
            for (n, w) in w.as_chunks::<2>().0.iter().enumerate() {
                let q = q(n);
                sums[0] = dot_lane::<EXTENSION, BITS, 0>(sums[0], w[0], q);
                sums[1] = dot_lane::<EXTENSION, BITS, 2>(sums[1], w[0], q);
                sums[0] = dot_lane::<EXTENSION, BITS, 1>(sums[0], w[1], q);
                sums[1] = dot_lane::<EXTENSION, BITS, 3>(sums[1], w[1], q);
            }
            sums
        }
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
    unsafe fn mul_pair(a: float32x4_t, s: *const f32) -> [float32x4_t; 2] {
        // SAFETY: s is good for two numbers; a byte load needs no alignment.
        let s = vreinterpret_f32_u8(unsafe { vld1_u8(s.cast()) });
        [vmulq_lane_f32::<0>(a, s), vmulq_lane_f32::<1>(a, s)]
    }
    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn fma_pair(a: float32x4_t, s: *const f32, c: [float32x4_t; 2]) -> [float32x4_t; 2] {
        // SAFETY: s is good for two numbers; a byte load needs no alignment.
        let s = vreinterpret_f32_u8(unsafe { vld1_u8(s.cast()) });
        [vfmaq_lane_f32::<0>(c[0], a, s), vfmaq_lane_f32::<1>(c[1], a, s)]
    }
    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn fma_four(a: &[float32x4_t; 4], s: *const f32, c: float32x4_t) -> float32x4_t {
        // SAFETY: s is good for four numbers.
        let s = unsafe { vld1q_f32(s) };
        let c = vfmaq_laneq_f32::<0>(c, a[0], s);
        let c = vfmaq_laneq_f32::<1>(c, a[1], s);
        let c = vfmaq_laneq_f32::<2>(c, a[2], s);
        vfmaq_laneq_f32::<3>(c, a[3], s)
    }

    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn table(offset: f32, d: f32, m: Option<f32>) -> Self::Table {
        ([vdupq_n_f32(offset), vdupq_n_f32(d)], m.map(|m| vdupq_n_f32(m)))
    }
    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn look_up(p: *const u8, ([offset, d], m): Self::Table) -> [float32x4_t; 2] {
        // SAFETY: p is good for 4 bytes.
        let bytes = vreinterpret_u8_u32(vdup_n_u32(unsafe { p.cast::<u32>().read_unaligned() }));
        let bytes = vmovl_u16(vget_low_u16(vmovl_u8(bytes)));
        [vandq_u32(bytes, vdupq_n_u32(15)), vshrq_n_u32::<4>(bytes)].map(|codes| {
            let weights = vmulq_f32(d, vsubq_f32(vcvtq_f32_u32(codes), offset));
            m.map_or(weights, |m| vaddq_f32(weights, m))
        })
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
