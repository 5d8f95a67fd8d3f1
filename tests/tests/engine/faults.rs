//! Units that fail: the same tokens or a typed error, never other tokens, and a session that can go on.

use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::{Duration, Instant};

use neuropil::engine::EngineError;
use neuropil::{Engine, FinishReason};
use neuropil_device::{Backend, Device, DeviceError, OpShape};
use neuropil_tests::mock::{Fault, FaultyDevice};
use neuropil_tests::toy::{Toy, ToyExperts, tokens};

use super::{bits, cpu, greedy, session};

fn with(device: FaultyDevice, toy: &Toy) -> (neuropil_tests::temp::TempDir, Engine, Arc<FaultyDevice>) {
    let (dir, path) = toy.temp();
    let device = Arc::new(device);
    let engine = Engine::builder(&path).device(device.clone()).build().unwrap();
    (dir, engine, device)
}

fn unit() -> Arc<dyn Device> {
    cpu(1).open(0).unwrap()
}

#[test]
fn an_error_or_a_lost_job_at_every_call() {
    error_or_lost_job_at_every_call(Toy::default());
    let experts = Some(ToyExperts { count: 4, used: 2, neurons: None, gating: None });
    error_or_lost_job_at_every_call(Toy { layers: 1, experts, ..Toy::default() });
}

fn error_or_lost_job_at_every_call(toy: Toy) {
    let lost = DeviceError::Lost { device: "mock".into(), reason: "unplugged".into() };
    let (_dir, good, counter) = with(FaultyDevice::around(unit()), &toy);
    let mut session_good = session(&good);
    session_good.prefill(&tokens("ab")).unwrap();
    session_good.decode(99).unwrap();
    let calls = counter.submissions();
    for call in 0..calls {
        for (fault, want) in [(Fault::Error(lost.clone()), lost.clone()), (Fault::Drop, DeviceError::Dropped)]
        {
            let (_dir, engine, _) = with(FaultyDevice::around(unit()).at(call, fault), &toy);
            let mut session = session(&engine);
            // The call that fails is in the prefill or in the decode; either is tried again, as a caller would.
            let mut failed = 0;
            while session.tokens().is_empty() {
                match session.prefill(&tokens("ab")) {
                    Ok(()) => {}
                    Err(EngineError::Device(error)) if error == want => failed += 1,
                    Err(other) => panic!("call {call}: {other}"),
                }
            }
            if let Err(error) = session.decode(99) {
                assert!(
                    matches!(&error, EngineError::Device(error) if *error == want),
                    "call {call}: {error}"
                );
                failed += 1;
                session.decode(99).unwrap();
            }
            assert_eq!(failed, 1, "call {call} must fail once");
            assert_eq!(bits(session.logits()), bits(session_good.logits()), "call {call}");
        }
    }
}

#[test]
fn nan_from_a_unit_is_an_error_of_the_sampler() {
    let toy = Toy::default();
    for call in [0, 2, 5] {
        let (_dir, engine, _) = with(FaultyDevice::around(unit()).at(call, Fault::Fill(f32::NAN)), &toy);
        let mut session = session(&engine);
        session.prefill(&tokens("ab")).unwrap();
        let result = session.generate(&greedy(4), &mut |_| ControlFlow::Continue(()));
        assert!(matches!(result, Err(EngineError::Sampler(_))), "call {call}");
    }
}

#[test]
fn nan_from_a_router_is_not_a_choice() {
    let experts = Some(ToyExperts { count: 4, used: 1, neurons: None, gating: None });
    let toy = Toy { layers: 1, experts, ..Toy::default() };
    // The third job is the router's.
    let (_dir, engine, _) = with(FaultyDevice::around(unit()).at(2, Fault::Fill(f32::NAN)), &toy);
    let mut session = session(&engine);
    session.prefill(&tokens("ab")).unwrap();
    let result = session.generate(&greedy(4), &mut |_| ControlFlow::Continue(()));
    assert!(matches!(result, Err(EngineError::Sampler(_))));
}

#[test]
fn a_unit_that_finishes_on_its_own_thread() {
    let toy = Toy::default();
    let (_dir, direct, _) = with(FaultyDevice::around(unit()), &toy);
    let slow = FaultyDevice::around(unit()).threaded().delayed(Duration::from_millis(1));
    let (_dir, threaded, _) = with(slow, &toy);
    let run = |engine: &Engine| {
        let mut session = session(engine);
        session.prefill(&tokens("elsewhere")).unwrap();
        bits(session.logits())
    };
    assert_eq!(run(&direct), run(&threaded));
}

#[test]
fn a_unit_without_memory_or_without_the_operation() {
    let (_dir, path) = Toy::default().temp();
    let small = Arc::new(FaultyDevice::around(unit()).with_room_for(3));
    let error = Engine::builder(&path).device(small).build().err().unwrap().to_string();
    assert!(error.contains("out of memory") && error.contains("blk."), "{error}");
    let no_clusters = |op: &OpShape| matches!(op, OpShape::Cluster { .. });
    let picky = || Arc::new(FaultyDevice::around(unit()).refusing(no_clusters));
    let error = Engine::builder(&path).device(picky()).build().err().unwrap().to_string();
    assert!(error.contains("blk.0.ffn_gate.weight"), "{error}");
    // A second unit takes what the first refuses.
    let both = Engine::builder(&path).device(picky()).device(unit()).build().unwrap();
    let alone = Engine::builder(&path).device(unit()).build().unwrap();
    let run = |engine: &Engine| {
        let mut session = session(engine);
        session.prefill(&tokens("two units")).unwrap();
        bits(session.logits())
    };
    assert_eq!(run(&both), run(&alone));
}

#[test]
fn a_switch_stops_a_prefill_within_a_layer() {
    let toy = Toy { layers: 40, ..Toy::default() };
    let slow = FaultyDevice::around(unit()).delayed(Duration::from_millis(10));
    let (_dir, engine, device) = with(slow, &toy);
    let mut session = session(&engine);
    let switch = session.cancel_token();
    let stopper = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(100));
        switch.cancel();
    });
    let start = Instant::now();
    assert!(matches!(session.prefill(&tokens("stop")), Err(EngineError::Cancelled)));
    stopper.join().unwrap();
    assert!(device.submissions() < 3 * 40, "it went on after {:?}", start.elapsed());
    assert!(session.tokens().is_empty());
    let again = session.cancel_token();
    again.reset();
    session.prefill(&tokens("stop")).unwrap();
    again.cancel();
    let generation = session.generate(&greedy(4), &mut |_| ControlFlow::Continue(())).unwrap();
    assert_eq!(generation.finish_reason, FinishReason::Cancelled);
    assert!(generation.tokens.is_empty());
}

#[test]
fn a_sequence_that_fails_leaves_its_neighbours_alone() {
    let (_dir, engine, _) = with(FaultyDevice::around(unit()), &Toy::default());
    let mut base = session(&engine);
    base.prefill(&tokens("ab")).unwrap();
    let mut batch = vec![base.fork(), session(&engine), base.fork()];
    let options = vec![greedy(6), greedy(6), greedy(6)];
    let all = engine.generate(&mut batch, &options, &mut |_| ControlFlow::Continue(())).unwrap();
    assert_eq!(all[1].finish_reason, FinishReason::Failed);
    assert!(matches!(all[1].error, Some(EngineError::EmptyPrompt)));
    let alone = base.generate(&greedy(6), &mut |_| ControlFlow::Continue(())).unwrap();
    assert_eq!((&all[0].tokens, &all[2].tokens), (&alone.tokens, &alone.tokens));
}
