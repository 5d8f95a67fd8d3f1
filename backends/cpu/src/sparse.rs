//! The feed-forward of single neurons, from bundles in an arena (PowerInfer-2 section 4.1).
//!
//! Gate and up rows are turned, 16 neurons at a time, into the groups that the dense kernels take, so a neuron's value
//! has the bits that it has in a dense layer. What the gate switches off for every token is not computed further. The
//! down rows of the others are added up column by column. With many tokens both are done as [`crate::batch`] says.

use std::ops::Range;

use neuropil_device::quant::{SLICE, bundle_row_bytes};
use neuropil_device::{
    Activation, ClusterJob, ClusterWeights, DType, Device, DeviceError, OutOfMemory, PinnedSlots, Stage,
    WriteLease,
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

/// Groups that a thread takes at least: the rows of its first group are not fetched ahead.
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
        layout.check(slots.slot_bytes())?;
        if layout.dtype.is_expanded() {
            return Err(self.unsupported(&gate_type(layout.dtype)));
        }
        if job.stage != Stage::Gate && !DOWN_TYPES.contains(&layout.down_dtype) {
            return Err(self.unsupported(&down_types(layout.down_dtype)));
        }
        let (tokens, neurons, width) = (job.tokens, slots.len(), layout.width);
        let x = job.x.slice::<f32>();
        let x = &x[..check_len("values of x", tokens, width, x.len())?];
        let positions = positions.slice::<u32>();
        let positions = &positions[..check_len("positions", 1, neurons, positions.len())?];
        if !positions.is_sorted_by(|a, b| a < b) {
            return Err(self.unsupported("neurons that are not in ascending order of position"));
        }
        // A stage that lacks a buffer has one of no length.
        let len = |lease: &Option<WriteLease>| lease.as_ref().map_or(0, |lease| lease.slice::<f32>().len());
        let (hidden_len, y_len) = (len(&job.hidden), len(&job.y));
        let most =
            if job.stage == Stage::Fused { isize::MAX as usize / size_of::<f32>() } else { hidden_len };
        let values = check_len("values of hidden", tokens, neurons, most)?;
        if job.stage != Stage::Gate {
            check_len("values of y", tokens, width, y_len)?;
        }
        if tokens == 0 {
            return Ok(());
        }
        let given = job.hidden.as_mut().map_or(&mut [][..], |lease| lease.slice_mut::<f32>());
        let y = job.y.as_mut().map_or(&mut [][..], |lease| lease.slice_mut::<f32>());
        let gate_rows = Rows { slots, neurons: None, dtype: layout.dtype, width, at: layout.gate };
        self.with_scratch(|scratch| {
            if layout.dtype.quantizes_activations() {
                self.quantize(&mut scratch.input, x, tokens, width)?;
            }
            self.reserve_batch(&mut scratch.panels, layout, job.stage, tokens)
                .map_err(|error| self.out_of_memory(error))?;
            let Scratch { input, panels, gate, up, hidden_active: hidden, active, .. } = scratch;
            let input = input_for(layout.dtype, x, input, panels);
            let gate: &[f32] = match job.stage {
                Stage::Gate => {
                    self.rows(&gate_rows, (input, panels), tokens, &mut given[..values]);
                    return Ok(());
                }
                Stage::UpDown => &given[..values],
                Stage::Fused => {
                    let gate = room(gate, values).map_err(|error| self.out_of_memory(error))?;
                    self.rows(&gate_rows, (input, panels), tokens, gate);
                    gate
                }
            };
            let off = |n: usize| (0..tokens).all(|t| job.activation.is_off(gate[t * neurons + n]));
            list(active, neurons, |n| !off(n)).map_err(|error| self.out_of_memory(error))?;

            let pitch = pitch(active.len());
            let up = room(up, tokens * active.len()).map_err(|error| self.out_of_memory(error))?;
            let hidden =
                room(hidden, tokens.saturating_mul(pitch)).map_err(|error| self.out_of_memory(error))?;
            let up_rows = Rows { neurons: Some(active), at: layout.up, ..gate_rows };
            self.rows(&up_rows, (input, panels), tokens, up);
            self.activate(job.activation, (gate, neurons), active, up, (hidden, pitch));
            drop_zeros(hidden, pitch, active);
            let rows = (layout.down_dtype, width, layout.down);
            let down = Axpy::new(rows, slots, positions, active, (hidden, pitch), tokens, job.accumulate);
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
        let per_chunk = self.crew.chunk_groups(groups, rows.width, tokens).max(FEW_GROUPS);
        if let Some(most) = groups_turned(rows.dtype, rows.width, tokens) {
            let per_chunk = per_chunk.min(most);
            return self.crew.pool.run(groups.div_ceil(per_chunk), &|_| {
                self.whole_groups(rows, input, &columns, per_chunk, panels);
            });
        }
        self.crew.pool.run(groups.div_ceil(per_chunk), &|_| {
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

    /// The hidden values of the active neurons, from the gates of all and the active's up values.
    fn activate(
        &self,
        activation: Activation,
        (gate, neurons): (&[f32], usize),
        active: &[u32],
        up: &[f32],
        (hidden, pitch): (&mut [f32], usize),
    ) {
        let (tokens, count) = (hidden.len() / pitch, active.len());
        let hidden = Claims::new(hidden);
        let per_chunk = self.crew.pool.chunk_len(tokens, FEW_VALUES.div_ceil(pitch));
        self.crew.pool.run(tokens.div_ceil(per_chunk), &|_| {
            let Some((at, hidden)) = hidden.claim(|at| at + per_chunk * pitch) else { return };
            for (hidden, t) in hidden.chunks_exact_mut(pitch).zip(at / pitch..) {
                let (hidden, gate) = (&mut hidden[..count], &gate[t * neurons..][..neurons]);
                hidden.iter_mut().zip(active).for_each(|(h, n)| *h = gate[*n as usize]);
                let up = &up[t * count..][..count];
                self.crew.isa.host(HostOp::Activate { activation, gate: hidden, up });
            }
        });
    }

    /// `y[tokens, width] (+)= hidden · down rows` of the active neurons.
    fn down(&self, job: &Axpy<'_>, y: &mut [f32]) {
        let (tokens, width) = (job.tokens(), job.width());
        let columns = Columns::new(y, tokens, width, width);
        let per_chunk = Axpy::groups_per_chunk(width, tokens, self.crew.pool.threads());
        self.crew.pool.run(width.div_ceil(GROUP_ROWS).div_ceil(per_chunk), &|_| {
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
