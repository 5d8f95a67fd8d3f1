//! How the types that a down row may have are widened, column by column.

use neuropil_device::DType;
use neuropil_device::quant::GROUP;

use super::lanes::Lanes;

/// A type of down rows.
///
/// # Safety
/// As for [`Lanes`], every unsafe function needs the features of V enabled.
pub(super) trait Down {
    /// What widens the codes of a group.
    type Table<V: Lanes>: Copy;

    /// Byte where column `column`, the first of a group for types with groups, begins in the codes of a row.
    fn offset(column: usize) -> usize;

    /// The table of a group with these scales.
    ///
    /// # Safety
    /// As for the trait.
    unsafe fn table<V: Lanes>(d: f32, m: f32) -> Self::Table<V>;

    /// Columns `part..part + V::LANES` of the group at `p`, and those 16 further on.
    ///
    /// # Safety
    /// As for the trait; `p` is good for 32 columns and `part + V::LANES` at most 16.
    unsafe fn pair<V: Lanes>(p: *const u8, part: usize, table: Self::Table<V>) -> [V::F; 2];

    /// One column of a row of plain floats.
    ///
    /// # Safety
    /// `p` is good for it.
    unsafe fn one(_p: *const u8) -> f32 {
        0.0
    }
}

/// A type of 4-bit codes.
macro_rules! nibbles {
    ($name:ident, $offset:expr, $min:expr) => {
        #[allow(non_camel_case_types)]
        pub(super) struct $name;
        impl Down for $name {
            type Table<V: Lanes> = V::Table;
            #[inline(always)]
            fn offset(column: usize) -> usize {
                column / 2
            }
            #[inline(always)]
            unsafe fn table<V: Lanes>(d: f32, m: f32) -> V::Table {
                // SAFETY: as for the trait.
                unsafe { V::table($offset, d, if $min { Some(m) } else { None }) }
            }
            #[inline(always)]
            unsafe fn pair<V: Lanes>(p: *const u8, part: usize, table: V::Table) -> [V::F; 2] {
                // SAFETY: as for the trait.
                unsafe { V::look_up(p.add(part), table) }
            }
        }
    };
}

nibbles!(Q4_0, 8.0, false);
nibbles!(Q4_1, 0.0, true);

#[allow(non_camel_case_types)]
pub(super) struct Q8_0;

impl Down for Q8_0 {
    type Table<V: Lanes> = V::F;
    #[inline(always)]
    fn offset(column: usize) -> usize {
        column
    }
    #[inline(always)]
    unsafe fn table<V: Lanes>(d: f32, _m: f32) -> V::F {
        // SAFETY: as for the trait.
        unsafe { V::splat(d) }
    }
    #[inline(always)]
    unsafe fn pair<V: Lanes>(p: *const u8, part: usize, d: V::F) -> [V::F; 2] {
        // SAFETY: as for the trait.
        unsafe { [V::mul(d, V::load_i8(p.add(part))), V::mul(d, V::load_i8(p.add(part + GROUP / 2)))] }
    }
}

/// A plain float type.
macro_rules! plain {
    ($name:ident, $bytes:expr, $load:ident, $one:expr) => {
        pub(super) struct $name;
        impl Down for $name {
            type Table<V: Lanes> = ();
            #[inline(always)]
            fn offset(column: usize) -> usize {
                $bytes * column
            }
            #[inline(always)]
            unsafe fn table<V: Lanes>(_d: f32, _m: f32) {}
            #[inline(always)]
            unsafe fn pair<V: Lanes>(p: *const u8, part: usize, (): ()) -> [V::F; 2] {
                // SAFETY: as for the trait.
                unsafe { [V::$load(p.add($bytes * part)), V::$load(p.add($bytes * (part + GROUP / 2)))] }
            }
            unsafe fn one(p: *const u8) -> f32 {
                // SAFETY: as for the trait.
                $one(unsafe { p.cast::<[u8; $bytes]>().read() })
            }
        }
    };
}

plain!(F32, 4, load_f32, f32::from_le_bytes);
plain!(F16, 2, load_f16, |bytes| half::f16::from_le_bytes(bytes).to_f32());
plain!(BF16, 2, load_bf16, |bytes| half::bf16::from_le_bytes(bytes).to_f32());

/// The types that a down row may have.
pub(crate) const DOWN_TYPES: [DType; 6] =
    [DType::F32, DType::F16, DType::BF16, DType::Q4_0, DType::Q4_1, DType::Q8_0];
