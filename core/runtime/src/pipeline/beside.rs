//! A layer whose first neurons are a block on another unit: both units compute at once, and the sums are added.

use neuropil_device::{Activation, Buffer, DeviceError};

use crate::submit::Jobs;

use super::cold::ClusterRun;
use super::neuron_scratch::{FfnInput, NeuronScratch, room};
use super::neurons::{NeuronWeights, Neurons};

/// Takes the first `count` neurons of a layer out of a run, into one of their own, which nobody needs unless the unit that
/// has them fails: those whose gates are known to be on, or else all.
pub(super) fn split(
    run: &mut ClusterRun,
    count: usize,
    tokens: usize,
    memory: &mut NeuronScratch,
) -> Result<ClusterRun, DeviceError> {
    let mut first = memory.run()?;
    let (from, len) = (run.list.partition_point(|position| (*position as usize) < count), run.list.len());
    match run.gates.take() {
        None => first.list.extend(0..count as u32),
        Some(gates) => {
            first.list.extend_from_slice(&run.list[..from]);
            for (to, range) in [(&mut first.gates, 0..from), (&mut run.gates, from..len)] {
                let mut part = memory.gates.pop().map_or_else(|| Buffer::host(0), Ok)?;
                let all = gates.read()?;
                let mut values = room(&mut part, tokens * range.len(), tokens * len)?.write()?;
                let rows = values.slice_mut::<f32>().chunks_exact_mut(range.len().max(1));
                let from = all.slice::<f32>().chunks_exact(len.max(1));
                rows.zip(from).take(tokens).for_each(|(row, all)| row.copy_from_slice(&all[range.clone()]));
                drop(values);
                *to = Some(part);
            }
            memory.gates.push(gates);
        }
    }
    run.list.drain(..from);
    Ok(first)
}

impl Neurons {
    /// Computes the block on its unit and the `rest` meanwhile. When the unit fails, and for comparisons, its neurons are
    /// computed as the others are: those of `first`.
    pub(super) fn beside_unit(
        &self,
        first: &mut ClusterRun,
        activation: Activation,
        input: &FfnInput<'_>,
        (memory, jobs): (&mut NeuronScratch, &mut Jobs),
        rest: impl FnOnce(&mut NeuronScratch, &mut Jobs) -> Result<(), DeviceError>,
    ) -> Result<(), DeviceError> {
        let Some(hot) = &self.hot_block else { return rest(memory, jobs) };
        let len = input.tokens * self.slot.width;
        let mut sums = std::mem::replace(&mut memory.hot, memory.h.clone());
        let begun = hot.begin(jobs, activation, input.tokens, &input.h, &mut sums);
        // The rest is computed whatever came of the block, for it holds neurons of the cache; and the block is waited for
        // whatever came of the rest, for it holds the buffers.
        let computed = rest(memory, jobs);
        let computed = begun.and_then(|()| {
            let mut own = |jobs: &mut Jobs| -> Result<Buffer, DeviceError> {
                let y = Buffer::host(4 * len)?;
                let own = FfnInput { h: input.h.clone(), x: input.x.clone(), y: y.clone(), ..*input };
                self.at_home(first, activation, &own, (memory, jobs))?;
                Ok(y)
            };
            let added = hot.finish(jobs, input.tokens, &sums, &mut own);
            computed?;
            let sums = if added? { sums.clone() } else { own(jobs)? };
            let (sums, mut y) = (sums.read()?, input.y.write()?);
            self.ops.add(&mut y.slice_mut()[..len], &sums.slice()[..len]);
            Ok(())
        });
        memory.hot = sums;
        computed
    }

    /// Computes a run here, in memory or from storage.
    fn at_home(
        &self,
        run: &mut ClusterRun,
        activation: Activation,
        input: &FfnInput<'_>,
        (memory, jobs): (&mut NeuronScratch, &mut Jobs),
    ) -> Result<(), DeviceError> {
        match &self.weights {
            NeuronWeights::Memory(arena) => self.in_memory(arena, activation, run, input, (memory, jobs)),
            NeuronWeights::Storage { storage, unit } => {
                let call = self.call(storage, *unit, activation, input);
                run.begin(&call)?;
                run.finish(&call, jobs)
            }
        }
    }
}
