//! Graphs for chips that are not here, on the simulator of HTP. A process has one chip for good, so each is tested in a
//! process of its own: this program again, with a test that is ignored otherwise.

mod common;

use std::process::Command;

use common::{libraries, open};
use neuropil_plugin_abi as abi;
use neuropil_plugin_conformance::raw::Failure;
use neuropil_plugin_conformance::sample::{Random, Sample, relative_error};

const HTP: &str = "libQnnHtp.so";

#[test]
fn graphs_for_other_chips_are_right() {
    if libraries(HTP).is_empty() {
        return;
    }
    for test in ["none", "wrong", "sm8650", "sm8750", "sm8850"] {
        let mut again = Command::new(std::env::current_exe().unwrap());
        let run = again.args(["--exact", test, "--ignored", "--nocapture"]).output().unwrap();
        let said = String::from_utf8_lossy(&run.stdout) + String::from_utf8_lossy(&run.stderr);
        assert!(run.status.success() && said.contains("1 passed"), "{test}: {said}");
        said.lines().filter(|line| line.starts_with("soc ")).for_each(|line| println!("{line}"));
    }
}

/// The error of a product of a scheme.
fn error(library: &std::path::Path, scheme: u32, options: &[(&str, &str)]) -> Result<f64, Failure> {
    let device = open(library, &[&[("tokens", "2")], options].concat())?;
    let sample = Sample::random(scheme, 32, 256, 1);
    let weight = device.prepare(&[&sample])?;
    let x = Random::new(2).values(2 * 256);
    let wide: Vec<f64> = x.iter().map(|x| f64::from(*x)).collect();
    Ok(relative_error(&device.matmul(&[&weight], &x, 2)?[0], &sample.product(&wide)))
}

fn chip(soc: &str) {
    for library in libraries(HTP) {
        let codes = [abi::NP_SCHEME_CHANNEL8, abi::NP_SCHEME_CHANNEL4];
        for (precision, bound, schemes) in [
            ("f16", 1e-3, &[abi::NP_SCHEME_F16, abi::NP_SCHEME_CHANNEL8, abi::NP_SCHEME_CHANNEL4][..]),
            ("a16", 0.01, &codes),
            ("a8", 0.06, &codes),
            // The chip computes these in halves, and the simulator follows it: so the number was read.
            ("f32", 1e-3, &[abi::NP_SCHEME_F32]),
        ] {
            for scheme in schemes {
                let found = error(&library, *scheme, &[("precision", precision), ("soc", soc)]).unwrap();
                println!("soc {soc} {precision} scheme {scheme}: {found:.1e}");
                assert!(found < bound && (precision != "f32" || found > 1e-5));
            }
        }
    }
}

#[test]
#[ignore = "of another process"]
fn sm8650() {
    chip("57");
}

#[test]
#[ignore = "of another process"]
fn sm8750() {
    chip("69");
}

#[test]
#[ignore = "of another process"]
fn sm8850() {
    chip("87");
}

#[test]
#[ignore = "of another process"]
fn none() {
    for library in libraries(HTP) {
        assert!(error(&library, abi::NP_SCHEME_F32, &[("precision", "f32")]).unwrap() < 1e-6);
        let text = open(&library, &[("soc", "57")]).err().unwrap().text;
        assert!(
            text.contains("used QNN for the chip at hand, so another one is needed for SoC 57"),
            "{text}"
        );
        assert!(error(&library, abi::NP_SCHEME_F32, &[("precision", "f32")]).unwrap() < 1e-6);
    }
}

#[test]
#[ignore = "of another process"]
fn wrong() {
    for library in libraries(HTP) {
        let text = open(&library, &[("soc", "4000000")]).err().unwrap().text;
        assert!(text.contains("cannot open its device"), "{text}");
        let text = open(&library, &[]).err().unwrap().text;
        assert!(text.contains("SoC 4000000"), "{text}");
    }
}
