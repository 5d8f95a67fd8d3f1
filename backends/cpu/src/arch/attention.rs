//! Attention over a paged cache, by the order of [`neuropil_device::ScalarOps`].
//!
//! Keys lie with one position per lane and values with one channel per lane, so both products of a page are the same
//! loop: a few rows of coefficients times a matrix that is read line by line, with the sums in registers. Up to
//! [`BLOCK`] query rows share each line. They are the heads of a group, which read the same keys, and neighbouring
//! tokens of a tile. Each sum still takes its terms one by one in the law's order, so nothing here changes a bit, and
//! the only buffers are one page of scores for a block, and one page in single precision for a tile.

use std::marker::PhantomData;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicUsize, Ordering};

use half::f16;
use neuropil_device::{Attention, AttentionRow, KV_PAGE, KvPage, math};

use super::lanes::Lanes;
use super::product::{BLOCK, Element, ProductRows, product, product_of};

/// Query rows that share a page while it is in the core's cache.
const QUERIES: usize = 8 * BLOCK;

/// Channels per head up to which a page is widened to F32 on the stack, and the values of such a page.
const WIDE_DIM: usize = 128;
const WIDE: usize = WIDE_DIM * KV_PAGE;

/// An attention handed out in parts, each once, to any thread: one KV head and a few tokens each.
pub(crate) struct AttentionParts<'a> {
    job: &'a Attention<'a>,
    out: NonNull<f32>,
    /// Tokens in a part.
    tokens: usize,
    next: AtomicUsize,
    parts: usize,
    lifetime: PhantomData<&'a mut [f32]>,
}

// SAFETY: the cursor gives each part to one thread, and parts write disjoint places of `out`. The rest is shared
// references to Sync data.
unsafe impl Sync for AttentionParts<'_> {}

impl<'a> AttentionParts<'a> {
    /// Cuts a job into about `parts` parts or more, small enough for a core's cache.
    ///
    /// # Panics
    /// As [`Attention::check`].
    pub(crate) fn new(job: &'a Attention<'a>, out: &'a mut [f32], parts: usize) -> AttentionParts<'a> {
        // The unsafe code below stands on it.
        job.check(out.len());
        let (rows, heads, kv_heads) = (job.rows.len(), job.heads, job.kv_heads);
        let most = QUERIES.div_ceil(heads / kv_heads).max(1);
        let tokens = (rows * kv_heads).div_ceil(parts.max(1)).clamp(1, most);
        let parts = rows.div_ceil(tokens) * kv_heads;
        let out = NonNull::from(out).cast();
        AttentionParts { job, out, tokens, next: AtomicUsize::new(0), parts, lifetime: PhantomData }
    }

    /// Number of parts.
    pub(crate) fn len(&self) -> usize {
        self.parts
    }

    /// The next part: its tokens and its KV head.
    fn claim(&self) -> Option<(Range<usize>, usize)> {
        let part = self.next.fetch_add(1, Ordering::Relaxed);
        if part >= self.parts {
            return None;
        }
        let first = part / self.job.kv_heads * self.tokens;
        Some((first..self.job.rows.len().min(first + self.tokens), part % self.job.kv_heads))
    }

    /// Computes the next part, if one is left. `N` is how many vectors of sums a row of a block takes.
    ///
    /// # Safety
    /// The features of V are enabled.
    #[inline(always)]
    pub(super) unsafe fn compute_next<V: Lanes, const N: usize>(&self) {
        let Some((tokens, kv_head)) = self.claim() else { return };
        let group = self.job.heads / self.job.kv_heads;
        let mut first = tokens.start;
        while first < tokens.end {
            // Tokens of the same sequence share pages.
            let rows = &self.job.rows[first..tokens.end];
            let same = rows.iter().take_while(|row| row.sequence == rows[0].sequence).count();
            let queries = same * group;
            for start in (0..queries).step_by(QUERIES) {
                let queries = start..queries.min(start + QUERIES);
                let part = Queries { all: self, first_row: first, kv_head, group };
                // SAFETY: the features of V are enabled; the part is this thread's alone.
                unsafe { part.attend::<V, N>(queries) };
            }
            first += same;
        }
    }
}

/// The query rows of one KV head: row `i` is head `i % group` of token `i / group`, counted from `first_row`.
struct Queries<'a> {
    all: &'a AttentionParts<'a>,
    first_row: usize,
    kv_head: usize,
    group: usize,
}

/// The running softmax of a query row.
#[derive(Clone, Copy)]
struct Running {
    max: f32,
    total: f32,
}

impl Queries<'_> {
    fn row(&self, query: usize) -> &AttentionRow {
        &self.all.job.rows[self.first_row + query / self.group]
    }

    /// Where the query row lies in q and out.
    fn offset(&self, query: usize) -> usize {
        let (row, head) =
            (self.first_row + query / self.group, self.kv_head * self.group + query % self.group);
        (row * self.all.job.heads + head) * self.all.job.head_dim
    }

    fn q(&self, query: usize) -> *const f32 {
        self.all.job.q[self.offset(query)..][..self.all.job.head_dim].as_ptr()
    }

    /// # Safety
    /// The query row belongs to a part that only this thread has claimed.
    unsafe fn out(&self, query: usize) -> *mut f32 {
        // SAFETY: out is as long as q, which `AttentionParts::new` saw checked.
        unsafe { self.all.out.as_ptr().add(self.offset(query)) }
    }

    /// # Safety
    /// The features of V are enabled, and the query rows belong to a part that only this thread has claimed.
    #[inline(always)]
    unsafe fn attend<V: Lanes, const N: usize>(&self, queries: Range<usize>) {
        let job = self.all.job;
        let mut running = [Running { max: f32::NEG_INFINITY, total: 0.0 }; QUERIES];
        let (mut first_page, mut pages_end) = (usize::MAX, 0);
        for query in queries.clone() {
            // SAFETY: an output row has head_dim values.
            unsafe { self.out(query).write_bytes(0, job.head_dim) };
            let visible = job.visible(self.row(query));
            first_page = first_page.min(visible.start / KV_PAGE);
            pages_end = pages_end.max(visible.end.div_ceil(KV_PAGE));
        }
        let sequence = self.row(queries.start).sequence;
        let size = job.kv_heads * job.head_dim * KV_PAGE;
        let line = job.head_dim * KV_PAGE;
        let at = self.kv_head * line;
        // Where several blocks share a page, it is worth widening once.
        let mut wide = (queries.len() > 2 * BLOCK && job.head_dim <= WIDE_DIM).then_some([[0.0; WIDE]; 2]);
        for index in first_page..pages_end {
            // SAFETY: the slices have the whole page, so the KV head's part begins at `at` and is as long as `wide`
            // needs.
            unsafe {
                match (job.kv.page(sequence, index), &mut wide) {
                    (KvPage::F16 { k, v }, Some([wide_k, wide_v])) => {
                        widen::<V>(&k[..size][at..][..line], wide_k);
                        widen::<V>(&v[..size][at..][..line], wide_v);
                        let (k, v) = (wide_k.as_ptr(), wide_v.as_ptr());
                        self.page::<V, f32, N>(index, queries.clone(), k, v, &mut running);
                    }
                    (KvPage::F16 { k, v }, None) => {
                        let (k, v) = (k[..size][at..].as_ptr(), v[..size][at..].as_ptr());
                        self.page::<V, f16, N>(index, queries.clone(), k, v, &mut running);
                    }
                    (KvPage::F32 { k, v }, _) => {
                        let (k, v) = (k[..size][at..].as_ptr(), v[..size][at..].as_ptr());
                        self.page::<V, f32, N>(index, queries.clone(), k, v, &mut running);
                    }
                }
            }
        }
        for (query, running) in queries.zip(&running) {
            if running.total > 0.0 {
                // SAFETY: an output row has head_dim values.
                let out = unsafe { std::slice::from_raw_parts_mut(self.out(query), job.head_dim) };
                out.iter_mut().for_each(|o| *o /= running.total);
            }
        }
    }

    /// One page for a tile of query rows.
    ///
    /// # Safety
    /// As for `attend`; `k` and `v` are good for the keys and values of one KV head.
    #[inline(always)]
    unsafe fn page<V: Lanes, E: Element, const N: usize>(
        &self,
        index: usize,
        queries: Range<usize>,
        k: *const E,
        v: *const E,
        running: &mut [Running; QUERIES],
    ) {
        for first in queries.clone().step_by(BLOCK) {
            let block = first..queries.end.min(first + BLOCK);
            let running = &mut running[first - queries.start..][..block.len()];
            // SAFETY: as for this function.
            unsafe { self.block::<V, E, N>(index, block, k, v, running) };
        }
    }

    /// One page for one block of query rows.
    ///
    /// # Safety
    /// As for `page`.
    #[inline(always)]
    unsafe fn block<V: Lanes, E: Element, const N: usize>(
        &self,
        index: usize,
        block: Range<usize>,
        k: *const E,
        v: *const E,
        running: &mut [Running],
    ) {
        let job = self.all.job;
        let first = index * KV_PAGE;
        let mut scores = [[0.0f32; KV_PAGE]; BLOCK];
        let mut rows = ProductRows::none();
        for query in block.clone() {
            rows.push(self.q(query), scores[rows.count].as_mut_ptr());
        }
        // SAFETY: the keys are head_dim lines of KV_PAGE; q has head_dim values; a row of scores has KV_PAGE.
        unsafe { product::<V, E, N>(&rows, job.head_dim, k, KV_PAGE, KV_PAGE) };

        // Which places each row sees; the ones that all see are done together. ProductRows that see nothing drop out.
        let mut places = [const { 0..0 }; BLOCK];
        let mut common = 0..KV_PAGE;
        let (mut old, mut new) = ([0.0f32; BLOCK], [0.0f32; BLOCK]);
        let mut who = [0; BLOCK];
        rows.count = 0;
        for (i, query) in block.clone().enumerate() {
            let visible = job.visible(self.row(query));
            let seen = visible.start.max(first) - first..visible.end.clamp(first, first + KV_PAGE) - first;
            if seen.is_empty() {
                continue;
            }
            // SAFETY: as for this function.
            let page_max = unsafe { scale::<V>(&mut scores[i], &seen, job.scale) };
            // A maximum passes over NaN; a page of nothing but NaN must not be passed over.
            if page_max == f32::NEG_INFINITY && scores[i].iter().all(|s| *s == f32::NEG_INFINITY) {
                continue;
            }
            (old[rows.count], new[rows.count]) = (running[i].max, running[i].max.max(page_max));
            common = common.start.max(seen.start)..common.end.min(seen.end);
            (places[rows.count], who[rows.count]) = (seen, i);
            // SAFETY: the block belongs to this thread.
            rows.push(scores[i].as_ptr(), unsafe { self.out(block.start + i) });
        }
        let mut shrink = [0.0f32; BLOCK];
        for ((shrink, old), new) in shrink.iter_mut().zip(&old).zip(&new) {
            *shrink = math::exp(old - new);
        }
        for row in 0..rows.count {
            let (scores, running) = (&mut scores[who[row]], &mut running[who[row]]);
            scores.iter_mut().for_each(|s| *s = math::exp(*s - new[row]));
            // SAFETY: as for this function.
            let page_total = unsafe { sum::<V>(scores) };
            *running = Running { max: new[row], total: running.total.mul_add(shrink[row], page_total) };
            rows.coefficients[row] = scores.as_ptr();
            // SAFETY: an output row has head_dim values, and the slice is gone before the pointer is used again.
            let out = unsafe { std::slice::from_raw_parts_mut(rows.sums[row], job.head_dim) };
            out.iter_mut().for_each(|o| *o *= shrink[row]);
        }
        if common.is_empty() {
            common = KV_PAGE..KV_PAGE;
        }
        // Each row takes its places in order: its own before the common ones, those, and its own after.
        for phase in 0..3 {
            if phase == 1 {
                let (rows, v) = (rows.at(0, common.start), v.wrapping_add(common.start * job.head_dim));
                // SAFETY: the values are KV_PAGE lines of head_dim, the places below KV_PAGE; an output row has
                // head_dim values.
                unsafe { product::<V, E, N>(&rows, common.len(), v, job.head_dim, job.head_dim) };
                continue;
            }
            for (i, seen) in places[..rows.count].iter().enumerate() {
                let (before, after) =
                    (seen.start..seen.end.min(common.start), seen.start.max(common.end)..seen.end);
                let own = if phase == 0 { before } else { after };
                if !own.is_empty() {
                    let (row, v) = (rows.at(i, own.start), v.wrapping_add(own.start * job.head_dim));
                    // SAFETY: as above, for one row.
                    unsafe { product_of::<V, E, 1, N>(&row, own.len(), v, job.head_dim, job.head_dim) };
                }
            }
        }
    }
}

/// Scales the scores that a row sees, hides the others and finds the largest that is a number.
///
/// # Safety
/// The features of V are enabled.
#[inline(always)]
unsafe fn scale<V: Lanes>(scores: &mut [f32; KV_PAGE], seen: &Range<usize>, scale: f32) -> f32 {
    let (start, count) = (seen.start as u32, seen.len() as u32);
    for (i, score) in scores.iter_mut().enumerate() {
        let hidden = (i as u32).wrapping_sub(start) >= count;
        *score = if hidden { f32::NEG_INFINITY } else { *score * scale };
    }
    let larger = |a: f32, b: f32| if a > b { a } else { b };
    // SAFETY: as for this function. The score comes first, so that one that is not a number loses.
    let lanes = unsafe { by_lane::<V>(scores, f32::NEG_INFINITY, |largest, score| V::max(score, largest)) };
    math::fold_with(lanes, larger)
}

/// [`math::sum`] of the weights of a page.
///
/// # Safety
/// The features of V are enabled.
#[inline(always)]
unsafe fn sum<V: Lanes>(weights: &[f32; KV_PAGE]) -> f32 {
    // SAFETY: as for this function.
    math::fold(unsafe { by_lane::<V>(weights, 0.0, |sum, weight| V::add(sum, weight)) })
}

/// Joins the elements of each of [`math::LANES`] interleaved lanes, in order.
///
/// # Safety
/// The features of V are enabled.
#[inline(always)]
unsafe fn by_lane<V: Lanes>(
    page: &[f32; KV_PAGE],
    first: f32,
    join: impl Fn(V::F, V::F) -> V::F,
) -> [f32; math::LANES] {
    let mut lanes = [0.0; math::LANES];
    for part in (0..math::LANES).step_by(V::LANES) {
        // SAFETY: as for this function; V::LANES divides math::LANES, and that KV_PAGE.
        unsafe {
            let mut all = V::splat(first);
            for at in (part..KV_PAGE).step_by(math::LANES) {
                all = join(all, V::load_f32(page.as_ptr().add(at).cast()));
            }
            V::store(lanes.as_mut_ptr().add(part), all);
        }
    }
    lanes
}

/// Widens a page, whose length is a multiple of [`KV_PAGE`].
///
/// # Safety
/// The features of V are enabled.
#[inline(always)]
unsafe fn widen<V: Lanes>(page: &[f16], wide: &mut [f32; WIDE]) {
    for (from, to) in page.chunks_exact(V::LANES).zip(wide.chunks_exact_mut(V::LANES)) {
        // SAFETY: both have LANES elements.
        unsafe { V::store(to.as_mut_ptr(), V::load_f16(from.as_ptr().cast())) };
    }
}
