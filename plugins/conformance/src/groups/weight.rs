//! Weights: matrices with codes of every sort, blocks, and weights that come and go.

use super::{ask_matmul, check_product, least, plain, prepared};
use crate::case::{Cases, Ended, Found, Stop, ensure, worse};
use crate::sample::{Fill, Kind};
use crate::subject::{Op, Question, Subject};
use neuropil_device::{ActivationKind, Stage};

pub fn cases<'a, S: Subject>(subject: &'a S, cases: &mut Cases<'a>) {
    for kind in subject.kinds() {
        for (fill, name) in Fill::ALL {
            let id = format!("weight/filled/{}/{name}", kind.name());
            cases.add(id, move || {
                let (weight, sample) = prepared(subject, kind, plain(kind), (fill, 4))?;
                check_product(subject, kind, (&weight, &sample), least(subject), 1)
            });
        }
        cases.add(format!("weight/remade/{}", kind.name()), move || remade(subject, kind));
        cases.add(format!("weight/side-by-side/{}", kind.name()), move || side_by_side(subject, kind));
        cases.add(format!("weight/given-back-out-of-order/{}", kind.name()), move || {
            out_of_order(subject, kind)
        });
        cases.add(format!("weight/source-is-gone/{}", kind.name()), move || source_is_gone(subject, kind));
        cases.add(format!("weight/block/{}", kind.name()), move || block(subject, kind));
    }
}

/// A weight that takes the place of one that was given back is its own.
fn remade<S: Subject>(subject: &S, kind: Kind) -> Ended {
    let mut all = Found::default();
    for seed in 1..=4 {
        let (weight, sample) = prepared(subject, kind, plain(kind), (Fill::Random, seed))?;
        all = worse(all, check_product(subject, kind, (&weight, &sample), least(subject), seed)?);
    }
    Ok(all)
}

/// Weights that live together do not disturb each other.
fn side_by_side<S: Subject>(subject: &S, kind: Kind) -> Ended {
    let (rows, cols) = plain(kind);
    let mut weights = Vec::new();
    for seed in 0..5 {
        weights.push(prepared(subject, kind, (rows + seed, cols), (Fill::Random, 20 + seed as u64))?);
    }
    let mut all = Found::default();
    for (weight, sample) in &weights {
        all = worse(all, check_product(subject, kind, (weight, sample), least(subject), 2)?);
    }
    Ok(all)
}

/// Nor does it matter in which order they go.
fn out_of_order<S: Subject>(subject: &S, kind: Kind) -> Ended {
    let shape = plain(kind);
    let first = prepared(subject, kind, shape, (Fill::Random, 1))?;
    let second = prepared(subject, kind, shape, (Fill::Random, 2))?;
    let third = prepared(subject, kind, shape, (Fill::Random, 3))?;
    drop(second);
    let found = check_product(subject, kind, (&first.0, &first.1), least(subject), 3)?;
    drop(first);
    let fourth = prepared(subject, kind, shape, (Fill::Random, 4))?;
    let found = worse(found, check_product(subject, kind, (&third.0, &third.1), least(subject), 4)?);
    drop(third);
    Ok(worse(found, check_product(subject, kind, (&fourth.0, &fourth.1), least(subject), 5)?))
}

/// The bytes that a weight was made of may go.
fn source_is_gone<S: Subject>(subject: &S, kind: Kind) -> Ended {
    let shape = plain(kind);
    ask_matmul(subject, kind, shape, least(subject))?;
    let weight = {
        let sample = subject.sample(kind, shape, Fill::Random, 30);
        subject.prepare(&[&sample]).map_err(|failure| Stop::failed("prepare", &failure))?
    };
    // Others take their place in memory.
    let other: Vec<S::Sample> = (0..4).map(|seed| subject.sample(kind, shape, Fill::Least, seed)).collect();
    let sample = subject.sample(kind, shape, Fill::Random, 30);
    let found = check_product(subject, kind, (&weight, &sample), least(subject), 6);
    ensure(other.len() == 4, String::new)?;
    found
}

/// A block of neurons that is never used.
fn block<S: Subject>(subject: &S, kind: Kind) -> Ended {
    let side = kind.granularity().max(32);
    let (rows, cols) = (side, side);
    let op = Op::Cluster(Stage::Fused, ActivationKind::Silu, kind);
    let question = Question { op, kind, rows, cols, tokens: least(subject) };
    subject.ask(&question).map_err(Stop::answer)?;
    for seed in 0..3 {
        let sample = |shape, seed| subject.sample(kind, shape, Fill::Random, seed);
        let (gate, up) = (sample((rows, cols), seed), sample((rows, cols), seed + 10));
        let down = sample((cols, rows), seed + 20);
        subject.prepare(&[&gate, &up, &down]).map_err(|failure| Stop::failed("prepare", &failure))?;
    }
    Ok(Found::default())
}
