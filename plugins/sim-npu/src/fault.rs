//! One fault, at one call of one function.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use neuropil_plugin_sdk::{Error, Options};

/// A function that can fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Function {
    Probe,
    Open,
    Query,
    Prepare,
    Matmul,
    Cluster,
    SavePlan,
    LoadPlan,
}

const FUNCTIONS: [(&str, Function); 8] = [
    ("probe", Function::Probe),
    ("open", Function::Open),
    ("query", Function::Query),
    ("prepare", Function::Prepare),
    ("matmul", Function::Matmul),
    ("cluster", Function::Cluster),
    ("save_plan", Function::SavePlan),
    ("load_plan", Function::LoadPlan),
];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Error,
    Lost,
    OutOfMemory,
    Panic,
    Hang,
    Abort,
    Nan,
    Tile,
}

const KINDS: [(&str, Kind); 8] = [
    ("error", Kind::Error),
    ("lost", Kind::Lost),
    ("oom", Kind::OutOfMemory),
    ("panic", Kind::Panic),
    ("hang", Kind::Hang),
    ("abort", Kind::Abort),
    ("nan", Kind::Nan),
    ("tile", Kind::Tile),
];

/// What happens to the results of a call that goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Spoil {
    /// Nothing.
    Not,
    /// One value is NaN.
    Nan,
    /// A tile of values is that of other rows.
    Tile,
}

impl Spoil {
    /// Spoils the results of a job.
    pub fn apply(self, values: &mut [f32]) {
        let tile = values.len().min(16);
        match self {
            Spoil::Not => {}
            Spoil::Nan => values.iter_mut().skip(tile / 2).take(1).for_each(|value| *value = f32::NAN),
            Spoil::Tile => values[..tile].iter_mut().for_each(|value| *value = 1.0 - 3.0 * *value),
        }
    }
}

/// Calls of the function that fails, so far.
#[derive(Debug, Default)]
pub(crate) struct Calls(AtomicU64);

/// The fault that the options name, if they do.
#[derive(Debug)]
pub(crate) struct Fault {
    what: Option<(Kind, Function, u64)>,
    columns: usize,
    hang: Duration,
}

impl Fault {
    pub fn new(options: &Options) -> Result<Fault, Error> {
        let what = options.get("fault").map(parse).transpose()?;
        let hang = Duration::from_millis(options.number("hang_ms", 60_000)?);
        Ok(Fault { what, columns: options.number("fault_columns", 0)?, hang })
    }

    /// Called at the beginning of each function, with the columns of its weight; fails or says what to spoil.
    pub fn strike(&self, calls: &Calls, function: Function, columns: usize) -> Result<Spoil, Error> {
        let Some((kind, at, nth)) = self.what else { return Ok(Spoil::Not) };
        if at != function || self.columns != 0 && self.columns != columns {
            return Ok(Spoil::Not);
        }
        if calls.0.fetch_add(1, Ordering::Relaxed) + 1 != nth {
            return Ok(Spoil::Not);
        }
        match kind {
            Kind::Error => Err(Error::internal("the fault that was asked for").with_vendor_code(-1234)),
            Kind::Lost => Err(Error::lost("the unit was unplugged, as was asked for")),
            Kind::OutOfMemory => Err(Error::out_of_memory("no more memory, as was asked for")),
            Kind::Panic => panic!("the panic that was asked for"),
            Kind::Abort => std::process::abort(),
            Kind::Hang => {
                std::thread::sleep(self.hang);
                Ok(Spoil::Not)
            }
            Kind::Nan => Ok(Spoil::Nan),
            Kind::Tile => Ok(Spoil::Tile),
        }
    }
}

fn parse(text: &str) -> Result<(Kind, Function, u64), Error> {
    let parts = text.split_once('@').and_then(|(kind, place)| {
        let (function, nth) = place.split_once(':').unwrap_or((place, "1"));
        let (_, kind) = KINDS.iter().find(|(name, _)| *name == kind)?;
        let (_, function) = FUNCTIONS.iter().find(|(name, _)| *name == function)?;
        let spoils = matches!(kind, Kind::Nan | Kind::Tile);
        let has_results = matches!(function, Function::Matmul | Function::Cluster);
        let nth: u64 = nth.parse().ok()?;
        (nth > 0 && (has_results || !spoils)).then_some((*kind, *function, nth))
    });
    parts.ok_or_else(|| {
        Error::invalid(format!(
            "option fault={text} is not known: write KIND@FUNCTION:N with a kind of {}, a function of {}, and nan and \
             tile for matmul and cluster only",
            KINDS.map(|(name, _)| name).join(" "),
            FUNCTIONS.map(|(name, _)| name).join(" "),
        ))
    })
}
