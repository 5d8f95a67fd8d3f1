//! Memory budgets: what is too little is refused with what is enough, keys and values take from the neurons and give
//! back, and none of it changes a token.

use std::path::Path;

use neuropil::model::ModelError;
use neuropil::pipeline::CancelToken;
use neuropil::predict::Prediction;
use neuropil::synth::{Preset, Shape, Synth, SynthOptions};
use neuropil::{Engine, EngineBuilder, EngineError, KvType, SessionOptions};
use neuropil_device::DType;
use neuropil_tests::real::smollm2;
use neuropil_tests::temp::TempDir;
use neuropil_tests::toy::{Toy, ToyExperts};

use super::{bits, builder, stored};

const PAGE: usize = neuropil_device::KV_PAGE;

/// Many neurons, so that they are most of the model, and a longer context.
fn wide() -> Toy {
    Toy { ffn: 2560, layers: 4, context: 1024, ..super::sparse() }
}

fn wide_experts() -> Toy {
    let experts = ToyExperts { count: 6, used: 2, neurons: None, gating: None };
    let dtypes = vec![("ffn", DType::F16)];
    Toy { ffn: 800, layers: 2, context: 1024, experts: Some(experts), dtypes, ..wide() }
}

/// Tokens of a long text.
fn text(len: usize) -> Vec<u32> {
    (0..len as u32).map(|i| 4 + i * 37 % 256).collect()
}

/// The bits of the logits after a prompt and after each of 16 tokens.
fn run(engine: &Engine, prompt: usize, kv: KvType) -> Result<Vec<Vec<u32>>, EngineError> {
    let mut session = engine.session(SessionOptions { kv, ..SessionOptions::default() })?;
    let text = text(prompt + 16);
    session.prefill(&text[..prompt])?;
    let mut rows = vec![bits(&session)];
    for token in &text[prompt..] {
        session.decode(*token)?;
        rows.push(bits(&session));
    }
    Ok(rows)
}

/// The smallest budget that an engine names when it is given too little.
fn smallest(builder: EngineBuilder<'_>, budget: u64) -> u64 {
    let refused = builder.memory(budget).build().err().map(|error| (error.to_string(), error));
    match refused {
        Some((text, EngineError::Model(ModelError::Budget { budget: said, smallest, .. }))) => {
            assert!(said == budget && smallest > budget, "{text}");
            smallest
        }
        other => panic!("{:?}", other.map(|(text, _)| text)),
    }
}

#[test]
fn the_smallest_budget_that_is_named_is_enough_and_less_is_not() {
    for toy in [wide(), wide_experts()] {
        let stored = stored(&toy);
        for (prediction, kv) in [
            (Prediction::Off, KvType::F32),
            (Prediction::Model, KvType::F16),
            (Prediction::Gate, KvType::Q8_0),
        ] {
            let make = || builder(&stored.store, 1, prediction).context(None, kv);
            let want = run(&make().build().unwrap(), 20, kv).unwrap();
            let least = smallest(make(), 1);
            assert_eq!(smallest(make(), least - 1), least, "{prediction:?}, {kv:?}");
            for budget in [least, least + 300_000, least + 1_000_000, 1 << 30] {
                let engine = make().memory(budget).build().unwrap();
                assert_eq!(run(&engine, 20, kv).unwrap(), want, "{prediction:?}, {kv:?}, {budget}");
                let used = engine.memory();
                assert_eq!(used.budget, Some(budget));
                assert!(used.weights + used.hot + used.cold < budget);
                assert_eq!(used.hot + used.cold > 0, budget < 1 << 30, "{prediction:?}, {kv:?}, {budget}");
                assert_eq!(engine.storage().is_some(), budget < 1 << 30);
            }
        }
    }
}

#[test]
fn a_context_that_is_asked_for_fits_the_budget_that_is_named() {
    let stored = stored(&wide());
    for context in [100, 700] {
        for kv in [KvType::F32, KvType::Q8_0] {
            let make = || builder(&stored.store, 1, Prediction::Model).context(Some(context), kv);
            let least = smallest(make(), 1 << 20);
            let engine = make().memory(least).build().unwrap();
            let want = run(&make().build().unwrap(), context - 16, kv).unwrap();
            assert_eq!(run(&engine, context - 16, kv).unwrap(), want, "{context}, {kv:?}");
        }
    }
}

#[test]
fn a_file_that_is_no_store_is_in_memory_as_a_whole_or_not_at_all() {
    let (_dir, file) = wide().temp();
    let make = || builder(&file, 1, Prediction::Auto);
    let least = smallest(make(), 5 << 20);
    assert_eq!(smallest(make(), least - 1), least);
    let want = run(&make().build().unwrap(), 20, KvType::F16).unwrap();
    let engine = make().memory(least).build().unwrap();
    assert_eq!(run(&engine, 20, KvType::F16).unwrap(), want);
    assert!(engine.storage().is_none());
    // One page of keys and values fits beside it, a second one does not.
    let error = run(&engine, PAGE, KvType::F16).unwrap_err();
    assert!(matches!(error, EngineError::Model(ModelError::ContextMemory { .. })), "{error}");
    assert_eq!(run(&engine, 20, KvType::F16).unwrap(), want);
}

/// Bytes that the cache of neurons has.
fn neurons(engine: &Engine) -> u64 {
    let used = engine.memory();
    used.hot + used.cold
}

#[test]
fn keys_and_values_take_memory_from_the_neurons_and_give_it_back() {
    for toy in [wide(), wide_experts()] {
        let stored = stored(&toy);
        for prediction in [Prediction::Off, Prediction::Model] {
            let make = || builder(&stored.store, 1, prediction);
            let budget = smallest(make(), 1) + 900_000;
            let engine = make().memory(budget).build().unwrap();
            let all = make().build().unwrap();
            let full = neurons(&engine);
            let mut sessions = Vec::new();
            let mut before = full;
            for len in [2 * PAGE, 3 * PAGE, PAGE] {
                let mut session = engine.session(SessionOptions::default()).unwrap();
                session.prefill(&text(len)).unwrap();
                let mut twin = all.session(SessionOptions::default()).unwrap();
                twin.prefill(&text(len)).unwrap();
                assert_eq!(bits(&session), bits(&twin), "{prediction:?}");
                let now = neurons(&engine);
                assert!(now < before, "{prediction:?}: {now} after {before}");
                let kv: u64 = sessions.iter().map(neuropil::Session::kv_bytes).sum::<usize>() as u64;
                assert!(now + kv + session.kv_bytes() as u64 <= full + (1 << 18), "{prediction:?}");
                before = now;
                sessions.push(session);
            }
            sessions.clear();
            assert_eq!(neurons(&engine), full);
            let want = run(&all, PAGE + 5, KvType::F16).unwrap();
            assert_eq!(run(&engine, PAGE + 5, KvType::F16).unwrap(), want, "{prediction:?}");
        }
    }
}

#[test]
fn a_context_beyond_the_budget_is_an_error_and_no_end() {
    for toy in [wide(), wide_experts()] {
        let stored = stored(&toy);
        for prediction in [Prediction::Off, Prediction::Model] {
            let make = || builder(&stored.store, 1, prediction);
            let engine = make().memory(smallest(make(), 1)).build().unwrap();
            let want = run(&engine, 20, KvType::F16).unwrap();
            let mut session = engine.session(SessionOptions::default()).unwrap();
            let error = session.prefill(&text(1000)).unwrap_err();
            assert!(matches!(error, EngineError::Model(ModelError::ContextMemory { .. })), "{error}");
            // What is left of it holds pages.
            drop(session);
            assert_eq!(run(&engine, 20, KvType::F16).unwrap(), want);
        }
    }
}

#[test]
fn sessions_of_several_threads_share_a_budget() {
    let stored = stored(&wide());
    for prediction in [Prediction::Off, Prediction::Model, Prediction::Gate] {
        let make = || builder(&stored.store, 1, prediction);
        let all = make().build().unwrap();
        let want: Vec<_> = [70, 130, 30].map(|len| run(&all, len, KvType::F16).unwrap()).into();
        // Room for all pages, but not for all neurons beside them.
        let page = (2 * 2 * 4 * 64 * PAGE) as u64;
        let engine = make().memory(smallest(make(), 1) + 6 * page).build().unwrap();
        assert!(engine.storage().is_some());
        std::thread::scope(|scope| {
            let threads = [70, 130, 30].map(|len| {
                let engine = &engine;
                let runs = move || [0; 2].map(|_| run(engine, len, KvType::F16).unwrap());
                scope.spawn(runs)
            });
            for (thread, want) in threads.into_iter().zip(&want) {
                thread.join().unwrap().iter().for_each(|got| assert_eq!(got, want, "{prediction:?}"));
            }
        });
    }
}

#[test]
fn neurons_in_the_file_s_map_give_the_same_tokens() {
    for toy in [wide(), wide_experts()] {
        let stored = stored(&toy);
        for prediction in [Prediction::Off, Prediction::Model] {
            let want = run(&builder(&stored.store, 2, prediction).build().unwrap(), 20, KvType::F16).unwrap();
            let engine = builder(&stored.store, 2, prediction).mapped(true).build().unwrap();
            assert_eq!(run(&engine, 20, KvType::F16).unwrap(), want, "{prediction:?}");
            assert!(engine.storage().is_none());
        }
    }
}

#[test]
fn a_real_model_runs_in_the_smallest_budget_that_it_names() {
    let Some(file) = smollm2() else { return };
    let make = |path: &Path| builder(path, 2, Prediction::Auto);
    let dir = neuropil_tests::temp::TempDir::new();
    let store = dir.path().join("store.gguf");
    neuropil::store::convert(&file, &store, &Default::default(), &mut |_, _| true).unwrap();
    let want = run(&make(&store).build().unwrap(), 20, KvType::F16).unwrap();
    let least = smallest(make(&store), 1 << 20);
    assert!(least < smallest(make(&file), 1 << 20));
    assert_eq!(run(&make(&store).memory(least).build().unwrap(), 20, KvType::F16).unwrap(), want);
}

#[test]
fn what_stays_in_memory_follows_the_batch() {
    let dir = TempDir::new();
    let store = dir.path().join("toy.gguf");
    let options = SynthOptions::new(Shape::named("toy").unwrap(), Preset::named("paper").unwrap());
    Synth::new(options).unwrap().write_store(&store, &CancelToken::default(), &mut |_, _| {}).unwrap();
    let make = || builder(&store, 1, Prediction::Gate);
    let (engine, all) = (make().neuron_slots(1000).build().unwrap(), make().build().unwrap());
    let sessions = |engine: &Engine| -> Vec<_> {
        (0..9).map(|_| engine.session(SessionOptions::default()).unwrap()).collect()
    };
    let (mut some, mut twins) = (sessions(&engine), sessions(&all));
    let mut hot = Vec::new();
    for (step, batch) in [1, 8, 2, 1, 5, 9].into_iter().enumerate() {
        let inputs: Vec<_> = (0..batch).map(|index| (index, 300 + 7 * (index + step) as u32)).collect();
        engine.decode(&mut some, &inputs).unwrap();
        all.decode(&mut twins, &inputs).unwrap();
        assert!((0..batch).all(|index| bits(&some[index]) == bits(&twins[index])), "batch {batch}");
        hot.push(engine.memory().hot);
    }
    // More neurons fire often where more tokens share a step; sizes between two that were counted are the lower one's.
    assert!(0 < hot[0] && hot[0] < hot[2] && hot[2] <= hot[4] && hot[4] <= hot[1], "{hot:?}");
    assert_eq!((hot[0], hot[1]), (hot[3], hot[5]));
}
