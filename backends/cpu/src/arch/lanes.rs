//! The vector operations that the kernels are written in.

/// A vector instruction set that works on [`Self::LANES`] rows at a time.
///
/// # Safety
/// Every operation may only be called where the features of the instruction set are enabled, and a pointer must be
/// good for the bytes that the operation names. Pointers need no alignment. Float operations round once, to nearest
/// even.
pub(super) trait Lanes {
    /// FloatRows in a vector; divides 16.
    const LANES: usize;
    /// Whether [`Self::dot`] takes the bias of 128 off codes of 8 bits.
    const SIGNED_BYTES: bool = false;
    /// Whether a product takes a factor from a lane of a register: then two tokens are multiplied together with the
    /// `pair` operations.
    const BY_LANE: bool = false;
    /// Whether four columns of floats are multiplied together with [`Self::fma_four`].
    const FOURS: bool = false;
    /// Whether the registers hold the sums of two vectors of rows and 8 tokens, for work on floats.
    const MANY: bool = false;
    /// `4 * LANES` bytes: four codes of each row.
    type W: Copy;
    /// An i32 per row.
    type I: Copy;
    /// An f32 per row.
    type F: Copy;
    /// The weights of the 16 codes of 4 bits.
    type Table: Copy;

    /// Begins to load the cache line at p, which may lie anywhere.
    #[inline(always)]
    unsafe fn prefetch(_p: *const u8) {}
    /// Reads 16 bytes of each of 16 rows from byte `at` on and writes their 4-byte words by place: word j of row r goes
    /// to byte `64 j + 4 r`.
    unsafe fn turn(rows: &[*const u8; 16], at: usize, to: *mut u8);
    /// Turns 64 bytes of each row, in pieces of 16 that go to places of their own, and fetches a line of each of the
    /// `later` rows, from byte `ahead` on.
    #[inline(always)]
    unsafe fn turn_line(
        rows: &[*const u8; 16],
        at: usize,
        later: &[*const u8; 16],
        ahead: usize,
        to: [*mut u8; 4],
    ) {
        // SAFETY: each row is good for 64 bytes from `at` on, and each place for 256.
        unsafe {
            later.iter().for_each(|row| Self::prefetch(row.wrapping_add(ahead)));
            (0..4).for_each(|piece| Self::turn(rows, at + 16 * piece, to[piece]));
        }
    }
    /// The same pointer, which the compiler then keeps in a register of its own. With a base and an index instead,
    /// some machines split an operation that reads memory in two.
    #[inline(always)]
    fn in_register(p: *const u8) -> *const u8 {
        p
    }
    /// Reads `4 * LANES` bytes.
    unsafe fn load_codes(p: *const u8) -> Self::W;
    /// The low nibble of each byte.
    unsafe fn low(w: Self::W) -> Self::W;
    /// The high nibble of each byte.
    unsafe fn high(w: Self::W) -> Self::W;
    /// `w | bit << TO`, with bit `STEP` of each byte of `plane`; TO is 4 or 5.
    unsafe fn add_bit<const STEP: u32, const TO: u32>(w: Self::W, plane: Self::W) -> Self::W;
    /// `init + Σ codes · q` per row over N steps of 4 columns. The codes are unsigned and have `BITS` bits. The codes
    /// q of a token are i8 above -128; each 8 of them, for two steps, lie `EIGHTS` bytes behind those before.
    unsafe fn dot<const BITS: u32, const N: usize, const EIGHTS: usize>(
        w: &[Self::W; N],
        q: *const u8,
        init: Self::I,
    ) -> Self::I;
    /// The same for the two tokens of a pair, of which 8 codes each take turns, and which start from two numbers, or
    /// from 0.
    #[inline(always)]
    unsafe fn dot_pair<const BITS: u32, const N: usize>(
        w: &[Self::W; N],
        q: *const u8,
        start: Option<*const i32>,
    ) -> [Self::I; 2] {
        // SAFETY: as for this function; the second token's codes lie behind 8 of the first.
        unsafe {
            [0, 1].map(|t| {
                let init = start.map_or(0, |start| start.add(t).read_unaligned());
                Self::dot::<BITS, N, 16>(w, q.add(8 * t), Self::splat_i(init))
            })
        }
    }
    /// The same integer for each row.
    unsafe fn splat_i(x: i32) -> Self::I;
    /// Integers as floats.
    unsafe fn to_f(x: Self::I) -> Self::F;

    /// The same float for each row.
    unsafe fn splat(x: f32) -> Self::F;
    /// Reads LANES f32.
    unsafe fn load_f32(p: *const u8) -> Self::F;
    /// Reads LANES f16.
    unsafe fn load_f16(p: *const u8) -> Self::F;
    /// Reads LANES bf16.
    unsafe fn load_bf16(p: *const u8) -> Self::F;
    /// Reads LANES u8.
    unsafe fn load_u8(p: *const u8) -> Self::F;
    /// Reads LANES i8.
    unsafe fn load_i8(p: *const u8) -> Self::F;
    /// Writes LANES f32.
    unsafe fn store(p: *mut f32, x: Self::F);
    /// `a + b`.
    unsafe fn add(a: Self::F, b: Self::F) -> Self::F;
    /// `a · b`.
    unsafe fn mul(a: Self::F, b: Self::F) -> Self::F;
    /// `a` where it is greater, else `b`; so `b` where one is NaN.
    unsafe fn max(a: Self::F, b: Self::F) -> Self::F;
    /// `a · b + c`, rounded once.
    unsafe fn fma(a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    /// `a · s` for two numbers s.
    #[inline(always)]
    unsafe fn mul_pair(a: Self::F, s: *const f32) -> [Self::F; 2] {
        // SAFETY: s is good for two numbers.
        unsafe { [0, 1].map(|t| Self::mul(a, Self::splat(s.add(t).read_unaligned()))) }
    }
    /// `a · s + c` for two numbers s, each rounded once.
    #[inline(always)]
    unsafe fn fma_pair(a: Self::F, s: *const f32, c: [Self::F; 2]) -> [Self::F; 2] {
        // SAFETY: s is good for two numbers.
        unsafe { [0, 1].map(|t| Self::fma(a, Self::splat(s.add(t).read_unaligned()), c[t])) }
    }
    /// `c + a[0] · s[0] + … + a[3] · s[3]`, one after the other.
    #[inline(always)]
    unsafe fn fma_four(a: &[Self::F; 4], s: *const f32, c: Self::F) -> Self::F {
        // SAFETY: s is good for four numbers.
        let s = unsafe { s.cast::<[f32; 4]>().read_unaligned() };
        // SAFETY: as for this function.
        a.iter().zip(s).fold(c, |c, (a, s)| unsafe { Self::fma(*a, Self::splat(s), c) })
    }

    /// Code i weighs `d (i - offset)`, or `d i + m` rounded twice.
    unsafe fn table(offset: f32, d: f32, m: Option<f32>) -> Self::Table;
    /// The weights of the low nibbles of LANES bytes, and of the high ones.
    unsafe fn look_up(p: *const u8, table: Self::Table) -> [Self::F; 2];
    /// 0 where `x` is less than `low`, else `y`; so `y` where one is NaN.
    unsafe fn zero_below(x: Self::F, low: Self::F, y: Self::F) -> Self::F;
    /// 2^n for `1.5 · 2^23 + n`, where n is an integer from -126 to 127: `(bits + 127) << 23`.
    unsafe fn power_of_two(x: Self::F) -> Self::F;

    /// The largest magnitude of 32 floats as bits, sign bits off.
    unsafe fn max_magnitude(x: *const f32) -> u32;
    /// Writes 32 codes `x · id` rounded half to even, which are in -127 to 127; returns the sums of the first and the
    /// last 16.
    unsafe fn quantize(x: *const f32, id: f32, q: *mut u8) -> (i32, i32);
}
