//! What must not change the result: threads, instruction set, chunks, neighbours, history.

use std::ops::ControlFlow;

use neuropil::{Engine, KvType, SessionOptions};
use neuropil_cpu::{CpuBackend, CpuOptions, Isa};
use neuropil_device::DType;
use neuropil_tests::toy::{Toy, tokens};

use super::{all_logits, bits, cpu, engine, greedy, session};

fn toy() -> Toy {
    let dtypes = vec![
        ("attn_k", DType::IQ4_XS),
        ("attn", DType::Q4_K),
        ("ffn_up", DType::Q2_K),
        ("ffn_down", DType::Q6_K),
        ("output", DType::F16),
        ("", DType::Q4_0),
    ];
    Toy { dtypes, context: 256, ..Toy::default() }
}

#[test]
fn the_number_of_threads() {
    let (_dir, path) = toy().temp();
    let ids = tokens("one, two and seven threads, and more than there are cores");
    let run = |threads| {
        let engine = Engine::builder(&path).backend(&cpu(threads)).unwrap().build().unwrap();
        all_logits(&engine, &ids).iter().map(|row| bits(row)).collect::<Vec<_>>()
    };
    let one = run(1);
    for threads in [2, 7, 64] {
        assert!(run(threads) == one, "{threads} threads gave other bits than one");
    }
}

#[test]
fn the_instruction_set() {
    let (_dir, path) = toy().temp();
    let ids = tokens("whatever the processor has");
    let run = |isa| {
        let options = CpuOptions { threads: Some(2), isa: Some(isa) };
        let engine =
            Engine::builder(&path).backend(&CpuBackend::new(options).unwrap()).unwrap().build().unwrap();
        all_logits(&engine, &ids).iter().map(|row| bits(row)).collect::<Vec<_>>()
    };
    let scalar = run(Isa::Scalar);
    for isa in Isa::all_available() {
        assert!(run(isa) == scalar, "{isa:?} gave other bits than scalar code");
    }
}

#[test]
fn how_the_prompt_is_cut() {
    let (_dir, engine) = engine(&toy());
    let ids = tokens(
        "a prompt that is longer than one page of the cache, so that pages and chunks do not line up at all",
    );
    let whole = all_logits(&engine, &ids);
    let mut one_by_one = session(&engine);
    for (id, want) in ids.iter().zip(&whole) {
        one_by_one.decode(*id).unwrap();
        assert_eq!(bits(one_by_one.logits()), bits(want));
    }
    let mut uneven = session(&engine);
    for part in ids.chunks(7) {
        uneven.prefill(part).unwrap();
    }
    assert_eq!(bits(uneven.logits()), bits(&whole[ids.len() - 1]));
}

#[test]
fn how_a_long_prompt_is_cut_and_who_computes_it() {
    // Two spans of attention and a bit: one token's spans are shared among threads, a prompt's are not.
    let (_dir, path) = Toy { context: 2048, ..toy() }.temp();
    let ids: Vec<u32> = (0..1060).map(|i| (i * 7 + i / 11) % 256).collect();
    for kv in [KvType::F16, KvType::F32, KvType::Q8_0] {
        let run = |threads: usize, prompt: usize| {
            let engine = Engine::builder(&path).backend(&cpu(threads)).unwrap().build().unwrap();
            let mut session = engine.session(SessionOptions { kv, ..SessionOptions::default() }).unwrap();
            session.prefill(&ids[..prompt]).unwrap();
            ids[prompt..].iter().for_each(|id| session.decode(*id).unwrap());
            bits(session.logits())
        };
        let whole = run(1, ids.len());
        for (threads, prompt) in [(3, ids.len()), (1, 1010), (3, 1010), (7, 1059)] {
            assert!(run(threads, prompt) == whole, "{kv:?}, {threads} threads, {prompt} tokens at once");
        }
    }
}

#[test]
fn forks_of_a_cache_of_8_bits() {
    let (_dir, engine) = engine(&toy());
    let new = |kv| engine.session(SessionOptions { kv, ..SessionOptions::default() }).unwrap();
    let ids = tokens("a common beginning of more than sixty-four tokens, which fills a page and a bit");
    let mut base = new(KvType::Q8_0);
    base.prefill(&ids).unwrap();
    let mut halves = new(KvType::F16);
    halves.prefill(&ids).unwrap();
    // A code and a sixteenth of a scale for each element, where half precision takes two bytes.
    assert_eq!(base.kv_bytes() * 32, halves.kv_bytes() * 17);
    let mut forks = [base.fork(), base.fork()];
    for (fork, letter) in forks.iter_mut().zip(["a", "b"]) {
        fork.prefill(&tokens(letter)).unwrap();
    }
    for (fork, letter) in forks.iter().zip(["a", "b"]) {
        let mut fresh = new(KvType::Q8_0);
        fresh.prefill(&[ids.clone(), tokens(letter)].concat()).unwrap();
        assert_eq!(bits(fork.logits()), bits(fresh.logits()));
    }
}

#[test]
fn neighbours_in_the_batch() {
    let (_dir, engine) = engine(&toy());
    let prompts = [
        "short",
        "a rather longer prompt",
        "x",
        "and yet another that differs",
        "five",
        "six!",
        "7",
        "eight..",
    ];
    let alone: Vec<_> = prompts
        .iter()
        .map(|prompt| {
            let mut session = engine.session(SessionOptions::default()).unwrap();
            session.prefill(&tokens(prompt)).unwrap();
            let generation = session.generate(&greedy(20), &mut |_| ControlFlow::Continue(())).unwrap();
            (generation.tokens, bits(session.logits()))
        })
        .collect();
    let mut sessions: Vec<_> = prompts
        .iter()
        .map(|prompt| {
            let mut session = engine.session(SessionOptions::default()).unwrap();
            session.prefill(&tokens(prompt)).unwrap();
            session
        })
        .collect();
    let options = vec![greedy(20); prompts.len()];
    let together = engine.generate(&mut sessions, &options, &mut |_| ControlFlow::Continue(())).unwrap();
    for ((together, session), (tokens, logits)) in together.iter().zip(&sessions).zip(&alone) {
        assert_eq!(&together.tokens, tokens);
        assert_eq!(&bits(session.logits()), logits);
    }
}

#[test]
fn forks_and_what_they_share() {
    let (_dir, engine) = engine(&toy());
    let ids = tokens("a common beginning of more than sixty-four tokens, which fills a page and a bit");
    let mut base = session(&engine);
    base.prefill(&ids).unwrap();
    let mut forks = [base.fork(), base.fork(), base.fork()];
    for (fork, letter) in forks.iter_mut().zip(["a", "b", "c"]) {
        fork.prefill(&tokens(letter)).unwrap();
    }
    for (fork, letter) in forks.iter().zip(["a", "b", "c"]) {
        let mut fresh = session(&engine);
        fresh.prefill(&[ids.clone(), tokens(letter)].concat()).unwrap();
        assert_eq!(bits(fork.logits()), bits(fresh.logits()));
    }
}

#[test]
fn what_a_session_held_before() {
    let (_dir, engine) = engine(&toy());
    let fresh = |text: &str| {
        let mut session = session(&engine);
        session.prefill(&tokens(text)).unwrap();
        bits(session.logits())
    };
    let mut reused = session(&engine);
    for text in [
        "abcdefgh",
        "abefh",
        "abefh",
        "ab",
        "zzz",
        "abcdefgh and on past the end of the first page of the cache, all of it",
    ] {
        reused.set_tokens(&tokens(text)).unwrap();
        assert_eq!(reused.tokens(), tokens(text));
        assert_eq!(bits(reused.logits()), fresh(text), "after {text:?}");
    }
    let held = reused.tokens().to_vec();
    assert!(reused.set_tokens(&[9; 300]).is_err());
    assert_eq!(reused.tokens(), held, "what does not fit changes nothing");
}

#[test]
fn interleaved_sessions_of_which_one_restarts() {
    let (_dir, engine) = engine(&toy());
    let steady_alone = {
        let mut session = session(&engine);
        session.prefill(&tokens("steady")).unwrap();
        (0..20).for_each(|i| session.decode(i + 10).unwrap());
        bits(session.logits())
    };
    let mut steady = session(&engine);
    steady.prefill(&tokens("steady")).unwrap();
    for i in 0..20 {
        let mut other = session(&engine);
        other.prefill(&tokens("restless")).unwrap();
        steady.decode(i + 10).unwrap();
        other.decode(i).unwrap();
    }
    assert_eq!(bits(steady.logits()), steady_alone);
}
