//! Centred thresholds: with nothing left out they are the dense model, and calibration keeps what it promises.

use std::path::Path;

use neuropil::calibrate::{CalibrateError, CalibrateOptions, CalibrateReport, Target, calibrate};
use neuropil::predict::Prediction;
use neuropil::store::ConvertOptions;
use neuropil_device::DType;
use neuropil_tests::toy::Toy;

use super::{Stored, bits, builder, difference, engine, prompt_logits, stored, tokens};

fn run(stored: &Stored, out: &Path, text: &str, target: Target) -> Result<CalibrateReport, CalibrateError> {
    let options = CalibrateOptions { target, ..CalibrateOptions::default() };
    let open = |path: &Path, prediction| builder(path, 2).prediction(prediction).build();
    calibrate(&stored.store, out, text.as_bytes(), &options, &open, &mut |_, _, _| true)
}

fn text() -> String {
    (0..300).map(|i| format!("Sentence {i} of {} is here. ", i * 7919 % 1000)).collect()
}

#[test]
fn nothing_left_out_is_the_dense_model() {
    for activation in ["silu", "gelu"] {
        let toy = Toy { activation: Some(activation), dtypes: vec![("ffn", DType::F32)], ..Toy::default() };
        let stored = stored(&toy, &ConvertOptions::default());
        let out = stored.dir.path().join("calibrated.gguf");
        let report = run(&stored, &out, &text(), Target::Sparsity(0.5)).unwrap();
        let share = report.active.iter().sum::<f64>() / 2.0;
        assert!((0.35..0.65).contains(&share), "{activation}: {share}");
        let sparse = engine(&out, Prediction::Auto);
        assert_eq!(sparse.prediction(), Prediction::Threshold);
        (0..2).for_each(|layer| sparse.thresholds().set(layer, -1.0));
        let dense = prompt_logits(&engine(&out, Prediction::Off), &tokens(), true);
        let all = prompt_logits(&sparse, &tokens(), true);
        assert!(difference(&dense, &all) < 0.01, "{activation}: {}", difference(&dense, &all));
        // A prompt is computed exactly.
        assert_eq!(bits(&dense), bits(&prompt_logits(&sparse, &tokens(), false)), "{activation}");
    }
}
