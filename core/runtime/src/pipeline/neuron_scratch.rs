//! What feed-forwards of single neurons read, write and work with, kept from layer to layer and step to step.

use std::ops::Range;

use neuropil_device::{Buffer, DeviceError};

use crate::predict::{Marks, PredictMemory, grow};

use super::Scratch;
use super::blocks::BlockRun;
use super::cold::ClusterRun;
use super::storage::PrefetchScratch;
use super::stream::StreamScratch;

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

/// Memory of a step for single neurons.
pub(crate) struct NeuronScratch {
    /// Whether a neuron is computed.
    pub on: Vec<bool>,
    pub predict: PredictMemory,
    /// The list, for jobs: U32.
    pub positions: Buffer,
    /// Gate values of all neurons, `[tokens, neurons]`.
    pub gate: Buffer,
    /// Hidden values of the list, `[tokens, list]`.
    pub hidden: Buffer,
    /// The normed stream without the rows that are computed with all neurons.
    pub h: Buffer,
    /// The sum of the neurons' down rows `[tokens, width]`.
    pub sum: Buffer,
    /// The sums of a block on another unit `[tokens, width]`.
    pub hot: Buffer,
    /// Runs that nobody uses at the moment.
    pub runs: Vec<ClusterRun>,
    /// Runs of whole experts that nobody uses at the moment.
    pub blocks: Vec<BlockRun>,
    /// Marks that nobody uses at the moment.
    pub marks: Vec<Marks>,
    /// Gates of lists that nobody uses at the moment.
    pub gates: Vec<Buffer>,
    /// For layers that pass by in order.
    pub stream: StreamScratch,
    /// Neurons to read ahead.
    pub ahead: Vec<u32>,
    pub prefetch: PrefetchScratch,
}

impl NeuronScratch {
    pub(crate) fn new() -> Result<NeuronScratch, DeviceError> {
        let empty = Buffer::host(0)?;
        Ok(NeuronScratch {
            on: Vec::new(),
            predict: PredictMemory::new()?,
            positions: empty.clone(),
            gate: empty.clone(),
            hidden: empty.clone(),
            h: empty.clone(),
            sum: empty.clone(),
            hot: empty,
            runs: Vec::new(),
            blocks: Vec::new(),
            marks: Vec::new(),
            gates: Vec::new(),
            stream: StreamScratch::new()?,
            ahead: Vec::new(),
            prefetch: PrefetchScratch::default(),
        })
    }

    pub(crate) fn bytes(&self) -> usize {
        let buffers = [&self.positions, &self.gate, &self.hidden, &self.h, &self.sum, &self.hot];
        let buffers = buffers.into_iter().chain(&self.gates);
        let runs = self.runs.iter().map(ClusterRun::bytes).sum::<usize>();
        let blocks = self.blocks.iter().map(BlockRun::bytes).sum::<usize>();
        buffers.map(|b| b.len()).sum::<usize>() + self.predict.bytes() + runs + blocks + self.stream.bytes()
    }

    /// A run that nobody uses.
    pub(super) fn run(&mut self) -> Result<ClusterRun, DeviceError> {
        self.runs.pop().map_or_else(ClusterRun::new, Ok)
    }

    /// Takes a run back.
    pub(super) fn keep(&mut self, mut run: ClusterRun) {
        self.marks.extend(run.marks.take());
        self.gates.extend(run.gates.take());
        run.reset();
        self.runs.push(run);
    }
}

/// Room for `len` values in a buffer that takes `most` at once when it is too small: so that a token which fires more
/// neurons than any before allocates nothing.
pub(super) fn room(buffer: &mut Buffer, len: usize, most: usize) -> Result<&Buffer, DeviceError> {
    if buffer.len() < 4 * len { grow(buffer, most) } else { Ok(buffer) }
}

/// Writes the numbers of a range, U32, to a buffer that takes as many.
pub(super) fn count_up(buffer: &mut Buffer, range: Range<usize>) -> Result<&Buffer, DeviceError> {
    let buffer = grow(buffer, range.len())?;
    let mut numbers = buffer.write()?;
    let places = numbers.slice_mut::<u32>().iter_mut();
    places.zip(range.start as u32..range.end as u32).for_each(|(place, number)| *place = number);
    drop(numbers);
    Ok(buffer)
}
