//! How much memory the process takes, as the system counts it.

/// The largest resident size so far; `None` where the system does not tell.
pub fn peak_bytes() -> Option<u64> {
    field("/proc/self/status", "VmHWM:")
}

/// Begins anew to look for the largest resident size, where the system can: what was done before is not to be counted.
pub fn forget_peak() {
    // Where it cannot, the peak is that of everything, which is larger.
    let _ = std::fs::write("/proc/self/clear_refs", "5");
}

fn field(file: &str, name: &str) -> Option<u64> {
    let text = std::fs::read_to_string(file).ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

/// A size for people: `98.4 MiB`.
pub fn shown(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut size = bytes as f64;
    let mut unit = 0;
    while size >= 1024.0 && unit + 1 < UNITS.len() {
        size /= 1024.0;
        unit += 1;
    }
    let name = UNITS.get(unit).copied().unwrap_or_default();
    if unit == 0 { format!("{bytes} B") } else { format!("{size:.1} {name}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_shown_in_the_largest_unit_that_fits() {
        assert_eq!(shown(0), "0 B");
        assert_eq!(shown(1536), "1.5 KiB");
        assert_eq!(shown(u64::MAX), "16777216.0 TiB");
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn the_peak_is_known_on_linux() {
        assert!(peak_bytes().is_some_and(|bytes| bytes > 1 << 16));
    }
}
