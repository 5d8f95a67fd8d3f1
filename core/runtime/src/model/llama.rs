//! The Llama family: Llama 2 and 3, Mistral, SmolLM2.
//!
//! Grouped-query attention with rotary embedding, a gated feed-forward, RMS norms, an output matrix that may be the
//! embedding. [`Llama::forward`] reads top to bottom.

use std::sync::Arc;

use neuropil_device::{
    Attention, AttentionRow, DType, HostOps, MatmulJob, PreparedWeight, Product, Rope, WriteLease, quant,
};

use crate::engine::EngineError;
use crate::gguf::{Gguf, TensorInfo};
use crate::pipeline::{Lap, Scratch, ScratchShape};

use super::ffn::{Ffn, FfnInput};
use super::kv::LayerPages;
use super::load::{Loader, Placed, PlacedTrio, file_type};
use super::rope::RopeTable;
use super::{Model, ModelError, ModelSpec, Step, TensorShape};

/// A model of the Llama family, its weights on devices.
pub(crate) struct Llama {
    spec: ModelSpec,
    gguf: Arc<Gguf>,
    ops: Arc<dyn HostOps>,
    rope: RopeTable,
    /// Stays in the file's map: a token touches one row of it.
    embedding: TensorInfo,
    embedding_type: DType,
    layers: Vec<Layer>,
    output_norm: Vec<f32>,
    output: Placed,
}

struct Layer {
    attn_norm: Vec<f32>,
    qkv: PlacedTrio,
    attn_output: Placed,
    ffn_norm: Vec<f32>,
    ffn: Ffn,
}

impl Llama {
    /// The tensors of a model, with their dimensions (fastest first). `has` tells which of the optional ones are there.
    pub(crate) fn tensors<'a>(
        spec: &'a ModelSpec,
        has: &dyn Fn(&str) -> bool,
    ) -> impl Iterator<Item = TensorShape> + use<'a> {
        let ModelSpec { width, neurons, vocab, .. } = *spec;
        let (q, kv) = (spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim);
        let tensor = |name: String, dims: &[usize]| TensorShape { name, dims: dims.to_vec() };
        let mut ends = vec![
            tensor("token_embd.weight".into(), &[width, vocab]),
            tensor("output_norm.weight".into(), &[width]),
        ];
        if has("output.weight") {
            ends.push(tensor("output.weight".into(), &[width, vocab]));
        }
        if has("rope_freqs.weight") {
            ends.push(tensor("rope_freqs.weight".into(), &[spec.rope_dim / 2]));
        }
        let layer = move |index: usize| {
            let of = |part: &str, dims: &[usize]| tensor(format!("blk.{index}.{part}.weight"), dims);
            [
                of("attn_norm", &[width]),
                of("attn_q", &[width, q]),
                of("attn_k", &[width, kv]),
                of("attn_v", &[width, kv]),
                of("attn_output", &[q, width]),
                of("ffn_norm", &[width]),
                of("ffn_gate", &[width, neurons]),
                of("ffn_up", &[width, neurons]),
                of("ffn_down", &[neurons, width]),
            ]
        };
        ends.into_iter().chain((0..spec.layers).flat_map(layer))
    }

    /// Loads the weights of a file whose tensors were checked.
    pub(crate) fn load(
        spec: ModelSpec,
        gguf: Arc<Gguf>,
        ops: Arc<dyn HostOps>,
        loader: &mut Loader<'_>,
    ) -> Result<Llama, ModelError> {
        let ModelSpec { width, neurons, vocab, .. } = spec;
        let (q, kv) = (spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim);
        let embedding = gguf.require("token_embd.weight")?.clone();
        let embedding_type = file_type(&embedding)?;
        let factors = match gguf.tensor("rope_freqs.weight") {
            Some(tensor) => Some(loader.vector(&tensor.name)?),
            None => None,
        };
        // The output matrix first: it is the largest, and is read while little else is in memory.
        let output = gguf.tensor("output.weight").unwrap_or(&embedding);
        let output = loader.matrix(&output.name, vocab, width)?;
        let mut layers = Vec::new();
        for index in 0..spec.layers {
            let name = |part: &str| format!("blk.{index}.{part}.weight");
            let [attn_q, attn_k, attn_v] = ["attn_q", "attn_k", "attn_v"].map(name);
            let [gate, up, down] = ["ffn_gate", "ffn_up", "ffn_down"].map(name);
            layers.push(Layer {
                attn_norm: loader.vector(&name("attn_norm"))?,
                qkv: loader.trio([(&attn_q, q), (&attn_k, kv), (&attn_v, kv)], width)?,
                attn_output: loader.matrix(&name("attn_output"), width, q)?,
                ffn_norm: loader.vector(&name("ffn_norm"))?,
                ffn: Ffn::Block(loader.neurons([&gate, &up, &down], neurons, width)?),
            });
        }
        let output_norm = loader.vector("output_norm.weight")?;
        let rope = RopeTable::new(&spec, factors.as_deref());
        Ok(Llama { spec, gguf, ops, rope, embedding, embedding_type, layers, output_norm, output })
    }

    /// Writes the tokens' embeddings to `x`.
    fn embed(&self, tokens: &[u32], x: &mut [f32]) {
        let table = self.gguf.data(&self.embedding);
        let row_bytes = table.len() / self.spec.vocab;
        for (token, x) in tokens.iter().zip(x.chunks_exact_mut(self.spec.width)) {
            quant::dequantize_row(self.embedding_type, &table[*token as usize * row_bytes..][..row_bytes], x);
        }
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
}

impl Model for Llama {
    fn spec(&self) -> &ModelSpec {
        &self.spec
    }

    fn scratch_shape(&self) -> ScratchShape {
        ScratchShape {
            width: self.spec.width,
            q: self.spec.heads * self.spec.head_dim,
            kv: self.spec.kv_heads * self.spec.head_dim,
            vocab: self.spec.vocab,
        }
    }

    fn forward(&self, step: &mut Step<'_>, scratch: &mut Scratch) -> Result<(), EngineError> {
        let ModelSpec { width, heads, kv_heads, head_dim, norm_eps, vocab, .. } = self.spec;
        let tokens = step.tokens.len();
        let mut lap = Lap::start();

        // The residual stream starts as the tokens' embeddings.
        self.embed(step.tokens, scratch.x.write()?.slice_mut());
        scratch.rope.clear();
        step.rows.iter().for_each(|row| self.rope.extend(row.position, &mut scratch.rope));
        lap.add_to(&mut scratch.times.other);

        for (index, layer) in self.layers.iter().enumerate() {
            if step.sequences.cancelled() {
                return Err(EngineError::Cancelled);
            }

            // Queries, keys and values of the normed stream, one job.
            self.norm(&layer.attn_norm, tokens, scratch)?;
            lap.add_to(&mut scratch.times.other);
            let [q, k, v] = &layer.qkv.weights;
            let job = MatmulJob::new(tokens, scratch.h.read()?)
                .with(product(q, scratch.q.write()?, false))
                .with(product(k, scratch.k.write()?, false))
                .with(product(v, scratch.v.write()?, false));
            scratch.matmul(&*layer.qkv.device, job)?;
            lap.add_to(&mut scratch.times.projections);

            // Rotate, remember, attend.
            let rope = Rope { table: &scratch.rope, pairs: self.rope.pairs(), head_dim, adjacent: true };
            let (q_len, kv_len) = (tokens * heads * head_dim, tokens * kv_heads * head_dim);
            self.ops.rope(&rope, &mut scratch.q.write()?.slice_mut()[..q_len]);
            self.ops.rope(&rope, &mut scratch.k.write()?.slice_mut()[..kv_len]);
            self.store(step, index, scratch)?;
            let q = scratch.q.read()?;
            let attention = Attention {
                q: &q.slice()[..q_len],
                rows: step.rows,
                kv: &LayerPages { sequences: &*step.sequences, layer: index },
                heads,
                kv_heads,
                head_dim,
                scale: 1.0 / (head_dim as f32).sqrt(),
                window: self.spec.window,
            };
            self.ops.attention(&attention, &mut scratch.attn.write()?.slice_mut()[..q_len]);
            drop(q);
            lap.add_to(&mut scratch.times.attention);
            let job = MatmulJob::new(tokens, scratch.attn.read()?).with(product(
                &layer.attn_output.weight,
                scratch.x.write()?,
                true,
            ));
            scratch.matmul(&*layer.attn_output.device, job)?;
            lap.add_to(&mut scratch.times.projections);

            // The feed-forward, added to the stream.
            self.norm(&layer.ffn_norm, tokens, scratch)?;
            lap.add_to(&mut scratch.times.other);
            let input = FfnInput {
                tokens,
                h: scratch.h.clone(),
                x: scratch.x.clone(),
                y: scratch.x.clone(),
                accumulate: true,
                predict: step.predict,
            };
            layer.ffn.forward(self.spec.activation, &input, scratch)?;
            lap.add_to(&mut scratch.times.ffn);
        }

        // Logits of the rows that were asked for, a few at a time.
        for outputs in step.outputs.chunks(LOGIT_ROWS) {
            {
                let x = scratch.x.read()?;
                let mut h = scratch.h.write()?;
                for (output, h) in outputs.iter().zip(h.slice_mut::<f32>().chunks_exact_mut(width)) {
                    let x = &x.slice::<f32>()[output * width..][..width];
                    self.ops.rms_norm(x, &self.output_norm, norm_eps, h);
                }
            }
            let job = MatmulJob::new(outputs.len(), scratch.h.read()?).with(product(
                &self.output.weight,
                scratch.logits.write()?,
                false,
            ));
            scratch.matmul(&*self.output.device, job)?;
            let logits = scratch.logits.read()?;
            for (output, logits) in outputs.iter().zip(logits.slice::<f32>().chunks_exact(vocab)) {
                step.sequences.take_logits(*output, logits)?;
            }
        }
        lap.add_to(&mut scratch.times.head);
        Ok(())
    }
}

/// Rows of logits computed at a time.
pub(crate) const LOGIT_ROWS: usize = 16;

impl Llama {
    fn norm(&self, weight: &[f32], tokens: usize, scratch: &Scratch) -> Result<(), EngineError> {
        let len = tokens * self.spec.width;
        let x = scratch.x.read()?;
        self.ops.rms_norm(
            &x.slice()[..len],
            weight,
            self.spec.norm_eps,
            &mut scratch.h.write()?.slice_mut()[..len],
        );
        Ok(())
    }
}

fn product(weight: &PreparedWeight, y: WriteLease, accumulate: bool) -> Product {
    Product { weight: weight.clone(), y, accumulate }
}
