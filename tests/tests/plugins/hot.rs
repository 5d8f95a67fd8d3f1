//! Neuron stores with a unit: the neurons that fire most are its, the others the processor's, in memory or not.

use std::path::{Path, PathBuf};

use neuropil::engine::EngineBuilder;
use neuropil::gguf::NewTensor;
use neuropil::predict::Prediction;
use neuropil::store::{Additions, ConvertOptions, convert};
use neuropil::{Engine, KvType, SessionOptions};
use neuropil_device::DType;
use neuropil_tests::temp::TempDir;
use neuropil_tests::toy::{Toy, tokens};

use super::{cpu, npu, run};

const NEURONS: usize = 1120;
/// Half of the neurons fire for every second token or more, and of those whole groups of 32.
const HOT: usize = 544;

/// A store whose neurons fire less and less; with predictors.
fn store() -> (TempDir, PathBuf) {
    let toy = Toy {
        activation: Some("relu"),
        width: 192,
        heads: 6,
        kv_heads: 3,
        ffn: NEURONS,
        layers: 2,
        predictor_rank: Some(16),
        dtypes: vec![("ffn", DType::Q8_0)],
        ..Toy::default()
    };
    let (dir, file) = toy.temp();
    let often = |i: usize| if i % NEURONS < 550 { 0.75 } else { 0.1 };
    let counts: Vec<u8> = (0..4 * NEURONS).flat_map(|i| f32::to_le_bytes(often(i))).collect();
    let tensor = |layer: usize| {
        let name = format!("blk.{layer}.ffn_count");
        (NewTensor::new(name, 0, vec![NEURONS as u64, 4]), counts.clone())
    };
    let additions = Additions { tensors: vec![tensor(0), tensor(1)], ..Additions::default() };
    let options = ConvertOptions { additions, ..ConvertOptions::default() };
    let store = dir.path().join("store.gguf");
    convert(&file, &store, &options, &mut |_, _| true).unwrap();
    (dir, store)
}

fn with(path: &Path, options: &str, prediction: Prediction) -> EngineBuilder<'static> {
    Engine::builder(path).device(npu(options)).backend(&cpu()).unwrap().prediction(prediction)
}

const WAYS: [Prediction; 4] = [Prediction::Off, Prediction::Gate, Prediction::Gate4, Prediction::Model];

#[test]
fn hot_neurons_on_a_unit_give_the_tokens_of_the_processor() {
    let (_dir, store) = store();
    for way in WAYS {
        let alone = Engine::builder(&store).backend(&cpu()).unwrap().prediction(way).build().unwrap();
        let want = run(&alone).unwrap();
        for slots in [None, Some(900)] {
            for check in [0, 1] {
                let mut builder = with(&store, "schemes=f32+group8", way).cross_check(check);
                if let Some(slots) = slots {
                    builder = builder.neuron_slots(slots);
                }
                let engine = builder.build().unwrap();
                let tokens = run(&engine).unwrap();
                // Where somebody only foretells what fires, a unit that computes all of its neurons is nearer to the truth.
                if matches!(way, Prediction::Off | Prediction::Gate) {
                    assert_eq!(tokens, want, "{way:?} {slots:?}");
                }
                assert_eq!(engine.events(), []);
                let placed = engine.placements();
                let hot = placed.iter().find(|placement| placement.op == "hot neurons q8_0");
                // What passes by in order has no hot part.
                let by = way == Prediction::Off && slots.is_some();
                assert_eq!(hot.map_or(0, |hot| hot.weights), if by { 0 } else { 2 }, "{way:?} {placed:?}");
                if let Some(report) = engine.storage().filter(|_| !by && check == 0) {
                    // Of two layers and six steps none reads a neuron of the unit's.
                    let most = (NEURONS - HOT) * 2 * 6;
                    assert!(report.counters.cold.taken.asked() as usize <= most, "{way:?} {report:?}");
                }
            }
        }
    }
}

#[test]
fn a_unit_that_fails_gives_its_neurons_back() {
    let (_dir, store) = store();
    for way in WAYS {
        let good = with(&store, "schemes=f32+group8", way).build().unwrap();
        let want = logits(&good);
        for kind in ["error", "lost", "panic", "hang", "nan", "tile"] {
            for call in [1, 6] {
                for slots in [None, Some(900)] {
                    if way == Prediction::Off && slots.is_some() {
                        continue;
                    }
                    let options = format!(
                        "schemes=f32+group8&fault_columns=192&hang_ms=4000&deadline_ms=250&fault={kind}@cluster:{call}"
                    );
                    let mut builder = with(&store, &options, way).cross_check(1);
                    if let Some(slots) = slots {
                        builder = builder.neuron_slots(slots);
                    }
                    let engine = builder.build().unwrap();
                    let first = difference(&logits(&engine), &want);
                    assert_eq!(engine.events().len(), 1, "{way:?} {options}");
                    let again = difference(&logits(&engine), &want);
                    // The processor's activations have 8 bits, and the unit's do not.
                    assert!(first < 0.03 && again < 0.03, "{way:?} {slots:?} {options}: {first} {again}");
                }
            }
        }
    }
}

/// The logits after a prompt and after each of some tokens.
fn logits(engine: &Engine) -> Vec<f32> {
    let tokens = tokens("the quick brown fox jumps over the lazy dog");
    let mut session =
        engine.session(SessionOptions { kv: KvType::F32, ..SessionOptions::default() }).unwrap();
    session.prefill(&tokens[..20]).unwrap();
    let mut all = session.logits().to_vec();
    for token in &tokens[20..26] {
        session.decode(*token).unwrap();
        all.extend_from_slice(session.logits());
    }
    all
}

/// The largest difference, as a share of the largest value.
fn difference(a: &[f32], b: &[f32]) -> f32 {
    let largest = a.iter().fold(0.0f32, |most, x| most.max(x.abs()));
    a.iter().zip(b).fold(0.0f32, |most, (a, b)| most.max((a - b).abs())) / largest
}
