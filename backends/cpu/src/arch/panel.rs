//! Columns of down rows, widened side by side: with many tokens their sums are a product of floats.
//!
//! The sums of [`super::axpy`] are loaded and stored for every few neurons and tokens. A panel is a packed group of
//! F32 whose columns are neurons, so a kernel of dense layers keeps the sums of a slice in registers. The law is the
//! same: a slice has one sum, which takes its neurons in order.

use std::ops::Range;

use neuropil_device::quant::{BundleRow, GROUP};

use super::Axpy;
use super::axpy::widen;
use super::down::Down;
use super::lanes::Lanes;
use crate::pack::GROUP_ROWS;

/// Most columns of a panel.
pub(crate) const PANEL_COLUMNS: usize = 128;
/// Neurons from the fetch of a row to its use.
const AHEAD: usize = 8;

impl Axpy<'_> {
    /// Writes some columns of the neurons at those places of the list, as groups of F32: for each 16 columns, 16
    /// values of each neuron. What fills up the last group is left as it is.
    ///
    /// # Panics
    /// When there are no such neurons or columns, or more columns than [`PANEL_COLUMNS`], or they begin within 32, or
    /// `to` is no groups of them.
    ///
    /// # Safety
    /// The features of V are enabled, and D is the type of the rows.
    #[inline(always)]
    pub(super) unsafe fn panel<V: Lanes, D: Down>(
        &self,
        neurons: Range<usize>,
        columns: Range<usize>,
        to: &mut [f32],
    ) {
        let (first, count, last) = (columns.start, neurons.len(), neurons.end.saturating_sub(1));
        assert!(columns.end <= self.width() && first.is_multiple_of(GROUP) && columns.len() <= PANEL_COLUMNS);
        assert_eq!(to.len(), columns.len().div_ceil(GROUP_ROWS) * GROUP_ROWS * count, "{columns:?}");
        let to = to.as_mut_ptr();
        // Where the values of the i-th neuron in 16 columns begin.
        let place = |sixteen: usize, i: usize| to.wrapping_add((sixteen * count + i) * GROUP_ROWS);
        let layout = BundleRow::new(self.dtype(), self.width());
        let groups = columns.len() / GROUP;
        let mut scales = [[0.0; PANEL_COLUMNS / GROUP]; 2];
        for (i, index) in neurons.enumerate() {
            let (row, later) = (self.row(index), self.row(last.min(index + AHEAD)));
            // SAFETY: `new` saw that a row has all columns and scales; the places are inside `to`.
            unsafe {
                for byte in (D::offset(first)..D::offset(columns.end)).step_by(64) {
                    V::prefetch(later.wrapping_add(byte));
                }
                if let Some(layout) = layout {
                    for (array, scales) in scales.iter_mut().enumerate().take(layout.parts.group_halves) {
                        let at = layout.group_halves(array) + 2 * (first / GROUP);
                        V::prefetch(later.wrapping_add(at));
                        widen::<V>(row.add(at), groups, scales);
                    }
                }
                for (group, (d, m)) in scales[0].iter().zip(&scales[1]).enumerate().take(groups) {
                    let table = D::table::<V>(*d, *m);
                    let codes = row.add(D::offset(first + group * GROUP));
                    for part in (0..GROUP / 2).step_by(V::LANES) {
                        let halves = D::pair::<V>(codes, part, table);
                        for (half, weights) in halves.into_iter().enumerate() {
                            V::store(place(2 * group + half, i).add(part), weights);
                        }
                    }
                }
                // Only rows of plain floats end within a group.
                for column in groups * GROUP..columns.len() {
                    let weight = D::one(row.add(D::offset(first + column)));
                    *place(column / GROUP_ROWS, i).add(column % GROUP_ROWS) = weight;
                }
            }
        }
    }
}
