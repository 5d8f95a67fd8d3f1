//! Plugins with one mistake each: the suite finds it, and in the group where it belongs.

mod common;

use std::path::{Path, PathBuf};
use std::process::Command;

use neuropil_plugin_conformance::{Filter, Library, Report, check};

/// The fixture with a mistake; `None` where there is no compiler.
fn fixture(mistake: &str) -> Option<PathBuf> {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let file = format!("mistake-{mistake}-{}.so", std::process::id());
    let out = Path::new(env!("CARGO_TARGET_TMPDIR")).join(file);
    let mut cc = Command::new("cc");
    cc.args([
        "-std=c11",
        "-O1",
        "-shared",
        "-fPIC",
        "-Wall",
        "-Wextra",
        "-Wno-unused-parameter",
        "-Werror",
        "-I",
    ]);
    cc.arg(here.join("../abi/include")).arg(format!("-DMISTAKE={mistake}"));
    cc.arg(here.join("tests/fixtures/mistakes.c")).arg("-lm").arg("-o").arg(&out);
    let Ok(run) = cc.output() else {
        println!("skipped: there is no cc here");
        return None;
    };
    assert!(run.status.success(), "{mistake}: {}", String::from_utf8_lossy(&run.stderr));
    Some(out)
}

fn run(mistake: &str, filter: &Filter) -> Option<Report> {
    let path = fixture(mistake)?;
    let library = Library::load(&path, &[]).unwrap();
    let report = check(&library, filter, &mut |_| ());
    std::fs::remove_file(path).unwrap();
    Some(report)
}

/// Mistakes, some cases that find them, and words of the reason.
const MISTAKES: [(&str, &str, &str); 52] = [
    ("LEAVES_THE_LAST", "matmul/product/*/13x3*", "is NaN"),
    ("WRITES_PAST", "matmul/product/*/13x3*", "values beside an output"),
    ("WRITES_BEFORE", "matmul/product/*/13x3*", "values beside an output"),
    ("WRITES_THE_INPUT", "matmul/product/*/13x3*", "x, an input of the job, was written"),
    ("NO_LAST_COLUMN", "matmul/product/*/13x3*", "is allowed"),
    ("FIRST_TOKEN_FOR_ALL", "matmul/product/*/13x3*", "is allowed: token 1"),
    ("SWAPS_ROWS", "matmul/product/*/13x3*", "is allowed: token 0"),
    ("FIRST_PRODUCT_FOR_ALL", "matmul/products/f32/*", "is allowed"),
    ("ZERO_IS_NAN", "matmul/product/*/13x3*", "is NaN"),
    ("LARGE_IS_CUT", "matmul/product/f32/40x64/*", "is allowed"),
    ("DENORMAL_IS_INFINITE", "matmul/product/*/13x3*", "is inf"),
    ("OTHER_BITS", "soak/equal-bits/f32", "has other bits than the first"),
    ("UNALIGNED_IS_WRONG", "buffer/address/f32/*", "is allowed"),
    ("TWO_TOKENS_ARE_WRONG", "matmul/product/*/13x3*", "is allowed"),
    ("FIRST_SCALE_FOR_ALL", "matmul/product/channel8/*", "is allowed"),
    ("NO_OUTLIERS", "matmul/product/channel4+outliers/*", "is allowed"),
    ("NO_MINIMA", "matmul/product/group4m/*", "is allowed"),
    ("NIBBLES_TURNED", "matmul/product/group4/*", "is allowed"),
    ("STALE_WEIGHT", "weight/*/f32*", "is allowed"),
    ("KEEPS_WEIGHTS", "soak/memory/f32", "the process grew by"),
    ("NO_THRESHOLD", "cluster/*/f32/32x64/*", "is allowed"),
    ("WRITES_HIDDEN", "cluster/*/f32/32x64/*", "hidden, which stays in this stage, was written"),
    ("RELU2_IS_RELU", "cluster/*/f32/32x64/*", "is allowed"),
    ("DRELU_IS_RELU", "cluster/*/f32/32x64/*", "is allowed"),
    ("NEITHER_NATIVE_NOR_EMULATED", "info", "say neither native nor emulated"),
    ("NO_REASON", "info", "its no has no reason"),
    ("FORGETFUL", "info", "and then"),
    ("YES_TO_ALL", "info", "it answers yes"),
    ("ANY_VERSION", "info", "it gives a table"),
    ("EQUAL_MINOR_ONLY", "info", "it gives no table"),
    ("NO_NAME", "info", "a unit has no name"),
    ("BUCKETS_FALL", "info", "are not ascending from 1"),
    ("OTHER_UNITS", "info", "it tells of other units the second time"),
    ("TAKES_ANY_OPTION", "info", "so a slip is not seen"),
    ("CODE_AND_STATUS_DIFFER", "matmul/product/*/13x3*", "it returns the code 0, but writes 7"),
    ("A_CODE_THAT_IS_NONE", "matmul/product/*/13x3*", "42, which is no code of the header"),
    ("TEXT_PAST_ITS_ROOM", "info", "bytes, but less room"),
    ("TEXT_IS_NO_UTF8", "info", "is no UTF-8"),
    ("REFUSES_LONGER_STRUCTS", "errors/*/f32/*", "of another size"),
    ("TAKES_BAD_JOBS", "errors/*/f32/*", "it is not refused"),
    ("TAKES_BAD_MATRICES", "errors/*/f32/*", "it is not refused"),
    ("NO_WEIGHT", "weight/*/f32*", "it answers NP_OK, but gives no weight"),
    ("FLAGS_OF_THE_REPORT", "buffer/report/*", "the report has the flags 512"),
    ("TOLD_TWICE", "completion/*/f32*", "was told 2 times"),
    ("TOLD_AND_REFUSED", "completion/*/f32*", "but the end is told too"),
    ("NO_REPORT", "completion/*/f32*", "is told without a report"),
    ("CANCEL_STAYS", "completion/*/f32*", "NP_CANCELLED"),
    ("NO_OFFSET", "buffer/imported/f32/*", "values beside the output were written"),
    ("PLAN_LOSES_A_VALUE", "weight/plan/f32/round-trip", "is allowed"),
    ("NO_MEMORY", "buffer/imported/f32/*", "gives no memory"),
    ("TAKES_ANY_MEMORY", "buffer/import-refused/*", "it is not refused"),
    ("PLAN_UNCHECKED", "weight/*/f32*", "a damaged plan is taken"),
];

// One test: what is left behind by a mistake must not be in the way of the others.
#[test]
fn every_mistake_is_found_where_it_belongs_and_without_one_everything_passes() {
    let Some(report) = run("NONE", &Filter::all()) else { return };
    common::good("no mistake", &report);
    assert!(report.passed() > 4000, "{}", report.summary());
    for (mistake, filter, word) in MISTAKES {
        let Some(report) = run(mistake, &Filter::new(filter).unwrap()) else { return };
        let reasons: Vec<(&str, &str)> =
            report.failures().map(|(case, reason)| (case.id.as_str(), reason)).collect();
        let found = reasons.iter().find(|(_, reason)| reason.contains(word));
        match found {
            Some((id, reason)) => println!("{mistake}: {} failures, such as {id}: {reason}", reasons.len()),
            None => panic!("{mistake}: {} of {} failed: {reasons:?}", reasons.len(), report.cases.len()),
        }
    }
}
