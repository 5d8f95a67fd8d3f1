//! A feed-forward of single neurons, all in memory: those that do not fire are left out.
//!
//! Who decides is one of three. *All*: every neuron is computed. *Gate*: the gate matrix lies in memory as a whole, and
//! its exact values decide; what it switches off changes no bit. *Predicted*: a predictor marks neurons, and the others
//! are taken for silent; a token's marks are its own, also when it shares the step with others.

use std::sync::{Arc, PoisonError};

use neuropil_device::{
    Activation, ActivationKind, Arena, Buffer, BundleLayout, ClusterJob, ClusterWeights, Device, DeviceError,
    HostOps, MatmulJob, Product, Stage,
};

use crate::predict::{Centred, GateSeen, Marks, PredictCall, PredictMemory, Predictor, PredictorInput, grow};
use crate::submit::{Jobs, Placed};

use super::Scratch;

/// What a feed-forward reads and writes, `[tokens, width]` each.
pub(crate) struct FfnInput<'a> {
    /// Rows of the buffers.
    pub tokens: usize,
    /// The normed stream.
    pub h: Buffer,
    /// The residual stream before the norm, for predictors that read it.
    pub x: Buffer,
    /// Takes the result; may be `x`.
    pub y: Buffer,
    /// Add to `y` instead of overwriting it.
    pub accumulate: bool,
    /// For each token, whether neurons may be left out that are only predicted to be silent.
    pub predict: &'a [bool],
}

impl<'a> FfnInput<'a> {
    /// That of a layer of a step: reads the normed stream and adds to the stream.
    pub(crate) fn of_stream(tokens: usize, predict: &'a [bool], scratch: &Scratch) -> FfnInput<'a> {
        let (h, x, y) = (scratch.h.clone(), scratch.x.clone(), scratch.x.clone());
        FfnInput { tokens, h, x, y, accumulate: true, predict }
    }
}

/// The neurons of a layer or an expert, each in a slot of an arena.
pub(crate) struct Neurons {
    pub device: Arc<dyn Device>,
    /// Slot p holds the bundle at position p, or its part `UpDown` where the gate lies apart.
    pub arena: Arena,
    pub slot: BundleLayout,
    /// The layer's number, for the count of what was computed.
    pub layer: usize,
    /// The expert's, if the layer has several.
    pub expert: Option<usize>,
    /// Neurons that are always computed, the first of the layer.
    pub hot: usize,
    pub decision: Decision,
    pub ops: Arc<dyn HostOps>,
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

/// Memory of a step for single neurons.
pub(crate) struct NeuronScratch {
    /// Whether a neuron is computed.
    on: Vec<bool>,
    /// Positions of the neurons that are.
    list: Vec<u32>,
    marks: Marks,
    predict: PredictMemory,
    /// The list, for jobs: U32.
    positions: Buffer,
    /// Gate values of all neurons, `[tokens, neurons]`.
    gate: Buffer,
    /// Hidden values of the list, `[tokens, list]`.
    hidden: Buffer,
    /// The normed stream without the rows that are computed with all neurons.
    h: Buffer,
}

impl NeuronScratch {
    pub(crate) fn new() -> Result<NeuronScratch, DeviceError> {
        let empty = Buffer::host(0)?;
        Ok(NeuronScratch {
            on: Vec::new(),
            list: Vec::new(),
            marks: Marks::default(),
            predict: PredictMemory::new()?,
            positions: empty.clone(),
            gate: empty.clone(),
            hidden: empty.clone(),
            h: empty,
        })
    }

    pub(crate) fn bytes(&self) -> usize {
        let buffers = [&self.positions, &self.gate, &self.hidden, &self.h];
        buffers.iter().map(|b| b.len()).sum::<usize>() + self.predict.bytes()
    }
}

impl Neurons {
    fn count(&self) -> usize {
        self.arena.slots()
    }

    /// Computes the layer.
    pub(crate) fn forward(
        &self,
        activation: Activation,
        input: &FfnInput<'_>,
        scratch: &mut Scratch,
    ) -> Result<(), DeviceError> {
        let predicted = input.predict.iter().any(|predict| *predict);
        match &self.decision {
            Decision::Gate { gate, centred } => {
                let centred = centred.as_ref().filter(|_| predicted);
                self.gated(gate, centred, activation, input, scratch)
            }
            Decision::Predicted(predictor) if predicted => {
                self.predicted(&**predictor, activation, input, scratch)
            }
            Decision::All | Decision::Predicted(_) => {
                let memory = &mut scratch.neurons;
                memory.list.clear();
                memory.list.extend(0..self.count() as u32);
                if predicted {
                    scratch.activity.add(self.layer, self.count(), self.count());
                }
                self.run(Stage::Fused, activation, input, (memory, &mut scratch.jobs), None)
            }
        }
    }

    /// The gate of all neurons, then the others' rows of those that it leaves on.
    fn gated(
        &self,
        gate: &Placed,
        centred: Option<&Centred>,
        mut activation: Activation,
        input: &FfnInput<'_>,
        scratch: &mut Scratch,
    ) -> Result<(), DeviceError> {
        let (tokens, neurons) = (input.tokens, self.count());
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
            self.ops.gate(activation, values);
            let cut = centred.cut();
            let rows = values.chunks_exact_mut(neurons).zip(input.predict).filter(|(_, predict)| **predict);
            rows.for_each(|(values, _)| centred.stray(values, cut));
            activation = Activation::new(ActivationKind::Linear);
        }
        memory.on.clear();
        memory.on.resize(neurons, false);
        for (values, predict) in values.chunks_exact(neurons).zip(input.predict) {
            let mut count = 0;
            for (value, any) in values.iter().zip(&mut memory.on) {
                let on = !activation.is_off(*value);
                *any |= on;
                count += usize::from(on);
            }
            if *predict {
                scratch.activity.add(self.layer, count, neurons);
            }
        }
        list(&mut memory.list, &memory.on);
        let count = memory.list.len();
        let hidden = room(&mut memory.hidden, tokens * count, tokens * neurons)?.clone();
        {
            let mut hidden = hidden.write()?;
            let rows = hidden.slice_mut::<f32>().chunks_exact_mut(count.max(1));
            for (hidden, values) in rows.zip(values.chunks_exact(neurons)) {
                hidden.iter_mut().zip(&memory.list).for_each(|(h, n)| *h = values[*n as usize]);
            }
        }
        self.run(Stage::UpDown, activation, input, (memory, &mut scratch.jobs), Some(&hidden))?;
        if let Some(centred) = centred {
            let h = self.predicted_rows(input, &mut memory.h)?;
            centred.add_constant(tokens, &h, &input.y, &mut scratch.jobs)?;
        }
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

    /// The neurons that a predictor marks for one token or another, and each token's own of those.
    fn predicted(
        &self,
        predictor: &dyn Predictor,
        activation: Activation,
        input: &FfnInput<'_>,
        scratch: &mut Scratch,
    ) -> Result<(), DeviceError> {
        let (tokens, neurons) = (input.tokens, self.count());
        let memory = &mut scratch.neurons;
        memory.marks.reset(tokens, neurons);
        let stream = match predictor.input() {
            PredictorInput::Residual => &input.x,
            PredictorInput::Normed => &input.h,
        };
        let mut call =
            PredictCall { tokens, input: stream, jobs: &mut scratch.jobs, memory: &mut memory.predict };
        predictor.predict(&mut call, &mut memory.marks)?;
        for (token, predict) in input.predict.iter().enumerate() {
            memory.marks.first(token, if *predict { self.hot } else { neurons });
            if *predict {
                scratch.activity.add(self.layer, memory.marks.count(token), neurons);
            }
        }
        memory.marks.union(&mut memory.list);
        let count = memory.list.len();
        if tokens == 1 {
            return self.run(Stage::Fused, activation, input, (memory, &mut scratch.jobs), None);
        }
        let hidden = room(&mut memory.hidden, tokens * count, tokens * neurons)?.clone();
        self.run(Stage::Gate, activation, input, (memory, &mut scratch.jobs), Some(&hidden))?;
        {
            // What a token's neighbours marked is silent for the token itself.
            let mut hidden = hidden.write()?;
            let rows = hidden.slice_mut::<f32>().chunks_exact_mut(count.max(1));
            for (token, hidden) in rows.take(tokens).enumerate() {
                for (hidden, n) in hidden.iter_mut().zip(&memory.list) {
                    if !memory.marks.is_marked(token, *n as usize) {
                        *hidden = 0.0;
                    }
                }
            }
        }
        self.run(Stage::UpDown, activation, input, (memory, &mut scratch.jobs), Some(&hidden))
    }

    /// One job over the neurons of the list.
    fn run(
        &self,
        stage: Stage,
        activation: Activation,
        input: &FfnInput<'_>,
        (memory, jobs): (&mut NeuronScratch, &mut Jobs),
        hidden: Option<&Buffer>,
    ) -> Result<(), DeviceError> {
        if memory.list.is_empty() {
            if stage != Stage::Gate && !input.accumulate {
                let len = input.tokens * self.slot.width;
                input.y.write()?.slice_mut::<f32>()[..len].fill(0.0);
            }
            return Ok(());
        }
        let positions = grow(&mut memory.positions, self.count())?;
        positions.write()?.slice_mut::<u32>()[..memory.list.len()].copy_from_slice(&memory.list);
        let mut slots = self.arena.take_list();
        slots.extend_from_slice(&memory.list);
        let job = ClusterJob {
            stage,
            tokens: input.tokens,
            activation,
            weights: ClusterWeights::Bundles {
                layout: self.slot,
                slots: self.arena.pin(slots)?,
                positions: positions.read()?,
            },
            x: input.h.read()?,
            hidden: hidden.map(Buffer::write).transpose()?,
            y: if stage == Stage::Gate { None } else { Some(input.y.write()?) },
            accumulate: input.accumulate,
        };
        jobs.cluster(&*self.device, job)
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

/// Room for `len` values in a buffer that takes `most` at once when it is too small: so that a token which fires more
/// neurons than any before allocates nothing.
fn room(buffer: &mut Buffer, len: usize, most: usize) -> Result<&Buffer, DeviceError> {
    if buffer.len() < 4 * len { grow(buffer, most) } else { Ok(buffer) }
}
