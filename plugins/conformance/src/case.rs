//! A case, and how it ends.

use std::time::Instant;

use crate::names::Filter;
use crate::raw::{Failure, UNSUPPORTED};
use crate::reference::Reference;
use crate::report::{CaseReport, Report, Status};

/// What a case found: nothing wrong.
#[derive(Clone, Copy, Debug, Default)]
pub struct Found {
    /// The error of the worst row.
    pub error: Option<f64>,
    /// A median time.
    pub ns: Option<u64>,
}

/// Why a case did not pass.
#[derive(Clone, Debug, PartialEq)]
pub enum Stop {
    /// The unit says that it does not do this.
    Unsupported(String),
    /// It is wrong, and how much if that is a number.
    Wrong(String, Option<f64>),
}

impl Stop {
    /// Something is wrong.
    pub fn wrong(reason: impl Into<String>) -> Stop {
        Stop::Wrong(reason.into(), None)
    }

    /// A call failed.
    pub fn failed(what: &str, failure: &Failure) -> Stop {
        Stop::wrong(format!("{what} failed: {failure}"))
    }

    /// The answer to a question was no, or is none.
    pub fn answer(failure: Failure) -> Stop {
        match failure.code {
            UNSUPPORTED if failure.text.trim().is_empty() => Stop::Unsupported("it gives no reason".into()),
            UNSUPPORTED => Stop::Unsupported(failure.text),
            _ => Stop::failed("the question", &failure),
        }
    }
}

/// How a case ends.
pub type Ended = Result<Found, Stop>;

/// Fails unless something is so.
pub fn ensure(is: bool, otherwise: impl FnOnce() -> String) -> Result<(), Stop> {
    if is { Ok(()) } else { Err(Stop::wrong(otherwise())) }
}

/// Compares outputs with what is right.
pub fn compare(want: &Reference, found: &[f32], bound: f64) -> Ended {
    if let Some(place) = want.not_a_number(found) {
        return Err(Stop::wrong(place));
    }
    let error = want.error(found);
    if error <= bound {
        return Ok(Found { error: Some(error), ns: None });
    }
    let place = want.worst_place(found);
    let reason = format!("the error is {error:.3e}, and {bound:.0e} is allowed: {place}");
    Err(Stop::Wrong(reason, Some(error)))
}

/// The worse of two.
pub fn worse(a: Found, b: Found) -> Found {
    Found { error: [a.error, b.error].into_iter().flatten().reduce(f64::max), ns: a.ns.or(b.ns) }
}

type Run<'a> = Box<dyn FnOnce() -> Ended + 'a>;

/// Cases in the order in which they run. What neighbours share, such as a weight, lives until the last of them ran.
#[derive(Default)]
pub struct Cases<'a>(Vec<(String, Run<'a>)>);

impl<'a> Cases<'a> {
    /// Adds a case.
    pub fn add(&mut self, id: String, run: impl FnOnce() -> Ended + 'a) {
        self.0.push((id, Box::new(run)));
    }

    /// The ids.
    pub fn ids(&self) -> impl Iterator<Item = &str> {
        self.0.iter().map(|(id, _)| id.as_str())
    }

    /// Runs the cases that the filter takes.
    pub fn run(self, filter: &Filter, watch: &mut dyn FnMut(Event<'_>), report: &mut Report) {
        for (id, run) in self.0 {
            if filter.takes(&id) {
                watch(Event::Begins(&id));
                let case = ended(id, run());
                watch(Event::Ended(&case));
                report.cases.push(case);
            }
        }
    }
}

/// The report of a case.
fn ended(id: String, ended: Ended) -> CaseReport {
    let (status, error, ns) = match ended {
        Ok(found) => (Status::Passed, found.error, found.ns),
        Err(Stop::Wrong(reason, error)) => (Status::Failed(reason), error, None),
        Err(Stop::Unsupported(reason)) => (Status::Unsupported(reason), None, None),
    };
    CaseReport { id, status, error, ns }
}

/// What happens while cases run, for those who watch: a case that kills the process has begun and not ended.
#[derive(Clone, Copy, Debug)]
pub enum Event<'a> {
    /// There is a case of this id, for the unit that was opened.
    Known(&'a str),
    /// It begins.
    Begins(&'a str),
    /// It ended.
    Ended(&'a CaseReport),
}

/// The median time of some runs, in nanoseconds.
pub fn median_ns(runs: usize, mut run: impl FnMut() -> Result<(), Stop>) -> Result<u64, Stop> {
    let mut times = Vec::new();
    for _ in 0..runs.max(1) {
        let start = Instant::now();
        run()?;
        times.push(u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX));
    }
    times.sort_unstable();
    Ok(times[times.len() / 2])
}
