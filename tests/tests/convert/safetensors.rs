//! Models as Hugging Face has them become what the same model is as a GGUF file.

use std::path::Path;

use neuropil::gguf::{Array, Gguf, Value as Item};
use neuropil::store::{self, ConvertOptions};
use neuropil_device::DType;
use neuropil_tests::temp::TempDir;
use neuropil_tests::toy::{Toy, ToyModel, Weight};
use serde_json::{Map, Value, json};

use crate::reading::Reading;

/// One tensor of a safetensors file.
struct Tensor {
    name: String,
    dtype: &'static str,
    shape: Vec<usize>,
    bytes: Vec<u8>,
}

/// The bytes of a safetensors file.
fn file(tensors: &[Tensor]) -> Vec<u8> {
    let mut header = Map::new();
    header.insert("__metadata__".into(), json!({ "format": "pt" }));
    let mut at = 0;
    for t in tensors {
        let end = at + t.bytes.len();
        header
            .insert(t.name.clone(), json!({ "dtype": t.dtype, "shape": t.shape, "data_offsets": [at, end] }));
        at = end;
    }
    let header = Value::Object(header).to_string();
    let mut out = (header.len() as u64).to_le_bytes().to_vec();
    out.extend(header.as_bytes());
    tensors.iter().for_each(|t| out.extend(&t.bytes));
    out
}

/// The rows of each head as Hugging Face has them: first all first channels of the pairs, then all second ones.
fn halves(weight: &Weight, heads: usize) -> Vec<u8> {
    let (row, per_head) = (weight.bytes.len() / weight.rows, weight.rows / heads);
    let from = |i: usize| {
        let (head, i) = (i / per_head, i % per_head);
        head * per_head + i % (per_head / 2) * 2 + i / (per_head / 2)
    };
    (0..weight.rows).flat_map(|i| weight.bytes[from(i) * row..][..row].to_vec()).collect()
}

fn tensors(model: &ToyModel) -> Vec<Tensor> {
    let tensor = |name: String, weight: &Weight, bytes: Option<Vec<u8>>| {
        let shape = if weight.rows == 1 { vec![weight.cols] } else { vec![weight.rows, weight.cols] };
        let dtype = match weight.dtype {
            DType::F16 => "F16",
            DType::BF16 => "BF16",
            _ => "F32",
        };
        Tensor { name, dtype, shape, bytes: bytes.unwrap_or_else(|| weight.bytes.clone()) }
    };
    let plain = |name: &str, weight: &Weight| tensor(name.into(), weight, None);
    let mut all = vec![
        plain("model.embed_tokens.weight", &model.token_embd),
        plain("model.norm.weight", &model.output_norm),
    ];
    all.extend(model.output.as_ref().map(|output| plain("lm_head.weight", output)));
    for (n, layer) in model.layers.iter().enumerate() {
        let of = |part: &str| format!("model.layers.{n}.{part}.weight");
        let (q, k) = (&layer.attn_q, &layer.attn_k);
        all.push(tensor(of("self_attn.q_proj"), q, Some(halves(q, model.toy.heads))));
        all.push(tensor(of("self_attn.k_proj"), k, Some(halves(k, model.toy.kv_heads))));
        for (part, weight) in [
            ("input_layernorm", &layer.attn_norm),
            ("self_attn.v_proj", &layer.attn_v),
            ("self_attn.o_proj", &layer.attn_output),
            ("post_attention_layernorm", &layer.ffn_norm),
            ("mlp.gate_proj", &layer.ffn_gate),
            ("mlp.up_proj", &layer.ffn_up),
            ("mlp.down_proj", &layer.ffn_down),
        ] {
            all.push(plain(&of(part), weight));
        }
    }
    all
}

fn config(toy: &Toy) -> Value {
    json!({
        "architectures": ["LlamaForCausalLM"],
        "hidden_act": "silu",
        "hidden_size": toy.width,
        "intermediate_size": toy.ffn,
        "num_hidden_layers": toy.layers,
        "num_attention_heads": toy.heads,
        "num_key_value_heads": toy.kv_heads,
        "max_position_embeddings": toy.context,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "rope_scaling": null,
        "tie_word_embeddings": toy.tied,
        "vocab_size": 260,
    })
}

fn tokenizer() -> Value {
    let special = ["<unk>", "<s>", "</s>", "<|end|>"];
    let mut vocab = Map::new();
    special.iter().for_each(|text| {
        vocab.insert((*text).into(), json!(vocab.len()));
    });
    for byte in 0..=255 {
        vocab.insert(format!("<0x{byte:02X}>"), json!(vocab.len()));
    }
    let added: Vec<Value> =
        (0..4).map(|id| json!({ "id": id, "content": special[id], "special": true })).collect();
    json!({
        "added_tokens": added,
        "normalizer": null,
        "model": { "type": "BPE", "byte_fallback": true, "unk_token": "<unk>", "vocab": vocab, "merges": [] },
    })
}

fn settings() -> Value {
    json!({
        "bos_token": "<s>",
        "eos_token": { "content": "</s>" },
        "unk_token": "<unk>",
        "add_bos_token": true,
    })
}

/// Writes a model's folder.
fn write(dir: &Path, tensors: &[Tensor], config: &Value, tokenizer: &Value) {
    std::fs::write(dir.join("config.json"), config.to_string()).unwrap();
    std::fs::write(dir.join("tokenizer.json"), tokenizer.to_string()).unwrap();
    std::fs::write(dir.join("tokenizer_config.json"), settings().to_string()).unwrap();
    let half = tensors.len() / 2;
    let parts = [("model-1.safetensors", &tensors[..half]), ("model-2.safetensors", &tensors[half..])];
    let mut map = Map::new();
    for (name, tensors) in parts {
        std::fs::write(dir.join(name), file(tensors)).unwrap();
        tensors.iter().for_each(|t| {
            map.insert(t.name.clone(), json!(name));
        });
    }
    let index = json!({ "weight_map": map });
    std::fs::write(dir.join("model.safetensors.index.json"), index.to_string()).unwrap();
}

fn convert(from: &Path, to: &Path) -> Result<(), String> {
    let result = store::convert(from, to, &ConvertOptions::default(), &mut |_, _| true);
    result.map(|_| ()).map_err(|error| error.to_string())
}

fn toy() -> Toy {
    let dtypes = vec![("attn_q", DType::BF16), ("attn_k", DType::F16), ("ffn_down", DType::F16)];
    Toy { heads: 4, kv_heads: 2, dtypes, ..Toy::default() }
}

#[test]
fn a_folder_gives_the_store_of_the_same_model_in_gguf() {
    let dir = TempDir::new();
    let folder = dir.path().join("hf");
    std::fs::create_dir(&folder).unwrap();
    let model = toy().model();
    write(&folder, &tensors(&model), &config(&toy()), &tokenizer());
    let source = dir.file("m.gguf", &model.file().bytes());
    let (a, b) = (dir.path().join("a.gguf"), dir.path().join("b.gguf"));
    convert(&source, &a).unwrap();
    convert(&folder, &b).unwrap();
    let (want, got) = (Reading::open(&a), Reading::open(&b));
    assert_eq!(want.gguf.tensors().len(), got.gguf.tensors().len());
    for tensor in want.gguf.tensors() {
        let found = got.gguf.tensor(&tensor.name).unwrap_or_else(|| panic!("{} is there", tensor.name));
        assert_eq!((found.type_id, &found.dims[..]), (tensor.type_id, &tensor.dims[..]), "{}", tensor.name);
        assert!(want.gguf.data(tensor) == got.gguf.data(found), "{}", tensor.name);
    }
    for (key, value) in want.gguf.metadata().iter() {
        let own = ["general.name", "neuropil.source.sha256", "neuropil.checksum"];
        if !own.contains(&key) {
            assert_eq!(got.gguf.metadata().get(key), Some(value), "{key}");
        }
    }
    // The path of one of its files does as well, and gives the same bytes.
    let again = dir.path().join("c.gguf");
    convert(&folder.join("model-1.safetensors"), &again).unwrap();
    assert!(std::fs::read(&b).unwrap() == std::fs::read(&again).unwrap());
}

#[test]
fn a_vocabulary_of_words_keeps_its_merges_and_its_way_to_split() {
    let dir = TempDir::new();
    let model = toy().model();
    let mut tokenizer = tokenizer();
    tokenizer["model"]["byte_fallback"] = json!(false);
    tokenizer["model"]["merges"] = json!(["<0x61> <0x62>", ["<0x63>", "<0x64>"]]);
    let split = |pattern: &str| {
        let split = json!({ "type": "Split", "pattern": { "Regex": pattern } });
        json!({ "type": "Sequence", "pretokenizers": [split, { "type": "ByteLevel", "use_regex": false }] })
    };
    let llama3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
    let digits =
        json!([{ "type": "Digits", "individual_digits": true }, { "type": "ByteLevel", "use_regex": true }]);
    let out = dir.path().join("o.gguf");
    for (splitter, want) in [
        (split(llama3), "llama-bpe"),
        (json!({ "type": "ByteLevel" }), "gpt-2"),
        (json!({ "type": "Sequence", "pretokenizers": digits }), "smollm"),
    ] {
        tokenizer["pre_tokenizer"] = splitter;
        write(dir.path(), &tensors(&model), &config(&toy()), &tokenizer);
        convert(dir.path(), &out).unwrap();
        let gguf = Gguf::open_header(&out).unwrap();
        assert_eq!(gguf.metadata().str("tokenizer.ggml.pre").unwrap(), Some(want));
        assert_eq!(gguf.metadata().str("tokenizer.ggml.model").unwrap(), Some("gpt2"));
        let Some(Item::Array(Array::Str(merges))) = gguf.metadata().get("tokenizer.ggml.merges") else {
            panic!("there are merges");
        };
        assert_eq!(merges.iter().collect::<Vec<_>>(), [&b"<0x61> <0x62>"[..], b"<0x63> <0x64>"]);
    }
    tokenizer["pre_tokenizer"] = split(r"\w+");
    write(dir.path(), &tensors(&model), &config(&toy()), &tokenizer);
    assert!(convert(dir.path(), &out).unwrap_err().contains("no name in GGUF"));
}

#[test]
fn what_cannot_be_said_in_gguf_is_refused_by_name() {
    let dir = TempDir::new();
    let model = toy().model();
    let out = dir.path().join("o.gguf");
    let with = |key: &str, value: Value| {
        let mut config = config(&toy());
        config[key] = value;
        config
    };
    let llama3 = |low: f64, high: f64| {
        json!({
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": low, "high_freq_factor": high,
            "original_max_position_embeddings": 8192,
        })
    };
    let mut experts = with("num_local_experts", json!(2));
    experts["num_experts_per_tok"] = json!(1);
    for (config, reason) in [
        (with("architectures", json!(["GPT2LMHeadModel"])), "GPT2LMHeadModel"),
        (with("hidden_act", json!("quick_gelu")), "quick_gelu"),
        (with("hidden_size", json!(-1)), "hidden_size"),
        (with("num_hidden_layers", json!(3)), "layer 2 lacks"),
        (with("num_attention_heads", json!(7)), "heads cannot share"),
        (with("rope_scaling", json!({ "type": "su", "factor": 2.0 })), "su"),
        (with("attention_bias", json!(true)), "attention_bias"),
        (with("intermediate_size", json!(0)), "intermediate_size"),
        (with("vocab_size", json!(100)), "260 tokens"),
        (with("head_dim", json!(1u64 << 62)), "head_dim"),
        (with("num_attention_heads", json!(1000)), "head_dim"),
        (with("num_hidden_layers", json!(1)), "model.layers.1."),
        (experts, "mlp.gate_proj"),
        (with("rope_scaling", llama3(1.0, 1.0)), "low_freq_factor"),
        (json!([]), "architecture"),
    ] {
        write(dir.path(), &tensors(&model), &config, &tokenizer());
        let error = convert(dir.path(), &out).unwrap_err();
        assert!(error.contains(reason), "{reason}: {error}");
    }
    let mut more = tensors(&model);
    more.push(Tensor {
        name: "model.layers.0.self_attn.q_proj.bias".into(),
        dtype: "F32",
        shape: vec![1],
        bytes: vec![0; 4],
    });
    write(dir.path(), &more, &config(&toy()), &tokenizer());
    assert!(convert(dir.path(), &out).unwrap_err().contains("q_proj.bias"));
    std::fs::remove_file(dir.path().join("tokenizer.json")).unwrap();
    std::fs::write(dir.path().join("tokenizer.model"), b"x").unwrap();
    assert!(convert(dir.path(), &out).unwrap_err().contains("tokenizer.model alone"));
    assert!(!out.exists());
}

#[test]
fn hostile_files_give_an_error() {
    let dir = TempDir::new();
    let model = toy().model();
    let out = dir.path().join("o.gguf");
    write(dir.path(), &tensors(&model), &config(&toy()), &tokenizer());
    std::fs::remove_file(dir.path().join("model.safetensors.index.json")).unwrap();
    let header = |text: &str| {
        let mut bytes = (text.len() as u64).to_le_bytes().to_vec();
        bytes.extend(text.as_bytes());
        bytes.extend([0; 64]);
        bytes
    };
    let entry = |body: &str| header(&format!("{{\"a\": {body}}}"));
    for bytes in [
        vec![],
        vec![0; 7],
        vec![0xFF; 64],
        header("{"),
        header("[]"),
        entry(&format!("[{}0]", "0,".repeat(1 << 20))),
        entry(&format!(
            r#"{{"dtype": "F32", "shape": [{}1], "data_offsets": [0, 4]}}"#,
            "1,".repeat(1 << 20)
        )),
        header(&"[".repeat(100_000)),
        entry("1"),
        entry(r#"{"dtype": "F32", "shape": [4]}"#),
        entry(r#"{"dtype": "I64", "shape": [2], "data_offsets": [0, 16]}"#),
        entry(r#"{"dtype": "F32", "shape": [4], "data_offsets": [0, 15]}"#),
        entry(r#"{"dtype": "F32", "shape": [4], "data_offsets": [16, 0]}"#),
        entry(r#"{"dtype": "F32", "shape": [4], "data_offsets": [56, 72]}"#),
        entry(r#"{"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}"#),
        entry(r#"{"dtype": "F32", "shape": [4611686018427387904, 8], "data_offsets": [0, 0]}"#),
        entry(r#"{"dtype": "F32", "shape": [-4], "data_offsets": [0, 16]}"#),
        header("{}"),
    ] {
        std::fs::write(dir.path().join("model.safetensors"), bytes).unwrap();
        assert!(convert(dir.path(), &out).is_err());
    }
    for name in ["config.json", "tokenizer.json", "tokenizer_config.json"] {
        write(dir.path(), &tensors(&model), &config(&toy()), &tokenizer());
        for text in ["", "{", "nul", "[[[[", "\u{0}", "{\"model\": 3}"] {
            std::fs::write(dir.path().join(name), text).unwrap();
            let valid = name == "tokenizer_config.json" && text.starts_with("{\"");
            assert_eq!(convert(dir.path(), &out).is_ok(), valid, "{name} {text:?}");
        }
    }
    let index = dir.path().join("model.safetensors.index.json");
    write(dir.path(), &tensors(&model), &config(&toy()), &tokenizer());
    for text in ["{}", r#"{"weight_map": {"a": "../model-1.safetensors"}}"#, r#"{"weight_map": {}}"#] {
        std::fs::write(&index, text).unwrap();
        assert!(convert(dir.path(), &out).is_err(), "{text}");
    }
}
