//! `synth`: what is written, and what is said about it.

mod common;

use common::{arg, neuropil};
use neuropil_tests::temp::TempDir;

#[test]
fn what_was_asked_for_stands_beside_what_was_measured() {
    let dir = TempDir::new();
    let (store, twin) = (dir.path().join("s.gguf"), dir.path().join("t.gguf"));
    let args = ["synth", "--shape", "toy-drelu", arg(&store), "--preset", "smollm2", "--layers", "2"];
    let more = ["--rank", "256", "--recall", "0.9", "--twin", arg(&twin), "--json"];
    let json = neuropil(&[&args[..], &more].concat()).json();
    assert_eq!(json["bytes"], std::fs::metadata(&store).unwrap().len());
    assert_eq!(json["twin"]["bytes"], std::fs::metadata(&twin).unwrap().len());
    let asked = serde_json::json!({"active": 0.1, "overlap": 0.41, "recall": 0.9, "rank": 256});
    assert_eq!(json["asked"], asked);
    for key in ["active", "overlap", "recall", "predicted"] {
        assert!((0.05..0.99).contains(&json["measured"][key].as_f64().unwrap()), "{key}: {json}");
    }
    assert_eq!(json["measured"]["layers"], serde_json::json!([0, 1]));
    assert!(neuropil(&["verify", arg(&store)]).text().starts_with("sound"));
    let inspected = neuropil(&["inspect", arg(&twin), "--json"]).json();
    assert_eq!((&inspected["architecture"], &inspected["runs"]), (&"llama".into(), &true.into()));

    let text = neuropil(&args);
    assert!(text.text().contains("asked  measured") && text.text().contains("all layers"), "{}", text.text());
    assert!(!text.text().contains("recall"));
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 2);
}

#[test]
fn a_folder_that_is_not_there_is_one_line() {
    let line = neuropil(&["synth", "--shape", "toy", "no/such/folder/m.gguf"]);
    assert!(line.error(9).contains("no/such/folder/m.gguf"));
}

#[test]
fn a_twin_does_not_take_the_place_of_its_store() {
    let dir = TempDir::new();
    let store = dir.path().join("s.gguf");
    let line = neuropil(&["synth", "--shape", "toy", arg(&store), "--twin", arg(&store)]);
    assert!(line.error(2).contains("--twin"));
    assert!(!store.exists());
}
