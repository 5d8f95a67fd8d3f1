//! A store equals its dense twin bit for bit.

use neuropil::predict::Prediction;
use neuropil::store::{ConvertOptions, twin};
use neuropil_device::DType;
use neuropil_tests::toy::{Toy, named};

use super::{bits, decode_logits, difference, engine, prompt_logits, stored, tokens};

fn check(name: &str, toy: &Toy, options: &ConvertOptions) {
    let stored = stored(toy, options);
    let dense = stored.dir.path().join("twin.gguf");
    twin(&stored.store, &dense, &mut |_, _| true).unwrap();
    let (store, dense) = (engine(&stored.store, Prediction::Off), engine(&dense, Prediction::Auto));
    assert_eq!(
        bits(&prompt_logits(&store, &tokens(), false)),
        bits(&prompt_logits(&dense, &tokens(), false)),
        "{name}: prompt"
    );
    assert_eq!(
        bits(&decode_logits(&store, &tokens())),
        bits(&decode_logits(&dense, &tokens())),
        "{name}: decode"
    );
}

#[test]
fn every_kind_of_model_equals_its_twin() {
    for (name, toy) in named() {
        check(name, &toy, &ConvertOptions::default());
    }
}

#[test]
fn every_type_equals_its_twin() {
    for dtype in [DType::F16, DType::BF16, DType::Q4_0, DType::Q4_1, DType::Q5_0, DType::Q5_1, DType::Q8_0] {
        check(
            dtype.name(),
            &Toy { dtypes: vec![("ffn", dtype)], ..Toy::default() },
            &ConvertOptions::default(),
        );
    }
    for dtype in [DType::Q4_K, DType::Q5_K, DType::Q6_K] {
        check(
            dtype.name(),
            &Toy { dtypes: vec![("ffn", dtype)], ..Toy::default() },
            &ConvertOptions::default(),
        );
    }
    for down in [DType::F32, DType::F16, DType::Q4_0, DType::Q4_1] {
        let options = ConvertOptions { down_type: Some(down), ..ConvertOptions::default() };
        check(down.name(), &Toy { dtypes: vec![("ffn", DType::Q4_0)], ..Toy::default() }, &options);
    }
}

#[test]
fn an_exact_store_is_near_the_source() {
    let toy = Toy { dtypes: vec![("ffn", DType::F16)], ..Toy::default() };
    let stored = stored(&toy, &ConvertOptions::default());
    let exact = |path| super::builder(path, 2).exact(true).prediction(Prediction::Auto).build().unwrap();
    let [file, store] =
        [&stored.file, &stored.store].map(|path| prompt_logits(&exact(path), &tokens(), false));
    assert!(difference(&file, &store) < 1e-5, "{}", difference(&file, &store));
}
