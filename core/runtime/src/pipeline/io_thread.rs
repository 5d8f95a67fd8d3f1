//! The one thread that reads.
//!
//! Storage of phones has one command queue, and reads from several cores disturb each other (PowerInfer-2 section 2.3),
//! so one thread owns the engine. Who computes leaves reads in its inbox and wakes it; what arrives it reports to the
//! cache or the ring, a batch at a time. It sleeps whenever nothing is to be done.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use neuropil_device::DeviceError;

use crate::cache::{Parts, Shared};
use crate::io::{Done, IoEngine, IoError, IoWaker, Read};

use super::ring::Arrivals;
use super::storage::source_error;
use super::trace::{Lane, Trace};

/// What a read is for, as its tag.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Source {
    /// These parts of the neurons whose slots are its targets.
    Neurons(Parts),
    /// A piece of the ring.
    Ring(usize),
}

const RING: u64 = 1 << 63;

impl Source {
    pub fn tag(self) -> u64 {
        match self {
            Source::Neurons(Parts::GATE) => 1,
            Source::Neurons(Parts::UP_DOWN) => 2,
            Source::Neurons(_) => 3,
            Source::Ring(piece) => RING | piece as u64,
        }
    }

    fn of(tag: u64) -> Source {
        match tag {
            1 => Source::Neurons(Parts::GATE),
            2 => Source::Neurons(Parts::UP_DOWN),
            3 => Source::Neurons(Parts::BOTH),
            piece => Source::Ring((piece & !RING) as usize),
        }
    }
}

/// Who is told of what arrived.
pub(super) struct Sink {
    pub cache: Arc<Shared>,
    /// Slots of an entry of the cache.
    pub group: usize,
    pub ring: Arc<Arrivals>,
}

impl Sink {
    /// From now on all reads have failed.
    fn give_up(&self) {
        self.cache.end();
        self.ring.give_up();
    }
}

/// However the thread ends, nobody waits for it any longer.
impl Drop for Sink {
    fn drop(&mut self) {
        self.give_up();
    }
}

#[derive(Default)]
struct Inbox {
    reads: Vec<Read>,
    stop: bool,
}

struct Common {
    inbox: Mutex<Inbox>,
    failure: Mutex<Option<IoError>>,
    reads: AtomicU64,
    bytes: AtomicU64,
}

/// Its handle; dropping it ends the thread.
pub(super) struct IoThread {
    common: Arc<Common>,
    waker: IoWaker,
    engine: String,
    thread: Option<JoinHandle<()>>,
}

/// The stack of a thread, if nobody says otherwise.
const STACK: usize = 2 << 20;

impl IoThread {
    /// Starts the thread.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`] when the system refuses one.
    pub fn start(
        engine: Box<dyn IoEngine>,
        sink: Sink,
        trace: Option<Arc<Trace>>,
    ) -> Result<IoThread, DeviceError> {
        let common = Arc::new(Common {
            inbox: Mutex::default(),
            failure: Mutex::default(),
            reads: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
        });
        let (waker, name) = (engine.waker(), engine.info().name.clone());
        let own = common.clone();
        let thread = std::thread::Builder::new()
            .name("neuropil-io".into())
            .spawn(move || serve(engine, &own, sink, trace.as_deref()))
            .map_err(|error| DeviceError::OutOfMemory {
                device: format!("host (it refuses a thread for reading: {error})"),
                bytes: STACK,
            })?;
        Ok(IoThread { common, waker, engine: name, thread: Some(thread) })
    }

    /// Hands reads over and empties the list.
    pub fn submit(&self, reads: &mut Vec<Read>) {
        if reads.is_empty() {
            return;
        }
        let bytes = reads.iter().map(|read| read.len as u64).sum();
        self.common.reads.fetch_add(reads.len() as u64, Ordering::Relaxed);
        self.common.bytes.fetch_add(bytes, Ordering::Relaxed);
        self.common.inbox().reads.append(reads);
        self.waker.wake();
    }

    /// Reads and bytes so far.
    pub fn counts(&self) -> (u64, u64) {
        (self.common.reads.load(Ordering::Relaxed), self.common.bytes.load(Ordering::Relaxed))
    }

    /// The engine's name.
    pub fn engine(&self) -> &str {
        &self.engine
    }

    /// The error of the last read that failed.
    pub fn failure(&self) -> DeviceError {
        let failure = self.common.failure.lock().unwrap_or_else(PoisonError::into_inner);
        match &*failure {
            Some(error) => source_error(error),
            None => DeviceError::Source { reason: "a read failed".into() },
        }
    }
}

impl Drop for IoThread {
    fn drop(&mut self) {
        self.common.inbox().stop = true;
        self.waker.wake();
        if let Some(thread) = self.thread.take() {
            // Its panic, if it had one, was reported to who waited.
            let _ = thread.join();
        }
    }
}

impl Common {
    fn inbox(&self) -> MutexGuard<'_, Inbox> {
        self.inbox.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn serve(mut engine: Box<dyn IoEngine>, common: &Common, sink: Sink, trace: Option<&Trace>) {
    let (mut reads, mut done, mut loaded) = (Vec::new(), Vec::new(), Vec::new());
    let group = sink.group;
    loop {
        {
            let mut inbox = common.inbox();
            if inbox.stop {
                return;
            }
            std::mem::swap(&mut inbox.reads, &mut reads);
        }
        let span =
            trace.filter(|_| !reads.is_empty()).map(|trace| trace.span(Lane::Io, "submit", reads.len()));
        engine.submit(&mut reads);
        drop(span);
        engine.reap(true, &mut done);
        let span =
            trace.filter(|_| !done.is_empty()).map(|trace| trace.span(Lane::Io, "arrived", done.len()));
        loaded.clear();
        let mut pieces = false;
        for Done { tag, targets, result } in done.drain(..) {
            let ok = result.is_ok();
            if let Err(error) = result {
                *common.failure.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
            }
            match Source::of(tag) {
                // Which neurons it was for is not known any more, nor may what they would go to be written to.
                _ if targets.is_empty() && !ok => sink.give_up(),
                Source::Neurons(parts) => {
                    let entries = |slots: Range<usize>| slots.start / group..slots.end.div_ceil(group);
                    let entries = targets.iter().flat_map(|target| entries(target.to.slots()));
                    loaded.extend(entries.map(|entry| (entry as u32, parts, ok)));
                    // The leases end before anybody is told.
                    drop(targets);
                }
                Source::Ring(piece) => {
                    drop(targets);
                    sink.ring.arrived(piece, ok);
                    pieces = true;
                }
            }
        }
        if !loaded.is_empty() {
            sink.cache.loaded(&loaded);
        }
        if pieces {
            sink.ring.tell();
        }
        drop(span);
    }
}
