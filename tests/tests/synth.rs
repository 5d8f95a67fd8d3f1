//! Synthetic models: the same bytes twice, stores like any other, and the figures that were asked for.

use std::path::{Path, PathBuf};

use neuropil::pipeline::CancelToken;
use neuropil::predict::Prediction;
use neuropil::synth::{PRESETS, Predictor, Shape, Synth, SynthError, SynthOptions, type_named};
use neuropil::{Engine, SessionOptions};
use neuropil_cpu::{CpuBackend, CpuOptions};
use neuropil_tests::temp::TempDir;

const TOYS: [&str; 3] = ["toy", "toy-drelu", "toy-experts"];

fn cpu() -> CpuBackend {
    CpuBackend::new(CpuOptions { threads: Some(2), ..CpuOptions::default() }).unwrap()
}

fn options(shape: &str, preset: usize) -> SynthOptions {
    let mut options = SynthOptions::new(Shape::named(shape).unwrap(), PRESETS[preset]);
    options.predictor = Some(Predictor { rank: 288, recall: 0.9 });
    options
}

fn write(synth: &Synth, path: &Path) -> PathBuf {
    synth.write_store(path, &CancelToken::default(), &mut |_, _| {}).unwrap();
    path.into()
}

fn greedy(path: &Path, prediction: Prediction, count: usize) -> Vec<u32> {
    let engine = Engine::builder(path).backend(&cpu()).unwrap().prediction(prediction).build().unwrap();
    let mut session = engine.session(SessionOptions::default()).unwrap();
    session.prefill(&engine.tokenizer().unwrap().encode(b"Some text", Default::default()).unwrap()).unwrap();
    let mut tokens = Vec::new();
    for _ in 0..count {
        let logits = session.logits().iter().enumerate();
        let next = logits.reduce(|best, next| if next.1 > best.1 { next } else { best }).unwrap().0 as u32;
        tokens.push(next);
        session.decode(next).unwrap();
    }
    tokens
}

#[test]
fn toys_fire_as_they_were_asked_to() {
    let dir = TempDir::new();
    for shape in TOYS {
        for (preset, figures) in PRESETS.iter().enumerate() {
            let synth = Synth::new(options(shape, preset)).unwrap();
            let path = write(&synth, &dir.path().join("store.gguf"));
            let found = synth.measure(&path, &cpu(), &CancelToken::default()).unwrap();
            let shown = format!("{shape} {}: {found:?}", figures.name);
            // A toy's stream is narrow, so its figures stray more than those of a real shape.
            assert!((found.active / figures.active - 1.0).abs() < 0.15, "{shown}");
            assert!((found.overlap - figures.overlap).abs() < 0.04, "{shown}");
            assert!((found.recall.unwrap() - 0.9).abs() < 0.03, "{shown}");
            // Of dReLU the predictor tells the gate, which fires a little more often than the neuron.
            assert!((0.9..1.35).contains(&(found.predicted.unwrap() / found.active)), "{shown}");
            assert_eq!((found.tokens, &found.layers[..]), (64, &[0, 1, 2, 3][..]));
        }
    }
}

#[test]
fn what_is_asked_for_moves_what_comes_out() {
    let dir = TempDir::new();
    let measured = |change: &dyn Fn(&mut SynthOptions)| {
        let mut options = options("toy", 1);
        change(&mut options);
        let synth = Synth::new(options).unwrap();
        let path = write(&synth, &dir.path().join("store.gguf"));
        synth.measure(&path, &cpu(), &CancelToken::default()).unwrap()
    };
    let found = measured(&|o| (o.active, o.overlap, o.predictor) = (0.3, 0.7, None));
    assert!((found.active - 0.3).abs() < 0.03 && (found.overlap - 0.7).abs() < 0.05, "{found:?}");
    assert_eq!((found.recall, found.predicted), (None, None));
    let found = measured(&|o| o.predictor = Some(Predictor { rank: 256, recall: 0.98 }));
    assert!(found.recall.unwrap() > 0.96, "{found:?}");
    for name in ["q8_0", "f16"] {
        let found = measured(&|o| o.dtype = type_named(name).unwrap());
        assert!(
            (found.active - 0.1).abs() < 0.015 && (found.recall.unwrap() - 0.9).abs() < 0.03,
            "{found:?}"
        );
    }
}

#[test]
fn the_same_seed_gives_the_same_bytes() {
    let dir = TempDir::new();
    for shape in TOYS {
        let bytes = |seed: u64, name: &str| {
            let synth = Synth::new(SynthOptions { seed, ..options(shape, 0) }).unwrap();
            std::fs::read(write(&synth, &dir.path().join(name))).unwrap()
        };
        let first = bytes(1, "a");
        assert!(first == bytes(1, "b") && first != bytes(2, "c"));
    }
}

#[test]
fn a_toy_is_a_store_like_any_other() {
    let dir = TempDir::new();
    for shape in TOYS {
        let synth = Synth::new(options(shape, 1)).unwrap();
        let path = write(&synth, &dir.path().join("store.gguf"));
        let all = greedy(&path, Prediction::Off, 60);
        for prediction in [Prediction::Auto, Prediction::Gate, Prediction::Gate4, Prediction::Model] {
            assert_eq!(greedy(&path, prediction, 60), all, "{shape} {prediction:?}");
        }
        // The text walks through the vocabulary instead of repeating itself.
        let mut words = all.clone();
        words.sort_unstable();
        words.dedup();
        assert_eq!(words.len(), 60, "{all:?}");
        let twin = dir.path().join("twin.gguf");
        synth.write_twin(&twin, &CancelToken::default(), &mut |_, _| {}).unwrap();
        assert_eq!(greedy(&twin, Prediction::Off, 60), all);
    }
}

#[test]
fn what_is_stopped_leaves_nothing() {
    let dir = TempDir::new();
    let synth = Synth::new(options("toy", 0)).unwrap();
    let (cancel, path) = (CancelToken::default(), dir.path().join("store.gguf"));
    let stopped = synth.write_store(&path, &cancel, &mut |_, _| cancel.cancel());
    assert!(matches!(stopped, Err(SynthError::Cancelled)));
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
}
