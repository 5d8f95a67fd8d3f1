//! Storage that stutters, fails, is cut off or replaced.

use std::sync::Arc;

use neuropil::io::{Faults, Faulty, IoEngine, IoError, Pread, ReadAt, Sim};
use neuropil_device::Arena;

use crate::fixture::{Disk, contents, expect_right, random_reads, read, run};

/// The two engines that read through a `ReadAt`.
fn engines(source: impl ReadAt + 'static, seed: u64) -> [Box<dyn IoEngine>; 2] {
    let source = Arc::new(source);
    [Box::new(Pread::new(source.clone(), 2).unwrap()), Box::new(Sim::new(source, seed).unwrap())]
}

#[test]
fn short_interrupted_and_refused_reads_give_the_same_bytes() {
    let disk = Disk::new();
    for seed in 0..10 {
        let faults = Faults { seed, short: 0.5, eintr: 0.2, eagain: 0.1, ..Faults::default() };
        let alignment = [1, 512, 4096][seed as usize % 3];
        let on_disk = Faulty::new(Arc::into_inner(disk.files()).unwrap(), faults.clone());
        let in_memory = disk.bytes(alignment, faults);
        for mut engine in engines(in_memory, seed).into_iter().chain(engines(on_disk, seed)) {
            let (_arena, reads) = random_reads(&disk, seed, 25);
            expect_right(&mut *engine, &disk, reads);
        }
    }
}

#[test]
fn an_error_of_the_disk_is_retried_once_and_then_named() {
    let disk = Disk::new();
    let arena = Arena::new(8, 4096, 4096).unwrap();
    let reads = || (0..8).map(|n| read(n, 0, n * 4096, 4096, &arena, n as usize)).collect::<Vec<_>>();
    for nth in 0..8 {
        let once = Faults { fail_nth: Some(nth), ..Faults::default() };
        for mut engine in engines(disk.bytes(512, once.clone()), nth) {
            expect_right(&mut *engine, &disk, reads());
        }
        let always = Faults { lasting: true, ..once };
        for mut engine in engines(disk.bytes(512, always.clone()), nth) {
            let done = run(&mut *engine, reads());
            let failed: Vec<_> = done.iter().filter_map(|d| Some((d.tag, d.result.clone().err()?))).collect();
            let [(tag, IoError::Read { offset, len: 4096, .. })] = failed[..] else { panic!("{failed:?}") };
            assert_eq!(offset, tag * 4096);
            let text = failed[0].1.to_string();
            assert!(text.contains("memory-0") && text.contains(&format!("4096 bytes at {offset}")), "{text}");
        }
    }
}

#[test]
fn any_rate_of_failure_ends_in_bytes_or_a_typed_error() {
    let disk = Disk::new();
    for seed in 0..30 {
        let faults =
            Faults { seed, short: 0.3, eio: 0.3, lasting: seed % 2 == 0, eagain: 0.1, ..Faults::default() };
        for mut engine in engines(disk.bytes(512, faults), seed) {
            let (_arena, reads) = random_reads(&disk, seed, 12);
            let places: Vec<_> = reads.iter().map(|read| (read.file, read.offset as usize)).collect();
            for done in run(&mut *engine, reads) {
                let (file, offset) = places[done.tag as usize];
                match done.result {
                    Ok(()) => {
                        for target in done.targets.iter() {
                            let right = &disk.contents[file][offset + target.from..][..target.len];
                            assert!(target.to.bytes()[target.at..][..target.len] == *right);
                        }
                    }
                    Err(error) => assert!(matches!(error, IoError::Read { .. }), "{error}"),
                }
            }
        }
    }
}

#[test]
fn storage_that_never_answers_is_an_error_and_no_hang() {
    let disk = Disk::new();
    let arena = Arena::new(1, 4096, 4096).unwrap();
    let faults = Faults { eintr: 1.0, ..Faults::default() };
    let mut engine = Sim::new(Arc::new(disk.bytes(512, faults)), 0).unwrap();
    let done = run(&mut engine, vec![read(0, 0, 0, 4096, &arena, 0)]);
    assert!(matches!(done[0].result, Err(IoError::Read { .. })));
}

#[test]
fn the_end_of_a_file_that_is_cut_off_is_an_error_with_its_size() {
    let disk = Disk::new();
    let faults = Faults { truncate_at: Some(300_000), short: 0.3, ..Faults::default() };
    for mut engine in engines(disk.bytes(512, faults), 1) {
        let arena = Arena::new(2, 4096, 4096).unwrap();
        let before = read(0, 0, 299_008 - 4096, 4096, &arena, 0);
        let done = run(&mut *engine, vec![before, read(1, 0, 299_008, 4096, &arena, 1)]);
        assert!(done[0].result.is_ok());
        assert!(matches!(done[1].result, Err(IoError::Truncated { size: 300_000, offset: 299_008, .. })));
    }
}

#[test]
fn a_file_that_is_cut_off_during_use_is_an_error_and_is_noticed() {
    for choice in 0..Disk::new().engines().len() {
        let disk = Disk::new();
        let files = disk.files();
        let mut engine = disk.engines().swap_remove(choice);
        if engine.info().name == "pread" && engine.info().depth == 3 {
            // Files in memory do not shrink.
            continue;
        }
        let arena = Arena::new(2, 4096, 4096).unwrap();
        let reads = |first| vec![first, read(1, 0, 81_920, 4096, &arena, 1)];
        assert!(run(&mut *engine, reads(read(0, 0, 901_120, 4096, &arena, 0)))[0].result.is_ok());
        assert_eq!(files.changed(), None);
        std::fs::OpenOptions::new().write(true).open(&disk.paths[0]).unwrap().set_len(500_000).unwrap();
        let done = run(&mut *engine, reads(read(0, 0, 901_120, 4096, &arena, 0)));
        let cut = matches!(done[0].result, Err(IoError::Truncated { size: 500_000, .. }));
        assert!(cut && done[1].result.is_ok(), "{}", engine.info().name);
        assert_eq!(files.changed(), Some(&*disk.paths[0]));
    }
}

#[test]
fn a_file_that_is_replaced_is_read_to_the_end_as_it_was() {
    let disk = Disk::new();
    let mut engines = disk.engines();
    let files = disk.files();
    let other = disk.paths[0].with_extension("new");
    std::fs::write(&other, contents(9, 1_000_003)).unwrap();
    std::fs::rename(&other, &disk.paths[0]).unwrap();
    std::fs::remove_file(&disk.paths[1]).unwrap();
    assert_eq!(files.changed(), None, "the files that are open are as they were");
    for engine in &mut engines {
        let (_arena, reads) = random_reads(&disk, 3, 20);
        expect_right(&mut **engine, &disk, reads);
    }
}

#[test]
fn a_file_that_is_rewritten_in_place_is_noticed() {
    let disk = Disk::new();
    let files = disk.files();
    std::thread::sleep(std::time::Duration::from_millis(20));
    std::fs::write(&disk.paths[1], contents(8, 3 << 20)).unwrap();
    assert_eq!(files.changed(), Some(&*disk.paths[1]));
}
