//! Token ids of other models' vocabularies, equal to llama.cpp's. Opt-in: `.ci/vocabularies` fetches the files.

use neuropil::model::tokenizer::EncodeOptions;
use neuropil_tests::real::cached;
use serde_json::Value;

const GOLDEN: &str = include_str!("../fixtures/vocab_tokens.json");

#[test]
fn token_ids_of_every_vocabulary() {
    let golden: Value = serde_json::from_str(GOLDEN).unwrap();
    let cases = golden["cases"].as_array().unwrap();
    for (name, vocabulary) in golden["vocabs"].as_object().unwrap() {
        let file = format!("vocab/ggml-vocab-{name}.gguf");
        let Some(path) = cached(&file, ".ci/vocabularies") else { return };
        let tokenizer = neuropil::engine::open_tokenizer(&path).unwrap();
        for (case, want) in cases.iter().zip(vocabulary["ids"].as_array().unwrap()) {
            // The one case without a text is a piece of a licence that is not repeated here.
            let Some(text) = case["text"].as_str() else { continue };
            let parse_special = case["parse_special"].as_bool().unwrap();
            let options = EncodeOptions { add_special: true, parse_special };
            let got = tokenizer.encode(text, options).unwrap();
            let want: Vec<u32> =
                want.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect();
            assert_eq!(got, want, "{name}: {}", case["name"]);
        }
    }
}
