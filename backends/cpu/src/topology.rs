//! Which CPUs the process may use, which of them are worth a thread, and how many threads that makes.
//!
//! The number of CPUs of the machine is the wrong number in a container (quota), under `taskset` (affinity) and on
//! a phone (little cores hold up the big ones). Everything is read from `/proc` and `/sys` below a root folder, so
//! that any machine can be put into a test. What cannot be read restricts nothing.

use std::fs;
use std::path::{Path, PathBuf};

mod cgroup;
mod list;

use list::parse_list;

/// A core whose capacity (or, failing that, top frequency) is below this share of the best one's is little.
const LITTLE_CAPACITY: f64 = 0.5;
const LITTLE_FREQUENCY: f64 = 0.7;

/// Where one thread per core would leave fewer threads than this, the second threads of the cores count too: small
/// virtual machines present the two threads of one core as their two CPUs.
const FEW_CORES: usize = 4;

/// What the machine offers this process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Topology {
    big: Vec<usize>,
    siblings: Vec<usize>,
    little: Vec<usize>,
    quota: Option<usize>,
}

impl Topology {
    /// The machine at hand.
    pub fn detect() -> Topology {
        Topology::read(Path::new("/"))
    }

    /// The machine described below `root`, which holds `proc` and `sys`.
    pub fn read(root: &Path) -> Topology {
        let allowed = allowed_cpus(root);
        let (all_big, little) = split_by_strength(root, allowed);
        let (mut big, mut siblings) = split_by_core(root, all_big);
        if big.len() < FEW_CORES {
            big.append(&mut siblings);
            big.sort_unstable();
        }
        Topology { big, siblings, little, quota: cgroup::quota(root) }
    }

    /// Threads that compute by default: one per big core, but no more than the cgroup quota pays for, rounded up.
    pub fn default_threads(&self) -> usize {
        self.big.len().min(self.quota.unwrap_or(usize::MAX)).max(1)
    }

    /// The CPUs worth a thread, one per core, ascending. Where that would be fewer than four, all CPUs of the big
    /// cores. Never empty.
    pub fn big_cpus(&self) -> Vec<usize> {
        self.big.clone()
    }

    /// The slow CPUs of a machine with two or three kinds: for I/O threads.
    pub fn little_cpus(&self) -> Vec<usize> {
        self.little.clone()
    }

    /// Every CPU, in the order in which more threads should take them: big cores, their second threads, little ones.
    pub fn all_cpus(&self) -> Vec<usize> {
        [&self.big[..], &self.siblings, &self.little].concat()
    }

    /// The CPUs that a pool of that many threads may use: the big ones while they suffice.
    pub(crate) fn cpus_for(&self, threads: usize) -> Vec<usize> {
        let mut cpus = self.all_cpus();
        if threads <= self.big.len() {
            cpus.truncate(self.big.len());
        }
        cpus
    }

    /// CPUs' worth of time that the tightest cgroup above the process grants, rounded up; `None` without a limit.
    pub fn quota(&self) -> Option<usize> {
        self.quota
    }
}

fn text(path: PathBuf) -> Option<String> {
    fs::read_to_string(path).ok()
}

fn number(path: PathBuf) -> Option<f64> {
    text(path)?.trim().parse().ok()
}

/// The affinity mask, which includes the cpuset; else the CPUs that are on; else as many as the standard library
/// counts. Never empty.
fn allowed_cpus(root: &Path) -> Vec<usize> {
    let status = text(root.join("proc/self/status"));
    let mask = status.as_deref().and_then(|s| s.lines().find_map(|l| l.strip_prefix("Cpus_allowed_list:")));
    let cpus = mask.map(parse_list).filter(|cpus| !cpus.is_empty());
    let online = || text(root.join("sys/devices/system/cpu/online")).map(|s| parse_list(&s));
    cpus.or_else(online)
        .filter(|cpus| !cpus.is_empty())
        .unwrap_or_else(|| (0..std::thread::available_parallelism().map_or(1, usize::from)).collect())
}

/// Big and little CPUs. A file that is missing for one CPU decides nothing for any.
fn split_by_strength(root: &Path, cpus: Vec<usize>) -> (Vec<usize>, Vec<usize>) {
    // x86 with two kinds of cores lists the efficient ones.
    if let Some(atoms) = text(root.join("sys/devices/cpu_atom/cpus")) {
        let atoms = parse_list(&atoms);
        return halves(cpus, |cpu| !atoms.contains(&cpu));
    }
    let of = |file: &str| -> Option<Vec<f64>> {
        let at = |cpu| number(root.join(format!("sys/devices/system/cpu/cpu{cpu}")).join(file));
        cpus.iter().map(|cpu| at(*cpu)).collect()
    };
    let capacity = of("cpu_capacity").map(|values| (values, LITTLE_CAPACITY));
    let frequency = || of("cpufreq/cpuinfo_max_freq").map(|values| (values, LITTLE_FREQUENCY));
    let Some((values, share)) = capacity.or_else(frequency) else { return (cpus, Vec::new()) };
    let least = values.iter().copied().fold(0.0, f64::max) * share;
    let mut value = values.into_iter();
    halves(cpus, |_| value.next().is_none_or(|v| v >= least))
}

/// One CPU per core, and the others.
fn split_by_core(root: &Path, cpus: Vec<usize>) -> (Vec<usize>, Vec<usize>) {
    let mut seen = Vec::new();
    halves(cpus, |cpu| {
        let file = format!("sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list");
        let first = !seen.contains(&cpu);
        seen.extend(text(root.join(file)).map(|s| parse_list(&s)).unwrap_or_default());
        first
    })
}

/// Splits by a predicate; should that leave nothing on the first side, everything goes there.
fn halves(cpus: Vec<usize>, first: impl FnMut(usize) -> bool) -> (Vec<usize>, Vec<usize>) {
    let mut first = first;
    let (a, b): (Vec<usize>, Vec<usize>) = cpus.into_iter().partition(|cpu| first(*cpu));
    if a.is_empty() { (b, a) } else { (a, b) }
}

#[cfg(test)]
mod tests;
