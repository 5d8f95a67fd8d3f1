//! Who decides which neurons are computed, and what that does not change.

use neuropil::SessionOptions;
use neuropil::predict::{Marks, PredictCall, Prediction, Predictor, PredictorInput};
use neuropil::store::ConvertOptions;
use neuropil_device::{DType, DeviceError};
use neuropil_tests::toy::{Toy, named};

use super::{bits, builder, decode_logits, engine, prompt_logits, session, stored, tokens};

fn relu() -> Toy {
    Toy { activation: Some("relu"), dtypes: vec![("ffn", DType::Q8_0)], ..Toy::default() }
}

#[test]
fn an_exact_gate_changes_no_bit_of_a_relu_model() {
    for activation in ["relu", "relu2", "drelu"] {
        let stored = stored(&Toy { activation: Some(activation), ..relu() }, &ConvertOptions::default());
        let [off, gate] = [Prediction::Off, Prediction::Gate].map(|how| engine(&stored.store, how));
        assert_eq!(bits(&decode_logits(&off, &tokens())), bits(&decode_logits(&gate, &tokens())));
        assert_eq!(
            bits(&prompt_logits(&off, &tokens(), true)),
            bits(&prompt_logits(&gate, &tokens(), true)),
            "{activation}"
        );
    }
}

#[test]
fn what_fired_is_counted() {
    let stored = stored(&relu(), &ConvertOptions::default());
    for (prediction, share) in
        [(Prediction::Off, 1.0..=1.0), (Prediction::Gate, 0.3..=0.7), (Prediction::Gate4, 0.3..=0.7)]
    {
        let engine = engine(&stored.store, prediction);
        let mut session = session(&engine, false);
        session.prefill(&tokens()[..4]).unwrap();
        assert!(session.activity().is_empty(), "a prompt does not count");
        tokens()[4..].iter().for_each(|token| session.decode(*token).unwrap());
        assert!(
            share.contains(&session.activity().share()),
            "{prediction:?}: {}",
            session.activity().share()
        );
        assert_eq!(session.activity().per_layer().len(), 2);
    }
}

/// Every way to choose that a store with predictors offers.
const ALL: [Prediction; 4] = [Prediction::Off, Prediction::Model, Prediction::Gate, Prediction::Gate4];

#[test]
fn threads_and_neighbours_change_no_bit() {
    for (name, toy) in named().into_iter().filter(|(_, toy)| toy.predictor_rank.is_some()) {
        let stored = stored(&toy, &ConvertOptions::default());
        for prediction in ALL {
            let alone = engine(&stored.store, prediction);
            let want = decode_logits(&alone, &tokens());
            let three = builder(&stored.store, 3).prediction(prediction).build().unwrap();
            assert_eq!(
                bits(&want),
                bits(&decode_logits(&three, &tokens())),
                "{name} {prediction:?}: threads"
            );
            // Three sequences of their own in one batch.
            let texts = [tokens(), tokens().into_iter().rev().collect(), tokens()[5..].to_vec()];
            let mut sessions: Vec<_> = texts.iter().map(|_| session(&three, false)).collect();
            sessions.iter_mut().zip(&texts).for_each(|(s, text)| s.prefill(&text[..2]).unwrap());
            for step in 2..20 {
                let inputs: Vec<(usize, u32)> = texts.iter().map(|text| text[step]).enumerate().collect();
                three.decode(&mut sessions, &inputs).unwrap();
                let got = sessions[0].logits().iter().map(|v| v.to_bits()).collect::<Vec<_>>();
                assert_eq!(got, bits(&want)[step - 2], "{name} {prediction:?}: step {step}");
            }
        }
    }
}

/// Marks every so many neurons.
struct Every(usize);

impl Predictor for Every {
    fn input(&self) -> PredictorInput {
        PredictorInput::Normed
    }

    fn bytes(&self) -> u64 {
        0
    }

    fn predict(&self, call: &mut PredictCall<'_>, marks: &mut Marks) -> Result<(), DeviceError> {
        for token in 0..call.tokens {
            (0..marks.neurons()).step_by(self.0).for_each(|neuron| marks.mark(token, neuron));
        }
        Ok(())
    }
}

#[test]
fn an_app_brings_its_own_predictor() {
    let stored = stored(&relu(), &ConvertOptions::default());
    let custom = |every| {
        let make = move |_: usize, _: Option<usize>| Box::new(Every(every)) as Box<dyn Predictor>;
        builder(&stored.store, 2).predictors(make).build().unwrap()
    };
    let off = decode_logits(&engine(&stored.store, Prediction::Off), &tokens());
    assert_eq!(bits(&off), bits(&decode_logits(&custom(1), &tokens())));
    let third = custom(3);
    assert_ne!(bits(&off), bits(&decode_logits(&third, &tokens())));
    let mut session = session(&third, false);
    session.prefill(&tokens()[..2]).unwrap();
    session.decode(tokens()[2]).unwrap();
    assert!((session.activity().share() - 1.0 / 3.0).abs() < 0.01);
}

#[test]
fn a_prompt_is_computed_with_all_neurons() {
    let (_, toy) = named().into_iter().find(|(name, _)| *name == "bamboo").unwrap();
    let stored = stored(&toy, &ConvertOptions::default());
    let [off, model] = [Prediction::Off, Prediction::Model].map(|how| engine(&stored.store, how));
    let dense = bits(&prompt_logits(&off, &tokens(), false));
    assert_eq!(dense, bits(&prompt_logits(&model, &tokens(), false)));
    let sparse = bits(&prompt_logits(&model, &tokens(), true));
    assert_eq!(dense[0], sparse[0], "the first position is the attention sink");
    assert_ne!(dense[8..], sparse[8..]);
}

#[test]
fn a_choice_that_the_file_cannot_serve_is_refused() {
    let stored = stored(&Toy::default(), &ConvertOptions::default());
    let refused = |path: &std::path::Path, prediction| {
        let error = builder(path, 1).prediction(prediction).build().err().map(|error| error.to_string());
        error.unwrap_or_default()
    };
    assert!(refused(&stored.file, Prediction::Gate).contains("neuropil convert"));
    assert!(refused(&stored.store, Prediction::Model).contains("no predictors"));
    assert!(refused(&stored.store, Prediction::Threshold).contains("neuropil calibrate"));
    assert!(refused(&stored.store, Prediction::Gate4).contains("threshold"));
    assert_eq!(engine(&stored.store, Prediction::Auto).prediction(), Prediction::Off);
    assert_eq!(engine(&stored.file, Prediction::Off).prediction(), Prediction::Off);
    let options = SessionOptions { sparse_prompt: true, ..SessionOptions::default() };
    engine(&stored.file, Prediction::Auto).session(options).unwrap().prefill(&tokens()).unwrap();
}
