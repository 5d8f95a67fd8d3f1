//! The order of neurons: by firing counts, with everything that has an entry per neuron moved along.

use neuropil::gguf::{NewTensor, Pairs};
use neuropil::store::{self, Additions, ConvertOptions};
use neuropil_device::DType;
use neuropil_tests::gguf_writer::{GgufFile, Value};
use neuropil_tests::temp::TempDir;

use crate::bits::neuron;
use crate::reading::{Reading, bits};
use crate::{convert, toy};

const NEURONS: usize = 512;

/// Counts that are all different but for some ties.
fn counts(layer: usize) -> Vec<f32> {
    (0..NEURONS).map(|i| ((i * 197 + layer * 31) % 509) as f32 / 509.0).collect()
}

/// Original indices, those with the highest counts first, ties as they came.
fn sorted(counts: &[f32]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..counts.len()).collect();
    order.sort_by(|a, b| counts[*b].partial_cmp(&counts[*a]).unwrap());
    order
}

fn bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}

/// The counts of batches of 1, 2, 4, 8 tokens: only the first decide.
fn four(first: &[f32]) -> Vec<f32> {
    let others = |add: f32| first.iter().map(move |count| 1.0 - count + add);
    first.iter().copied().chain(others(0.0)).chain(others(1.0)).chain(others(2.0)).collect()
}

#[test]
fn neurons_that_fire_most_come_first() {
    let dir = TempDir::new();
    let model = toy(DType::Q4_0, DType::Q8_0).model();
    let predictor: Vec<f32> = (0..NEURONS * 4).map(|i| i as f32).collect();
    let file = model
        .file()
        .pair("neuropil.ffn_hot_count", Value::U32(3))
        .f32_tensor("blk.0.fc1.weight", &[256, 4], &[0.5; 1024])
        .f32_tensor("blk.0.fc2.weight", &[4, NEURONS as u64], &predictor);
    let source = dir.file("m.gguf", &file.bytes());
    let calibration = (0..2).fold(GgufFile::default(), |file, layer| {
        let name = format!("blk.{layer}.ffn_count");
        file.f32_tensor(&name, &[NEURONS as u64, 4], &four(&counts(layer)))
    });
    let calibration = dir.file("counts.gguf", &calibration.bytes());
    let options = ConvertOptions { counts: Some(calibration), ..ConvertOptions::default() };
    let (out, report) = convert(&dir, &source, &options).unwrap();
    assert!(report.sorted);
    let reading = Reading::open(&out);
    for layer in 0..2 {
        let mut order: Vec<usize> = sorted(&counts(layer)).into_iter().filter(|i| *i >= 3).collect();
        order.splice(0..0, [0, 1, 2]);
        let perm = reading.perm(layer);
        let found = reading.neurons(layer, None);
        let (mut power, mut error) = (0.0, 0.0);
        for (position, original) in order.iter().enumerate() {
            assert_eq!(perm[*original], position);
            let want = neuron(&model.layers[layer], *original);
            assert_eq!(bits(&found[position].gate), bits(&want.gate));
            assert_eq!(bits(&found[position].up), bits(&want.up));
            for (want, got) in want.down.iter().zip(&found[position].down) {
                power += want * want;
                error += (want - got) * (want - got);
            }
        }
        assert!(error < 1e-4 * power, "{error} of {power}");
        if layer == 0 {
            let fc2 = reading.gguf.data(reading.gguf.tensor("blk.0.fc2.weight").unwrap());
            let want: Vec<f32> = order.iter().flat_map(|i| predictor[4 * i..4 * i + 4].to_vec()).collect();
            assert_eq!(fc2, bytes(&want));
        }
    }
    // The counts of a store are in its own order.
    let again = dir.path().join("again.gguf");
    let options = ConvertOptions { counts: None, ..options };
    store::convert(&out, &again, &options, &mut |_, _| true).unwrap();
    assert!(std::fs::read(&out).unwrap() == std::fs::read(&again).unwrap());
}

#[test]
fn what_is_added_moves_with_its_neurons() {
    let dir = TempDir::new();
    let source = dir.file("m.gguf", &toy(DType::Q8_0, DType::F32).model().file().bytes());
    let (plain, _) = convert(&dir, &source, &ConvertOptions::default()).unwrap();
    let added = |layer: usize, counts: &[f32], center: &[f32]| {
        let n = NEURONS as u64;
        [
            (NewTensor::new(format!("blk.{layer}.ffn_count"), 0, [n, 4]), bytes(&four(counts))),
            (NewTensor::new(format!("blk.{layer}.ffn_center"), 0, [n]), bytes(center)),
        ]
    };
    let center: Vec<f32> = (0..NEURONS).map(|i| i as f32).collect();
    let mut pairs = Pairs::new();
    pairs.set("neuropil.ffn_threshold", vec![0.5f32, 0.25]);
    let tensors = (0..2).flat_map(|layer| added(layer, &counts(layer), &center)).collect();
    let additions = Additions { pairs, tensors, removed: vec!["output.weight".into()] };
    let options = ConvertOptions { additions, ..ConvertOptions::default() };
    let hot = dir.path().join("hot.gguf");
    store::convert(&plain, &hot, &options, &mut |_, _| true).unwrap();
    let reading = Reading::open(&hot);
    assert_eq!(reading.gguf.metadata().f32s("neuropil.ffn_threshold").unwrap(), Some(&[0.5, 0.25][..]));
    assert!(reading.gguf.tensor("output.weight").is_none());
    let floats = |name: &str| -> Vec<f32> {
        let data = reading.gguf.data(reading.gguf.tensor(name).unwrap());
        data.as_chunks::<4>().0.iter().map(|v| f32::from_le_bytes(*v)).collect()
    };
    let order = sorted(&counts(1));
    let as_floats: Vec<f32> = order.iter().map(|i| *i as f32).collect();
    assert_eq!(floats("blk.1.ffn_center"), as_floats);
    let stored = floats("blk.1.ffn_count");
    assert!(stored[..NEURONS].is_sorted_by(|a, b| a >= b));
    assert!(stored[NEURONS..2 * NEURONS].is_sorted());

    // From that store back to another order: what counts is the original index.
    let calibration = dir.file(
        "flat.gguf",
        &(0..2)
            .fold(GgufFile::default(), |file, layer| {
                let name = format!("blk.{layer}.ffn_count");
                file.f32_tensor(&name, &[NEURONS as u64, 4], &[1.0; 4 * NEURONS])
            })
            .bytes(),
    );
    let options = ConvertOptions { counts: Some(calibration), ..ConvertOptions::default() };
    let back = dir.path().join("back.gguf");
    store::convert(&hot, &back, &options, &mut |_, _| true).unwrap();
    let (back, first) = (Reading::open(&back), Reading::open(&plain));
    assert_eq!(back.perm(1), (0..NEURONS).collect::<Vec<_>>());
    assert_eq!(back.neurons(1, None), first.neurons(1, None));
    let data = back.gguf.data(back.gguf.tensor("blk.1.ffn_center").unwrap());
    assert_eq!(data, bytes(&center));
}

#[test]
fn what_was_calibrated_for_other_weights_is_left_out() {
    let dir = TempDir::new();
    let source = dir.file("m.gguf", &toy(DType::Q8_0, DType::F32).model().file().bytes());
    let (plain, _) = convert(&dir, &source, &ConvertOptions::default()).unwrap();
    let vector = |name: &str, len: usize| (NewTensor::new(name, 0, [len as u64]), bytes(&vec![0.5; len]));
    let matrix = |name: &str, dims: [u64; 2]| {
        (NewTensor::new(name, 0, dims), bytes(&vec![0.5; (dims[0] * dims[1]) as usize]))
    };
    let measured = ["neuropil.ffn_threshold", "neuropil.gate4_active", "neuropil.ffn_overlap"];
    let stale = ["blk.0.ffn_center", "blk.0.ffn_fold.weight"];
    let fitted = ["blk.0.fc1.weight", "blk.0.fc2.weight"];
    for (input, keeps_predictors) in [("normed", false), ("residual", true)] {
        let mut pairs = Pairs::new();
        measured.iter().for_each(|key| pairs.set(key, vec![0.5f32, 0.25]));
        pairs.set("neuropil.predictor.input", input);
        let tensors = vec![
            vector(stale[0], NEURONS),
            matrix(stale[1], [256, 256]),
            matrix(fitted[0], [256, 4]),
            matrix(fitted[1], [4, NEURONS as u64]),
        ];
        let additions = Additions { pairs, tensors, ..Additions::default() };
        let options = ConvertOptions { additions, ..ConvertOptions::default() };
        let (calibrated, again) = (dir.path().join("c.gguf"), dir.path().join("again.gguf"));
        store::convert(&plain, &calibrated, &options, &mut |_, _| true).unwrap();
        for (down_type, changed) in [(None, false), (Some(DType::Q8_0), true)] {
            let options = ConvertOptions { down_type, ..ConvertOptions::default() };
            let report = store::convert(&calibrated, &again, &options, &mut |_, _| true).unwrap();
            assert_eq!(report.notes.iter().any(|note| note.contains("calibrate again")), changed);
            let gguf = Reading::open(&again).gguf;
            measured.iter().for_each(|key| assert_eq!(gguf.metadata().get(key).is_none(), changed, "{key}"));
            stale.iter().for_each(|name| assert_eq!(gguf.tensor(name).is_none(), changed, "{name}"));
            let kept = !changed || keeps_predictors;
            fitted.iter().for_each(|name| assert_eq!(gguf.tensor(name).is_some(), kept, "{name}"));
            assert_eq!(gguf.metadata().get("neuropil.predictor.input").is_some(), kept);
        }
    }
}

#[test]
fn counts_that_do_not_fit_are_an_error() {
    let dir = TempDir::new();
    let source = dir.file("m.gguf", &toy(DType::Q8_0, DType::F32).model().file().bytes());
    for file in [
        GgufFile::default(),
        GgufFile::default().f32_tensor("blk.0.ffn_count", &[511, 4], &[0.0; 2044]),
        GgufFile::default().tensor("blk.0.ffn_count", &[512, 4], 26, vec![0; 8192]),
        GgufFile::default().f32_tensor("blk.0.ffn_count", &[512], &[f32::NAN; 512]),
    ] {
        let counts = dir.file("counts.gguf", &file.bytes());
        let options = ConvertOptions { counts: Some(counts), ..ConvertOptions::default() };
        let error = convert(&dir, &source, &options).unwrap_err().to_string();
        assert!(error.contains("ffn_count"), "{error}");
    }
}
