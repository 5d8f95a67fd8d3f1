use std::sync::atomic::AtomicUsize;
use std::time::Duration;

use super::*;

/// Every chunk of many jobs runs exactly once, and the results are there after the join.
fn each_chunk_once(pool: &Pool, jobs: usize) {
    for job in 0..jobs {
        let counts: Vec<AtomicU32> = (0..job % 97).map(|_| AtomicU32::new(0)).collect();
        pool.run("test", counts.len(), &|chunk| {
            counts[chunk].fetch_add(1, Ordering::Relaxed);
        });
        assert!(counts.iter().all(|c| c.load(Ordering::Relaxed) == 1), "job {job}");
    }
}

const JOBS: usize = if cfg!(miri) { 20 } else { 4000 };

#[test]
fn each_chunk_runs_once_for_any_number_of_threads() {
    for threads in [0, 1, 2, 7] {
        let pool = Pool::new(threads, &[0, 1]).unwrap();
        assert_eq!(pool.threads(), threads.max(1));
        each_chunk_once(&pool, JOBS);
    }
}

#[test]
fn many_threads_on_few_cores() {
    let threads = if cfg!(miri) { 6 } else { 64 };
    // As a user gets it, then all awake and asleep in turn, then all spinning.
    let rude = Patience { spin: Duration::from_micros(5), offer: Duration::from_micros(20) };
    for (patience, wakes) in [(Patience::NONE, 1), (Patience::NONE, threads), (rude, threads)] {
        let pool = Pool::with_patience(threads, &[], patience, wakes, None).unwrap();
        each_chunk_once(&pool, JOBS / 4);
    }
}

#[test]
fn a_sleeping_pool_wakes_up() {
    let pool = Pool::new(3, &[0, 1, 2]).unwrap();
    for _ in 0..3 {
        std::thread::sleep(Duration::from_millis(2));
        each_chunk_once(&pool, 20);
    }
}

#[test]
fn workers_take_part() {
    let pool = Pool::new(2, &[0, 1]).unwrap();
    let caller = std::thread::current().id();
    let other = AtomicBool::new(false);
    // The caller holds one chunk until the worker has had the other.
    pool.run("test", 2, &|_| {
        if std::thread::current().id() != caller {
            other.store(true, Ordering::Release);
        }
        while !other.load(Ordering::Acquire) {
            std::thread::yield_now();
        }
    });
    assert!(other.into_inner());
}

#[test]
fn a_panic_reaches_the_caller_and_the_pool_goes_on() {
    let pool = Pool::new(3, &[]).unwrap();
    for _ in 0..5 {
        let done = AtomicUsize::new(0);
        let caught = catch_unwind(AssertUnwindSafe(|| {
            pool.run("test", 40, &|chunk| {
                assert!(chunk % 10 != 3, "chunk {chunk}");
                done.fetch_add(1, Ordering::Relaxed);
            });
        }));
        let text = *caught.unwrap_err().downcast::<String>().unwrap();
        assert!(text.starts_with("chunk "), "{text}");
        assert_eq!(done.into_inner(), 36, "the other chunks are done all the same");
        each_chunk_once(&pool, 10);
    }
}

#[test]
fn runs_from_several_threads_and_runs_in_runs() {
    let pool = Pool::new(4, &[]).unwrap();
    let sum = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..JOBS / 20 {
                    pool.run("test", 5, &|i| {
                        pool.run("test", 3, &|j| {
                            sum.fetch_add(10 * i + j, Ordering::Relaxed);
                        });
                    });
                }
            });
        }
    });
    assert_eq!(sum.into_inner(), 4 * (JOBS / 20) * 315);
}

#[test]
fn chunks_are_a_few_per_thread() {
    let pool = Pool::new(3, &[]).unwrap();
    assert_eq!(pool.chunk_len(1000, 1), 84);
    assert_eq!(pool.chunk_len(10, 4), 4);
    assert_eq!(pool.chunk_len(0, 0), 1);
    assert_eq!(Pool::new(1, &[]).unwrap().chunk_len(1000, 4), 1000);
}

/// What a timeline was told: threads and names.
#[derive(Default)]
struct Told(Mutex<Vec<(usize, &'static str)>>);

impl Timeline for Told {
    fn span(&self, thread: usize, name: &'static str, start: Instant, end: Instant) {
        assert!(start <= end);
        self.0.lock().unwrap().push((thread, name));
    }
}

#[test]
fn a_timeline_is_told_once_per_thread_and_job() {
    let told = Arc::new(Told::default());
    // A fork wakes all workers, so that each gets a chunk also where there are fewer CPUs.
    let pool = Pool::with_patience(3, &[], Patience::NONE, 2, Some(told.clone())).unwrap();
    let take = || {
        let mut spans = std::mem::take(&mut *told.0.lock().unwrap());
        spans.sort_unstable();
        spans
    };
    assert_eq!(take(), [(0, "start"), (1, "start"), (2, "start")]);
    // Each thread holds a chunk until all have one.
    let begun = AtomicUsize::new(0);
    pool.run("held", 3, &|_| {
        begun.fetch_add(1, Ordering::AcqRel);
        while begun.load(Ordering::Acquire) < 3 {
            std::thread::yield_now();
        }
    });
    assert_eq!(take(), [(0, "held"), (1, "held"), (2, "held")]);
    pool.run("one", 1, &|_| {});
    assert_eq!(take(), [(0, "one")]);
    pool.run("many", 100, &|_| {});
    let spans = take();
    assert!(spans.len() <= 3 && spans.iter().all(|(_, name)| *name == "many"), "{spans:?}");
    // Inside of a job the thread is busy already.
    pool.run("outer", 2, &|_| pool.run("inner", 2, &|_| {}));
    assert!(take().iter().all(|(_, name)| *name == "outer"));
}
