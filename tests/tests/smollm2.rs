//! A real model against what llama.cpp made of it: token ids, logits, greedy tokens, perplexity.
//!
//! The files in `fixtures/` say which version and settings they come from. How exact a comparison may be: with weights
//! expanded to F32 tokens are equal until the first step at which the two best logits are closer than 0.02; with
//! activations of 8 bits, closer than 0.2.

use std::path::Path;

use neuropil::model::sampler::{SamplerOptions, log_sum_exp};
use neuropil::model::tokenizer::EncodeOptions;
use neuropil::sched::Placement;
use neuropil::{Engine, GenerateOptions, KvType, Session, SessionOptions};
use neuropil_cpu::{CpuBackend, CpuOptions};
use neuropil_device::Backend;
use neuropil_plugin_host::PluginBackend;
use neuropil_tests::plugins;
use neuropil_tests::real::smollm2;
use serde_json::Value;

const GREEDY: &str = include_str!("../fixtures/smollm2_greedy.json");
const TOKENS: &str = include_str!("../fixtures/smollm2_tokens.json");
const PERPLEXITY: &str = include_str!("../fixtures/smollm2_gpl3_perplexity.json");

fn engine(path: &Path, exact: bool) -> Engine {
    let cpu = CpuBackend::new(CpuOptions::default()).unwrap();
    Engine::builder(path).backend(&cpu).unwrap().exact(exact).build().unwrap()
}

fn session(engine: &Engine, kv: KvType) -> Session {
    engine.session(SessionOptions { kv, ..SessionOptions::default() }).unwrap()
}

fn cases(json: &str) -> Vec<Value> {
    serde_json::from_str::<Value>(json).unwrap()["cases"].as_array().unwrap().clone()
}

fn ids(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

#[test]
fn token_ids() {
    let Some(path) = smollm2() else { return };
    let tokenizer = neuropil::engine::open_tokenizer(&path).unwrap();
    for case in cases(TOKENS).iter().chain(&cases(GREEDY)) {
        // The one case without a text is a piece of a licence that is not repeated here.
        let Some(text) = case["text"].as_str() else { continue };
        let parse_special = case["parse_special"].as_bool().unwrap();
        let options = EncodeOptions { add_special: true, parse_special };
        let want = ids(case.get("ids").unwrap_or(&case["prompt_ids"]));
        assert_eq!(tokenizer.encode(text, options).unwrap(), want, "{}", case["name"]);
        if !parse_special {
            assert_eq!(tokenizer.decode(&want).unwrap(), text.as_bytes(), "{}", case["name"]);
        }
    }
}

/// Compares first logits and 64 greedy tokens; steps whose gap is below `near` may go either way.
fn compare(engine: &Engine, kv: KvType, near: f64, log_p: f64) {
    compare_cases(engine, kv, 64, (near, log_p), |_| true);
}

/// Compares `count` tokens of the cases whose prompt is `taken`.
fn compare_cases(
    engine: &Engine,
    kv: KvType,
    count: usize,
    (near, log_p): (f64, f64),
    taken: impl Fn(&[u32]) -> bool,
) {
    for case in cases(GREEDY).into_iter().filter(|case| taken(&ids(&case["prompt_ids"]))) {
        let name = &case["name"];
        let mut session = session(engine, kv);
        session.prefill(&ids(&case["prompt_ids"])).unwrap();
        let top = &case["first_top5"][0];
        let want = top[1].as_f64().unwrap() - case["first_lse"].as_f64().unwrap();
        let logits = session.logits();
        let got = f64::from(logits[top[0].as_u64().unwrap() as usize]) - log_sum_exp(logits);
        assert!((got - want).abs() < log_p, "{name}: log p {got} instead of {want}");
        let options = GenerateOptions {
            max_tokens: Some(count),
            sampler: SamplerOptions::greedy(),
            ignore_eos: true,
            ..GenerateOptions::default()
        };
        let got = session.generate(&options, &mut |_| std::ops::ControlFlow::Continue(())).unwrap().tokens;
        let want = ids(&case["greedy"]);
        let gaps = case["gap"].as_array().unwrap();
        let sure = gaps.iter().take(count).take_while(|gap| gap.as_f64().unwrap() >= near).count();
        assert_eq!(got[..sure], want[..sure], "{name}: the first {sure} tokens are certain");
    }
}

#[test]
fn greedy_tokens_on_units_made_from_the_templates() {
    let Some(path) = smollm2() else { return };
    let dir = neuropil_tests::temp::TempDir::new();
    for library in
        [plugins::template_c(dir.path()), Some(plugins::template_rust(dir.path()))].into_iter().flatten()
    {
        let backend = PluginBackend::load(&library, "").unwrap();
        let cpu = CpuBackend::new(CpuOptions::default()).unwrap();
        let builder = Engine::builder(&path).device(backend.open(0).unwrap()).backend(&cpu).unwrap();
        let engine = builder.strict(true).build().unwrap();
        // They are made to be read, not to be fast: prompts of more than a step of decode, and few tokens.
        compare_cases(&engine, KvType::F16, 3, (0.2, 0.2), |prompt| (9..24).contains(&prompt.len()));
        let on_unit = |placement: &&Placement| placement.unit == engine.devices()[0].info().name;
        let placements = engine.placements();
        let placed: Vec<_> = placements.iter().filter(on_unit).collect();
        assert!(placed.iter().any(|p| p.op == "ffn q4_1" && p.weights == 30), "{placements:?}");
    }
}

#[test]
fn greedy_tokens_with_exact_weights() {
    let Some(path) = smollm2() else { return };
    compare(&engine(&path, true), KvType::F32, 0.02, 0.01);
}

#[test]
fn greedy_tokens_as_the_file_is() {
    let Some(path) = smollm2() else { return };
    compare(&engine(&path, false), KvType::F16, 0.2, 0.2);
}

/// Perplexity over the first `chunks` chunks of 512 tokens, each from an empty context, second halves scored.
fn perplexity(engine: &Engine, kv: KvType, text: &[u8], chunks: usize) -> f64 {
    const CHUNK: usize = 512;
    let options = EncodeOptions { add_special: true, parse_special: false };
    let tokens = engine.tokenizer().unwrap().encode(text, options).unwrap();
    let mut session = session(engine, kv);
    let losses = tokens.chunks_exact(CHUNK).take(chunks).map(|chunk| session.loss(chunk).unwrap());
    (losses.sum::<f64>() / (chunks * (CHUNK / 2 - 1)) as f64).exp()
}

#[test]
fn perplexity_of_a_known_text() {
    let Some(path) = smollm2() else { return };
    let Ok(text) = std::fs::read("/usr/share/common-licenses/GPL-3") else {
        eprintln!("SKIPPED: this system has no /usr/share/common-licenses/GPL-3");
        return;
    };
    let golden: Value = serde_json::from_str(PERPLEXITY).unwrap();
    let want = golden["results"]["q4_1"]["ppl"].as_f64().unwrap();
    let got = perplexity(&engine(&path, false), KvType::F16, &text, 14);
    assert!((got / want - 1.0).abs() < 0.01, "{got} instead of {want}");
    // Keys and values of 8 bits: a thousandth on top.
    let narrow = perplexity(&engine(&path, false), KvType::Q8_0, &text, 3);
    let halves = perplexity(&engine(&path, false), KvType::F16, &text, 3);
    assert!((narrow / halves - 1.0).abs() < 0.003, "{narrow} instead of {halves}");
    // Three chunks of the slow path say as much as all fourteen.
    let want = golden["results"]["f32"]["running"][2].as_f64().unwrap();
    let got = perplexity(&engine(&path, true), KvType::F32, &text, 3);
    assert!((got / want - 1.0).abs() < 0.001, "{got} instead of {want}");
}

#[test]
fn a_batch_of_answers_is_what_each_is_alone() {
    let Some(path) = smollm2() else { return };
    let engine = engine(&path, false);
    let mut base = session(&engine, KvType::F16);
    base.prefill(&ids(&cases(GREEDY)[2]["prompt_ids"])).unwrap();
    let options = |seed| GenerateOptions {
        max_tokens: Some(24),
        sampler: SamplerOptions { seed: Some(seed), ..SamplerOptions::default() },
        ..GenerateOptions::default()
    };
    let mut ignore = |_: neuropil::Piece<'_>| std::ops::ControlFlow::Continue(());
    let mut batch: Vec<_> = (0..5).map(|_| base.fork()).collect();
    let all: Vec<_> = (0..5).map(options).collect();
    let together = engine.generate(&mut batch, &all, &mut ignore).unwrap();
    for (seed, together) in together.iter().enumerate() {
        let alone = base.fork().generate(&options(seed as u64), &mut ignore).unwrap();
        assert_eq!(alone.tokens, together.tokens);
    }
}
