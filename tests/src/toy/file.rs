//! A toy model as the GGUF file that a converter would write.

use std::path::{Path, PathBuf};

use crate::codec;
use crate::gguf_writer::{GgufFile, Value};
use crate::temp::TempDir;

use super::{BOS, END, EOS, EPSILON, RopeScaling, Toy, ToyModel, UNK, VOCABULARY};

impl Toy {
    /// The file, to be changed or written.
    pub fn file(&self) -> GgufFile {
        self.model().file()
    }

    /// Writes the file.
    ///
    /// # Errors
    /// Those of the file system.
    pub fn write(&self, path: &Path) -> std::io::Result<()> {
        self.file().write(path)
    }

    /// Writes the file into a folder of its own, which goes when the first part is dropped.
    pub fn temp(&self) -> (TempDir, PathBuf) {
        let dir = TempDir::new();
        let path = dir.file("toy.gguf", &self.file().bytes());
        (dir, path)
    }

    fn hyperparameters(&self, file: GgufFile) -> GgufFile {
        let arch = self.architecture;
        let number = |file: GgufFile, key: &str, n: usize| {
            file.pair(&format!("{arch}.{key}"), Value::U32(n.try_into().expect("toys are small")))
        };
        let float = |file: GgufFile, key: &str, x: f32| file.pair(&format!("{arch}.{key}"), Value::F32(x));
        let mut file = file.pair("general.architecture", Value::Str(arch.into()));
        file = file.pair("general.name", Value::Str("toy".into()));
        for (key, n) in [
            ("block_count", self.layers),
            ("context_length", self.context),
            ("embedding_length", self.width),
            ("feed_forward_length", self.ffn),
            ("attention.head_count", self.heads),
            ("attention.head_count_kv", self.kv_heads),
            ("rope.dimension_count", self.rope_dims()),
            ("vocab_size", VOCABULARY),
        ] {
            file = number(file, key, n);
        }
        if let Some(dim) = self.head_dim {
            file = number(file, "attention.key_length", dim);
            file = number(file, "attention.value_length", dim);
        }
        if let Some(window) = self.sliding_window {
            file = number(file, "attention.sliding_window", window);
        }
        if let Some(experts) = self.experts {
            file = number(file, "expert_count", experts.count);
            file = number(file, "expert_used_count", experts.used);
            if let Some(neurons) = experts.neurons {
                file = number(file, "expert_feed_forward_length", neurons);
            }
            if let Some(gating) = experts.gating {
                file = number(file, "expert_gating_func", gating as usize);
            }
        }
        file = float(file, "attention.layer_norm_rms_epsilon", EPSILON);
        file = float(file, "rope.freq_base", self.rope_base);
        let scaling = match self.rope_scaling {
            // Llama 3's divisors are a tensor; converters write no key for them.
            RopeScaling::None | RopeScaling::Llama3 { .. } => None,
            RopeScaling::Linear { factor } => Some(("linear", factor, None)),
            RopeScaling::Yarn { factor, original } => Some(("yarn", factor, Some(original))),
        };
        if let Some((name, factor, original)) = scaling {
            file = file.pair(&format!("{arch}.rope.scaling.type"), Value::Str(name.into()));
            file = float(file, "rope.scaling.factor", factor);
            if let Some(original) = original {
                file = number(file, "rope.scaling.original_context_length", original);
            }
        }
        if let Some(name) = self.activation {
            file = file.pair("neuropil.ffn_activation", Value::Str(name.into()));
        }
        if let Some(threshold) = self.threshold {
            file = file.pair("neuropil.ffn_activation_threshold", Value::F32(threshold));
        }
        file
    }

    fn tokenizer(&self, file: GgufFile) -> GgufFile {
        let special = [("<unk>", 2), ("<s>", 3), ("</s>", 3), ("<|end|>", 3)];
        let mut pieces: Vec<String> = special.iter().map(|(text, _)| text.to_string()).collect();
        pieces.extend((0..=255).map(|byte: u8| format!("<0x{byte:02X}>")));
        let mut types: Vec<i32> = special.iter().map(|(_, kind)| *kind).collect();
        types.resize(END as usize + 1 + 256, 6);
        let mut file = file
            .pair("tokenizer.ggml.model", Value::Str("llama".into()))
            .pair("tokenizer.ggml.tokens", Value::Strings(pieces))
            .pair("tokenizer.ggml.scores", Value::F32s(vec![0.0; VOCABULARY]))
            .pair("tokenizer.ggml.token_type", Value::I32s(types))
            .pair("tokenizer.ggml.unknown_token_id", Value::U32(UNK))
            .pair("tokenizer.ggml.bos_token_id", Value::U32(BOS))
            .pair("tokenizer.ggml.eos_token_id", Value::U32(EOS));
        for (key, value) in [("add_bos_token", self.add_bos), ("add_space_prefix", self.add_space_prefix)] {
            if let Some(value) = value {
                file = file.pair(&format!("tokenizer.ggml.{key}"), Value::Bool(value));
            }
        }
        match &self.chat_template {
            Some(template) => file.pair("tokenizer.chat_template", Value::Str(template.clone())),
            None => file,
        }
    }
}

impl ToyModel {
    /// The file, to be changed or written.
    pub fn file(&self) -> GgufFile {
        let file = self.toy.tokenizer(self.toy.hyperparameters(GgufFile::default()));
        self.weights()
            .into_iter()
            .fold(file, |file, w| file.tensor(&w.name, &w.dims(), codec::type_id(w.dtype), w.bytes.clone()))
    }
}
