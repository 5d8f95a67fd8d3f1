//! The feed-forward of single neurons, from bundles in an arena (PowerInfer-2 section 4.1).
//!
//! Gate and up rows are turned, 16 neurons at a time, into the groups that the dense kernels take, so a neuron's value
//! has the bits that it has in a dense layer. What the gate switches off for every token is not computed further. The
//! down rows of the others are added up column by column. With many tokens both are done as [`crate::batch`] says.

use std::ops::Range;

use neuropil_device::quant::{SLICE, bundle_row_bytes};
use neuropil_device::{
    ClusterJob, ClusterWeights, DType, Device, DeviceError, OutOfMemory, PinnedSlots, Stage, WriteLease,
};

use crate::arch::{Axpy, DOWN_TYPES, Gather, HostOp, Job};
use crate::batch::{groups_turned, widens_down};
use crate::device::{CpuDevice, Scratch, check_len, input_for, room};
use crate::kernels::{Groups, Input, Panels};
use crate::mem::{Claims, ColumnRange, Columns};
use crate::pack::{GROUP_ROWS, group_bytes};

/// Bytes of a slice of 16 rows of any quantised type, and of any type.
const QUANTIZED_PANEL: usize = 16 * 544;
const FLOAT_PANEL: usize = SLICE * GROUP_ROWS * 4;

/// Groups that a thread takes at least where all have work: the rows of its first group are not fetched ahead.
const FEW_GROUPS: usize = 4;

/// Hidden values that one thread computes faster than a fork takes.
const FEW_VALUES: usize = 1 << 11;

/// A slice of 16 rows, packed.
#[repr(align(64))]
struct Turned<const N: usize>([u8; N]);

/// Rows of some neurons, all from the same byte of their slots.
pub(crate) struct Rows<'a> {
    slots: &'a PinnedSlots,
    /// Which slots; all when absent.
    neurons: Option<&'a [u32]>,
    pub dtype: DType,
    pub width: usize,
    at: usize,
}

impl Rows<'_> {
    fn count(&self) -> usize {
        self.neurons.map_or(self.slots.len(), <[u32]>::len)
    }

    fn row(&self, index: usize, bytes: usize) -> &[u8] {
        let slot = self.neurons.map_or(index, |neurons| neurons[index] as usize);
        &self.slots.bytes(slot)[self.at..][..bytes]
    }

    /// Calls `work` with each of some groups and its rows.
    pub fn each_group(&self, groups: Range<usize>, mut work: impl FnMut(usize, &Gather<'_>)) {
        let Some(bytes) = bundle_row_bytes(self.dtype, self.width) else { return };
        // A group that is not full repeats its last row.
        let last = self.count().min(groups.end * GROUP_ROWS) - 1;
        let of = |group: usize| std::array::from_fn(|r| self.row(last.min(group * GROUP_ROWS + r), bytes));
        let mut neurons = of(groups.start);
        for group in groups {
            let next = of(group + 1);
            work(group, &Gather::new(self.dtype, self.width, neurons, next));
            neurons = next;
        }
    }
}

impl CpuDevice {
    /// Computes a job whose weights are bundles.
    pub(crate) fn bundles(&self, job: &mut ClusterJob) -> Result<(), DeviceError> {
        let ClusterWeights::Bundles { layout, slots, positions } = &job.weights else {
            return Err(self.unsupported("a block of neurons as bundles"));
        };
        let stage = job.stage;
        layout.check(slots.slot_bytes())?;
        if stage.reads_x() && layout.dtype.is_expanded() {
            return Err(self.unsupported(&gate_type(layout.dtype)));
        }
        if stage.has_down() && !DOWN_TYPES.contains(&layout.down_dtype) {
            return Err(self.unsupported(&down_types(layout.down_dtype)));
        }
        let (tokens, neurons, width) = (job.tokens, slots.len(), layout.width);
        let x = job.x.slice::<f32>();
        let x_len = if stage.reads_x() { check_len("values of x", tokens, width, x.len())? } else { 0 };
        let x = &x[..x_len];
        // A stage that lacks a buffer has one of no length.
        let len = |lease: &Option<WriteLease>| lease.as_ref().map_or(0, |lease| lease.slice::<f32>().len());
        let most = if stage.has_hidden() { len(&job.hidden) } else { isize::MAX as usize / size_of::<f32>() };
        let values = check_len("values of hidden", tokens, neurons, most)?;
        let mut places = &[][..];
        if stage.has_down() {
            check_len("values of y", tokens, width, len(&job.y))?;
            let positions = positions.slice::<u32>();
            places = &positions[..check_len("positions", 1, neurons, positions.len())?];
            if !places.is_sorted_by(|a, b| a < b) {
                return Err(self.unsupported("neurons that are not in ascending order of position"));
            }
        }
        if tokens == 0 {
            return Ok(());
        }
        let given = job.hidden.as_mut().map_or(&mut [][..], |lease| lease.slice_mut::<f32>());
        let y = job.y.as_mut().map_or(&mut [][..], |lease| lease.slice_mut::<f32>());
        let activation = job.activation;
        let memory = |error| self.out_of_memory(error);
        self.with_scratch(|scratch| {
            if stage.reads_x() && layout.dtype.quantizes_activations() {
                self.quantize(&mut scratch.input, x, tokens, width)?;
            }
            self.reserve_batch(&mut scratch.panels, layout, stage, tokens).map_err(memory)?;
            let Scratch { input, panels, gate, up, hidden_active: hidden, active, .. } = scratch;
            let input = input_for(layout.dtype, x, input, panels);
            let gate_rows = Rows { slots, neurons: None, dtype: layout.dtype, width, at: layout.gate };

            let given =
                if stage.has_hidden() { &mut given[..values] } else { room(gate, values).map_err(memory)? };
            if stage.has_gate() {
                self.rows(&gate_rows, (input, panels), tokens, given);
            }
            if stage == Stage::Gate {
                return Ok(());
            }
            let is_off = |value: f32| if stage.has_up() { activation.is_off(value) } else { value == 0.0 };
            let off = |n: usize| (0..tokens).all(|t| is_off(given[t * neurons + n]));
            list(active, neurons, |n| !off(n)).map_err(memory)?;

            let pitch = pitch(active.len());
            let hidden = room(hidden, tokens.saturating_mul(pitch)).map_err(memory)?;
            if stage.has_up() {
                let up = room(up, tokens * active.len()).map_err(memory)?;
                let up_rows = Rows { neurons: Some(active), at: layout.up, ..gate_rows };
                self.rows(&up_rows, (input, panels), tokens, up);
                self.pick((given, neurons), active, (hidden, pitch), &|t, gate| {
                    let up = &up[t * gate.len()..][..gate.len()];
                    self.crew.isa.host(HostOp::Activate { activation, gate, up });
                });
            } else {
                self.pick((given, neurons), active, (hidden, pitch), &|_, _| {});
            }
            if stage.writes_hidden() {
                self.put((hidden, pitch), active, (given, neurons));
                return Ok(());
            }
            if stage.has_up() {
                drop_zeros(hidden, pitch, active);
            }
            let rows = (layout.down_dtype, width, layout.down);
            let down = Axpy::new(rows, slots, places, active, (hidden, pitch), tokens, job.accumulate);
            if widens_down(tokens) {
                self.down_of_many(&down, panels, y);
            } else {
                self.down(&down, y);
            }
            Ok(())
        })
    }

    /// `y[tokens, rows] = input · rowsᵀ`.
    fn rows(&self, rows: &Rows<'_>, (input, panels): (Input<'_>, &Panels), tokens: usize, y: &mut [f32]) {
        let count = rows.count();
        let groups = count.div_ceil(GROUP_ROWS);
        let columns = Columns::new(y, tokens, count, count);
        let threads = self.crew.pool.threads();
        let least = FEW_GROUPS.min(groups.div_ceil(threads));
        let per_chunk = self.crew.chunk_groups(groups, rows.width, tokens).max(least);
        // A few chunks are as many for each thread.
        let chunks = groups.div_ceil(per_chunk);
        let chunks = if chunks > threads { chunks / threads * threads } else { chunks };
        let per_chunk = groups.div_ceil(chunks.max(1)).max(1);
        if let Some(most) = groups_turned(rows.dtype, rows.width, tokens) {
            let per_chunk = per_chunk.min(most);
            return self.crew.pool.run("rows", groups.div_ceil(per_chunk), &|_| {
                self.whole_groups(rows, input, &columns, per_chunk, panels);
            });
        }
        self.crew.pool.run("rows", groups.div_ceil(per_chunk), &|_| {
            if rows.dtype.quantizes_activations() {
                self.chunk(rows, input, &columns, per_chunk, &mut Turned([0; QUANTIZED_PANEL]));
            } else {
                self.chunk(rows, input, &columns, per_chunk, &mut Turned([0; FLOAT_PANEL]));
            }
        });
    }

    /// The next `groups` groups of rows.
    fn chunk<const N: usize>(
        &self,
        rows: &Rows<'_>,
        input: Input<'_>,
        columns: &Columns<'_>,
        groups: usize,
        panel: &mut Turned<N>,
    ) {
        let Some(mut range) = columns.claim(groups) else { return };
        rows.each_group(range.groups(), |group, turned| {
            self.group(turned, rows.width, input, &mut range.group(group), &mut panel.0);
        });
    }

    /// One group of rows, slice by slice: the sums of the slices are added in order, as in a dense product.
    fn group(
        &self,
        rows: &Gather<'_>,
        width: usize,
        input: Input<'_>,
        out: &mut ColumnRange<'_>,
        panel: &mut [u8],
    ) {
        for start in (0..width).step_by(SLICE) {
            let columns = start..width.min(start + SLICE);
            let Some(size) = group_bytes(rows.dtype(), columns.len()) else { return };
            let panel = &mut panel[..size];
            self.crew.isa.gather(rows, columns.clone(), panel);
            let w = Groups::panel(rows.dtype(), columns, panel);
            self.crew.isa.matmul(&mut Job { w, input, pitch: width, out, accumulate: start > 0 });
        }
    }

    /// The active neurons' values of all neurons' `[tokens, neurons]`, each token `pitch` behind the one before; calls
    /// `finish` with each token and its values.
    fn pick(
        &self,
        (all, neurons): (&[f32], usize),
        active: &[u32],
        (picked, pitch): (&mut [f32], usize),
        finish: &(dyn Fn(usize, &mut [f32]) + Sync),
    ) {
        self.each_token(picked, pitch, &|t, picked| {
            let (picked, all) = (&mut picked[..active.len()], &all[t * neurons..][..neurons]);
            picked.iter_mut().zip(active).for_each(|(value, n)| *value = all[*n as usize]);
            finish(t, picked);
        });
    }

    /// The reverse: what is not active gets 0.
    fn put(&self, (picked, pitch): (&[f32], usize), active: &[u32], (all, neurons): (&mut [f32], usize)) {
        self.each_token(all, neurons, &|t, all| {
            all.fill(0.0);
            let picked = &picked[t * pitch..];
            active.iter().zip(picked).for_each(|(n, value)| all[*n as usize] = *value);
        });
    }

    /// Calls `work` with each token and its `pitch` values.
    fn each_token(&self, values: &mut [f32], pitch: usize, work: &(dyn Fn(usize, &mut [f32]) + Sync)) {
        let pitch = pitch.max(1);
        let tokens = values.len() / pitch;
        let values = Claims::new(values);
        let per_chunk = self.crew.pool.chunk_len(tokens, FEW_VALUES.div_ceil(pitch));
        self.crew.pool.run("pick", tokens.div_ceil(per_chunk), &|_| {
            let Some((at, values)) = values.claim(|at| at + per_chunk * pitch) else { return };
            values.chunks_exact_mut(pitch).zip(at / pitch..).for_each(|(values, t)| work(t, values));
        });
    }

    /// `y[tokens, width] (+)= hidden · down rows` of the active neurons.
    fn down(&self, job: &Axpy<'_>, y: &mut [f32]) {
        let (tokens, width) = (job.tokens(), job.width());
        let columns = Columns::new(y, tokens, width, width);
        let per_chunk = Axpy::groups_per_chunk(width, tokens, self.crew.pool.threads());
        self.crew.pool.run("down", width.div_ceil(GROUP_ROWS).div_ceil(per_chunk), &|_| {
            if let Some(mut out) = columns.claim(per_chunk) {
                self.crew.isa.axpy(job, &mut out);
            }
        });
    }
}

/// The refusal of a type of gate and up rows.
pub(crate) fn gate_type(dtype: DType) -> String {
    format!("gate rows of type {dtype} in a bundle: convert them to a type that is not widened first")
}

/// The refusal of a type of down rows.
pub(crate) fn down_types(dtype: DType) -> String {
    let known = DOWN_TYPES.map(DType::name).join(" ");
    format!("down rows of type {dtype} in a bundle: it adds up rows of {known}")
}

/// Fills a list with those below `count` that are wanted.
fn list(list: &mut Vec<u32>, count: usize, wanted: impl Fn(usize) -> bool) -> Result<(), OutOfMemory> {
    list.clear();
    list.try_reserve(count).map_err(|_| OutOfMemory(count.saturating_mul(4)))?;
    list.extend((0..count as u32).filter(|n| wanted(*n as usize)));
    Ok(())
}

/// How far apart the hidden values of two tokens lie: no power of two, so that the same neuron of several tokens does
/// not compete for one place of a cache.
fn pitch(neurons: usize) -> usize {
    neurons.next_multiple_of(2 * GROUP_ROWS) + GROUP_ROWS
}

/// Takes the neurons whose hidden value is 0 for every token out of the list and out of `hidden`, `[tokens, pitch]`.
fn drop_zeros(hidden: &mut [f32], pitch: usize, active: &mut Vec<u32>) {
    let mut kept = 0;
    for n in 0..active.len() {
        if hidden.iter().skip(n).step_by(pitch).any(|h| *h != 0.0) {
            if kept < n {
                active[kept] = active[n];
                hidden.chunks_exact_mut(pitch).for_each(|hidden| hidden[kept] = hidden[n]);
            }
            kept += 1;
        }
    }
    active.truncate(kept);
}
