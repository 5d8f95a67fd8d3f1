//! How an attention is cut for threads: by tokens and KV heads, and by spans where those are few.

use std::ops::Range;

use neuropil_device::Attention;

use super::attention::QUERIES;

/// How an attention is cut into parts.
#[derive(Clone)]
pub(crate) struct AttentionPlan {
    /// Tokens in a part.
    pub(super) tokens: usize,
    /// The spans that some row sees.
    pub(super) spans: Range<usize>,
    /// Whether each part has one span only.
    pub(super) split: bool,
    pub(super) parts: usize,
    pub(super) scratch: usize,
}

impl AttentionPlan {
    /// Cuts a checked job into about `parts` parts or more, small enough for a core's cache.
    pub(crate) fn new(job: &Attention<'_>, parts: usize) -> AttentionPlan {
        let Attention { rows, heads, kv_heads, head_dim, .. } = *job;
        let spans = rows.iter().map(|row| job.spans(row)).fold(0..0, join_spans);
        let split = rows.len() * kv_heads < parts && spans.len() > 1;
        let most = QUERIES.div_ceil(heads / kv_heads).max(1);
        let tokens = (rows.len() * kv_heads).div_ceil(parts.max(1)).clamp(1, most);
        let each = if split { spans.len() } else { 1 };
        // Sums of the spans beside `out`: those of every span and their softmax, or room for one at a time.
        let lines = rows.len().saturating_mul(heads);
        let scratch = match (split, spans.len()) {
            (true, spans) => lines.saturating_mul(spans).saturating_mul(head_dim + 2),
            (false, 0 | 1) => 0,
            (false, _) => lines * head_dim,
        };
        AttentionPlan { tokens, split, parts: rows.len().div_ceil(tokens) * kv_heads * each, spans, scratch }
    }

    /// Number of parts.
    pub(crate) fn parts(&self) -> usize {
        self.parts
    }

    /// Values of memory that it takes.
    pub(crate) fn scratch(&self) -> usize {
        self.scratch
    }
}

/// The range over both; one that is empty does not count.
pub(super) fn join_spans(a: Range<usize>, b: Range<usize>) -> Range<usize> {
    match (a.is_empty(), b.is_empty()) {
        (true, _) => b,
        (_, true) => a,
        _ => a.start.min(b.start)..a.end.max(b.end),
    }
}
