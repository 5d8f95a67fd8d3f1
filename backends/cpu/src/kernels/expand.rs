//! Products with weights that are widened to F32 first.
//!
//! A kernel of their own for each rare format would be much code for little use. Instead 16 rows are widened into a
//! *panel*, the packed layout of F32, and the F32 kernels read it. That is done once per group and product, so a
//! prompt of many tokens hardly notices; a single token does. The weight stays in memory as it lies in the file.
//!
//! A panel is working memory of a job: it is made before threads fork, one for each, and kept from job to job. So a
//! product cannot fail half-way, and a decoded token allocates nothing.

use std::sync::{Mutex, PoisonError};

use neuropil_device::quant::{BlockIq4Nl, BlockIq4Xs, BlockMxfp4, BlockQ2K, BlockQ3K, ExpandedBlock, GROUP};
use neuropil_device::{AlignedBytes, DType, OutOfMemory};

use super::Input;
use super::groups::Groups;
use crate::arch::{HostOp, Isa, Job};
use crate::mem::ColumnRange;
use crate::pack::{GROUP_ROWS, Packed, group_bytes};

/// Columns that a weight may have if it is to be expanded: its panels take 16 MiB then.
pub(crate) const MOST_COLS: usize = 1 << 18;

/// Room for widened rows, for several threads.
#[derive(Debug, Default)]
pub struct Panels {
    idle: Mutex<Vec<AlignedBytes>>,
}

impl Panels {
    /// No room yet.
    pub const fn new() -> Panels {
        Panels { idle: Mutex::new(Vec::new()) }
    }

    /// Makes room for `threads` threads that multiply weights of at most `cols` columns at once.
    ///
    /// # Errors
    /// [`OutOfMemory`].
    pub fn reserve(&mut self, threads: usize, cols: usize) -> Result<(), OutOfMemory> {
        self.reserve_bytes(threads, group_bytes(DType::F32, cols).ok_or(OutOfMemory(usize::MAX))?)
    }

    /// Makes room for `threads` threads that take `len` bytes each.
    pub(crate) fn reserve_bytes(&mut self, threads: usize, len: usize) -> Result<(), OutOfMemory> {
        if len == 0 {
            return Ok(());
        }
        let idle = self.idle.get_mut().unwrap_or_else(PoisonError::into_inner);
        idle.retain(|panel| panel.as_ref().len() >= len);
        let more = threads.saturating_sub(idle.len());
        idle.try_reserve_exact(more).map_err(|_| OutOfMemory(more * size_of::<AlignedBytes>()))?;
        for _ in 0..more {
            idle.push(AlignedBytes::zeroed(len)?);
        }
        Ok(())
    }

    /// Calls `work` with a panel.
    ///
    /// # Panics
    /// When more threads call it at once than there is room for.
    pub(crate) fn with(&self, work: impl FnOnce(&mut AlignedBytes)) {
        let lock = || self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        let panel = lock().pop();
        let mut panel = panel.expect("there is a panel for each thread");
        work(&mut panel);
        lock().push(panel);
    }
}

/// Computes the rows of `out`, whose shape was checked, from a weight that [`DType::is_expanded`].
pub(super) fn matmul(
    isa: Isa,
    w: &Packed,
    x: &[f32],
    panels: &Panels,
    out: &mut ColumnRange<'_>,
    accumulate: bool,
) {
    if out.tokens() == 0 {
        return;
    }
    if w.cols() == 0 {
        // What is left are sums of nothing, for which there need be no room.
        let w = Groups::panel(DType::F32, 0..0, &[]);
        return isa.matmul(&mut Job { w, input: Input::Floats(x), pitch: 0, out, accumulate });
    }
    panels.with(|panel| {
        let panel = &mut panel.as_mut()[..group_bytes(DType::F32, w.cols()).unwrap_or(0)];
        for group in out.groups() {
            let rows = &w.bytes()[group * w.group_bytes()..][..w.group_bytes()];
            isa.host(HostOp::Expand { dtype: w.dtype(), rows, panel: bytemuck::cast_slice_mut(panel) });
            let (w, pitch) = (Groups::panel(DType::F32, 0..w.cols(), panel), w.cols());
            let out = &mut out.group(group);
            isa.matmul(&mut Job { w, input: Input::Floats(x), pitch, out, accumulate });
        }
    });
}

/// Widens 16 rows of type `dtype`, one after the other, into a panel: for each column 16 values.
#[inline(always)]
pub(crate) fn expand(dtype: DType, rows: &[u8], panel: &mut [f32]) {
    match dtype {
        DType::Q2_K => expand_blocks::<BlockQ2K>(rows, panel),
        DType::Q3_K => expand_blocks::<BlockQ3K>(rows, panel),
        DType::IQ4_NL => expand_blocks::<BlockIq4Nl>(rows, panel),
        DType::IQ4_XS => expand_blocks::<BlockIq4Xs>(rows, panel),
        DType::MXFP4 => expand_blocks::<BlockMxfp4>(rows, panel),
        _ => unreachable!("kernels read {dtype} as it is"),
    }
}

#[inline(always)]
fn expand_blocks<B: ExpandedBlock>(rows: &[u8], panel: &mut [f32]) {
    let blocks: &[B] = bytemuck::cast_slice(rows);
    let per_row = blocks.len() / GROUP_ROWS;
    let (columns, _) = panel.as_chunks_mut::<GROUP_ROWS>();
    let mut part = [[0.0; GROUP]; GROUP_ROWS];
    for (b, columns) in columns.chunks_exact_mut(B::GROUPS * GROUP).enumerate() {
        for (g, columns) in columns.chunks_exact_mut(GROUP).enumerate() {
            for (r, part) in part.iter_mut().enumerate() {
                blocks[r * per_row + b].expand(g, part);
            }
            for (k, column) in columns.iter_mut().enumerate() {
                for (value, part) in column.iter_mut().zip(&part) {
                    *value = part[k];
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use neuropil_device::quant::dequantize_row;

    #[test]
    fn a_panel_has_the_values_of_the_rows_side_by_side() {
        for dtype in DType::ALL.into_iter().filter(|d| d.is_expanded()) {
            let cols = 512;
            let row = dtype.row_bytes(cols).unwrap();
            let bytes: Vec<u8> = (0..row * GROUP_ROWS).map(|i| (i * 7919 % 251) as u8).collect();
            let mut want = vec![0.0; cols * GROUP_ROWS];
            dequantize_row(dtype, &bytes, &mut want);
            for isa in Isa::all_available() {
                let mut panel = vec![0.0; cols * GROUP_ROWS];
                isa.host(HostOp::Expand { dtype, rows: &bytes, panel: &mut panel });
                for (i, got) in panel.iter().enumerate() {
                    let want: f32 = want[i % GROUP_ROWS * cols + i / GROUP_ROWS];
                    assert!(
                        got.to_bits() == want.to_bits() || got.is_nan() && want.is_nan(),
                        "{dtype} {isa:?}"
                    );
                }
            }
        }
    }

    #[test]
    fn room_is_kept_while_it_suffices() {
        let mut panels = Panels::new();
        panels.reserve(2, 64).unwrap();
        let at = |panels: &Panels| {
            let mut at = 0;
            panels.with(|a| panels.with(|b| at = a.as_ref().as_ptr().addr() ^ b.as_ref().as_ptr().addr()));
            at
        };
        let before = at(&panels);
        panels.reserve(2, 32).unwrap();
        assert_eq!(at(&panels), before);
        assert!(panels.reserve(1, usize::MAX / 8).is_err() && panels.reserve(1, usize::MAX).is_err());
    }
}
