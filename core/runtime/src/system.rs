//! What the machine has and what this process may take of it.
//!
//! A container's limit is what matters in a container, and page cache is memory that is free. The files of the system are
//! read below a root that can be given, so that every case can be tried on any machine.

use std::path::{Path, PathBuf};

/// A machine, seen through its `/proc` and `/sys`.
#[derive(Clone, Debug)]
pub struct Machine {
    root: PathBuf,
}

impl Machine {
    /// The one that this process runs on.
    pub fn this() -> Machine {
        Machine::at(Path::new("/"))
    }

    /// One whose files lie below `root`.
    pub fn at(root: &Path) -> Machine {
        Machine { root: root.into() }
    }

    /// Bytes that this process can take without pushing others out: the smaller of what is free and of what the tightest
    /// limit above the process leaves. `None` where the system does not tell.
    pub fn available(&self) -> Option<u64> {
        let free = self.meminfo("MemAvailable:");
        let groups = self.groups();
        groups.into_iter().chain(free).min()
    }

    /// Memory of the machine.
    pub fn total(&self) -> Option<u64> {
        self.meminfo("MemTotal:")
    }

    fn read(&self, path: &Path) -> Option<String> {
        std::fs::read_to_string(self.root.join(path.strip_prefix("/").unwrap_or(path))).ok()
    }

    fn meminfo(&self, name: &str) -> Option<u64> {
        let text = self.read(Path::new("/proc/meminfo"))?;
        let line = text.lines().find_map(|line| line.strip_prefix(name))?;
        line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
    }

    /// What each limit of a control group above the process leaves.
    fn groups(&self) -> Vec<u64> {
        let mut left = Vec::new();
        let Some(own) = self.read(Path::new("/proc/self/cgroup")) else { return left };
        for line in own.lines() {
            let mut fields = line.splitn(3, ':');
            let (Some(id), Some(controllers), Some(path)) = (fields.next(), fields.next(), fields.next())
            else {
                continue;
            };
            if id == "0" && controllers.is_empty() {
                self.limits(Path::new("/sys/fs/cgroup"), path, &UNIFIED, &mut left);
            } else if controllers.split(',').any(|controller| controller == "memory") {
                self.limits(Path::new("/sys/fs/cgroup/memory"), path, &SEPARATE, &mut left);
            }
        }
        left
    }

    /// The limits of a group and of all above it. In a container the path may lie outside of what is mounted, whose root
    /// is the group itself then.
    fn limits(&self, mount: &Path, path: &str, files: &GroupFiles, left: &mut Vec<u64>) {
        let path = Path::new(path.trim_start_matches('/'));
        for group in path.ancestors() {
            let group = mount.join(group);
            let number = |file: &str| self.read(&group.join(file))?.trim().parse::<u64>().ok();
            // "max", and the huge number that stands for it, are no limit.
            let Some(limit) = number(files.limit).filter(|limit| *limit < 1 << 60) else { continue };
            let used = number(files.used).unwrap_or(0);
            let cache = self.read(&group.join("memory.stat")).map_or(0, |stat| {
                let field = |name: &str| {
                    stat.lines().find_map(|line| line.strip_prefix(name)?.trim().parse::<u64>().ok())
                };
                files.cache.iter().filter_map(|name| field(name)).sum()
            });
            // The system drops page cache before it refuses memory.
            left.push(limit.saturating_sub(used.saturating_sub(cache)));
        }
    }
}

struct GroupFiles {
    limit: &'static str,
    used: &'static str,
    /// Fields of `memory.stat` that are page cache.
    cache: [&'static str; 2],
}

/// Version 2.
const UNIFIED: GroupFiles =
    GroupFiles { limit: "memory.max", used: "memory.current", cache: ["inactive_file ", "active_file "] };

/// Version 1, whose sums include the groups below.
const SEPARATE: GroupFiles = GroupFiles {
    limit: "memory.limit_in_bytes",
    used: "memory.usage_in_bytes",
    cache: ["total_inactive_file ", "total_active_file "],
};

#[cfg(test)]
mod tests {
    use super::*;

    /// A machine with these files.
    fn machine(name: &str, files: &[(&str, &str)]) -> (Machine, PathBuf) {
        let root = std::env::temp_dir().join(format!("neuropil-machine-{name}-{}", std::process::id()));
        for (path, text) in files {
            let path = root.join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        (Machine::at(&root), root)
    }

    const MEMINFO: (&str, &str) = ("proc/meminfo", "MemTotal: 24000000 kB\nMemAvailable:   20000000 kB\n");

    fn available(name: &str, files: &[(&str, &str)]) -> Option<u64> {
        let (machine, root) = machine(name, files);
        let available = machine.available();
        std::fs::remove_dir_all(root).ok();
        available
    }

    #[test]
    fn the_tightest_limit_above_the_process_counts() {
        let files = [
            MEMINFO,
            ("proc/self/cgroup", "0::/app/job\n"),
            ("sys/fs/cgroup/app/memory.max", "268435456\n"),
            ("sys/fs/cgroup/app/memory.current", "100000000\n"),
            (
                "sys/fs/cgroup/app/memory.stat",
                "anon 10\nfile 50000000\ninactive_file 40000000\nactive_file 10000000\n",
            ),
            ("sys/fs/cgroup/app/job/memory.max", "max\n"),
        ];
        assert_eq!(available("v2", &files), Some(268435456 - 50000000));
        let files = [
            MEMINFO,
            ("proc/self/cgroup", "4:cpu:/\n3:memory:/job\n"),
            ("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n"),
            ("sys/fs/cgroup/memory/job/memory.limit_in_bytes", "1073741824\n"),
        ];
        assert_eq!(available("v1", &files), Some(1 << 30));
    }

    #[test]
    fn limits_of_groups_above_count_too() {
        let files = |parent: &'static str, own: &'static str| {
            [
                MEMINFO,
                ("proc/self/cgroup", "0::/app/job\n"),
                ("sys/fs/cgroup/app/memory.max", parent),
                ("sys/fs/cgroup/app/memory.current", "1000\n"),
                ("sys/fs/cgroup/app/job/memory.max", own),
                ("sys/fs/cgroup/app/job/memory.current", "3000\n"),
            ]
        };
        assert_eq!(available("own", &files("500000\n", "100000\n")), Some(97_000));
        assert_eq!(available("parent", &files("50000\n", "100000\n")), Some(49_000));
        // What is over its limit already has nothing left, and is no error.
        assert_eq!(available("over", &files("max\n", "2000\n")), Some(0));
        // A file that is not what it should be is as good as none.
        assert_eq!(available("odd", &files("-5\n", "many\n")), Some(20000000 * 1024));
        // In a container the path may be one of the host, and the root of what is mounted is the group itself.
        let files = [
            MEMINFO,
            ("proc/self/cgroup", "0::/host/slice/abc\n"),
            ("sys/fs/cgroup/memory.max", "268435456\n"),
            ("sys/fs/cgroup/memory.current", "68435456\n"),
        ];
        assert_eq!(available("container", &files), Some(200_000_000));
        // A machine with less than the limit.
        let files = [
            ("proc/meminfo", "MemTotal: 2000 kB\nMemAvailable: 1000 kB\n"),
            ("proc/self/cgroup", "0::/\n"),
            ("sys/fs/cgroup/memory.max", "268435456\n"),
        ];
        assert_eq!(available("small", &files), Some(1_024_000));
    }

    #[test]
    fn without_a_limit_page_cache_is_free_memory() {
        let files = [
            MEMINFO,
            ("proc/self/cgroup", "0::/\n"),
            ("sys/fs/cgroup/memory.max", "max\n"),
            ("sys/fs/cgroup/memory.current", "23000000000\n"),
        ];
        assert_eq!(available("max", &files), Some(20000000 * 1024));
        assert_eq!(available("nothing", &[]), None);
    }
}
