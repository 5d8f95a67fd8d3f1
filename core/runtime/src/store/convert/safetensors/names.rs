//! From the names of Hugging Face to places in a GGUF file.

/// Where a tensor goes.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Place {
    /// Kept as F32.
    Vector(String),
    /// Kept as it is.
    Matrix(String),
    /// Kept, with the rows of each head in the order of `llama` files.
    Heads { name: String, keys: bool },
    /// A matrix of neurons: gate 0, up 1, down 2.
    Neurons { layer: usize, expert: Option<usize>, part: usize },
    /// What a program computes for itself.
    Nowhere,
}

/// The place of the tensor with this name, if it has one.
pub(super) fn place(name: &str) -> Option<Place> {
    match name {
        "model.embed_tokens.weight" => return Some(Place::Matrix("token_embd.weight".into())),
        "model.norm.weight" => return Some(Place::Vector("output_norm.weight".into())),
        "lm_head.weight" => return Some(Place::Matrix("output.weight".into())),
        _ => {}
    }
    let (layer, part) = name.strip_prefix("model.layers.")?.split_once('.')?;
    let layer: usize = layer.parse().ok()?;
    let named = |part: &str| format!("blk.{layer}.{part}.weight");
    let neurons = |expert, part| Some(Place::Neurons { layer, expert, part });
    match part {
        "input_layernorm.weight" => Some(Place::Vector(named("attn_norm"))),
        "post_attention_layernorm.weight" => Some(Place::Vector(named("ffn_norm"))),
        "self_attn.q_proj.weight" => Some(Place::Heads { name: named("attn_q"), keys: false }),
        "self_attn.k_proj.weight" => Some(Place::Heads { name: named("attn_k"), keys: true }),
        "self_attn.v_proj.weight" => Some(Place::Matrix(named("attn_v"))),
        "self_attn.o_proj.weight" => Some(Place::Matrix(named("attn_output"))),
        "self_attn.rotary_emb.inv_freq" => Some(Place::Nowhere),
        "block_sparse_moe.gate.weight" => Some(Place::Matrix(named("ffn_gate_inp"))),
        "mlp.gate_proj.weight" => neurons(None, 0),
        "mlp.up_proj.weight" => neurons(None, 1),
        "mlp.down_proj.weight" => neurons(None, 2),
        _ => {
            let (expert, part) = part.strip_prefix("block_sparse_moe.experts.")?.split_once('.')?;
            let part = ["w1.weight", "w3.weight", "w2.weight"].iter().position(|name| *name == part)?;
            neurons(Some(expert.parse().ok()?), part)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_name_has_its_place() {
        assert_eq!(place("lm_head.weight"), Some(Place::Matrix("output.weight".into())));
        let heads = Place::Heads { name: "blk.3.attn_k.weight".into(), keys: true };
        assert_eq!(place("model.layers.3.self_attn.k_proj.weight"), Some(heads));
        let expert = Place::Neurons { layer: 0, expert: Some(7), part: 2 };
        assert_eq!(place("model.layers.0.block_sparse_moe.experts.7.w2.weight"), Some(expert));
        for name in
            ["model.layers.0.self_attn.q_proj.bias", "model.layers.x.mlp.up_proj.weight", "v_head.weight"]
        {
            assert_eq!(place(name), None, "{name}");
        }
    }
}
