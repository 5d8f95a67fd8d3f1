//! Jobs that are submitted: each end is told once, with the right outputs, whatever else is under way.

use neuropil_device::{ActivationKind, Stage};
use neuropil_plugin_abi as abi;

use super::{Values, least, plain, prepared, product_of, tokens};
use crate::border::{Border, cluster_job};
use crate::bounds;
use crate::case::{Cases, Ended, Found, Stop, compare, worse};
use crate::raw::{BREACH, Failure, Submitted, Weight};
use crate::reference::{Step, feed_forward, widen};
use crate::sample::{Fill, Kind, Sample};
use crate::subject::{Op, Question, Sampled, Stroke, Subject};

pub fn cases<'a>(border: &'a Border, cases: &mut Cases<'a>) {
    for kind in border.kinds() {
        let scheme = kind.name();
        for count in [1, 2, 8, 32] {
            cases.add(format!("completion/matmul/{scheme}/{count}-jobs"), move || jobs(border, kind, count));
        }
        for count in [2, 4] {
            let id = format!("completion/products/{scheme}/{count}-products");
            cases.add(id, move || products(border, kind, count));
        }
        cases.add(format!("completion/token-counts/{scheme}"), move || token_counts(border, kind));
        cases.add(format!("completion/bad-job/{scheme}"), move || bad_job(border, kind));
        cases.add(format!("completion/deadline/{scheme}"), move || deadline(border, kind));
        cases.add(format!("completion/cancel/{scheme}"), move || cancel(border, kind));
        cases.add(format!("completion/beside-calls/{scheme}"), move || beside_calls(border, kind));
        for stage in [Stage::GateUp, Stage::Fused] {
            let id = format!("completion/cluster/{scheme}/{}", stage.name());
            cases.add(id, move || clusters(border, kind, stage));
        }
    }
    cases.add("completion/cancel-of-nothing".into(), move || {
        if !border.device.cancel() {
            return Err(Stop::Unsupported("the plugin does not offer cancel".into()));
        }
        let kind = super::errors::offered(border)?;
        let (weight, sample) = prepared(border, kind, plain(kind), (Fill::Random, 1))?;
        // What comes after a cancel is not cancelled.
        super::check_product(border, kind, (&weight, &sample), least(border), 1)
    });
}

fn offered(border: &Border, clusters: bool) -> Result<(), Stop> {
    match border.device.has_submit(clusters) {
        true => Ok(()),
        false => Err(Stop::Unsupported("the plugin does not take jobs by submission".into())),
    }
}

fn submitted(result: Result<Submitted, Failure>) -> Result<Submitted, Stop> {
    result.map_err(|failure| Stop::failed("submit", &failure))
}

/// Waits, and compares one output.
fn right(job: Submitted, kind: Kind, sample: &Sample, x: &[f32]) -> Ended {
    let found = job.wait().map_err(|failure| Stop::failed("the job", &failure))?;
    let found = found.first().map_or(&[][..], |y| y);
    compare(&product_of(sample, x), found, bounds::product(kind))
}

/// Jobs under way at once.
fn jobs(border: &Border, kind: Kind, count: u64) -> Ended {
    offered(border, false)?;
    let (weight, sample) = prepared(border, kind, plain(kind), (Fill::Random, 1))?;
    let tokens = least(border);
    let inputs: Vec<Vec<f32>> =
        (0..count).map(|seed| Values::Random.input(tokens, sample.cols, seed)).collect();
    let submit = |x: &Vec<f32>| submitted(border.device.submit_matmul(&[&weight], x, tokens, 0));
    let under_way = inputs.iter().map(submit).collect::<Result<Vec<_>, _>>()?;
    let mut found = Found::default();
    for (job, x) in under_way.into_iter().zip(&inputs) {
        found = worse(found, right(job, kind, &sample, x)?);
    }
    Ok(found)
}

fn products(border: &Border, kind: Kind, count: usize) -> Ended {
    offered(border, false)?;
    let (rows, cols) = plain(kind);
    let mut made = Vec::new();
    for index in 0..count {
        made.push(prepared(border, kind, (rows - 7 * index, cols), (Fill::Random, index as u64))?);
    }
    let tokens = least(border);
    let x = Values::Random.input(tokens, cols, 1);
    let weights: Vec<&Weight<'_>> = made.iter().map(|(weight, _)| weight).collect();
    let job = submitted(border.device.submit_matmul(&weights, &x, tokens, 0))?;
    let outputs = job.wait().map_err(|failure| Stop::failed("the job", &failure))?;
    let mut found = Found::default();
    for (y, (_, sample)) in outputs.iter().zip(&made) {
        found = worse(found, compare(&product_of(sample, &x), y, bounds::product(kind))?);
    }
    Ok(found)
}

fn token_counts(border: &Border, kind: Kind) -> Ended {
    offered(border, false)?;
    let (weight, sample) = prepared(border, kind, plain(kind), (Fill::Random, 1))?;
    let mut under_way = Vec::new();
    for tokens in tokens(border) {
        let x = Values::Random.input(tokens, sample.cols, 1);
        under_way.push((submitted(border.device.submit_matmul(&[&weight], &x, tokens, 0))?, x));
    }
    let mut found = Found::default();
    for (job, x) in under_way {
        found = worse(found, right(job, kind, &sample, &x)?);
    }
    Ok(found)
}

/// A job that cannot be is refused at once, or its end is told as an error; jobs beside it are right.
fn bad_job(border: &Border, kind: Kind) -> Ended {
    offered(border, false)?;
    let (weight, sample) = prepared(border, kind, plain(kind), (Fill::Random, 1))?;
    let tokens = least(border);
    let x = Values::Random.input(tokens, sample.cols, 1);
    let good = submitted(border.device.submit_matmul(&[&weight], &x, tokens, 0))?;
    let bad = border.device.submit_matmul(&[&weight], &x[..x.len() - 1], tokens, 0).and_then(Submitted::wait);
    match bad {
        Ok(_) => return Err(Stop::wrong("a job with a short input is not refused")),
        Err(Failure { code: BREACH, text }) => return Err(Stop::wrong(text)),
        Err(_) => {}
    }
    right(good, kind, &sample, &x)
}

/// A job whose deadline has passed is right or ends with `NP_TIMEOUT`.
fn deadline(border: &Border, kind: Kind) -> Ended {
    offered(border, false)?;
    let (weight, sample) = prepared(border, kind, plain(kind), (Fill::Random, 1))?;
    let tokens = least(border);
    let x = Values::Random.input(tokens, sample.cols, 1);
    let late = border.device.submit_matmul(&[&weight], &x, tokens, 1).and_then(Submitted::wait);
    match late {
        Ok(found) => {
            compare(&product_of(&sample, &x), found.first().map_or(&[][..], |y| y), bounds::product(kind))?;
        }
        Err(failure) if failure.code == abi::NP_TIMEOUT => {}
        Err(failure) => return Err(Stop::failed("a job that is late", &failure)),
    }
    right(submitted(border.device.submit_matmul(&[&weight], &x, tokens, 0))?, kind, &sample, &x)
}

/// After a cancel each job is right or ends with `NP_CANCELLED`, and later ones are not cancelled.
fn cancel(border: &Border, kind: Kind) -> Ended {
    offered(border, false)?;
    if border.device.table().cancel.is_none() {
        return Err(Stop::Unsupported("the plugin does not offer cancel".into()));
    }
    let (weight, sample) = prepared(border, kind, plain(kind), (Fill::Random, 1))?;
    let tokens = least(border);
    let x = Values::Random.input(tokens, sample.cols, 1);
    let submit = || submitted(border.device.submit_matmul(&[&weight], &x, tokens, 0));
    let under_way = (0..16).map(|_| submit()).collect::<Result<Vec<_>, _>>()?;
    border.device.cancel();
    let want = product_of(&sample, &x);
    for job in under_way {
        match job.wait() {
            Ok(found) => {
                compare(&want, found.first().map_or(&[][..], |y| y), bounds::product(kind))?;
            }
            Err(failure) if failure.code == abi::NP_CANCELLED => {}
            Err(failure) => return Err(Stop::failed("a job that was cancelled", &failure)),
        }
    }
    right(submit()?, kind, &sample, &x)
}

/// Calls that wait while submitted jobs are under way.
fn beside_calls(border: &Border, kind: Kind) -> Ended {
    offered(border, false)?;
    let (weight, sample) = prepared(border, kind, plain(kind), (Fill::Random, 1))?;
    let tokens = least(border);
    let x = Values::Random.input(tokens, sample.cols, 1);
    let submit = || submitted(border.device.submit_matmul(&[&weight], &x, tokens, 0));
    let under_way = (0..8).map(|_| submit()).collect::<Result<Vec<_>, _>>()?;
    let other = prepared(border, kind, plain(kind), (Fill::Random, 2))?;
    let mut found = super::check_product(border, kind, (&other.0, &other.1), tokens, 3)?;
    for job in under_way {
        found = worse(found, right(job, kind, &sample, &x)?);
    }
    Ok(found)
}

fn clusters(border: &Border, kind: Kind, stage: Stage) -> Ended {
    offered(border, true)?;
    let (neurons, width, tokens) = (32, 64, least(border));
    let activation = ActivationKind::Silu;
    let op = Op::Cluster(stage, activation, kind);
    let question = Question { op, kind, rows: neurons, cols: width, tokens };
    border.ask(&question).map_err(Stop::answer)?;
    let sample = |shape, seed| border.sample(kind, shape, Fill::Random, seed);
    let [gate, up, down] =
        [sample((neurons, width), 1), sample((neurons, width), 2), sample((width, neurons), 3)];
    let weight = border.prepare(&[&gate, &up, &down]).map_err(|failure| Stop::failed("prepare", &failure))?;
    let x = Values::Random.input(tokens, width, 1);
    let hidden = if stage.has_hidden() { vec![f32::NAN; tokens * neurons] } else { Vec::new() };
    let y = if stage.has_down() { tokens * width } else { 0 };
    let stroke = Stroke { stage, activation, threshold: 0.0, tokens, x: &x, hidden: &hidden, y };
    let job = cluster_job(&stroke);
    let submit = || submitted(border.device.submit_cluster(&weight, &job, &x, &hidden, y));
    let under_way = (0..4).map(|_| submit()).collect::<Result<Vec<_>, _>>()?;
    let step = Step { stage, activation, threshold: 0.0, x: &widen(&x), left: &[] };
    let want = feed_forward(gate.elements(), up.elements(), down.elements(), &step);
    let mut found = Found::default();
    for job in under_way {
        let outputs = job.wait().map_err(|failure| Stop::failed("the job", &failure))?;
        let output = outputs.get(usize::from(stage.has_down())).map_or(&[][..], |y| y);
        found = worse(found, compare(&want, output, bounds::cluster(kind, kind))?);
    }
    Ok(found)
}
