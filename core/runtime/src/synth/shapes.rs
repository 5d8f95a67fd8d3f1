//! The shapes of real models, in one table.
//!
//! Vocabulary, widths, heads and experts are those of the published configurations. Two things are not. The context is
//! at most 4096 tokens, the reach of the attention head that makes adjacent tokens alike. And models whose own
//! activation is SiLU have ReLU here: how often a SiLU neuron matters cannot be chosen by weights.

use neuropil_device::{Activation, ActivationKind};

use super::SynthError;

/// Experts of a layer, and how many of them a token uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Experts {
    /// Experts per layer.
    pub count: usize,
    /// Experts per token.
    pub used: usize,
}

/// The numbers of a model.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Shape {
    /// Its name on the command line.
    pub name: &'static str,
    /// `general.architecture`.
    pub architecture: &'static str,
    /// Width of the residual stream.
    pub width: usize,
    /// Neurons of a feed-forward layer, or of each expert.
    pub neurons: usize,
    /// Transformer blocks.
    pub layers: usize,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads.
    pub kv_heads: usize,
    /// Channels per head.
    pub head_dim: usize,
    /// Experts, if there are any.
    pub experts: Option<Experts>,
    /// Entries of the vocabulary.
    pub vocab: usize,
    /// Most positions.
    pub context: usize,
    /// Base of the rotary frequencies.
    pub rope_base: f32,
    /// Positions that attention sees, if not all.
    pub window: Option<usize>,
    /// The non-linearity.
    pub activation: Activation,
}

const RELU: Activation = Activation::new(ActivationKind::Relu);
const DRELU: Activation = Activation::new(ActivationKind::Drelu);
/// ProSparse's ReLU, with a cut.
const FATRELU: Activation = Activation { kind: ActivationKind::Relu, threshold: 0.01 };

const LLAMA2_7B: Shape = Shape {
    name: "llama2-7b",
    architecture: "llama",
    width: 4096,
    neurons: 11008,
    layers: 32,
    heads: 32,
    kv_heads: 32,
    head_dim: 128,
    experts: None,
    vocab: 32000,
    context: 4096,
    rope_base: 10_000.0,
    window: None,
    activation: FATRELU,
};

const MISTRAL_7B: Shape = Shape {
    name: "mistral-7b",
    neurons: 14336,
    kv_heads: 8,
    window: Some(4096),
    activation: RELU,
    ..LLAMA2_7B
};

const SMALLTHINKER_4B: Shape = Shape {
    name: "smallthinker-4b",
    architecture: "smallthinker",
    width: 1536,
    neurons: 768,
    heads: 12,
    kv_heads: 2,
    experts: Some(Experts { count: 32, used: 4 }),
    vocab: 151_936,
    rope_base: 1_500_000.0,
    window: Some(4096),
    activation: RELU,
    ..LLAMA2_7B
};

/// Every shape.
pub const SHAPES: [Shape; 12] = [
    Shape {
        name: "toy",
        width: 512,
        neurons: 1024,
        layers: 4,
        heads: 8,
        kv_heads: 4,
        head_dim: 64,
        vocab: 512,
        context: 512,
        activation: RELU,
        ..LLAMA2_7B
    },
    Shape {
        name: "toy-drelu",
        width: 512,
        neurons: 1024,
        layers: 4,
        heads: 8,
        kv_heads: 4,
        head_dim: 64,
        vocab: 512,
        context: 512,
        activation: DRELU,
        ..LLAMA2_7B
    },
    Shape { name: "relu-llama-7b", context: 2048, activation: RELU, ..LLAMA2_7B },
    LLAMA2_7B,
    Shape {
        name: "llama2-13b",
        width: 5120,
        neurons: 13824,
        layers: 40,
        heads: 40,
        kv_heads: 40,
        ..LLAMA2_7B
    },
    MISTRAL_7B,
    Shape { name: "bamboo-7b", architecture: "bamboo", activation: DRELU, ..MISTRAL_7B },
    Shape {
        name: "turbosparse-mistral-7b",
        architecture: "bamboo",
        vocab: 32064,
        activation: DRELU,
        ..MISTRAL_7B
    },
    Shape {
        name: "turbosparse-mixtral-47b",
        architecture: "turbosparsemixtral",
        experts: Some(Experts { count: 8, used: 2 }),
        vocab: 57024,
        rope_base: 1_000_000.0,
        window: None,
        activation: DRELU,
        ..MISTRAL_7B
    },
    SMALLTHINKER_4B,
    Shape {
        name: "smallthinker-21b",
        width: 2560,
        layers: 52,
        heads: 28,
        kv_heads: 4,
        experts: Some(Experts { count: 64, used: 6 }),
        ..SMALLTHINKER_4B
    },
    Shape {
        name: "toy-experts",
        width: 512,
        neurons: 512,
        layers: 4,
        heads: 8,
        kv_heads: 4,
        head_dim: 64,
        experts: Some(Experts { count: 4, used: 2 }),
        vocab: 512,
        context: 512,
        activation: DRELU,
        ..LLAMA2_7B
    },
];

impl Shape {
    /// The shape of that name.
    ///
    /// # Errors
    /// [`SynthError::Shape`], which lists the names.
    pub fn named(name: &str) -> Result<Shape, SynthError> {
        SHAPES.into_iter().find(|shape| shape.name == name).ok_or_else(|| SynthError::Shape {
            found: name.into(),
            known: SHAPES.map(|shape| shape.name).join(" "),
        })
    }

    /// Experts of a layer; 1 of a layer without.
    pub fn expert_count(&self) -> usize {
        self.experts.map_or(1, |experts| experts.count)
    }

    /// The architecture of the twin: other programs know the shape of dReLU models under Llama's name.
    pub(super) fn twin_architecture(&self) -> &'static str {
        if self.architecture == "smallthinker" { self.architecture } else { "llama" }
    }

    /// Pairs of rotated channels are neighbours rather than halves of a head.
    pub(super) fn rope_adjacent(&self) -> bool {
        self.architecture != "smallthinker"
    }

    /// The first layer whose attention sees positions: SmallThinker's layer 0 does not.
    pub(super) fn first_rotating(&self) -> usize {
        usize::from(self.architecture == "smallthinker" && self.window.is_some())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shapes_are_whole() {
        for shape in SHAPES {
            assert_eq!(Shape::named(shape.name).unwrap(), shape);
            let whole = [shape.width, shape.neurons, shape.heads * shape.head_dim];
            assert!(whole.iter().all(|n| n.is_multiple_of(32)), "{}", shape.name);
            assert!(shape.heads.is_multiple_of(shape.kv_heads));
            assert!(shape.context <= 4096 && shape.first_rotating() < shape.layers);
        }
        let error = Shape::named("gpt").unwrap_err().to_string();
        assert!(error.contains("\"gpt\"") && error.contains("turbosparse-mixtral-47b"), "{error}");
    }
}
