//! AVX2: a vector is half a group of 16 rows, and products of codes are summed in 16 bits as far as they fit.

use crate::arch::lanes::Lanes;
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

kernels!(Avx2, Avx2Lanes, floats: Avx2Lanes, 2, "avx2,fma,f16c");

struct Avx2Lanes;

// SAFETY of every pointer below: `Lanes` asks its caller for the bytes that the operation reads or writes, and all
// loads and stores are unaligned ones.
impl Lanes for Avx2Lanes {
    const LANES: usize = 8;
    const SIGNED_BYTES: bool = true;
    const FOURS: bool = true;
    type W = __m256i;
    type I = __m256i;
    type F = __m256;
    /// Offset and scale, and minimum, for each lane.
    type Table = ([__m256; 2], Option<__m256>);

    #[inline(always)]
    unsafe fn prefetch(p: *const u8) {
        // SAFETY: a prefetch of any address is harmless.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(p.cast()) }
    }
    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn turn(rows: &[*const u8; 16], at: usize, to: *mut u8) {
        for half in 0..2 {
            // SAFETY: each row is good for 16 bytes from `at` on, and `to` for 256.
            unsafe {
                let row = |r: usize| _mm_loadu_si128(rows[8 * half + r].add(at).cast());
                // A lane of the n-th vector holds one row of each four.
                let fourth =
                    |n: usize| _mm256_inserti128_si256::<1>(_mm256_castsi128_si256(row(n)), row(n + 4));
                let v = [fourth(0), fourth(1), fourth(2), fourth(3)];
                let (low, high) = (_mm256_unpacklo_epi32(v[0], v[1]), _mm256_unpackhi_epi32(v[0], v[1]));
                let (low2, high2) = (_mm256_unpacklo_epi32(v[2], v[3]), _mm256_unpackhi_epi32(v[2], v[3]));
                let to = to.add(32 * half);
                _mm256_storeu_si256(to.cast(), _mm256_unpacklo_epi64(low, low2));
                _mm256_storeu_si256(to.add(64).cast(), _mm256_unpackhi_epi64(low, low2));
                _mm256_storeu_si256(to.add(128).cast(), _mm256_unpacklo_epi64(high, high2));
                _mm256_storeu_si256(to.add(192).cast(), _mm256_unpackhi_epi64(high, high2));
            }
        }
    }
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
    unsafe fn dot<const BITS: u32, const N: usize, const EIGHTS: usize>(
        w: &[__m256i; N],
        q: *const u8,
        init: __m256i,
    ) -> __m256i {
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
            // SAFETY: q has 4 bytes for each step.
            let q = _mm256_set1_epi32(unsafe {
                q.add(step / 2 * EIGHTS + step % 2 * 4).cast::<i32>().read_unaligned()
            });
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
    unsafe fn table(offset: f32, d: f32, m: Option<f32>) -> Self::Table {
        ([_mm256_set1_ps(offset), _mm256_set1_ps(d)], m.map(|m| _mm256_set1_ps(m)))
    }
    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn look_up(p: *const u8, ([offset, d], m): Self::Table) -> [__m256; 2] {
        // SAFETY: p is good for 8 bytes.
        let bytes = _mm256_cvtepu8_epi32(unsafe { _mm_loadl_epi64(p.cast()) });
        [_mm256_and_si256(bytes, _mm256_set1_epi32(15)), _mm256_srli_epi32::<4>(bytes)].map(|codes| {
            let weights = _mm256_mul_ps(d, _mm256_sub_ps(_mm256_cvtepi32_ps(codes), offset));
            m.map_or(weights, |m| _mm256_add_ps(weights, m))
        })
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
