//! The engine on toy models: right against an f64 forward pass, the same whatever else goes on, bounded, and calm when
//! a unit fails.

mod bounds;
mod faults;
mod generation;
mod models;
mod right;
mod same;

use std::path::Path;
use std::sync::Arc;

use neuropil::model::sampler::SamplerOptions;
use neuropil::{Engine, EngineBuilder, GenerateOptions, KvType, Session, SessionOptions};
use neuropil_cpu::{CpuBackend, CpuOptions};
use neuropil_device::Backend;
use neuropil_tests::temp::TempDir;
use neuropil_tests::toy::Toy;

/// The CPU on so many threads.
fn cpu(threads: usize) -> CpuBackend {
    CpuBackend::new(CpuOptions { threads: Some(threads), ..CpuOptions::default() }).unwrap()
}

/// An engine in the making for a file, on two threads.
fn builder(path: &Path) -> EngineBuilder<'static> {
    Engine::builder(path).backend(&cpu(2)).unwrap()
}

/// A toy's engine; the folder holds its file.
fn engine(toy: &Toy) -> (TempDir, Engine) {
    let (dir, path) = toy.temp();
    let engine = builder(&path).build().unwrap();
    (dir, engine)
}

/// A session that keeps keys and values in single precision.
fn session(engine: &Engine) -> Session {
    engine.session(SessionOptions { kv: KvType::F32, ..SessionOptions::default() }).unwrap()
}

/// The logits after each of the tokens.
fn all_logits(engine: &Engine, tokens: &[u32]) -> Vec<Vec<f32>> {
    let mut rows = Vec::new();
    let mut push = |index: usize, logits: &[f32]| {
        assert_eq!(index, rows.len());
        rows.push(logits.to_vec());
        Ok(())
    };
    session(engine).prefill_scored(tokens, 0, &mut push).unwrap();
    rows
}

/// Greedy, `count` tokens, whatever the tokens are.
fn greedy(count: usize) -> GenerateOptions {
    GenerateOptions {
        max_tokens: Some(count),
        sampler: SamplerOptions::greedy(),
        ignore_eos: true,
        ..GenerateOptions::default()
    }
}

/// The bits of some floats, for comparisons in which nothing may differ.
fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

/// A device of its own kind: definitions in f64, no SIMD, no threads.
fn reference_engine(path: &Path) -> Engine {
    Engine::builder(path).device(neuropil_tests::reference_device::ReferenceDevice::new()).build().unwrap()
}

#[test]
fn an_engine_is_shared_between_threads() {
    fn shared<T: Send + Sync + Clone + 'static>() {}
    shared::<Engine>();
    fn movable<T: Send + 'static>() {}
    movable::<Session>();
    let _: Arc<dyn neuropil_device::Device> = cpu(1).open(0).unwrap();
}
