//! Models on units that plugins drive: the tokens of the processor, and a run that goes on when a unit fails.

mod faults;
mod hot;
mod placement;

use std::path::Path;
use std::sync::Arc;

use neuropil::engine::{EngineBuilder, EngineError};
use neuropil::model::sampler::SamplerOptions;
use neuropil::{Engine, GenerateOptions, KvType, SessionOptions};
use neuropil_cpu::{CpuBackend, CpuOptions};
use neuropil_device::DType;
use neuropil_plugin_host::{PluginBackend, PluginDevice};
use neuropil_tests::plugins::library;
use neuropil_tests::toy::{Toy, tokens};

/// More tokens than a decode step may have, so that products go to the unit.
const PROMPT: &str = "the quick brown fox jumps over";

/// A model none of whose matrices has as many columns as those of the self-test.
fn toy() -> Toy {
    Toy { layers: 2, width: 192, heads: 6, kv_heads: 3, ffn: 320, ..Toy::default() }
}

fn quantised() -> Toy {
    Toy { dtypes: vec![("weight", DType::Q8_0)], ..toy() }
}

/// The software NPU with these options.
fn npu(options: &str) -> Arc<PluginDevice> {
    backend(options).open_unit(0).unwrap()
}

fn backend(options: &str) -> PluginBackend {
    PluginBackend::load(&library("neuropil_sim_npu"), options).unwrap()
}

fn cpu() -> CpuBackend {
    CpuBackend::new(CpuOptions { threads: Some(1), ..CpuOptions::default() }).unwrap()
}

/// An engine in the making with a unit and the processor.
fn builder(path: &Path, device: &Arc<PluginDevice>) -> EngineBuilder<'static> {
    Engine::builder(path).device(device.clone()).backend(&cpu()).unwrap()
}

/// The prompt's logits' greatest, and the tokens after it.
fn run(engine: &Engine) -> Result<Vec<u32>, EngineError> {
    let mut session = engine.session(SessionOptions { kv: KvType::F32, ..SessionOptions::default() })?;
    session.prefill(&tokens(PROMPT))?;
    let options = GenerateOptions {
        max_tokens: Some(6),
        sampler: SamplerOptions::greedy(),
        ignore_eos: true,
        ..GenerateOptions::default()
    };
    let generation = session.generate(&options, &mut |_| std::ops::ControlFlow::Continue(()))?;
    match generation.error {
        Some(error) => Err(error),
        None => Ok(generation.tokens),
    }
}

/// The tokens of the processor alone.
fn alone(path: &Path) -> Vec<u32> {
    run(&Engine::builder(path).backend(&cpu()).unwrap().build().unwrap()).unwrap()
}
