//! What goes where, and how reports tell it.

use neuropil::EngineError;
use neuropil::model::ModelError;
use neuropil_device::DType;
use neuropil_tests::toy::{Toy, ToyExperts};

use super::{alone, builder, npu, quantised, run, toy};

#[test]
fn a_unit_takes_prompts_and_blocks_and_gives_the_tokens_of_the_processor() {
    let experts =
        Toy { experts: Some(ToyExperts { count: 4, used: 2, neurons: None, gating: None }), ..toy() };
    for (toy, dtype) in [(toy(), "f32"), (quantised(), "q8_0"), (experts, "f32")] {
        let (_dir, path) = toy.temp();
        for options in ["", "clusters=off", "buckets=any&schemes=f32+group8"] {
            let device = npu(options);
            let engine = builder(&path, &device).build().unwrap();
            assert_eq!(run(&engine).unwrap(), alone(&path), "{dtype} {options}");
            assert_eq!(engine.events(), []);
            let placed = engine.placements();
            let unit = |op: &str| {
                let found = placed.iter().find(|placement| placement.op == op);
                found.map_or_else(|| panic!("{op}: {placed:?}"), |placement| &*placement.unit)
            };
            assert_eq!(unit(&format!("attn_qkv {dtype}, prompts")), "software NPU 0");
            assert_ne!(unit(&format!("attn_qkv {dtype}, decode")), "software NPU 0");
            assert_eq!(unit(&format!("ffn {dtype}")), "software NPU 0");
            assert_ne!(unit(&format!("output {dtype}")), "software NPU 0");
        }
    }
}

#[test]
fn what_a_unit_refuses_stays_at_home_with_the_reason() {
    let toy = Toy { dtypes: vec![("attn", DType::F32), ("weight", DType::Q8_0)], ..toy() };
    let (_dir, path) = toy.temp();
    // It takes no F32, and F16 would lose nothing that Q8_0 has.
    let device = npu("schemes=group8&weights=group8&self_test=off");
    let picky = npu("schemes=f16&weights=group8");
    let engine = builder(&path, &picky).build().unwrap();
    assert_eq!(run(&engine).unwrap(), alone(&path));
    let placed = engine.placements();
    assert!(placed.iter().all(|placement| placement.unit != "software NPU 0"), "{placed:?}");
    let ffn = placed.iter().find(|placement| placement.op == "ffn q8_0").unwrap();
    assert!(ffn.reason.contains("software NPU 0: ") && ffn.reason.contains("group8"), "{}", ffn.reason);
    let error = builder(&path, &picky).strict(true).build().err().unwrap();
    assert!(matches!(error, EngineError::Model(ModelError::Weight { .. })), "{error}");
    assert!(error.to_string().contains("software NPU 0"), "{error}");
    assert!(builder(&path, &device).strict(true).build().is_ok());
}

#[test]
fn a_unit_that_is_full_has_what_it_holds_and_the_rest_is_at_home() {
    let (_dir, path) = toy().temp();
    // The attention of one layer and one block of neurons, or less.
    for memory in [1 << 10, 200 << 10, 800 << 10, 1200 << 10] {
        let device = npu(&format!("memory={memory}&self_test=off"));
        let engine = builder(&path, &device).build().unwrap();
        assert_eq!(run(&engine).unwrap(), alone(&path), "{memory}");
        assert_eq!(engine.events(), []);
        let placed = engine.placements();
        let full = placed.iter().filter(|p| p.reason.contains("out of memory")).map(|p| p.weights);
        assert!(full.sum::<usize>() > 0, "{memory}: {placed:?}");
        let error = builder(&path, &npu(&format!("memory={memory}&self_test=off"))).strict(true).build();
        assert!(matches!(error, Err(EngineError::Model(ModelError::Weight { .. }))), "{memory}");
    }
}
