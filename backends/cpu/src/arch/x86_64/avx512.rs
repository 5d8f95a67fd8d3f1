//! AVX-512: a vector is a whole group of 16 rows, and VNNI multiplies 64 codes in one instruction.

use crate::arch::lanes::Lanes;
use std::arch::asm;
use std::arch::x86_64::*;

/// Proof that the machine has AVX-512 F, BW, VL and VNNI.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Avx512Vnni(());

impl Avx512Vnni {
    /// The proof, if this machine has the features.
    pub fn detect() -> Option<Self> {
        let found = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx512vnni");
        found.then_some(Avx512Vnni(()))
    }
}

kernels!(Avx512Vnni, Avx512, floats: Avx512, 4, "avx512f,avx512bw,avx512vl,avx512vnni");

struct Avx512;

/// Lane i of the result is 16 bytes of row `n + 4 i` from `at` on.
///
/// # Safety
/// The rows are good for them.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn fourth(rows: &[*const u8; 16], n: usize, at: usize) -> __m512i {
    // SAFETY: as for this function.
    unsafe {
        let row = |r: usize| rows[r].add(at).cast::<__m128i>();
        let v = _mm512_castsi128_si512(_mm_loadu_si128(row(n)));
        let v = _mm512_inserti32x4::<1>(v, _mm_loadu_si128(row(n + 4)));
        let v = _mm512_inserti32x4::<2>(v, _mm_loadu_si128(row(n + 8)));
        _mm512_inserti32x4::<3>(v, _mm_loadu_si128(row(n + 12)))
    }
}

/// Writes the words of what [`fourth`] reads by place: word j of row r goes to byte `64 j + 4 r`.
///
/// # Safety
/// `to` is good for 256 bytes.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn turned(v: [__m512i; 4], to: *mut u8) {
    // SAFETY: as for this function.
    unsafe {
        let (low, high) = (_mm512_unpacklo_epi32(v[0], v[1]), _mm512_unpackhi_epi32(v[0], v[1]));
        let (low2, high2) = (_mm512_unpacklo_epi32(v[2], v[3]), _mm512_unpackhi_epi32(v[2], v[3]));
        _mm512_storeu_si512(to.cast(), _mm512_unpacklo_epi64(low, low2));
        _mm512_storeu_si512(to.add(64).cast(), _mm512_unpackhi_epi64(low, low2));
        _mm512_storeu_si512(to.add(128).cast(), _mm512_unpacklo_epi64(high, high2));
        _mm512_storeu_si512(to.add(192).cast(), _mm512_unpackhi_epi64(high, high2));
    }
}

const NEAREST: i32 = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;

// SAFETY of every pointer below: `Lanes` asks its caller for the bytes that the operation reads or writes, and all
// loads and stores are unaligned ones.
impl Lanes for Avx512 {
    const LANES: usize = 16;
    const MANY: bool = true;
    type W = __m512i;
    type I = __m512i;
    type F = __m512;
    type Table = __m512;

    #[inline(always)]
    unsafe fn prefetch(p: *const u8) {
        // SAFETY: a prefetch of any address is harmless.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(p.cast()) }
    }
    #[inline(always)]
    fn in_register(mut p: *const u8) -> *const u8 {
        // SAFETY: no instruction, and nothing changes.
        unsafe { asm!("/* {0} */", inout(reg) p, options(pure, readonly, nostack, preserves_flags)) };
        p
    }
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn turn(rows: &[*const u8; 16], at: usize, to: *mut u8) {
        // SAFETY: each row is good for 16 bytes from `at` on, and `to` for 256.
        unsafe {
            let rows = [fourth(rows, 0, at), fourth(rows, 1, at), fourth(rows, 2, at), fourth(rows, 3, at)];
            turned(rows, to);
        }
    }
    #[expect(clippy::needless_range_loop, reason = "lines are written by row and read by piece")]
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn turn_line(
        rows: &[*const u8; 16],
        at: usize,
        later: &[*const u8; 16],
        ahead: usize,
        to: [*mut u8; 4],
    ) {
        // SAFETY: each row is good for 64 bytes from `at` on, and each place for 256.
        unsafe {
            // All loads first: the addresses of 16 rows do not fit the registers, and are read once so.
            let mut line = [[_mm512_setzero_si512(); 4]; 4];
            for n in 0..4 {
                for row in [n, n + 4, n + 8, n + 12] {
                    _mm_prefetch::<_MM_HINT_T0>(later[row].wrapping_add(ahead).cast());
                }
                for piece in 0..4 {
                    line[piece][n] = fourth(rows, n, at + 16 * piece);
                }
            }
            for piece in 0..4 {
                turned(line[piece], to[piece]);
            }
        }
    }
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn load_codes(p: *const u8) -> __m512i {
        // SAFETY: p is good for 64 bytes.
        unsafe { _mm512_loadu_si512(p.cast()) }
    }
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn low(w: __m512i) -> __m512i {
        _mm512_and_si512(w, _mm512_set1_epi8(15))
    }
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn high(w: __m512i) -> __m512i {
        _mm512_and_si512(_mm512_srli_epi16::<4>(w), _mm512_set1_epi8(15))
    }
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn add_bit<const STEP: u32, const TO: u32>(w: __m512i, plane: __m512i) -> __m512i {
        // Bits that a 16-bit shift moves into the neighbour byte are masked away.
        let shifted = if STEP < TO {
            _mm512_sll_epi16(plane, _mm_cvtsi32_si128((TO - STEP) as i32))
        } else {
            _mm512_srl_epi16(plane, _mm_cvtsi32_si128((STEP - TO) as i32))
        };
        // w | (shifted & mask)
        _mm512_ternarylogic_epi32::<0xF8>(w, shifted, _mm512_set1_epi8(1 << TO))
    }
    #[inline]
    #[target_feature(enable = "avx512f,avx512vnni")]
    unsafe fn dot<const BITS: u32, const N: usize, const EIGHTS: usize>(
        w: &[__m512i; N],
        q: *const u8,
        init: __m512i,
    ) -> __m512i {
        let mut sum = init;
        for (step, w) in w.iter().enumerate() {
            // SAFETY: q has 4 bytes for each step.
            let q = unsafe { q.add(step / 2 * EIGHTS + step % 2 * 4).cast::<i32>().read_unaligned() };
            sum = _mm512_dpbusd_epi32(sum, *w, _mm512_set1_epi32(q));
        }
        sum
    }
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn splat_i(x: i32) -> __m512i {
        _mm512_set1_epi32(x)
    }
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn to_f(x: __m512i) -> __m512 {
        _mm512_cvtepi32_ps(x)
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn splat(x: f32) -> __m512 {
        _mm512_set1_ps(x)
    }
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn load_f32(p: *const u8) -> __m512 {
        // SAFETY: p is good for 64 bytes.
        unsafe { _mm512_loadu_ps(p.cast()) }
    }
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn load_f16(p: *const u8) -> __m512 {
        // SAFETY: p is good for 32 bytes.
        _mm512_cvtph_ps(unsafe { _mm256_loadu_si256(p.cast()) })
    }
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn load_bf16(p: *const u8) -> __m512 {
        // SAFETY: p is good for 32 bytes.
        let w = unsafe { _mm256_loadu_si256(p.cast()) };
        _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(w)))
    }
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn load_u8(p: *const u8) -> __m512 {
        // SAFETY: p is good for 16 bytes.
        _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(unsafe { _mm_loadu_si128(p.cast()) }))
    }
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn load_i8(p: *const u8) -> __m512 {
        // SAFETY: p is good for 16 bytes.
        _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(unsafe { _mm_loadu_si128(p.cast()) }))
    }
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn store(p: *mut f32, x: __m512) {
        // SAFETY: p is good for 64 bytes.
        unsafe { _mm512_storeu_ps(p, x) }
    }
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn add(a: __m512, b: __m512) -> __m512 {
        _mm512_add_ps(a, b)
    }
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn mul(a: __m512, b: __m512) -> __m512 {
        _mm512_mul_ps(a, b)
    }
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn max(a: __m512, b: __m512) -> __m512 {
        _mm512_max_ps(a, b)
    }
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn fma(a: __m512, b: __m512, c: __m512) -> __m512 {
        _mm512_fmadd_ps(a, b, c)
    }
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn zero_below(x: __m512, low: __m512, y: __m512) -> __m512 {
        _mm512_maskz_mov_ps(_mm512_cmp_ps_mask::<_CMP_NLT_UQ>(x, low), y)
    }
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn power_of_two(x: __m512) -> __m512 {
        let bits = _mm512_add_epi32(_mm512_castps_si512(x), _mm512_set1_epi32(127));
        _mm512_castsi512_ps(_mm512_slli_epi32::<23>(bits))
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn table(offset: f32, d: f32, m: Option<f32>) -> __m512 {
        let codes = _mm512_setr_ps(0., 1., 2., 3., 4., 5., 6., 7., 8., 9., 10., 11., 12., 13., 14., 15.);
        let weights = _mm512_mul_ps(_mm512_set1_ps(d), _mm512_sub_ps(codes, _mm512_set1_ps(offset)));
        m.map_or(weights, |m| _mm512_add_ps(weights, _mm512_set1_ps(m)))
    }
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn look_up(p: *const u8, table: __m512) -> [__m512; 2] {
        // SAFETY: p is good for 16 bytes.
        let bytes = _mm512_cvtepu8_epi32(unsafe { _mm_loadu_si128(p.cast()) });
        // The permutation heeds four bits of an index.
        [_mm512_permutexvar_ps(bytes, table), _mm512_permutexvar_ps(_mm512_srli_epi32::<4>(bytes), table)]
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn max_magnitude(x: *const f32) -> u32 {
        // SAFETY: x is good for 32 floats.
        let [a, b] = unsafe { [_mm512_loadu_si512(x.cast()), _mm512_loadu_si512(x.add(16).cast())] };
        let mask = _mm512_set1_epi32(0x7fff_ffff);
        let max = _mm512_max_epu32(_mm512_and_si512(a, mask), _mm512_and_si512(b, mask));
        _mm512_reduce_max_epu32(max)
    }
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn quantize(x: *const f32, id: f32, q: *mut u8) -> (i32, i32) {
        let half = |n: usize| {
            // SAFETY: x is good for 32 floats.
            let x = unsafe { _mm512_loadu_ps(x.add(16 * n)) };
            let codes = _mm512_cvt_roundps_epi32::<NEAREST>(_mm512_mul_ps(x, _mm512_set1_ps(id)));
            // SAFETY: q is good for 32 bytes.
            unsafe { _mm_storeu_si128(q.add(16 * n).cast(), _mm512_cvtepi32_epi8(codes)) };
            _mm512_reduce_add_epi32(codes)
        };
        (half(0), half(1))
    }
}
