//! Attention over a paged cache, by the order of [`neuropil_device::ScalarOps`].
//!
//! Keys lie with one position per lane and values with one channel per lane, so both products of a page are the same
//! loop: a few rows of coefficients times a matrix that is read line by line, with the sums in registers. Up to
//! [`BLOCK`] query rows share each line. They are the heads of a group, which read the same keys, and neighbouring
//! tokens of a tile. Each sum still takes its terms one by one in the law's order, so nothing here changes a bit.
//!
//! Few tokens over a long context are cut by spans too: a part then leaves the sums of its span in memory that the
//! caller lends, and whoever ends the last part joins them.

use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicUsize, Ordering};

use half::f16;
use neuropil_device::{Attention, AttentionRow, Joined, KV_PAGE, KV_SPAN, KvPage, Softmax};

use super::lanes::Lanes;
use super::plan::{AttentionPlan, join_spans};
use super::product::{BLOCK, Element, ProductRows, product, product_of};
use super::softmax::{Scores, Turn};
use super::widen::{Narrow, PIECE, Wide};

/// Query rows that share a page while it is in the core's cache; a multiple of every vector's lanes.
pub(super) const QUERIES: usize = 8 * BLOCK;

/// An attention handed out in parts, each once, to any thread: one KV head and a few tokens each, and one span where
/// the plan says so.
pub(crate) struct AttentionParts<'a> {
    job: &'a Attention<'a>,
    plan: AttentionPlan,
    out: NonNull<f32>,
    scratch: NonNull<f32>,
    next: AtomicUsize,
    done: AtomicUsize,
    lifetime: PhantomData<&'a mut [f32]>,
}

// SAFETY: the cursor gives each part to one thread, and parts write disjoint places of `out` and `scratch`; the thread
// that joins begins when all others are done. The rest is shared references to Sync data.
unsafe impl Sync for AttentionParts<'_> {}

impl<'a> AttentionParts<'a> {
    /// Begins to hand out a job as its plan says.
    ///
    /// # Panics
    /// As [`Attention::check`], and when the plan is not the job's or takes more memory.
    pub(crate) fn new(
        job: &'a Attention<'a>,
        plan: AttentionPlan,
        out: &'a mut [f32],
        scratch: &'a mut [f32],
    ) -> AttentionParts<'a> {
        // The unsafe code below stands on these.
        job.check(out.len());
        assert!(plan.scratch <= scratch.len(), "the memory that the plan asks for");
        assert!(job.rows.iter().all(|row| {
            let spans = job.spans(row);
            spans.is_empty() || plan.spans.start <= spans.start && spans.end <= plan.spans.end
        }));
        let (out, scratch) = (NonNull::from(out).cast(), NonNull::from(scratch).cast());
        let (next, done) = (AtomicUsize::new(0), AtomicUsize::new(0));
        AttentionParts { job, plan, out, scratch, next, done, lifetime: PhantomData }
    }

    /// Computes the next part, if one is left. `N` is how many vectors of sums a row of a block takes.
    ///
    /// # Safety
    /// The features of V are enabled.
    #[inline(always)]
    pub(super) unsafe fn compute_next<V: Lanes, const N: usize>(&self) {
        let part = self.next.fetch_add(1, Ordering::Relaxed);
        if part >= self.plan.parts {
            return;
        }
        let Attention { rows, heads, kv_heads, .. } = *self.job;
        let each = if self.plan.split { self.plan.spans.len() } else { 1 };
        let (kv_head, first) = (part / each % kv_heads, part / each / kv_heads * self.plan.tokens);
        let span = self.plan.split.then_some(self.plan.spans.start + part % each);
        let tokens = first..rows.len().min(first + self.plan.tokens);
        let group = heads / kv_heads;
        let mut first = tokens.start;
        while first < tokens.end {
            // Tokens of the same sequence share pages.
            let same = rows[first..tokens.end].iter().take_while(|row| row.sequence == rows[first].sequence);
            let queries = same.count() * group;
            for start in (0..queries).step_by(QUERIES) {
                let count = QUERIES.min(queries - start);
                let tile = Tile::new(self, first, kv_head, start..start + count);
                // SAFETY: the features of V are enabled; the rows are this thread's alone, in this span if it is cut.
                unsafe { tile.compute::<V, N>(span) }
            }
            first += queries / group;
        }
        // Acquire and release: who comes last sees what all others wrote.
        if self.plan.split && self.done.fetch_add(1, Ordering::AcqRel) + 1 == self.plan.parts {
            // SAFETY: all parts are done, so nobody else reads or writes.
            unsafe { self.join() }
        }
    }

    /// Head rows of the job.
    fn lines(&self) -> usize {
        self.job.rows.len() * self.job.heads
    }

    /// The sums of a head row in a span, in `scratch`; where a part has all spans, in the place of the first.
    ///
    /// # Safety
    /// The plan has scratch for that.
    unsafe fn span_sums(&self, slot: usize, line: usize) -> *mut f32 {
        // SAFETY: there are as many lines of head_dim for each slot.
        unsafe { self.scratch.as_ptr().add((slot * self.lines() + line) * self.job.head_dim) }
    }

    /// The softmax of a head row in a span.
    ///
    /// # Safety
    /// The plan is split.
    unsafe fn span_softmax(&self, slot: usize, line: usize) -> *mut [f32; 2] {
        let sums = self.plan.spans.len() * self.lines() * self.job.head_dim;
        // SAFETY: the scratch of a split plan ends with two values for each line and slot.
        unsafe { self.scratch.as_ptr().add(sums + 2 * (slot * self.lines() + line)).cast() }
    }

    /// Joins the spans of each row.
    ///
    /// # Safety
    /// The plan is split, all its parts are computed, and no other thread joins.
    #[inline(always)]
    unsafe fn join(&self) {
        let Attention { rows, heads, head_dim, .. } = *self.job;
        for line in 0..self.lines() {
            // SAFETY: a line of `out` has head_dim values, and nobody else uses them.
            let out =
                unsafe { std::slice::from_raw_parts_mut(self.out.as_ptr().add(line * head_dim), head_dim) };
            out.fill(0.0);
            let mut all = Softmax::NOTHING;
            for span in self.job.spans(&rows[line / heads]) {
                let slot = span - self.plan.spans.start;
                // SAFETY: some part wrote it.
                let ([max, total], sums) =
                    unsafe { (self.span_softmax(slot, line).read(), self.span_sums(slot, line)) };
                // SAFETY: as above; the sums are head_dim values.
                join_sums(all.join(Softmax { max, total }), out, unsafe {
                    std::slice::from_raw_parts(sums, head_dim)
                });
            }
            divide(out, all.total);
        }
    }
}

#[inline(always)]
fn join_sums(joined: Joined, out: &mut [f32], sums: &[f32]) {
    match joined {
        Joined::Kept => {}
        Joined::Taken => out.copy_from_slice(sums),
        Joined::Sum { own, other } => {
            out.iter_mut().zip(sums).for_each(|(out, sum)| *out = sum.mul_add(other, *out * own));
        }
    }
}

#[inline(always)]
fn divide(out: &mut [f32], total: f32) {
    if total > 0.0 {
        out.iter_mut().for_each(|o| *o /= total);
    }
}

/// Query rows of one KV head and sequence, which walk its pages together.
struct Tile<'a> {
    all: &'a AttentionParts<'a>,
    sequence: usize,
    kv_head: usize,
    count: usize,
    /// Which head row of the job each is.
    line: [usize; QUERIES],
    /// Its query.
    q: [*const f32; QUERIES],
    /// What each sees.
    visible: [Range<usize>; QUERIES],
    /// The spans that some see.
    spans: Range<usize>,
}

impl<'a> Tile<'a> {
    /// The queries numbered from row `first` on: number `i` is head `i % group` of row `first + i / group`.
    #[inline(always)]
    fn new(all: &'a AttentionParts<'a>, first: usize, kv_head: usize, queries: Range<usize>) -> Tile<'a> {
        let job = all.job;
        let group = job.heads / job.kv_heads;
        let mut tile = Tile {
            all,
            sequence: job.rows[first].sequence,
            kv_head,
            count: queries.len(),
            line: [0; QUERIES],
            q: [std::ptr::null(); QUERIES],
            visible: [const { 0..0 }; QUERIES],
            spans: 0..0,
        };
        let (mut row, mut head) = (first + queries.start / group, queries.start % group);
        for i in 0..tile.count {
            let of: &AttentionRow = &job.rows[row];
            let spans = job.spans(of);
            tile.line[i] = row * job.heads + kv_head * group + head;
            tile.q[i] = job.q[tile.line[i] * job.head_dim..][..job.head_dim].as_ptr();
            tile.visible[i] = job.visible(of);
            tile.spans = join_spans(tile.spans, spans);
            head += 1;
            if head == group {
                (row, head) = (row + 1, 0);
            }
        }
        if tile.spans.is_empty() {
            // Rows that see nothing are zeros, which the walk over any span makes them.
            tile.spans = 0..1;
        }
        tile
    }

    /// # Safety
    /// The line is one of this tile's.
    unsafe fn out(&self, line: usize) -> *mut f32 {
        // SAFETY: out is as long as q, which was checked.
        unsafe { self.all.out.as_ptr().add(line * self.all.job.head_dim) }
    }

    /// Computes the rows of the tile, or one span of them, whose sums then wait to be joined.
    ///
    /// # Safety
    /// The features of V are enabled, and this thread alone has the rows, or has them in this span. A plan that is
    /// split gives one.
    #[inline(always)]
    unsafe fn compute<V: Lanes, const N: usize>(&self, only: Option<usize>) {
        let dim = self.all.job.head_dim;
        let lines = &self.line[..self.count];
        let mut all = [Softmax::NOTHING; QUERIES];
        let mut sums = [std::ptr::null_mut(); QUERIES];
        let spans = only.map_or(self.spans.clone(), |span| span..span + 1);
        for span in spans.clone() {
            // The first of all spans goes where the result belongs. Of a tile with several the plan has room for one.
            let slot = match only {
                Some(_) => Some(span - self.all.plan.spans.start),
                None => (span > spans.start).then_some(0),
            };
            let mut later = [Softmax::NOTHING; QUERIES];
            // SAFETY: the lines are this tile's, and the plan has their slots.
            unsafe {
                for (sums, line) in sums.iter_mut().zip(lines) {
                    *sums = match slot {
                        Some(slot) => self.all.span_sums(slot, *line),
                        None => self.out(*line),
                    };
                }
                self.span::<V, N>(span, &sums, &mut later);
                for (i, line) in lines.iter().enumerate() {
                    match (slot, only) {
                        (None, _) => all[i] = later[i],
                        (Some(slot), Some(_)) => {
                            self.all.span_softmax(slot, *line).write([later[i].max, later[i].total]);
                        }
                        (Some(_), None) => {
                            let out = std::slice::from_raw_parts_mut(self.out(*line), dim);
                            join_sums(all[i].join(later[i]), out, std::slice::from_raw_parts(sums[i], dim));
                        }
                    }
                }
            }
        }
        if only.is_none() {
            for (all, line) in all.iter().zip(lines) {
                // SAFETY: a line of out is head_dim values, this thread's alone.
                divide(unsafe { std::slice::from_raw_parts_mut(self.out(*line), dim) }, all.total);
            }
        }
    }

    /// Computes what the rows see of one span: their sums, from zero, and their softmax, from nothing.
    ///
    /// # Safety
    /// The features of V are enabled; `sums` are head_dim values for each row, this thread's alone.
    #[inline(always)]
    unsafe fn span<V: Lanes, const N: usize>(
        &self,
        span: usize,
        sums: &[*mut f32; QUERIES],
        running: &mut [Softmax; QUERIES],
    ) {
        let job = self.all.job;
        let (mut first_page, mut pages_end) = (usize::MAX, 0);
        for (sums, visible) in sums.iter().zip(&self.visible[..self.count]) {
            // SAFETY: sums of a row are head_dim values.
            unsafe { sums.write_bytes(0, job.head_dim) };
            let (first, end) = (visible.start.max(span * KV_SPAN), visible.end.min((span + 1) * KV_SPAN));
            if first < end {
                (first_page, pages_end) =
                    (first_page.min(first / KV_PAGE), pages_end.max(end.div_ceil(KV_PAGE)));
            }
        }
        let mut scores = [const { MaybeUninit::uninit() }; QUERIES];
        scores[..self.count].iter_mut().for_each(|scores| {
            scores.write([0.0; KV_PAGE]);
        });
        // SAFETY: so many were just written.
        let scores = unsafe { std::slice::from_raw_parts_mut(scores.as_mut_ptr().cast(), self.count) };
        let mut room = Room { wide: Wide::new(), scores, turn: Turn::new() };
        for index in first_page..pages_end {
            // SAFETY: as for this function.
            unsafe { self.page::<V, N>(index, sums, running, &mut room) };
        }
    }

    /// # Safety
    /// As for `span`.
    #[inline(always)]
    unsafe fn page<V: Lanes, const N: usize>(
        &self,
        index: usize,
        sums: &[*mut f32; QUERIES],
        running: &mut [Softmax; QUERIES],
        Room { wide, scores, turn }: &mut Room<'_>,
    ) {
        let Attention { kv_heads, head_dim: dim, scale, .. } = *self.all.job;
        let (first, end) = (index * KV_PAGE, (index + 1) * KV_PAGE);
        let mut seen = [const { 0..0 }; QUERIES];
        for (seen, visible) in seen.iter_mut().zip(&self.visible[..self.count]) {
            *seen = visible.start.clamp(first, end) - first..visible.end.clamp(first, end) - first;
        }
        let seen = &mut seen[..self.count];

        // The page's part for this KV head. A page that several blocks share is worth widening, and so are codes.
        let at = self.kv_head * dim * KV_PAGE;
        let size = kv_heads * dim * KV_PAGE;
        let many = self.count > 2 * BLOCK;
        let (single, halves, narrow) = match self.all.job.kv.page(self.sequence, index) {
            KvPage::F32 { k, v } => (Some([k, v].map(|x| x[..size][at..].as_ptr())), None, None),
            KvPage::F16 { k, v } if many => (None, None, Some(Narrow::Halves { k, v })),
            KvPage::F16 { k, v } => (None, Some([k, v].map(|x| x[..size][at..].as_ptr())), None),
            KvPage::Q8_0 { k, k_scales, v, v_scales } => {
                (None, None, Some(Narrow::Codes { k, k_scales, v, v_scales }))
            }
        };
        let piece = if narrow.is_some() { PIECE } else { dim };
        let pieces = (0..dim).step_by(piece).map(|start| start..dim.min(start + piece));
        // SAFETY: as for this function. Pointers into a page are good for the keys or values of a KV head, and those
        // into `wide` for a piece of them.
        unsafe {
            if let Some([k, _]) = halves {
                self.scores::<V, f16, N>(0..dim, k, seen, scores);
            } else {
                for piece in pieces.clone() {
                    let k = match (&narrow, single) {
                        (Some(narrow), _) => narrow.keys::<V>(dim, self.kv_head, piece.clone(), wide),
                        (None, Some([k, _])) => k,
                        (None, None) => return,
                    };
                    self.scores::<V, f32, N>(piece, k, seen, scores);
                }
            }
            turn.weigh::<V>(scores, seen, &mut running[..self.count], scale);
            for ((sums, shrink), seen) in sums.iter().zip(&turn.shrink).zip(&*seen) {
                if *shrink != 1.0 && !seen.is_empty() {
                    let sums = std::slice::from_raw_parts_mut(*sums, dim);
                    sums.iter_mut().for_each(|sum| *sum *= shrink);
                }
            }
            if let Some([_, v]) = halves {
                self.values::<V, f16, N>(0..dim, v, seen, scores, sums);
            } else {
                for piece in pieces {
                    let v = match (&narrow, single) {
                        (Some(narrow), _) => narrow.values::<V>(dim, self.kv_head, piece.clone(), wide),
                        (None, Some([_, v])) => v,
                        (None, None) => return,
                    };
                    self.values::<V, f32, N>(piece, v, seen, scores, sums);
                }
            }
        }
    }

    /// Adds the terms of some channels to the scores, which the first channel begins; `k` are the lines of those.
    ///
    /// # Safety
    /// As for `span`, the channels are below head_dim, and `k` is good for the lines.
    #[inline(always)]
    unsafe fn scores<V: Lanes, E: Element, const N: usize>(
        &self,
        channels: Range<usize>,
        k: *const E,
        seen: &[Range<usize>],
        scores: &mut [Scores],
    ) {
        let blocks = scores.chunks_mut(BLOCK).zip(seen.chunks(BLOCK)).zip(self.q.chunks(BLOCK));
        for ((scores, seen), q) in blocks {
            // Places past the last one that some row sees are not computed, and hidden below.
            let end = seen.iter().map(|seen| if seen.is_empty() { 0 } else { seen.end }).max().unwrap_or(0);
            let width = end.next_multiple_of(V::LANES);
            let mut rows = ProductRows::none(channels.start == 0);
            scores.iter_mut().zip(q).for_each(|(scores, q)| rows.push(*q, scores.as_mut_ptr()));
            // SAFETY: lines of keys, and rows of scores, have KV_PAGE places, a multiple of LANES; q has head_dim.
            unsafe { product::<V, E, N>(&rows, channels.clone(), k, KV_PAGE, width) };
        }
    }

    /// Adds what the rows see of some channels of the page's values, times the weights, to their sums; `v` is lines
    /// of those channels.
    ///
    /// # Safety
    /// As for `span`, and `v` is good for KV_PAGE lines.
    #[inline(always)]
    unsafe fn values<V: Lanes, E: Element, const N: usize>(
        &self,
        channels: Range<usize>,
        v: *const E,
        seen: &[Range<usize>],
        weights: &[Scores],
        sums: &[*mut f32; QUERIES],
    ) {
        let width = channels.len();
        for ((seen, weights), sums) in seen.chunks(BLOCK).zip(weights.chunks(BLOCK)).zip(sums.chunks(BLOCK)) {
            // The places that all rows see are done together; rows that see nothing drop out.
            let mut rows = ProductRows::none(false);
            let mut places = [const { 0..0 }; BLOCK];
            let mut common = 0..KV_PAGE;
            for ((seen, weights), sums) in seen.iter().zip(weights).zip(sums) {
                if !seen.is_empty() {
                    places[rows.count] = seen.clone();
                    common = common.start.max(seen.start)..common.end.min(seen.end);
                    rows.push(weights.as_ptr(), sums.wrapping_add(channels.start));
                }
            }
            if common.is_empty() {
                common = KV_PAGE..KV_PAGE;
            }
            // Each row takes its places in order: its own before the common ones, those, and its own after.
            for phase in 0..3 {
                if phase == 1 {
                    let v = v.wrapping_add(common.start * width);
                    // SAFETY: the values are KV_PAGE lines of these channels, the places below KV_PAGE; sums of a row
                    // are head_dim values.
                    unsafe { product::<V, E, N>(&rows, common.clone(), v, width, width) };
                    continue;
                }
                for (i, seen) in places[..rows.count].iter().enumerate() {
                    let (before, after) =
                        (seen.start..seen.end.min(common.start), seen.start.max(common.end)..seen.end);
                    let own = if phase == 0 { before } else { after };
                    if !own.is_empty() {
                        let v = v.wrapping_add(own.start * width);
                        // SAFETY: as above, for one row.
                        unsafe { product_of::<V, E, 1, N>(&rows, i, own, v, width, width) };
                    }
                }
            }
        }
    }
}

/// What the pages of a span are worked on with.
struct Room<'a> {
    wide: Wide,
    scores: &'a mut [Scores],
    turn: Turn,
}
