//! The program on a real model, against what llama.cpp made of it. Skipped where `neuropil demo` has not fetched it.
//!
//! The library's own tests compare more of the same files; these are about what the program prints.

mod common;

use common::{arg, neuropil, with_input};
use neuropil_tests::real::smollm2;
use serde_json::{Value, json};

const GREEDY: &str = include_str!("../../../tests/fixtures/smollm2_greedy.json");
const TOKENS: &str = include_str!("../../../tests/fixtures/smollm2_tokens.json");

/// Steps whose two best logits are closer than this may go either way with activations of 8 bits.
const NEAR: f64 = 0.2;

/// The cases with a text.
fn cases(json: &str) -> Vec<Value> {
    let json: Value = serde_json::from_str(json).unwrap();
    json["cases"].as_array().unwrap().iter().filter(|case| case["text"].is_string()).cloned().collect()
}

/// `args` with the flag that the case needs.
fn with_special<'a>(args: &[&'a str], case: &Value) -> Vec<&'a str> {
    let special = case["parse_special"].as_bool().unwrap().then_some("--parse-special");
    args.iter().copied().chain(special).collect()
}

#[test]
fn tokenize_gives_the_ids() {
    let Some(model) = smollm2() else { return };
    for case in cases(TOKENS) {
        let args = with_special(&["tokenize", arg(&model)], &case);
        let got = with_input(&args, case["text"].as_str().unwrap().as_bytes()).json();
        assert_eq!(got["tokens"], case["ids"], "{}", case["name"]);
    }
}

#[test]
fn logits_gives_the_five_best() {
    let Some(model) = smollm2() else { return };
    for case in cases(GREEDY).iter().take(4) {
        let name = &case["name"];
        let args = ["logits", arg(&model), "--exact", "--kv", "f32", "-p", case["text"].as_str().unwrap()];
        let got = neuropil(&args).json();
        assert_eq!(got["top"].as_array().unwrap().len(), 5);
        let close = |a: &Value, b: &Value| (a.as_f64().unwrap() - b.as_f64().unwrap()).abs() < 0.01;
        assert!(close(&got["log_sum_exp"], &case["first_lse"]), "{name}");
        for (got, want) in got["top"].as_array().unwrap().iter().zip(case["first_top5"].as_array().unwrap()) {
            assert!(close(&got[1], &want[1]), "{name}: {got} instead of {want}");
        }
        assert_eq!(got["top"][0][0], case["first_top5"][0][0], "{name}");
    }
}

#[test]
fn run_gives_the_greedy_tokens() {
    let Some(model) = smollm2() else { return };
    for case in cases(GREEDY) {
        let flags =
            ["-p", case["text"].as_str().unwrap(), "-n", "64", "--temp", "0", "--ignore-eos", "--json"];
        let args = with_special(&[&["run", arg(&model)][..], &flags].concat(), &case);
        let got = neuropil(&args).json();
        assert_eq!((&got["prompt_tokens"], &got["finish_reason"]), (&case["prompt_ids"], &json!("length")));
        let gaps = case["gap"].as_array().unwrap();
        let sure = gaps.iter().take_while(|gap| gap.as_f64().unwrap() >= NEAR).count();
        let first = |tokens: &Value| tokens.as_array().unwrap()[..sure].to_vec();
        assert_eq!(first(&got["tokens"]), first(&case["greedy"]), "{}", case["name"]);
    }
}

#[test]
fn demo_runs_in_less_memory_than_the_weights_take() {
    let Some(model) = smollm2() else { return };
    let cache = neuropil_tests::temp::TempDir::new();
    std::fs::copy(&model, cache.path().join(model.file_name().unwrap())).unwrap();
    let args = ["demo", "-p", "hi", "--cache-dir", arg(cache.path())];
    let first = neuropil(&args);
    for word in ["> hi", "are allowed", "the weights are", "neurons", "read per token", "spent waiting"] {
        assert!(first.text().contains(word), "{word}: {}", first.text());
    }
    assert!(first.stderr.contains("neuron store, once"), "{}", first.stderr);
    let second = neuropil(&[&args[..], &["--json"]].concat());
    assert!(!second.stderr.contains("neuron store"), "{}", second.stderr);
    let json = second.json();
    let (memory, weights) = (&json["memory"], std::fs::metadata(&model).unwrap().len());
    let budget = memory["budget_bytes"].as_u64().unwrap();
    assert!(budget < weights && memory["peak_bytes"].as_u64().unwrap() < budget + (64 << 20), "{memory}");
    assert!(json["io"]["bytes_per_token"].as_u64().unwrap() > 0);
}
