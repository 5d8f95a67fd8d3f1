//! What a plugin must do, as a suite of cases that run by name.
//!
//! ```no_run
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! use neuropil_plugin_conformance::{Filter, Library, check};
//!
//! let library = Library::load("libvendor_npu.so".as_ref(), &[("library", "/vendor/lib/libQnnHtp.so")])?;
//! let report = check(&library, &Filter::all(), &mut |_| ());
//! assert_eq!(report.failed(), 0, "{}", report.summary());
//! # Ok(())
//! # }
//! ```
//!
//! The suite sees a plugin through the C border alone ([`raw`]), and shares nothing with the host or the SDK but the
//! layouts; so a mistake that these two share does not hide one of a plugin. It also runs on anything that implements
//! [`neuropil_device::Device`] ([`check_device`]): a backend of the tree, or a plugin behind the host.
//!
//! A case ends as passed, failed, or *unsupported*: the unit said no when it was asked, which is its right. Its id,
//! `group/what/scheme/shape/tokens/...`, is the same in every run. Results are compared with 64-bit floats; [`bounds`]
//! says how wrong they may be. Outputs are filled with NaN before and lie between marks, and inputs must stay as they are.
//!
//! | group | |
//! |---|---|
//! | `info` | the table, versions, what units say of themselves, answers to questions, statuses |
//! | `buffer` | addresses, buffers with more room, imported memory |
//! | `weight` | codes of every sort, weights that come and go, saved plans |
//! | `matmul` | products of every scheme: odd shapes, token counts, inputs; several products of a job |
//! | `cluster` | feed-forwards: stages, non-linearities, thresholds, mixed schemes |
//! | `completion` | jobs that are submitted, deadlines, cancelling |
//! | `errors` | what must be refused; structs of hosts of other versions |
//! | `threads` | callers at once and in turn |
//! | `soak` | the same again and again: equal bits, no more memory |
//! | `timing` | medians, for people; only a deadline that is passed by far fails |
//!
//! A plugin that crashes takes the process with it. `neuropil plugin check` therefore runs the suite in a process of its
//! own, and watches the [`Event`]s. [`checks`] has a few tests with bounds of the caller's own, for tests of a plugin that
//! know how exact it is.

#![deny(unsafe_code)]

mod border;
pub mod bounds;
mod case;
pub mod checks;
mod device;
mod groups;
mod names;
#[allow(unsafe_code)]
pub mod raw;
mod reference;
mod report;
pub mod sample;
mod subject;

use neuropil_device::Device;

pub use border::Library;
pub use case::Event;
pub use names::{Expectations, Filter, matches};
pub use report::{CaseReport, GROUPS, Precision, Report, Status};

use case::{Cases, Found, Stop};
use device::Unit;
use subject::Subject;

/// The case that opens the unit. It always runs.
const OPEN: &str = "info/open/unit";

/// Tests the first unit of a plugin. `watch` is told of every case: that it is there, that it begins, that it ended.
pub fn check(library: &Library, filter: &Filter, watch: &mut dyn FnMut(Event<'_>)) -> Report {
    let mut report = Report::default();
    let mut of_library = Cases::default();
    groups::info::of_library(library, &mut of_library);
    let mut known: Vec<String> = of_library.ids().map(String::from).collect();
    known.push(OPEN.into());
    of_library.run(filter, watch, &mut report);

    let mut border = Err(Stop::wrong("it was not opened"));
    let mut open = Cases::default();
    open.add(OPEN.into(), || {
        border = library.open(0).map_err(|failure| Stop::failed("open", &failure));
        border.as_ref().map(|_| Found::default()).map_err(Stop::clone)
    });
    open.run(&Filter::all(), watch, &mut report);
    // Nobody knows the cases of a unit that is not there.
    if let Ok(border) = &border {
        check_subject(border, known, filter, watch, &mut report);
    }
    report
}

/// Tests a device of neuropil.
pub fn check_device(device: &dyn Device, filter: &Filter, watch: &mut dyn FnMut(Event<'_>)) -> Report {
    let mut report = Report::default();
    check_subject(&Unit(device), Vec::new(), filter, watch, &mut report);
    report
}

fn check_subject<S: Subject>(
    subject: &S,
    known: Vec<String>,
    filter: &Filter,
    watch: &mut dyn FnMut(Event<'_>),
    report: &mut Report,
) {
    let mut cases = Cases::default();
    for group in GROUPS {
        match group {
            "weight" => groups::weight::cases(subject, &mut cases),
            "matmul" => groups::matmul::cases(subject, &mut cases),
            "cluster" => groups::cluster::cases(subject, &mut cases),
            "threads" => groups::threads::cases(subject, &mut cases),
            "soak" => groups::soak::cases(subject, &mut cases),
            "timing" => groups::timing::cases(subject, &mut cases),
            _ => {}
        }
        subject.own_cases(group, &mut cases);
    }
    report.known = known;
    report.known.extend(cases.ids().map(String::from));
    report.known.iter().for_each(|id| watch(Event::Known(id)));
    cases.run(filter, watch, report);
}
