//! Storage that fails: the same tokens, or an error that says what and where. Never other tokens, never a hang.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

use neuropil::io::{Done, Faults, Faulty, Files, IoEngine, IoInfo, IoWaker, Read, ReadAt, Sim};
use neuropil::predict::Prediction;
use neuropil::{Engine, EngineError};

use super::{builder, experts, sparse, stored, tokens};

/// What the system says of a bad disk.
const EIO: i32 = 5;
/// Slots of the cache: fewer than a token needs.
const SLOTS: usize = 600;

/// A test that hangs has failed.
pub(super) fn ends(test: impl FnOnce() + Send + 'static) {
    let (done, wait) = channel();
    let thread = std::thread::spawn(move || {
        test();
        drop(done);
    });
    let ended: Result<(), _> = wait.recv_timeout(Duration::from_secs(100));
    assert_eq!(ended, Err(RecvTimeoutError::Disconnected), "a run hangs");
    if let Err(panic) = thread.join() {
        std::panic::resume_unwind(panic);
    }
}

/// The bits of the logits after a short prompt and after each of the other tokens.
pub(super) fn run(engine: &Engine, tokens: &[u32]) -> Result<Vec<Vec<u32>>, EngineError> {
    super::run_after(5, engine, tokens)
}

/// What a run gives when all is in memory.
pub(super) fn right(path: &Path, prediction: Prediction, tokens: &[u32]) -> Vec<Vec<u32>> {
    run(&builder(path, 1, prediction).build().unwrap(), tokens).unwrap()
}

/// An engine whose reads go through what `wrap` makes of the files.
pub(super) fn engine<R: ReadAt + 'static>(
    path: &Path,
    prediction: Prediction,
    seed: u64,
    wrap: impl Fn(Files) -> Arc<R> + Send + Sync + 'static,
) -> Engine {
    let make = move |paths: &[&Path]| {
        let files = wrap(Files::open_buffered(paths)?);
        Ok(Box::new(Sim::new(files, seed)?) as Box<dyn IoEngine>)
    };
    builder(path, 1, prediction).neuron_slots(SLOTS).warm(false).io_engine(make).build().unwrap()
}

fn faulty(path: &Path, prediction: Prediction, faults: Faults) -> Engine {
    engine(path, prediction, faults.seed, move |files| Arc::new(Faulty::new(files, faults.clone())))
}

fn assert_names_the_file(error: &EngineError) {
    let error = error.to_string();
    assert!(error.contains("store.gguf") && error.contains("bytes at"), "{error}");
}

#[test]
fn faults_that_pass_give_the_same_tokens() {
    ends(|| {
        for toy in [sparse(), experts()] {
            let stored = stored(&toy);
            let tokens = &tokens()[..9];
            for prediction in [Prediction::Model, Prediction::Off] {
                let want = right(&stored.store, prediction, tokens);
                for seed in 0..35 {
                    let faults = Faults { seed, short: 0.3, eintr: 0.2, eagain: 0.1, ..Faults::default() };
                    let engine = faulty(&stored.store, prediction, faults);
                    assert_eq!(run(&engine, tokens).unwrap(), want, "{prediction:?}, seed {seed}");
                }
            }
        }
    });
}

#[test]
fn a_bad_disk_gives_the_same_tokens_or_an_error() {
    ends(|| {
        for (toy, seeds) in [(sparse(), 45), (experts(), 24)] {
            let stored = stored(&toy);
            let tokens = &tokens()[..9];
            for prediction in [Prediction::Model, Prediction::Gate, Prediction::Off] {
                let want = right(&stored.store, prediction, tokens);
                let (mut failed, mut passed) = (0, 0);
                for seed in 0..seeds {
                    let eio = [0.0003, 0.01, 0.3][seed as usize % 3];
                    let lasting = seed % 2 == 0;
                    let faults = Faults { seed, short: 0.1, eintr: 0.05, eio, lasting, ..Faults::default() };
                    let engine = faulty(&stored.store, prediction, faults);
                    // What failed once may be asked for again.
                    for _ in 0..2 {
                        match run(&engine, tokens) {
                            Ok(got) => {
                                passed += 1;
                                assert_eq!(got, want, "{prediction:?}, seed {seed}");
                            }
                            Err(error) => {
                                failed += 1;
                                assert_names_the_file(&error);
                            }
                        }
                    }
                }
                assert!(failed > 5 && passed > 5, "{prediction:?}: {failed} failed, {passed} passed");
            }
        }
    });
}

/// Files of which attempts with some numbers fail as on a bad disk.
struct Window {
    files: Files,
    attempts: AtomicU64,
    from: AtomicU64,
    to: AtomicU64,
}

impl Window {
    fn new(files: Files) -> Window {
        let zero = || AtomicU64::new(0);
        Window { files, attempts: zero(), from: zero(), to: zero() }
    }

    /// Lets attempt `nth` from now on fail, and the one after it, by which it is tried again.
    fn fail(&self, nth: u64) -> u64 {
        let from = self.attempts.load(Ordering::SeqCst) + nth;
        self.from.store(from, Ordering::SeqCst);
        self.to.store(from + 2, Ordering::SeqCst);
        from
    }
}

impl ReadAt for Window {
    fn files(&self) -> usize {
        self.files.files()
    }

    fn path(&self, file: usize) -> &Path {
        self.files.path(file)
    }

    fn read_at(&self, file: usize, out: &mut [u8], offset: u64) -> io::Result<usize> {
        let attempt = self.attempts.fetch_add(1, Ordering::SeqCst);
        if (self.from.load(Ordering::SeqCst)..self.to.load(Ordering::SeqCst)).contains(&attempt) {
            return Err(io::Error::from_raw_os_error(EIO));
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

/// An engine, and what its reads go through.
fn windowed(path: &Path, prediction: Prediction) -> (Engine, Arc<Window>) {
    let (tell, window) = channel();
    let engine = engine(path, prediction, 1, move |files| {
        let window = Arc::new(Window::new(files));
        let _ = tell.send(window.clone());
        window
    });
    (engine, window.recv().unwrap())
}

#[test]
fn every_read_may_be_the_one_that_fails() {
    ends(|| {
        for toy in [sparse(), experts()] {
            let stored = stored(&toy);
            let tokens = &tokens()[..6];
            for prediction in [Prediction::Model, Prediction::Gate, Prediction::Off] {
                let want = right(&stored.store, prediction, tokens);
                let (engine, window) = windowed(&stored.store, prediction);
                let (mut nth, mut errors) = (0, 0);
                loop {
                    let failing = window.fail(nth);
                    match run(&engine, tokens) {
                        Err(error) => {
                            errors += 1;
                            assert_names_the_file(&error);
                        }
                        // Nobody waited for that read, or there was none.
                        Ok(got) => assert_eq!(got, want, "{prediction:?}, read {nth}"),
                    }
                    let over = window.attempts.load(Ordering::SeqCst) < failing + 2;
                    // After the fault the same engine serves as if nothing had happened.
                    window.to.store(0, Ordering::SeqCst);
                    assert_eq!(run(&engine, tokens).unwrap(), want, "{prediction:?}, after read {nth}");
                    if over {
                        break;
                    }
                    // Every read of one model; of the others the first ones, and then fewer and fewer.
                    let all = toy.experts.is_none() && prediction == Prediction::Model;
                    nth += if all { 1 } else { 1 + nth / 8 };
                }
                assert!(nth > 10 && errors > 0, "{prediction:?}: {nth} reads, {errors} errors");
            }
        }
    });
}

#[test]
fn sessions_of_several_threads_all_end_on_a_bad_disk() {
    ends(|| {
        for toy in [sparse(), experts()] {
            let stored = stored(&toy);
            let tokens = &tokens()[..8];
            for prediction in [Prediction::Model, Prediction::Off] {
                let want = right(&stored.store, prediction, tokens);
                for seed in 0..12 {
                    let eio = [0.002, 0.05][seed as usize % 2];
                    let faults = Faults { seed, eio, lasting: seed % 4 < 2, ..Faults::default() };
                    let engine = faulty(&stored.store, prediction, faults);
                    std::thread::scope(|scope| {
                        for _ in 0..3 {
                            scope.spawn(|| {
                                for _ in 0..2 {
                                    match run(&engine, tokens) {
                                        Ok(got) => assert_eq!(got, want, "{prediction:?}, seed {seed}"),
                                        Err(error) => assert_names_the_file(&error),
                                    }
                                }
                            });
                        }
                    });
                }
            }
        }
    });
}

/// An engine that after some reads gives no targets back any more, as one whose kernel has failed, or panics.
struct Lost {
    inner: Sim,
    left: usize,
    panics: bool,
}

impl IoEngine for Lost {
    fn info(&self) -> &IoInfo {
        self.inner.info()
    }

    fn submit(&mut self, reads: &mut Vec<Read>) {
        self.inner.submit(reads);
    }

    fn reap(&mut self, wait: bool, done: &mut Vec<Done>) {
        let before = done.len();
        self.inner.reap(wait, done);
        for done in &mut done[before..] {
            if self.left > 0 {
                self.left -= 1;
                continue;
            }
            assert!(!self.panics, "an engine with a fault, on purpose");
            std::mem::forget(std::mem::take(&mut done.targets));
            let reason = "it is lost".into();
            done.result = Err(neuropil::io::IoError::Unavailable { engine: "uring", reason });
        }
    }

    fn waker(&self) -> IoWaker {
        self.inner.waker()
    }
}

#[test]
fn an_engine_that_is_lost_ends_all_runs_with_an_error() {
    ends(|| {
        let stored = stored(&sparse());
        let tokens = tokens();
        for prediction in [Prediction::Model, Prediction::Off] {
            for (left, panics) in [(0, false), (9, false), (60, false), (0, true), (60, true)] {
                let make = move |paths: &[&Path]| {
                    let inner = Sim::new(Arc::new(Files::open_buffered(paths)?), 3)?;
                    Ok(Box::new(Lost { inner, left, panics }) as Box<dyn IoEngine>)
                };
                let engine = builder(&stored.store, 1, prediction).neuron_slots(SLOTS).warm(false);
                let engine = engine.io_engine(make).build().unwrap();
                std::thread::scope(|scope| {
                    for _ in 0..3 {
                        scope.spawn(|| assert!(run(&engine, &tokens).is_err()));
                    }
                });
                let error = run(&engine, &tokens).unwrap_err().to_string();
                assert!(panics || error.contains("it is lost"), "{error}");
            }
        }
    });
}
