//! How a generation ends, what it streams, and what its options do.

use std::ops::ControlFlow;

use neuropil::engine::EngineError;
use neuropil::model::sampler::SamplerOptions;
use neuropil::{Engine, FinishReason, GenerateOptions, Generation};
use neuropil_tests::toy::{END, EOS, Toy, tokens};

use super::{engine, greedy, session};

/// Options under which the model says exactly `text` again and again: a bias far above every logit.
fn saying(engine: &Engine, token: u32, count: usize) -> GenerateOptions {
    assert!((token as usize) < engine.spec().vocab);
    let sampler = SamplerOptions { logit_bias: vec![(token, 1e6)], ..SamplerOptions::greedy() };
    GenerateOptions { sampler, ..greedy(count) }
}

fn run(engine: &Engine, options: &GenerateOptions) -> (Generation, String) {
    let mut session = session(engine);
    session.prefill(&tokens("go")).unwrap();
    let mut streamed = String::new();
    let generation = session
        .generate(options, &mut |piece| {
            streamed.push_str(piece.text);
            ControlFlow::Continue(())
        })
        .unwrap();
    (generation, streamed)
}

#[test]
fn it_ends_by_count_or_by_the_contexts_end() {
    let (_dir, engine) = engine(&Toy { context: 16, ..Toy::default() });
    let (generation, _) = run(&engine, &greedy(5));
    assert_eq!((generation.tokens.len(), generation.finish_reason), (5, FinishReason::Length));
    assert_eq!(generation.latencies.len(), 4);
    let endless = GenerateOptions { max_tokens: None, ..greedy(0) };
    let (generation, _) = run(&engine, &endless);
    // 2 of the prompt, 14 more that fit, and the one that follows the last.
    assert_eq!((generation.tokens.len(), generation.finish_reason), (15, FinishReason::Length));
    let (generation, _) = run(&engine, &greedy(50));
    assert_eq!((generation.tokens.len(), generation.finish_reason), (15, FinishReason::Length));
    let (generation, text) = run(&engine, &greedy(0));
    assert_eq!((generation.tokens.len(), text.as_str()), (0, ""));
}

#[test]
fn it_ends_by_an_end_token_unless_told_not_to() {
    let (_dir, engine) = engine(&Toy::default());
    let stops = GenerateOptions { ignore_eos: false, ..saying(&engine, EOS, 8) };
    let (generation, text) = run(&engine, &stops);
    assert_eq!((generation.tokens.len(), generation.finish_reason), (0, FinishReason::Stop));
    assert_eq!(text, "");
    let (generation, text) = run(&engine, &saying(&engine, EOS, 8));
    assert_eq!((generation.tokens, generation.finish_reason), (vec![EOS; 8], FinishReason::Length));
    assert_eq!(text, "", "a control token has no text");
}

#[test]
fn it_ends_by_a_stop_text_or_by_a_control_token_named_as_one() {
    let (_dir, engine) = engine(&Toy::default());
    let a = tokens("a")[0];
    let stop = |text: &str, token| GenerateOptions { stop: vec![text.into()], ..saying(&engine, token, 8) };
    let (generation, text) = run(&engine, &stop("aaa", a));
    assert_eq!(
        (generation.finish_reason, generation.text.as_str(), text.as_str()),
        (FinishReason::Stop, "", "")
    );
    assert_eq!(generation.tokens, [a; 3]);
    let (generation, text) = run(&engine, &stop("ab", a));
    assert_eq!((generation.finish_reason, text.as_str()), (FinishReason::Length, "aaaaaaaa"));
    assert_eq!(generation.text, text, "what was held back comes at the end");
    let (generation, _) = run(&engine, &stop("<|end|>", END));
    assert_eq!((generation.tokens.len(), generation.finish_reason), (0, FinishReason::Stop));
}

#[test]
fn streamed_text_is_the_whole_text() {
    let (_dir, engine) = engine(&Toy::default());
    for seed in 0..8 {
        let sampler = SamplerOptions { temperature: 3.0, seed: Some(seed), ..SamplerOptions::default() };
        let options = GenerateOptions { sampler, ..greedy(60) };
        let (generation, text) = run(&engine, &options);
        assert_eq!(generation.text, text);
        let bytes = engine.tokenizer().unwrap().decode(&generation.tokens).unwrap();
        assert_eq!(text, String::from_utf8_lossy(&bytes));
    }
}

#[test]
fn the_receiver_can_end_it() {
    let (_dir, engine) = engine(&Toy::default());
    let mut session = session(&engine);
    session.prefill(&tokens("go")).unwrap();
    let mut seen = 0;
    let generation = session
        .generate(&greedy(50), &mut |_| {
            seen += 1;
            if seen == 3 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        })
        .unwrap();
    assert_eq!((generation.tokens.len(), generation.finish_reason), (3, FinishReason::Cancelled));
}

#[test]
fn the_same_seed_gives_the_same_answer_alone_or_not() {
    let (_dir, engine) = engine(&Toy::default());
    let seeded = |seed| {
        let sampler = SamplerOptions { temperature: 1.0, seed: Some(seed), ..SamplerOptions::default() };
        GenerateOptions { sampler, ..greedy(24) }
    };
    let (first, _) = run(&engine, &seeded(7));
    assert_eq!(run(&engine, &seeded(7)).0.tokens, first.tokens);
    let mut base = session(&engine);
    base.prefill(&tokens("go")).unwrap();
    let mut batch = vec![base.fork(), base.fork(), base.fork()];
    let options = [seeded(8), seeded(7), seeded(9)];
    let together = engine.generate(&mut batch, &options, &mut |_| ControlFlow::Continue(())).unwrap();
    assert_eq!(together[1].tokens, first.tokens);
    assert_ne!(together[0].tokens, together[2].tokens);
}

#[test]
fn nothing_to_continue_from_is_an_error() {
    let (_dir, engine) = engine(&Toy::default());
    let result = session(&engine).generate(&greedy(1), &mut |_| ControlFlow::Continue(()));
    assert!(matches!(result, Err(EngineError::EmptyPrompt)));
}

#[test]
fn a_batch_of_strangers_is_refused() {
    let (_dir, one) = engine(&Toy::default());
    let (_dir, two) = engine(&Toy::default());
    let mut batch = vec![session(&one), session(&two)];
    assert!(matches!(one.decode(&mut batch, &[(0, 5), (1, 5)]), Err(EngineError::Sequence(1))));
    let mut batch = vec![session(&one), session(&one)];
    assert!(matches!(one.decode(&mut batch, &[(0, 5), (0, 5)]), Err(EngineError::Sequence(0))));
    assert!(matches!(one.decode(&mut batch, &[(2, 5)]), Err(EngineError::Sequence(2))));
}
