//! Models whose neurons are not all in memory: the same tokens as when they are, whatever the cache holds, however
//! neurons are read, and whatever goes wrong on the way.

mod changes;
mod exact;
mod faults;
mod memory;

use std::path::{Path, PathBuf};

use neuropil::predict::Prediction;
use neuropil::store::{ConvertOptions, convert};
use neuropil::{Engine, EngineBuilder, KvType, Session, SessionOptions};
use neuropil_cpu::{CpuBackend, CpuOptions};
use neuropil_device::DType;
use neuropil_tests::temp::TempDir;
use neuropil_tests::toy::{Toy, ToyExperts};

/// A store of a toy.
struct Stored {
    _dir: TempDir,
    store: PathBuf,
}

fn stored(toy: &Toy) -> Stored {
    let (dir, file) = toy.temp();
    let store = dir.path().join("store.gguf");
    convert(&file, &store, &ConvertOptions::default(), &mut |_, _| true).unwrap();
    Stored { _dir: dir, store }
}

/// Three slices of neurons, the last one short, with predictors.
fn sparse() -> Toy {
    Toy {
        activation: Some("relu"),
        width: 128,
        ffn: 1120,
        layers: 2,
        predictor_rank: Some(16),
        dtypes: vec![("ffn", DType::Q8_0)],
        ..Toy::default()
    }
}

/// Experts, each of more than a slice.
fn experts() -> Toy {
    let experts = ToyExperts { count: 3, used: 2, neurons: None, gating: None };
    Toy { experts: Some(experts), ffn: 544, ..sparse() }
}

fn builder(path: &Path, threads: usize, prediction: Prediction) -> EngineBuilder<'static> {
    let cpu = CpuBackend::new(CpuOptions { threads: Some(threads), ..CpuOptions::default() }).unwrap();
    Engine::builder(path).backend(&cpu).unwrap().prediction(prediction)
}

fn session(engine: &Engine) -> Session {
    engine.session(SessionOptions { kv: KvType::F32, ..SessionOptions::default() }).unwrap()
}

fn bits(session: &Session) -> Vec<u32> {
    session.logits().iter().map(|v| v.to_bits()).collect()
}

/// The bits of the logits after a prompt of 20 tokens and after some tokens one by one.
fn run(engine: &Engine, tokens: &[u32]) -> Result<Vec<Vec<u32>>, neuropil::EngineError> {
    run_after(20, engine, tokens)
}

/// The same with a prompt of so many tokens.
fn run_after(prompt: usize, engine: &Engine, tokens: &[u32]) -> Result<Vec<Vec<u32>>, neuropil::EngineError> {
    let mut session = session(engine);
    let (prompt, rest) = tokens.split_at(prompt);
    session.prefill(prompt)?;
    let mut rows = vec![bits(&session)];
    for token in rest {
        session.decode(*token)?;
        rows.push(bits(&session));
    }
    Ok(rows)
}

fn tokens() -> Vec<u32> {
    neuropil_tests::toy::tokens("A neuron that fires is read, others not.")
}
