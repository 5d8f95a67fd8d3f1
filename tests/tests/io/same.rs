//! Every engine gives the bytes of the file, whatever the read looks like.

use neuropil::io::{Files, IoError, Read, Target, Targets, open};
use neuropil_device::Arena;

use crate::fixture::{Disk, expect_right, random_reads, read, run};

#[test]
fn every_engine_reads_the_same_bytes() {
    let disk = Disk::new();
    for (seed, mut engine) in disk.engines().into_iter().enumerate() {
        // More reads than any depth.
        let (_arena, reads) = random_reads(&disk, seed as u64, 400);
        expect_right(&mut *engine, &disk, reads);
        let (_arena, reads) = random_reads(&disk, 99, 3);
        expect_right(&mut *engine, &disk, reads);
    }
}

#[test]
fn a_run_of_slots_is_filled_by_one_read() {
    let disk = Disk::new();
    for mut engine in disk.engines() {
        let arena = Arena::new(400, 7168, 512).unwrap();
        let len = 390 * 7168;
        let targets = Target::whole(arena.write_run(2..392).unwrap(), len).into();
        let reads = vec![Read { tag: 0, file: 1, offset: 512 * 9, len, targets }];
        drop(run(&mut *engine, reads));
        let (run, slot) = (arena.read_run(2..392).unwrap(), arena.read(5).unwrap());
        assert!(run.bytes() == &disk.contents[1][512 * 9..][..len], "{}", engine.info().name);
        assert!(slot.bytes() == &disk.contents[1][512 * 9 + 3 * 7168..][..7168]);
    }
}

#[test]
fn reads_that_cannot_be_right_come_back_with_their_error() {
    let disk = Disk::new();
    for mut engine in disk.engines() {
        let arena = Arena::new(8, 4096, 4096).unwrap();
        let target = |slot, at, from, len| Target { to: arena.write(slot).unwrap(), at, from, len };
        let big = usize::MAX;
        let reads = vec![
            read(0, 7, 0, 4096, &arena, 0),
            read(1, 0, 0, 5000, &arena, 1),
            Read { tag: 2, file: 0, offset: 0, len: 10, targets: target(2, 0, 8, 3).into() },
            Read { tag: 3, file: 0, offset: 0, len: 10, targets: target(3, big, 0, 3).into() },
            Read { tag: 4, file: 0, offset: u64::MAX, len: 10, targets: Targets::default() },
            Read { tag: 5, file: 0, offset: 0, len: big, targets: Targets::default() },
            read(6, 0, 1 << 50, 4096, &arena, 4),
            read(7, 0, 4096, 0, &arena, 5),
            read(8, 0, 4096, 4096, &arena, 6),
        ];
        let done = run(&mut *engine, reads);
        assert!(matches!(done[0].result, Err(IoError::NoSuchFile { file: 7, files: 2 })));
        for done in &done[1..6] {
            assert!(matches!(done.result, Err(IoError::Misfit { .. })), "{}", done.tag);
        }
        assert!(matches!(done[6].result, Err(IoError::Truncated { size: 1_000_003, .. })));
        assert!(done[7].result.is_ok() && done[8].result.is_ok());
        assert!(done.iter().all(|done| done.tag == 4 || done.tag == 5 || done.targets.len() == 1));
        assert!(done[8].targets[0].to.bytes() == &disk.contents[0][4096..8192]);
    }
}

#[test]
fn what_is_no_file_is_refused() {
    let disk = Disk::new();
    let folder = disk.paths[0].parent().unwrap();
    assert!(matches!(Files::open(&[folder]), Err(IoError::NotAFile { .. })));
    let missing = open(&"auto".parse().unwrap(), &[folder.join("none")]).err();
    assert!(missing.unwrap().to_string().contains("none"));
    let none = Files::open::<std::path::PathBuf>(&[]).unwrap();
    assert!(none.changed().is_none());
}
