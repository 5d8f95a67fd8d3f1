//! `plugin check`: runs the conformance suite on a plugin, and says what it found.
//!
//! The suite runs in a process of its own (see [`child`]), so a plugin that crashes or hangs is one more case that failed.

mod child;
mod probe;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use neuropil_plugin_conformance::{CaseReport, Expectations, Filter, GROUPS, Report, Status};
use serde_json::{Value, json};

use crate::error::{CliError, Exit, one_line};
use crate::output;

/// Flags of `plugin`.
#[derive(clap::Args)]
#[command(after_help = "Example:
  neuropil plugin check ./libmy_npu.so")]
pub struct Args {
    #[command(subcommand)]
    what: What,
}

#[derive(clap::Subcommand)]
enum What {
    /// Test whether a plugin does what the plugin interface asks for
    Check(CheckArgs),
    /// Load a plugin and open its units; what another process of the program does for safety
    #[command(hide = true)]
    Probe(probe::Args),
}

#[derive(clap::Args)]
#[command(after_help = "Example:
  neuropil plugin check './libmy_npu.so?library=/vendor/libQnnHtp.so' --filter matmul --expect known-failures.txt

A case is passed, failed, or unsupported: the unit said no when it was asked. What the plugin prints is not shown; of a
plugin that crashes, the last line is. A list of expected failures has one case a line, and * stands for any text:
  matmul/product/channel8/*/denormal  # the driver flushes them, and calls that wrong

With --json: {\"plugin\":{\"name\",\"version\",\"abi\"},\"total\",\"passed\",\"failed\",\"unsupported\",\"expected_failures\",\"precision\":
[{\"scheme\",\"error\",\"class\"}..],\"cases\":[{\"id\",\"group\",\"status\",\"reason\",\"error\",\"ns\"}..]}: status is passed, failed,
unsupported or expected_failure, and class is exact, f16, int8 or none.

Exit code 6 when a case failed, or the library is no plugin; 3 when there is no such file.")]
struct CheckArgs {
    /// The library, as --device takes it: PATH or PATH?key=value&key=value, where the keys are the plugin's
    #[arg(value_name = "PATH")]
    plugin: String,
    /// Run only the cases of a group, or those of a pattern such as matmul/*/group4/*
    #[arg(long, value_name = "GROUP", value_parser = Filter::new)]
    filter: Option<Filter>,
    /// A list of cases that are known to fail
    #[arg(long, value_name = "FILE")]
    expect: Option<PathBuf>,
    /// How long a case may take, in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 120, value_parser = clap::value_parser!(u64).range(1..=86400))]
    timeout: u64,
    /// Print one JSON document
    #[arg(long)]
    json: bool,
    /// Be the process that runs the suite
    #[arg(long, hide = true)]
    child: bool,
}

/// Runs the verb.
pub fn run(args: &Args) -> Result<(), CliError> {
    let args = match &args.what {
        What::Check(args) => args,
        What::Probe(args) => return probe::run(args),
    };
    let spec = args.plugin.strip_prefix("plugin:").unwrap_or(&args.plugin);
    let (path, options) = spec.split_once('?').unwrap_or((spec, ""));
    let filter = args.filter.clone().unwrap_or_default();
    if args.child {
        return child::be(path, options, &filter);
    }
    let expectations = args.expect.as_ref().map(|file| {
        let text = std::fs::read_to_string(file).map_err(|error| {
            CliError::new(Exit::File, format!("{}: {error}; see --expect", file.display()))
        })?;
        Expectations::parse(&text)
            .map(|list| (file, list))
            .map_err(|error| CliError::new(Exit::Usage, format!("{}: {error}", file.display())))
    });
    let expectations = expectations.transpose()?;
    let (plugin, mut report, last) = child::check(args, Duration::from_secs(args.timeout))?;
    if !report.known.is_empty() && !report.known.iter().any(|id| filter.takes(id)) {
        let text = format!("--filter {} leaves no case; --json lists their names", filter.text());
        return Err(CliError::new(Exit::Usage, text));
    }
    if let Some((file, list)) = &expectations {
        list.apply(&mut report)
            .map_err(|error| CliError::new(Exit::Usage, format!("{}: {error}", file.display())))?;
    }
    // Nobody can expect this one: what comes after it was not tested.
    report.cases.extend(last);
    match args.json {
        true => output::json(&document(&plugin, &report))?,
        false => output::text(&text(&plugin, &report))?,
    }
    match report.failures().next() {
        None => Ok(()),
        Some((case, reason)) => Err(CliError::new(
            Exit::Device,
            format!(
                "plugin {path} fails {} of {} cases, the first is {}: {reason}",
                report.failed(),
                report.cases.len(),
                case.id
            ),
        )),
    }
}

/// What a plugin says of itself.
#[derive(Default)]
struct Plugin {
    name: String,
    version: String,
    abi: String,
}

fn document(plugin: &Plugin, report: &Report) -> Value {
    let precision = report
        .precision()
        .into_iter()
        .map(|(scheme, error, class)| json!({ "scheme": scheme, "error": error, "class": class.name() }));
    json!({
        "plugin": { "name": plugin.name, "version": plugin.version, "abi": plugin.abi },
        "total": report.cases.len(),
        "passed": report.passed(),
        "failed": report.failed(),
        "unsupported": report.unsupported(),
        "expected_failures": report.expected(),
        "precision": precision.collect::<Vec<_>>(),
        "cases": report.cases.iter().map(case_document).collect::<Vec<_>>(),
    })
}

/// A case; `reason`, `error` and `ns` only where there are some.
fn case_document(case: &CaseReport) -> Value {
    let (status, reason) = match &case.status {
        Status::Passed => ("passed", None),
        Status::Failed(reason) => ("failed", Some(reason)),
        Status::Expected(reason) => ("expected_failure", Some(reason)),
        Status::Unsupported(reason) => ("unsupported", Some(reason)),
    };
    let mut document = json!({ "id": case.id, "group": case.group(), "status": status });
    if let Some(reason) = reason {
        document["reason"] = json!(reason);
    }
    if let Some(error) = case.error.filter(|error| error.is_finite()) {
        document["error"] = json!(error);
    }
    if let Some(ns) = case.ns {
        document["ns"] = json!(ns);
    }
    document
}

fn text(plugin: &Plugin, report: &Report) -> String {
    let (name, version) = (one_line(&plugin.name), one_line(&plugin.version));
    let mut text = format!("{name} {version}, plugin interface {}\n", plugin.abi);
    for group in GROUPS {
        let cases: Vec<CaseReport> =
            report.cases.iter().filter(|case| case.group() == group).cloned().collect();
        if !cases.is_empty() {
            let of_group = Report { known: Vec::new(), cases };
            text += &format!("  {group:<10} {}\n", counts(&of_group));
        }
    }
    let precision = report
        .precision()
        .into_iter()
        .map(|(scheme, error, class)| format!("{scheme} {} ({error:.0e})", class.name()));
    let precision: Vec<String> = precision.collect();
    if !precision.is_empty() {
        text += &format!("  precision: {}\n", precision.join(", "));
    }
    for (case, reason) in report.failures().take(MOST_FAILURES) {
        text += &format!("  failed: {}: {}\n", case.id, one_line(reason));
    }
    if report.failed() > MOST_FAILURES {
        text += &format!("  and {} others: see --json\n", report.failed() - MOST_FAILURES);
    }
    // What a unit does not do, by reason.
    let mut reasons: BTreeMap<&str, usize> = BTreeMap::new();
    for case in &report.cases {
        if let Status::Unsupported(reason) = &case.status {
            *reasons.entry(reason).or_default() += 1;
        }
    }
    let mut reasons: Vec<(&str, usize)> = reasons.into_iter().collect();
    reasons.sort_by_key(|(_, count)| std::cmp::Reverse(*count));
    let others = reasons.len().saturating_sub(MOST_REASONS);
    for (reason, count) in reasons.iter().take(MOST_REASONS) {
        text += &format!("  unsupported, {count} times: {}\n", one_line(reason));
    }
    if others > 0 {
        text += &format!("  unsupported for {others} other reasons: see --json\n");
    }
    text + &format!("{} cases: {}\n", report.cases.len(), counts(report))
}

/// Failed cases that are shown.
const MOST_FAILURES: usize = 20;

/// Reasons of what is not supported that are shown.
const MOST_REASONS: usize = 8;

fn counts(report: &Report) -> String {
    let mut text = format!(
        "{} passed, {} failed, {} unsupported",
        report.passed(),
        report.failed(),
        report.unsupported()
    );
    if report.expected() > 0 {
        text += &format!(", {} failed as expected", report.expected());
    }
    text
}
