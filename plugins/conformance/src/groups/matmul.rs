//! Products: every kind of weight, odd shapes, every token count, inputs of every sort; and several products of a job.

use std::rc::Rc;

use super::{Shared, Values, multiply, plain, prepared, product_of, shapes, tokens};
use crate::bounds;
use crate::case::{Cases, Found, Stop, compare, ensure, worse};
use crate::sample::{Fill, Kind};
use crate::subject::{Sampled, Subject};

pub fn cases<'a, S: Subject>(subject: &'a S, cases: &mut Cases<'a>) {
    for kind in subject.kinds() {
        for shape in shapes(kind) {
            products(subject, kind, *shape, cases);
        }
    }
    let kinds = subject.kinds();
    for kind in kinds.iter().copied() {
        for count in 2..=4 {
            for tokens in tokens(subject).into_iter().take(2) {
                let id = format!("matmul/products/{}/{count}-products/t{tokens}", kind.name());
                cases.add(id, move || several(subject, &vec![kind; count], tokens));
            }
        }
        let id = format!("matmul/one-weight-twice/{}", kind.name());
        cases.add(id, move || twice(subject, kind));
    }
    for (index, first) in kinds.iter().enumerate() {
        for second in &kinds[index + 1..] {
            // Types of model files are too many for all pairs.
            if matches!(first, Kind::Type(_)) && index % 4 != 0 {
                continue;
            }
            let (first, second) = (*first, *second);
            let id = format!("matmul/mixed/{}/{}", first.name(), second.name());
            cases.add(id, move || several(subject, &[first, second], super::least(subject)));
        }
    }
}

fn products<'a, S: Subject>(subject: &'a S, kind: Kind, shape: (usize, usize), cases: &mut Cases<'a>) {
    let shared = Rc::new(Shared::new(subject, kind, shape));
    let (rows, cols) = shape;
    for tokens in tokens(subject) {
        for (values, name) in Values::ALL {
            let shared = shared.clone();
            let id = format!("matmul/product/{}/{rows}x{cols}/t{tokens}/{name}", kind.name());
            cases.add(id, move || {
                let (weight, sample) = shared.get(tokens)?;
                let x = values.input(tokens, cols, 3);
                let found = multiply(subject, &[weight], &x, tokens)?;
                let found = found.first().map_or(&[][..], |y| y);
                compare(&product_of(sample, &x), found, bounds::product(kind))
            });
        }
    }
}

/// One input and several weights of the same columns and different rows.
fn several<S: Subject>(subject: &S, kinds: &[Kind], tokens: usize) -> Result<Found, Stop> {
    let cols = kinds.iter().map(|kind| plain(*kind).1).max().unwrap_or(64);
    let mut weights = Vec::new();
    for (index, kind) in kinds.iter().enumerate() {
        let shape = (40 - 9 * index, cols);
        super::ask_matmul(subject, *kind, shape, tokens)?;
        weights.push(prepared(subject, *kind, shape, (Fill::Random, 10 + index as u64))?);
    }
    let x = Values::Random.input(tokens, cols, 5);
    let handles: Vec<&S::Weight<'_>> = weights.iter().map(|(weight, _)| weight).collect();
    let found = multiply(subject, &handles, &x, tokens)?;
    ensure(found.len() == kinds.len(), || format!("there are {} outputs", found.len()))?;
    let mut all = Found::default();
    for ((found, (_, sample)), kind) in found.iter().zip(&weights).zip(kinds) {
        all = worse(all, compare(&product_of(sample, &x), found, bounds::product(*kind))?);
    }
    Ok(all)
}

/// One weight for two outputs of a job.
fn twice<S: Subject>(subject: &S, kind: Kind) -> Result<Found, Stop> {
    let tokens = super::least(subject);
    let (weight, sample) = prepared(subject, kind, plain(kind), (Fill::Random, 2))?;
    let x = Values::Random.input(tokens, sample.elements().cols, 6);
    let want = product_of(&sample, &x);
    let mut all = Found::default();
    for found in multiply(subject, &[&weight, &weight], &x, tokens)? {
        all = worse(all, compare(&want, &found, bounds::product(kind))?);
    }
    Ok(all)
}
