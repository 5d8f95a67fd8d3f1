//! The models of the paper: each kind as a toy, against two forward passes that share no code, and the same whatever
//! else goes on.

use std::ops::ControlFlow;
use std::path::Path;

use neuropil::{Engine, SessionOptions};
use neuropil_device::DType;
use neuropil_tests::reference;
use neuropil_tests::toy::{Toy, ToyExperts, named, tokens};

use super::{all_logits, bits, builder, cpu, engine, greedy, reference_engine, session};

/// What the forward pass in NumPy says about a toy.
struct Golden {
    tokens: Vec<u32>,
    /// Position, and every so many-th logit after it.
    rows: Vec<(usize, Vec<f64>)>,
    every: usize,
}

fn golden(name: &str) -> Golden {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/models");
    let text = std::fs::read_to_string(folder.join(format!("{name}.json"))).unwrap();
    let value: serde_json::Value = serde_json::from_str(&text).unwrap();
    let numbers = |value: &serde_json::Value| -> Vec<f64> {
        value.as_array().unwrap().iter().map(|v| v.as_f64().unwrap()).collect()
    };
    let positions = numbers(&value["positions"]).into_iter().map(|p| p as usize);
    let logits = value["logits"].as_array().unwrap().iter().map(numbers);
    Golden {
        tokens: numbers(&value["tokens"]).into_iter().map(|t| t as u32).collect(),
        rows: positions.zip(logits).collect(),
        every: value["every"].as_u64().unwrap() as usize,
    }
}

impl Golden {
    /// How far logits of all positions are from it at most.
    fn error(&self, got: &[Vec<f64>]) -> f64 {
        assert_eq!(got.len(), self.tokens.len());
        let of_row = |(position, want): &(usize, Vec<f64>)| {
            let got = got[*position].iter().step_by(self.every);
            assert_eq!(got.len(), want.len());
            got.zip(want).map(|(got, want)| (got - want).abs()).fold(0.0, f64::max)
        };
        self.rows.iter().map(of_row).fold(0.0, f64::max)
    }
}

fn widened(rows: &[Vec<f32>]) -> Vec<Vec<f64>> {
    rows.iter().map(|row| row.iter().map(|v| f64::from(*v)).collect()).collect()
}

#[test]
fn both_references_agree() {
    for (name, toy) in named() {
        let golden = golden(name);
        let error = golden.error(&reference::logits(&toy.model(), &golden.tokens));
        // The fixtures have nine digits.
        assert!(error < 1e-6, "{name}: off by {error}");
    }
}

#[test]
fn every_model_is_right() {
    for (name, toy) in named() {
        let golden = golden(name);
        let (_dir, path) = toy.temp();
        for exact in [false, true] {
            let engine = builder(&path).exact(exact).build().unwrap();
            let error = golden.error(&widened(&all_logits(&engine, &golden.tokens)));
            assert!(error < 1e-4, "{name}, exact {exact}: off by {error}");
        }
        let error = golden.error(&widened(&all_logits(&reference_engine(&path), &golden.tokens)));
        assert!(error < 1e-4, "{name} on a unit that is no CPU: off by {error}");
    }
}

fn experts(count: usize, used: usize) -> Option<ToyExperts> {
    Some(ToyExperts { count, used, neurons: None, gating: None })
}

/// Models with experts of every kind, in types that are quantised.
fn quantised() -> Vec<(&'static str, Toy)> {
    let mixed = vec![
        ("ffn_gate_inp", DType::F32),
        ("attn", DType::Q4_K),
        ("gate", DType::Q4_0),
        ("up", DType::Q8_0),
        ("down", DType::Q6_K),
        ("fc", DType::F16),
        ("", DType::Q4_0),
    ];
    let base = Toy { dtypes: mixed, ffn: 256, context: 256, seed: 3, ..Toy::default() };
    let thinkers = Some(ToyExperts { count: 6, used: 3, neurons: Some(256), gating: Some(2) });
    vec![
        ("mixtral", Toy { experts: experts(8, 2), ..base.clone() }),
        ("bamboo", Toy { architecture: "bamboo", predictor_rank: Some(16), ..base.clone() }),
        (
            "turbosparse",
            Toy {
                architecture: "turbosparsemixtral",
                experts: experts(4, 2),
                predictor_rank: Some(16),
                ..base.clone()
            },
        ),
        (
            "smallthinker",
            Toy {
                architecture: "smallthinker",
                layers: 5,
                experts: thinkers,
                rope_adjacent: false,
                sliding_window: Some(20),
                ..base
            },
        ),
    ]
}

/// Of each position, the root mean square of the error as a share of that of the logits; ascending.
fn relative_errors(got: &[Vec<f32>], want: &[Vec<f64>]) -> Vec<f64> {
    let of_row = |(got, want): (&Vec<f32>, &Vec<f64>)| {
        let (error, size) = got.iter().zip(want).fold((0.0, 0.0), |(error, size), (got, want)| {
            (error + (f64::from(*got) - want).powi(2), size + want.powi(2))
        });
        f64::sqrt(error / size)
    };
    let mut errors: Vec<f64> = got.iter().zip(want).map(of_row).collect();
    errors.sort_by(f64::total_cmp);
    errors
}

#[test]
fn quantised_models_are_close_and_exact_ones_are_exact() {
    let ids = tokens("routed by sixes and sevens");
    for (name, toy) in quantised() {
        let (_dir, path) = toy.temp();
        let want = reference::logits(&toy.model(), &ids);
        let exact = all_logits(&builder(&path).exact(true).build().unwrap(), &ids);
        let errors = relative_errors(&exact, &want);
        assert!(errors.iter().all(|error| *error < 1e-5), "{name}, exact: off by {errors:?}");
        let native = |toy: &Toy| {
            let (_dir, engine) = engine(toy);
            relative_errors(&all_logits(&engine, &ids), &reference::logits(&toy.model(), &ids))
        };
        // Quantised activations decide a close choice between two experts otherwise now and then, which no bound on
        // each position would allow.
        let errors = native(&toy);
        let (half, last) = (errors[errors.len() / 2], errors[errors.len() - 1]);
        assert!(half < 0.05 && last < 0.7, "{name}: off by {errors:?}");
        // Where a token uses all experts there is nothing to choose, and each position must be close.
        let all = toy.experts.map(|experts| ToyExperts { used: experts.count, ..experts });
        let errors = native(&Toy { experts: all, ..toy });
        assert!(errors[errors.len() - 1] < 0.05, "{name} without a choice: off by {errors:?}");
    }
}

#[test]
fn threads_chunks_and_history_change_no_bit() {
    let ids = tokens("a prompt that is longer than one page of the cache, so that nothing at all lines up");
    for (name, toy) in quantised() {
        let (_dir, path) = toy.temp();
        let run = |threads| {
            let engine = Engine::builder(&path).backend(&cpu(threads)).unwrap().build().unwrap();
            let whole: Vec<_> = all_logits(&engine, &ids).iter().map(|row| bits(row)).collect();
            (engine, whole)
        };
        let (engine, whole) = run(1);
        for threads in [2, 7] {
            assert!(run(threads).1 == whole, "{name}: {threads} threads gave other bits than one");
        }
        let mut one_by_one = session(&engine);
        for (id, want) in ids.iter().zip(&whole) {
            one_by_one.decode(*id).unwrap();
            assert!(bits(one_by_one.logits()) == *want, "{name}: one by one");
        }
        let mut uneven = session(&engine);
        ids.chunks(7).for_each(|part| uneven.prefill(part).unwrap());
        assert!(bits(uneven.logits()) == whole[ids.len() - 1], "{name}: chunks of 7");
    }
}

#[test]
fn neighbours_in_the_batch_change_no_bit() {
    let prompts = ["short", "a rather longer prompt", "x", "and yet another that differs"];
    for (name, toy) in quantised() {
        let (_dir, engine) = engine(&toy);
        let prefilled = |prompt: &str| {
            let mut session = engine.session(SessionOptions::default()).unwrap();
            session.prefill(&tokens(prompt)).unwrap();
            session
        };
        let alone: Vec<_> = prompts
            .iter()
            .map(|prompt| {
                let mut session = prefilled(prompt);
                let generation = session.generate(&greedy(12), &mut |_| ControlFlow::Continue(())).unwrap();
                (generation.tokens, bits(session.logits()))
            })
            .collect();
        let mut sessions: Vec<_> = prompts.iter().map(|prompt| prefilled(prompt)).collect();
        let options = vec![greedy(12); prompts.len()];
        let together = engine.generate(&mut sessions, &options, &mut |_| ControlFlow::Continue(())).unwrap();
        for ((together, session), (tokens, logits)) in together.iter().zip(&sessions).zip(&alone) {
            assert_eq!(&together.tokens, tokens, "{name}");
            assert_eq!(&bits(session.logits()), logits, "{name}");
        }
    }
}

#[test]
fn one_expert_is_no_expert() {
    // A single expert whose weight is 1 is the same layer as without a router, but for where the sum is added.
    let dense = Toy { layers: 1, ..Toy::default() };
    let mut file = dense.file();
    for tensor in file.tensors.iter_mut().filter(|t| t.name.contains(".ffn_") && t.dims.len() == 2) {
        tensor.name = tensor.name.replace(".weight", "_exps.weight");
        tensor.dims.push(1);
    }
    let router = vec![0.5; dense.width];
    let count = |n| neuropil_tests::gguf_writer::Value::U32(n);
    let file = file.set("llama.expert_count", count(1)).set("llama.expert_used_count", count(1)).f32_tensor(
        "blk.0.ffn_gate_inp.weight",
        &[dense.width as u64, 1],
        &router,
    );
    let dir = neuropil_tests::temp::TempDir::new();
    let one = builder(&dir.file("one.gguf", &file.bytes())).build().unwrap();
    let (_dir, dense) = engine(&dense);
    let ids = tokens("a committee of one");
    for (one, dense) in all_logits(&one, &ids).iter().zip(all_logits(&dense, &ids)) {
        let off = one.iter().zip(&dense).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(off < 1e-4, "off by {off}");
    }
}
