//! The host operations of a layer, on the pool and with vectors, with the bits of the scalar bodies.
//!
//! Work is shared over rows only where there are enough: a decode step has one row, and a fork costs as much as its
//! norm. Attention is shared over KV heads as well, and over spans of positions where the context is long.

use std::sync::{Mutex, PoisonError};

use neuropil_device::{Activation, Attention, HostOps, Rope, ScalarOps, check_add, check_rms_norm};

use crate::arch::{AttentionParts, AttentionPlan, HostOp};
use crate::crew::Crew;
use crate::mem::Claims;

/// Values below which an operation that touches each once stays on the caller's thread: some microseconds.
const FEW_VALUES: usize = 1 << 15;

/// Multiply-adds below which an attention stays on the caller's thread: some microseconds.
const FEW_PRODUCTS: usize = 1 << 17;

/// Host operations on a pool.
pub struct CpuOps {
    crew: Crew,
    /// Memory for attentions with several spans, kept from one to the next: as many as were at work at a time.
    scratch: Mutex<Vec<Vec<f32>>>,
}

impl CpuOps {
    /// Operations that share a pool with a device.
    pub(crate) fn new(crew: Crew) -> CpuOps {
        CpuOps { crew, scratch: Mutex::default() }
    }

    /// Calls `each` with pieces of `out`, whole rows of `width` values, and where they begin.
    fn by_rows(
        &self,
        name: &'static str,
        out: &mut [f32],
        width: usize,
        each: &(dyn Fn(usize, &mut [f32]) + Sync),
    ) {
        if out.len() < FEW_VALUES {
            return each(0, out);
        }
        let rows = self.crew.pool.chunk_len(out.len() / width, FEW_VALUES.div_ceil(4 * width));
        let pieces = out.len().div_ceil(rows * width);
        let claims = Claims::new(out);
        self.crew.pool.run(name, pieces, &|_| {
            if let Some((at, piece)) = claims.claim(|at| at + rows * width) {
                each(at, piece);
            }
        });
    }
}

impl HostOps for CpuOps {
    fn rms_norm(&self, x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
        check_rms_norm(x, weight, out);
        self.by_rows("norm", out, weight.len(), &|at, out| {
            self.crew.isa.host(HostOp::RmsNorm { x: &x[at..][..out.len()], weight, eps, out });
        });
    }

    fn rope(&self, rope: &Rope<'_>, x: &mut [f32]) {
        let width = rope.check(x.len());
        if width == 0 {
            return;
        }
        self.by_rows("rope", x, width, &|at, x| {
            let table = &rope.table[at / width * rope.pairs..][..x.len() / width * rope.pairs];
            self.crew.isa.host(HostOp::Rope { rope: Rope { table, ..*rope }, x });
        });
    }

    fn attention(&self, job: &Attention<'_>, out: &mut [f32]) {
        job.check(out.len());
        let seen: usize = job.rows.iter().map(|row| job.visible(row).len()).sum();
        let products = seen.saturating_mul(2 * job.heads * job.head_dim);
        let threads = self.crew.pool.threads();
        let wanted = if products < FEW_PRODUCTS || threads == 1 { 1 } else { 8 * threads };
        let plan = AttentionPlan::new(job, wanted);
        let need = plan.scratch();
        let lock = || self.scratch.lock().unwrap_or_else(PoisonError::into_inner);
        let mut scratch = if need == 0 { Vec::new() } else { lock().pop().unwrap_or_default() };
        if scratch.try_reserve(need.saturating_sub(scratch.len())).is_err() {
            // The scalar body is slow, but it takes no memory to speak of.
            return ScalarOps.attention(job, out);
        }
        scratch.resize(need.max(scratch.len()), 0.0);
        let chunks = plan.parts();
        let parts = AttentionParts::new(job, plan, out, &mut scratch);
        let one = |_| self.crew.isa.host(HostOp::Attention(&parts));
        if wanted == 1 {
            (0..chunks).for_each(one)
        } else {
            self.crew.pool.run("attention", chunks, &one)
        }
        if need > 0 {
            lock().push(scratch);
        }
    }

    fn add(&self, x: &mut [f32], y: &[f32]) {
        check_add(x, y);
        self.by_rows("add", x, 1, &|at, x| self.crew.isa.host(HostOp::Add { y: &y[at..][..x.len()], x }));
    }

    fn gate(&self, activation: Activation, values: &mut [f32]) {
        self.by_rows("gate", values, 1, &|_, values| self.crew.isa.host(HostOp::Gate { activation, values }));
    }
}
