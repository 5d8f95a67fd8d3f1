//! Linux's io_uring: one thread keeps a deep queue of direct reads full with few system calls.
//!
//! Small random reads of a fast disk cost the same time each, so only depth gives bandwidth; and a read costs a few
//! microseconds of a core, so calls are shared by as many reads as there are. Files and the buffer for unaligned reads
//! are registered, which spares the kernel looking them up and pinning them for each read.
//!
//! Short reads overtake long ones: a neuron that is needed now should not wait for a block that is needed later.
//!
//! The invariant behind the unsafe code: memory that the kernel may write to belongs to a lease, and that lease lies in
//! `reads` or `flight` of the engine until the kernel has reported the transfer. Where the kernel fails in a way that
//! leaves this open, the leases are leaked.

#![allow(unsafe_code)]

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Duration;

use io_uring::{IoUring, Probe, opcode, squeue, types};
use neuropil_device::{Arena, WriteLease};
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd};

use super::progress::Progress;
use super::read::Piece;
use super::serve::outcome;
use super::waker::Bell;
use super::{Done, Files, IoEngine, IoError, IoInfo, IoWaker, NVME_BLOCK, NVME_COST, Read, ReadAt};

/// Transfers under way at once, unless told otherwise.
pub(super) const DEPTH: usize = 256;

/// Bytes of one buffer for unaligned reads, and how many there are.
const BOUNCE: usize = 32 << 10;
const BOUNCES: usize = 64;

/// Most bytes of a transfer that goes straight to its target, a multiple of every alignment.
const CUT: usize = 1 << 20;

/// Transfers of more bytes than this are long.
const LONG: usize = 64 << 10;

/// Bytes of long transfers under way at once. Disks serve about in order, so more of them would make a short read that
/// comes later wait for longer, and would not be faster.
const MOST_LONG: usize = 4 << 20;

/// Marks the completion of the waker's poll among those of transfers.
const ALARM: u64 = u64::MAX;

/// Calls in a row that the kernel may refuse before the engine gives up.
const MOST_REFUSALS: u32 = 1000;

/// The engine.
pub struct Uring {
    info: IoInfo,
    files: Arc<Files>,
    ring: IoUring,
    alarm: Arc<Alarm>,
    /// Whether the kernel watches the alarm.
    armed: bool,
    /// Whether the alarm went off since the last wait.
    woken: bool,
    /// Free buffers for unaligned reads.
    bounces: Vec<WriteLease>,
    /// Whether those are registered.
    fixed: bool,
    /// Reads that have begun, by number; free numbers are `None` and listed in `free_reads`.
    reads: Vec<Option<Active>>,
    free_reads: Vec<usize>,
    /// Transfers that the kernel has, by number.
    flight: Vec<Option<Transfer>>,
    free_flight: Vec<usize>,
    /// Bytes of the long ones among them.
    flying: usize,
    /// Transfers for which there was no room.
    short: VecDeque<Transfer>,
    long: VecDeque<Transfer>,
    /// What is to be reaped.
    ready: Vec<Done>,
    /// Calls in a row that the kernel refused.
    refusals: u32,
    /// Why, once the engine has given up.
    broken: Option<String>,
}

struct Active {
    read: Read,
    /// Where the bytes go, if straight to the only target.
    straight: Option<Base>,
    /// Transfers that have not ended.
    left: usize,
    error: Option<IoError>,
}

struct Transfer {
    /// Number of the read.
    read: usize,
    piece: Piece,
    progress: Progress,
    /// The buffer where its bytes land, once it has begun, unless they go straight to the target.
    bounce: Option<WriteLease>,
}

impl Transfer {
    /// Its bytes, if it is a long one, else 0.
    fn long(&self) -> usize {
        if self.piece.span > LONG { self.piece.span } else { 0 }
    }
}

/// Start of the memory of a lease that lies beside it in [`Active`].
#[derive(Clone, Copy)]
struct Base(NonNull<u8>);

// SAFETY: a pointer into memory that the lease beside it owns, and leases may move to other threads.
unsafe impl Send for Base {}

/// An event counter that the ring watches.
struct Alarm(OwnedFd);

impl Bell for Alarm {
    fn ring(&self) {
        // The only error is a counter that is full, and then it is ringing already.
        let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }
}

impl Alarm {
    fn silence(&self) {
        // Nothing to read means that it is silent.
        let _ = rustix::io::read(&self.0, &mut [0; 8]);
    }

    /// Waits without a ring.
    fn wait(&self) {
        // An interruption is as good as a wake.
        let _ = rustix::event::poll(&mut [PollFd::new(&self.0, PollFlags::IN)], None);
        self.silence();
    }
}

impl Uring {
    /// Sets up a ring with `depth` transfers under way at once.
    ///
    /// # Errors
    /// [`IoError::Unavailable`] where the system has no io_uring or refuses it, as containers and phones do;
    /// [`IoError::OutOfMemory`].
    pub fn new(files: Arc<Files>, depth: usize) -> Result<Uring, IoError> {
        let refused = |error: io::Error| IoError::Unavailable { engine: "uring", reason: error.to_string() };
        let depth = depth.clamp(1, 4096);
        // Twice the room: transfers and the alarm never find the queue full.
        let ring = IoUring::new(2 * depth as u32).map_err(refused)?;
        let mut probe = Probe::new();
        ring.submitter().register_probe(&mut probe).map_err(refused)?;
        let needed = [opcode::Read::CODE, opcode::ReadFixed::CODE, opcode::PollAdd::CODE];
        if !needed.into_iter().all(|code| probe.is_supported(code)) {
            return Err(refused(io::Error::other("the kernel is too old for its reads")));
        }
        let descriptors: Vec<i32> = files.descriptors().map(|file| file.as_raw_fd()).collect();
        if !descriptors.is_empty() {
            ring.submitter().register_files(&descriptors).map_err(refused)?;
        }
        let counter = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        let counter = counter.map_err(|error| refused(error.into()))?;

        let memory = || IoError::OutOfMemory { bytes: BOUNCE * BOUNCES };
        let arena = Arena::new(BOUNCES, BOUNCE, 4096).map_err(|_| memory())?;
        let fixed = register(&ring, &arena);
        let bounces = (0..BOUNCES).map(|slot| arena.write(slot)).collect::<Result<_, _>>();
        let info = IoInfo {
            name: "uring".into(),
            alignment: files.alignment(),
            depth,
            direct: files.direct(),
            read_cost: NVME_COST,
            least_read: NVME_BLOCK,
        };
        Ok(Uring {
            info,
            files,
            ring,
            alarm: Arc::new(Alarm(counter)),
            armed: false,
            woken: false,
            bounces: bounces.map_err(|_| memory())?,
            fixed,
            reads: Vec::new(),
            free_reads: Vec::new(),
            flight: std::iter::repeat_with(|| None).take(depth).collect(),
            free_flight: (0..depth).rev().collect(),
            flying: 0,
            short: VecDeque::new(),
            long: VecDeque::new(),
            ready: Vec::new(),
            refusals: 0,
            broken: None,
        })
    }

    /// Takes a read: checks it and queues its transfers.
    fn begin(&mut self, mut read: Read) {
        let checked = read.check(self.files.files()).and_then(|()| self.check());
        if checked.is_err() || read.len == 0 {
            return self.ready.push(read.done(checked));
        }
        let alignment = self.info.alignment;
        let number = self.free_reads.pop().unwrap_or_else(|| {
            self.reads.push(None);
            self.reads.len() - 1
        });
        let straight = read.straight(alignment).then(|| Base(NonNull::from(read.straight_memory()).cast()));
        let mut left = 0;
        for piece in read.pieces(alignment, straight.map_or(BOUNCE, |_| CUT)) {
            let progress = Progress::new(&piece, alignment);
            let transfer = Transfer { read: number, piece, progress, bounce: None };
            self.queue(&transfer).push_back(transfer);
            left += 1;
        }
        self.reads[number] = Some(Active { read, straight, left, error: None });
    }

    /// Where a transfer waits.
    fn queue(&mut self, transfer: &Transfer) -> &mut VecDeque<Transfer> {
        if transfer.long() > 0 { &mut self.long } else { &mut self.short }
    }

    /// The next transfer that may begin, if the ring has room for it.
    fn next(&mut self) -> Option<Transfer> {
        self.short.pop_front().or_else(|| {
            let fits = |long: &mut Transfer| self.flying + long.piece.span <= MOST_LONG;
            self.long.pop_front_if(fits)
        })
    }

    fn check(&self) -> Result<(), IoError> {
        match &self.broken {
            None => Ok(()),
            Some(reason) => Err(IoError::Unavailable { engine: "uring", reason: reason.clone() }),
        }
    }

    /// Moves transfers that wait to the ring, as long as there is room.
    fn fill(&mut self) {
        while let Some(mut transfer) = self.next() {
            let Some(active) = &self.reads[transfer.read] else { continue };
            if active.error.is_some() {
                // What is left of a read that failed need not be read.
                self.end(transfer, Ok(()));
                continue;
            }
            let Piece { start, span, from, .. } = transfer.piece;
            let Some(slot) = self.free_flight.last().copied() else {
                return self.queue(&transfer).push_front(transfer);
            };
            if active.straight.is_none() && transfer.bounce.is_none() {
                transfer.bounce = self.bounces.pop();
            }
            let base = match (active.straight, &mut transfer.bounce) {
                // SAFETY: `from` is below the length of the read, and the target has as many bytes.
                (Some(Base(base)), _) => unsafe { base.add(from) },
                (None, Some(bounce)) => NonNull::from(bounce.bytes_mut()).cast(),
                (None, None) => return self.queue(&transfer).push_front(transfer),
            };
            let resume = transfer.progress.resume();
            // SAFETY: a transfer that goes on has got fewer bytes than its span.
            let (at, len) = (unsafe { base.add(resume) }.as_ptr(), (span - resume) as u32);
            let (file, offset) = (types::Fixed(active.read.file as u32), start + resume as u64);
            let entry = match transfer.bounce.is_some() && self.fixed {
                true => opcode::ReadFixed::new(file, at, len, 0).offset(offset).build(),
                false => opcode::Read::new(file, at, len).offset(offset).build(),
            };
            self.free_flight.pop();
            self.flying += transfer.long();
            self.flight[slot] = Some(transfer);
            // SAFETY: the memory is `len` bytes of a lease for writing that lies in `reads` or `flight` until the
            // completion of this entry is seen, and `Drop` waits for it: a piece lies within its read, which `begin`
            // found to fit its target, and is no longer than a buffer. The file is one of those registered.
            unsafe { self.push(&entry.user_data(slot as u64)) };
        }
    }

    /// Has the kernel watch the alarm.
    fn arm(&mut self) {
        if !self.armed {
            let events = u32::from(PollFlags::IN.bits());
            let poll = opcode::PollAdd::new(types::Fd(self.alarm.0.as_raw_fd()), events).build();
            // SAFETY: the entry refers to no memory, and the kernel keeps the descriptor's file itself.
            unsafe { self.push(&poll.user_data(ALARM)) };
            self.armed = true;
        }
    }

    /// Queues an entry for the kernel.
    ///
    /// # Safety
    /// What the entry refers to stays valid until its completion is seen.
    unsafe fn push(&mut self, entry: &squeue::Entry) {
        // SAFETY: passed on to the caller.
        let pushed = unsafe { self.ring.submission().push(entry) };
        assert!(pushed.is_ok(), "a ring of twice the depth holds all transfers and the alarm");
    }

    /// Tells the kernel what is new and waits for `want` completions.
    fn tell(&mut self, want: usize) {
        if want == 0 && self.ring.submission().is_empty() {
            return;
        }
        match self.ring.submit_and_wait(want) {
            Ok(_) => self.refusals = 0,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if self.refusals >= MOST_REFUSALS => self.give_up(&error),
            // Out of memory, or of room for completions, which are taken from the ring before the next attempt.
            Err(_) => {
                self.refusals += 1;
                std::thread::sleep(Duration::from_millis(1));
            }
        }
    }

    /// The next completion's number and code.
    fn completion(&mut self) -> Option<(u64, i32)> {
        self.ring.completion().next().map(|entry| (entry.user_data(), entry.result()))
    }

    /// Takes completions from the ring.
    fn harvest(&mut self) {
        while let Some((tag, code)) = self.completion() {
            if tag == ALARM {
                (self.armed, self.woken) = (false, true);
                self.alarm.silence();
                continue;
            }
            let slot = tag as usize;
            let Some(mut transfer) = self.flight.get_mut(slot).and_then(Option::take) else { continue };
            self.free_flight.push(slot);
            self.flying -= transfer.long();
            let Some(active) = &self.reads[transfer.read] else { continue };
            let (files, file) = (&*self.files, active.read.file);
            let got = usize::try_from(code).map_err(|_| io::Error::from_raw_os_error(-code));
            let next = transfer.progress.after(got, || files.size(file));
            match outcome(next, files, file, &transfer.piece) {
                None => self.queue(&transfer).push_front(transfer),
                Some(result) => self.end(transfer, result),
            }
        }
    }

    /// Ends a transfer, and its read if that has no other.
    fn end(&mut self, transfer: Transfer, result: Result<(), IoError>) {
        let place = &mut self.reads[transfer.read];
        let Some(active) = place else { return };
        let Piece { skip, from, len, .. } = transfer.piece;
        if let Err(error) = result {
            active.error.get_or_insert(error);
        }
        if let Some(bounce) = transfer.bounce {
            if active.error.is_none() {
                active.read.deliver(from, &bounce.bytes()[skip..skip + len]);
            }
            self.bounces.push(bounce);
        }
        active.left -= 1;
        if active.left == 0
            && let Some(Active { read, error, .. }) = place.take()
        {
            self.free_reads.push(transfer.read);
            self.ready.push(read.done(error.map_or(Ok(()), Err)));
        }
    }

    /// Ends all reads: the kernel answers no more. Whether it still writes is unknown, so what it may write to is
    /// leaked.
    fn give_up(&mut self, error: &io::Error) {
        self.broken = Some(error.to_string());
        self.short.clear();
        self.long.clear();
        for transfer in self.flight.iter_mut().filter_map(Option::take) {
            std::mem::forget(transfer);
        }
        for Active { mut read, .. } in std::mem::take(&mut self.reads).into_iter().flatten() {
            std::mem::forget(std::mem::take(&mut read.targets));
            self.ready.push(read.done(self.check()));
        }
        self.free_reads.clear();
    }
}

/// Registers the buffers. That is refused where the limit on locked memory is small; reads work without.
fn register(ring: &IoUring, arena: &Arena) -> bool {
    let Ok(mut all) = arena.write_run(0..arena.slots()) else { return false };
    let buffers = [io::IoSliceMut::new(all.bytes_mut())];
    // SAFETY: the standard library promises that an `IoSliceMut` is laid out as an `iovec`.
    let buffers = unsafe { std::slice::from_raw_parts(buffers.as_ptr().cast(), buffers.len()) };
    // SAFETY: registering pins the pages and writes nothing. A pin is the kernel's own, so it outlives the memory.
    unsafe { ring.submitter().register_buffers(buffers) }.is_ok()
}

impl IoEngine for Uring {
    fn info(&self) -> &IoInfo {
        &self.info
    }

    fn submit(&mut self, reads: &mut Vec<Read>) {
        for read in reads.drain(..) {
            self.begin(read);
        }
        self.fill();
        self.tell(0);
    }

    fn reap(&mut self, wait: bool, done: &mut Vec<Done>) {
        loop {
            self.harvest();
            self.fill();
            let stay = wait && self.ready.is_empty() && !self.woken;
            if !stay {
                self.tell(0);
                break;
            }
            if self.broken.is_some() {
                self.alarm.wait();
                break;
            }
            self.arm();
            self.tell(1);
        }
        if wait {
            self.woken = false;
        }
        done.append(&mut self.ready);
    }

    fn waker(&self) -> IoWaker {
        IoWaker::new(self.alarm.clone())
    }
}

impl Drop for Uring {
    fn drop(&mut self) {
        self.short.clear();
        self.long.clear();
        while self.broken.is_none() && self.flight.iter().any(Option::is_some) {
            self.tell(1);
            self.harvest();
            self.short.clear();
            self.long.clear();
        }
    }
}
