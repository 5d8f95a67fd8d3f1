//! What the cache of neurons and the reads did, as reports show it.

use std::time::Duration;

use neuropil::cache::Segment;
use neuropil::pipeline::StorageReport;
use serde_json::{Map, Value, json};

use crate::memory;

/// The objects `cache` and `io` of a document; `tokens` went through the model in a time of `total`.
pub fn insert(document: &mut Map<String, Value>, report: &StorageReport, tokens: usize, total: Duration) {
    let counters = &report.counters;
    document
        .insert("cache".into(), json!({ "hot": segment(&counters.hot), "cold": segment(&counters.cold) }));
    document.insert(
        "io".into(),
        json!({
            "engine": report.engine,
            "reads": report.reads,
            "bytes": report.bytes,
            "bytes_per_token": report.bytes / tokens.max(1) as u64,
            "critical_path_share": share(report, total),
        }),
    );
}

/// The part of some time in which nothing could be computed because reads had not arrived.
fn share(report: &StorageReport, total: Duration) -> f64 {
    if total.is_zero() { 0.0 } else { report.waited.as_secs_f64() / total.as_secs_f64() }
}

fn segment(segment: &Segment) -> Value {
    let found = &segment.taken;
    json!({
        "hits": found.hits,
        "joined": found.joined,
        "misses": found.misses,
        "evictions": segment.evictions,
        "hit_rate": hit_rate(segment),
    })
}

fn hit_rate(segment: &Segment) -> f64 {
    let asked = segment.taken.asked();
    if asked == 0 { 1.0 } else { segment.taken.hits as f64 / asked as f64 }
}

/// Lines for people: name and value.
pub fn lines(report: &StorageReport, tokens: usize, total: Duration) -> [(&'static str, String); 2] {
    let both = Segment {
        taken: neuropil::cache::Found {
            hits: report.counters.hot.taken.hits + report.counters.cold.taken.hits,
            joined: report.counters.hot.taken.joined + report.counters.cold.taken.joined,
            misses: report.counters.hot.taken.misses + report.counters.cold.taken.misses,
        },
        ..Segment::default()
    };
    let cache = if both.taken.misses + both.taken.joined == 0 && report.bytes > 0 {
        "what is not in memory passes by in order, for all neurons are needed".into()
    } else {
        format!("{:.1} % of the neurons that were needed were in memory", 100.0 * hit_rate(&both))
    };
    let per_token = memory::shown(report.bytes / tokens.max(1) as u64);
    let storage = format!(
        "{per_token} read per token by {}, {:.1} % of the time spent waiting for it",
        report.engine,
        100.0 * share(report, total)
    );
    [("cache", cache), ("storage", storage)]
}
