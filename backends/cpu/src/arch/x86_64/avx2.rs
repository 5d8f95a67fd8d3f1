//! AVX2: a vector is half a group of 16 rows, and products of codes are summed in 16 bits as far as they fit.

use crate::arch::format::{FloatFormat, Format};
use crate::arch::lanes::Lanes;
use crate::arch::{FloatRows, HostOp, Job, Kernels, passes, tile};
use std::arch::x86_64::*;

/// Proof that the machine has AVX2, FMA and F16C.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Avx2(());

impl Avx2 {
    /// The proof, if this machine has the features.
    pub fn detect() -> Option<Self> {
        let found = is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c");
        found.then_some(Avx2(()))
    }
}

impl Kernels for Avx2 {
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

/// # Safety
/// The weight of the job has format F.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn quantized<F: Format>(job: &mut Job<'_, '_>) {
    // SAFETY: the features are enabled here.
    unsafe { passes::run::<Avx2Lanes, tile::Quantized<F>>(job) }
}

/// # Safety
/// The weight of the job has type F.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn floats<F: FloatFormat>(job: &mut Job<'_, '_>) {
    // SAFETY: the features are enabled here.
    unsafe { passes::run::<Avx2Lanes, tile::Floats<F>>(job) }
}

#[target_feature(enable = "avx2,fma,f16c")]
fn host(op: HostOp<'_>) {
    // SAFETY: the features are enabled here.
    unsafe { op.run::<Avx2Lanes, 2>() }
}

/// # Safety
/// x and the records have matching lengths.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn quantize(x: FloatRows, records: &mut [u8]) {
    // SAFETY: the features are enabled here.
    unsafe { tile::quantize::<Avx2Lanes>(x, records) }
}

struct Avx2Lanes;

// SAFETY of every pointer below: `Lanes` asks its caller for the bytes that the operation reads or writes, and all
// loads and stores are unaligned ones.
impl Lanes for Avx2Lanes {
    const LANES: usize = 8;
    const SIGNED_BYTES: bool = true;
    type W = __m256i;
    type I = __m256i;
    type F = __m256;

    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn load_codes(p: *const u8) -> __m256i {
        // SAFETY: p is good for 32 bytes.
        unsafe { _mm256_loadu_si256(p.cast()) }
    }
    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn low(w: __m256i) -> __m256i {
        _mm256_and_si256(w, _mm256_set1_epi8(15))
    }
    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn high(w: __m256i) -> __m256i {
        _mm256_and_si256(_mm256_srli_epi16::<4>(w), _mm256_set1_epi8(15))
    }
    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn add_bit<const STEP: u32, const TO: u32>(w: __m256i, plane: __m256i) -> __m256i {
        // Bits that a 16-bit shift moves into the neighbour byte are masked away.
        let shifted = if STEP < TO {
            _mm256_sll_epi16(plane, _mm_cvtsi32_si128((TO - STEP) as i32))
        } else {
            _mm256_srl_epi16(plane, _mm_cvtsi32_si128((STEP - TO) as i32))
        };
        _mm256_or_si256(w, _mm256_and_si256(shifted, _mm256_set1_epi8(1 << TO)))
    }
    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn dot<const BITS: u32, const N: usize>(w: &[__m256i; N], q: *const u8, init: __m256i) -> __m256i {
        // Products of two neighbours, |q| ≤ 127: 2 · 127 · 15 · 8 steps, 2 · 127 · 31 · 4, 2 · 127 · 63 · 2 all stay
        // below 2^15. Codes of 8 bits are made signed first: |w| ≤ 128 takes the sign of w to q.
        let steps = match BITS {
            4 => 8,
            5 => 4,
            6 => 2,
            _ => 1,
        };
        let bias = _mm256_set1_epi8(-128);
        let (mut sum, mut pairs) = (init, _mm256_setzero_si256());
        for (step, w) in w.iter().enumerate() {
            // SAFETY: q is good for 4 bytes for each step.
            let q = _mm256_set1_epi32(unsafe { q.add(4 * step).cast::<i32>().read_unaligned() });
            let products = if BITS == 8 {
                let w = _mm256_xor_si256(*w, bias);
                _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(q, w))
            } else {
                _mm256_maddubs_epi16(*w, q)
            };
            pairs = if step % steps == 0 { products } else { _mm256_add_epi16(pairs, products) };
            if step % steps == steps - 1 || step == N - 1 {
                sum = _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
            }
        }
        sum
    }
    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn splat_i(x: i32) -> __m256i {
        _mm256_set1_epi32(x)
    }
    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn to_f(x: __m256i) -> __m256 {
        _mm256_cvtepi32_ps(x)
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn splat(x: f32) -> __m256 {
        _mm256_set1_ps(x)
    }
    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn load_f32(p: *const u8) -> __m256 {
        // SAFETY: p is good for 32 bytes.
        unsafe { _mm256_loadu_ps(p.cast()) }
    }
    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    unsafe fn load_f16(p: *const u8) -> __m256 {
        // SAFETY: p is good for 16 bytes.
        _mm256_cvtph_ps(unsafe { _mm_loadu_si128(p.cast()) })
    }
    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn load_bf16(p: *const u8) -> __m256 {
        // SAFETY: p is good for 16 bytes.
        let w = unsafe { _mm_loadu_si128(p.cast()) };
        _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(w)))
    }
    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn load_u8(p: *const u8) -> __m256 {
        // SAFETY: p is good for 8 bytes.
        _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(unsafe { _mm_loadl_epi64(p.cast()) }))
    }
    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn load_i8(p: *const u8) -> __m256 {
        // SAFETY: p is good for 8 bytes.
        _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(unsafe { _mm_loadl_epi64(p.cast()) }))
    }
    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn store(p: *mut f32, x: __m256) {
        // SAFETY: p is good for 32 bytes.
        unsafe { _mm256_storeu_ps(p, x) }
    }
    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn add(a: __m256, b: __m256) -> __m256 {
        _mm256_add_ps(a, b)
    }
    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn mul(a: __m256, b: __m256) -> __m256 {
        _mm256_mul_ps(a, b)
    }
    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn max(a: __m256, b: __m256) -> __m256 {
        _mm256_max_ps(a, b)
    }
    #[inline]
    #[target_feature(enable = "avx2,fma")]
    unsafe fn fma(a: __m256, b: __m256, c: __m256) -> __m256 {
        _mm256_fmadd_ps(a, b, c)
    }
    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn zero_below(x: __m256, low: __m256, y: __m256) -> __m256 {
        _mm256_andnot_ps(_mm256_cmp_ps::<_CMP_LT_OQ>(x, low), y)
    }
    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn power_of_two(x: __m256) -> __m256 {
        let bits = _mm256_add_epi32(_mm256_castps_si256(x), _mm256_set1_epi32(127));
        _mm256_castsi256_ps(_mm256_slli_epi32::<23>(bits))
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn max_magnitude(x: *const f32) -> u32 {
        let mut max = _mm256_setzero_si256();
        for n in 0..4 {
            // SAFETY: x is good for 32 floats.
            let x = unsafe { _mm256_loadu_si256(x.add(8 * n).cast()) };
            max = _mm256_max_epu32(max, _mm256_and_si256(x, _mm256_set1_epi32(0x7fff_ffff)));
        }
        let max = _mm_max_epu32(_mm256_castsi256_si128(max), _mm256_extracti128_si256::<1>(max));
        let max = _mm_max_epu32(max, _mm_shuffle_epi32::<0b01_00_11_10>(max));
        let max = _mm_max_epu32(max, _mm_shuffle_epi32::<0b10_11_00_01>(max));
        _mm_cvtsi128_si32(max) as u32
    }
    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn quantize(x: *const f32, id: f32, q: *mut u8) -> (i32, i32) {
        let eight = |n: usize| {
            // SAFETY: x is good for 32 floats.
            let x = unsafe { _mm256_loadu_ps(x.add(8 * n)) };
            let x = _mm256_mul_ps(x, _mm256_set1_ps(id));
            _mm256_cvtps_epi32(_mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(x))
        };
        let half = |n: usize| {
            let (a, b) = (eight(2 * n), eight(2 * n + 1));
            // Packing works in 128-bit halves; the permutation restores the order.
            let words = _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_packs_epi32(a, b));
            let bytes = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256::<1>(words));
            // SAFETY: q is good for 32 bytes.
            unsafe { _mm_storeu_si128(q.add(16 * n).cast(), bytes) };
            let sum = _mm256_add_epi32(a, b);
            let sum = _mm_add_epi32(_mm256_castsi256_si128(sum), _mm256_extracti128_si256::<1>(sum));
            let sum = _mm_add_epi32(sum, _mm_shuffle_epi32::<0b01_00_11_10>(sum));
            let sum = _mm_add_epi32(sum, _mm_shuffle_epi32::<0b10_11_00_01>(sum));
            _mm_cvtsi128_si32(sum)
        };
        (half(0), half(1))
    }
}
