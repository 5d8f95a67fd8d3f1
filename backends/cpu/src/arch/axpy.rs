//! The down rows of active neurons, added up: `y[t, c] (+)= Σ_n hidden[t, n] · down[n, c]`.
//!
//! The law is that of float weights, with the neurons of a layer as K: each slice of 512 positions has its own sum,
//! which takes its neurons in order. Lanes are columns. A few neurons go side by side: they share the loads and stores
//! of the sums, and make several streams. A neuron that is left out would have added 0, so which neurons a job names
//! changes no bit as long as their hidden values are 0; nor does how columns are shared out among threads.

#![allow(clippy::needless_range_loop)] // sums over tokens and neurons index several arrays alike

use std::ops::Range;

use neuropil_device::quant::{BundleRow, GROUP, SLICE, bundle_row_bytes};
use neuropil_device::{DType, PinnedSlots};

use super::down::Down;
use super::lanes::Lanes;
use crate::mem::ColumnRange;
use crate::pack::GROUP_ROWS;

/// Neurons side by side.
const TOGETHER: usize = 4;
/// Most tokens that share a widened weight.
const TOKENS: usize = 4;
/// Sums of a strip of columns for all tokens of a tile: what stays in a core's first cache twice.
const SUMS: usize = 2048;

/// Down rows to add up.
pub(crate) struct Axpy<'a> {
    dtype: DType,
    width: usize,
    slots: &'a PinnedSlots,
    at: usize,
    positions: &'a [u32],
    neurons: &'a [u32],
    hidden: &'a [f32],
    pitch: usize,
    tokens: usize,
    accumulate: bool,
}

impl<'a> Axpy<'a> {
    /// Adds up the down rows, of `width` elements from byte `at` of each slot on, of those slots that `neurons` lists in
    /// ascending order; `positions` are those of all slots, and `hidden` is `[tokens, neurons]`, each token `pitch`
    /// behind the one before.
    ///
    /// # Panics
    /// When the rows do not lie in the slots, or a neuron has no slot or position, or `hidden` has another length.
    pub fn new(
        (dtype, width, at): (DType, usize, usize),
        slots: &'a PinnedSlots,
        positions: &'a [u32],
        neurons: &'a [u32],
        (hidden, pitch): (&'a [f32], usize),
        tokens: usize,
        accumulate: bool,
    ) -> Axpy<'a> {
        // The unsafe code below stands on these.
        let end = bundle_row_bytes(dtype, width).and_then(|bytes| at.checked_add(bytes));
        assert!(end.is_some_and(|end| end <= slots.slot_bytes()), "a down row lies in its slot");
        let count = slots.len().min(positions.len());
        assert!(neurons.iter().all(|n| (*n as usize) < count), "a neuron has a slot and a position");
        assert!(neurons.len() <= pitch, "a token has all neurons");
        assert_eq!(Some(hidden.len()), tokens.checked_mul(pitch), "hidden is tokens x neurons");
        Axpy { dtype, width, slots, at, positions, neurons, hidden, pitch, tokens, accumulate }
    }

    /// Type of the rows.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Columns of the rows.
    pub fn width(&self) -> usize {
        self.width
    }

    /// Tokens.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// The hidden values, and how far apart those of two tokens are.
    pub fn hidden(&self) -> (&'a [f32], usize) {
        (self.hidden, self.pitch)
    }

    /// The places in the list of the neurons of each slice that has some.
    pub fn slices(&self) -> impl Iterator<Item = Range<usize>> {
        let slice = |neuron: u32| self.positions[neuron as usize] as usize / SLICE;
        let mut end = 0;
        self.neurons.chunk_by(move |a, b| slice(*a) == slice(*b)).map(move |neurons| {
            let start = end;
            end += neurons.len();
            start..end
        })
    }

    /// What the sums start with: 0, or what the slices before these gave.
    #[inline(always)]
    pub fn start(&self, sums: &mut [f32], y: &[f32]) {
        if self.accumulate { sums.copy_from_slice(y) } else { sums.fill(0.0) }
    }

    /// Groups of 16 columns that a thread takes at a time, of `width` columns that `threads` share.
    pub fn groups_per_chunk(width: usize, tokens: usize, threads: usize) -> usize {
        let most = SUMS / tokens.clamp(1, TOKENS).next_power_of_two();
        // Strips begin on a cache line of 4-bit codes.
        let share = width.div_ceil(threads.max(1)).next_multiple_of(4 * GROUP);
        share.min(most) / GROUP_ROWS
    }

    /// Computes some columns.
    ///
    /// # Safety
    /// The features of V are enabled, and D is the type of the rows.
    #[inline(always)]
    pub(super) unsafe fn run<V: Lanes, D: Down>(&self, out: &mut ColumnRange<'_>) {
        let mut sums = [[0.0; SUMS]; 2];
        let mut t = 0;
        while t < self.tokens {
            // SAFETY: as for this function; the tile's tokens are there.
            t += unsafe {
                match self.tokens - t {
                    4.. => self.tile::<V, D, 4>(out, t, &mut sums),
                    2.. => self.tile::<V, D, 2>(out, t, &mut sums),
                    _ => self.tile::<V, D, 1>(out, t, &mut sums),
                }
            };
        }
    }

    /// The sums of T tokens from `t` on; returns T.
    ///
    /// # Safety
    /// As for [`Axpy::run`].
    #[inline(always)]
    unsafe fn tile<V: Lanes, D: Down, const T: usize>(
        &self,
        out: &mut ColumnRange<'_>,
        t: usize,
        [acc, total]: &mut [[f32; SUMS]; 2],
    ) -> usize {
        let columns = out.rows();
        let width = columns.len();
        let (acc, total) = (&mut acc[..T * width], &mut total[..T * width]);
        for (i, total) in total.chunks_exact_mut(width.max(1)).enumerate() {
            self.start(total, out.token_mut(t + i));
        }
        for slice in self.slices() {
            acc.fill(0.0);
            let mut at = slice.start;
            while at < slice.end {
                // SAFETY: as for this function; the neurons are there, and `acc` has the columns of T tokens.
                at += unsafe {
                    match slice.end - at {
                        TOGETHER.. => self.rows::<V, D, T, TOGETHER>(at, t, columns.start, acc),
                        _ => self.rows::<V, D, T, 1>(at, t, columns.start, acc),
                    }
                };
            }
            total.iter_mut().zip(acc.iter()).for_each(|(total, acc)| *total += acc);
        }
        for (i, total) in total.chunks_exact(width.max(1)).enumerate() {
            out.token_mut(t + i).copy_from_slice(total);
        }
        T
    }

    /// The row of the neuron at a place of the list.
    pub(super) fn row(&self, index: usize) -> *const u8 {
        self.slots.bytes(self.neurons[index] as usize)[self.at..].as_ptr()
    }

    /// Adds columns from `first` on of R neurons from the `at`-th on to the sums of T tokens; returns R.
    ///
    /// # Safety
    /// As for [`Axpy::run`]; the neurons and tokens are there, and `acc` holds T rows of columns that are there.
    #[inline(always)]
    unsafe fn rows<V: Lanes, D: Down, const T: usize, const R: usize>(
        &self,
        at: usize,
        t: usize,
        first: usize,
        acc: &mut [f32],
    ) -> usize {
        let width = acc.len() / T;
        let mut hidden = [[0.0; R]; T];
        for (i, hidden) in hidden.iter_mut().enumerate() {
            hidden.copy_from_slice(&self.hidden[(t + i) * self.pitch + at..][..R]);
        }
        let layout = BundleRow::new(self.dtype, self.width);
        let mut rows = [std::ptr::null(); R];
        let mut next = [std::ptr::null(); R];
        let mut scales = [[[0.0f32; SUMS / GROUP]; 2]; R];
        let groups = width / GROUP;
        for r in 0..R {
            let row = self.row(at + r);
            // Rows that come next are fetched while these are used.
            let later = self.row((at + R + r).min(self.neurons.len() - 1));
            // SAFETY: the row lies in its slot; a place in it is computed from its own layout.
            unsafe {
                rows[r] = row.add(D::offset(first));
                next[r] = later.add(D::offset(first));
                if let Some(layout) = layout {
                    for array in 0..layout.parts.group_halves {
                        let at = layout.group_halves(array) + 2 * (first / GROUP);
                        widen::<V>(row.add(at), groups, &mut scales[r][array]);
                        (0..2 * groups)
                            .step_by(64)
                            .for_each(|line| V::prefetch(later.wrapping_add(at + line)));
                    }
                }
            }
        }
        // SAFETY: the columns are below `width`, and a row has as many.
        unsafe {
            for group in 0..groups {
                let column = group * GROUP;
                let byte = D::offset(column);
                if byte.is_multiple_of(64) {
                    next.iter().for_each(|row| V::prefetch(row.wrapping_add(byte)));
                }
                let mut tables = [D::table::<V>(0.0, 0.0); R];
                for r in 0..R {
                    tables[r] = D::table::<V>(scales[r][0][group], scales[r][1][group]);
                }
                for part in (0..GROUP / 2).step_by(V::LANES) {
                    let at = |t: usize, half: usize| t * width + column + part + half * (GROUP / 2);
                    let mut sums = [[V::splat(0.0); 2]; T];
                    for t in 0..T {
                        for half in 0..2 {
                            sums[t][half] = V::load_f32(acc.as_ptr().add(at(t, half)).cast());
                        }
                    }
                    for r in 0..R {
                        let w = D::pair::<V>(rows[r].add(byte), part, tables[r]);
                        for t in 0..T {
                            let h = V::splat(hidden[t][r]);
                            for half in 0..2 {
                                sums[t][half] = V::fma(w[half], h, sums[t][half]);
                            }
                        }
                    }
                    for t in 0..T {
                        for half in 0..2 {
                            V::store(acc.as_mut_ptr().add(at(t, half)), sums[t][half]);
                        }
                    }
                }
            }
            // Only rows of plain floats end within a group.
            for column in groups * GROUP..width {
                for t in 0..T {
                    for r in 0..R {
                        let w = D::one(rows[r].add(D::offset(column)));
                        let sum = &mut acc[t * width + column];
                        *sum = w.mul_add(hidden[t][r], *sum);
                    }
                }
            }
        }
        R
    }
}

/// Widens `count` f16.
///
/// # Safety
/// The features of V are enabled, `from` is good for them, and `to` has room.
#[inline(always)]
pub(super) unsafe fn widen<V: Lanes>(from: *const u8, count: usize, to: &mut [f32]) {
    let mut done = 0;
    // SAFETY: as for this function. What does not fill a vector is copied, so nothing behind it is read.
    unsafe {
        while done + V::LANES <= count {
            V::store(to.as_mut_ptr().add(done), V::load_f16(from.add(2 * done)));
            done += V::LANES;
        }
        if done < count {
            let (mut halves, mut floats) = ([0u8; 2 * GROUP_ROWS], [0.0; GROUP_ROWS]);
            from.add(2 * done).copy_to_nonoverlapping(halves.as_mut_ptr(), 2 * (count - done));
            V::store(floats.as_mut_ptr(), V::load_f16(halves.as_ptr()));
            to[done..count].copy_from_slice(&floats[..count - done]);
        }
    }
}
