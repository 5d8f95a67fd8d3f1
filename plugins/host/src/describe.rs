//! What a unit can do and what not, and why, for people and reports.

use std::fmt;
use std::path::PathBuf;

use crate::Scheme;
use crate::self_test::{Finding, Findings};

/// Something that a unit does not do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Disabled {
    /// The operation and the scheme: `matmul channel4`.
    pub op: String,
    /// Why not.
    pub reason: String,
    /// The unit says that it does it, but failed the self-test.
    pub failed: bool,
}

/// What a unit is and can do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Description {
    /// The plugin's name.
    pub plugin: String,
    /// Its version.
    pub version: String,
    /// The version of the interface that it speaks.
    pub abi: (u32, u32),
    /// The library.
    pub path: PathBuf,
    /// The unit.
    pub name: String,
    /// Who makes it.
    pub vendor: String,
    /// Versions of the driver and the vendor's libraries.
    pub driver: String,
    /// Memory for weights; 0 when unknown.
    pub memory_bytes: u64,
    /// Token counts of its graphs; none for any.
    pub token_buckets: Vec<usize>,
    /// What it does, with the error of the self-test: `matmul group8 (error 1.2e-4)`.
    pub supports: Vec<String>,
    /// What it does not.
    pub disabled: Vec<Disabled>,
}

impl Description {
    pub(crate) fn add(&mut self, findings: Findings) {
        let op = |clusters: bool, scheme: Scheme| {
            format!("{} {}", if clusters { "cluster" } else { "matmul" }, scheme.name())
        };
        for (clusters, scheme, finding) in findings {
            let op = op(clusters, scheme);
            match finding {
                Finding::Works(Some(error)) => self.supports.push(format!("{op} (error {error:.1e})")),
                Finding::Works(None) => self.supports.push(format!("{op} (not tested)")),
                Finding::Refused(reason) => self.disabled.push(Disabled { op, reason, failed: false }),
                Finding::Wrong(reason) => self.disabled.push(Disabled { op, reason, failed: true }),
            }
        }
    }
}

impl fmt::Display for Description {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{}: plugin {} {} (interface {}.{}) at {}",
            self.name,
            self.plugin,
            self.version,
            self.abi.0,
            self.abi.1,
            self.path.display()
        )?;
        if !self.driver.is_empty() {
            writeln!(f, "  driver: {}", self.driver)?;
        }
        match self.token_buckets.is_empty() {
            true => writeln!(f, "  tokens: any count")?,
            false => writeln!(f, "  tokens: {:?}", self.token_buckets)?,
        }
        self.supports.iter().try_for_each(|op| writeln!(f, "  yes: {op}"))?;
        self.disabled.iter().try_for_each(|no| writeln!(f, "  no:  {}: {}", no.op, no.reason))
    }
}
