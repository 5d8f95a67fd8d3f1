//! How the kernels read each packed format (the layout is drawn in [`crate::pack`]).

use super::lanes::Lanes;
use crate::pack::{GROUP_ROWS, PackedFormat, VECTOR};
use neuropil_device::DType;
use neuropil_device::quant::GROUP;

/// A packed quantised format.
///
/// The pointers point at the head or at 32 columns of a group. `r` is the first row of the vector.
///
/// # Safety
/// As for [`Lanes`], every unsafe function needs the features of V enabled. The pointer must be good for what it points
/// at in this format: the head of a block, or the codes and scales of 32 columns; and `r + V::LANES` is at most 16.
pub(super) trait Format {
    /// The type in a file.
    const DTYPE: DType;
    /// What to subtract from a code.
    const OFFSET: i32;
    /// Whether groups have minimums.
    const MIN: bool;
    /// Whether each 16 columns have their own integer scale.
    const HALVES: bool = false;

    /// Sizes of the packed format.
    const PACKED: PackedFormat = match PackedFormat::of(Self::DTYPE) {
        Some(f) => f,
        None => panic!("a quantised type"),
    };
    /// Which of the starts in a record of activations takes the offset off; the first of two with halves.
    const START: Option<usize> = match Self::OFFSET {
        0 => None,
        8 => Some(0),
        16 => Some(1),
        128 => Some(2),
        32 if Self::HALVES => Some(3),
        _ => panic!("records have no start for this offset"),
    };
    /// Steps of 32 columns in a block.
    const STEPS: usize = Self::DTYPE.block_elements() / GROUP;

    /// Scale, and negated minimum scale, of a block with a head.
    ///
    /// # Safety
    /// As for the trait, with `p` at a head.
    #[inline(always)]
    unsafe fn head<V: Lanes>(_p: *const u8, _r: usize) -> [V::F; 2] {
        // SAFETY: the caller enabled the features of V.
        unsafe { [V::splat(1.0); 2] }
    }

    /// Scale and minimum of 32 columns.
    ///
    /// # Safety
    /// As for the trait, with `p` at 32 columns.
    unsafe fn scales<V: Lanes>(head: [V::F; 2], p: *const u8, r: usize) -> [V::F; 2];

    /// The integer scales of both halves.
    ///
    /// # Safety
    /// As for the trait, with `p` at 32 columns.
    #[inline(always)]
    unsafe fn halves<V: Lanes>(_p: *const u8, _r: usize) -> [V::F; 2] {
        // SAFETY: the caller enabled the features of V.
        unsafe { [V::splat(1.0); 2] }
    }
}

/// The `n`-th f16 array of scales.
///
/// # Safety
/// The features of V are enabled, `p` is good for `n + 1` arrays of 16 scales, and `r + V::LANES` is at most 16.
#[inline(always)]
unsafe fn f16s<V: Lanes>(p: *const u8, n: usize, r: usize) -> V::F {
    // SAFETY: as for this function.
    unsafe { V::load_f16(p.add((n * GROUP_ROWS + r) * 2)) }
}

/// The codes of 32 columns, by steps.
///
/// # Safety
/// `p` is good for the codes of a group, `r < 16`, and the features of V are enabled.
#[inline(always)]
pub(super) unsafe fn codes<V: Lanes, F: Format>(p: *const u8, r: usize) -> [V::W; 8] {
    // SAFETY: the vectors read are those that the format has, see the layout in `pack`.
    unsafe {
        let vector = |j: usize| V::load_codes(p.add(j * VECTOR + 4 * r));
        if F::PACKED.bits == 8 {
            return [vector(0), vector(1), vector(2), vector(3), vector(4), vector(5), vector(6), vector(7)];
        }
        let w = [vector(0), vector(1), vector(2), vector(3)];
        let mut codes = [
            V::low(w[0]),
            V::low(w[1]),
            V::low(w[2]),
            V::low(w[3]),
            V::high(w[0]),
            V::high(w[1]),
            V::high(w[2]),
            V::high(w[3]),
        ];
        if F::PACKED.bits >= 5 {
            codes = plane::<V, 4>(codes, vector(4));
        }
        if F::PACKED.bits >= 6 {
            codes = plane::<V, 5>(codes, vector(5));
        }
        codes
    }
}

/// Adds one more bit to each code.
///
/// # Safety
/// The features of V are enabled.
#[inline(always)]
unsafe fn plane<V: Lanes, const TO: u32>(w: [V::W; 8], plane: V::W) -> [V::W; 8] {
    // SAFETY: as for this function.
    unsafe {
        [
            V::add_bit::<0, TO>(w[0], plane),
            V::add_bit::<1, TO>(w[1], plane),
            V::add_bit::<2, TO>(w[2], plane),
            V::add_bit::<3, TO>(w[3], plane),
            V::add_bit::<4, TO>(w[4], plane),
            V::add_bit::<5, TO>(w[5], plane),
            V::add_bit::<6, TO>(w[6], plane),
            V::add_bit::<7, TO>(w[7], plane),
        ]
    }
}

/// A format of blocks of 32: f16 scales, and f16 minimums where it has some.
macro_rules! simple {
    ($name:ident, $offset:expr, $min:expr) => {
        #[allow(non_camel_case_types)]
        pub(super) struct $name;
        impl Format for $name {
            const DTYPE: DType = DType::$name;
            const OFFSET: i32 = $offset;
            const MIN: bool = $min;
            #[inline(always)]
            unsafe fn scales<V: Lanes>(head: [V::F; 2], p: *const u8, r: usize) -> [V::F; 2] {
                // SAFETY: the codes are followed by one array, or two for a format with minimums.
                unsafe {
                    let p = p.add(Self::PACKED.codes());
                    [f16s::<V>(p, 0, r), if Self::MIN { f16s::<V>(p, 1, r) } else { head[1] }]
                }
            }
        }
    };
}

simple!(Q4_0, 8, false);
simple!(Q4_1, 0, true);
simple!(Q5_0, 16, false);
simple!(Q5_1, 0, true);
simple!(Q8_0, 128, false);

/// A format of blocks of 256 with 6-bit scales and minimums.
macro_rules! k_format {
    ($name:ident, $dtype:ident) => {
        pub(super) struct $name;
        impl Format for $name {
            const DTYPE: DType = DType::$dtype;
            const OFFSET: i32 = 0;
            const MIN: bool = true;
            #[inline(always)]
            unsafe fn head<V: Lanes>(p: *const u8, r: usize) -> [V::F; 2] {
                // SAFETY: the head is two arrays of f16.
                unsafe { [f16s::<V>(p, 0, r), V::mul(V::splat(-1.0), f16s::<V>(p, 1, r))] }
            }
            #[inline(always)]
            unsafe fn scales<V: Lanes>(head: [V::F; 2], p: *const u8, r: usize) -> [V::F; 2] {
                // SAFETY: the codes are followed by two arrays of u8. The products are exact.
                unsafe {
                    let p = p.add(Self::PACKED.codes() + r);
                    [V::mul(head[0], V::load_u8(p)), V::mul(head[1], V::load_u8(p.add(GROUP_ROWS)))]
                }
            }
        }
    };
}

k_format!(Q4K, Q4_K);
k_format!(Q5K, Q5_K);

pub(super) struct Q6K;

impl Format for Q6K {
    const DTYPE: DType = DType::Q6_K;
    const OFFSET: i32 = 32;
    const MIN: bool = false;
    const HALVES: bool = true;

    #[inline(always)]
    unsafe fn head<V: Lanes>(p: *const u8, r: usize) -> [V::F; 2] {
        // SAFETY: the head is one array of f16.
        unsafe { [f16s::<V>(p, 0, r), V::splat(0.0)] }
    }

    #[inline(always)]
    unsafe fn scales<V: Lanes>(head: [V::F; 2], _p: *const u8, _r: usize) -> [V::F; 2] {
        head
    }

    #[inline(always)]
    unsafe fn halves<V: Lanes>(p: *const u8, r: usize) -> [V::F; 2] {
        // SAFETY: the codes are followed by two arrays of i8.
        unsafe {
            let p = p.add(Self::PACKED.codes() + r);
            [V::load_i8(p), V::load_i8(p.add(GROUP_ROWS))]
        }
    }
}

/// A plain float type.
pub(super) trait FloatFormat {
    /// Bytes of an element.
    const BYTES: usize;
    /// Reads one element of each row.
    ///
    /// # Safety
    /// The features of V are enabled, and `p` is good for LANES elements.
    unsafe fn load<V: Lanes>(p: *const u8) -> V::F;
}

macro_rules! float {
    ($name:ident, $bytes:expr, $load:ident) => {
        pub(super) struct $name;
        impl FloatFormat for $name {
            const BYTES: usize = $bytes;
            #[inline(always)]
            unsafe fn load<V: Lanes>(p: *const u8) -> V::F {
                // SAFETY: the caller gives a pointer to the elements.
                unsafe { V::$load(p) }
            }
        }
    };
}

float!(F32, 4, load_f32);
float!(F16, 2, load_f16);
float!(BF16, 2, load_bf16);
