//! The feed-forward of a cluster of neurons, from a prepared block.
//!
//! Gate and up are one fork: a chunk computes both for the same neurons and applies the activation while the values
//! are in its core's cache. The hidden values are then quantised and multiplied with down.

use neuropil_device::{
    ClusterJob, ClusterWeights, Device, DeviceError, MAX_PRODUCTS, OutOfMemory, Stage, WriteLease,
};

use crate::arch::HostOp;
use crate::crew::Work;
use crate::device::{CpuDevice, Scratch, Weight, check_len, cols_to_expand, input_for, room};
use crate::kernels::matmul_groups;
use crate::mem::{ColumnPair, Columns};
use crate::pack::Packed;

impl CpuDevice {
    pub(crate) fn cluster(&self, job: &mut ClusterJob) -> Result<(), DeviceError> {
        let ClusterWeights::Block(weight) = &job.weights else {
            return self.bundles(job);
        };
        let Weight::Neurons { gate, up, down } = self.own(weight)? else {
            return Err(self.unsupported("a matrix as the weight of a neuron cluster"));
        };
        let (tokens, neurons, width) = (job.tokens, gate.rows(), gate.cols());
        let stage = job.stage;
        let x = job.x.slice::<f32>();
        let x_len = if stage.reads_x() { check_len("values of x", tokens, width, x.len())? } else { 0 };
        let x = &x[..x_len];
        // A stage that lacks a buffer has one of no length.
        let lease = |lease: &Option<WriteLease>| lease.as_ref().map_or(0, |lease| lease.slice::<f32>().len());
        if stage.has_hidden() {
            check_len("values of hidden", tokens, neurons, lease(&job.hidden))?;
        }
        if stage.has_down() {
            check_len("values of y", tokens, width, lease(&job.y))?;
        }
        let hidden = job.hidden.as_mut().map_or(&mut [][..], |lease| lease.slice_mut::<f32>());
        let y = job.y.as_mut().map_or(&mut [][..], |lease| lease.slice_mut::<f32>());
        let (activation, accumulate) = (job.activation, job.accumulate);
        // The hidden values lie in the device's own memory; nothing else bounds their number.
        let hidden_len = check_len("hidden values", tokens, neurons, isize::MAX as usize / size_of::<f32>())?;
        let quantized = gate.dtype().quantizes_activations() || up.dtype().quantizes_activations();
        let expanded_cols = [gate, up, down].map(cols_to_expand).into_iter().max().unwrap_or(0);
        self.with_scratch(|scratch| {
            if quantized && stage.reads_x() {
                self.quantize(&mut scratch.input, x, tokens, width)?;
            }
            self.reserve_panels(&mut scratch.panels, expanded_cols)?;
            if stage == Stage::Gate {
                let y = Columns::new(hidden, tokens, neurons, neurons);
                let input = input_for(gate.dtype(), x, &scratch.input, &scratch.panels);
                self.one(Work { weight: gate, input, y, accumulate: false }, tokens);
                return Ok(());
            }
            if stage.has_up() {
                let gates = if stage.has_gate() { Gates::Compute(gate) } else { Gates::Given(hidden) };
                self.hidden(scratch, x, tokens, &gates, up, &|gate, up| {
                    self.crew.isa.host(HostOp::Activate { activation, gate, up });
                })
                .map_err(|error| self.out_of_memory(error))?;
            }
            let Scratch { gate: computed, hidden: activations, panels, .. } = scratch;
            if stage.has_up() && stage.writes_hidden() {
                hidden[..hidden_len].copy_from_slice(&computed[..hidden_len]);
                return Ok(());
            }
            let hidden = if stage.has_up() { &computed[..hidden_len] } else { &hidden[..hidden_len] };
            if down.dtype().quantizes_activations() {
                self.quantize(activations, hidden, tokens, neurons)?;
            }
            let input = input_for(down.dtype(), hidden, activations, panels);
            self.one(
                Work { weight: down, input, y: Columns::new(y, tokens, width, width), accumulate },
                tokens,
            );
            Ok(())
        })
    }

    fn one(&self, work: Work<'_>, tokens: usize) {
        let mut all = [const { None }; MAX_PRODUCTS];
        all[0] = Some(work);
        self.crew.multiply(&all, tokens);
    }

    /// Computes the hidden values of all neurons into `scratch.gate`, `[tokens, neurons]`, whose size was checked.
    fn hidden(
        &self,
        scratch: &mut Scratch,
        x: &[f32],
        tokens: usize,
        gates: &Gates<'_>,
        up: &Packed,
        activate: &(dyn Fn(&mut [f32], &[f32]) + Sync),
    ) -> Result<(), OutOfMemory> {
        let neurons = up.rows();
        let (isa, input, panels) = (self.crew.isa, &scratch.input, &scratch.panels);
        let gate_values = room(&mut scratch.gate, tokens * neurons)?;
        let up_values = room(&mut scratch.up, tokens * neurons)?;
        let columns = ColumnPair::new(
            Columns::new(gate_values, tokens, neurons, neurons),
            Columns::new(up_values, tokens, neurons, neurons),
        );
        let per_chunk = self.crew.groups_per_chunk(up.groups(), 2 * up.cols(), tokens);
        self.crew.pool.run("gate+up", up.groups().div_ceil(per_chunk), &|_| {
            let Some((mut gate_part, mut up_part)) = columns.claim(per_chunk) else { return };
            let rows = up_part.rows();
            match gates {
                Gates::Compute(gate) => {
                    matmul_groups(
                        isa,
                        gate,
                        input_for(gate.dtype(), x, input, panels),
                        gate_part.reborrow(),
                        false,
                    );
                }
                Gates::Given(hidden) => (0..tokens).for_each(|t| {
                    let given = &hidden[t * neurons..][rows.clone()];
                    gate_part.token_mut(t).copy_from_slice(given);
                }),
            }
            matmul_groups(isa, up, input_for(up.dtype(), x, input, panels), up_part.reborrow(), false);
            (0..tokens).for_each(|t| activate(gate_part.token_mut(t), up_part.token_mut(t)));
        });
        Ok(())
    }
}

/// Where the gate values come from.
enum Gates<'a> {
    /// This weight and the input.
    Compute(&'a Packed),
    /// The stage before.
    Given(&'a [f32]),
}
