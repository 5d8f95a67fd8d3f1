//! Reads a neuron's rows one by one, as if its gate, up and down row lay in three matrices: what a store without bundles
//! would cost, for comparison.
//!
//! The bytes are those of the bundles; only the reads are other ones. A read of neighbouring neurons becomes three, as
//! long as those of the same rows of the matrices would be. The parts of a batch are submitted matrix by matrix, so none
//! begins where another ends, and no system joins them again. They go to a small arena, from which they are copied, for a
//! lease cannot be shared.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use neuropil_device::{Arena, DeviceError};

use super::{Done, IoEngine, IoError, IoInfo, IoWaker, Read, Target};

/// Parts that are under way at once.
const PARTS: usize = 128;
/// Most neighbours of a read that is cut. Longer reads would be as long in matrices, so they stay what they are.
const FEW: usize = 4;
/// Order in which the parts are submitted: the third row does not follow the first, nor the second the third.
const ORDER: [usize; 3] = [0, 2, 1];

/// Bundles that lie side by side in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bundles {
    /// The file's number.
    pub file: usize,
    /// Where the first begins.
    pub start: u64,
    /// From one to the next.
    pub stride: usize,
    /// How many there are.
    pub count: usize,
    /// Where in a bundle the second and the third row begin.
    pub rows: [usize; 2],
}

/// An engine that cuts the reads of an inner one at the rows of bundles.
pub struct Rows {
    inner: Box<dyn IoEngine>,
    /// By place.
    bundles: Vec<Bundles>,
    arena: Arena,
    /// Slots of the arena that no part uses.
    free: Vec<usize>,
    /// Reads that are not done; a part's tag is its read's place here and its first byte.
    entries: Vec<Entry>,
    /// Places that are free.
    unused: Vec<usize>,
    /// Parts that wait for a slot.
    queue: VecDeque<Part>,
    under_way: usize,
    /// Parts besides the first of each read.
    more: Arc<AtomicU64>,
    parts: Vec<Read>,
    reaped: Vec<Done>,
}

enum Entry {
    Unused,
    /// A read that stays whole, with its tag.
    Whole(u64),
    /// One that was cut, with the number of parts that are missing.
    Cut {
        read: Read,
        missing: usize,
        result: Result<(), IoError>,
    },
}

#[derive(Clone, Copy)]
struct Part {
    entry: usize,
    from: usize,
    len: usize,
}

impl Bundles {
    /// The first byte and the length of each part of a read, or `None` if the read is not to be cut.
    fn cut(&self, read: &Read) -> Option<[(usize, usize); 3]> {
        let at = read.offset.checked_sub(self.start).filter(|at| *at < self.end() - self.start)?;
        let within = (at % self.stride as u64) as usize;
        let neurons = read.len.div_ceil(self.stride);
        if neurons > FEW || (neurons > 1 && within > 0) {
            return None;
        }
        let border = |row: usize| (row.saturating_sub(within) * neurons).min(read.len);
        let [second, third] = self.rows.map(border);
        let parts = [(0, second), (second, third - second), (third, read.len - third)];
        let fits = parts.iter().all(|(_, len)| *len <= self.longest_part());
        (fits && parts.iter().filter(|(_, len)| *len > 0).count() > 1).then_some(parts)
    }

    fn end(&self) -> u64 {
        self.start + (self.stride * self.count) as u64
    }

    fn longest_part(&self) -> usize {
        let [second, third] = self.rows;
        FEW * second.max(third - second).max(self.stride - third)
    }
}

impl Rows {
    /// Cuts the reads of `inner` that are of `bundles`.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`].
    pub fn new(inner: Box<dyn IoEngine>, mut bundles: Vec<Bundles>) -> Result<Rows, DeviceError> {
        bundles.retain(|Bundles { stride, rows, .. }| rows[0] <= rows[1] && rows[1] < *stride);
        bundles.sort_unstable_by_key(|bundles| (bundles.file, bundles.start));
        let longest = bundles.iter().map(Bundles::longest_part).max().unwrap_or(1);
        Ok(Rows {
            inner,
            bundles,
            arena: Arena::new(PARTS, longest, 4096)?,
            free: (0..PARTS).collect(),
            entries: Vec::new(),
            unused: Vec::new(),
            queue: VecDeque::new(),
            under_way: 0,
            more: Arc::default(),
            parts: Vec::new(),
            reaped: Vec::new(),
        })
    }

    /// How many more reads there were so far than were submitted; counts on while the engine lives.
    pub fn more(&self) -> Arc<AtomicU64> {
        self.more.clone()
    }

    fn cut(&self, read: &Read) -> Option<[(usize, usize); 3]> {
        // The inner engine refuses a read that cannot be right, as a whole.
        read.check(usize::MAX).ok()?;
        let key = (read.file, read.offset);
        let after = self.bundles.partition_point(|bundles| (bundles.file, bundles.start) <= key);
        self.bundles[..after].last().filter(|bundles| bundles.file == read.file)?.cut(read)
    }

    fn enter(&mut self, entry: Entry) -> usize {
        match self.unused.pop() {
            Some(index) => {
                self.entries[index] = entry;
                index
            }
            None => {
                self.entries.push(entry);
                self.entries.len() - 1
            }
        }
    }

    /// Submits parts as far as there are slots for them.
    fn send(&mut self) {
        while let (Some(part), Some(slot)) = (self.queue.front().copied(), self.free.last().copied()) {
            // Nobody else leases from this arena, so a slot that is free can be written.
            let Ok(to) = self.arena.write(slot) else {
                self.free.pop();
                continue;
            };
            self.free.pop();
            self.queue.pop_front();
            let Some(Entry::Cut { read, .. }) = self.entries.get(part.entry) else { continue };
            let (tag, targets) = (tag(part), Target::whole(to, part.len).into());
            let offset = read.offset + part.from as u64;
            self.parts.push(Read { tag, file: read.file, offset, len: part.len, targets });
        }
        self.under_way += self.parts.len();
        self.inner.submit(&mut self.parts);
    }

    /// One read of the inner engine is done; appends the whole to `done` if it is the last of its parts.
    fn arrived(&mut self, ended: Done, done: &mut Vec<Done>) {
        self.under_way -= 1;
        let (index, from) = ((ended.tag >> 32) as usize, ended.tag as u32 as usize);
        let Some(entry) = self.entries.get_mut(index) else { return };
        match entry {
            Entry::Unused => {}
            Entry::Whole(tag) => {
                done.push(Done { tag: *tag, ..ended });
                *entry = Entry::Unused;
                self.unused.push(index);
            }
            Entry::Cut { read, missing, result } => {
                match (&ended.targets[..], ended.result) {
                    (_, Err(error)) => *result = Err(error),
                    ([target], Ok(())) => read.deliver(from, &target.to.bytes()[..target.len]),
                    (_, Ok(())) => {}
                }
                // A slot that does not come back is lost to a kernel that may still write to it.
                self.free.extend(ended.targets.iter().flat_map(|target| target.to.slots()));
                *missing -= 1;
                if *missing == 0 {
                    self.finish(index, done);
                }
            }
        }
    }

    fn finish(&mut self, index: usize, done: &mut Vec<Done>) {
        if let Entry::Cut { read, result, .. } = std::mem::replace(&mut self.entries[index], Entry::Unused) {
            done.push(read.done(result));
        }
        self.unused.push(index);
    }

    /// Where all slots are lost nothing can be read any more, and who waits is told why.
    fn fail_queue(&mut self, done: &mut Vec<Done>) {
        if self.under_way > 0 {
            return;
        }
        while let Some(part) = self.queue.pop_front() {
            let Some(Entry::Cut { missing, result, .. }) = self.entries.get_mut(part.entry) else { continue };
            *result = Err(IoError::OutOfMemory { bytes: part.len });
            *missing -= 1;
            if *missing == 0 {
                self.finish(part.entry, done);
            }
        }
    }
}

fn tag(part: Part) -> u64 {
    ((part.entry as u64) << 32) | part.from as u64
}

impl IoEngine for Rows {
    fn info(&self) -> &IoInfo {
        self.inner.info()
    }

    fn submit(&mut self, reads: &mut Vec<Read>) {
        let mut cuts = Vec::with_capacity(reads.len());
        for mut read in reads.drain(..) {
            match self.cut(&read) {
                Some(cut) => {
                    let missing = cut.iter().filter(|(_, len)| *len > 0).count();
                    self.more.fetch_add(missing as u64 - 1, Ordering::Relaxed);
                    cuts.push((self.enter(Entry::Cut { read, missing, result: Ok(()) }), cut));
                }
                None => {
                    read.tag = (self.enter(Entry::Whole(read.tag)) as u64) << 32;
                    self.parts.push(read);
                }
            }
        }
        for row in ORDER {
            let parts =
                cuts.iter().map(|(entry, cut)| Part { entry: *entry, from: cut[row].0, len: cut[row].1 });
            self.queue.extend(parts.filter(|part| part.len > 0));
        }
        self.send();
    }

    /// With `wait`, returns also when a part alone is done, so that no wake is missed.
    fn reap(&mut self, wait: bool, done: &mut Vec<Done>) {
        let mut reaped = std::mem::take(&mut self.reaped);
        self.inner.reap(wait, &mut reaped);
        reaped.drain(..).for_each(|ended| self.arrived(ended, done));
        self.reaped = reaped;
        self.send();
        self.fail_queue(done);
    }

    fn waker(&self) -> IoWaker {
        self.inner.waker()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::io::{Bytes, Faults, Faulty, Sim};

    /// Two units of 20 bundles with rows of 40, 30 and 26 bytes, after 7 other bytes.
    fn bundles() -> Vec<Bundles> {
        [7, 7 + 20 * 96].map(|start| Bundles { file: 0, start, stride: 96, count: 20, rows: [40, 70] }).into()
    }

    fn file() -> Vec<u8> {
        (0..5000u32).map(|index| (index * 31 % 251) as u8).collect()
    }

    /// Offset and length: bundles, neighbours, second parts, first parts, long reads, others.
    fn places() -> Vec<(usize, usize)> {
        let bundle = |index: usize| 7 + 96 * index;
        let mut places: Vec<_> = (0..40).map(|index| (bundle(index), 96)).collect();
        places.extend((0..40).map(|index| (bundle(index) + 40, 56)));
        places.extend([(bundle(3), 3 * 96), (bundle(20), 40), (bundle(5), 10 * 96), (bundle(18), 4 * 96)]);
        places.extend([(0, 50), (bundle(1) + 50, 90), (bundle(39) + 80, 100), (4000, 900), (9, 0)]);
        places
    }

    /// Reads all places at once, into two targets each; the bytes by tag, or `None` for a read that failed.
    fn read(engine: &mut dyn IoEngine) -> Vec<Option<Vec<u8>>> {
        let places = places();
        let arena = Arena::new(2 * places.len(), 1024, 64).unwrap();
        let target = |slot, from, len| Target { to: arena.write(slot).unwrap(), at: 3, from, len };
        let mut reads = Vec::new();
        for (tag, (offset, len)) in places.iter().enumerate() {
            let half = len / 2;
            let targets = vec![target(2 * tag, 0, half), target(2 * tag + 1, half, len - half)];
            let (tag, offset) = (1 << 63 | tag as u64, *offset as u64);
            reads.push(Read { tag, file: 0, offset, len: *len, targets: targets.into() });
        }
        engine.submit(&mut reads);
        let mut done = Vec::new();
        while done.len() < places.len() {
            engine.reap(true, &mut done);
        }
        let mut bytes = vec![None; places.len()];
        for Done { tag, targets, result } in done {
            let all = targets.iter().flat_map(|t| t.to.bytes()[t.at..t.at + t.len].iter().copied());
            bytes[(tag & !(1 << 63)) as usize] = result.is_ok().then(|| all.collect());
        }
        bytes
    }

    #[test]
    fn the_bytes_are_those_of_whole_reads_and_the_reads_are_counted() {
        let source = Arc::new(Bytes::new(vec![file()], 1));
        let mut rows = Rows::new(Box::new(Sim::new(source, 1).unwrap()), bundles()).unwrap();
        for _ in 0..3 {
            for (bytes, (offset, len)) in read(&mut rows).into_iter().zip(places()) {
                assert_eq!(bytes.unwrap(), file()[offset..offset + len]);
            }
        }
        // 40 bundles in three parts, 40 of two rows, and two reads of neighbours.
        assert_eq!(rows.more().load(Ordering::Relaxed), 3 * (40 * 2 + 40 + 2 * 2 + 1));
        assert_eq!((rows.free.len(), rows.under_way), (PARTS, 0));
    }

    #[test]
    fn a_part_that_fails_fails_its_read() {
        for nth in 0..300 {
            let faults = Faults { fail_nth: Some(nth), lasting: true, ..Faults::default() };
            let source = Arc::new(Faulty::new(Bytes::new(vec![file()], 1), faults));
            let mut rows = Rows::new(Box::new(Sim::new(source.clone(), nth).unwrap()), bundles()).unwrap();
            let read = read(&mut rows);
            let failed = read.iter().any(|bytes| bytes.is_none());
            assert_eq!(failed, source.attempts() > nth, "attempt {nth}");
            for (bytes, (offset, len)) in read.into_iter().zip(places()) {
                assert!(bytes.is_none_or(|bytes| bytes == file()[offset..offset + len]));
            }
            assert_eq!(rows.free.len(), PARTS);
        }
    }
}
