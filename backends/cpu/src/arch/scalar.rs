//! The vector operations in plain Rust: for machines without a known instruction set, and to test the kernels.

use super::lanes::Lanes;
use neuropil_device::quant::ACT_BLOCK;

const ROWS: usize = 16;

#[derive(Clone, Copy)]
pub(super) struct ScalarKernels;

kernels!(ScalarKernels, ScalarLanes, floats: ScalarLanes, 1);

pub(super) struct ScalarLanes;

/// Reads N values.
///
/// # Safety
/// `p` is good for them.
unsafe fn read<T: bytemuck::AnyBitPattern, const N: usize>(p: *const u8) -> [T; N] {
    // SAFETY: given by the caller; any bits are a value.
    unsafe { p.cast::<[T; N]>().read_unaligned() }
}

impl Lanes for ScalarLanes {
    const LANES: usize = ROWS;
    type W = [[u8; 4]; ROWS];
    type I = [i32; ROWS];
    type F = [f32; ROWS];
    type Table = [f32; 16];

    unsafe fn turn(rows: &[*const u8; 16], at: usize, to: *mut u8) {
        for (r, row) in rows.iter().enumerate() {
            for j in 0..4 {
                // SAFETY: each row is good for 16 bytes from `at` on, and `to` for 256.
                unsafe { row.add(at + 4 * j).copy_to_nonoverlapping(to.add(64 * j + 4 * r), 4) };
            }
        }
    }
    unsafe fn load_codes(p: *const u8) -> Self::W {
        // SAFETY: p is good for 64 bytes.
        unsafe { read(p) }
    }
    unsafe fn low(w: Self::W) -> Self::W {
        w.map(|row| row.map(|b| b & 15))
    }
    unsafe fn high(w: Self::W) -> Self::W {
        w.map(|row| row.map(|b| b >> 4))
    }
    unsafe fn add_bit<const STEP: u32, const TO: u32>(mut w: Self::W, plane: Self::W) -> Self::W {
        for (row, bits) in w.iter_mut().zip(plane) {
            for (code, bits) in row.iter_mut().zip(bits) {
                *code |= ((bits >> STEP) & 1) << TO;
            }
        }
        w
    }
    #[inline(never)] // the compiler takes long over the kernels with this inlined
    unsafe fn dot<const BITS: u32, const N: usize, const EIGHTS: usize>(
        w: &[Self::W; N],
        q: *const u8,
        init: Self::I,
    ) -> Self::I {
        // SAFETY: q has 4 bytes for each step.
        let q: [[i8; 4]; N] =
            std::array::from_fn(|step| unsafe { read(q.add(step / 2 * EIGHTS + step % 2 * 4)) });
        let mut sums = init;
        for (w, q) in w.iter().zip(q) {
            for (sum, row) in sums.iter_mut().zip(w) {
                for (code, q) in row.iter().zip(q) {
                    *sum += i32::from(*code) * i32::from(q);
                }
            }
        }
        sums
    }
    unsafe fn splat_i(x: i32) -> Self::I {
        [x; ROWS]
    }
    unsafe fn to_f(x: Self::I) -> Self::F {
        x.map(|x| x as f32)
    }

    unsafe fn splat(x: f32) -> Self::F {
        [x; ROWS]
    }
    unsafe fn load_f32(p: *const u8) -> Self::F {
        // SAFETY: p is good for 16 f32.
        unsafe { read(p) }
    }
    unsafe fn load_f16(p: *const u8) -> Self::F {
        // SAFETY: p is good for 16 f16.
        unsafe { read::<half::f16, ROWS>(p) }.map(half::f16::to_f32)
    }
    unsafe fn load_bf16(p: *const u8) -> Self::F {
        // SAFETY: p is good for 16 bf16.
        unsafe { read::<half::bf16, ROWS>(p) }.map(half::bf16::to_f32)
    }
    unsafe fn load_u8(p: *const u8) -> Self::F {
        // SAFETY: p is good for 16 bytes.
        unsafe { read::<u8, ROWS>(p) }.map(f32::from)
    }
    unsafe fn load_i8(p: *const u8) -> Self::F {
        // SAFETY: p is good for 16 bytes.
        unsafe { read::<i8, ROWS>(p) }.map(f32::from)
    }
    unsafe fn store(p: *mut f32, x: Self::F) {
        // SAFETY: p is good for 16 f32.
        unsafe { p.cast::<Self::F>().write_unaligned(x) }
    }
    unsafe fn add(a: Self::F, b: Self::F) -> Self::F {
        std::array::from_fn(|i| a[i] + b[i])
    }
    unsafe fn mul(a: Self::F, b: Self::F) -> Self::F {
        std::array::from_fn(|i| a[i] * b[i])
    }
    unsafe fn max(a: Self::F, b: Self::F) -> Self::F {
        std::array::from_fn(|i| if a[i] > b[i] { a[i] } else { b[i] })
    }
    unsafe fn fma(a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        std::array::from_fn(|i| a[i].mul_add(b[i], c[i]))
    }
    unsafe fn zero_below(x: Self::F, low: Self::F, y: Self::F) -> Self::F {
        std::array::from_fn(|i| if x[i] < low[i] { 0.0 } else { y[i] })
    }
    unsafe fn power_of_two(x: Self::F) -> Self::F {
        x.map(|x| f32::from_bits(x.to_bits().wrapping_add(127) << 23))
    }

    unsafe fn table(offset: f32, d: f32, m: Option<f32>) -> Self::Table {
        std::array::from_fn(|code| {
            let weight = d * (code as f32 - offset);
            m.map_or(weight, |m| weight + m)
        })
    }
    unsafe fn look_up(p: *const u8, table: Self::Table) -> [Self::F; 2] {
        // SAFETY: p is good for 16 bytes.
        let bytes: [u8; ROWS] = unsafe { read(p) };
        [bytes.map(|b| table[usize::from(b & 15)]), bytes.map(|b| table[usize::from(b >> 4)])]
    }

    unsafe fn max_magnitude(x: *const f32) -> u32 {
        // SAFETY: x is good for 32 floats.
        let x: [u32; ACT_BLOCK] = unsafe { read(x.cast()) };
        x.iter().map(|x| x & 0x7fff_ffff).fold(0, u32::max)
    }
    unsafe fn quantize(x: *const f32, id: f32, q: *mut u8) -> (i32, i32) {
        // SAFETY: x is good for 32 floats.
        let x: [f32; ACT_BLOCK] = unsafe { read(x.cast()) };
        let codes = x.map(|x| (x * id).round_ties_even() as i8);
        // SAFETY: q is good for 32 bytes.
        unsafe { q.cast::<[i8; ACT_BLOCK]>().write_unaligned(codes) };
        let sum = |codes: &[i8]| codes.iter().map(|q| i32::from(*q)).sum();
        (sum(&codes[..16]), sum(&codes[16..]))
    }
}
