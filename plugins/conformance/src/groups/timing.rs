//! How long things take. Nothing here fails because it is slow.

use std::time::{Duration, Instant};

use super::{Values, ask_matmul, least, multiply, plain, prepared, product_of, tokens};
use crate::border::Border;
use crate::bounds;
use crate::case::{Cases, Ended, Found, Stop, compare, ensure, median_ns};
use crate::raw::{Failure, Weight};
use crate::sample::{Fill, Kind, Sample};
use crate::subject::Subject;
use neuropil_plugin_abi as abi;

const RUNS: usize = 5;

/// How far past its deadline a job may end: far more than any job here takes.
const LATE: Duration = Duration::from_secs(10);

pub fn cases<'a, S: Subject>(subject: &'a S, cases: &mut Cases<'a>) {
    for kind in subject.kinds() {
        let shape = if kind.granularity() > 64 { (64, 512) } else { (128, 256) };
        let (rows, cols) = shape;
        for tokens in tokens(subject).into_iter().take(2) {
            let id = format!("timing/matmul/{}/{rows}x{cols}/t{tokens}", kind.name());
            cases.add(id, move || {
                ask_matmul(subject, kind, shape, tokens)?;
                let (weight, _) = prepared(subject, kind, shape, (Fill::Random, 1))?;
                let x = Values::Random.input(tokens, cols, 1);
                let ns = median_ns(RUNS, || multiply(subject, &[&weight], &x, tokens).map(drop))?;
                Ok(Found { error: None, ns: Some(ns) })
            });
        }
        let id = format!("timing/prepare/{}/{rows}x{cols}", kind.name());
        cases.add(id, move || {
            ask_matmul(subject, kind, shape, least(subject))?;
            let sample = subject.sample(kind, shape, Fill::Random, 1);
            let prepare = || match subject.prepare(&[&sample]) {
                Ok(_) => Ok(()),
                Err(failure) => Err(Stop::failed("prepare", &failure)),
            };
            Ok(Found { error: None, ns: Some(median_ns(RUNS, prepare)?) })
        });
    }
}

pub fn of_plugin<'a>(border: &'a Border, cases: &mut Cases<'a>) {
    for kind in border.kinds() {
        for (name, deadline) in [("a-nanosecond", 1), ("a-millisecond", 1_000_000), ("an-hour", HOUR)] {
            let id = format!("timing/deadline/{}/{name}", kind.name());
            cases.add(id, move || deadline_case(border, kind, deadline));
        }
    }
}

const HOUR: u64 = 3600 * 1_000_000_000;

/// A job with a deadline is right, or ends with `NP_TIMEOUT` soon after it; afterwards the unit works.
fn deadline_case(border: &Border, kind: Kind, deadline: u64) -> Ended {
    let tokens = tokens(border).last().copied().unwrap_or(1);
    let shape = plain(kind);
    ask_matmul(border, kind, shape, tokens)?;
    let (weight, sample) = prepared(border, kind, shape, (Fill::Random, 1))?;
    let x = Values::Random.input(tokens, shape.1, 1);
    let start = Instant::now();
    let found = border.device.matmul_within(&[&weight], &x, tokens, deadline);
    let took = start.elapsed();
    let late = took.saturating_sub(Duration::from_nanos(deadline));
    ensure(late <= LATE, || format!("a job with a deadline of {deadline} ns took {took:?}"))?;
    match timed(found, deadline)? {
        Some(found) => right(kind, &sample, &x, &found)?,
        None => Found::default(),
    };
    let after = multiply(border, &[&weight as &Weight<'_>], &x, tokens)?;
    right(kind, &sample, &x, &after)
}

/// What a job left, or nothing where it was too late.
fn timed(found: Result<Vec<Vec<f32>>, Failure>, deadline: u64) -> Result<Option<Vec<Vec<f32>>>, Stop> {
    match found {
        Ok(found) => Ok(Some(found)),
        Err(failure) if failure.code == abi::NP_TIMEOUT && deadline < HOUR => Ok(None),
        Err(failure) => Err(Stop::failed("matmul", &failure)),
    }
}

fn right(kind: Kind, sample: &Sample, x: &[f32], found: &[Vec<f32>]) -> Ended {
    let found = found.first().map_or(&[][..], |y| y);
    compare(&product_of(sample, x), found, bounds::product(kind))
}
