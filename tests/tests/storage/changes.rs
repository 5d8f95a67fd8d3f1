//! Model files that change while they are in use: one that is replaced is read to the end as it was, one that somebody
//! writes into is an error. Never other tokens.

use std::io;
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::channel;
use std::time::Duration;

use neuropil::engine::GenerateOptions;
use neuropil::gguf::GgufError;
use neuropil::io::{Files, IoEngine, Pread, ReadAt};
use neuropil::predict::Prediction;
use neuropil::{Engine, EngineError, Session};
use neuropil_tests::toy::Toy;

use super::faults::{ends, engine, right, run};
use super::{bits, builder, experts, session, sparse, stored, tokens};

#[test]
fn a_file_that_becomes_shorter_is_an_error() {
    for prediction in [Prediction::Model, Prediction::Off] {
        let stored = stored(&sparse());
        let make = move |paths: &[&Path]| {
            let files = Files::open_buffered(paths)?;
            Ok(Box::new(Pread::new(Arc::new(files), 2)?) as Box<dyn IoEngine>)
        };
        let engine = builder(&stored.store, 1, prediction).neuron_slots(512).warm(false).io_engine(make);
        let engine = engine.build().unwrap();
        let want = run(&engine, &tokens()).unwrap();
        let bytes = std::fs::read(&stored.store).unwrap();
        let file = std::fs::OpenOptions::new().write(true).open(&stored.store).unwrap();
        for len in [bytes.len() as u64 / 2, 4096] {
            file.set_len(len).unwrap();
            assert_changed(&run(&engine, &tokens()).unwrap_err());
        }
        io::Write::write_all(&mut &file, &bytes).unwrap();
        // The same bytes, but who can know that.
        assert_changed(&run(&engine, &tokens()).unwrap_err());
        assert_eq!(right(&stored.store, prediction, &tokens()), want);
    }
}

fn assert_changed(error: &EngineError) {
    let changed =
        matches!(error, EngineError::Gguf(GgufError::Changed { file }) if file.ends_with("store.gguf"));
    assert!(changed && error.to_string().contains("start again"), "{error}");
}

/// Engines that have some neurons in memory, all of them, or a map of the file.
fn engines(path: &Path, prediction: Prediction) -> [Engine; 3] {
    let some = builder(path, 1, prediction).neuron_slots(512).warm(false).build().unwrap();
    let mapped = builder(path, 1, Prediction::Off).mapped(true).build().unwrap();
    [some, builder(path, 1, prediction).build().unwrap(), mapped]
}

/// Runs some tokens, then lets `meddle` do something to the file, and runs the others.
fn run_and_meddle(
    engine: &Engine,
    meddle: impl FnOnce(),
) -> (Session, Vec<Vec<u32>>, Result<(), EngineError>) {
    let tokens = tokens();
    let mut session = session(engine);
    session.prefill(&tokens[..5]).unwrap();
    let mut rows = vec![bits(&session)];
    let (before, after) = tokens[5..].split_at(8);
    let mut decode = |session: &mut Session, token: &u32| {
        session.decode(*token)?;
        rows.push(bits(session));
        Ok(())
    };
    before.iter().try_for_each(|token| decode(&mut session, token)).unwrap();
    meddle();
    let result = after.iter().try_for_each(|token| decode(&mut session, token));
    (session, rows, result)
}

/// The same model with other weights: a file of the same size.
fn other_weights(toy: &Toy) -> Vec<u8> {
    std::fs::read(&stored(&Toy { seed: toy.seed + 1, ..toy.clone() }).store).unwrap()
}

#[test]
fn a_file_that_is_replaced_is_read_to_the_end() {
    for toy in [sparse(), experts()] {
        for index in 0..3 {
            let stored = stored(&toy);
            let engine = engines(&stored.store, Prediction::Model).into_iter().nth(index).unwrap();
            let prediction = if index == 2 { Prediction::Off } else { Prediction::Model };
            let want = right(&stored.store, prediction, &tokens());
            let (_, rows, result) = run_and_meddle(&engine, || {
                let other = stored.store.with_extension("other");
                std::fs::write(&other, other_weights(&toy)).unwrap();
                std::fs::rename(&other, &stored.store).unwrap();
            });
            result.unwrap();
            assert_eq!(rows, want, "engine {index}");
            // The other one is a model that gives other tokens.
            assert_ne!(right(&stored.store, prediction, &tokens()), want);
        }
    }
}

#[test]
fn a_file_that_is_overwritten_is_an_error_and_never_other_tokens() {
    for toy in [sparse(), experts()] {
        let other = other_weights(&toy);
        for prediction in [Prediction::Model, Prediction::Off] {
            for index in 0..3 {
                let stored = stored(&toy);
                let engine = engines(&stored.store, prediction).into_iter().nth(index).unwrap();
                let (mut session, rows, result) =
                    run_and_meddle(&engine, || overwrite(&stored.store, &other));
                assert_changed(&result.unwrap_err());
                // Nothing of the step is left: the eight tokens before it, and the logits after them.
                assert_eq!((rows.len(), session.tokens().len()), (9, 13));
                assert_eq!(bits(&session), rows[8]);
                assert_changed(&session.decode(1).unwrap_err());
                assert_changed(&super::session(&engine).prefill(&[1, 2, 3]).unwrap_err());
            }
        }
    }
}

/// Writes into the file as it lies there, when the clock of files has gone on.
fn overwrite(path: &Path, bytes: &[u8]) {
    std::thread::sleep(Duration::from_millis(20));
    let file = std::fs::OpenOptions::new().write(true).open(path).unwrap();
    assert_eq!(file.metadata().unwrap().len(), bytes.len() as u64);
    io::Write::write_all(&mut &file, bytes).unwrap();
}

/// Files of which the first is overwritten before a certain attempt to read.
struct Overwritten {
    files: Files,
    other: Vec<u8>,
    attempts: AtomicU64,
    at: AtomicU64,
}

impl ReadAt for Overwritten {
    fn files(&self) -> usize {
        self.files.files()
    }

    fn path(&self, file: usize) -> &Path {
        self.files.path(file)
    }

    fn read_at(&self, file: usize, out: &mut [u8], offset: u64) -> io::Result<usize> {
        if self.attempts.fetch_add(1, Ordering::SeqCst) == self.at.load(Ordering::SeqCst) {
            overwrite(self.path(file), &self.other);
        }
        self.files.read_at(file, out, offset)
    }

    fn size(&self, file: usize) -> io::Result<u64> {
        self.files.size(file)
    }

    fn alignment(&self) -> usize {
        1
    }

    fn direct(&self) -> bool {
        false
    }
}

#[test]
fn a_file_may_be_overwritten_before_any_read() {
    ends(|| {
        let toy = sparse();
        let other = other_weights(&toy);
        let tokens = &tokens()[..8];
        for prediction in [Prediction::Model, Prediction::Off] {
            let (mut nth, mut errors) = (0, 0);
            loop {
                let stored = stored(&toy);
                let want = right(&stored.store, prediction, tokens);
                let (tell, files) = channel();
                let other = other.clone();
                let engine = engine(&stored.store, prediction, 1, move |files| {
                    let (attempts, at) = (AtomicU64::new(0), AtomicU64::new(u64::MAX));
                    let files = Arc::new(Overwritten { files, other: other.clone(), attempts, at });
                    let _ = tell.send(files.clone());
                    files
                });
                let files = files.recv().unwrap();
                let at = files.attempts.load(Ordering::SeqCst) + nth;
                files.at.store(at, Ordering::SeqCst);
                let mut session = session(&engine);
                let mut rows = Vec::new();
                let mut result = session.prefill(&tokens[..5]);
                for token in &tokens[5..] {
                    if result.is_ok() {
                        rows.push(bits(&session));
                        result = session.decode(*token);
                    }
                }
                if result.is_ok() {
                    rows.push(bits(&session));
                }
                // What was given is right, and the rest is refused.
                assert_eq!(rows, want[..rows.len()], "{prediction:?}, read {nth}");
                match result {
                    Ok(()) => assert_eq!(rows.len(), want.len()),
                    Err(error) => {
                        errors += 1;
                        assert_changed(&error);
                    }
                }
                if files.attempts.load(Ordering::SeqCst) <= at {
                    break;
                }
                nth += 1 + nth / 4;
            }
            assert!(errors > 10, "{prediction:?}: {errors} errors of {nth} reads");
        }
    });
}

#[test]
fn a_check_after_some_tokens_comes_after_so_many() {
    let toy = sparse();
    let other = other_weights(&toy);
    let tokens = tokens();
    let stored = stored(&toy);
    let engine = builder(&stored.store, 1, Prediction::Model).verify_every(4).build().unwrap();
    let mut session = session(&engine);
    session.prefill(&tokens[..5]).unwrap();
    (5..11).for_each(|at| session.decode(tokens[at]).unwrap());
    overwrite(&stored.store, &other);
    // Two of four were gone.
    session.decode(tokens[11]).unwrap();
    assert_changed(&session.decode(tokens[12]).unwrap_err());

    // A generation is checked when it ends, a prompt when it is read.
    overwrite(&stored.store, &other);
    let engine = builder(&stored.store, 1, Prediction::Model).verify_every(1000).build().unwrap();
    let mut session = super::session(&engine);
    session.prefill(&tokens[..5]).unwrap();
    let options = GenerateOptions { max_tokens: Some(4), ignore_eos: true, ..GenerateOptions::default() };
    let mut pieces = 0;
    let result = session.generate(&options, &mut |_| {
        pieces += 1;
        if pieces == 2 {
            overwrite(&stored.store, &other);
        }
        ControlFlow::Continue(())
    });
    assert_changed(&result.unwrap_err());
    assert_eq!(pieces, 4);
    assert_changed(&session.prefill(&tokens[..5]).unwrap_err());
}
