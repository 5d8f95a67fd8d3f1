//! What only devices of `neuropil-device` have: leases, handles that other devices made, errors with types.

use std::sync::Arc;

use neuropil_device::{
    Buffer, CompletionQueue, DType, DeviceError, DeviceId, MatmulJob, Matrix, OpShape, PreparedWeight,
    Product, RowSource, Submission, Support, WeightShape, WeightSource,
};

use super::{Values, check_product, plain, prepared};
use crate::case::{Cases, Ended, Found, Stop, ensure};
use crate::device::{Unit, failure, marked};
use crate::raw::Failure;
use crate::sample::{Fill, Kind};
use crate::subject::{Sampled, Stroke, Subject};
use neuropil_device::{ActivationKind, Stage};

const NOTHING: Ended = Ok(Found { error: None, ns: None });

pub fn info<'a>(unit: &'a Unit<'_>, cases: &mut Cases<'a>) {
    cases.add("info/unit/description".into(), move || {
        let info = unit.0.info();
        ensure(!info.name.trim().is_empty(), || "the unit has no name".into())?;
        ensure(info.threads >= 1, || "the unit has no thread".into())?;
        let ascending = info.token_buckets.windows(2).all(|pair| pair[0] < pair[1]);
        ensure(ascending, || format!("the token buckets {:?} are not ascending", info.token_buckets))?;
        NOTHING
    });
    for dtype in DType::ALL {
        cases.add(format!("info/answer/{dtype}/matmul"), move || {
            let (rows, cols) = plain(Kind::Type(dtype));
            asked(unit, OpShape::Matmul { dtype, rows, cols, tokens: 1 })
        });
        for stage in Stage::ALL {
            let side = dtype.block_elements().max(32);
            let op = OpShape::Cluster {
                stage,
                dtype,
                down_dtype: dtype,
                neurons: side,
                width: side,
                tokens: 1,
                bundles: false,
            };
            cases.add(format!("info/answer/{dtype}/{}", stage.name()), move || asked(unit, op));
        }
    }
}

fn asked(unit: &Unit<'_>, op: OpShape) -> Ended {
    let first = unit.0.supports(&op);
    ensure(first == unit.0.supports(&op), || "it answers something else the second time".into())?;
    match first {
        Support::No(reason) if reason.trim().is_empty() => Err(Stop::wrong("its no has no reason")),
        Support::No(reason) => Err(Stop::Unsupported(reason)),
        _ => NOTHING,
    }
}

/// Some type that the unit takes.
fn offered(unit: &Unit<'_>) -> Result<Kind, Stop> {
    super::errors::offered(unit)
}

fn lease(error: DeviceError) -> Stop {
    Stop::failed("a lease", &failure(&error))
}

pub fn completion<'a>(unit: &'a Unit<'_>, cases: &mut Cases<'a>) {
    for kind in unit.kinds() {
        for count in [1, 4, 16] {
            let id = format!("completion/matmul/{}/{count}-jobs", kind.name());
            cases.add(id, move || jobs(unit, kind, count));
        }
        cases.add(format!("completion/weight-is-gone/{}", kind.name()), move || weight_is_gone(unit, kind));
        cases.add(format!("completion/added/{}", kind.name()), move || added(unit, kind));
    }
}

/// Jobs under way at once, each of which is told once.
fn jobs(unit: &Unit<'_>, kind: Kind, count: u64) -> Ended {
    let (weight, sample) = prepared(unit, kind, plain(kind), (Fill::Random, 1))?;
    let cols = sample.elements().cols;
    let queue = CompletionQueue::new();
    let mut kept = Vec::new();
    for token in 0..count {
        let x = Values::Random.input(2, cols, token);
        let (job, input, outputs) = made(unit.matmul_job(&[&weight], &x, 2))?;
        unit.0.submit_matmul(Submission::new(job, queue.completion(token)));
        kept.push((x, input, outputs));
    }
    let mut told: Vec<u64> = Vec::new();
    for _ in 0..count {
        let (token, result) = queue.wait(|| unit.0.help());
        result.map_err(|error| Stop::failed("a job", &failure(&error)))?;
        told.push(token);
    }
    told.sort_unstable();
    ensure(told == (0..count).collect::<Vec<_>>(), || format!("the ends of {told:?} were told"))?;
    let mut found = Found::default();
    for (x, _, outputs) in &kept {
        let y = outputs.first().map(crate::device::opened).transpose();
        let y = y.map_err(|failure| Stop::failed("matmul", &failure))?.unwrap_or_default();
        found = crate::case::compare(&super::product_of(&sample, x), &y, crate::bounds::product(kind))?;
    }
    Ok(found)
}

fn made<T>(result: Result<T, Failure>) -> Result<T, Stop> {
    result.map_err(|failure| Stop::failed("making a job", &failure))
}

/// A job keeps its weight.
fn weight_is_gone(unit: &Unit<'_>, kind: Kind) -> Ended {
    let (weight, sample) = prepared(unit, kind, plain(kind), (Fill::Random, 1))?;
    let x = Values::Random.input(3, sample.elements().cols, 1);
    let (job, _input, outputs) = made(unit.matmul_job(&[&weight], &x, 3))?;
    drop(weight);
    let done = unit.finish(|completion| unit.0.submit_matmul(Submission::new(job, completion)));
    done.map_err(|failure| Stop::failed("matmul", &failure))?;
    let y = outputs.first().map(crate::device::opened).transpose();
    let y = y.map_err(|failure| Stop::failed("matmul", &failure))?.unwrap_or_default();
    crate::case::compare(&super::product_of(&sample, &x), &y, crate::bounds::product(kind))
}

/// A product that is added to what is there.
fn added(unit: &Unit<'_>, kind: Kind) -> Ended {
    let (weight, sample) = prepared(unit, kind, plain(kind), (Fill::Random, 1))?;
    let (rows, cols) = plain(kind);
    let x = Values::Random.input(2, cols, 1);
    let was = Values::Random.input(2, rows, 2);
    let (input, y) = (made(marked(unit.0, &x))?, made(marked(unit.0, &was))?);
    let product = Product { weight, y: y.write().map_err(lease)?, accumulate: true };
    let job = MatmulJob::new(2, input.read().map_err(lease)?).with(product);
    let done = unit.finish(|completion| unit.0.submit_matmul(Submission::new(job, completion)));
    done.map_err(|failure| Stop::failed("matmul", &failure))?;
    let mut want = super::product_of(&sample, &x);
    want.want.iter_mut().zip(&was).for_each(|(want, was)| *want += f64::from(*was));
    let y = crate::device::opened(&y).map_err(|failure| Stop::failed("matmul", &failure))?;
    crate::case::compare(&want, &y, crate::bounds::product(kind))
}

/// Bytes that cannot be read.
struct Unreadable(usize);

impl RowSource for Unreadable {
    fn len(&self) -> usize {
        self.0
    }

    fn read(&self, _: usize, _: &mut [u8]) -> Result<(), DeviceError> {
        Err(DeviceError::Source { reason: "the test lets it fail".into() })
    }
}

const ERRORS: [&str; 13] = [
    "unreadable-bytes",
    "fewer-bytes",
    "more-bytes",
    "no-rows",
    "a-weight-of-another-device",
    "a-block-as-weight-of-a-matmul",
    "a-matrix-as-weight-of-a-cluster",
    "a-short-input",
    "a-short-output",
    "weights-of-other-columns",
    "a-short-input-of-a-cluster",
    "no-hidden",
    "no-output-of-a-cluster",
];

pub fn errors<'a>(unit: &'a Unit<'_>, cases: &mut Cases<'a>) {
    for kind in unit.kinds() {
        for name in ERRORS {
            cases.add(format!("errors/{name}/{}", kind.name()), move || bad(unit, kind, name));
        }
    }
    cases.add("errors/a-held-lease".into(), move || {
        let buffer = unit.0.alloc(64).map_err(lease)?;
        let held = buffer.write().map_err(lease)?;
        ensure(buffer.read().is_err(), || "a buffer that is being written is leased again".into())?;
        drop(held);
        offered(unit)?;
        NOTHING
    });
}

fn is_refused<T>(result: Result<T, DeviceError>, name: &str) -> Result<(), Stop> {
    let fits = |error: &DeviceError| match name {
        "unreadable-bytes" => matches!(error, DeviceError::Source { .. }),
        "fewer-bytes" | "more-bytes" | "no-rows" => matches!(error, DeviceError::Shape { .. }),
        "a-weight-of-another-device" => matches!(error, DeviceError::ForeignHandle { .. }),
        "a-block-as-weight-of-a-matmul" | "a-matrix-as-weight-of-a-cluster" => {
            matches!(error, DeviceError::Unsupported { .. } | DeviceError::Mismatch { .. })
        }
        _ => matches!(error, DeviceError::Mismatch { .. }),
    };
    match result {
        Ok(_) => Err(Stop::wrong("it is not refused")),
        Err(error) if fits(&error) => Ok(()),
        Err(error) => Err(Stop::wrong(format!("it is refused as something else: {error}"))),
    }
}

fn bad(unit: &Unit<'_>, kind: Kind, name: &str) -> Ended {
    let (weight, sample) = prepared(unit, kind, plain(kind), (Fill::Random, 1))?;
    let good = sample.matrix();
    let prepare = |matrix: Matrix<'_>| unit.0.prepare(WeightSource::Matrix(matrix), None);
    let mut bytes = vec![0; good.data.len()];
    good.data.read(0, &mut bytes).map_err(|error| Stop::failed("the test", &failure(&error)))?;
    match name {
        "unreadable-bytes" => {
            is_refused(prepare(Matrix { data: &Unreadable(bytes.len()), ..good }), name)?;
        }
        "fewer-bytes" => {
            bytes.pop();
            is_refused(prepare(Matrix { data: &bytes, ..good }), name)?;
        }
        "more-bytes" => {
            bytes.push(0);
            is_refused(prepare(Matrix { data: &bytes, ..good }), name)?;
        }
        "no-rows" => {
            bytes.clear();
            is_refused(prepare(Matrix { rows: 0, data: &bytes, ..good }), name)?;
        }
        "a-matrix-as-weight-of-a-cluster"
        | "a-short-input-of-a-cluster"
        | "no-hidden"
        | "no-output-of-a-cluster" => bad_cluster(unit, kind, &weight, name)?,
        _ => bad_matmul(unit, kind, &weight, name)?,
    }
    check_product(unit, kind, (&weight, &sample), 2, 5)
}

fn bad_matmul(unit: &Unit<'_>, kind: Kind, weight: &PreparedWeight, name: &str) -> Result<(), Stop> {
    let (rows, cols) = plain(kind);
    let tokens = 2;
    let host = |values: usize| Buffer::host(values * 4).map_err(lease);
    let x = host(if name == "a-short-input" { tokens * cols - 1 } else { tokens * cols * 2 })?;
    let y = host(if name == "a-short-output" { tokens * rows - 1 } else { tokens * rows })?;
    let weight = match name {
        "a-weight-of-another-device" => foreign(WeightShape::Matrix { rows, cols }),
        "a-block-as-weight-of-a-matmul" => block(unit, kind)?,
        _ => weight.clone(),
    };
    let product = Product { weight, y: y.write().map_err(lease)?, accumulate: false };
    let mut job = MatmulJob::new(tokens, x.read().map_err(lease)?).with(product);
    let other_y = host(tokens * rows)?;
    if name == "weights-of-other-columns" {
        let (other, _) = prepared(unit, kind, (rows, cols * 2), (Fill::Random, 2))?;
        job = job.with(Product { weight: other, y: other_y.write().map_err(lease)?, accumulate: false });
    }
    is_refused(ended(|completion| unit.0.submit_matmul(Submission::new(job, completion)), unit), name)?;
    ensure(x.write().is_ok() && y.write().is_ok(), || "a job that was refused still holds its leases".into())
}

fn ended(submit: impl FnOnce(neuropil_device::Completion), unit: &Unit<'_>) -> Result<(), DeviceError> {
    let queue = CompletionQueue::new();
    submit(queue.completion(1));
    queue.wait(|| unit.0.help()).1
}

fn foreign(shape: WeightShape) -> PreparedWeight {
    PreparedWeight::new(DeviceId::new(), shape, 4, Arc::new(()))
}

/// A block of neurons as large as the plain matrix is wide, if the unit takes it.
fn block(unit: &Unit<'_>, kind: Kind) -> Result<PreparedWeight, Stop> {
    let (rows, cols) = block_shape(kind);
    let op = crate::subject::Op::Cluster(Stage::Fused, ActivationKind::Silu, kind);
    let question = crate::subject::Question { op, kind, rows, cols, tokens: 2 };
    unit.ask(&question).map_err(Stop::answer)?;
    let sample = |shape, seed| unit.sample(kind, shape, Fill::Random, seed);
    let (gate, up, down) = (sample((rows, cols), 1), sample((rows, cols), 2), sample((cols, rows), 3));
    unit.prepare(&[&gate, &up, &down]).map_err(|failure| Stop::failed("prepare", &failure))
}

fn block_shape(kind: Kind) -> (usize, usize) {
    let side = plain(kind).1;
    (side, side)
}

fn bad_cluster(unit: &Unit<'_>, kind: Kind, matrix: &PreparedWeight, name: &str) -> Result<(), Stop> {
    let (neurons, width) = block_shape(kind);
    let good = block(unit, kind)?;
    let is_matrix = name == "a-matrix-as-weight-of-a-cluster";
    let weight = if is_matrix { matrix } else { &good };
    let stage = if name == "no-hidden" { Stage::GateUp } else { Stage::Fused };
    let tokens = 2;
    let x = vec![0.0; tokens * width];
    let hidden = vec![0.0; tokens * neurons];
    let stroke = Stroke {
        stage,
        activation: ActivationKind::Silu,
        threshold: 0.0,
        tokens,
        x: &x,
        hidden: &hidden,
        y: tokens * width,
    };
    let (mut job, buffers) = made(unit.cluster_job(weight, &stroke))?;
    let short = Buffer::host(4).map_err(lease)?;
    match name {
        "a-short-input-of-a-cluster" => job.x = short.read().map_err(lease)?,
        "no-hidden" => job.hidden = None,
        "no-output-of-a-cluster" => job.y = None,
        _ => {}
    }
    let submit = |completion| unit.0.submit_clusters(&mut vec![Submission::new(job, completion)]);
    is_refused(ended(submit, unit), name)?;
    ensure(buffers.iter().all(|buffer| buffer.write().is_ok()), || {
        "a job that was refused still holds its leases".into()
    })
}
