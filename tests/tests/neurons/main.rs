//! Models that run neuron by neuron, out of a neuron store: equal to their dense twin, whoever decides which neurons are
//! computed, and the same whatever else goes on.

mod calibrated;
mod predicted;
mod twin;

use std::path::{Path, PathBuf};

use neuropil::predict::Prediction;
use neuropil::store::{ConvertOptions, convert};
use neuropil::{Engine, EngineBuilder, KvType, Session, SessionOptions};
use neuropil_cpu::{CpuBackend, CpuOptions};
use neuropil_tests::temp::TempDir;
use neuropil_tests::toy::Toy;

/// A folder with a toy's file and its store.
struct Stored {
    dir: TempDir,
    file: PathBuf,
    store: PathBuf,
}

fn stored(toy: &Toy, options: &ConvertOptions) -> Stored {
    let (dir, file) = toy.temp();
    let store = dir.path().join("store.gguf");
    convert(&file, &store, options, &mut |_, _| true).unwrap();
    Stored { dir, file, store }
}

fn builder(path: &Path, threads: usize) -> EngineBuilder<'static> {
    let cpu = CpuBackend::new(CpuOptions { threads: Some(threads), ..CpuOptions::default() }).unwrap();
    Engine::builder(path).backend(&cpu).unwrap()
}

fn engine(path: &Path, prediction: Prediction) -> Engine {
    builder(path, 2).prediction(prediction).build().unwrap()
}

fn session(engine: &Engine, sparse_prompt: bool) -> Session {
    engine.session(SessionOptions { kv: KvType::F32, sparse_prompt, ..SessionOptions::default() }).unwrap()
}

/// The logits after each of the tokens, as one prompt.
fn prompt_logits(engine: &Engine, tokens: &[u32], sparse: bool) -> Vec<Vec<f32>> {
    let mut rows = Vec::new();
    let mut push = |_: usize, logits: &[f32]| {
        rows.push(logits.to_vec());
        Ok(())
    };
    session(engine, sparse).prefill_scored(tokens, 0, &mut push).unwrap();
    rows
}

/// The logits after each of the tokens from the third on, one token at a time.
fn decode_logits(engine: &Engine, tokens: &[u32]) -> Vec<Vec<f32>> {
    let mut session = session(engine, false);
    session.prefill(&tokens[..2]).unwrap();
    let decode = |token: &u32| {
        session.decode(*token).unwrap();
        session.logits().to_vec()
    };
    tokens[2..].iter().map(decode).collect()
}

fn bits(rows: &[Vec<f32>]) -> Vec<Vec<u32>> {
    rows.iter().map(|row| row.iter().map(|value| value.to_bits()).collect()).collect()
}

/// The largest difference, as a share of the largest value.
fn difference(a: &[Vec<f32>], b: &[Vec<f32>]) -> f32 {
    let largest = a.iter().flatten().fold(0.0f32, |most, x| most.max(x.abs()));
    let pairs = a.iter().flatten().zip(b.iter().flatten());
    pairs.fold(0.0f32, |most, (a, b)| most.max((a - b).abs())) / largest
}

fn tokens() -> Vec<u32> {
    neuropil_tests::toy::tokens("A neuron that fires is read, one that does not is not.")
}
