//! Weights keep their bits where they can, and what is requantised is reported as it is.

use neuropil::store::{ConvertError, ConvertOptions};
use neuropil_device::DType;
use neuropil_tests::temp::TempDir;
use neuropil_tests::toy::{Layer, ToyModel, Weight};

use crate::reading::{Neuron, Reading, bits};
use crate::{convert, names, toy};

/// Row `i` of a matrix.
fn row(weight: &Weight, i: usize) -> &[f32] {
    &weight.values[i * weight.cols..][..weight.cols]
}

/// Column `i` of a matrix.
fn column(weight: &Weight, i: usize) -> Vec<f32> {
    (0..weight.rows).map(|r| weight.values[r * weight.cols + i]).collect()
}

/// The neuron of a layer, from its three matrices.
pub fn neuron(layer: &Layer, i: usize) -> Neuron {
    let rows = [&layer.ffn_gate, &layer.ffn_up].map(|w| row(w, i).to_vec());
    let [gate, up] = rows;
    Neuron { gate, up, down: column(&layer.ffn_down, i) }
}

/// The root mean square of the differences of all down rows of a layer, as a share of that of the weights.
fn down_loss(reading: &Reading, model: &ToyModel, layer: usize) -> f64 {
    let (mut power, mut error) = (0.0, 0.0);
    for (i, found) in reading.neurons(layer, None).iter().enumerate() {
        for (want, got) in column(&model.layers[layer].ffn_down, i).iter().zip(&found.down) {
            power += f64::from(*want).powi(2);
            error += f64::from(want - got).powi(2);
        }
    }
    (error / power).sqrt()
}

#[test]
fn gate_and_up_keep_their_bits_in_every_type_that_neurons_are_cut_from() {
    for dtype in DType::ALL.into_iter().filter(|dtype| !dtype.is_expanded()) {
        let dir = TempDir::new();
        let model = toy(dtype, DType::F32).model();
        let source = dir.file("m.gguf", &model.file().bytes());
        let (out, report) = convert(&dir, &source, &ConvertOptions::default()).unwrap();
        let reading = Reading::open(&out);
        assert_eq!(reading.layers(), 2);
        for (index, layer) in model.layers.iter().enumerate() {
            assert_eq!(reading.types(index), (dtype, DType::F32));
            for (i, found) in reading.neurons(index, None).iter().enumerate() {
                let want = neuron(layer, i);
                assert_eq!(bits(&found.gate), bits(&want.gate), "{dtype} neuron {i}");
                assert_eq!(bits(&found.up), bits(&want.up), "{dtype} neuron {i}");
                assert_eq!(bits(&found.down), bits(&want.down), "{dtype} neuron {i}");
            }
            assert_eq!((report.layers[index].gate_up_loss, report.layers[index].down_loss), (0.0, 0.0));
        }
        assert!(report.notes.is_empty());
        for weight in [&model.token_embd, &model.layers[1].attn_q, &model.output_norm] {
            let tensor = reading.gguf.tensor(&weight.name).unwrap();
            assert_eq!(reading.gguf.data(tensor), weight.bytes, "{}", weight.name);
        }
        assert_eq!(names(&dir), ["m.gguf", "store.gguf"]);
    }
}

#[test]
fn down_becomes_rows_with_the_loss_that_is_reported() {
    for dtype in DType::ALL {
        let dir = TempDir::new();
        let model = toy(DType::Q4_0, dtype).model();
        let source = dir.file("m.gguf", &model.file().bytes());
        let (out, report) = convert(&dir, &source, &ConvertOptions::default()).unwrap();
        let reading = Reading::open(&out);
        let float = dtype.block_elements() == 1;
        assert_eq!(reading.types(0).1, if float { dtype } else { DType::Q8_0 });
        for layer in 0..2 {
            let (loss, said) = (down_loss(&reading, &model, layer), report.layers[layer].down_loss);
            assert!((loss - said).abs() <= 1e-4 * loss, "{dtype}: {loss}, {said} reported");
            assert!(if float { loss == 0.0 } else { loss > 0.0 && loss < 0.01 }, "{dtype}: {loss}");
        }
    }
}

#[test]
fn types_that_neurons_are_not_cut_from_are_requantised_and_noted() {
    for dtype in DType::ALL.into_iter().filter(|dtype| dtype.is_expanded()) {
        let dir = TempDir::new();
        let source = dir.file("m.gguf", &toy(dtype, DType::F16).model().file().bytes());
        let (out, report) = convert(&dir, &source, &ConvertOptions::default()).unwrap();
        assert_eq!(Reading::open(&out).types(0), (DType::Q8_0, DType::F16));
        assert!(report.notes[0].contains("2 of 2 layers") && report.notes[0].contains("q8_0"));
        let loss = report.layers[0].gate_up_loss;
        // Codes of IQ4_NL are codes of 8 bits where the widest one is used.
        assert!(loss < 0.01 && (loss > 0.0 || dtype == DType::IQ4_NL), "{dtype}: {loss}");
    }
}

#[test]
fn types_that_are_asked_for_are_taken() {
    let dir = TempDir::new();
    let model = toy(DType::F32, DType::F32).model();
    let source = dir.file("m.gguf", &model.file().bytes());
    let with = |ffn_type, down_type| {
        let options = ConvertOptions { ffn_type, down_type, ..ConvertOptions::default() };
        convert(&dir, &source, &options)
    };
    for (ffn, down, want) in [
        (Some(DType::Q4_0), None, (DType::Q4_0, DType::Q4_0)),
        (Some(DType::Q4_K), None, (DType::Q4_K, DType::Q8_0)),
        (Some(DType::Q6_K), Some(DType::Q4_1), (DType::Q6_K, DType::Q4_1)),
        (None, Some(DType::Q8_0), (DType::F32, DType::Q8_0)),
        (Some(DType::BF16), None, (DType::BF16, DType::BF16)),
    ] {
        let (out, report) = with(ffn, down).unwrap();
        let reading = Reading::open(&out);
        assert_eq!(reading.types(1), want);
        let (loss, said) = (down_loss(&reading, &model, 1), report.layers[1].down_loss);
        assert!((loss - said).abs() <= 1e-4 * loss, "{want:?}: {loss}, {said} reported");
    }
    let error = with(Some(DType::Q2_K), None).unwrap_err();
    assert!(matches!(error, ConvertError::Type { .. }));
    assert!(error.to_string().contains("q4_k") && !error.to_string().contains("iq4"), "{error}");
    let error = with(None, Some(DType::Q4_K)).unwrap_err().to_string();
    assert!(error.contains("f32 f16 bf16 q4_0 q4_1 q8_0"), "{error}");
}

#[test]
fn a_type_that_does_not_fit_the_width_is_refused_with_those_that_do() {
    let dir = TempDir::new();
    let toy = neuropil_tests::toy::Toy { width: 96, heads: 2, ffn: 64, ..Default::default() };
    let source = dir.file("m.gguf", &toy.model().file().bytes());
    let options = ConvertOptions { ffn_type: Some(DType::Q4_K), ..ConvertOptions::default() };
    let error = convert(&dir, &source, &options).unwrap_err().to_string();
    assert!(error.contains("q4_0") && error.contains("q8_0") && !error.contains("q6_k"), "{error}");
    assert_eq!(names(&dir), ["m.gguf"]);
    let (out, _) = convert(&dir, &source, &ConvertOptions::default()).unwrap();
    Reading::open(&out);
}

#[test]
fn read_units_are_those_asked_for_or_the_largest_that_pads_little() {
    let dir = TempDir::new();
    let source = dir.file("m.gguf", &toy(DType::F32, DType::F32).model().file().bytes());
    for (asked, want) in [(None, 512), (Some(64), 64), (Some(512), 512), (Some(4096), 4096)] {
        let options = ConvertOptions { read_unit: asked, ..ConvertOptions::default() };
        let (out, report) = convert(&dir, &source, &options).unwrap();
        assert_eq!((Reading::open(&out).read_unit, report.read_unit), (want, want));
        let rows = 3 * 256 * 4 * 512 * 2;
        assert_eq!(report.padding_bytes, report.bundle_bytes - rows);
    }
    let options = ConvertOptions { read_unit: Some(100), ..ConvertOptions::default() };
    assert!(convert(&dir, &source, &options).is_err());
}

#[test]
fn the_same_model_gives_the_same_bytes() {
    let dir = TempDir::new();
    let source = dir.file("m.gguf", &toy(DType::Q4_K, DType::Q6_K).model().file().bytes());
    let once = || {
        let (out, report) = convert(&dir, &source, &ConvertOptions::default()).unwrap();
        (std::fs::read(out).unwrap(), report.sha256)
    };
    let first = once();
    assert!(first == once());
    assert_eq!(first.1.len(), 64);
    // A store of a store is that store.
    let store = dir.path().join("store.gguf");
    let again = dir.path().join("again.gguf");
    neuropil::store::convert(&store, &again, &ConvertOptions::default(), &mut |_, _| true).unwrap();
    assert!(std::fs::read(again).unwrap() == first.0);
}

#[test]
fn a_conversion_that_is_stopped_leaves_nothing() {
    let dir = TempDir::new();
    let source = dir.file("m.gguf", &toy(DType::Q4_0, DType::Q4_0).model().file().bytes());
    let out = dir.path().join("out.gguf");
    let mut calls = 0;
    for stop in 1..20 {
        calls = 0;
        let mut go_on = |_, _| {
            calls += 1;
            calls < stop
        };
        let result = neuropil::store::convert(&source, &out, &ConvertOptions::default(), &mut go_on);
        assert!(matches!(result, Err(ConvertError::Cancelled)));
        assert_eq!(names(&dir), ["m.gguf"]);
    }
    assert_eq!(calls, 19);
}

#[test]
fn weights_that_a_type_cannot_hold_are_an_error() {
    let dir = TempDir::new();
    for bad in [f32::NAN, f32::INFINITY, 3e38] {
        let mut model = toy(DType::F32, DType::F32).model();
        let down = &mut model.layers[1].ffn_down;
        down.values[777] = bad;
        down.bytes[4 * 777..][..4].copy_from_slice(&bad.to_le_bytes());
        let source = dir.file("m.gguf", &model.file().bytes());
        let options = ConvertOptions { down_type: Some(DType::Q8_0), ..ConvertOptions::default() };
        let error = convert(&dir, &source, &options).unwrap_err();
        assert!(matches!(error, ConvertError::NotFinite { layer: 1, .. }), "{bad}: {error}");
        assert_eq!(names(&dir), ["m.gguf"]);
        convert(&dir, &source, &ConvertOptions::default()).unwrap();
        std::fs::remove_file(dir.path().join("store.gguf")).unwrap();
    }
}
