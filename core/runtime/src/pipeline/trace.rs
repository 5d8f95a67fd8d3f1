//! What happened when, for people to look at: `--trace` writes it in the format of Chrome's and Perfetto's viewers.
//!
//! Lanes are the conductor, the reading thread, each unit, and each thread of the CPU's pool. Events are of whole jobs
//! and batches of reads, some hundreds per token and lane, never of single neurons. Without a trace a span costs one
//! comparison.

use std::fmt::Write;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use neuropil_device::Timeline;

/// Most events that are kept: an hour of them would not be looked at.
const MOST: usize = 1 << 20;

/// A row of the picture.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lane {
    /// The thread that conducts the steps, and computes with the others.
    Conductor,
    /// The thread that reads.
    Io,
    /// Jobs of a device from submission to completion, by its place in the list of devices.
    Device(u16),
    /// A thread that computes, by its number in the pool; 0 is the one that submits.
    Compute(u16),
}

#[derive(Clone, Copy, Debug)]
struct Event {
    lane: Lane,
    name: &'static str,
    /// Nanoseconds since the trace began.
    start: u64,
    end: u64,
    count: usize,
}

/// A record of what happened; clones of its `Arc` write to the same one.
#[derive(Debug)]
pub struct Trace {
    begin: Instant,
    events: Mutex<Vec<Event>>,
}

impl Default for Trace {
    fn default() -> Trace {
        Trace { begin: Instant::now(), events: Mutex::default() }
    }
}

/// Records an event from its creation until it is dropped.
pub(crate) struct Span<'a> {
    trace: &'a Trace,
    lane: Lane,
    name: &'static str,
    start: u64,
    count: usize,
}

impl Trace {
    /// An event that begins now; `count` is how many neurons, reads or tokens it is about.
    pub(crate) fn span(&self, lane: Lane, name: &'static str, count: usize) -> Span<'_> {
        Span { trace: self, lane, name, start: self.now(), count }
    }

    fn push(&self, event: Event) {
        let mut events = self.events.lock().unwrap_or_else(PoisonError::into_inner);
        if events.len() < MOST {
            events.push(event);
        }
    }

    fn now(&self) -> u64 {
        self.begin.elapsed().as_nanos() as u64
    }

    /// The trace as JSON.
    pub fn json(&self) -> String {
        let events = self.events.lock().unwrap_or_else(PoisonError::into_inner);
        let mut text = String::from("{\"displayTimeUnit\":\"ms\",\"traceEvents\":[\n");
        let mut lanes: Vec<Lane> = Vec::new();
        for event in events.iter() {
            if !lanes.contains(&event.lane) {
                lanes.push(event.lane);
            }
        }
        for lane in lanes {
            // Writing to a string cannot fail.
            let _ = writeln!(
                text,
                "{{\"ph\":\"M\",\"pid\":1,\"tid\":{},\"name\":\"thread_name\",\"args\":{{\"name\":\"{}\"}}}},",
                lane.id(),
                lane.name()
            );
        }
        for event in events.iter() {
            let micros = |nanos: u64| nanos as f64 / 1e3;
            let _ = writeln!(
                text,
                "{{\"ph\":\"X\",\"pid\":1,\"tid\":{},\"name\":\"{}\",\"ts\":{:.3},\"dur\":{:.3},\"args\":{{\"count\":{}}}}},",
                event.lane.id(),
                event.name,
                micros(event.start),
                micros(event.end.saturating_sub(event.start)),
                event.count
            );
        }
        text.push_str(
            "{\"ph\":\"M\",\"pid\":1,\"name\":\"process_name\",\"args\":{\"name\":\"neuropil\"}}\n]}\n",
        );
        text
    }
}

/// For the backend whose threads are the [`Lane::Compute`]s.
impl Timeline for Trace {
    fn span(&self, thread: usize, name: &'static str, start: Instant, end: Instant) {
        let nanos = |time: Instant| time.saturating_duration_since(self.begin).as_nanos() as u64;
        let lane = Lane::Compute(u16::try_from(thread).unwrap_or(u16::MAX));
        self.push(Event { lane, name, start: nanos(start), end: nanos(end), count: 1 });
    }
}

impl Lane {
    fn id(self) -> u32 {
        match self {
            Lane::Conductor => 1,
            Lane::Io => 2,
            Lane::Device(index) => 3 + u32::from(index),
            Lane::Compute(thread) => 0x2_0000 + u32::from(thread),
        }
    }

    fn name(self) -> String {
        match self {
            Lane::Conductor => "conductor".into(),
            Lane::Io => "I/O".into(),
            Lane::Device(index) => format!("device {index}"),
            Lane::Compute(thread) => format!("compute {thread}"),
        }
    }
}

impl Drop for Span<'_> {
    fn drop(&mut self) {
        let end = self.trace.now();
        let Span { lane, name, start, count, .. } = *self;
        self.trace.push(Event { lane, name, start, end, count });
    }
}

/// A span of a trace, if there is one.
pub(crate) fn span<'a>(
    trace: &'a Option<Arc<Trace>>,
    lane: Lane,
    name: &'static str,
    count: usize,
) -> Option<Span<'a>> {
    trace.as_ref().map(|trace| trace.span(lane, name, count))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_trace_is_json_with_a_name_for_each_lane() {
        let record = Arc::new(Trace::default());
        let trace = Some(record.clone());
        drop(span(&trace, Lane::Io, "submit", 3));
        drop(span(&trace, Lane::Device(0), "ffn", 1));
        assert!(span(&None, Lane::Io, "nothing", 0).is_none());
        let json: serde_json::Value = serde_json::from_str(&record.json()).unwrap();
        let events = json["traceEvents"].as_array().unwrap();
        let named = |name: &str| events.iter().filter(|event| event["name"] == name).count();
        assert_eq!((named("thread_name"), named("submit"), named("ffn")), (2, 1, 1));
    }

    #[test]
    fn each_thread_has_a_lane_and_its_times() {
        let before = Instant::now();
        let record = Trace::default();
        let start = Instant::now();
        let end = start + std::time::Duration::from_micros(1500);
        let timeline: &dyn Timeline = &record;
        timeline.span(0, "start", before, start);
        timeline.span(1, "matmul", start, end);
        timeline.span(1, "down", end, end);
        timeline.span(usize::MAX, "far", end, end);
        let json: serde_json::Value = serde_json::from_str(&record.json()).unwrap();
        let events = json["traceEvents"].as_array().unwrap();
        let event = |name: &str| events.iter().find(|event| event["name"] == name).unwrap();
        let lane = |name: &str| {
            let mut lanes = events.iter().filter(|event| event["ph"] == "M");
            let lane = lanes.find(|lane| lane["tid"] == event(name)["tid"]).unwrap();
            lane["args"]["name"].as_str().unwrap().to_owned()
        };
        assert_eq!(lane("start"), "compute 0");
        assert_eq!((lane("matmul"), lane("down")), ("compute 1".into(), "compute 1".into()));
        assert_eq!(lane("far"), "compute 65535");
        // What began before the record begins with it.
        assert_eq!(event("start")["ts"].as_f64(), Some(0.0));
        assert_eq!(event("matmul")["dur"].as_f64(), Some(1500.0));
    }
}
