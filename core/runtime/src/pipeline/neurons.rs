//! A feed-forward of single neurons: those that do not fire are left out.
//!
//! Who decides is one of three. *All*: every neuron is computed. *Gate*: the gate matrix lies in memory as a whole, and
//! its exact values decide; what it switches off changes no bit. *Predicted*: a predictor marks neurons, and the others
//! are taken for silent; a token's marks are its own, also when it shares the step with others.
//!
//! Deciding and computing are two steps: where neurons come from storage, all experts of a layer decide first, so that
//! their reads are under way together.

use std::sync::{Arc, PoisonError};

use neuropil_device::{
    Activation, ActivationKind, Arena, Buffer, BundleLayout, ClusterJob, ClusterWeights, Device, DeviceError,
    HostOps, MatmulJob, Product, Stage,
};

use crate::predict::{Centred, GateSeen, PredictCall, Predictor, PredictorInput, grow};
use crate::sched::HotBlock;
use crate::submit::{Jobs, Placed};

use super::Scratch;
use super::beside::split;
use super::blocks::BlockRun;
use super::cold::{Call, ClusterRun};
use super::neuron_scratch::{FfnInput, NeuronScratch, room};
use super::storage::Storage;
use super::stream::stream;
use super::trace::{Lane, span};

/// From so many tokens on all neurons of an expert pass by in order; with fewer the cache keeps them.
const MANY_TOKENS: usize = 16;

/// The neurons of a layer or an expert.
pub(crate) struct Neurons {
    pub device: Arc<dyn Device>,
    pub weights: NeuronWeights,
    /// How a slot of the weights is laid out.
    pub slot: BundleLayout,
    /// Neurons in all.
    pub count: usize,
    /// The layer's number, for the count of what was computed.
    pub layer: usize,
    /// The expert's, if the layer has several.
    pub expert: Option<usize>,
    /// Neurons that are always computed, the first of the layer.
    pub hot: usize,
    /// The first neurons of the layer on another unit, where they are in memory too.
    pub hot_block: Option<HotBlock>,
    pub decision: Decision,
    pub ops: Arc<dyn HostOps>,
}

/// Where the neurons are.
pub(crate) enum NeuronWeights {
    /// In memory: slot p holds the bundle at position p, or its part `UpDown` where the gate lies apart.
    Memory(Arena),
    /// Some in memory, the others in storage, as unit `unit` of it.
    Storage { storage: Arc<Storage>, unit: usize },
}

/// Who says which neurons are computed.
pub(crate) enum Decision {
    /// Nobody: all are.
    All,
    /// The gate, prepared as a matrix of `neurons × width`; by its distance from constants if there are some.
    Gate { gate: Placed, centred: Option<Centred> },
    /// A predictor.
    Predicted(Box<dyn Predictor>),
}

/// What was decided about a feed-forward; the neurons are in the run.
pub(crate) struct Decided {
    run: ClusterRun,
    /// Of the neurons, those that a block on another unit has.
    first: Option<ClusterRun>,
    /// Instead of `run`, where the expert is computed as a whole.
    block: Option<BlockRun>,
    activation: Activation,
    /// Whether all neurons are computed.
    all: bool,
    /// Whether the reads of the run were begun.
    begun: bool,
    /// Whether the constants of the neurons are to be added.
    centred: bool,
}

impl Decided {
    /// Whether another feed-forward may begin to read: all that this one needs is taken into use.
    pub(crate) fn leaves_room(&self) -> bool {
        match &self.block {
            Some(block) => block.is_whole(),
            None => !self.begun || self.run.is_whole(),
        }
    }
}

impl Neurons {
    /// Computes the layer.
    pub(crate) fn forward(
        &self,
        activation: Activation,
        input: &FfnInput<'_>,
        scratch: &mut Scratch,
    ) -> Result<(), DeviceError> {
        let decided = self.begin(activation, input, scratch)?;
        self.finish(decided, input, scratch)
    }

    /// Decides which neurons are computed, and starts to read those that are not in memory.
    pub(crate) fn begin(
        &self,
        activation: Activation,
        input: &FfnInput<'_>,
        scratch: &mut Scratch,
    ) -> Result<Decided, DeviceError> {
        let predicted = input.predict.iter().any(|predict| *predict);
        let run = scratch.neurons.run()?;
        let (first, block) = (None, None);
        let mut decided = Decided { run, first, block, activation, all: false, begun: false, centred: false };
        let trace = scratch.trace.clone();
        let deciding = span(&trace, Lane::Conductor, "predict", input.tokens);
        match &self.decision {
            Decision::Gate { gate, centred } => {
                let centred = centred.as_ref().filter(|_| predicted);
                self.gated(gate, centred, input, scratch, &mut decided)?;
            }
            Decision::Predicted(predictor) if predicted => {
                self.predicted(&**predictor, input, scratch, &mut decided)?;
            }
            Decision::All | Decision::Predicted(_) => {
                decided.all = true;
                decided.run.list.extend(0..self.count as u32);
                if predicted {
                    scratch.activity.add(self.layer, self.count, self.count);
                }
            }
        }
        drop(deciding);
        // What is read in order as a whole has no part for another unit.
        let parts = !(decided.all && self.reads());
        if let Some(hot) = self.hot_block.as_ref().filter(|hot| parts && hot.is_in()) {
            decided.first = Some(split(&mut decided.run, hot.count, input.tokens, &mut scratch.neurons)?);
        }
        if let NeuronWeights::Storage { storage, unit } = &self.weights
            && !self.passes_by(&decided, input.tokens)
        {
            let call = self.call(storage, *unit, decided.activation, input);
            if storage.group() > 1 {
                let mut block = scratch.neurons.blocks.pop().map_or_else(BlockRun::new, Ok)?;
                block.begin(&call)?;
                decided.block = Some(block);
            } else {
                decided.run.begin(&call)?;
                decided.begun = true;
            }
        }
        Ok(decided)
    }

    /// Starts to read the neurons that this layer will probably need, while the one before it waits for its own: the
    /// stream that the layer before reads is nearly that which this one will (PowerInfer-2 has no such step). What is
    /// read in vain costs bandwidth, never a bit of the result.
    pub(crate) fn look_ahead(&self, input: &FfnInput<'_>, scratch: &mut Scratch) -> Result<(), DeviceError> {
        let (NeuronWeights::Storage { storage, unit }, Decision::Predicted(predictor)) =
            (&self.weights, &self.decision)
        else {
            return Ok(());
        };
        let predicted = input.predict.iter().all(|predict| *predict);
        if !predicted || predictor.input() != PredictorInput::Residual || !storage.is_behind() {
            return Ok(());
        }
        let _span = span(&storage.trace, Lane::Conductor, "look ahead", input.tokens);
        let memory = &mut scratch.neurons;
        let mut marks = memory.marks.pop().unwrap_or_default();
        marks.reset(input.tokens, self.count);
        let (tokens, input) = (input.tokens, &input.x);
        let mut call = PredictCall { tokens, input, jobs: &mut scratch.jobs, memory: &mut memory.predict };
        let predicted = predictor.predict(&mut call, &mut marks);
        marks.union(&mut memory.ahead);
        memory.marks.push(marks);
        predicted?;
        storage.prefetch(*unit, &memory.ahead, &mut memory.prefetch)
    }

    /// Starts to read those of the neurons that are not in memory, where all will be computed.
    pub(crate) fn fetch(&self, tokens: usize, scratch: &mut Scratch) -> Result<(), DeviceError> {
        match (&self.weights, &self.decision) {
            (NeuronWeights::Storage { storage, unit }, Decision::All) if tokens < MANY_TOKENS => {
                let memory = &mut scratch.neurons;
                memory.ahead.clear();
                memory.ahead.extend(0..storage.groups(*unit) as u32);
                storage.prefetch(*unit, &memory.ahead, &mut memory.prefetch)
            }
            _ => Ok(()),
        }
    }

    /// Whether some of its neurons may have to be read.
    pub(crate) fn reads(&self) -> bool {
        matches!(self.weights, NeuronWeights::Storage { .. })
    }

    /// Gives up what was decided and will not be computed.
    pub(crate) fn abandon(&self, mut decided: Decided, scratch: &mut Scratch) {
        if let NeuronWeights::Storage { storage, .. } = &self.weights {
            if decided.begun {
                decided.run.abandon(storage);
            }
            if let Some(mut block) = decided.block.take() {
                block.abandon(storage);
                scratch.neurons.blocks.push(block);
            }
        }
        scratch.neurons.keep(decided.run);
        decided.first.into_iter().for_each(|first| scratch.neurons.keep(first));
    }

    /// Whether the neurons are read in order, past the cache: all of a layer, or most of those whose gates are on.
    fn passes_by(&self, decided: &Decided, tokens: usize) -> bool {
        let kept = self.expert.is_some() && tokens < MANY_TOKENS;
        let most = decided.run.gates.is_some() && 2 * decided.run.list.len() > self.count;
        (decided.all || most) && !kept
    }

    pub(super) fn call<'a>(
        &'a self,
        storage: &'a Storage,
        unit: usize,
        activation: Activation,
        input: &'a FfnInput<'a>,
    ) -> Call<'a> {
        Call { storage, unit, device: &*self.device, activation, input }
    }

    /// Computes what was decided.
    pub(crate) fn finish(
        &self,
        decided: Decided,
        input: &FfnInput<'_>,
        scratch: &mut Scratch,
    ) -> Result<(), DeviceError> {
        let Decided { mut run, first, block, activation, all, begun, centred } = decided;
        let (memory, jobs) = (&mut scratch.neurons, &mut scratch.jobs);
        // A sum of several jobs begins with 0, so it is taken apart from what it is added to.
        let len = input.tokens * self.slot.width;
        let y = if input.accumulate { grow(&mut memory.sum, len)?.clone() } else { input.y.clone() };
        let (h, x) = (input.h.clone(), input.x.clone());
        let own = FfnInput { tokens: input.tokens, h, x, y, accumulate: false, predict: input.predict };
        let rest = |memory: &mut NeuronScratch, jobs: &mut Jobs| match &self.weights {
            NeuronWeights::Storage { storage, unit } => {
                let call = self.call(storage, *unit, activation, &own);
                if let Some(mut block) = block {
                    let computed = block.finish(&call, jobs);
                    memory.blocks.push(block);
                    computed
                } else if begun {
                    run.finish(&call, jobs)
                } else {
                    let gates = run.gates.as_ref();
                    let chosen = gates.filter(|_| !all).map(|gates| (&run.list[..], gates));
                    stream(&call, chosen, &mut memory.stream, jobs)
                }
            }
            NeuronWeights::Memory(arena) => self.in_memory(arena, activation, &run, &own, (memory, jobs)),
        };
        let computed = match first {
            None => rest(memory, jobs),
            Some(mut first) => {
                let computed =
                    self.beside_unit(&mut first, activation, &own, (&mut *memory, &mut *jobs), rest);
                memory.keep(first);
                computed
            }
        };
        if computed.is_ok() && input.accumulate {
            let (sum, mut y) = (own.y.read()?, input.y.write()?);
            self.ops.add(&mut y.slice_mut()[..len], &sum.slice()[..len]);
        }
        if computed.is_ok()
            && centred
            && let Decision::Gate { centred: Some(centred), .. } = &self.decision
        {
            let h = self.predicted_rows(input, &mut memory.h)?;
            centred.add_constant(input.tokens, &h, &input.y, jobs)?;
        }
        memory.keep(run);
        computed
    }

    /// The gate of all neurons decides, or its distance from constants.
    fn gated(
        &self,
        gate: &Placed,
        centred: Option<&Centred>,
        input: &FfnInput<'_>,
        scratch: &mut Scratch,
        decided: &mut Decided,
    ) -> Result<(), DeviceError> {
        let (tokens, neurons) = (input.tokens, self.count);
        let memory = &mut scratch.neurons;
        let values = grow(&mut memory.gate, tokens * neurons)?.clone();
        let product = Product { weight: gate.weight.clone(), y: values.write()?, accumulate: false };
        scratch.jobs.matmul(&*gate.device, MatmulJob::new(tokens, input.h.read()?).with(product))?;
        if let Some(observer) = &scratch.observer {
            let (h, values) = (input.h.read()?, values.read()?);
            let seen = GateSeen {
                layer: self.layer,
                expert: self.expert.unwrap_or(0),
                expert_of_many: self.expert.is_some(),
                width: self.slot.width,
                neurons,
                h: &h.slice()[..tokens * self.slot.width],
                gate: &values.slice()[..tokens * neurons],
                counted: input.predict,
            };
            observer.lock().unwrap_or_else(PoisonError::into_inner).gate(&seen);
        }
        let mut values = values.write()?;
        let values = &mut values.slice_mut::<f32>()[..tokens * neurons];
        if let Some(centred) = centred {
            self.ops.gate(decided.activation, values);
            let cut = centred.cut();
            let rows = values.chunks_exact_mut(neurons).zip(input.predict).filter(|(_, predict)| **predict);
            rows.for_each(|(values, _)| centred.stray(values, cut));
            decided.activation = Activation::new(ActivationKind::Linear);
            decided.centred = true;
        }
        memory.on.clear();
        memory.on.resize(neurons, false);
        for (values, predict) in values.chunks_exact(neurons).zip(input.predict) {
            let mut count = 0;
            for (value, any) in values.iter().zip(&mut memory.on) {
                let on = !decided.activation.is_off(*value);
                *any |= on;
                count += usize::from(on);
            }
            if *predict {
                scratch.activity.add(self.layer, count, neurons);
            }
        }
        let run = &mut decided.run;
        list(&mut run.list, &memory.on);
        let count = run.list.len();
        let mut gates = memory.gates.pop().map_or_else(|| Buffer::host(0), Ok)?;
        {
            let gates = room(&mut gates, tokens * count, tokens * neurons)?;
            let mut gates = gates.write()?;
            let rows = gates.slice_mut::<f32>().chunks_exact_mut(count.max(1));
            for (gates, values) in rows.zip(values.chunks_exact(neurons)) {
                gates.iter_mut().zip(&run.list).for_each(|(gate, n)| *gate = values[*n as usize]);
            }
        }
        run.gates = Some(gates);
        Ok(())
    }

    /// The normed stream with the rows zeroed that are computed with all neurons: their constant part is in those.
    fn predicted_rows(&self, input: &FfnInput<'_>, h: &mut Buffer) -> Result<Buffer, DeviceError> {
        if input.predict.iter().all(|predict| *predict) {
            return Ok(input.h.clone());
        }
        let width = self.slot.width;
        let rows = grow(h, input.tokens * width)?.clone();
        let (from, mut to) = (input.h.read()?, rows.write()?);
        let pairs =
            from.slice::<f32>().chunks_exact(width).zip(to.slice_mut::<f32>().chunks_exact_mut(width));
        for ((from, to), predict) in pairs.zip(input.predict) {
            if *predict { to.copy_from_slice(from) } else { to.fill(0.0) }
        }
        drop(to);
        Ok(rows)
    }

    /// The neurons that a predictor marks for one token or another.
    fn predicted(
        &self,
        predictor: &dyn Predictor,
        input: &FfnInput<'_>,
        scratch: &mut Scratch,
        decided: &mut Decided,
    ) -> Result<(), DeviceError> {
        let (tokens, neurons) = (input.tokens, self.count);
        let memory = &mut scratch.neurons;
        let mut marks = memory.marks.pop().unwrap_or_default();
        marks.reset(tokens, neurons);
        let stream = match predictor.input() {
            PredictorInput::Residual => &input.x,
            PredictorInput::Normed => &input.h,
        };
        let mut call =
            PredictCall { tokens, input: stream, jobs: &mut scratch.jobs, memory: &mut memory.predict };
        predictor.predict(&mut call, &mut marks)?;
        for (token, predict) in input.predict.iter().enumerate() {
            marks.first(token, if *predict { self.hot } else { neurons });
            if *predict {
                scratch.activity.add(self.layer, marks.count(token), neurons);
            }
        }
        marks.union(&mut decided.run.list);
        if tokens == 1 {
            memory.marks.push(marks);
        } else {
            // What a token's neighbours marked is silent for the token itself.
            decided.run.marks = Some(marks);
        }
        Ok(())
    }

    /// The neurons of the list, all of them in memory.
    pub(super) fn in_memory(
        &self,
        arena: &Arena,
        activation: Activation,
        run: &ClusterRun,
        input: &FfnInput<'_>,
        (memory, jobs): (&mut NeuronScratch, &mut Jobs),
    ) -> Result<(), DeviceError> {
        let (tokens, count) = (input.tokens, run.list.len());
        if count == 0 {
            input.y.write()?.slice_mut::<f32>()[..tokens * self.slot.width].fill(0.0);
            return Ok(());
        }
        let positions = grow(&mut memory.positions, self.count)?.clone();
        positions.write()?.slice_mut::<u32>()[..count].copy_from_slice(&run.list);
        let mut job = |stage: Stage, hidden: Option<&Buffer>| -> Result<(), DeviceError> {
            let mut slots = arena.take_list();
            slots.extend_from_slice(&run.list);
            let weights = ClusterWeights::Bundles {
                layout: self.slot,
                slots: arena.pin(slots)?,
                positions: positions.read()?,
            };
            let job = ClusterJob {
                stage,
                tokens,
                activation,
                weights,
                x: input.h.read()?,
                hidden: hidden.map(Buffer::write).transpose()?,
                y: if stage.has_down() { Some(input.y.write()?) } else { None },
                accumulate: false,
            };
            jobs.cluster(&*self.device, job)
        };
        let Some(marks) = &run.marks else {
            let stage = if run.gates.is_some() { Stage::UpDown } else { Stage::Fused };
            return job(stage, run.gates.as_ref());
        };
        let hidden = room(&mut memory.hidden, tokens * count, tokens * self.count)?.clone();
        job(Stage::Gate, Some(&hidden))?;
        {
            let mut hidden = hidden.write()?;
            let rows = hidden.slice_mut::<f32>().chunks_exact_mut(count);
            for (token, hidden) in rows.take(tokens).enumerate() {
                for (hidden, n) in hidden.iter_mut().zip(&run.list) {
                    if !marks.is_marked(token, *n as usize) {
                        *hidden = 0.0;
                    }
                }
            }
        }
        job(Stage::UpDown, Some(&hidden))
    }
}

/// Lists what is on. No branch depends on a value, since nobody could foretell it.
fn list(list: &mut Vec<u32>, on: &[bool]) {
    list.clear();
    list.resize(on.len(), 0);
    let mut len = 0;
    for (neuron, on) in on.iter().enumerate() {
        list[len] = neuron as u32;
        len += usize::from(*on);
    }
    list.truncate(len);
}
