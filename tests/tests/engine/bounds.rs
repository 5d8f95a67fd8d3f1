//! Files and requests that cannot be: a typed error each, before any work.

use neuropil::engine::EngineError;
use neuropil::model::ModelError;
use neuropil::{Engine, SessionOptions};
use neuropil_device::DType;
use neuropil_tests::gguf_writer::{GgufFile, Value};
use neuropil_tests::temp::TempDir;
use neuropil_tests::toy::{Toy, tokens};

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
        ("llama.expert_count", 8),
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
