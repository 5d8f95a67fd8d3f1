//! CPU quota of the process: the tightest of its cgroup's and those of all cgroups above it, in both versions.
//!
//! `proc/self/cgroup` gives the path within a hierarchy, `proc/self/mountinfo` where that hierarchy is mounted and
//! which part of it; a container may see only its own part.

use std::path::{Path, PathBuf};

use super::{number, text};

/// CPUs' worth of time granted, rounded up, at least 1; `None` without a limit.
pub(super) fn quota(root: &Path) -> Option<usize> {
    let groups = text(root.join("proc/self/cgroup"))?;
    let mounts = text(root.join("proc/self/mountinfo")).unwrap_or_default();
    let mut tightest: Option<f64> = None;
    for line in groups.lines() {
        let mut fields = line.splitn(3, ':');
        let (Some(_), Some(controllers), Some(path)) = (fields.next(), fields.next(), fields.next()) else {
            continue;
        };
        let version2 = controllers.is_empty();
        if !version2 && !controllers.split(',').any(|c| c == "cpu") {
            continue;
        }
        let Some((top, group)) = locate(root, &mounts, version2, path) else { continue };
        let read = if version2 { quota_v2 } else { quota_v1 };
        let limits = group.ancestors().take_while(|folder| folder.starts_with(&top)).filter_map(read);
        tightest = limits.chain(tightest).reduce(f64::min);
    }
    tightest.map(|cpus| (cpus.ceil() as usize).max(1))
}

/// The folder where a hierarchy is mounted and the folder of a group in it.
fn locate(root: &Path, mounts: &str, version2: bool, path: &str) -> Option<(PathBuf, PathBuf)> {
    let (mount_root, point) = mounts
        .lines()
        .find_map(|line| mount(line, version2))
        .unwrap_or(("/".into(), if version2 { "/sys/fs/cgroup" } else { "/sys/fs/cgroup/cpu" }.into()));
    let top = root.join(point.trim_start_matches('/'));
    // A path outside of what is mounted (or one with `..`, which says the same) leaves the mount's own folder.
    let below = Path::new(path).strip_prefix(&mount_root).ok();
    let below = below.filter(|b| b.components().all(|c| matches!(c, std::path::Component::Normal(_))));
    let group = below.map_or_else(|| top.clone(), |below| top.join(below));
    Some((top, group))
}

/// The root and the mount point, if this line of mountinfo is the CPU hierarchy of that version.
fn mount(line: &str, version2: bool) -> Option<(String, String)> {
    let (before, after) = line.split_once(" - ")?;
    let mut kind = after.split(' ');
    let right = match kind.next()? {
        "cgroup2" => version2,
        "cgroup" => !version2 && kind.next_back()?.split(',').any(|option| option == "cpu"),
        _ => false,
    };
    let mut fields = before.split(' ').skip(3);
    right.then_some(())?;
    Some((unescape(fields.next()?), unescape(fields.next()?)))
}

/// Undoes the octal escape of a space, the only one that occurs in practice.
fn unescape(field: &str) -> String {
    field.replace("\\040", " ")
}

fn quota_v2(group: &Path) -> Option<f64> {
    let text = text(group.join("cpu.max"))?;
    let mut words = text.split_whitespace();
    ratio(words.next()?.parse().ok()?, words.next().map_or(Some(100_000.0), |p| p.parse().ok())?)
}

fn quota_v1(group: &Path) -> Option<f64> {
    ratio(number(group.join("cpu.cfs_quota_us"))?, number(group.join("cpu.cfs_period_us"))?)
}

/// -1 stands for no limit in version 1; "max" of version 2 is no number.
fn ratio(quota: f64, period: f64) -> Option<f64> {
    (quota > 0.0 && period > 0.0).then(|| quota / period)
}
