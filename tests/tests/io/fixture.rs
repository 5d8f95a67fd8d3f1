//! Files, reads and what the right bytes are.

use std::path::PathBuf;
use std::sync::Arc;

use neuropil::io::{
    Bytes, Done, Faults, Faulty, Files, IoChoice, IoEngine, IoError, Pread, Read, Sim, Target, Targets,
    open_files,
};
use neuropil_device::Arena;
use neuropil_tests::temp::TempDir;

/// Bytes that do not repeat within a file.
pub fn contents(seed: u64, len: usize) -> Vec<u8> {
    let mut random = Random(seed);
    (0..len.div_ceil(8)).flat_map(|_| random.next().to_le_bytes()).take(len).collect()
}

/// SplitMix64.
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let x = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    }

    pub fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound as u64) as usize
    }
}

/// Two files on disk and what is in them. The first has no whole number of blocks.
pub struct Disk {
    _folder: TempDir,
    pub paths: Vec<PathBuf>,
    pub contents: Vec<Vec<u8>>,
}

impl Disk {
    pub fn new() -> Disk {
        let folder = TempDir::new();
        let contents = vec![contents(1, 1_000_003), contents(2, 3 << 20)];
        let paths: Vec<PathBuf> = (0..2).map(|n| folder.path().join(format!("weights-{n}"))).collect();
        for (path, bytes) in paths.iter().zip(&contents) {
            std::fs::write(path, bytes).unwrap();
        }
        Disk { _folder: folder, paths, contents }
    }

    pub fn files(&self) -> Arc<Files> {
        Arc::new(Files::open(&self.paths).unwrap())
    }

    /// Every engine that works here, also on top of files that are not read directly.
    pub fn engines(&self) -> Vec<Box<dyn IoEngine>> {
        let buffered = Arc::new(Files::open_buffered(&self.paths).unwrap());
        let mut engines: Vec<Box<dyn IoEngine>> = Vec::new();
        for files in [self.files(), buffered] {
            for choice in ["auto", "uring", "pread", "throttle:ufs4.0"] {
                match open_files(&choice.parse::<IoChoice>().unwrap(), files.clone()) {
                    Ok(engine) => engines.push(engine),
                    Err(error) => assert!(matches!(error, IoError::Unavailable { engine: "uring", .. })),
                }
            }
            engines.push(Box::new(Sim::new(files.clone(), 5).unwrap()));
        }
        engines.push(Box::new(Pread::new(Arc::new(self.bytes(512, Faults::default())), 3).unwrap()));
        engines
    }

    /// The same files in memory, with faults.
    pub fn bytes(&self, alignment: usize, faults: Faults) -> Faulty<Bytes> {
        Faulty::new(Bytes::new(self.contents.clone(), alignment), faults)
    }
}

/// A read of all of the first bytes of a slot.
pub fn read(tag: u64, file: usize, offset: u64, len: usize, arena: &Arena, slot: usize) -> Read {
    let targets = Target::whole(arena.write(slot).unwrap(), len).into();
    Read { tag, file, offset, len, targets }
}

/// `count` random reads: aligned or not, small or long, with one target, several, gaps between them, or none. Each has
/// slots of its own in the arena that is returned.
pub fn random_reads(disk: &Disk, seed: u64, count: usize) -> (Arena, Vec<Read>) {
    let mut random = Random(seed);
    let arena = Arena::new(count * 3, 80 << 10, 4096).unwrap();
    let reads = (0..count).map(|number| {
        let file = random.below(2);
        let size = disk.contents[file].len();
        let most = [600, 9000, 70_000][random.below(3)];
        let mut len = random.below(most);
        let mut offset = random.below(size - len);
        if random.below(2) == 0 {
            (offset, len) = (offset / 4096 * 4096, len.next_multiple_of(512).min(size / 4096 * 4096));
            len = len.min((size - offset) / 512 * 512);
        } else if random.below(8) == 0 {
            offset = size - len;
        }
        let slot = |n| arena.write(number * 3 + n).unwrap();
        let targets = match random.below(4) {
            0 | 1 => Target::whole(slot(0), len).into(),
            2 => {
                let cut = random.below(len + 1);
                let gap = random.below(len - cut + 1);
                let first = Target { to: slot(0), at: random.below(2000), from: 0, len: cut };
                let last = Target { to: slot(1), at: 3, from: cut + gap, len: len - cut - gap };
                let again = Target { to: slot(2), at: 0, from: len / 3, len: len / 3 };
                vec![last, first, again].into()
            }
            _ => Targets::default(),
        };
        Read { tag: number as u64, file, offset: offset as u64, len, targets }
    });
    let reads = reads.collect();
    (arena, reads)
}

/// Reads all, and returns what came back by tag.
pub fn run(engine: &mut dyn IoEngine, mut reads: Vec<Read>) -> Vec<Done> {
    let count = reads.len();
    let mut done = Vec::new();
    engine.submit(&mut reads);
    assert!(reads.is_empty());
    while done.len() < count {
        engine.reap(true, &mut done);
    }
    engine.reap(false, &mut done);
    done.sort_by_key(|done| done.tag);
    let tags: Vec<u64> = done.iter().map(|done| done.tag).collect();
    assert_eq!(tags, (0..count as u64).collect::<Vec<_>>(), "each read comes back once");
    done
}

/// Runs `reads` and compares every target's bytes with the file's.
pub fn expect_right(engine: &mut dyn IoEngine, disk: &Disk, reads: Vec<Read>) {
    let places: Vec<(usize, usize)> = reads.iter().map(|read| (read.file, read.offset as usize)).collect();
    for done in run(engine, reads) {
        let (file, offset) = places[done.tag as usize];
        done.result.unwrap_or_else(|error| panic!("{error}"));
        for target in done.targets.iter() {
            let right = &disk.contents[file][offset + target.from..][..target.len];
            assert!(target.to.bytes()[target.at..][..target.len] == *right, "read {}", done.tag);
        }
    }
}
