//! Puts neurons together: from three matrices to bundles, some positions at a time.
//!
//! Gate and up are rows already. A neuron's down row is a column, and its blocks run across neurons: the matrix is read
//! in strips of 32 rows, which are one block of each neuron's down row, and each strip is widened, turned and quantised
//! anew. So memory is that of the bundles being built and of one strip.

use std::ops::Range;

use neuropil_device::{DType, quant};

use super::source::{Blob, Bytes, Down, Neurons, Rows, Source, row_bytes};
use super::{ConvertError, buffer};
use crate::store::Layout;

/// Rows of a strip: columns of a block of the types that down rows have.
const STRIP: usize = 32;
/// Neurons that are turned together: what a cache line of a strip holds.
const TURNED: usize = 16;
/// Bytes that are read at once.
const READ: usize = 1 << 20;

/// What requantising changed: sums over weights.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Loss {
    /// Of the squared weights, before.
    pub power: f64,
    /// Of the squared differences.
    pub error: f64,
}

impl Loss {
    /// Adds one row, before and after.
    pub(super) fn add(&mut self, before: &[f32], after: &[f32]) {
        let (mut power, mut error) = ([0.0f32; 8], [0.0f32; 8]);
        let (pairs, rest) = before.as_chunks::<8>();
        for (before, after) in pairs.iter().zip(after.as_chunks::<8>().0) {
            for i in 0..8 {
                let (x, d) = (before[i], before[i] - after[i]);
                power[i] += x * x;
                error[i] += d * d;
            }
        }
        let tail = after.len() - rest.len();
        for (x, y) in rest.iter().zip(after.get(tail..).unwrap_or_default()) {
            power[0] += x * x;
            error[0] += (x - y) * (x - y);
        }
        self.power += power.iter().map(|x| f64::from(*x)).sum::<f64>();
        self.error += error.iter().map(|x| f64::from(*x)).sum::<f64>();
    }

    pub(super) fn merge(&mut self, other: Loss) {
        self.power += other.power;
        self.error += other.error;
    }

    /// The root mean square of the differences, as a share of that of the weights.
    pub(super) fn relative(&self) -> f64 {
        if self.error == 0.0 { 0.0 } else { (self.error / self.power).sqrt() }
    }
}

/// The bundles at some positions of one expert.
pub(super) struct Unit<'a> {
    pub source: &'a Source,
    pub neurons: Neurons,
    pub layout: Layout,
    /// Which neuron of the source lies at each position; none when nothing moves.
    pub order: Option<&'a [u32]>,
    pub positions: Range<usize>,
}

/// What a unit has lost, in gate and up, and in down.
pub(super) type Losses = [Loss; 2];

impl Unit<'_> {
    /// Writes the bundles into `out`, which is emptied first.
    pub(super) fn build(&self, out: &mut Vec<u8>) -> Result<Losses, ConvertError> {
        let bytes = self.positions.len() * self.layout.stride;
        out.clear();
        if out.try_reserve_exact(bytes).is_err() {
            return Err(ConvertError::OutOfMemory { bytes: bytes as u64 });
        }
        out.resize(bytes, 0);
        let Layout { gate_type, down_type, gate_bytes, down_at, .. } = self.layout;
        let mut losses = Losses::default();
        self.rows(&self.neurons.gate, gate_type, 0, out, &mut losses[0])?;
        self.rows(&self.neurons.up, gate_type, gate_bytes, out, &mut losses[0])?;
        match &self.neurons.down {
            Down::Rows(rows) => self.rows(rows, down_type, down_at, out, &mut losses[1])?,
            // Floats have no blocks that would run the other way.
            Down::Columns { blob, dtype } if *dtype == down_type && dtype.block_elements() == 1 => {
                match dtype.block_bytes() {
                    4 => self.turn_elements::<4>(*blob, out)?,
                    _ => self.turn_elements::<2>(*blob, out)?,
                }
            }
            Down::Columns { blob, dtype } => self.turn(*blob, *dtype, out, &mut losses[1])?,
        }
        Ok(losses)
    }

    fn files(&self) -> &dyn Bytes {
        &*self.source.bytes
    }

    /// The position in the source of what goes to `position`.
    fn from(&self, position: usize) -> usize {
        self.order.and_then(|order| order.get(position)).map_or(position, |from| *from as usize)
    }

    /// Copies or requantises one row of each neuron to `at` in its bundle.
    fn rows(
        &self,
        rows: &Rows,
        to: DType,
        at: usize,
        out: &mut [u8],
        loss: &mut Loss,
    ) -> Result<(), ConvertError> {
        let (width, stride) = (self.layout.width, self.layout.stride);
        let bytes = row_bytes(rows, width);
        let wanted = quant::bundle_row_bytes(to, width).unwrap_or(0);
        let mut scratch = Scratch::new(width, to);
        let most = (READ / rows.stride).max(1);
        let mut read = buffer((most * rows.stride) as u64)?;
        let mut position = self.positions.start;
        while position < self.positions.end {
            let first = self.from(position);
            let follows =
                |n: &usize| position + n < self.positions.end && self.from(position + n) == first + n;
            let count = (1..most).take_while(follows).count() + 1;
            let span = (count - 1) * rows.stride + bytes;
            let from = first * rows.stride + rows.at;
            let Some(piece) = read.get_mut(..span) else { break };
            self.files().read(rows.blob, from as u64, piece)?;
            for (i, row) in piece.chunks(rows.stride).enumerate() {
                let start = (position + i - self.positions.start) * stride + at;
                let (Some(row), Some(out)) = (row.get(..bytes), out.get_mut(start..start + wanted)) else {
                    break;
                };
                match (rows.dtype == to, rows.bundled) {
                    (true, true) => out.copy_from_slice(row),
                    (true, false) => quant::bundle_row(to, width, row, out),
                    (false, _) => scratch.requantise(rows, row, out, loss),
                }
            }
            position += count;
        }
        Ok(())
    }

    /// The columns of a strip that are needed, in whole blocks of `block`.
    fn columns(&self, block: usize) -> Range<usize> {
        let mut wanted = self.positions.clone();
        if self.order.is_some() {
            let all = || self.positions.clone().map(|position| self.from(position));
            wanted = all().min().unwrap_or(0)..all().max().map_or(0, |last| last + 1);
        }
        wanted.start / block * block..wanted.end.next_multiple_of(block).min(self.layout.neurons)
    }

    /// Reads the bytes of some columns of the rows of a strip, `row_bytes` apart in the file.
    fn strip(
        &self,
        blob: Blob,
        row_bytes: usize,
        rows: Range<usize>,
        cols: Range<usize>,
        out: &mut [u8],
    ) -> Result<(), ConvertError> {
        if cols.len() == row_bytes {
            return self.files().read(blob, (rows.start * row_bytes) as u64, out);
        }
        for (row, out) in rows.zip(out.chunks_exact_mut(cols.len())) {
            self.files().read(blob, (row * row_bytes + cols.start) as u64, out)?;
        }
        Ok(())
    }

    /// Turns columns of weights that keep their bits into down rows.
    fn turn_elements<const N: usize>(&self, blob: Blob, out: &mut [u8]) -> Result<(), ConvertError> {
        let Layout { width, neurons, stride, down_at, .. } = self.layout;
        let cols = self.columns(1);
        let mut read = buffer((STRIP * cols.len() * N) as u64)?;
        for start in (0..width).step_by(STRIP) {
            let rows = start..width.min(start + STRIP);
            let piece = read.get_mut(..rows.len() * cols.len() * N).unwrap_or_default();
            self.strip(blob, neurons * N, rows.clone(), cols.start * N..cols.end * N, piece)?;
            let elements = piece.as_chunks::<N>().0;
            for (i, bundle) in out.chunks_exact_mut(stride).enumerate() {
                let col = self.from(self.positions.start + i) - cols.start;
                let column = elements.iter().skip(col).step_by(cols.len());
                let row = bundle.get_mut(down_at + start * N..).unwrap_or_default();
                row.as_chunks_mut::<N>().0.iter_mut().zip(column).for_each(|(out, element)| *out = *element);
            }
        }
        Ok(())
    }

    /// Turns columns of weights of one type into down rows of another.
    fn turn(&self, blob: Blob, from: DType, out: &mut [u8], loss: &mut Loss) -> Result<(), ConvertError> {
        let Layout { width, neurons, stride, down_at, down_type, .. } = self.layout;
        let bytes = |n| from.row_bytes(n).unwrap_or(0);
        let cols = self.columns(from.block_elements());
        let down_bytes = quant::bundle_row_bytes(down_type, width).unwrap_or(0);
        let span = cols.len();
        let mut read = buffer((STRIP * bytes(span)) as u64)?;
        let mut wide: Vec<f32> = super::reserved(STRIP * span)?;
        wide.resize(STRIP * span, 0.0);
        let mut turned = [0.0f32; TURNED * STRIP];
        let mut back = [0.0f32; TURNED * STRIP];
        let mut codes = [0u8; TURNED * STRIP * 4];
        for start in (0..width).step_by(STRIP) {
            let rows = start..width.min(start + STRIP);
            let depth = rows.len();
            let piece = read.get_mut(..depth * bytes(span)).unwrap_or_default();
            self.strip(blob, bytes(neurons), rows, bytes(cols.start)..bytes(cols.end), piece)?;
            let wide = wide.get_mut(..depth * span).unwrap_or_default();
            quant::dequantize_row(from, piece, wide);
            let block = down_type.row_bytes(depth).unwrap_or(0);
            for (first, bundles) in out.chunks_mut(TURNED * stride).enumerate() {
                let count = bundles.len() / stride;
                let position = self.positions.start + first * TURNED;
                self.gather(wide, span, position..position + count, cols.start, depth, &mut turned);
                let values = turned.get(..count * depth).unwrap_or_default();
                let codes = codes.get_mut(..count * block).unwrap_or_default();
                let back = back.get_mut(..count * depth).unwrap_or_default();
                quant::quantize_row(down_type, values, codes);
                quant::dequantize_row(down_type, codes, back);
                loss.add(values, back);
                for (bundle, codes) in bundles.chunks_exact_mut(stride).zip(codes.chunks_exact(block)) {
                    let Some(row) = bundle.get_mut(down_at..down_at + down_bytes) else { break };
                    quant::bundle_row_part(down_type, width, start, codes, row);
                }
            }
        }
        Ok(())
    }

    /// Collects the columns of some positions out of a strip, one after the other.
    fn gather(
        &self,
        wide: &[f32],
        span: usize,
        positions: Range<usize>,
        first: usize,
        depth: usize,
        turned: &mut [f32; TURNED * STRIP],
    ) {
        let count = positions.len();
        let start = self.from(positions.start) - first;
        if self.order.is_none() && count == TURNED && depth == STRIP {
            for (k, row) in wide.chunks_exact(span).enumerate() {
                let Some(row) = row.get(start..start + TURNED) else { return };
                for (j, value) in row.iter().enumerate() {
                    turned[j * STRIP + k] = *value;
                }
            }
            return;
        }
        for (position, out) in positions.zip(turned.chunks_exact_mut(depth)) {
            let column = wide.iter().skip(self.from(position) - first).step_by(span);
            out.iter_mut().zip(column).for_each(|(out, value)| *out = *value);
        }
    }
}

/// Memory for requantising one row.
struct Scratch {
    to: DType,
    before: Vec<f32>,
    after: Vec<f32>,
    file: Vec<u8>,
}

impl Scratch {
    fn new(width: usize, to: DType) -> Scratch {
        let file = vec![0; to.row_bytes(width).unwrap_or(0)];
        Scratch { to, before: vec![0.0; width], after: vec![0.0; width], file }
    }

    fn requantise(&mut self, rows: &Rows, row: &[u8], out: &mut [u8], loss: &mut Loss) {
        let Scratch { to, before, after, file } = self;
        match rows.bundled {
            true => quant::dequantize_bundle_row(rows.dtype, row, before),
            false => quant::dequantize_row(rows.dtype, row, before),
        }
        quant::quantize_row(*to, before, file);
        quant::dequantize_row(*to, file, after);
        loss.add(before, after);
        quant::bundle_row(*to, before.len(), file, out);
    }
}
