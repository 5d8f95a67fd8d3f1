//! What cannot be: it is refused with a code that says so, and the unit works afterwards. And structs of hosts that know
//! more or fewer fields, which are no errors.

use std::ptr;

use neuropil_plugin_abi::{
    self as abi, AbiStruct, NpBuffer, NpClusterJob, NpMatmulJob, NpMatrix, NpPrepared, NpProduct, NpReport,
    NpWeightSource,
};

use super::{Values, check_product, least, plain, prepared};
use crate::border::Border;
use crate::case::{Cases, Ended, Found, Stop, compare, ensure};
use crate::raw::{Failure, Guarded, Padded, Weight, buffer, copied, shortened};
use crate::sample::{Fill, Kind, Sample};
use crate::subject::{Op, Question, Subject};
use neuropil_device::{ActivationKind, Stage};

/// A kind that the unit takes.
pub fn offered<S: Subject>(subject: &S) -> Result<Kind, Stop> {
    let takes = |kind: &Kind| super::ask_matmul(subject, *kind, plain(*kind), least(subject)).is_ok();
    let kind = subject.kinds().into_iter().find(takes);
    kind.ok_or_else(|| Stop::wrong("the unit offers no product of any kind of weight"))
}

/// A call must be refused, with a code that says whose mistake it is.
fn refused<T>(result: Result<T, Failure>) -> Result<(), Stop> {
    match result {
        Ok(_) => Err(Stop::wrong("it is not refused")),
        Err(failure) => match failure.code {
            abi::NP_INVALID | abi::NP_UNSUPPORTED | abi::NP_OUT_OF_MEMORY => Ok(()),
            _ => Err(Stop::wrong(format!("it is refused with another code than NP_INVALID: {failure}"))),
        },
    }
}

pub fn cases<'a>(border: &'a Border, cases: &mut Cases<'a>) {
    for kind in border.kinds() {
        for (name, fault) in MATRICES {
            let id = format!("errors/matrix/{}/{name}", kind.name());
            cases.add(id, move || bad_matrix(border, kind, fault));
        }
        for name in JOBS {
            cases.add(format!("errors/matmul/{}/{name}", kind.name()), move || bad_job(border, kind, name));
        }
        for name in NEWER {
            cases.add(format!("errors/newer/{}/{name}", kind.name()), move || newer(border, kind, name));
        }
    }
    for name in SOURCES {
        cases.add(format!("errors/source/{name}"), move || bad_source(border, name));
    }
    for name in CLUSTERS {
        cases.add(format!("errors/cluster/{name}"), move || bad_cluster(border, name));
    }
    for name in ["info", "prepare", "matmul", "cluster"] {
        cases.add(format!("errors/no-device/{name}"), move || no_device(border, name));
    }
}

type Fault = fn(NpMatrix) -> NpMatrix;

const MATRICES: [(&str, Fault); 14] = [
    ("another-scheme", |good| NpMatrix { scheme: 99, ..good }),
    ("no-rows", |good| NpMatrix { rows: 0, ..good }),
    ("no-columns", |good| NpMatrix { cols: 0, ..good }),
    ("rows-beyond-counting", |good| NpMatrix { rows: u64::MAX, ..good }),
    ("columns-beyond-counting", |good| NpMatrix { cols: u64::MAX / 2 + 2, ..good }),
    ("another-group", |good| NpMatrix { group: 48, ..good }),
    ("fewer-bytes", |good| NpMatrix { data_bytes: good.data_bytes - 1, ..good }),
    ("more-bytes", |good| NpMatrix { data_bytes: good.data_bytes + 4, ..good }),
    ("no-bytes", |good| NpMatrix { data: ptr::null(), ..good }),
    ("scales-that-do-not-fit", |good| NpMatrix { scales_bytes: good.scales_bytes + 2, ..good }),
    ("minima-that-do-not-fit", |good| NpMatrix { mins_bytes: good.mins_bytes + 2, ..good }),
    ("outliers-beyond-the-columns", |good| NpMatrix { outlier_count: 1 << 40, ..good }),
    ("a-struct-that-ends-before-its-bytes", |good| shortened(good, 40)),
    ("a-struct-that-ends-in-a-field", |good| shortened(good, 44)),
];

fn bad_matrix(border: &Border, kind: Kind, fault: Fault) -> Ended {
    let (weight, sample) = prepared(border, kind, plain(kind), (Fill::Random, 1))?;
    let matrix = fault(sample.matrix());
    let source = NpWeightSource { matrix: &matrix, ..NpWeightSource::new() };
    refused(border.device.prepare_source(&source))?;
    check_product(border, kind, (&weight, &sample), least(border), 2)
}

const SOURCES: [&str; 6] = [
    "no-matrix",
    "a-third-of-a-block",
    "two-thirds-of-a-block",
    "a-matrix-and-a-block",
    "no-source",
    "no-place",
];

fn bad_source(border: &Border, name: &str) -> Ended {
    let kind = offered(border)?;
    let (weight, sample) = prepared(border, kind, plain(kind), (Fill::Random, 1))?;
    let (good, none) = (sample.matrix(), NpWeightSource::new());
    let device = &border.device;
    let mut place = NpPrepared::new();
    let one = NpWeightSource { matrix: &good, ..none };
    refused(match name {
        "a-third-of-a-block" => device.prepare_structs(&NpWeightSource { gate: &good, ..none }, &mut place),
        "two-thirds-of-a-block" => {
            device.prepare_structs(&NpWeightSource { gate: &good, up: &good, ..none }, &mut place)
        }
        "a-matrix-and-a-block" => device.prepare_structs(&NpWeightSource { up: &good, ..one }, &mut place),
        "no-source" => device.prepare_structs(ptr::null(), &mut place),
        "no-place" => device.prepare_structs(&one, ptr::null_mut()),
        _ => device.prepare_structs(&none, &mut place),
    })?;
    ensure(place.weight.is_null(), || "it is refused, but there is a weight".into())?;
    check_product(border, kind, (&weight, &sample), least(border), 2)
}

/// A good product and its parts, to be spoiled.
struct Parts<'a> {
    tokens: usize,
    weight: Weight<'a>,
    sample: Sample,
    x: Vec<f32>,
    y: Guarded,
}

impl<'a> Parts<'a> {
    fn new(border: &'a Border, kind: Kind) -> Result<Parts<'a>, Stop> {
        let tokens = least(border);
        let (weight, sample) = prepared(border, kind, plain(kind), (Fill::Random, 1))?;
        let x = Values::Random.input(tokens, sample.cols, 2);
        let y = Guarded::nan(tokens * sample.rows);
        Ok(Parts { tokens, weight, sample, x, y })
    }

    /// Calls `run` with the good input, output and job.
    fn with<T>(&mut self, run: impl FnOnce(&NpBuffer, &NpProduct, &NpMatmulJob) -> T) -> T {
        let (x, y) = (buffer(&mut self.x), self.y.buffer());
        let product = NpProduct { weight: self.weight.handle(), y: &y, ..NpProduct::new() };
        let products = [&raw const product];
        let job = NpMatmulJob {
            tokens: self.tokens as u64,
            x: &x,
            products: products.as_ptr(),
            product_count: 1,
            ..NpMatmulJob::new()
        };
        run(&x, &product, &job)
    }

    /// Whether the output is right.
    fn right(self, kind: Kind) -> Ended {
        let want = super::product_of(&self.sample, &self.x);
        let y = self.y.open().map_err(|failure| Stop::failed("matmul", &failure))?;
        compare(&want, &y, crate::bounds::product(kind))
    }
}

const JOBS: [&str; 20] = [
    "no-tokens",
    "tokens-beyond-counting",
    "tokens-beyond-the-buffers",
    "no-products",
    "five-products",
    "one-output-twice",
    "no-list-of-products",
    "a-product-that-is-none",
    "no-weight",
    "no-output",
    "a-short-output",
    "an-output-without-memory",
    "an-output-between-addresses",
    "no-input",
    "a-short-input",
    "an-input-without-memory",
    "an-input-between-addresses",
    "the-output-as-input",
    "a-struct-that-ends-before-its-products",
    "no-job",
];

fn bad_job(border: &Border, kind: Kind, name: &str) -> Ended {
    let mut parts = Parts::new(border, kind)?;
    let device = &border.device;
    let tokens = parts.tokens as u64;
    let result = parts.with(|x, product, good| {
        let y = copied(product.y);
        let between = |b: NpBuffer| NpBuffer { data: b.data.cast::<u8>().wrapping_add(1).cast(), ..b };
        let bad_y = match name {
            "a-short-output" => NpBuffer { bytes: y.bytes - 1, ..y },
            "an-output-without-memory" => NpBuffer { data: ptr::null_mut(), ..y },
            "an-output-between-addresses" => between(y),
            _ => y,
        };
        let bad_x = match name {
            "a-short-input" => NpBuffer { bytes: x.bytes - 1, ..*x },
            "an-input-without-memory" => NpBuffer { data: ptr::null_mut(), ..*x },
            "an-input-between-addresses" => between(*x),
            "the-output-as-input" => NpBuffer { bytes: 1 << 40, ..y },
            _ => *x,
        };
        let bad_product = match name {
            "no-weight" => NpProduct { weight: ptr::null_mut(), ..*product },
            "no-output" => NpProduct { y: ptr::null(), ..*product },
            _ => NpProduct { y: &bad_y, ..*product },
        };
        let pointer = if name == "a-product-that-is-none" { ptr::null() } else { &raw const bad_product };
        let list = [pointer; 5];
        let mut job = NpMatmulJob { products: list.as_ptr(), x: &bad_x, ..*good };
        match name {
            "no-tokens" => job.tokens = 0,
            "tokens-beyond-counting" => job.tokens = u64::MAX / 3,
            "tokens-beyond-the-buffers" => job.tokens = tokens + 1,
            "no-products" => job.product_count = 0,
            "five-products" => job.product_count = 5,
            "one-output-twice" => job.product_count = 2,
            "no-list-of-products" => job.products = ptr::null(),
            "no-input" => job.x = ptr::null(),
            "a-struct-that-ends-before-its-products" => job = shortened(job, 32),
            _ => {}
        }
        let job: *const NpMatmulJob = if name == "no-job" { ptr::null() } else { &job };
        device.matmul_structs(job, &mut NpReport::new())
    });
    refused(result)?;
    works(border, parts, kind)
}

/// The good job, after a bad one.
fn works(border: &Border, mut parts: Parts<'_>, kind: Kind) -> Ended {
    let result = parts.with(|_, _, job| border.device.matmul_job(job));
    result.map_err(|failure| Stop::failed("a good job after that", &failure))?;
    parts.right(kind)
}

const NEWER: [&str; 9] =
    ["matrix", "source", "prepared", "buffers", "product", "job", "report", "older-matrix", "older-buffers"];

/// Structs of hosts of a newer or an older version, which the plugin takes as if they were of its own.
fn newer(border: &Border, kind: Kind, name: &str) -> Ended {
    let mut parts = Parts::new(border, kind)?;
    if matches!(name, "matrix" | "source" | "prepared" | "older-matrix") {
        parts.weight = newer_weight(border, kind, name, &parts.sample)?;
    }
    let mut report = Padded::new(NpReport::new());
    let result = parts.with(|x, product, job| {
        let y = copied(product.y);
        let (long_x, long_y) = (Padded::new(*x), Padded::new(y));
        let (short_x, short_y) = (shortened(*x, 24), shortened(y, 24));
        let mut product = *product;
        let mut job = *job;
        match name {
            "buffers" => (job.x, product.y) = (long_x.pointer(), long_y.pointer()),
            "older-buffers" => (job.x, product.y) = (&short_x, &short_y),
            _ => {}
        }
        let long_product = Padded::new(product);
        let list = [if name == "product" { long_product.pointer() } else { &raw const product }];
        job.products = list.as_ptr();
        let long_job = Padded::new(job);
        let job = if name == "job" { long_job.pointer() } else { &raw const job };
        if name == "report" {
            return border.device.matmul_structs(job, report.pointer_mut());
        }
        border.device.matmul_structs(job, &mut NpReport::new())
    });
    result.map_err(|failure| Stop::failed("matmul", &failure))?;
    ensure(report.is_whole(), || "it writes behind the fields of the report that it knows".into())?;
    parts.right(kind)
}

fn newer_weight<'a>(border: &'a Border, kind: Kind, name: &str, sample: &Sample) -> Result<Weight<'a>, Stop> {
    let good = sample.matrix();
    let before_outliers = std::mem::offset_of!(NpMatrix, outlier_columns);
    if name == "older-matrix" && kind == Kind::Outliers {
        return Err(Stop::Unsupported("outliers need a matrix of this version".into()));
    }
    let (long, short) = (Padded::new(good), shortened(good, before_outliers));
    let matrix = match name {
        "matrix" => long.pointer(),
        "older-matrix" => &raw const short,
        _ => &raw const good,
    };
    let source = NpWeightSource { matrix, ..NpWeightSource::new() };
    let long_source = Padded::new(source);
    let source = if name == "source" { long_source.pointer() } else { &raw const source };
    let mut place = Padded::new(NpPrepared::new());
    if name != "prepared" {
        place.known = NpPrepared::new();
    }
    let result = border.device.prepare_structs(source, place.pointer_mut());
    result.map_err(|failure| Stop::failed("prepare", &failure))?;
    ensure(place.is_whole(), || "it writes behind the fields of np_prepared that it knows".into())?;
    let weight = border.device.weight(place.known, (sample.rows, sample.cols));
    weight.map_err(|failure| Stop::failed("prepare", &failure))
}

const CLUSTERS: [&str; 15] = [
    "no-tokens",
    "tokens-beyond-counting",
    "no-weight",
    "a-matrix-as-weight",
    "another-stage",
    "another-activation",
    "no-input",
    "a-short-input",
    "no-output",
    "a-short-output",
    "no-hidden",
    "a-short-hidden",
    "the-output-as-input",
    "a-struct-that-ends-before-its-weight",
    "a-block-as-weight-of-a-matmul",
];

fn bad_cluster(border: &Border, name: &str) -> Ended {
    let kind = offered(border)?;
    let (tokens, (neurons, width)) = (least(border), (32, 64));
    let of_hidden = matches!(name, "no-hidden" | "a-short-hidden");
    let stage = if of_hidden { Stage::GateUp } else { Stage::Fused };
    let op = Op::Cluster(stage, ActivationKind::Silu, kind);
    let question = Question { op, kind, rows: neurons, cols: width, tokens };
    border.ask(&question).map_err(Stop::answer)?;
    let sample = |shape, seed| border.sample(kind, shape, Fill::Random, seed);
    let (gate, up, down) =
        (sample((neurons, width), 1), sample((neurons, width), 2), sample((width, neurons), 3));
    let made = |result: Result<_, Failure>| result.map_err(|failure| Stop::failed("prepare", &failure));
    let block = made(border.prepare(&[&gate, &up, &down]))?;
    let (matrix, matrix_sample) = prepared(border, kind, plain(kind), (Fill::Random, 4))?;

    let mut x = Values::Random.input(tokens, width, 5);
    let (mut hidden, mut y) = (vec![0.0; tokens * neurons], vec![0.0; tokens * width]);
    let (x, hidden, y) = (buffer(&mut x), buffer(&mut hidden), buffer(&mut y));
    let good = NpClusterJob {
        stage: crate::border::stage_number(stage),
        activation: abi::NP_ACT_SILU,
        tokens: tokens as u64,
        weight: block.handle(),
        x: &x,
        hidden: if of_hidden { &hidden } else { ptr::null() },
        y: if of_hidden { ptr::null() } else { &y },
        ..NpClusterJob::new()
    };
    let shorter = |b: &NpBuffer| NpBuffer { bytes: b.bytes - 1, ..*b };
    let (short_x, short_hidden, short_y) = (shorter(&x), shorter(&hidden), shorter(&y));
    let device = &border.device;
    let run = |job: NpClusterJob| device.cluster_structs(&job, &mut NpReport::new());
    refused(match name {
        "no-tokens" => run(NpClusterJob { tokens: 0, ..good }),
        "tokens-beyond-counting" => run(NpClusterJob { tokens: u64::MAX / 3, ..good }),
        "no-weight" => run(NpClusterJob { weight: ptr::null_mut(), ..good }),
        "a-matrix-as-weight" => run(NpClusterJob { weight: matrix.handle(), ..good }),
        "another-stage" => run(NpClusterJob { stage: 99, ..good }),
        "another-activation" => run(NpClusterJob { activation: 99, ..good }),
        "no-input" => run(NpClusterJob { x: ptr::null(), ..good }),
        "a-short-input" => run(NpClusterJob { x: &short_x, ..good }),
        "no-output" => run(NpClusterJob { y: ptr::null(), ..good }),
        "a-short-output" => run(NpClusterJob { y: &short_y, ..good }),
        "no-hidden" => run(NpClusterJob { hidden: ptr::null(), ..good }),
        "a-short-hidden" => run(NpClusterJob { hidden: &short_hidden, ..good }),
        "the-output-as-input" => run(NpClusterJob { x: &y, ..good }),
        "a-struct-that-ends-before-its-weight" => run(shortened(good, 32)),
        _ => {
            let product = NpProduct { weight: block.handle(), y: &y, ..NpProduct::new() };
            let list = [&raw const product];
            let (products, tokens) = (list.as_ptr(), tokens as u64);
            device
                .matmul_job(&NpMatmulJob { tokens, x: &x, products, product_count: 1, ..NpMatmulJob::new() })
                .map(drop)
        }
    })?;
    run(good).map_err(|failure| Stop::failed("a good job after that", &failure))?;
    check_product(border, kind, (&matrix, &matrix_sample), tokens, 6)
}

/// Calls without a device.
fn no_device(border: &Border, name: &str) -> Ended {
    let kind = offered(border)?;
    let mut parts = Parts::new(border, kind)?;
    let nobody = border.device.nobody();
    match name {
        "info" => refused(nobody.try_info())?,
        "prepare" => {
            let matrix = parts.sample.matrix();
            let source = NpWeightSource { matrix: &matrix, ..NpWeightSource::new() };
            refused(nobody.prepare_structs(&source, &mut NpPrepared::new()))?;
        }
        "cluster" => refused(nobody.cluster_structs(&NpClusterJob::new(), &mut NpReport::new()))?,
        _ => refused(parts.with(|_, _, job| nobody.matmul_job(job)))?,
    }
    works(border, parts, kind).map(|_| Found::default())
}
