//! A few checks for the tests of a plugin that knows how exact it is: right products and clusters within bounds of the
//! caller's own, and no for an answer when the host is wrong. What fails is a panic. [`crate::check`] does far more.

use std::ptr;

use neuropil_plugin_abi::{
    self as abi, AbiStruct, NpClusterJob, NpMatmulJob, NpProduct, NpQuery, NpWeightSource,
};

use crate::raw::{Device, Weight, buffer};
use crate::sample::{Random, SCHEMES, Sample, group, relative_error};

/// Token counts to test: two that the unit takes.
fn tokens(device: &Device) -> Vec<usize> {
    match &device.info().token_buckets[..] {
        [] => vec![1, 3],
        buckets => buckets.iter().take(2).map(|tokens| *tokens as usize).collect(),
    }
}

/// Asks for a product of every scheme, computes those that the unit offers, and compares them. `bound` is the largest
/// relative error of a scheme. Gives the schemes with their errors.
pub fn products(device: &Device, bound: impl Fn(u32) -> f64) -> Vec<(&'static str, f64)> {
    let mut errors = Vec::new();
    for (scheme, name) in SCHEMES {
        let mut worst = None;
        for (rows, cols) in [(1, 32), (40, 64), (33, 352)] {
            for tokens in tokens(device) {
                let query = NpQuery {
                    op: abi::NP_OP_MATMUL,
                    scheme,
                    rows: rows as u64,
                    cols: cols as u64,
                    group: group(scheme),
                    tokens: tokens as u64,
                    ..NpQuery::new()
                };
                let Ok(flags) = device.query(&query) else { continue };
                let kinds = flags & (abi::NP_SUPPORT_NATIVE | abi::NP_SUPPORT_EMULATED);
                assert_eq!(kinds.count_ones(), 1, "native or emulated");
                let mut second = Sample::random(scheme, rows + 3, cols, 2);
                if flags & abi::NP_SUPPORT_OUTLIERS != 0 && scheme == abi::NP_SCHEME_CHANNEL4 {
                    second = second.with_outliers(5);
                }
                let samples = [Sample::random(scheme, rows, cols, 1), second];
                let weights: Vec<Weight<'_>> =
                    samples.iter().map(|sample| device.prepare(&[sample]).expect("prepare")).collect();
                let x = Random::new(3).values(tokens * cols);
                let wide: Vec<f64> = x.iter().map(|x| f64::from(*x)).collect();
                let found = device.matmul(&[&weights[0], &weights[1]], &x, tokens).expect("matmul");
                for (found, sample) in found.iter().zip(&samples) {
                    let error = relative_error(found, &sample.product(&wide));
                    assert!(
                        error <= bound(scheme),
                        "{name} {rows} x {cols}, {tokens} tokens: error {error:e}"
                    );
                    worst = Some(worst.unwrap_or(0f64).max(error));
                }
            }
        }
        errors.extend(worst.map(|worst| (name, worst)));
    }
    assert!(!errors.is_empty(), "the unit offers no product");
    errors
}

fn activate(activation: u32, threshold: f64, g: f64, u: f64) -> f64 {
    let cut = |v: f64| if v <= threshold { 0.0 } else { v };
    match activation {
        abi::NP_ACT_SILU => g / (1.0 + (-g).exp()) * u,
        abi::NP_ACT_GELU => {
            let inner = (2.0 / std::f64::consts::PI).sqrt() * (g + 0.044715 * g * g * g);
            0.5 * g * (1.0 + inner.tanh()) * u
        }
        abi::NP_ACT_RELU => cut(g) * u,
        abi::NP_ACT_RELU2 => cut(g) * cut(g) * u,
        abi::NP_ACT_DRELU => cut(g) * cut(u),
        _ => g * u,
    }
}

/// Runs every stage and activation that the unit offers, and compares. Gives the worst error, and how many were run.
pub fn clusters(device: &Device, bound: f64) -> (f64, usize) {
    let (neurons, width) = (32, 64);
    let (mut worst, mut count) = (0f64, 0);
    for (scheme, name) in SCHEMES {
        let part = |rows, cols, seed| {
            let sample = Sample::random(scheme, rows, cols, seed);
            if scheme == abi::NP_SCHEME_CHANNEL4 { sample.with_outliers(seed) } else { sample }
        };
        let [gate, up, down] = [part(neurons, width, 1), part(neurons, width, 2), part(width, neurons, 3)];
        let mut prepared = None;
        let cases = (1..=6).flat_map(|stage| (1..=6).map(move |activation| (stage, activation)));
        for (stage, activation) in cases {
            for tokens in tokens(device) {
                let query = NpQuery {
                    op: abi::NP_OP_CLUSTER,
                    scheme,
                    down_scheme: scheme,
                    stage,
                    activation,
                    rows: neurons as u64,
                    cols: width as u64,
                    group: group(scheme),
                    tokens: tokens as u64,
                    ..NpQuery::new()
                };
                if device.query(&query).is_err() {
                    continue;
                }
                let weight = prepared
                    .get_or_insert_with(|| device.prepare(&[&gate, &up, &down]).expect("prepare a block"));
                let x = Random::new(5).values(tokens * width);
                let left = Random::new(6).values(tokens * neurons);
                let wide = |values: &[f32]| -> Vec<f64> { values.iter().map(|v| f64::from(*v)).collect() };
                let threshold = 0.25f32;
                let (g, u) = (gate.product(&wide(&x)), up.product(&wide(&x)));
                let has_gate =
                    matches!(stage, abi::NP_STAGE_GATE | abi::NP_STAGE_GATE_UP | abi::NP_STAGE_FUSED);
                let has_down =
                    matches!(stage, abi::NP_STAGE_DOWN | abi::NP_STAGE_UP_DOWN | abi::NP_STAGE_FUSED);
                let has_up = !matches!(stage, abi::NP_STAGE_GATE | abi::NP_STAGE_DOWN);
                let first = if has_gate { g } else { wide(&left) };
                let inner: Vec<f64> = match has_up {
                    true => first
                        .iter()
                        .zip(&u)
                        .map(|(g, u)| activate(activation, f64::from(threshold), *g, *u))
                        .collect(),
                    false => first,
                };
                let none: &[f32] = &[];
                let x_given = if stage == abi::NP_STAGE_DOWN { none } else { &x[..] };
                let hidden_given = if stage == abi::NP_STAGE_FUSED { none } else { &left[..] };
                let job = NpClusterJob {
                    stage,
                    activation,
                    threshold,
                    tokens: tokens as u64,
                    ..NpClusterJob::new()
                };
                let y_values = if has_down { tokens * width } else { 0 };
                let found = device.cluster(weight, &job, x_given, hidden_given, y_values).expect("cluster");
                let mut compare = |found: &[f32], want: &[f64], what: &str| {
                    let error = relative_error(found, want);
                    assert!(
                        error <= bound,
                        "{name} stage {stage} activation {activation} {tokens} tokens: {what} error {error:e}"
                    );
                    worst = worst.max(error);
                };
                if has_down {
                    compare(&found.y, &down.product(&inner), "y");
                    assert!(found.hidden.is_empty() || found.hidden == left, "hidden stays");
                } else {
                    compare(&found.hidden, &inner, "hidden");
                }
                count += 1;
            }
        }
    }
    (worst, count)
}

/// Gives the plugin what cannot be, one fault at a time. Each is an error, and the unit works afterwards.
pub fn refusals(device: &Device) {
    let scheme = SCHEMES.iter().map(|(scheme, _)| *scheme).find(|scheme| {
        let (scheme, tokens) = (*scheme, tokens(device)[0] as u64);
        let (rows, cols) = (40, 64);
        let op = abi::NP_OP_MATMUL;
        device
            .query(&NpQuery { op, scheme, group: group(scheme), rows, cols, tokens, ..NpQuery::new() })
            .is_ok()
    });
    let sample = Sample::random(scheme.expect("the unit offers a scheme"), 40, 64, 7);
    let good = sample.matrix();
    let bad_matrices = [
        ("another scheme", abi::NpMatrix { scheme: 99, ..good }),
        ("no rows", abi::NpMatrix { rows: 0, ..good }),
        ("rows beyond counting", abi::NpMatrix { rows: u64::MAX, ..good }),
        ("columns beyond counting", abi::NpMatrix { cols: u64::MAX / 2 + 2, ..good }),
        ("another group", abi::NpMatrix { group: 48, ..good }),
        ("fewer bytes", abi::NpMatrix { data_bytes: good.data_bytes - 1, ..good }),
        ("more bytes", abi::NpMatrix { data_bytes: good.data_bytes + 4, ..good }),
        ("no bytes", abi::NpMatrix { data: ptr::null(), ..good }),
        ("scales that do not fit", abi::NpMatrix { scales_bytes: good.scales_bytes + 2, ..good }),
        ("minima that do not fit", abi::NpMatrix { mins_bytes: good.mins_bytes + 2, ..good }),
        ("a struct that ends before its bytes", abi::NpMatrix { size: 40, ..good }),
        ("a struct that ends in a field", abi::NpMatrix { size: 44, ..good }),
    ];
    for (what, matrix) in &bad_matrices {
        let source = NpWeightSource { matrix, ..NpWeightSource::new() };
        assert!(device.prepare_source(&source).is_err(), "{what}");
    }
    assert!(device.prepare_source(&NpWeightSource::new()).is_err(), "no matrix");
    let half = NpWeightSource { gate: &good, ..NpWeightSource::new() };
    assert!(device.prepare_source(&half).is_err(), "a third of a block");
    let both = NpWeightSource { matrix: &good, up: &good, ..NpWeightSource::new() };
    assert!(device.prepare_source(&both).is_err(), "a matrix and a block");

    let tokens = tokens(device)[0];
    let weight = device.prepare(&[&sample]).expect("a good matrix");
    let mut x = Random::new(8).values(tokens * 64);
    let mut y = vec![0.0; tokens * 40];
    let (x, y) = (buffer(&mut x), buffer(&mut y));
    let product = NpProduct { weight: weight.handle(), y: &y, ..NpProduct::new() };
    let no_weight = NpProduct { weight: ptr::null_mut(), ..product };
    let short = abi::NpBuffer { bytes: y.bytes - 1, ..y };
    let short_y = NpProduct { y: &short, ..product };
    let short_x = abi::NpBuffer { bytes: x.bytes - 1, ..x };
    let odd_x = abi::NpBuffer { data: x.data.cast::<u8>().wrapping_add(1).cast(), bytes: x.bytes, ..x };
    let no_y = NpProduct { y: ptr::null(), ..product };
    let lists = [&product, &no_weight, &short_y, &no_y].map(|product| [&raw const *product; 5]);
    let good = NpMatmulJob {
        tokens: tokens as u64,
        x: &x,
        products: lists[0].as_ptr(),
        product_count: 1,
        ..NpMatmulJob::new()
    };
    let bad_jobs = [
        ("no tokens", NpMatmulJob { tokens: 0, ..good }),
        ("tokens beyond counting", NpMatmulJob { tokens: u64::MAX / 3, ..good }),
        ("no products", NpMatmulJob { product_count: 0, ..good }),
        ("five products", NpMatmulJob { product_count: 5, ..good }),
        ("one output twice", NpMatmulJob { product_count: 2, ..good }),
        ("no list of products", NpMatmulJob { products: ptr::null(), ..good }),
        ("no weight", NpMatmulJob { products: lists[1].as_ptr(), ..good }),
        ("a short output", NpMatmulJob { products: lists[2].as_ptr(), ..good }),
        ("no output", NpMatmulJob { products: lists[3].as_ptr(), ..good }),
        ("a short input", NpMatmulJob { x: &short_x, ..good }),
        ("an input between addresses", NpMatmulJob { x: &odd_x, ..good }),
        ("no input", NpMatmulJob { x: ptr::null(), ..good }),
        ("the output as input", NpMatmulJob { x: &abi::NpBuffer { bytes: u64::MAX, ..y }, ..good }),
        ("a struct that ends before its products", NpMatmulJob { size: 32, ..good }),
    ];
    for (what, job) in &bad_jobs {
        assert!(device.matmul_job(job).is_err(), "{what}");
    }
    device.matmul_job(&good).expect("the unit works as before");
}

/// Multiplies from four threads at once, and checks that all get the same. For units that take that.
pub fn threads(device: &Device) {
    assert_ne!(device.info().flags & abi::NP_DEVICE_PARALLEL, 0);
    let sample = Sample::random(abi::NP_SCHEME_F32, 64, 96, 4);
    let weight = device.prepare(&[&sample]).expect("prepare");
    let tokens = tokens(device)[0];
    let x = Random::new(9).values(tokens * 96);
    let want = device.matmul(&[&weight], &x, tokens).expect("matmul");
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..20 {
                    assert_eq!(device.matmul(&[&weight], &x, tokens).expect("matmul"), want);
                }
            });
        }
    });
}
