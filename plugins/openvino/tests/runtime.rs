//! The plugin with a real OpenVINO runtime, when there is one in the cache of models: `openvino` in it holds the unpacked
//! Python package, or a link to a folder of the runtime's libraries. Without it the tests are skipped, and say so.

use std::path::{Path, PathBuf};
use std::time::Instant;

use neuropil_plugin_abi::{self as abi, AbiStruct, NpMatmulJob, NpProduct};
use neuropil_plugin_conformance::raw::{Device, Failure, Plugin, buffer};
use neuropil_plugin_conformance::sample::{Random, SCHEMES, Sample, relative_error};
use neuropil_plugin_conformance::{Filter, Library, check, checks};

/// The folder of the libraries.
fn folder() -> Option<PathBuf> {
    let absolute = |name| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let base = absolute("XDG_CACHE_HOME").or_else(|| Some(absolute("HOME")?.join(".cache")))?;
    let root = base.join("neuropil/openvino");
    let places = ["openvino/libs", "libs", ""].map(|place| root.join(place));
    let found = places.into_iter().find(|place| {
        let names = std::fs::read_dir(place).ok().into_iter().flatten().flatten();
        names.into_iter().any(|name| name.file_name().to_string_lossy().starts_with("libopenvino_c.so"))
    });
    if found.is_none() {
        println!("SKIPPED: there is no OpenVINO runtime in {}", root.display());
    }
    found
}

fn plugin() -> Plugin {
    Plugin::of_crate("neuropil_openvino")
}

/// Opens the CPU device with options.
fn open(folder: &Path, options: &[(&str, &str)]) -> Result<Device, Failure> {
    let folder = folder.to_str().unwrap();
    plugin().open(0, &[&[("library", folder), ("device", "CPU")], options].concat())
}

#[test]
fn without_a_runtime_the_plugin_says_what_to_do() {
    let failure = plugin().probe(&[("library", "/no/such/folder")]).unwrap_err();
    assert_eq!((failure.code, failure.text.contains("library=PATH")), (abi::NP_UNSUPPORTED, true));
    let failure = plugin().probe(&[("exact", "perhaps")]).unwrap_err();
    assert_eq!(failure.code, abi::NP_INVALID, "{}", failure.text);
}

#[test]
fn it_does_what_a_plugin_must() {
    let Some(folder) = folder() else { return };
    let folder = folder.to_str().unwrap();
    // All cases take minutes: each compiles a graph.
    let some = ["info", "matmul", "buffer", "*/group4/*", "weight/plan/f32/*"];
    for (exact, filter) in some.map(|filter| ("yes", filter)).into_iter().chain([("no", "matmul")]) {
        let options = [("library", folder), ("device", "CPU"), ("exact", exact)];
        let library = Library::of_crate("neuropil_openvino", &options);
        let report = check(&library, &Filter::new(filter).unwrap(), &mut |_| ());
        println!("exact={exact}, {filter}: {} {:?}", report.summary(), report.precision());
        assert_eq!(report.failed(), 0, "{}", report.summary());
    }
}

#[test]
fn products_are_exact_on_the_cpu() {
    let Some(folder) = folder() else { return };
    let device = open(&folder, &[]).unwrap();
    let info = device.info();
    assert_eq!((info.kind, info.token_buckets.len()), (abi::NP_KIND_CPU, 0));
    println!("{} by {}", info.name, info.driver);
    let errors = checks::products(&device, |_| 2e-6);
    assert_eq!(errors.len(), SCHEMES.len());
    println!("{errors:?}");
    checks::refusals(&device);
}

#[test]
fn graphs_of_fixed_shape_take_their_token_counts_only() {
    let Some(folder) = folder() else { return };
    let device = open(&folder, &[("tokens", "2+5")]).unwrap();
    assert_eq!(device.info().token_buckets, [2, 5]);
    checks::products(&device, |_| 2e-6);
    checks::refusals(&device);
    let sample = Sample::random(abi::NP_SCHEME_F32, 8, 32, 1);
    let weight = device.prepare(&[&sample]).unwrap();
    let failure = device.matmul(&[&weight], &[0.0; 3 * 32], 3).unwrap_err();
    assert!(failure.text.contains("[2, 5]"), "{}", failure.text);
}

#[test]
fn a_deadline_is_kept() {
    let Some(folder) = folder() else { return };
    let device = open(&folder, &[]).unwrap();
    let sample = Sample::random(abi::NP_SCHEME_F32, 2048, 2048, 1);
    let weight = device.prepare(&[&sample]).unwrap();
    let tokens = 256;
    let (mut x, mut y) = (Random::new(2).values(tokens * 2048), vec![0.0; tokens * 2048]);
    let (x, y) = (buffer(&mut x), buffer(&mut y));
    let product = NpProduct { weight: weight.handle(), y: &y, ..NpProduct::new() };
    let products = [&raw const product];
    let job = NpMatmulJob {
        tokens: tokens as u64,
        x: &x,
        products: products.as_ptr(),
        product_count: 1,
        ..NpMatmulJob::new()
    };
    for (deadline_ns, want) in [(1, Some(abi::NP_TIMEOUT)), (2_000_000, Some(abi::NP_TIMEOUT)), (0, None)] {
        let found = device.matmul_job(&NpMatmulJob { deadline_ns, ..job }).err();
        assert_eq!(found.map(|failure| failure.code), want, "{deadline_ns}");
    }
    device.matmul_job(&NpMatmulJob { deadline_ns: 60_000_000_000, ..job }).unwrap();
}

#[test]
fn a_saved_plan_gives_the_same_products() {
    let Some(folder) = folder() else { return };
    for options in [&[][..], &[("tokens", "1+4")]] {
        let device = open(&folder, options).unwrap();
        assert!(device.info().compatibility.is_empty());
        for (scheme, name) in SCHEMES {
            let sample = Sample::random(scheme, 48, 96, 1);
            let weight = device.prepare(&[&sample]).unwrap();
            let Some(plan) = device.save_plan(&weight) else {
                println!("SKIPPED: no plans on this system");
                return;
            };
            let mut plan = plan.unwrap();
            let x = Random::new(2).values(4 * 96);
            let want = device.matmul(&[&weight], &x, 4).unwrap();
            let loaded = device.load_plan(&plan, 48, 96).unwrap();
            assert_eq!(device.matmul(&[&loaded], &x, 4).unwrap(), want, "{name}");
            let middle = plan.len() / 2;
            plan[middle] ^= 1;
            assert!(device.load_plan(&plan, 48, 96).is_err());
            assert!(device.load_plan(&plan[..middle], 48, 96).is_err());
        }
    }
}

/// Prints errors and speeds of a product of real size: `cargo test -p neuropil-openvino -- --ignored --nocapture`.
#[test]
#[ignore = "a measurement"]
fn measure() {
    let Some(folder) = folder() else { return };
    let (rows, cols) = (5632, 2048);
    for exact in ["yes", "no"] {
        let device = open(&folder, &[("exact", exact)]).unwrap();
        for (scheme, name) in SCHEMES {
            let sample = Sample::random(scheme, rows, cols, 1);
            let before = resident();
            let start = Instant::now();
            let weight = device.prepare(&[&sample]).unwrap();
            let prepared = start.elapsed();
            print!("exact={exact} {name:9} prepare {:4} ms", prepared.as_millis());
            for tokens in [1, 128] {
                let mut x = Random::new(2).values(tokens * cols);
                let mut y = vec![0.0; tokens * rows];
                let mut best = f64::INFINITY;
                for _ in 0..if tokens == 1 { 100 } else { 8 } {
                    let start = Instant::now();
                    device.matmul_in_place(&weight, &mut x, &mut y, tokens).unwrap();
                    best = best.min(start.elapsed().as_secs_f64());
                }
                let some: Vec<f64> = x[..cols].iter().map(|x| f64::from(*x)).collect();
                let error = relative_error(&y[..rows], &sample.product(&some));
                let speed = 2e-9 * (rows * cols * tokens) as f64 / best;
                print!(" | {tokens:3} tokens {:7.3} ms {speed:6.1} GFLOP/s error {error:.1e}", best * 1e3);
            }
            let (grown, said) = (resident().saturating_sub(before) >> 20, weight.bytes >> 20);
            println!(" | grown {grown} MiB, said {said} MiB, source {} MiB", sample.data.len() >> 20);
        }
    }
}

/// Resident bytes of this process; 0 where the system does not tell.
fn resident() -> usize {
    let text = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    text.split(' ').nth(1).and_then(|pages| pages.parse::<usize>().ok()).unwrap_or(0) * 4096
}
