//! The same again and again: equal bits, and no more memory.

use super::{Values, check_product, least, multiply, plain, prepared, product_of, tokens};
use crate::border::Border;
use crate::bounds;
use crate::case::{Cases, Ended, Found, Stop, compare, ensure};
use crate::sample::{Fill, Kind};
use crate::subject::{Sampled, Subject};

const RUNS: usize = 60;
const WEIGHTS: usize = 60;
const OPENINGS: usize = 12;

/// Bytes that a process may grow by while weights of far more come and go.
const GROWTH: usize = 24 << 20;

pub fn cases<'a, S: Subject>(subject: &'a S, cases: &mut Cases<'a>) {
    for kind in subject.kinds() {
        cases.add(format!("soak/equal-bits/{}", kind.name()), move || equal_bits(subject, kind));
        cases.add(format!("soak/token-counts/{}", kind.name()), move || token_counts(subject, kind));
        cases.add(format!("soak/come-and-go/{}", kind.name()), move || come_and_go(subject, kind));
        cases.add(format!("soak/memory/{}", kind.name()), move || memory(subject, kind));
    }
}

pub fn of_plugin<'a>(border: &'a Border, cases: &mut Cases<'a>) {
    cases.add("soak/open-and-close".into(), move || {
        let kind = super::errors::offered(border)?;
        let mut found = Found::default();
        for round in 0..OPENINGS as u64 {
            let other = border.library.open(0).map_err(|failure| Stop::failed("open", &failure))?;
            let (weight, sample) = prepared(&other, kind, plain(kind), (Fill::Random, round))?;
            found = check_product(&other, kind, (&weight, &sample), least(&other), round)?;
        }
        Ok(found)
    });
}

/// One product many times.
fn equal_bits<S: Subject>(subject: &S, kind: Kind) -> Ended {
    let (weight, sample) = prepared(subject, kind, plain(kind), (Fill::Random, 1))?;
    let tokens = least(subject);
    let found = check_product(subject, kind, (&weight, &sample), tokens, 3)?;
    let x = Values::Random.input(tokens, sample.elements().cols, 3);
    let first = multiply(subject, &[&weight], &x, tokens)?;
    let bits = |outputs: &[Vec<f32>]| outputs.iter().flatten().map(|y| y.to_bits()).collect::<Vec<_>>();
    let want = bits(&first);
    for run in 1..RUNS {
        let again = bits(&multiply(subject, &[&weight], &x, tokens)?);
        ensure(again == want, || format!("run {run} of the same product has other bits than the first"))?;
    }
    Ok(found)
}

/// One weight with token counts in turn.
fn token_counts<S: Subject>(subject: &S, kind: Kind) -> Ended {
    let (weight, sample) = prepared(subject, kind, plain(kind), (Fill::Random, 1))?;
    let mut found = Found::default();
    for round in 0..6 {
        for tokens in tokens(subject) {
            let x = Values::Random.input(tokens, sample.elements().cols, round);
            let y = multiply(subject, &[&weight], &x, tokens)?;
            let y = y.first().map_or(&[][..], |y| y);
            found = compare(&product_of(&sample, &x), y, bounds::product(kind))?;
        }
    }
    Ok(found)
}

/// Many weights, one after the other.
fn come_and_go<S: Subject>(subject: &S, kind: Kind) -> Ended {
    let mut found = Found::default();
    let (rows, cols) = plain(kind);
    for round in 0..WEIGHTS {
        let shape = (rows / 2 + round % 20, cols);
        let (weight, sample) = prepared(subject, kind, shape, (Fill::Random, round as u64))?;
        if round % 10 == 0 {
            found = check_product(subject, kind, (&weight, &sample), least(subject), 3)?;
        }
    }
    Ok(found)
}

/// Weights of 64 MiB of F32 in all, given back at once: the process may not grow by as much.
fn memory<S: Subject>(subject: &S, kind: Kind) -> Ended {
    let shape = (512, 512);
    super::ask_matmul(subject, kind, shape, least(subject))?;
    let sample = subject.sample(kind, shape, Fill::Rising, 1);
    let round = || match subject.prepare(&[&sample]) {
        Ok(_) => Ok(()),
        Err(failure) => Err(Stop::failed("prepare", &failure)),
    };
    (0..4).try_for_each(|_| round())?;
    let before = resident();
    (0..64).try_for_each(|_| round())?;
    let grown = resident().saturating_sub(before);
    ensure(grown <= GROWTH, || {
        format!("the process grew by {} MiB while 64 weights were prepared and given back", grown >> 20)
    })?;
    Ok(Found::default())
}

/// Resident bytes of this process; 0 where the system does not tell.
fn resident() -> usize {
    let text = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    text.split(' ').nth(1).and_then(|pages| pages.parse::<usize>().ok()).unwrap_or(0) * 4096
}
