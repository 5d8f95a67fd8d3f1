//! What the architectures of the Llama family share: the two ends of a model, and attention.
//!
//! The steps of a forward pass, for an architecture's file to put in order. Each adds its time to the step's account.

use std::sync::Arc;

use neuropil_device::{
    Attention, AttentionRow, DType, HostOps, MatmulJob, PreparedWeight, Product, Rope, WriteLease, quant,
};

use crate::engine::EngineError;
use crate::gguf::{Gguf, TensorInfo};
use crate::pipeline::{ExpertShape, Lap, Scratch, ScratchShape};
use crate::sched::Weights;
use crate::submit::Placed;

use super::kv::LayerPages;
use super::load::Loader;
use super::rope::RopeTable;
use super::source::file_type;
use super::{ModelError, ModelSpec, Step};

/// Rows of logits computed at a time.
pub(crate) const LOGIT_ROWS: usize = 16;

/// A model but for its layers.
pub(crate) struct Frame {
    pub spec: ModelSpec,
    gguf: Arc<Gguf>,
    ops: Arc<dyn HostOps>,
    rope: RopeTable,
    /// Stays in the file: a token reads one row of it. Not through the map, which a file that becomes shorter would
    /// end the process through.
    embedding: TensorInfo,
    embedding_type: DType,
    output_norm: Vec<f32>,
    output: Placed,
}

/// The attention of one layer.
pub(crate) struct SelfAttention {
    norm: Vec<f32>,
    qkv: Weights,
    output: Weights,
    /// Whether queries and keys turn with their positions.
    pub rotates: bool,
    /// Positions that a token sees, its own included; `None` for all.
    pub window: Option<usize>,
}

impl Frame {
    /// Loads the ends of a file whose tensors were checked.
    pub(crate) fn load(
        spec: ModelSpec,
        gguf: Arc<Gguf>,
        ops: Arc<dyn HostOps>,
        loader: &mut Loader<'_>,
    ) -> Result<Frame, ModelError> {
        let embedding = gguf.require("token_embd.weight")?.clone();
        let embedding_type = file_type(&embedding)?;
        let factors = match gguf.tensor("rope_freqs.weight") {
            Some(tensor) => Some(loader.vector(&tensor.name)?),
            None => None,
        };
        // Before the layers: it is the largest matrix, and is read while little else is in memory.
        let output = gguf.tensor("output.weight").unwrap_or(&embedding);
        let output = loader.matrix(&output.name, spec.vocab, spec.width)?;
        let output_norm = loader.vector("output_norm.weight")?;
        let rope = RopeTable::new(&spec, factors.as_deref());
        Ok(Frame { spec, gguf, ops, rope, embedding, embedding_type, output_norm, output })
    }

    /// Loads the attention of a layer, which rotates and sees as far as the model's keys say.
    pub(crate) fn load_attention(
        &self,
        index: usize,
        loader: &mut Loader<'_>,
    ) -> Result<SelfAttention, ModelError> {
        let ModelSpec { width, heads, kv_heads, head_dim, window, .. } = self.spec;
        let (q, kv) = (heads * head_dim, kv_heads * head_dim);
        let name = |part: &str| format!("blk.{index}.{part}.weight");
        let [attn_q, attn_k, attn_v] = ["attn_q", "attn_k", "attn_v"].map(name);
        Ok(SelfAttention {
            norm: loader.vector(&name("attn_norm"))?,
            qkv: loader.matrices("attn_qkv", &[(&attn_q, q), (&attn_k, kv), (&attn_v, kv)], width)?,
            output: loader.matrices("attn_output", &[(&name("attn_output"), width)], q)?,
            rotates: true,
            window,
        })
    }

    /// What a step needs.
    pub(crate) fn scratch_shape(&self) -> ScratchShape {
        let ModelSpec { width, heads, kv_heads, head_dim, vocab, .. } = self.spec;
        let experts = self.spec.experts.map_or(ExpertShape::default(), |experts| ExpertShape {
            experts: experts.count,
            used: experts.used,
        });
        ScratchShape { width, q: heads * head_dim, kv: kv_heads * head_dim, vocab, experts }
    }

    /// The residual stream starts as the tokens' embeddings.
    pub(crate) fn embed(
        &self,
        step: &Step<'_>,
        scratch: &mut Scratch,
        lap: &mut Lap,
    ) -> Result<(), EngineError> {
        let row_bytes = self.embedding.bytes / self.spec.vocab as u64;
        scratch.row.resize(row_bytes as usize, 0);
        let mut x = scratch.x.write()?;
        for (token, x) in step.tokens.iter().zip(x.slice_mut().chunks_exact_mut(self.spec.width)) {
            self.gguf.read_part(&self.embedding, u64::from(*token) * row_bytes, &mut scratch.row)?;
            quant::dequantize_row(self.embedding_type, &scratch.row, x);
        }
        scratch.rope.clear();
        step.rows.iter().for_each(|row| self.rope.extend(row.position, &mut scratch.rope));
        lap.add_to(&mut scratch.times.other);
        Ok(())
    }

    /// The stream, normed, as the input of what comes next.
    pub(crate) fn norm(
        &self,
        weight: &[f32],
        tokens: usize,
        scratch: &mut Scratch,
        lap: &mut Lap,
    ) -> Result<(), EngineError> {
        let len = tokens * self.spec.width;
        let x = scratch.x.read()?;
        self.ops.rms_norm(
            &x.slice()[..len],
            weight,
            self.spec.norm_eps,
            &mut scratch.h.write()?.slice_mut()[..len],
        );
        lap.add_to(&mut scratch.times.other);
        Ok(())
    }

    /// The attention of layer `index`, norm included, added to the stream.
    pub(crate) fn attend(
        &self,
        attention: &SelfAttention,
        index: usize,
        step: &mut Step<'_>,
        scratch: &mut Scratch,
        lap: &mut Lap,
    ) -> Result<(), EngineError> {
        let ModelSpec { heads, kv_heads, head_dim, rope_adjacent, .. } = self.spec;
        let tokens = step.tokens.len();

        // Queries, keys and values of the normed stream, one job.
        self.norm(&attention.norm, tokens, scratch, lap)?;
        attention.qkv.matmul(tokens, &mut scratch.jobs, |weights| {
            let outputs = [&scratch.q, &scratch.k, &scratch.v];
            let job = MatmulJob::new(tokens, scratch.h.read()?);
            weights
                .iter()
                .zip(outputs)
                .try_fold(job, |job, (w, y)| Ok(job.with(product(w, y.write()?, false))))
        })?;
        lap.add_to(&mut scratch.times.projections);

        // Rotate, remember, attend.
        let (q_len, kv_len) = (tokens * heads * head_dim, tokens * kv_heads * head_dim);
        if attention.rotates {
            let (table, pairs) = (&scratch.rope[..], self.rope.pairs());
            let rope = Rope { table, pairs, head_dim, adjacent: rope_adjacent };
            self.ops.rope(&rope, &mut scratch.q.write()?.slice_mut()[..q_len]);
            self.ops.rope(&rope, &mut scratch.k.write()?.slice_mut()[..kv_len]);
        }
        self.store(step, index, scratch)?;
        let q = scratch.q.read()?;
        let job = Attention {
            q: &q.slice()[..q_len],
            rows: step.rows,
            kv: &LayerPages { sequences: &*step.sequences, layer: index },
            heads,
            kv_heads,
            head_dim,
            scale: 1.0 / (head_dim as f32).sqrt(),
            window: attention.window,
        };
        self.ops.attention(&job, &mut scratch.attn.write()?.slice_mut()[..q_len]);
        drop(q);
        lap.add_to(&mut scratch.times.attention);

        attention.output.matmul(tokens, &mut scratch.jobs, |weights| {
            let job = MatmulJob::new(tokens, scratch.attn.read()?);
            Ok(job.with(product(&weights[0], scratch.x.write()?, true)))
        })?;
        lap.add_to(&mut scratch.times.projections);
        Ok(())
    }

    /// Writes the new keys and values to the caches.
    fn store(&self, step: &mut Step<'_>, layer: usize, scratch: &Scratch) -> Result<(), EngineError> {
        let kv = self.spec.kv_heads * self.spec.head_dim;
        let (k, v) = (scratch.k.read()?, scratch.v.read()?);
        let rows = k.slice::<f32>().chunks_exact(kv).zip(v.slice::<f32>().chunks_exact(kv));
        for (AttentionRow { sequence, position }, (k, v)) in step.rows.iter().zip(rows) {
            step.sequences.cache_mut(*sequence).write(layer, *position, k, v);
        }
        Ok(())
    }

    /// Logits of the rows that were asked for, a few at a time. All that the step reads from the file is here by then:
    /// nobody gets logits that another file had a part in.
    pub(crate) fn logits(
        &self,
        step: &mut Step<'_>,
        scratch: &mut Scratch,
        lap: &mut Lap,
    ) -> Result<(), EngineError> {
        if scratch.check_files {
            self.gguf.unchanged()?;
        }
        let ModelSpec { width, norm_eps, vocab, .. } = self.spec;
        for outputs in step.outputs.chunks(LOGIT_ROWS) {
            {
                let x = scratch.x.read()?;
                let mut h = scratch.h.write()?;
                for (output, h) in outputs.iter().zip(h.slice_mut::<f32>().chunks_exact_mut(width)) {
                    let x = &x.slice::<f32>()[output * width..][..width];
                    self.ops.rms_norm(x, &self.output_norm, norm_eps, h);
                }
            }
            let product = product(&self.output.weight, scratch.logits.write()?, false);
            let job = MatmulJob::new(outputs.len(), scratch.h.read()?).with(product);
            scratch.jobs.matmul(&*self.output.device, job)?;
            let logits = scratch.logits.read()?;
            for (output, logits) in outputs.iter().zip(logits.slice::<f32>().chunks_exact(vocab)) {
                step.sequences.take_logits(*output, logits)?;
            }
        }
        lap.add_to(&mut scratch.times.head);
        Ok(())
    }
}

/// One product of a job.
pub(crate) fn product(weight: &PreparedWeight, y: WriteLease, accumulate: bool) -> Product {
    Product { weight: weight.clone(), y, accumulate }
}
