//! The pool and the instruction set together: matrix products spread over threads.
//!
//! One fork serves all products of a job. A chunk is some row groups of one product for all tokens; it is small, so
//! that a late thread costs little, but lasts some microseconds, so that claiming it costs nothing.

use std::sync::{Arc, Mutex, PoisonError};

use neuropil_device::{DeviceError, MAX_PRODUCTS, Matrix, OutOfMemory, RowSource};

use crate::arch::Isa;
use crate::kernels::{Activations, Input, matmul_groups};
use crate::mem::{Claims, Columns};
use crate::pack::{GROUP_ROWS, PackError, Packed, pack_groups};
use crate::pool::Pool;

/// Multiply-adds that make a chunk worth claiming: about two microseconds of one token's.
const CHUNK_PRODUCTS: usize = 1 << 15;

/// Row groups that the kernels read side by side when there are few tokens; a chunk is a multiple of it.
const STREAM_GROUPS: usize = 4;

/// Activations that one thread quantises faster than a fork takes.
const FEW_ACTIVATIONS: usize = 1 << 13;

/// Bytes to pack in a chunk at least.
const PACK_CHUNK: usize = 64 << 10;

/// Bytes of rows that a thread reads at a time to pack them, unless one group is larger.
const MOST_STAGED: usize = 1 << 20;

/// The threads and what they can do.
#[derive(Clone)]
pub(crate) struct Crew {
    pub pool: Arc<Pool>,
    pub isa: Isa,
}

/// One product, ready to run.
pub(crate) struct Work<'a> {
    pub weight: &'a Packed,
    pub input: Input<'a>,
    pub y: Columns<'a>,
    pub accumulate: bool,
}

impl Crew {
    /// Row groups in a chunk, when there are `groups` of that width.
    pub fn groups_per_chunk(&self, groups: usize, cols: usize, tokens: usize) -> usize {
        let groups = self.chunk_groups(groups, cols, tokens);
        if tokens < 4 { groups.next_multiple_of(STREAM_GROUPS) } else { groups }
    }

    /// The same for groups that are not read side by side.
    pub fn chunk_groups(&self, groups: usize, cols: usize, tokens: usize) -> usize {
        let products = (GROUP_ROWS * cols).saturating_mul(tokens).max(1);
        self.pool.chunk_len(groups, CHUNK_PRODUCTS.div_ceil(products))
    }

    /// Quantises `x[tokens, cols]`.
    pub fn quantize(
        &self,
        activations: &mut Activations,
        x: &[f32],
        tokens: usize,
        cols: usize,
    ) -> Result<(), OutOfMemory> {
        if tokens == 1 {
            return activations.quantize_row(self.isa, x);
        }
        activations.reserve(tokens, cols)?;
        if x.len() < FEW_ACTIVATIONS {
            activations.quantize(self.isa, x);
            return Ok(());
        }
        let parts = activations.parts(x);
        self.pool.run("quantise", self.pool.threads(), &|_| while parts.quantize_next(self.isa) {});
        Ok(())
    }

    /// Runs up to [`MAX_PRODUCTS`] products, which have the same width, in one fork.
    pub fn multiply(&self, work: &[Option<Work<'_>>; MAX_PRODUCTS], tokens: usize) {
        let all = || work.iter().flatten();
        let groups = all().map(|w| w.weight.groups()).sum();
        let per_chunk =
            self.groups_per_chunk(groups, all().map(|w| w.weight.cols()).max().unwrap_or(0), tokens);
        let chunks = |w: &Work<'_>| w.weight.groups().div_ceil(per_chunk);
        self.pool.run("matmul", all().map(chunks).sum(), &|mut chunk| {
            for w in all() {
                if let Some(later) = chunk.checked_sub(chunks(w)) {
                    chunk = later;
                } else {
                    if let Some(range) = w.y.claim(per_chunk) {
                        matmul_groups(self.isa, w.weight, w.input, range, w.accumulate);
                    }
                    return;
                }
            }
        });
    }

    /// Packs a weight that was checked, in the memory of an old one where it fits. Each thread reads the rows that it
    /// packs, about [`MOST_STAGED`] bytes at a time; beside the packed weight that is all the memory it takes.
    pub fn pack(&self, matrix: &Matrix<'_>, recycle: Option<Packed>) -> Result<Packed, PackFailure> {
        let Matrix { dtype, rows, cols, data } = *matrix;
        let mut packed = Packed::unfilled(dtype, rows, cols, recycle)?;
        let (groups, group) = (packed.groups(), packed.group_bytes());
        let source_group = data.len() / rows * GROUP_ROWS;
        let most = (MOST_STAGED / source_group).max(1);
        let per_chunk = self.pool.chunk_len(groups, PACK_CHUNK.div_ceil(group)).min(most);
        let claims = Claims::new(packed.bytes_mut());
        let failure = Mutex::new(None);
        // Buffers that wait for the next chunk: one for each thread that has begun one.
        let staging = Mutex::new(Vec::new());
        let lock = || staging.lock().unwrap_or_else(PoisonError::into_inner);
        self.pool.run("pack", groups.div_ceil(per_chunk), &|_| {
            let Some((at, target)) = claims.claim(|at| at + per_chunk * group) else { return };
            let first = at / group * source_group;
            let end = data.len().min(first + target.len() / group * source_group);
            let mut rows: Vec<u8> = lock().pop().unwrap_or_default();
            let packed = read(data, first, end, &mut rows)
                .and_then(|()| Ok(pack_groups(self.isa, dtype, cols, &rows, target)?));
            lock().push(rows);
            if let Err(error) = packed {
                failure.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
            }
        });
        match failure.into_inner().unwrap_or_else(PoisonError::into_inner) {
            Some(error) => Err(error),
            None => Ok(packed),
        }
    }
}

/// Why a weight was not packed.
#[derive(Debug)]
pub(crate) enum PackFailure {
    /// Its shape, or no memory.
    Pack(PackError),
    /// Its bytes could not be read.
    Source(DeviceError),
}

impl From<PackError> for PackFailure {
    fn from(error: PackError) -> PackFailure {
        PackFailure::Pack(error)
    }
}

/// Reads the bytes from `first` to `end` into `rows`.
fn read(data: &dyn RowSource, first: usize, end: usize, rows: &mut Vec<u8>) -> Result<(), PackFailure> {
    let more = (end - first).saturating_sub(rows.len());
    rows.try_reserve_exact(more).map_err(|_| PackError::OutOfMemory(OutOfMemory(more)))?;
    rows.resize(end - first, 0);
    data.read(first, rows).map_err(PackFailure::Source)
}
