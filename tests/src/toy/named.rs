//! The toys that stand for real models: small, all weights F32, so that another program can read them easily.
//!
//! `tests/fixtures/models` holds what an independent forward pass in NumPy says about each of them.

use super::{Toy, ToyExperts};

/// A toy for each kind of model that runs, by the name of its fixture.
pub fn named() -> Vec<(&'static str, Toy)> {
    let small =
        Toy { layers: 2, width: 64, heads: 4, kv_heads: 2, ffn: 96, context: 256, seed: 7, ..Toy::default() };
    let experts = |count, used| Some(ToyExperts { count, used, neurons: None, gating: None });
    let thinker = Toy {
        architecture: "smallthinker",
        layers: 5,
        head_dim: Some(32),
        rope_adjacent: false,
        rope_base: 1.5e6,
        ..small.clone()
    };
    let thinkers = |gating| Some(ToyExperts { count: 6, used: 3, neurons: Some(40), gating: Some(gating) });
    vec![
        ("llama", small.clone()),
        ("mixtral", Toy { experts: experts(8, 2), rope_base: 1e6, ..small.clone() }),
        ("bamboo", Toy { architecture: "bamboo", predictor_rank: Some(16), ..small.clone() }),
        (
            "turbosparse_mixtral",
            Toy {
                architecture: "turbosparsemixtral",
                experts: experts(4, 2),
                predictor_rank: Some(8),
                ..small.clone()
            },
        ),
        ("relu_llama", Toy { activation: Some("relu"), ..small.clone() }),
        (
            "prosparse",
            Toy { activation: Some("relu"), threshold: Some(0.25), kv_heads: 4, tied: true, ..small.clone() },
        ),
        ("smallthinker", Toy { experts: thinkers(1), sliding_window: Some(6), ..thinker.clone() }),
        ("smallthinker_sigmoid", Toy { experts: thinkers(2), layers: 2, ..thinker }),
    ]
}
