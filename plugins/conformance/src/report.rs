//! What became of each case, and what that says of a unit.

use crate::sample::Kind;

/// The groups, in the order in which they run. The id of a case begins with its group.
pub const GROUPS: [&str; 10] =
    ["info", "buffer", "weight", "matmul", "cluster", "completion", "errors", "threads", "soak", "timing"];

/// How a case ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Status {
    /// As it must be.
    Passed,
    /// Not as it must be, and why.
    Failed(String),
    /// As it must not be, for this reason, but listed as such: see [`crate::Expectations`].
    Expected(String),
    /// The unit said, when it was asked, that it does not do this; with its reason.
    Unsupported(String),
}

/// One case that ended.
#[derive(Clone, Debug, PartialEq)]
pub struct CaseReport {
    /// `group/what/scheme/shape/tokens/...`: the same in every run, whatever the unit is.
    pub id: String,
    /// How it ended.
    pub status: Status,
    /// The error of the worst output row, relative to the root of the sum of its squared terms.
    pub error: Option<f64>,
    /// The median of some runs, in nanoseconds.
    pub ns: Option<u64>,
}

impl CaseReport {
    /// The first part of the id.
    pub fn group(&self) -> &str {
        self.id.split('/').next().unwrap_or_default()
    }
}

/// How exact a unit's products are. The limits of the classes are those of [`crate::bounds`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Precision {
    /// As products of F32 values.
    Exact,
    /// As products of F16 values.
    F16,
    /// As with inputs of 8 bits, or products of BF16 values.
    Int8,
    /// Wrong.
    None,
}

impl Precision {
    /// `exact`, `f16`, `int8` or `none`.
    pub fn name(self) -> &'static str {
        match self {
            Precision::Exact => "exact",
            Precision::F16 => "f16",
            Precision::Int8 => "int8",
            Precision::None => "none",
        }
    }
}

/// What became of the cases of one unit.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// The ids of all cases that there are for the unit, those that a filter left out too. None when the unit could not
    /// be opened.
    pub known: Vec<String>,
    /// The cases that ran, in their order.
    pub cases: Vec<CaseReport>,
}

impl Report {
    /// Cases that passed.
    pub fn passed(&self) -> usize {
        self.count(|status| *status == Status::Passed)
    }

    /// Cases that failed.
    pub fn failed(&self) -> usize {
        self.count(|status| matches!(status, Status::Failed(_)))
    }

    /// Cases that failed as expected.
    pub fn expected(&self) -> usize {
        self.count(|status| matches!(status, Status::Expected(_)))
    }

    /// Cases that the unit does not do.
    pub fn unsupported(&self) -> usize {
        self.count(|status| matches!(status, Status::Unsupported(_)))
    }

    fn count(&self, is: impl Fn(&Status) -> bool) -> usize {
        self.cases.iter().filter(|case| is(&case.status)).count()
    }

    /// The cases that failed, each with its reason.
    pub fn failures(&self) -> impl Iterator<Item = (&CaseReport, &str)> {
        self.cases.iter().filter_map(|case| match &case.status {
            Status::Failed(reason) => Some((case, reason.as_str())),
            _ => None,
        })
    }

    /// The worst error of the products of every kind of weight that the unit takes, and what precision that is.
    pub fn precision(&self) -> Vec<(&'static str, f64, Precision)> {
        let mut found: Vec<(&'static str, f64, Precision)> = Vec::new();
        for name in Kind::all().map(Kind::name) {
            let prefix = format!("matmul/product/{name}/");
            let of_kind = self.cases.iter().filter(|case| case.id.starts_with(&prefix));
            let worst = of_kind.filter_map(|case| case.error).reduce(f64::max);
            // F32 and F16 are names of the border and of model files.
            if let Some(worst) = worst
                && found.iter().all(|(other, ..)| *other != name)
            {
                found.push((name, worst, crate::bounds::precision(worst)));
            }
        }
        found
    }

    /// A line for each failure, and one with the counts.
    pub fn summary(&self) -> String {
        let mut text = String::new();
        for (case, reason) in self.failures() {
            text += &format!("{}: {reason}\n", case.id);
        }
        let (passed, failed, unsupported) = (self.passed(), self.failed(), self.unsupported());
        text += &format!(
            "{} cases: {passed} passed, {failed} failed, {unsupported} unsupported",
            self.cases.len()
        );
        text
    }
}
