//! The suite on plugins through the border: good ones pass, broken ones fail with a sentence that names the case.

mod common;

use std::time::Instant;

use neuropil_plugin_conformance::{Filter, Library, Report, check};

use common::{complete, good, sim};

fn run(options: &[(&str, &str)], filter: &str) -> Report {
    let library = Library::load(sim(), options).unwrap();
    let filter = if filter.is_empty() { Filter::all() } else { Filter::new(filter).unwrap() };
    check(&library, &filter, &mut |_| ())
}

#[test]
fn the_software_npu_passes() {
    let began = Instant::now();
    let report = run(&[], "");
    good("software NPU", &report);
    println!("{:?}", began.elapsed());
    assert!(report.passed() >= 2000, "{}", report.summary());
    assert_eq!(report.cases.len(), report.known.len());
}

#[test]
fn units_that_do_less_pass_with_less() {
    let less =
        [("schemes", "channel8+channel4"), ("outliers", "off"), ("clusters", "off"), ("buckets", "any")];
    let report = run(&less, "");
    good("channels alone", &report);
    assert!(report.unsupported() > report.passed(), "{}", report.summary());
    let report = run(&[("activations", "8"), ("buckets", "3")], "*/channel*");
    good("activations of 8 bits", &report);
}

#[test]
fn a_plugin_that_offers_everything_passes() {
    let began = Instant::now();
    let library = Library::load(complete(), &[]).unwrap();
    let report = check(&library, &Filter::all(), &mut |_| ());
    good("complete", &report);
    println!("{:?}", began.elapsed());
    assert!(
        report.unsupported() <= 4,
        "{:?}",
        report
            .cases
            .iter()
            .filter(|case| { matches!(case.status, neuropil_plugin_conformance::Status::Unsupported(_)) })
            .map(|case| &case.id)
            .collect::<Vec<_>>()
    );
}

#[test]
fn what_is_broken_fails_with_a_reason() {
    for (fault, filter, word) in [
        ("tile@matmul:9", "matmul", "is allowed: token"),
        ("nan@matmul:2", "matmul", "is NaN"),
        ("error@matmul:3", "matmul", "matmul failed: NP_INTERNAL: the fault that was asked for"),
        ("panic@matmul", "matmul", "the plugin panicked"),
        ("lost@matmul", "weight", "NP_LOST"),
        ("oom@prepare:3", "weight", "prepare failed: NP_OUT_OF_MEMORY"),
        ("tile@cluster:5", "cluster", "is allowed: token"),
        ("error@query:2", "info", "and then"),
        ("error@open:2", "info", "open failed"),
        ("error@probe", "info", "probe failed"),
    ] {
        let report = run(&[("fault", fault)], filter);
        assert!(report.failed() > 0, "{fault}");
        let failures: Vec<(&str, &str)> =
            report.failures().map(|(case, reason)| (case.id.as_str(), reason)).collect();
        assert!(failures.iter().any(|(_, reason)| reason.contains(word)), "{fault}: {failures:?}");
    }
}
