//! Turns the rows of 16 neurons into a packed group of rows.
//!
//! A neuron is read alone, so its row lies alone ([`neuropil_device::quant::bundle_row`]), but kernels want 16 rows side
//! by side. The parts of a row are laid out so that the turn is one operation: four times four bytes of 16 rows at
//! once, [`Lanes::turn`]. It is done for as many columns as stay in a core's first cache, where the kernel reads them
//! next, so the neurons' bytes cross the memory bus once, as those of a dense weight do, and the sums are the same.

use std::ops::Range;

use neuropil_device::DType;
use neuropil_device::quant::{BundleRow, GROUP, bundle_row_bytes};

use super::format::Format;
use super::lanes::Lanes;
use crate::pack::{GROUP_ROWS, VECTOR, group_bytes};

/// Bytes that one fetch brings.
const LINE: usize = 64;
/// How far ahead of its use a row is fetched.
const AHEAD: usize = 512;

/// 16 rows to turn.
pub(crate) struct Gather<'a> {
    dtype: DType,
    /// Elements of a row.
    width: usize,
    rows: [&'a [u8]; GROUP_ROWS],
    columns: Range<usize>,
    /// Rows to fetch meanwhile.
    next: [&'a [u8]; GROUP_ROWS],
    to: &'a mut [u8],
}

impl<'a> Gather<'a> {
    /// Columns `columns`, whole blocks, of 16 rows of `width` elements, to be written as a packed group. Where these rows
    /// end, the `next` ones are fetched into the core's cache.
    ///
    /// # Panics
    /// When a row or `to` has another length, or there are no such columns.
    pub fn new(
        dtype: DType,
        width: usize,
        rows: [&'a [u8]; GROUP_ROWS],
        columns: Range<usize>,
        next: [&'a [u8]; GROUP_ROWS],
        to: &'a mut [u8],
    ) -> Gather<'a> {
        // The unsafe code below stands on these.
        let bytes = bundle_row_bytes(dtype, width);
        assert!(rows.iter().all(|row| Some(row.len()) == bytes), "rows are {width} elements of {dtype}");
        assert!(columns.start.is_multiple_of(dtype.block_elements()) && columns.end <= width);
        assert_eq!(group_bytes(dtype, columns.len()), Some(to.len()), "a group of {columns:?} of {dtype}");
        Gather { dtype, width, rows, columns, next, to }
    }

    /// Type of the rows.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Turns rows of format F.
    ///
    /// # Safety
    /// The features of V are enabled, and F is the format of the rows.
    #[inline(always)]
    pub(super) unsafe fn quantized<V: Lanes, F: Format>(mut self) {
        let Some(from) = BundleRow::new(F::DTYPE, self.width) else { return };
        let (first, groups) = (self.columns.start / GROUP, self.columns.len() / GROUP);
        let f = F::PACKED;
        // Where the codes of the g-th group of these columns go.
        let at = |g: usize| g / F::STEPS * (f.head + F::STEPS * f.step()) + f.head + g % F::STEPS * f.step();
        let code_bytes = from.parts.code_bytes();
        // SAFETY: `new` saw that each row has all its parts and `to` the places of these groups.
        unsafe {
            for g in 0..groups {
                let codes = (first + g) * code_bytes;
                if codes.is_multiple_of(LINE) {
                    self.fetch::<V>(0..from.plane(0), codes, AHEAD);
                }
                for part in (0..code_bytes).step_by(16) {
                    let to = self.to.as_mut_ptr().add(at(g) + 4 * VECTOR * (part / 16));
                    V::turn(&self.rows.map(<[u8]>::as_ptr), codes + part, to);
                    if f.bits == 8 {
                        // Kernels take unsigned codes.
                        let codes = to.cast::<[u8; 4 * VECTOR]>();
                        codes.write_unaligned(codes.read_unaligned().map(|code| code ^ 0x80));
                    }
                }
            }
            for plane in 0..from.parts.planes() {
                let to = |g| at(g) + (4 + plane) * VECTOR;
                let part = from.plane(plane)..from.plane(plane + 1);
                self.spread::<V, 4>(part.clone(), part.start + 4 * first, groups, to);
            }
            for array in 0..from.parts.group_halves {
                let to = |g| at(g) + f.codes() + array * 2 * GROUP_ROWS;
                let part = from.group_halves(array)..from.group_halves(array + 1);
                self.spread::<V, 2>(part.clone(), part.start + 2 * first, groups, to);
            }
            for array in 0..from.parts.group_bytes {
                let to = |g| at(g) + f.codes() + array * GROUP_ROWS;
                let part = from.group_bytes(array)..from.group_bytes(array + 1);
                self.spread::<V, 1>(part.clone(), part.start + first, groups, to);
            }
            for array in 0..from.parts.block_halves {
                let to = |b| at(b * F::STEPS) - f.head + array * 2 * GROUP_ROWS;
                let part = from.block_halves(array)..from.block_halves(array + 1);
                let first = part.start + 2 * (first / F::STEPS);
                self.spread::<V, 2>(part, first, groups / F::STEPS, to);
            }
        }
    }

    /// Turns rows of plain floats of N bytes.
    ///
    /// # Safety
    /// The features of V are enabled, and N is the size of an element.
    #[inline(always)]
    pub(super) unsafe fn floats<V: Lanes, const N: usize>(mut self) {
        let (first, count) = (self.columns.start * N, self.columns.len());
        // SAFETY: `new` saw that the rows have these columns and `to` 16 values for each.
        unsafe {
            self.spread::<V, N>(0..self.width * N, first, count, |column| column * GROUP_ROWS * N);
        }
    }

    /// Fetches what comes `ahead` bytes after byte `at` of a part of each row, `part` being where it begins and ends;
    /// after its end comes that of the next rows. The 16 rows make as many streams, and memory serves them side by side
    /// faster than one after the other.
    ///
    /// # Safety
    /// The features of V are enabled.
    #[inline(always)]
    unsafe fn fetch<V: Lanes>(&self, part: Range<usize>, at: usize, ahead: usize) {
        let wanted = at + ahead;
        let (rows, wanted) =
            if wanted < part.end { (&self.rows, wanted) } else { (&self.next, wanted - part.len()) };
        // SAFETY: the features of V are enabled.
        rows.iter().for_each(|row| unsafe { V::prefetch(row.as_ptr().wrapping_add(wanted)) });
    }

    /// Writes value `i` of each row, N bytes (1, 2 or 4), to 16 places from `to(i)` on, and fetches values of the same
    /// `part` of the rows.
    ///
    /// # Safety
    /// The features of V are enabled; each row has `count` values from `first` on, and `self.to` has the places.
    #[inline(always)]
    unsafe fn spread<V: Lanes, const N: usize>(
        &mut self,
        part: Range<usize>,
        first: usize,
        count: usize,
        to: impl Fn(usize) -> usize,
    ) {
        for line in (first..first + N * count).step_by(LINE) {
            // SAFETY: the features of V are enabled.
            unsafe { self.fetch::<V>(part.clone(), line, AHEAD.min(N * count)) };
        }
        let rows = self.rows.map(<[u8]>::as_ptr);
        let out = self.to.as_mut_ptr();
        let at_once = 16 / N;
        let mut done = 0;
        // SAFETY: as for this function; a turn reads 16 bytes of values that are there.
        unsafe {
            while done + at_once <= count {
                let mut words = [[0u32; GROUP_ROWS]; 4];
                V::turn(&rows, first + N * done, words.as_mut_ptr().cast());
                for (word, words) in words.iter().enumerate() {
                    for part in 0..4 / N {
                        let out = out.add(to(done + word * (4 / N) + part));
                        let shift = (8 * N * part) as u32;
                        match N {
                            4 => out.cast::<[u32; GROUP_ROWS]>().write_unaligned(*words),
                            2 => {
                                let halves = words.map(|word| (word >> shift) as u16);
                                out.cast::<[u16; GROUP_ROWS]>().write_unaligned(halves);
                            }
                            _ => {
                                let bytes = words.map(|word| (word >> shift) as u8);
                                out.cast::<[u8; GROUP_ROWS]>().write_unaligned(bytes);
                            }
                        }
                    }
                }
                done += at_once;
            }
            for i in done..count {
                for (r, row) in rows.iter().enumerate() {
                    row.add(first + N * i).copy_to_nonoverlapping(out.add(to(i) + N * r), N);
                }
            }
        }
    }
}
