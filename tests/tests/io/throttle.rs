//! Imitated storage is no faster than its profile.

use std::time::{Duration, Instant};

use neuropil::io::{Curve, IoChoice, IoError, StorageProfile, open};
use neuropil_device::Arena;

use crate::fixture::{Disk, read, run};

#[test]
fn reads_take_at_least_the_time_that_the_profile_says() {
    let disk = Disk::new();
    let profile = StorageProfile {
        name: "slow".into(),
        provenance: "made up".into(),
        latency: Duration::from_millis(5),
        sequential: Curve::new(vec![(4096.0, 4.096e6)]),
        random: vec![(1 << 30, Curve::new(vec![(4096.0, 1.024e6)]))],
    };
    let mut engine = open(&IoChoice::Throttle(profile), &disk.paths).unwrap();
    assert!(engine.info().name.starts_with("throttle:slow over "));
    let arena = Arena::new(20, 4096, 4096).unwrap();
    let mut time = |offsets: &[u64]| {
        let reads = offsets.iter().enumerate();
        let reads = reads.map(|(n, at)| read(n as u64, 0, at * 4096, 4096, &arena, n)).collect();
        let start = Instant::now();
        assert!(run(&mut *engine, reads).iter().all(|done| done.result.is_ok()));
        start.elapsed()
    };
    assert!(time(&[100]) >= Duration::from_millis(5), "latency");
    let random: Vec<u64> = (0..10).map(|n| (n * 37 + 5) % 200).collect();
    assert!(time(&random) >= Duration::from_millis(40), "4 ms each");
    let in_sequence: Vec<u64> = (150..170).collect();
    assert!(time(&in_sequence) >= Duration::from_millis(4 + 19), "1 ms each, but for the first");
}

#[test]
fn reads_of_the_imitated_queue_end_in_order() {
    let disk = Disk::new();
    let mut engine = open(&"throttle:ufs3.1".parse().unwrap(), &disk.paths).unwrap();
    let arena = Arena::new(50, 4096, 4096).unwrap();
    let mut reads = (0..50).map(|n| read(n, 0, n * 17 % 200 * 4096, 4096, &arena, n as usize)).collect();
    let mut done = Vec::new();
    engine.submit(&mut reads);
    while done.len() < 50 {
        engine.reap(true, &mut done);
    }
    assert!(done.iter().map(|done| done.tag).eq(0..50));
    assert!(matches!(StorageProfile::named("ufs5"), Err(IoError::UnknownProfile { .. })));
}
