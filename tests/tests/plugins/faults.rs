//! Every call of a plugin fails in every way, while a model is loaded, reads its prompt, and decodes: the same tokens
//! and a report, or with `strict` a typed error.

use neuropil::{Engine, EngineError};
use neuropil_device::DeviceError;
use neuropil_tests::toy::Toy;

use super::{alone, backend, builder, npu, quantised, run, toy};

/// Calls of the toy's columns alone count, so that the self-test is left in peace.
const SOON: &str = "fault_columns=192&hang_ms=4000&deadline_ms=250";

/// What each call is called before the first token: attention's products and blocks, layer by layer.
fn faults() -> Vec<(String, &'static str)> {
    let mut faults = Vec::new();
    for kind in ["error", "lost", "oom", "panic", "hang"] {
        // The first weight, one in the middle, the last.
        for call in [1, 4, 6] {
            faults.push((format!("{kind}@prepare:{call}"), "load"));
        }
    }
    for kind in ["error", "lost", "oom", "panic", "hang", "nan", "tile"] {
        // Of a prompt that fills two buckets of 16: attention's products, and blocks.
        for (call, phase) in [(1, "prefill"), (6, "prefill")] {
            faults.push((format!("{kind}@matmul:{call}"), phase));
        }
        for (call, phase) in [(1, "prefill"), (3, "prefill"), (5, "decode"), (8, "decode")] {
            faults.push((format!("{kind}@cluster:{call}"), phase));
        }
    }
    faults
}

#[test]
fn every_call_fails_in_every_way() {
    for (toy, weights) in [(toy(), "f32"), (quantised(), "group8")] {
        let (_dir, path) = toy.temp();
        let want = alone(&path);
        for (fault, phase) in faults() {
            let options = format!("{SOON}&schemes={weights}&fault={fault}");
            let device = npu(&options);
            let engine = builder(&path, &device).cross_check(1).build().unwrap();
            let lost = engine.events().len();
            assert_eq!(run(&engine).unwrap(), want, "{fault}");
            let events = engine.events();
            // A unit without room for one thing may have some for the next.
            let full = fault.starts_with("oom@");
            assert_eq!(events.len(), usize::from(!full), "{fault}: {events:?}");
            assert_eq!(lost, usize::from(phase == "load" && !full), "{fault}");
            if let [event] = &events[..] {
                assert_eq!(event.unit, "software NPU 0");
                assert!(event.to_string().starts_with("unit software NPU 0 taken out: "), "{event}");
            }
            // And once more, without it.
            assert_eq!(run(&engine).unwrap(), want, "{fault}");
        }
    }
}

#[test]
fn units_that_only_multiply_fail_in_decode_too() {
    let (_dir, path) = toy().temp();
    let want = alone(&path);
    for kind in ["error", "lost", "panic", "hang", "nan", "tile"] {
        // Gate and up of a block are two products of one call.
        for call in [2, 9, 12, 15] {
            let options = format!("{SOON}&clusters=off&schemes=f32&fault={kind}@matmul:{call}");
            let engine = builder(&path, &npu(&options)).build().unwrap();
            assert_eq!(run(&engine).unwrap(), want, "{options}");
            assert_eq!(engine.events().len(), 1, "{options}");
        }
    }
}

#[test]
fn strict_ends_the_run_with_the_units_own_error() {
    let (_dir, path) = toy().temp();
    let of_unit = |error: &EngineError| matches!(error, EngineError::Device(_) | EngineError::Model(_));
    for (fault, _) in faults().into_iter().filter(|(fault, _)| !fault.starts_with("hang")) {
        let device = npu(&format!("{SOON}&schemes=f32&fault={fault}"));
        let built = builder(&path, &device).cross_check(1).strict(true).build();
        let result = built.and_then(|engine| run(&engine));
        let error = result.expect_err(&fault);
        assert!(of_unit(&error), "{fault}: {error}");
        assert!(error.to_string().contains("NPU") || error.to_string().contains("sim-npu"), "{error}");
    }
}

#[test]
fn a_wrong_block_that_only_a_sample_finds_ends_the_run() {
    let (_dir, path) = toy().temp();
    // The prompt's two blocks are two calls each, one per bucket; so the ninth call is the seventh block, which is compared
    // after the third.
    let device = npu(&format!("{SOON}&schemes=f32&fault=tile@cluster:9"));
    let engine = builder(&path, &device).cross_check(3).build().unwrap();
    let error = run(&engine).err();
    assert!(
        matches!(&error, Some(EngineError::Device(DeviceError::Wrong { .. }))),
        "{error:?} {:?}",
        engine.events()
    );
    // Nobody else gets its results.
    assert_eq!(engine.events().len(), 1);
}

#[test]
fn an_error_while_a_unit_is_found_or_opened_is_typed() {
    let (_dir, path) = Toy::default().temp();
    for kind in ["error", "lost", "oom", "panic", "hang"] {
        for at in ["probe", "open"] {
            let backend = backend(&format!("fault={kind}@{at}&hang_ms=3000&deadline_ms=200"));
            let error = Engine::builder(&path).backend(&backend).err();
            assert!(matches!(error, Some(EngineError::Device(_))), "{kind}@{at}: {error:?}");
        }
    }
}
