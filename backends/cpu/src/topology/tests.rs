use std::sync::atomic::{AtomicUsize, Ordering};

use super::*;

/// A machine made of files, gone at the end of the test.
struct Machine(PathBuf);

impl Machine {
    fn new(files: &[(&str, &str)]) -> Machine {
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        let name =
            format!("neuropil-topology-{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        let machine = Machine(std::env::temp_dir().join(name));
        files.iter().for_each(|(path, text)| machine.file(path, text));
        machine
    }

    fn file(&self, path: &str, text: &str) {
        let path = self.0.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    fn per_cpu(self, file: &str, values: &[&str]) -> Machine {
        for (cpu, value) in values.iter().enumerate() {
            self.file(&format!("sys/devices/system/cpu/cpu{cpu}/{file}"), value);
        }
        self
    }

    fn read(&self) -> Topology {
        Topology::read(&self.0)
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn with_cpus(list: &str) -> Machine {
    Machine::new(&[(
        "proc/self/status",
        &format!("Name:\tx\nCpus_allowed:\tff\nCpus_allowed_list:\t{list}\n"),
    )])
}

#[test]
fn a_quota_of_two_on_sixteen_cpus_is_two_threads() {
    let v2 = with_cpus("0-15");
    v2.file("proc/self/cgroup", "0::/\n");
    v2.file("sys/fs/cgroup/cpu.max", "200000 100000\n");
    assert_eq!(v2.read().default_threads(), 2);
    assert_eq!(v2.read().big_cpus().len(), 16);
    v2.file("sys/fs/cgroup/cpu.max", "150000 100000\n");
    assert_eq!(v2.read().default_threads(), 2, "a part of a CPU counts");
    v2.file("sys/fs/cgroup/cpu.max", "5000 100000\n");
    assert_eq!(v2.read().default_threads(), 1);
    v2.file("sys/fs/cgroup/cpu.max", "max 100000\n");
    assert_eq!(v2.read().default_threads(), 16);

    let v1 = with_cpus("0-15");
    v1.file("proc/self/cgroup", "4:memory:/\n3:cpuset:/\n2:cpu,cpuacct:/\n0::/\n");
    v1.file(
        "proc/self/mountinfo",
        "32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n",
    );
    v1.file("sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", "200000\n");
    v1.file("sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us", "100000\n");
    assert_eq!(v1.read().default_threads(), 2);
    v1.file("sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", "-1\n");
    assert_eq!(v1.read().default_threads(), 16);
}

#[test]
fn the_tightest_quota_above_the_process_wins() {
    let machine = with_cpus("0-15");
    machine.file("proc/self/cgroup", "0::/outer/middle/inner\n");
    machine.file("proc/self/mountinfo", "41 31 0:38 / /mnt/a\\040b rw shared:1 - cgroup2 cgroup2 rw\n");
    machine.file("mnt/a b/outer/cpu.max", "300000 100000");
    machine.file("mnt/a b/outer/middle/inner/cpu.max", "800000 100000");
    assert_eq!(machine.read().quota(), Some(3));
    // A container that sees its own part of the tree at the mount point.
    machine.file("proc/self/mountinfo", "41 31 0:38 /outer/middle /mnt/a\\040b rw - cgroup2 cgroup2 rw\n");
    machine.file("mnt/a b/inner/cpu.max", "500000 100000");
    assert_eq!(machine.read().quota(), Some(5));
    // One whose path leads out of it.
    machine.file("proc/self/cgroup", "0::/../../elsewhere\n");
    machine.file("mnt/a b/cpu.max", "700000 100000");
    assert_eq!(machine.read().quota(), Some(7));
}

#[test]
fn affinity_and_cpuset_count() {
    assert_eq!(with_cpus("0-1").read().default_threads(), 2);
    assert_eq!(with_cpus("0-3").read().big_cpus(), [0, 1, 2, 3]);
    assert_eq!(with_cpus("2,5").read().big_cpus(), [2, 5]);
}

#[test]
fn big_and_little_cores() {
    let values = |big: &'static str, little: &'static str| [[big; 4], [little; 4]].concat();
    let phone = with_cpus("0-7").per_cpu("cpu_capacity", &values("1024", "300")).read();
    assert_eq!((phone.default_threads(), phone.big_cpus()), (4, vec![0, 1, 2, 3]));
    assert_eq!(phone.little_cpus(), [4, 5, 6, 7]);
    assert_eq!(phone.cpus_for(4), [0, 1, 2, 3]);
    assert_eq!(phone.cpus_for(6), [0, 1, 2, 3, 4, 5, 6, 7]);
    let equal = with_cpus("0-7").per_cpu("cpu_capacity", &["1024"; 8]).read();
    assert_eq!((equal.default_threads(), equal.little_cpus().len()), (8, 0));
    let missing = with_cpus("0-7").per_cpu("cpu_capacity", &["1024"; 3]).read();
    assert_eq!((missing.default_threads(), missing.little_cpus().len()), (8, 0));
    let by_clock = with_cpus("0-7").per_cpu("cpufreq/cpuinfo_max_freq", &values("2800000", "1800000")).read();
    assert_eq!(by_clock.default_threads(), 4);
    let hybrid = with_cpus("0-7").per_cpu("cpu_capacity", &["1024"; 8]);
    hybrid.file("sys/devices/cpu_atom/cpus", "2-7\n");
    assert_eq!((hybrid.read().default_threads(), hybrid.read().little_cpus().len()), (2, 6));
    let only_little = with_cpus("6-7").per_cpu("cpu_capacity", &values("1024", "300")).read();
    assert_eq!(only_little.default_threads(), 2, "what is left is what there is");
}

#[test]
fn one_thread_per_core_unless_there_are_few() {
    let server = with_cpus("0-7")
        .per_cpu("topology/thread_siblings_list", &["0,4", "1,5", "2,6", "3,7", "0,4", "1,5", "2,6", "3,7"]);
    assert_eq!(server.read().big_cpus(), [0, 1, 2, 3]);
    assert_eq!(server.read().all_cpus(), [0, 1, 2, 3, 4, 5, 6, 7]);
    let small = with_cpus("0-1").per_cpu("topology/thread_siblings_list", &["0-1", "0-1"]);
    assert_eq!(small.read().default_threads(), 2);
}

#[test]
fn a_machine_that_tells_nothing_has_what_the_library_counts() {
    let bare = Machine::new(&[("proc/nothing", "")]).read();
    assert_eq!(bare.default_threads(), std::thread::available_parallelism().map_or(1, usize::from));
    let online = Machine::new(&[("sys/devices/system/cpu/online", "0-2\n")]).read();
    assert_eq!(online.default_threads(), 3);
    assert!(Topology::detect().default_threads() >= 1);
}
