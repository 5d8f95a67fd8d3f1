//! Turns the rows of 16 neurons into a packed group of rows.
//!
//! A neuron is read alone, so its row lies alone ([`neuropil_device::quant::bundle_row`]), but kernels want 16 rows side
//! by side. The parts of a row are laid out so that the turn is one operation: four times four bytes of 16 rows at
//! once, [`Lanes::turn`]. It is done for as many columns as stay in a core's first cache, where the kernel reads them
//! next, so the neurons' bytes cross the memory bus once, as those of a dense weight do, and the sums are the same.

use std::marker::PhantomData;
use std::ops::Range;

use neuropil_device::DType;
use neuropil_device::quant::{BundleRow, GROUP, SLICE, bundle_row_bytes};

use super::format::Format;
use super::lanes::Lanes;
use crate::pack::{GROUP_ROWS, VECTOR};

/// Bytes that one fetch brings.
const LINE: usize = 64;
/// Slices from the fetch of a row to its use.
const AHEAD: usize = 2;

/// 16 rows to turn, and those that come next.
pub(crate) struct Gather<'a> {
    dtype: DType,
    /// Elements of a row.
    width: usize,
    rows: [*const u8; GROUP_ROWS],
    next: [*const u8; GROUP_ROWS],
    lifetime: PhantomData<&'a [u8]>,
}

impl<'a> Gather<'a> {
    /// 16 rows of `width` elements; near their end the `next` rows are fetched into the core's cache.
    ///
    /// # Panics
    /// When a row has another length.
    pub fn new(
        dtype: DType,
        width: usize,
        rows: [&'a [u8]; GROUP_ROWS],
        next: [&'a [u8]; GROUP_ROWS],
    ) -> Gather<'a> {
        // The unsafe code below stands on it.
        let bytes = bundle_row_bytes(dtype, width);
        assert!(rows.iter().all(|row| Some(row.len()) == bytes), "rows are {width} elements of {dtype}");
        let [rows, next] = [rows, next].map(|rows| rows.map(<[u8]>::as_ptr));
        Gather { dtype, width, rows, next, lifetime: PhantomData }
    }

    /// Type of the rows.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Writes columns `columns`, whole blocks, as a packed group of format F.
    ///
    /// # Panics
    /// When there are no such columns or `to` is no group of them.
    ///
    /// # Safety
    /// The features of V are enabled, and F is the format of the rows.
    #[inline(always)]
    pub(super) unsafe fn quantized<V: Lanes, F: Format>(&self, columns: Range<usize>, to: &mut [u8]) {
        let Some(from) = BundleRow::new(F::DTYPE, self.width) else { return };
        let f = F::PACKED;
        let block = f.head + F::STEPS * f.step();
        let (first, groups) = (columns.start / GROUP, columns.len() / GROUP);
        assert!(columns.end <= self.width && columns.start.is_multiple_of(F::STEPS * GROUP));
        assert_eq!(to.len(), groups / F::STEPS * block, "a group of columns {columns:?}");
        // Where the codes of the g-th group of these columns go.
        let at = |g: usize| g / F::STEPS * block + f.head + g % F::STEPS * f.step();
        let code_bytes = from.parts.code_bytes();
        let rows = &self.rows;
        let (later, later_group) = self.later(columns.start);
        let to = to.as_mut_ptr();
        // SAFETY: `new` saw that each row has all its parts, and `to` has the places of these groups.
        unsafe {
            let at_once = LINE / code_bytes;
            let mut done = 0;
            while done + at_once <= groups {
                // Pieces of 16 bytes: groups of narrow codes, halves of groups of bytes.
                let mut places = [to; 4];
                for (piece, place) in places.iter_mut().enumerate() {
                    let (group, half) = if code_bytes == GROUP { (piece / 2, piece % 2) } else { (piece, 0) };
                    *place = to.add(at(done + group) + 4 * VECTOR * half);
                }
                let (from, ahead) = ((first + done) * code_bytes, (later_group + done) * code_bytes);
                V::turn_line(rows, from, later, ahead, places);
                done += at_once;
            }
            for g in done..groups {
                for part in (0..code_bytes).step_by(16) {
                    V::turn(rows, (first + g) * code_bytes + part, to.add(at(g) + 4 * VECTOR * (part / 16)));
                }
            }
            if f.bits == 8 {
                // Kernels take unsigned codes.
                for g in 0..groups {
                    let codes = to.add(at(g)).cast::<[u8; 8 * VECTOR]>();
                    (*codes).iter_mut().for_each(|code| *code ^= 0x80);
                }
            }
            for plane in 0..from.parts.planes() {
                let place = |g| to.add(at(g) + (4 + plane) * VECTOR);
                self.spread::<V, 4>(from.plane(plane), first, groups, (later, later_group), place);
            }
            for array in 0..from.parts.group_halves {
                let place = |g| to.add(at(g) + f.codes() + array * 2 * GROUP_ROWS);
                self.spread::<V, 2>(from.group_halves(array), first, groups, (later, later_group), place);
            }
            for array in 0..from.parts.group_bytes {
                let place = |g| to.add(at(g) + f.codes() + array * GROUP_ROWS);
                self.spread::<V, 1>(from.group_bytes(array), first, groups, (later, later_group), place);
            }
            for array in 0..from.parts.block_halves {
                let place = |b| to.add(b * block + array * 2 * GROUP_ROWS);
                let later = (later, later_group / F::STEPS);
                let (first, blocks) = (first / F::STEPS, groups / F::STEPS);
                self.spread::<V, 2>(from.block_halves(array), first, blocks, later, place);
            }
        }
    }

    /// Writes columns `columns` of plain floats of N bytes as a packed group.
    ///
    /// # Panics
    /// As [`Gather::quantized`].
    ///
    /// # Safety
    /// The features of V are enabled, and N is the size of an element.
    #[inline(always)]
    pub(super) unsafe fn floats<V: Lanes, const N: usize>(&self, columns: Range<usize>, to: &mut [u8]) {
        assert!(columns.end <= self.width);
        assert_eq!(to.len(), columns.len() * GROUP_ROWS * N, "a group of columns {columns:?}");
        let to = to.as_mut_ptr();
        let (later, later_group) = self.later(columns.start);
        let place = |column| {
            // SAFETY: `to` has 16 values for each column.
            unsafe { to.add(column * GROUP_ROWS * N) }
        };
        // SAFETY: `new` saw that the rows have these columns.
        unsafe { self.spread::<V, N>(0, columns.start, columns.len(), (later, later_group * GROUP), place) }
    }

    /// The rows to fetch while the slice that begins at column `start` is turned, and the group of 32 columns from which
    /// on: those that are turned [`AHEAD`] slices later.
    #[inline(always)]
    fn later(&self, start: usize) -> (&[*const u8; GROUP_ROWS], usize) {
        let slices = self.width.div_ceil(SLICE);
        let later = start / SLICE + AHEAD;
        let (rows, slice) =
            if later < slices { (&self.rows, later) } else { (&self.next, (later - slices).min(slices - 1)) };
        (rows, slice * SLICE / GROUP)
    }

    /// Writes values `first..first + count` of an array of values of N bytes (1, 2 or 4), which begins at byte `start` of
    /// each row, to 16 places each, from `place(0)`, `place(1)`, ... on. Fetches as many values of the `later` rows, from
    /// that value on.
    ///
    /// # Safety
    /// The features of V are enabled; each row has the values, and the places are there.
    #[inline(always)]
    unsafe fn spread<V: Lanes, const N: usize>(
        &self,
        start: usize,
        first: usize,
        count: usize,
        (later, later_value): (&[*const u8; GROUP_ROWS], usize),
        place: impl Fn(usize) -> *mut u8,
    ) {
        let rows = &self.rows;
        let at_once = 16 / N;
        let mut done = 0;
        // SAFETY: as for this function; a turn reads 16 bytes of values that are there.
        unsafe {
            while done + at_once <= count {
                if (N * done).is_multiple_of(LINE) {
                    let ahead = start + N * (later_value + done);
                    later.iter().for_each(|row| V::prefetch(row.wrapping_add(ahead)));
                }
                let mut words = [[0u32; GROUP_ROWS]; 4];
                V::turn(rows, start + N * (first + done), words.as_mut_ptr().cast());
                for (word, words) in words.iter().enumerate() {
                    for part in 0..4 / N {
                        let place = place(done + word * (4 / N) + part);
                        let shift = (8 * N * part) as u32;
                        match N {
                            4 => place.cast::<[u32; GROUP_ROWS]>().write_unaligned(*words),
                            2 => {
                                let mut halves = [0u16; GROUP_ROWS];
                                (0..GROUP_ROWS).for_each(|r| halves[r] = (words[r] >> shift) as u16);
                                place.cast::<[u16; GROUP_ROWS]>().write_unaligned(halves);
                            }
                            _ => {
                                let mut bytes = [0u8; GROUP_ROWS];
                                (0..GROUP_ROWS).for_each(|r| bytes[r] = (words[r] >> shift) as u8);
                                place.cast::<[u8; GROUP_ROWS]>().write_unaligned(bytes);
                            }
                        }
                    }
                }
                done += at_once;
            }
            for i in done..count {
                for (r, row) in rows.iter().enumerate() {
                    row.add(start + N * (first + i)).copy_to_nonoverlapping(place(i).add(N * r), N);
                }
            }
        }
    }
}
