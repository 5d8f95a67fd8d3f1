//! Logits against the f64 forward pass, for every option of a model file.

use neuropil_device::DType;
use neuropil_tests::reference;
use neuropil_tests::toy::{RopeScaling, Toy, tokens};

use super::{all_logits, builder, engine, reference_engine};

/// Greatest difference between the engine's logits and the reference's, over all positions.
fn error(engine: &neuropil::Engine, toy: &Toy, ids: &[u32]) -> f64 {
    let want = reference::logits(&toy.model(), ids);
    let got = all_logits(engine, ids);
    assert_eq!(got.len(), want.len());
    let pairs = got.iter().flatten().zip(want.iter().flatten());
    pairs.map(|(got, want)| (f64::from(*got) - want).abs()).fold(0.0, f64::max)
}

fn check(name: &str, toy: Toy) {
    let (_dir, engine) = engine(&toy);
    let error = error(
        &engine,
        &toy,
        &tokens("The quick brown fox jumps over the lazy dog, twice; and then it rests."),
    );
    assert!(error < 2e-4, "{name}: off by {error}");
}

#[test]
fn every_shape_of_llama() {
    check("plain", Toy::default());
    check("tied", Toy { tied: true, ..Toy::default() });
    check("6 heads share 2", Toy { width: 192, heads: 6, kv_heads: 2, ..Toy::default() });
    check("one kv head", Toy { kv_heads: 1, ..Toy::default() });
    check("heads wider than the model", Toy { head_dim: Some(80), ..Toy::default() });
    check("window of 4", Toy { sliding_window: Some(4), ..Toy::default() });
    check("half of a head turns", Toy { rope_dims: Some(32), ..Toy::default() });
    check("odd widths", Toy { width: 36, heads: 3, kv_heads: 3, ffn: 50, ..Toy::default() });
}

#[test]
fn every_stretching_of_positions() {
    let linear = RopeScaling::Linear { factor: 4.0 };
    let llama3 = RopeScaling::Llama3 { factor: 32.0, low: 1.0, high: 4.0, original: 32 };
    let yarn = RopeScaling::Yarn { factor: 16.0, original: 16 };
    for rope_scaling in [linear, llama3, yarn] {
        check("scaling", Toy { rope_scaling, ..Toy::default() });
    }
}

#[test]
fn every_activation() {
    for name in ["silu", "gelu", "relu", "relu2", "drelu"] {
        check(name, Toy { activation: Some(name), ..Toy::default() });
    }
    check("fatrelu", Toy { activation: Some("relu"), threshold: Some(0.3), ..Toy::default() });
}

#[test]
fn every_type_expanded_is_as_exact_as_floats() {
    for dtype in DType::ALL {
        let toy = Toy { dtypes: vec![("", dtype)], ..Toy::default() };
        let (_dir, path) = toy.temp();
        let exact = builder(&path).exact(true).build().unwrap();
        let error = error(&exact, &toy, &tokens("expanded to floats"));
        assert!(error < 2e-4, "{dtype}: off by {error}");
    }
}

/// Root mean square of the engine's error, as a share of that of the logits.
fn relative_error(toy: &Toy, ids: &[u32]) -> f64 {
    let (_dir, engine) = engine(toy);
    let want = reference::logits(&toy.model(), ids);
    let got = all_logits(&engine, ids);
    let pairs = got.iter().flatten().zip(want.iter().flatten());
    let (error, size) = pairs.fold((0.0, 0.0), |(error, size), (got, want)| {
        (error + (f64::from(*got) - want).powi(2), size + want.powi(2))
    });
    (error / size).sqrt()
}

/// What eight bits per activation may cost over two layers.
const EIGHT_BITS: f64 = 0.03;

#[test]
fn every_type_with_quantised_activations_is_close() {
    for dtype in DType::ALL {
        let toy = Toy { dtypes: vec![("", dtype)], ..Toy::default() };
        let error = relative_error(&toy, &tokens("eight bits"));
        assert!(error < EIGHT_BITS, "{dtype}: off by {error}");
    }
}

#[test]
fn tensors_of_one_layer_may_differ_in_type() {
    let dtypes = vec![
        ("attn_q", DType::Q4_K),
        ("attn_k", DType::F16),
        ("attn_v", DType::Q6_K),
        ("attn_output", DType::IQ4_NL),
        ("token_embd", DType::MXFP4),
        ("ffn_gate", DType::Q8_0),
        ("ffn_up", DType::Q5_1),
        ("ffn_down", DType::F32),
    ];
    let error = relative_error(&Toy { dtypes, ..Toy::default() }, &tokens("mixed"));
    assert!(error < EIGHT_BITS, "off by {error}");
}

#[test]
fn the_other_pairing_of_rotated_channels_shows_after_the_first_token() {
    let toy = Toy::default();
    let (_dir, right) = engine(&toy);
    let dir = neuropil_tests::temp::TempDir::new();
    let twin = builder(&dir.file("neox.gguf", &toy.model().neox_twin().file().bytes())).build().unwrap();
    let ids = tokens("abc");
    let (right, wrong) = (all_logits(&right, &ids), all_logits(&twin, &ids));
    let difference =
        |at: usize| right[at].iter().zip(&wrong[at]).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(difference(0) < 1e-4, "nothing turns at position 0");
    assert!(difference(1) > 1e-2, "at position 1 the pairing must matter");
}

#[test]
fn the_runtime_runs_on_a_unit_that_is_no_cpu_backend() {
    let toy = Toy::default();
    let (_dir, path) = toy.temp();
    let error = error(&reference_engine(&path), &toy, &tokens("any device"));
    assert!(error < 2e-4, "off by {error}");
}
