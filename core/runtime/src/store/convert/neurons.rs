//! Puts neurons together: from three matrices to bundles, some positions at a time.
//!
//! Gate and up are rows already. A neuron's down row is a column, and its blocks run across neurons: the matrix is read
//! in strips of some rows, which are some blocks of each neuron's down row, and each strip is widened, turned and
//! quantised anew. So memory is that of the bundles being built and of one strip. Strips are walked in the order of the
//! source, whatever the order of the bundles: what is scattered are then the writes, of whole cache lines.

use std::ops::Range;

use neuropil_device::{DType, quant};

use super::source::{Blob, Bytes, Down, Neurons, Rows, Source, row_bytes};
use super::{ConvertError, buffer};
use crate::store::Layout;

/// Rows of a strip. They become some blocks of each neuron's down row, whose codes fill whole cache lines.
const STRIP: usize = 128;
/// Columns of a strip that are widened at once: with its rows, what a cache holds.
const WIDENED: usize = 1024;
/// Neurons that are turned together: what a cache line of a strip holds.
const TURNED: usize = 16;
/// Marks a column whose neuron is not among the positions of the unit.
const ELSEWHERE: u32 = u32::MAX;
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
        // One sum after the other, each in a new array: then they become vectors.
        for before in pairs {
            let mut next = power;
            for i in 0..8 {
                next[i] = power[i] + before[i] * before[i];
            }
            power = next;
        }
        for (before, after) in pairs.iter().zip(after.as_chunks::<8>().0) {
            let mut next = error;
            for i in 0..8 {
                let difference = before[i] - after[i];
                next[i] = error[i] + difference * difference;
            }
            error = next;
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

    /// The columns of the matrix that are needed, in whole blocks of `block`, and for each its place in the unit.
    fn columns(&self, block: usize) -> Result<(Range<usize>, Vec<u32>), ConvertError> {
        let all = || self.positions.clone().map(|position| self.from(position));
        let first = all().min().unwrap_or(0) / block * block;
        let last = all().max().map_or(0, |last| last + 1);
        let cols = first..last.next_multiple_of(block).min(self.layout.neurons);
        let mut places = super::reserved(cols.len())?;
        places.resize(cols.len(), ELSEWHERE);
        for (place, col) in (0..).zip(all()) {
            if let Some(slot) = places.get_mut(col - first) {
                *slot = place;
            }
        }
        Ok((cols, places))
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
        let (cols, places) = self.columns(1)?;
        let mut read = buffer((STRIP * cols.len() * N) as u64)?;
        for start in (0..width).step_by(STRIP) {
            let rows = start..width.min(start + STRIP);
            let piece = read.get_mut(..rows.len() * cols.len() * N).unwrap_or_default();
            self.strip(blob, neurons * N, rows, cols.start * N..cols.end * N, piece)?;
            let elements = piece.as_chunks::<N>().0;
            for (col, place) in places.iter().enumerate().filter(|(_, place)| **place != ELSEWHERE) {
                let at = *place as usize * stride + down_at + start * N;
                let row = out.get_mut(at..at + (width - start).min(STRIP) * N).unwrap_or_default();
                let column = elements.iter().skip(col).step_by(cols.len());
                row.as_chunks_mut::<N>().0.iter_mut().zip(column).for_each(|(out, element)| *out = *element);
            }
        }
        Ok(())
    }

    /// Turns columns of weights of one type into down rows of another.
    fn turn(&self, blob: Blob, from: DType, out: &mut [u8], loss: &mut Loss) -> Result<(), ConvertError> {
        let Layout { width, neurons, down_type, .. } = self.layout;
        let bytes = |n| from.row_bytes(n).unwrap_or(0);
        let (cols, places) = self.columns(from.block_elements())?;
        let mut read = buffer((STRIP * bytes(cols.len())) as u64)?;
        let mut wide: Vec<f32> = super::reserved(STRIP * WIDENED)?;
        wide.resize(STRIP * WIDENED, 0.0);
        let mut turned = Turned::new();
        for start in (0..width).step_by(STRIP) {
            let rows = start..width.min(start + STRIP);
            let depth = rows.len();
            let row = bytes(cols.len());
            let piece = read.get_mut(..depth * row).unwrap_or_default();
            self.strip(blob, bytes(neurons), rows, bytes(cols.start)..bytes(cols.end), piece)?;
            for (index, places) in places.chunks(WIDENED).enumerate() {
                let (at, span) = (bytes(index * WIDENED), places.len());
                for (row, wide) in piece.chunks_exact(row).zip(wide.chunks_exact_mut(span)) {
                    let blocks = row.get(at..at + bytes(span)).unwrap_or_default();
                    quant::dequantize_row(from, blocks, wide);
                }
                let wide = wide.get(..depth * span).unwrap_or_default();
                for (index, places) in places.chunks(TURNED).enumerate() {
                    turned.gather(wide, span, index * TURNED, places);
                    let count = turned.places.len();
                    turned.requantise(down_type, count * depth, loss);
                    self.put(&turned, start, depth, out);
                }
            }
        }
        Ok(())
    }

    /// Puts the blocks of some neurons into their down rows, from column `start` on.
    fn put(&self, turned: &Turned, start: usize, depth: usize, out: &mut [u8]) {
        let Layout { width, stride, down_at, down_type, .. } = self.layout;
        let to = quant::BundleRow::new(down_type, width);
        let bytes = quant::bundle_row_bytes(down_type, width).unwrap_or(0);
        let first = start / down_type.block_elements();
        let piece = down_type.row_bytes(depth).unwrap_or(0).max(1);
        for (place, codes) in turned.places.iter().zip(turned.codes.chunks_exact(piece)) {
            let at = *place as usize * stride + down_at;
            let Some(row) = out.get_mut(at..at + bytes) else { return };
            match &to {
                Some(to) => to.sort(down_type, first, codes, row),
                None => quant::bundle_row_part(down_type, width, start, codes, row),
            }
        }
    }
}

/// Some columns of a strip, one after the other, and what became of them.
struct Turned {
    /// Where in the unit the neuron of each column lies.
    places: Vec<u32>,
    values: [f32; TURNED * STRIP],
    codes: [u8; TURNED * STRIP * 4],
    back: [f32; TURNED * STRIP],
}

impl Turned {
    fn new() -> Turned {
        let places = Vec::with_capacity(TURNED);
        Turned { places, values: [0.0; _], codes: [0; _], back: [0.0; _] }
    }

    /// Collects those of the columns from `first` on, one for each of `places`, that belong to the unit.
    fn gather(&mut self, wide: &[f32], span: usize, first: usize, places: &[u32]) {
        self.places.clear();
        self.places.extend(places.iter().filter(|place| **place != ELSEWHERE));
        let depth = wide.len() / span;
        if self.places.len() == TURNED && depth == STRIP {
            for (k, row) in wide.chunks_exact(span).enumerate() {
                let Some(row) = row.get(first..first + TURNED) else { return };
                for (j, value) in row.iter().enumerate() {
                    self.values[j * STRIP + k] = *value;
                }
            }
            return;
        }
        let mine = places.iter().enumerate().filter(|(_, place)| **place != ELSEWHERE);
        for ((col, _), out) in mine.zip(self.values.chunks_exact_mut(depth)) {
            let column = wide.iter().skip(first + col).step_by(span);
            out.iter_mut().zip(column).for_each(|(out, value)| *out = *value);
        }
    }

    /// Quantises the first `count` values.
    fn requantise(&mut self, to: DType, count: usize, loss: &mut Loss) {
        let bytes = to.row_bytes(count).unwrap_or(0);
        let values = self.values.get(..count).unwrap_or_default();
        let codes = self.codes.get_mut(..bytes).unwrap_or_default();
        let back = self.back.get_mut(..count).unwrap_or_default();
        quant::quantize_row(to, values, codes);
        quant::dequantize_row(to, codes, back);
        loss.add(values, back);
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
