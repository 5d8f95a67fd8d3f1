//! Calls from many threads: at once where the unit takes that, one after the other everywhere.

use std::sync::atomic::{AtomicUsize, Ordering};

use super::{Values, check_product, least, multiply, plain, prepared};
use crate::border::Border;
use crate::case::{Cases, Ended, Found, Stop, ensure};
use crate::sample::{Fill, Kind};
use crate::subject::{Sampled, Subject};

const THREADS: usize = 4;
const ROUNDS: usize = 12;

pub fn cases<'a, S: Subject>(subject: &'a S, cases: &mut Cases<'a>) {
    for kind in subject.kinds() {
        cases.add(format!("threads/one-after-the-other/{}", kind.name()), move || in_turn(subject, kind));
        cases.add(format!("threads/one-weight/{}", kind.name()), move || one_weight(subject, kind));
        cases.add(format!("threads/own-weights/{}", kind.name()), move || own_weights(subject, kind));
    }
}

pub fn of_plugin<'a>(border: &'a Border, cases: &mut Cases<'a>) {
    for kind in border.kinds() {
        let id = format!("threads/two-devices/{}", kind.name());
        cases.add(id, move || two_devices(border, kind));
    }
}

fn parallel<S: Subject>(subject: &S) -> Result<(), Stop> {
    match subject.is_parallel() {
        true => Ok(()),
        false => Err(Stop::Unsupported("the unit takes one call at a time".into())),
    }
}

/// A result of another thread.
fn joined<T>(handle: std::thread::ScopedJoinHandle<'_, Result<T, Stop>>) -> Result<T, Stop> {
    handle.join().unwrap_or_else(|_| Err(Stop::wrong("a thread of the test panicked")))
}

/// A weight that one thread makes, others use in turn.
fn in_turn<S: Subject>(subject: &S, kind: Kind) -> Ended {
    let made = std::thread::scope(|scope| {
        joined(scope.spawn(|| prepared(subject, kind, plain(kind), (Fill::Random, 1))))
    })?;
    let mut found = Found::default();
    for seed in 0..THREADS as u64 {
        let run = || check_product(subject, kind, (&made.0, &made.1), least(subject), seed);
        found = std::thread::scope(|scope| joined(scope.spawn(run)))?;
    }
    Ok(found)
}

/// One weight, used by all threads at once.
fn one_weight<S: Subject>(subject: &S, kind: Kind) -> Ended {
    parallel(subject)?;
    let tokens = least(subject);
    let (weight, sample) = prepared(subject, kind, plain(kind), (Fill::Random, 1))?;
    let found = check_product(subject, kind, (&weight, &sample), tokens, 9)?;
    let x = Values::Random.input(tokens, sample.elements().cols, 9);
    let want = multiply(subject, &[&weight], &x, tokens)?;
    let differ = AtomicUsize::new(0);
    let run = || {
        for _ in 0..ROUNDS {
            if multiply(subject, &[&weight], &x, tokens)? != want {
                differ.fetch_add(1, Ordering::Relaxed);
            }
        }
        Ok(())
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..THREADS).map(|_| scope.spawn(run)).collect();
        threads.into_iter().try_for_each(joined)
    })?;
    let differ = differ.into_inner();
    ensure(differ == 0, || {
        format!("{differ} of {} products at once differ from one alone", THREADS * ROUNDS)
    })?;
    Ok(found)
}

/// Threads that make and give back weights of their own while others multiply.
fn own_weights<S: Subject>(subject: &S, kind: Kind) -> Ended {
    parallel(subject)?;
    let run = |thread: u64| {
        let mut found = Found::default();
        for round in 0..4 {
            let seed = thread * 100 + round;
            let (weight, sample) = prepared(subject, kind, plain(kind), (Fill::Random, seed))?;
            found = check_product(subject, kind, (&weight, &sample), least(subject), seed)?;
        }
        Ok(found)
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..THREADS as u64).map(|thread| scope.spawn(move || run(thread))).collect();
        let mut found = Found::default();
        for thread in threads {
            found = joined(thread)?;
        }
        Ok(found)
    })
}

/// Two devices of one unit, each with a thread of its own.
fn two_devices(border: &Border, kind: Kind) -> Ended {
    super::ask_matmul(border, kind, plain(kind), least(border))?;
    let other = border.library.open(0).map_err(|failure| Stop::failed("opening the unit again", &failure))?;
    let run = |border: &Border| {
        let mut found = Found::default();
        for seed in 0..6 {
            let (weight, sample) = prepared(border, kind, plain(kind), (Fill::Random, seed))?;
            found = check_product(border, kind, (&weight, &sample), least(border), seed)?;
        }
        Ok(found)
    };
    std::thread::scope(|scope| {
        let threads = [scope.spawn(|| run(border)), scope.spawn(|| run(&other))];
        let [first, second] = threads.map(joined);
        first.and(second)
    })
}
