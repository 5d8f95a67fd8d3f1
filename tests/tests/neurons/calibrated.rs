//! Calibration: what it counts, what it leaves out, and what it keeps to.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::{Arc, Mutex};

use neuropil::SessionOptions;
use neuropil::calibrate::{CalibrateError, CalibrateOptions, CalibrateReport, Rank, Target, calibrate};
use neuropil::gguf::Gguf;
use neuropil::model::tokenizer::EncodeOptions;
use neuropil::predict::{GateObserver, GateSeen, Prediction};
use neuropil::store::ConvertOptions;
use neuropil_device::DType;
use neuropil_tests::toy::{BOS, Toy, ToyExperts};

use super::{
    Stored, bits, builder, decode_logits, difference, engine, prompt_logits, session, stored, tokens,
};

fn run(model: &Path, out: &Path, options: &CalibrateOptions) -> Result<CalibrateReport, CalibrateError> {
    with_threads(model, out, options, 2)
}

fn with_threads(
    model: &Path,
    out: &Path,
    options: &CalibrateOptions,
    threads: usize,
) -> Result<CalibrateReport, CalibrateError> {
    let open = |path: &Path, prediction| builder(path, threads).prediction(prediction).build();
    calibrate(model, out, text().as_bytes(), options, &open, &mut |_, _, _| true)
}

fn text() -> String {
    (0..300).map(|i| format!("Sentence {i} of {} is here. ", i * 7919 % 1000)).collect()
}

fn sparsity(share: f64) -> CalibrateOptions {
    CalibrateOptions { target: Target::Sparsity(share), ..CalibrateOptions::default() }
}

fn of_rank(rank: usize) -> CalibrateOptions {
    CalibrateOptions { rank: Some(Rank::Of(rank)), ..CalibrateOptions::default() }
}

fn silu() -> Toy {
    Toy { activation: Some("silu"), dtypes: vec![("ffn", DType::F32)], ..Toy::default() }
}

fn relu() -> Toy {
    Toy { activation: Some("relu"), dtypes: vec![("ffn", DType::Q8_0)], ..Toy::default() }
}

fn experts(count: usize, used: usize, toy: Toy) -> Toy {
    let experts = Some(ToyExperts { count, used, neurons: None, gating: None });
    Toy { experts, ffn: 128, ..toy }
}

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len() as f64
}

/// Calibrates a toy's store, beside which the result lies.
fn calibrated(toy: &Toy, options: &CalibrateOptions) -> (Stored, std::path::PathBuf, CalibrateReport) {
    let stored = stored(toy, &ConvertOptions::default());
    let out = stored.dir.path().join("calibrated.gguf");
    let report = run(&stored.store, &out, options).unwrap();
    (stored, out, report)
}

#[test]
fn nothing_left_out_is_the_dense_model() {
    let gelu = Toy { activation: Some("gelu"), ..silu() };
    let toys = [("silu", silu()), ("gelu", gelu), ("experts", experts(4, 2, silu()))];
    for (name, toy) in toys {
        let (_stored, out, report) = calibrated(&toy, &sparsity(0.5));
        let share = mean(&report.active);
        assert!((0.35..0.65).contains(&share), "{name}: {share}");
        let sparse = engine(&out, Prediction::Auto);
        assert_eq!(sparse.prediction(), Prediction::Threshold);
        (0..2).for_each(|layer| sparse.thresholds().set(layer, -1.0));
        let dense = prompt_logits(&engine(&out, Prediction::Off), &tokens(), true);
        let all = prompt_logits(&sparse, &tokens(), true);
        assert!(difference(&dense, &all) < 0.01, "{name}: {}", difference(&dense, &all));
        // A prompt is computed exactly.
        assert_eq!(bits(&dense), bits(&prompt_logits(&sparse, &tokens(), false)), "{name}");
    }
}

#[test]
fn an_expert_that_sees_no_token_is_named() {
    // The text has fewer kinds of tokens than this has experts.
    let stored = stored(&experts(64, 1, silu()), &ConvertOptions::default());
    let out = stored.dir.path().join("calibrated.gguf");
    let error = run(&stored.store, &out, &sparsity(0.5)).unwrap_err();
    assert!(matches!(error, CalibrateError::Unseen { .. }), "{error}");
    assert!(!out.exists());
}

#[test]
fn the_loss_is_kept_to() {
    for (name, toy) in [("silu", silu()), ("experts", experts(4, 2, silu()))] {
        let options = CalibrateOptions { target: Target::Loss(0.02), ..CalibrateOptions::default() };
        let (_stored, _out, report) = calibrated(&toy, &options);
        let rise = report.after / report.before - 1.0;
        assert!(rise < 0.025, "{name}: {rise}");
        assert!(mean(&report.active) < 0.97, "{name}: {:?}", report.active);
    }
}

/// How often each neuron of each layer fires, and for how many tokens that was looked at.
#[derive(Default)]
struct Direct(Vec<(Vec<u32>, u32)>);

impl GateObserver for Direct {
    fn gate(&mut self, seen: &GateSeen<'_>) {
        if self.0.len() <= seen.layer {
            self.0.resize_with(seen.layer + 1, || (vec![0; seen.neurons], 0));
        }
        let (fired, looked) = &mut self.0[seen.layer];
        for (gate, _) in
            seen.gate.chunks_exact(seen.neurons).zip(seen.counted).filter(|(_, counted)| **counted)
        {
            *looked += 1;
            fired.iter_mut().zip(gate).for_each(|(fired, gate)| *fired += u32::from(*gate > 0.0));
        }
    }
}

fn words(gguf: &Gguf, name: &str) -> Vec<[u8; 4]> {
    let tensor = gguf.require(name).unwrap();
    let mut bytes = vec![0; tensor.bytes as usize];
    gguf.read_into(tensor, &mut bytes).unwrap();
    bytes.as_chunks::<4>().0.to_vec()
}

#[test]
fn counts_are_what_fires_and_neurons_lie_by_them() {
    let (stored, out, report) = calibrated(&relu(), &CalibrateOptions::default());
    let direct = Arc::new(Mutex::new(Direct::default()));
    let gate = engine(&stored.store, Prediction::Gate);
    let mut session =
        gate.session(SessionOptions { sparse_prompt: true, ..SessionOptions::default() }).unwrap();
    session.observe(Some(direct.clone()));
    // As many chunks as are used of a text of more, spread over it; the third and the last of five teach nothing.
    let options = EncodeOptions { add_special: false, parse_special: false };
    let all = gate.tokenizer().unwrap().encode(text().as_bytes(), options).unwrap();
    let there = all.len() / 128;
    for index in (0..50).filter(|index| ![2, 4].contains(&(index % 5))) {
        let mut chunk = all[index * there / 50 * 128..][..128].to_vec();
        chunk[0] = BOS;
        session.truncate(0);
        session.prefill(&chunk).unwrap();
    }
    drop(session);
    let gguf = Gguf::open(&out).unwrap();
    for (layer, (fired, looked)) in direct.lock().unwrap().0.iter().enumerate() {
        assert_eq!(*looked as usize, report.tokens[0] - 30);
        let counts: Vec<f32> =
            words(&gguf, &format!("blk.{layer}.ffn_count")).into_iter().map(f32::from_le_bytes).collect();
        assert!(counts[..fired.len()].is_sorted_by(|a, b| a >= b), "layer {layer}: hot first");
        let positions = words(&gguf, &format!("blk.{layer}.ffn_perm"));
        for (neuron, position) in positions.into_iter().map(u32::from_le_bytes).enumerate() {
            let want = (f64::from(fired[neuron]) / f64::from(*looked)) as f32;
            assert_eq!(counts[position as usize], want, "layer {layer}, neuron {neuron}");
        }
        // More tokens fire more.
        let sums: Vec<f32> = counts.chunks_exact(fired.len()).map(|row| row.iter().sum()).collect();
        assert!(sums.len() == 4 && sums.is_sorted_by(|a, b| a < b), "{sums:?}");
    }
}

#[test]
fn the_gate_in_4_bits_finds_what_fires() {
    for toy in [relu(), experts(4, 2, relu())] {
        let (_stored, out, report) = calibrated(&toy, &CalibrateOptions::default());
        let quality = report.predictors[0].quality[2];
        assert!(quality.recall >= 0.97 && quality.precision > 0.8, "{quality:?}");
        assert!(quality.evaluated <= 1.15 * mean(&report.active), "{quality:?} {:?}", report.active);
        // On another text too.
        let [exact, found] = [Prediction::Gate, Prediction::Gate4].map(|prediction| {
            let engine = engine(&out, prediction);
            let mut session = session(&engine, false);
            session.prefill(&tokens()[..2]).unwrap();
            tokens()[2..].iter().for_each(|token| session.decode(*token).unwrap());
            session.activity().share()
        });
        assert!(found <= 1.15 * exact && found >= exact, "{found} {exact}");
    }
}

#[test]
fn a_higher_rank_leaves_less_to_compute() {
    let ranks = [32, 64, 128].map(|rank| {
        let (_stored, out, report) = calibrated(&relu(), &of_rank(rank));
        engine(&out, Prediction::Model);
        let quality = report.predictors[1].quality.clone();
        assert!(
            quality.is_sorted_by(|a, b| a.evaluated <= b.evaluated && a.recall <= b.recall),
            "{quality:?}"
        );
        quality[1].evaluated
    });
    assert!(ranks.is_sorted_by(|a, b| a > b), "{ranks:?}");
}

#[test]
fn the_gate_decides_where_predictors_cost_too_much() {
    // Few neurons fire, so that a prediction reads much less than the gate.
    let toy = Toy { threshold: Some(1.0), dtypes: vec![("ffn", DType::F32)], ..relu() };
    let (stored, out, report) = calibrated(&toy, &CalibrateOptions::default());
    assert_eq!(report.prediction, engine(&out, Prediction::Auto).prediction());
    assert_ne!(report.prediction, Prediction::Gate, "{:?}", report.active);
    assert!(report.after <= 1.0101 * report.before);
    // No rise at all is little enough here.
    let strict = CalibrateOptions { target: Target::Loss(-0.5), ..CalibrateOptions::default() };
    let report = run(&stored.store, &out, &strict).unwrap();
    assert_eq!((report.prediction, report.after), (Prediction::Gate, report.before));
    let choice = |path: &Path| {
        let gguf = Gguf::open_header(path).unwrap();
        gguf.metadata().str("neuropil.predict").unwrap().map(str::to_owned)
    };
    assert_eq!(choice(&out).as_deref(), Some("gate"));
    // What is said is said anew by the next calibration.
    run(&out, &out, &CalibrateOptions::default()).unwrap();
    assert_ne!(choice(&out).as_deref(), Some("gate"));
}

#[test]
fn a_seed_gives_the_same_bytes() {
    for (toy, options) in [(silu(), sparsity(0.5)), (relu(), of_rank(32))] {
        let stored = stored(&toy, &ConvertOptions::default());
        let bytes = |name: &str, seed: u64, threads: usize| {
            let out = stored.dir.path().join(name);
            with_threads(&stored.store, &out, &CalibrateOptions { seed, ..options }, threads).unwrap();
            std::fs::read(out).unwrap()
        };
        let first = bytes("a", 7, 1);
        assert!(first == bytes("b", 7, 3));
        assert_eq!(first == bytes("c", 8, 1), options.rank.is_none());
    }
}

fn files(folder: &Path) -> BTreeSet<String> {
    let names = std::fs::read_dir(folder).unwrap();
    names.map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned()).collect()
}

#[test]
fn stopped_at_any_point_it_leaves_nothing() {
    for toy in [silu(), Toy { threshold: Some(1.0), dtypes: vec![("ffn", DType::F32)], ..relu() }] {
        let (dir, file) = toy.temp();
        // Names that a calibration might want belong to the user.
        let mine = [".out.calibrating-1", "out.calibrating", "out.converted"];
        mine.iter().for_each(|name| drop(dir.file(name, b"mine")));
        let before = files(dir.path());
        let out = dir.path().join("out");
        let text = text();
        let mut calls = 0;
        let mut until = |stop: u64| {
            calls = 0;
            let open = |path: &Path, prediction| builder(path, 2).prediction(prediction).build();
            let options = CalibrateOptions { chunks: 10, ..CalibrateOptions::default() };
            let ended = calibrate(&file, &out, text.as_bytes(), &options, &open, &mut |_, _, _| {
                calls += 1;
                calls < stop
            });
            (ended.is_ok(), calls)
        };
        let (done, calls) = until(u64::MAX);
        assert!(done);
        std::fs::remove_file(&out).unwrap();
        for stop in (1..calls).step_by((calls as usize / 12).max(1)) {
            assert!(!until(stop).0, "{stop} of {calls}");
            assert_eq!(files(dir.path()), before, "{stop} of {calls}");
        }
    }
}

#[test]
fn what_cannot_be_is_refused() {
    let refused = |toy: &Toy, options: &CalibrateOptions| {
        let stored = stored(toy, &ConvertOptions::default());
        run(&stored.store, &stored.dir.path().join("out"), options).unwrap_err()
    };
    for rank in [0, 257, usize::MAX] {
        assert!(matches!(refused(&relu(), &of_rank(rank)), CalibrateError::Rank { most: 256, .. }), "{rank}");
    }
    assert!(matches!(refused(&silu(), &of_rank(32)), CalibrateError::NothingToPredict));
    let short = Toy { context: 48, ..silu() };
    assert!(matches!(refused(&short, &sparsity(0.5)), CalibrateError::ShortContext { context: 48, .. }));
}

#[test]
fn neighbours_change_no_bit_of_what_strays() {
    for toy in [silu(), experts(4, 2, silu())] {
        let (_stored, out, _) = calibrated(&toy, &sparsity(0.5));
        let want = decode_logits(&engine(&out, Prediction::Threshold), &tokens());
        let three = builder(&out, 3).prediction(Prediction::Threshold).build().unwrap();
        assert_eq!(bits(&want), bits(&decode_logits(&three, &tokens())), "threads");
        // The second joins at its first position, which is computed with all neurons, while the others are under way.
        let texts = [tokens(), tokens().into_iter().rev().collect(), tokens()[5..].to_vec()];
        let mut alone = session(&three, false);
        let second: Vec<Vec<f32>> = texts[1][..8]
            .iter()
            .map(|token| {
                alone.decode(*token).unwrap();
                alone.logits().to_vec()
            })
            .collect();
        let mut sessions: Vec<_> = texts.iter().map(|_| session(&three, false)).collect();
        for index in [0, 2] {
            sessions[index].prefill(&texts[index][..2]).unwrap();
        }
        for step in 2..10 {
            let inputs = [(0, texts[0][step]), (1, texts[1][step - 2]), (2, texts[2][step])];
            three.decode(&mut sessions, &inputs).unwrap();
            let got = |index: usize| bits(&[sessions[index].logits().to_vec()]);
            assert_eq!(got(0), bits(&want[step - 2..step - 1]), "step {step}");
            assert_eq!(got(1), bits(&second[step - 2..step - 1]), "step {step} of the second");
        }
    }
}
