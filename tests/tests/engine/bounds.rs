//! Files and requests that cannot be: a typed error each, before any work.

use neuropil::engine::EngineError;
use neuropil::model::ModelError;
use neuropil::{Engine, SessionOptions};
use neuropil_device::DType;
use neuropil_tests::gguf_writer::{GgufFile, Value};
use neuropil_tests::temp::TempDir;
use neuropil_tests::toy::{Toy, ToyExperts, tokens};

use super::{builder, engine, session};

fn load(file: &GgufFile) -> Result<Engine, EngineError> {
    let dir = TempDir::new();
    builder(&dir.file("m.gguf", &file.bytes())).build()
}

/// Loads a toy with a key changed and gives the error's sentence.
fn refused(key: &str, value: Value) -> String {
    match load(&Toy::default().file().set(key, value)) {
        Ok(_) => panic!("{key} was accepted"),
        Err(error) => error.to_string(),
    }
}

#[test]
fn keys_that_no_model_can_have() {
    for (key, value) in [
        ("llama.attention.head_count", 0),
        ("llama.attention.head_count", 3),
        ("llama.attention.head_count", 1 << 30),
        ("llama.attention.head_count_kv", 0),
        ("llama.attention.head_count_kv", 3),
        ("llama.block_count", 0),
        ("llama.embedding_length", 0),
        ("llama.feed_forward_length", u32::MAX),
        ("llama.context_length", 0),
        ("llama.rope.dimension_count", 3),
        ("llama.rope.dimension_count", 4096),
        ("llama.expert_count", u32::MAX),
    ] {
        let error = refused(key, Value::U32(value));
        assert!(error.contains(key), "{key} = {value}: {error}");
    }
    for (key, value) in [
        ("llama.attention.layer_norm_rms_epsilon", f32::NAN),
        ("llama.rope.freq_base", -1.0),
        ("neuropil.ffn_activation_threshold", -0.5),
    ] {
        let error = refused(key, Value::F32(value));
        assert!(error.contains(key), "{key} = {value}: {error}");
    }
    let error = refused("neuropil.ffn_activation", Value::Str("swish".into()));
    assert!(error.contains("swish") && error.contains("silu gelu relu relu2 drelu"), "{error}");
    let error = refused("llama.rope.scaling.type", Value::Str("longrope".into()));
    assert!(error.contains("longrope"), "{error}");
    let error = refused("general.architecture", Value::Str("mamba".into()));
    assert!(error.contains("mamba") && error.contains("llama"), "{error}");
    let error = refused("llama.block_count", Value::Str("2".into()));
    assert!(error.contains("llama.block_count"), "{error}");
    let error = refused("tokenizer.ggml.token_type", Value::U8s(vec![1; 260]));
    assert!(error.contains("tokenizer.ggml.token_type"), "{error}");
}

/// A toy with 4 experts of which a token uses 2.
fn experts(architecture: &'static str) -> Toy {
    let experts = ToyExperts { count: 4, used: 2, neurons: Some(64), gating: Some(1) };
    let (width, sliding_window) = (64, Some(4));
    Toy { architecture, width, ffn: 64, experts: Some(experts), sliding_window, ..Toy::default() }
}

#[test]
fn experts_that_cannot_be() {
    for (name, value, needle) in [
        ("expert_used_count", 0, "1 to"),
        ("expert_used_count", 5, "only 4 experts"),
        ("expert_feed_forward_length", 0, "1 to"),
        ("expert_gating_func", 0, "softmax"),
        ("expert_gating_func", 9, "softmax"),
    ] {
        for architecture in ["llama", "smallthinker"] {
            let key = format!("{architecture}.{name}");
            let error = load(&experts(architecture).file().set(&key, Value::U32(value)));
            let error = error.err().unwrap();
            assert!(matches!(error, EngineError::Model(ModelError::Key { .. })), "{key} = {value}: {error}");
            let error = error.to_string();
            assert!(error.contains(&key) && error.contains(needle), "{key} = {value}: {error}");
        }
    }
    // What has no usual value must be there.
    for (architecture, key) in [
        ("llama", "llama.expert_used_count"),
        ("turbosparsemixtral", "turbosparsemixtral.expert_count"),
        ("smallthinker", "smallthinker.expert_count"),
        ("smallthinker", "smallthinker.expert_gating_func"),
    ] {
        let error = load(&experts(architecture).file().without(key)).err().unwrap().to_string();
        assert!(error.contains(key), "{key}: {error}");
    }
    let key = "smallthinker.attention.sliding_window_pattern";
    let error = load(&experts("smallthinker").file().set(key, Value::U32(3))).err().unwrap().to_string();
    assert!(error.contains(key) && error.contains("only 4"), "{error}");
    assert!(load(&experts("smallthinker").file().set(key, Value::U32(4))).is_ok());
    // A window of 0 is none.
    let key = "smallthinker.attention.sliding_window";
    let engine = load(&experts("smallthinker").file().set(key, Value::U32(0))).unwrap();
    assert_eq!(engine.spec().window, None);
}

#[test]
fn tensors_of_experts_with_other_shapes() {
    for (key, value) in [("expert_count", 3), ("expert_feed_forward_length", 32)] {
        let error = load(&experts("llama").file().set(&format!("llama.{key}"), Value::U32(value)));
        let error = error.err().unwrap();
        assert!(matches!(error, EngineError::Model(ModelError::Shape { .. })), "{key} = {value}: {error}");
        assert!(error.to_string().contains("blk.0.ffn_gate"), "{key} = {value}: {error}");
    }
    let reshaped = |name: &str, dims: &[u64]| {
        let mut file = experts("llama").file();
        file.tensors.iter_mut().find(|t| t.name == name).unwrap().dims = dims.to_vec();
        load(&file).err().unwrap().to_string()
    };
    // The right number of elements, the experts in the wrong place or as one matrix.
    for dims in [&[4, 64, 64][..], &[64, 4, 64], &[64, 256], &[64, 64, 4, 1]] {
        let error = reshaped("blk.1.ffn_down_exps.weight", dims);
        assert!(error.contains("blk.1.ffn_down_exps.weight") && error.contains("[64, 64, 4]"), "{error}");
    }
    // A dense model with a router, and one with experts beside its neurons.
    let router = Toy::default().file().f32_tensor("blk.0.ffn_gate_inp.weight", &[256, 4], &[0.0; 1024]);
    assert!(load(&router).err().unwrap().to_string().contains("blk.0.ffn_gate_inp.weight"));
    let both = experts("llama").file().f32_tensor("blk.0.ffn_up.weight", &[64, 64], &[0.0; 4096]);
    assert!(load(&both).err().unwrap().to_string().contains("blk.0.ffn_up.weight"));
}

#[test]
fn predictors_are_known_and_nothing_else_is() {
    let check = |file: &GgufFile| {
        let dir = TempDir::new();
        let gguf = neuropil::gguf::Gguf::open(&dir.file("m.gguf", &file.bytes())).unwrap();
        neuropil::model::check(&gguf).map_err(|error| error.to_string())
    };
    let without = |file: GgufFile, name: &str| GgufFile {
        tensors: file.tensors.into_iter().filter(|t| t.name != name).collect(),
        ..file
    };
    let dense = Toy { architecture: "bamboo", predictor_rank: Some(8), ..Toy::default() };
    let routed = Toy { predictor_rank: Some(8), ..experts("turbosparsemixtral") };
    for (toy, first, second) in [
        (dense, "blk.1.fc1.weight", "blk.1.fc2.weight"),
        (routed, "blk.1.fc1.3.weight", "blk.1.fc2.3.weight"),
    ] {
        let notes = check(&toy.file()).unwrap().notes;
        assert!(notes[0].contains("convert the file to use its predictors"), "{notes:?}");
        assert!(check(&without(toy.file(), first)).unwrap_err().contains(first));
        assert!(check(&without(toy.file(), second)).unwrap_err().contains(second));
        // A layer without any is fine.
        assert!(check(&without(without(toy.file(), first), second)).is_ok());
        let mut narrow = toy.file();
        let tensor = narrow.tensors.iter_mut().find(|t| t.name == second).unwrap();
        tensor.dims.swap(0, 1);
        assert!(check(&narrow).unwrap_err().contains(second));
    }
    // Of an expert that the model has not, and of a dense layer in a model with experts.
    for name in ["blk.0.fc1.4.weight", "blk.0.fc1.weight"] {
        let file = experts("turbosparsemixtral").file().f32_tensor(name, &[64, 8], &[0.0; 512]);
        assert!(check(&file).unwrap_err().contains(name), "{name}");
    }
}

#[test]
fn more_layers_than_tensors() {
    let error = refused("llama.block_count", Value::U32(1 << 23));
    assert!(error.contains("blk.2.attn_norm.weight"), "{error}");
    let error = load(&GgufFile::default()).err().unwrap().to_string();
    assert!(error.contains("general.architecture"), "{error}");
}

#[test]
fn tensors_that_are_missing_misnamed_or_misshaped() {
    let mut renamed = Toy::default().file();
    for tensor in &mut renamed.tensors {
        tensor.name = format!("model.{}", tensor.name);
    }
    assert!(load(&renamed).err().unwrap().to_string().contains("token_embd.weight"));
    let mut narrow = Toy::default().file();
    let norm = narrow.tensors.iter_mut().find(|t| t.name == "blk.1.ffn_norm.weight").unwrap();
    (norm.dims, norm.data) = (vec![128], vec![0; 512]);
    let error = load(&narrow).err().unwrap().to_string();
    assert!(
        error.contains("blk.1.ffn_norm.weight") && error.contains("128") && error.contains("256"),
        "{error}"
    );
}

#[test]
fn a_tensor_that_nobody_would_use() {
    let file = Toy::default().file().f32_tensor("blk.0.attn_q.bias", &[256], &[1.0; 256]);
    let error = load(&file).err().unwrap();
    assert!(
        matches!(&error, EngineError::Model(ModelError::UnusedTensor { name, .. }) if name == "blk.0.attn_q.bias"),
        "{error}"
    );
}

#[test]
fn a_check_says_without_loading_what_a_load_would_say() {
    let check = |file: &GgufFile| {
        let dir = TempDir::new();
        let gguf = neuropil::gguf::Gguf::open(&dir.file("m.gguf", &file.bytes())).unwrap();
        neuropil::model::check(&gguf).map_err(|error| error.to_string())
    };
    assert_eq!(check(&Toy::default().file()).unwrap().spec.layers, 2);
    let biased = Toy::default().file().f32_tensor("blk.0.attn_q.bias", &[256], &[1.0; 256]);
    assert!(check(&biased).unwrap_err().contains("blk.0.attn_q.bias"));
    let padded = Toy::default().file().set("llama.vocab_size", Value::U32(400));
    assert!(check(&padded).unwrap_err().contains("token_embd.weight"));
    let llama31 = Toy { context: 131_072, rope_base: 500_000.0, ..Toy::default() };
    let bpe = llama31.file().set("tokenizer.ggml.pre", Value::Str("llama-bpe".into()));
    assert!(check(&bpe).unwrap().notes[0].contains("rope_freqs.weight"));
    assert!(check(&llama31.file()).unwrap().notes.is_empty());
}

#[test]
fn both_output_matrices_are_told_apart() {
    let (_dir, untied) = engine(&Toy::default());
    let (_dir, tied) = engine(&Toy { tied: true, ..Toy::default() });
    let logits = |engine: &Engine| {
        let mut session = session(engine);
        session.prefill(&tokens("a")).unwrap();
        session.logits().to_vec()
    };
    assert_ne!(logits(&untied), logits(&tied));
}

#[test]
fn an_engine_without_a_unit() {
    let (_dir, path) = Toy::default().temp();
    assert!(matches!(Engine::builder(&path).build(), Err(EngineError::NoDevice)));
}

#[test]
fn prompts_that_do_not_fit() {
    let (_dir, engine) = engine(&Toy { context: 16, ..Toy::default() });
    let mut session = session(&engine);
    let error = session.prefill(&tokens("thirty-two tokens do not fit 16!")).unwrap_err();
    assert!(matches!(error, EngineError::ContextFull { tokens: 32, context: 16 }), "{error}");
    assert!(error.to_string().contains("32") && error.to_string().contains("16"));
    assert!(session.tokens().is_empty(), "nothing is cut in silence");
    session.prefill(&tokens("sixteen tokens..")).unwrap();
    assert!(matches!(session.decode(5), Err(EngineError::ContextFull { tokens: 17, context: 16 })));
    assert!(matches!(session.prefill(&[]), Err(EngineError::EmptyPrompt)));
    let options = SessionOptions { context: Some(17), ..SessionOptions::default() };
    assert!(matches!(engine.session(options), Err(EngineError::ContextTooLarge { asked: 17, context: 16 })));
}

#[test]
fn tokens_outside_the_vocabulary() {
    let (_dir, engine) = engine(&Toy { dtypes: vec![("", DType::Q8_0)], ..Toy::default() });
    let mut session = session(&engine);
    for token in [260, u32::MAX] {
        assert!(matches!(session.prefill(&[5, token]), Err(EngineError::Token { vocab: 260, .. })));
    }
    session.prefill(&[5]).unwrap();
}

#[test]
fn a_long_context_costs_nothing_until_it_is_used() {
    let (_dir, engine) = engine(&Toy { context: 1 << 20, ..Toy::default() });
    let mut session = session(&engine);
    assert_eq!(session.kv_bytes(), 0);
    session.prefill(&tokens("a")).unwrap();
    assert!(session.kv_bytes() < 1 << 20);
}
