//! The plugin with real libraries of QNN, where there are some (see `common`). HTP is the simulator on x86-64.
//!
//! The simulator is slow: shapes are small.

mod common;

use std::path::PathBuf;
use std::time::Instant;

use common::{libraries, open, plugin};
use neuropil_plugin_abi::{self as abi, AbiStruct, NpMatmulJob, NpProduct};
use neuropil_plugin_conformance::checks;
use neuropil_plugin_conformance::raw::{Device, buffer};
use neuropil_plugin_conformance::sample::{Random, SCHEMES, Sample, relative_error};

const HTP: &str = "libQnnHtp.so";
const CPU: &str = "libQnnCpu.so";

/// Largest errors by precision: floats of 32 and 16 bits, codes of 16 and 8. The largest errors of codes are those of a
/// single row, which may happen to be small beside its terms.
const PRECISIONS: [(&str, f64); 4] = [("f32", 1e-6), ("f16", 3e-3), ("a16", 0.03), ("a8", 0.2)];

fn bound(precision: &str, scheme: u32) -> f64 {
    let of = |name: &str| PRECISIONS.iter().find(|(other, _)| *other == name).unwrap().1;
    match (precision, scheme) {
        ("a16" | "a8", abi::NP_SCHEME_F16) => of("f16"),
        _ => of(precision),
    }
}

/// What version a library is, for people.
fn version(device: &Device) -> String {
    device.info().driver.split(" (").next().unwrap().into()
}

#[test]
fn every_precision_and_operation_gives_right_products_on_htp() {
    for library in libraries(HTP) {
        for (precision, schemes) in PRECISIONS.map(|(precision, _)| precision).into_iter().zip([7, 7, 3, 3]) {
            for op in ["fc", "conv"] {
                let options = [("precision", precision), ("op", op), ("tokens", "1+5")];
                let device = open(&library, &options).unwrap();
                assert_eq!((device.info().kind, device.info().token_buckets), (abi::NP_KIND_NPU, vec![1, 5]));
                let errors = checks::products(&device, |scheme| bound(precision, scheme));
                println!("{} {precision} {op} {errors:?}", version(&device));
                assert_eq!(errors.len(), schemes);
            }
        }
    }
}

#[test]
fn products_are_exact_on_the_cpu() {
    for library in libraries(CPU) {
        for op in ["fc", "conv"] {
            let device = open(&library, &[("tokens", "1+5"), ("op", op)]).unwrap();
            assert_eq!(device.info().kind, abi::NP_KIND_CPU);
            let errors = checks::products(&device, |_| 1e-6);
            assert_eq!(errors.len(), SCHEMES.len());
            println!("{} {op} {errors:?}", version(&device));
            checks::refusals(&device);
        }
        let failure = open(&library, &[("precision", "f16")]).err().unwrap();
        assert!(failure.text.contains("f32 only"), "{}", failure.text);
    }
}

#[test]
fn mistakes_of_the_host_are_refused() {
    for library in libraries(HTP) {
        let device = open(&library, &[("tokens", "2")]).unwrap();
        checks::refusals(&device);
        let sample = Sample::random(abi::NP_SCHEME_CHANNEL8, 8, 32, 1);
        let weight = device.prepare(&[&sample]).unwrap();
        let failure = device.matmul(&[&weight], &[0.0; 3 * 32], 3).unwrap_err();
        assert!(failure.text.contains("[2]"), "{}", failure.text);
        let (mut x, mut y) = (vec![1.0; 2 * 32], vec![0.0; 2 * 8]);
        let (x, y) = (buffer(&mut x), buffer(&mut y));
        let product = NpProduct { weight: weight.handle(), y: &y, ..NpProduct::new() };
        let products = [&raw const product];
        let products = products.as_ptr();
        let job = NpMatmulJob {
            tokens: 2,
            deadline_ns: 1,
            x: &x,
            products,
            product_count: 1,
            ..NpMatmulJob::new()
        };
        assert_eq!(device.matmul_job(&job).unwrap_err().code, abi::NP_TIMEOUT);
    }
}

/// A token of values that no fixed range suits, beside plain ones: its outputs are right too, and the others untouched.
#[test]
fn tokens_of_any_size_are_multiplied() {
    for library in libraries(HTP) {
        for precision in ["f16", "a16", "a8"] {
            let device = open(&library, &[("tokens", "4"), ("precision", precision)]).unwrap();
            let sample = Sample::random(abi::NP_SCHEME_CHANNEL8, 24, 64, 1);
            let weight = device.prepare(&[&sample]).unwrap();
            let mut x = Random::new(2).values(4 * 64);
            x[..64].iter_mut().for_each(|x| *x *= 1e20);
            // Along a row of the weight the result is as large as it can be, which no guess allows for.
            let row = sample.values[64..128].iter().map(|w| *w as f32);
            x[64..128].iter_mut().zip(row).for_each(|(x, w)| *x = w);
            x[128..192].fill(0.0);
            let wide: Vec<f64> = x.iter().map(|x| f64::from(*x)).collect();
            let (found, want) = (device.matmul(&[&weight], &x, 4).unwrap().remove(0), sample.product(&wide));
            for token in [0, 1, 3] {
                let places = token * 24..(token + 1) * 24;
                let error = relative_error(&found[places.clone()], &want[places]);
                assert!(
                    error <= bound(precision, abi::NP_SCHEME_CHANNEL8),
                    "{precision} token {token}: {error:e}"
                );
            }
            assert_eq!(found[48..72], [0.0; 24]);
            x[70] = f32::NAN;
            let found = device.matmul(&[&weight], &x, 4).unwrap().remove(0);
            assert!(found[24..48].iter().all(|y| y.is_nan()) && found[..24].iter().all(|y| y.is_finite()));
        }
    }
}

#[test]
fn a_saved_plan_gives_the_same_products_in_another_device() {
    let libraries = [libraries(HTP), libraries(CPU)].concat();
    for library in &libraries {
        let options = [("tokens", "1+4")];
        let device = open(library, &options).unwrap();
        for scheme in [abi::NP_SCHEME_F16, abi::NP_SCHEME_CHANNEL8, abi::NP_SCHEME_CHANNEL4] {
            let mut sample = Sample::random(scheme, 48, 96, 1);
            if scheme == abi::NP_SCHEME_CHANNEL4 {
                sample = sample.with_outliers(3);
            }
            let weight = device.prepare(&[&sample]).unwrap();
            let mut plan = match device.save_plan(&weight).unwrap() {
                Ok(plan) => plan,
                // QNN's CPU backend has no binaries.
                Err(failure) if library.ends_with(CPU) => {
                    println!("no plans: {}", failure.text);
                    break;
                }
                Err(failure) => panic!("{failure:?}"),
            };
            let x = Random::new(2).values(4 * 96);
            let want = device.matmul(&[&weight], &x, 4).unwrap();
            let want_one = device.matmul(&[&weight], &x[..96], 1).unwrap();
            let other = open(library, &options).unwrap();
            assert_eq!(other.info(), device.info());
            let start = Instant::now();
            let loaded = other.load_plan(&plan, 48, 96).unwrap();
            println!("{} bytes were loaded in {:?}", plan.len(), start.elapsed());
            assert_eq!(other.matmul(&[&loaded], &x, 4).unwrap(), want);
            assert_eq!(other.matmul(&[&loaded], &x[..96], 1).unwrap(), want_one);
            // Every other unit says for whom it is.
            for another in libraries.iter().filter(|another| *another != library) {
                let another = open(another, &options).unwrap();
                let text = another.load_plan(&plan, 48, 96).err().unwrap().text;
                assert!(text.contains(&version(&device)) && text.contains("this unit is"), "{text}");
            }
            let another = open(library, &[("tokens", "1+8")]).unwrap();
            assert!(another.load_plan(&plan, 48, 96).is_err());
            let middle = plan.len() / 2;
            plan[middle] ^= 1;
            assert!(other.load_plan(&plan, 48, 96).is_err());
            assert!(other.load_plan(&plan[..middle], 48, 96).is_err());
        }
    }
}

#[test]
fn the_cache_keeps_compiled_weights() {
    for (number, library) in libraries(HTP).iter().enumerate() {
        let name = format!("qnn-cache-{number}-{}", std::process::id());
        let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name);
        let options = [("tokens", "1+4"), ("cache", folder.to_str().unwrap())];
        let sample = Sample::random(abi::NP_SCHEME_CHANNEL8, 64, 256, 1);
        let x = Random::new(2).values(256);
        let run = || {
            let device = open(library, &options).unwrap();
            let start = Instant::now();
            let weight = device.prepare(&[&sample]).unwrap();
            println!("prepared in {:?}", start.elapsed());
            device.matmul(&[&weight], &x, 1).unwrap()
        };
        let first = run();
        let files = || {
            let entries = std::fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path());
            entries.collect::<Vec<PathBuf>>()
        };
        let [file] = &files()[..] else { panic!("one weight, one file") };
        let written = std::fs::read(file).unwrap();
        assert_eq!(run(), first);
        // What was damaged is made anew.
        std::fs::write(file, &written[..written.len() / 3]).unwrap();
        assert_eq!(run(), first);
        assert_eq!(std::fs::read(file).unwrap().len(), written.len());
        std::fs::remove_dir_all(folder).unwrap();
    }
}

#[test]
fn votes_for_power_are_taken() {
    for library in libraries(HTP) {
        for power in ["burst", "balanced", "default"] {
            let device = open(&library, &[("power", power), ("tokens", "2+3")]).unwrap();
            checks::products(&device, |_| 0.02);
        }
    }
}

#[test]
fn a_unit_is_described_before_it_is_opened() {
    for library in [libraries(HTP), libraries(CPU)].concat() {
        let options = [("library", library.to_str().unwrap())];
        let units = plugin().probe(&options).unwrap();
        assert_eq!(units, [plugin().open(0, &options).unwrap().info()]);
        println!("{} by {}", units[0].name, units[0].driver);
        assert!(plugin().open(1, &options).is_err());
    }
}

/// Prints errors and times: `cargo test -p neuropil-qnn --test runtime -- --ignored --nocapture`.
#[test]
#[ignore = "a measurement"]
fn measure() {
    let (rows, cols, tokens) = (512, 512, 128);
    let units = libraries(HTP).into_iter().flat_map(|library| {
        PRECISIONS.map(|(precision, _)| (library.clone(), precision)).into_iter().collect::<Vec<_>>()
    });
    for (library, precision) in units.chain(libraries(CPU).into_iter().map(|library| (library, "f32"))) {
        for op in ["fc", "conv"] {
            let options = [("precision", precision), ("tokens", "128"), ("op", op)];
            let device = open(&library, &options).unwrap();
            for (scheme, name) in SCHEMES {
                let sample = Sample::random(scheme, rows, cols, 1);
                let start = Instant::now();
                let Ok(weight) = device.prepare(&[&sample]) else { continue };
                let prepared = start.elapsed();
                // Values as those of a model: bell-shaped, and every 61st is ten times as large.
                for (what, large) in [("bell", 1.0), ("large", 10.0)] {
                    let mut random = Random::new(2);
                    let mut bell = || random.values(12).iter().sum::<f32>() / 2.0;
                    let mut x: Vec<f32> =
                        (0..tokens * cols).map(|i| bell() * if i % 61 == 3 { large } else { 1.0 }).collect();
                    let mut y = vec![0.0; tokens * rows];
                    let start = Instant::now();
                    device.matmul_in_place(&weight, &mut x, &mut y, tokens).unwrap();
                    let run = start.elapsed();
                    let wide: Vec<f64> = x.iter().map(|x| f64::from(*x)).collect();
                    let error = relative_error(&y, &sample.product(&wide));
                    println!(
                        "{} {precision} {op:4} {name:8} {what:5} error {error:.1e} prepare {prepared:.0?} run {run:.0?}",
                        version(&device)
                    );
                }
            }
        }
    }
}
