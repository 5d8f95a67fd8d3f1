//! Waiting, waking, and ending an engine that is at work.

use std::sync::Arc;
use std::time::{Duration, Instant};

use neuropil::io::{Faults, IoEngine, Sim};
use neuropil_device::Arena;

use crate::fixture::{Disk, random_reads, read, run};

#[test]
fn a_waker_ends_a_wait_of_now_and_of_later() {
    let disk = Disk::new();
    for mut engine in disk.engines() {
        let mut done = Vec::new();
        let waker = engine.waker();
        waker.clone().wake();
        waker.wake();
        engine.reap(true, &mut done);
        if engine.info().name == "sim" {
            continue;
        }
        let start = Instant::now();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(Duration::from_millis(20));
                waker.wake();
            });
            engine.reap(true, &mut done);
        });
        assert!(start.elapsed() >= Duration::from_millis(20), "{}", engine.info().name);
        assert!(done.is_empty());
        // What is woken still reads.
        let arena = Arena::new(1, 4096, 4096).unwrap();
        assert!(run(&mut *engine, vec![read(0, 1, 4096, 4096, &arena, 0)])[0].result.is_ok());
    }
}

#[test]
fn looking_without_waiting_gets_all_in_the_end() {
    let disk = Disk::new();
    for mut engine in disk.engines() {
        let (_arena, mut reads) = random_reads(&disk, 4, 40);
        let mut done = Vec::new();
        engine.submit(&mut reads);
        let start = Instant::now();
        while done.len() < 40 {
            assert!(start.elapsed() < Duration::from_secs(60), "{}", engine.info().name);
            std::thread::yield_now();
            engine.reap(false, &mut done);
        }
    }
}

#[test]
fn an_engine_that_ends_at_work_gives_its_leases_back() {
    let disk = Disk::new();
    for seed in 0..5 {
        for mut engine in disk.engines() {
            let (arena, mut reads) = random_reads(&disk, seed, 300);
            engine.submit(&mut reads);
            let mut done = Vec::new();
            engine.reap(false, &mut done);
            let waker = engine.waker();
            drop((engine, done));
            waker.wake();
            assert!(arena.write_run(0..arena.slots()).is_ok(), "a lease was lost");
        }
    }
}

#[test]
fn an_engine_may_move_to_another_thread() {
    let disk = Disk::new();
    for engine in disk.engines() {
        let (_arena, mut reads) = random_reads(&disk, 6, 30);
        let submitted = std::thread::spawn(move || {
            let mut engine = engine;
            engine.submit(&mut reads);
            engine
        });
        let mut engine = submitted.join().unwrap();
        let mut done = Vec::new();
        while done.len() < 30 {
            engine.reap(true, &mut done);
        }
        assert!(done.iter().all(|done| done.result.is_ok()));
    }
}

#[test]
fn simulated_time_and_order_depend_on_the_seed_alone() {
    let disk = Disk::new();
    let order = |seed| {
        let source = Arc::new(disk.bytes(512, Faults { short: 0.2, ..Faults::default() }));
        let mut engine = Sim::new(source, seed).unwrap();
        let (_arena, mut reads) = random_reads(&disk, 1, 50);
        let mut done = Vec::new();
        engine.submit(&mut reads);
        while done.len() < 50 {
            engine.reap(done.len() % 3 == 0, &mut done);
        }
        engine.reap(true, &mut done);
        (done.iter().map(|done| done.tag).collect::<Vec<_>>(), engine.now())
    };
    assert_eq!(order(1), order(1));
    assert_ne!(order(1), order(2));
    assert!(!order(1).0.is_sorted());
}
