//! Which tensors a model has: what is compared with a file's directory before anything loads.

use crate::gguf::Gguf;

use super::ModelSpec;

/// A tensor that an architecture needs.
pub(crate) struct TensorShape {
    pub name: String,
    /// Fastest first.
    pub dims: Vec<usize>,
}

/// The tensors of a model, those optional ones included that the file has. Layer by layer: a file may name more layers
/// than memory could list. Of a neuron `store` without the neurons and what predicts them, which lie in other tensors.
pub(super) fn tensors<'a>(
    spec: &'a ModelSpec,
    gguf: &'a Gguf,
    store: bool,
) -> impl Iterator<Item = TensorShape> + use<'a> {
    let ModelSpec { width, vocab, .. } = *spec;
    let mut ends = vec![
        tensor("token_embd.weight".into(), &[width, vocab]),
        tensor("output_norm.weight".into(), &[width]),
    ];
    if gguf.tensor("output.weight").is_some() {
        ends.push(tensor("output.weight".into(), &[width, vocab]));
    }
    if gguf.tensor("rope_freqs.weight").is_some() {
        ends.push(tensor("rope_freqs.weight".into(), &[spec.rope_dim / 2]));
    }
    ends.into_iter().chain((0..spec.layers).flat_map(move |index| layer(spec, gguf, store, index)))
}

fn layer(spec: &ModelSpec, gguf: &Gguf, store: bool, index: usize) -> Vec<TensorShape> {
    let ModelSpec { width, neurons, .. } = *spec;
    let (q, kv) = (spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim);
    let of = |part: &str, dims: &[usize]| tensor(format!("blk.{index}.{part}.weight"), dims);
    let mut all = vec![
        of("attn_norm", &[width]),
        of("attn_q", &[width, q]),
        of("attn_k", &[width, kv]),
        of("attn_v", &[width, kv]),
        of("attn_output", &[q, width]),
        of("ffn_norm", &[width]),
    ];
    if let Some(experts) = spec.experts {
        all.push(of("ffn_gate_inp", &[width, experts.count]));
    }
    match spec.experts {
        _ if store => {}
        None => {
            all.extend([
                of("ffn_gate", &[width, neurons]),
                of("ffn_up", &[width, neurons]),
                of("ffn_down", &[neurons, width]),
            ]);
            all.extend(predictor(gguf, &format!("blk.{index}"), "", width, neurons));
        }
        Some(experts) => {
            let (count, neurons) = (experts.count, experts.neurons);
            all.extend([
                of("ffn_gate_exps", &[width, neurons, count]),
                of("ffn_up_exps", &[width, neurons, count]),
                of("ffn_down_exps", &[neurons, width, count]),
            ]);
            // Only experts that the file can hold: the count has not been compared with it yet.
            for expert in 0..count.min(gguf.tensors().len()) {
                let suffix = format!(".{expert}");
                all.extend(predictor(gguf, &format!("blk.{index}"), &suffix, width, neurons));
            }
        }
    }
    all
}

/// The two layers of a predictor, if the file has one of them. How wide it is inside, its rank, is the file's choice.
fn predictor(
    gguf: &Gguf,
    block: &str,
    suffix: &str,
    width: usize,
    neurons: usize,
) -> impl Iterator<Item = TensorShape> + use<> {
    let [first, second] = ["fc1", "fc2"].map(|part| format!("{block}.{part}{suffix}.weight"));
    let rank = match (gguf.tensor(&first), gguf.tensor(&second)) {
        (None, None) => None,
        (Some(first), _) => Some(first.dims.get(1).map_or(1, |rank| *rank as usize)),
        (None, Some(second)) => Some(second.cols() as usize),
    };
    let both = rank.map(|rank| [tensor(first, &[width, rank]), tensor(second, &[rank, neurons])]);
    both.into_iter().flatten()
}

/// Whether a file has predictors.
pub(super) fn has_predictors(gguf: &Gguf) -> bool {
    gguf.tensors().iter().any(|t| t.name.starts_with("blk.") && t.name.contains(".fc1."))
}

fn tensor(name: String, dims: &[usize]) -> TensorShape {
    TensorShape { name, dims: dims.to_vec() }
}
