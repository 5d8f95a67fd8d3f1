//! Single neurons and many tokens: what is done once for each weight is cheap then, so both products become those of a
//! dense layer.
//!
//! With few tokens rows are turned a slice at a time, for the weights are what a core's cache must hold. With many it
//! is the tokens: whole groups of rows are turned, and the kernel chooses how many tokens share them. Down rows are
//! widened a slice at a time and multiplied as a dense matrix of floats.

use neuropil_device::quant::{GROUP, SLICE};
use neuropil_device::{BundleLayout, DType, OutOfMemory, Stage};

use crate::arch::{Axpy, Job, PANEL_COLUMNS};
use crate::device::CpuDevice;
use crate::kernels::{Groups, Input, Panels};
use crate::mem::Columns;
use crate::pack::{GROUP_ROWS, group_bytes};
use crate::sparse::Rows;

/// From so many tokens on down rows are widened once for all of them.
const MANY_FOR_DOWN: usize = 16;
/// From so many tokens on rows are turned whole.
const MANY_FOR_ROWS: usize = 64;
/// Bytes of turned rows that stay in a core's second cache.
const TURNED: usize = 256 << 10;

/// Whether down rows are widened for that many tokens.
pub(crate) fn widens_down(tokens: usize) -> bool {
    tokens >= MANY_FOR_DOWN
}

/// Groups of rows to turn whole at a time with so many tokens, if they are.
pub(crate) fn groups_turned(dtype: DType, width: usize, tokens: usize) -> Option<usize> {
    let bytes = group_bytes(dtype, width).filter(|bytes| *bytes > 0 && tokens >= MANY_FOR_ROWS)?;
    Some((TURNED / bytes).max(1))
}

impl CpuDevice {
    /// Makes room for a job with that many tokens.
    pub(crate) fn reserve_batch(
        &self,
        panels: &mut Panels,
        layout: &BundleLayout,
        stage: Stage,
        tokens: usize,
    ) -> Result<(), OutOfMemory> {
        let turned =
            groups_turned(layout.dtype, layout.width, tokens).filter(|_| stage.reads_x()).unwrap_or(0);
        let turned = turned * group_bytes(layout.dtype, layout.width).unwrap_or(0);
        let widened = if widens_down(tokens) && stage.has_down() {
            tokens.saturating_add(SLICE).saturating_mul(PANEL_COLUMNS * size_of::<f32>())
        } else {
            0
        };
        panels.reserve_bytes(self.crew.pool.threads(), turned.max(widened))
    }

    /// The next `groups` groups of rows for many tokens.
    pub(crate) fn whole_groups(
        &self,
        rows: &Rows<'_>,
        input: Input<'_>,
        columns: &Columns<'_>,
        groups: usize,
        panels: &Panels,
    ) {
        let Some(mut range) = columns.claim(groups) else { return };
        let (dtype, width) = (rows.dtype, rows.width);
        let bytes_of = |columns| group_bytes(dtype, columns).unwrap_or(0);
        panels.with(|panel| {
            let panel = &mut panel.as_mut()[..range.groups().len() * bytes_of(width)];
            let mut turned = panel.chunks_exact_mut(bytes_of(width));
            rows.each_group(range.groups(), |_, rows| {
                let Some(mut left) = turned.next() else { return };
                for start in (0..width).step_by(SLICE) {
                    let columns = start..width.min(start + SLICE);
                    let (slice, rest) = left.split_at_mut(bytes_of(columns.len()));
                    self.crew.isa.gather(rows, columns, slice);
                    left = rest;
                }
            });
            let w = Groups::panel(dtype, 0..width, panel);
            let out = &mut range.counted_from_zero();
            self.crew.isa.matmul(&mut Job { w, input, pitch: width, out, accumulate: false });
        });
    }

    /// `y[tokens, width] (+)= hidden · down rows` for many tokens.
    pub(crate) fn down_of_many(&self, job: &Axpy<'_>, panels: &Panels, y: &mut [f32]) {
        let (tokens, width) = (job.tokens(), job.width());
        let columns = Columns::new(y, tokens, width, width);
        // Both halves of 32 columns are widened together.
        let pairs = width.div_ceil(GROUP);
        let pairs_per_chunk = self.crew.pool.chunk_len(pairs, 1).min(PANEL_COLUMNS / GROUP);
        self.crew.pool.run("down", pairs.div_ceil(pairs_per_chunk), &|_| {
            let Some(mut out) = columns.claim(pairs_per_chunk * GROUP / GROUP_ROWS) else { return };
            panels.with(|room| {
                let room: &mut [f32] = bytemuck::cast_slice_mut(room.as_mut());
                let wide = out.groups().len() * GROUP_ROWS;
                let (panel, sums) = room.split_at_mut(wide * SLICE);
                let sums = &mut sums[..tokens * wide];
                for (t, sums) in sums.chunks_exact_mut(wide).enumerate() {
                    let y = out.token_mut(t);
                    job.start(&mut sums[..y.len()], y);
                }
                for neurons in job.slices() {
                    let panel = &mut panel[..wide * neurons.len()];
                    self.crew.isa.down_panel(job, neurons.clone(), out.rows(), panel);
                    let w = Groups::panel(DType::F32, neurons, bytemuck::cast_slice(panel));
                    let Some(mut sums) = Columns::new(sums, tokens, wide, wide).claim(usize::MAX) else {
                        return;
                    };
                    let (hidden, pitch) = job.hidden();
                    let (input, out) = (Input::Floats(hidden), &mut sums);
                    self.crew.isa.matmul(&mut Job { w, input, pitch, out, accumulate: true });
                }
                for (t, sums) in sums.chunks_exact(wide).enumerate() {
                    let y = out.token_mut(t);
                    y.copy_from_slice(&sums[..y.len()]);
                }
            });
        });
    }
}
