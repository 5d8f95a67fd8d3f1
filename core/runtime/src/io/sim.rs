//! Storage that fails on purpose, and an engine whose time is a number: what tests of the pipeline stand on.
//!
//! Faults are put in below the retry loop, where a disk would have them, so tests see what the whole stack makes of
//! them. The engine has one thread and a seed; the order in which reads end depends on nothing else, so a run that went
//! wrong can be repeated.

use std::collections::BTreeMap;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use neuropil_device::{Buffer, WriteLease};

use super::progress::EIO;
use super::serve::serve;
use super::waker::Bell;
use super::{Done, IoEngine, IoError, IoInfo, IoWaker, NVME_BLOCK, NVME_COST, Read, ReadAt};

/// Bytes of the simulated engine's buffer.
const BOUNCE: usize = 64 << 10;

/// Reads that the simulated engine says it has under way at once.
const DEPTH: usize = 64;

/// Longest virtual time of a read, and most of it that passes by a look at what is done.
const LONGEST_NS: u64 = 1_000_000;
const LOOK_NS: u64 = 50_000;

/// How long a wait sleeps, in real time, when nothing is under way.
const NAP: Duration = Duration::from_millis(1);

/// Files in memory.
#[derive(Debug)]
pub struct Bytes {
    files: Vec<(PathBuf, Vec<u8>)>,
    alignment: usize,
}

impl Bytes {
    /// Files named by their number. Reads need no alignment if `alignment` is 1.
    pub fn new(files: Vec<Vec<u8>>, alignment: usize) -> Bytes {
        let named = |(number, bytes)| (PathBuf::from(format!("memory-{number}")), bytes);
        Bytes { files: files.into_iter().enumerate().map(named).collect(), alignment: alignment.max(1) }
    }

    fn file(&self, file: usize) -> io::Result<&[u8]> {
        self.files.get(file).map(|(_, bytes)| &bytes[..]).ok_or_else(|| io::ErrorKind::NotFound.into())
    }
}

impl ReadAt for Bytes {
    fn files(&self) -> usize {
        self.files.len()
    }

    fn path(&self, file: usize) -> &Path {
        self.files.get(file).map_or(Path::new("?"), |(path, _)| path)
    }

    fn read_at(&self, file: usize, out: &mut [u8], offset: u64) -> io::Result<usize> {
        let aligned = |number: usize| number.is_multiple_of(self.alignment);
        if !(aligned(offset as usize) && aligned(out.len()) && aligned(out.as_ptr().addr())) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let bytes = self.file(file)?;
        let rest = usize::try_from(offset).ok().and_then(|offset| bytes.get(offset..)).unwrap_or_default();
        let len = rest.len().min(out.len());
        out[..len].copy_from_slice(&rest[..len]);
        Ok(len)
    }

    fn size(&self, file: usize) -> io::Result<u64> {
        Ok(self.file(file)?.len() as u64)
    }

    fn alignment(&self) -> usize {
        self.alignment
    }

    fn direct(&self) -> bool {
        false
    }
}

/// What goes wrong, and how often. Rates are from 0 to 1, per attempt to read.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Faults {
    /// Which attempts it hits.
    pub seed: u64,
    /// Attempts that bring fewer bytes than there are, but at least one.
    pub short: f64,
    /// Attempts that a signal interrupts.
    pub eintr: f64,
    /// Attempts that are refused for now.
    pub eagain: f64,
    /// Attempts that fail as on a bad disk.
    pub eio: f64,
    /// The attempt, counted from 0, that fails as on a bad disk.
    pub fail_nth: Option<u64>,
    /// Whether bytes that failed so fail from then on, and not once only.
    pub lasting: bool,
    /// Every file ends here, if it is not shorter.
    pub truncate_at: Option<u64>,
}

/// Files with faults.
#[derive(Debug)]
pub struct Faulty<R> {
    inner: R,
    faults: Faults,
    attempts: AtomicU64,
    /// Ranges of files that have failed and go on to.
    bad: Mutex<Vec<(usize, Range<u64>)>>,
}

impl<R: ReadAt> Faulty<R> {
    /// Puts faults into `inner`.
    pub fn new(inner: R, faults: Faults) -> Faulty<R> {
        Faulty { inner, faults, attempts: AtomicU64::new(0), bad: Mutex::default() }
    }

    /// Attempts so far.
    pub fn attempts(&self) -> u64 {
        self.attempts.load(Ordering::Relaxed)
    }

    /// Whether the disk fails for this range.
    fn fails(&self, dice: &mut Dice, attempt: u64, file: usize, range: Range<u64>) -> bool {
        let mut bad = self.bad.lock().unwrap_or_else(PoisonError::into_inner);
        let hit = |(other, bad): &(usize, Range<u64>)| {
            *other == file && bad.start < range.end && range.start < bad.end
        };
        if bad.iter().any(hit) {
            return true;
        }
        let fails = dice.chance(self.faults.eio) || self.faults.fail_nth == Some(attempt);
        if fails && self.faults.lasting {
            bad.push((file, range));
        }
        fails
    }
}

impl<R: ReadAt> ReadAt for Faulty<R> {
    fn files(&self) -> usize {
        self.inner.files()
    }

    fn path(&self, file: usize) -> &Path {
        self.inner.path(file)
    }

    fn read_at(&self, file: usize, out: &mut [u8], offset: u64) -> io::Result<usize> {
        let attempt = self.attempts.fetch_add(1, Ordering::Relaxed);
        let mut dice = Dice::new(self.faults.seed, attempt);
        let end = offset.saturating_add(out.len() as u64);
        if self.fails(&mut dice, attempt, file, offset..end) {
            return Err(io::Error::from_raw_os_error(EIO));
        }
        if dice.chance(self.faults.eintr) {
            return Err(io::ErrorKind::Interrupted.into());
        }
        if dice.chance(self.faults.eagain) {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        // All is read, since direct reads cannot be shorter than a block, and less is reported.
        let mut got = self.inner.read_at(file, out, offset)?;
        if let Some(size) = self.faults.truncate_at {
            got = got.min(usize::try_from(size.saturating_sub(offset)).unwrap_or(usize::MAX));
        }
        if got > 1 && dice.chance(self.faults.short) {
            got = 1 + dice.below(got as u64 - 1) as usize;
        }
        Ok(got)
    }

    fn size(&self, file: usize) -> io::Result<u64> {
        Ok(self.inner.size(file)?.min(self.faults.truncate_at.unwrap_or(u64::MAX)))
    }

    fn alignment(&self) -> usize {
        self.inner.alignment()
    }

    fn direct(&self) -> bool {
        self.inner.direct()
    }
}

/// An engine with one thread, the caller's, and a clock that is a number.
pub struct Sim {
    info: IoInfo,
    source: Arc<dyn ReadAt>,
    dice: Dice,
    /// Virtual time, in nanoseconds.
    now: u64,
    /// Reads under way by when they end, and then by order of submission.
    flight: BTreeMap<(u64, u64), Read>,
    submitted: u64,
    bounce: WriteLease,
    woken: Arc<Flag>,
}

#[derive(Default)]
struct Flag {
    rung: Mutex<bool>,
    changed: Condvar,
}

impl Flag {
    /// Whether it rang since the last time; sleeps a little for it if told to.
    fn take(&self, sleep: bool) -> bool {
        let mut rung = self.rung.lock().unwrap_or_else(PoisonError::into_inner);
        if sleep && !*rung {
            let slept = self.changed.wait_timeout(rung, NAP).unwrap_or_else(PoisonError::into_inner);
            rung = slept.0;
        }
        std::mem::take(&mut *rung)
    }
}

impl Bell for Flag {
    fn ring(&self) {
        *self.rung.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.changed.notify_one();
    }
}

impl Sim {
    /// Reads `source`; reads take virtual times that `seed` tells.
    ///
    /// # Errors
    /// [`IoError::OutOfMemory`].
    pub fn new(source: Arc<dyn ReadAt>, seed: u64) -> Result<Sim, IoError> {
        let bounce = Buffer::host(BOUNCE).and_then(|buffer| buffer.write());
        let (alignment, direct) = (source.alignment(), source.direct());
        Ok(Sim {
            info: IoInfo {
                name: "sim".into(),
                alignment,
                depth: DEPTH,
                direct,
                read_cost: NVME_COST,
                least_read: NVME_BLOCK,
            },
            source,
            dice: Dice::new(seed, 0),
            now: 0,
            flight: BTreeMap::new(),
            submitted: 0,
            bounce: bounce.map_err(|_| IoError::OutOfMemory { bytes: BOUNCE })?,
            woken: Arc::default(),
        })
    }

    /// Virtual time since the engine began.
    pub fn now(&self) -> Duration {
        Duration::from_nanos(self.now)
    }
}

impl IoEngine for Sim {
    fn info(&self) -> &IoInfo {
        &self.info
    }

    fn submit(&mut self, reads: &mut Vec<Read>) {
        for read in reads.drain(..) {
            let ends = self.now + 1 + self.dice.below(LONGEST_NS);
            self.flight.insert((ends, self.submitted), read);
            self.submitted += 1;
        }
    }

    /// Never hangs: waiting moves the clock to the end of the next read, and with nothing under way it returns after a
    /// short sleep, from which the waker wakes it.
    fn reap(&mut self, wait: bool, done: &mut Vec<Done>) {
        let next = self.flight.first_key_value().map(|((ends, _), _)| *ends);
        match (wait && !self.woken.take(next.is_none()), next) {
            (true, Some(ends)) => self.now = self.now.max(ends),
            _ => self.now += self.dice.below(LOOK_NS),
        }
        while let Some(first) = self.flight.first_entry().filter(|first| first.key().0 <= self.now) {
            let mut read = first.remove();
            let result = serve(&*self.source, &mut read, self.bounce.bytes_mut());
            done.push(read.done(result));
        }
    }

    fn waker(&self) -> IoWaker {
        IoWaker::new(self.woken.clone())
    }
}

/// Random numbers that depend on the seed and the stream alone.
#[derive(Debug)]
struct Dice(u64);

impl Dice {
    fn new(seed: u64, stream: u64) -> Dice {
        let mut dice = Dice(seed);
        Dice(dice.next() ^ stream.wrapping_mul(0xd134_2543_de82_ef95))
    }

    /// SplitMix64.
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let x = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    }

    /// From 0 up to `bound`.
    fn below(&mut self, bound: u64) -> u64 {
        ((u128::from(self.next()) * u128::from(bound)) >> 64) as u64
    }

    fn chance(&mut self, rate: f64) -> bool {
        ((self.next() >> 11) as f64) < rate * (1u64 << 53) as f64
    }
}
