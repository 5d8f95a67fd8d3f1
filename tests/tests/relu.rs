//! A real ReLU model: what it answers is known, and leaving out what its gate switches off changes nothing.

use std::path::{Path, PathBuf};

use neuropil::model::sampler::SamplerOptions;
use neuropil::model::tokenizer::EncodeOptions;
use neuropil::predict::Prediction;
use neuropil::store::{ConvertOptions, convert};
use neuropil::{Engine, GenerateOptions, KvType, SessionOptions};
use neuropil_cpu::{CpuBackend, CpuOptions};
use neuropil_tests::real::relu;
use neuropil_tests::temp::TempDir;
use serde_json::Value;

fn golden() -> Value {
    serde_json::from_str(include_str!("../fixtures/relu65.json")).unwrap()
}

fn ids(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

fn engine(path: &Path, prediction: Prediction, exact: bool) -> Engine {
    let cpu = CpuBackend::new(CpuOptions::default()).unwrap();
    Engine::builder(path).backend(&cpu).unwrap().prediction(prediction).exact(exact).build().unwrap()
}

/// Greedy tokens after a prompt, and the share of neurons that were computed for them.
fn greedy(engine: &Engine, prompt: &[u32], count: usize) -> (Vec<u32>, f64) {
    let mut session =
        engine.session(SessionOptions { kv: KvType::F32, ..SessionOptions::default() }).unwrap();
    session.prefill(prompt).unwrap();
    let options = GenerateOptions {
        max_tokens: Some(count),
        sampler: SamplerOptions::greedy(),
        ignore_eos: true,
        ..GenerateOptions::default()
    };
    let tokens = session.generate(&options, &mut |_| std::ops::ControlFlow::Continue(())).unwrap().tokens;
    (tokens, session.activity().share())
}

fn store(source: &Path) -> (TempDir, PathBuf) {
    let dir = TempDir::new();
    let path = dir.path().join("store.gguf");
    convert(source, &path, &ConvertOptions::default(), &mut |_, _| true).unwrap();
    (dir, path)
}

#[test]
fn greedy_tokens_are_the_known_ones() {
    let Some(path) = relu() else { return };
    let engine = engine(&path, Prediction::Auto, true);
    for case in golden()["greedy"].as_array().unwrap() {
        let want = ids(&case["ids"]);
        assert_eq!(greedy(&engine, &ids(&case["prompt_ids"]), want.len()).0, want);
    }
}

#[test]
fn what_the_gate_switches_off_changes_no_token() {
    let Some(path) = relu() else { return };
    let (_dir, store) = store(&path);
    let engines = [Prediction::Off, Prediction::Gate].map(|how| engine(&store, how, false));
    for case in golden()["greedy"].as_array().unwrap() {
        let [off, gate] = [0, 1].map(|i| greedy(&engines[i], &ids(&case["prompt_ids"]), 40));
        assert_eq!(off.0, gate.0);
        assert_eq!(off.1, 1.0);
        assert!((0.35..0.5).contains(&gate.1), "{}", gate.1);
    }
}

#[test]
fn perplexity_of_a_known_text() {
    let Some(path) = relu() else { return };
    let Ok(text) = std::fs::read("/usr/share/common-licenses/GPL-3") else {
        eprintln!("SKIPPED: this system has no /usr/share/common-licenses/GPL-3");
        return;
    };
    let (_dir, store) = store(&path);
    let want = golden()["perplexity"].as_f64().unwrap();
    for (path, prediction) in
        [(&path, Prediction::Auto), (&store, Prediction::Gate), (&store, Prediction::Gate4)]
    {
        let engine = engine(path, prediction, false);
        let options = EncodeOptions { add_special: true, parse_special: false };
        let tokens = engine.tokenizer().unwrap().encode(&text, options).unwrap();
        let options = SessionOptions { sparse_prompt: true, ..SessionOptions::default() };
        let mut session = engine.session(options).unwrap();
        let losses: Vec<f64> =
            tokens.chunks_exact(512).map(|chunk| session.loss(chunk).unwrap() / 255.0).collect();
        let got = (losses.iter().sum::<f64>() / losses.len() as f64).exp();
        assert!((got / want - 1.0).abs() < 0.005, "{prediction:?}: {got} instead of {want}");
        if prediction == Prediction::Gate {
            let off = 1.0 - session.activity().share();
            assert!((off - golden()["off"].as_f64().unwrap()).abs() < 0.01, "{off}");
        }
    }
}
