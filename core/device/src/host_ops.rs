//! What a layer needs besides its matrix products: norm, rotation, attention, addition.
//!
//! These run on the host. The default bodies are the formulas, one row after the other; the CPU backend overrides
//! the hot ones and must give the same bits. A GPU or NPU need not know that this trait exists.

use std::ops::Range;

use crate::kv::{KV_PAGE, KvPages};
use crate::{Activation, math};

/// Positions in one span of attention. Each begins a softmax of its own; they are joined in order by
/// [`Softmax::join`], so that threads can share a long context.
pub const KV_SPAN: usize = 512;

/// One row of an attention: a token of a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttentionRow {
    /// The sequence, as [`KvPages::page`] counts them.
    pub sequence: usize,
    /// The token's position; it sees the keys at `0..=position`.
    pub position: usize,
}

/// Attention of some tokens, each over its own sequence's cache.
#[derive(Clone, Copy)]
pub struct Attention<'a> {
    /// F32 `[rows, heads, head_dim]`, rotated.
    pub q: &'a [f32],
    /// The tokens.
    pub rows: &'a [AttentionRow],
    /// The cache, which already holds the tokens' own keys and values.
    pub kv: &'a dyn KvPages,
    /// Query heads; a multiple of `kv_heads`. Head `h` reads KV head `h / (heads / kv_heads)`.
    pub heads: usize,
    /// Key and value heads.
    pub kv_heads: usize,
    /// Channels per head.
    pub head_dim: usize,
    /// Factor on the scores, usually `1 / sqrt(head_dim)`.
    pub scale: f32,
    /// A row sees only its last `window` positions, its own included.
    pub window: Option<usize>,
}

impl Attention<'_> {
    /// Checks the lengths, with an output of `out` values.
    ///
    /// # Panics
    /// As [`HostOps::attention`].
    pub fn check(&self, out: usize) {
        let Attention { heads, kv_heads, head_dim, .. } = *self;
        assert!(head_dim > 0 && heads > 0, "attention takes heads with channels, not {heads} of {head_dim}");
        let shared = kv_heads > 0 && heads.is_multiple_of(kv_heads);
        assert!(shared, "{heads} heads cannot share {kv_heads} KV heads");
        let size = self.rows.len().checked_mul(heads).and_then(|n| n.checked_mul(head_dim));
        assert!(
            size == Some(self.q.len()) && size == Some(out),
            "{} values of q and {out} of out are not {} rows of {heads} heads of {head_dim}",
            self.q.len(),
            self.rows.len()
        );
    }

    /// Positions that a row sees.
    pub fn visible(&self, row: &AttentionRow) -> Range<usize> {
        let end = row.position + 1;
        end.saturating_sub(self.window.unwrap_or(end))..end
    }

    /// Spans of [`KV_SPAN`] positions that a row sees something of.
    pub fn spans(&self, row: &AttentionRow) -> Range<usize> {
        let visible = self.visible(row);
        visible.start / KV_SPAN..visible.end.div_ceil(KV_SPAN)
    }
}

/// Rotary embedding of rows of heads.
#[derive(Clone, Copy)]
pub struct Rope<'a> {
    /// `[rows, pairs]` of (cos, sin).
    pub table: &'a [[f32; 2]],
    /// Rotated pairs per head.
    pub pairs: usize,
    /// Channels per head.
    pub head_dim: usize,
    /// Pairs are neighbours (`2i, 2i+1`, Llama's GGUF order) rather than halves (`i, i + pairs`, NeoX).
    pub adjacent: bool,
}

impl Rope<'_> {
    /// Checks the lengths, with `values` values to rotate; returns the values of a row, or 0 when nothing turns.
    ///
    /// # Panics
    /// As [`HostOps::rope`].
    pub fn check(&self, values: usize) -> usize {
        let Rope { table, pairs, head_dim, .. } = *self;
        if pairs == 0 && table.is_empty() {
            return 0;
        }
        let fits = pairs > 0 && pairs <= head_dim / 2 && table.len().is_multiple_of(pairs);
        assert!(
            fits,
            "a table of {} entries does not turn {pairs} pairs of {head_dim} channels",
            table.len()
        );
        let rows = table.len() / pairs;
        let whole = if rows == 0 { values == 0 } else { values.is_multiple_of(rows) };
        let width = values / rows.max(1);
        assert!(
            whole && width.is_multiple_of(head_dim),
            "{values} values are not {rows} rows of heads of {head_dim}"
        );
        width
    }
}

/// Checks the lengths of an RMS norm.
///
/// # Panics
/// As [`HostOps::rms_norm`].
pub fn check_rms_norm(x: &[f32], weight: &[f32], out: &[f32]) {
    assert!(!weight.is_empty(), "a norm takes at least one channel");
    assert!(
        x.len() == out.len() && x.len().is_multiple_of(weight.len()),
        "{} values and {} outputs are not rows of {}",
        x.len(),
        out.len(),
        weight.len()
    );
}

/// Checks the lengths of an addition.
///
/// # Panics
/// As [`HostOps::add`].
pub fn check_add(x: &[f32], y: &[f32]) {
    assert!(x.len() == y.len(), "{} values cannot be added to {}", y.len(), x.len());
}

/// Host operations. All slices are F32, row after row.
///
/// The lengths come from the runtime and not from a file, so wrong ones are a bug and panic. Every implementation
/// begins with the same check: [`check_rms_norm`], [`Rope::check`], [`Attention::check`], [`check_add`].
pub trait HostOps: Send + Sync + 'static {
    /// RMS norm of each row of `weight.len()` channels.
    ///
    /// # Panics
    /// When `weight` is empty, or `x` and `out` are not as many whole rows of its length.
    fn rms_norm(&self, x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
        check_rms_norm(x, weight, out);
        let width = weight.len();
        for (x, out) in x.chunks_exact(width).zip(out.chunks_exact_mut(width)) {
            math::rms_norm_row(x, weight, eps, out);
        }
    }

    /// Rotates `x`, rows of whole heads, in place.
    ///
    /// # Panics
    /// When there are more pairs than `head_dim / 2`, the table is not whole rows of `pairs`, or `x` is not as many
    /// rows, each of whole heads. No pairs turn nothing.
    fn rope(&self, rope: &Rope<'_>, x: &mut [f32]) {
        rope.check(x.len());
        rope_rows(rope, x);
    }

    /// Attention; `out` is `[rows, heads, head_dim]`. A row that sees no position gives zeros; a score that is not a
    /// number makes the whole head NaN, so that a broken model shows.
    ///
    /// # Panics
    /// When `heads`, `kv_heads` or `head_dim` is 0, `heads` is no multiple of `kv_heads`, `q` or `out` has another
    /// length than the shape says, or a page is too short.
    fn attention(&self, job: &Attention<'_>, out: &mut [f32]) {
        job.check(out.len());
        attention_scalar(job, out);
    }

    /// `x += y`.
    ///
    /// # Panics
    /// When the lengths differ.
    fn add(&self, x: &mut [f32], y: &[f32]) {
        check_add(x, y);
        x.iter_mut().zip(y).for_each(|(x, y)| *x += y);
    }

    /// Replaces gate values by the part of the activation that the gate alone decides, [`Activation::gate`].
    fn gate(&self, activation: Activation, values: &mut [f32]) {
        activation.gate_slice(values);
    }
}

/// The default bodies as they are: the reference that other implementations are compared with.
#[derive(Clone, Copy, Debug, Default)]
pub struct ScalarOps;

impl HostOps for ScalarOps {}

/// Rotates the rows of `x`, whose lengths were checked.
#[inline(always)]
pub fn rope_rows(rope: &Rope<'_>, x: &mut [f32]) {
    if x.is_empty() || rope.pairs == 0 {
        return;
    }
    let rows = rope.table.len() / rope.pairs;
    for (row, table) in x.chunks_exact_mut(x.len() / rows).zip(rope.table.chunks_exact(rope.pairs)) {
        for head in row.chunks_exact_mut(rope.head_dim) {
            math::rope_head(head, table, rope.adjacent);
        }
    }
}

/// The running softmax of some positions: the largest score so far, and the sum of the weights `e^(score - max)`.
/// Whoever keeps it keeps the weighted sums of the values beside it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Softmax {
    /// Largest score.
    pub max: f32,
    /// Sum of the weights: 0 of nothing, else at least 1, or NaN when a score was not a number.
    pub total: f32,
}

impl Softmax {
    /// Of no position.
    pub const NOTHING: Softmax = Softmax { max: f32::NEG_INFINITY, total: 0.0 };

    /// Takes in the softmax of later positions. The sums that belong to the two are joined by what is returned.
    #[inline(always)]
    pub fn join(&mut self, later: Softmax) -> Joined {
        if later.total == 0.0 {
            return Joined::Kept;
        }
        if self.total == 0.0 {
            *self = later;
            return Joined::Taken;
        }
        let max = self.max.max(later.max);
        let [own, other] = [math::exp(self.max - max), math::exp(later.max - max)];
        *self = Softmax { max, total: later.total.mul_add(other, self.total * own) };
        Joined::Sum { own, other }
    }
}

/// How two sums of values become one, for each channel.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Joined {
    /// The first as it is.
    Kept,
    /// The second as it is.
    Taken,
    /// `second.mul_add(other, first * own)`.
    Sum {
        /// Factor of the first.
        own: f32,
        /// Factor of the second.
        other: f32,
    },
}

/// Attention, head by head, span by span and page by page, with the running maximum of an online softmax.
///
/// The order is part of the numeric law: scores sum over channels in order; a page's weights are summed in
/// [`math::sum`]'s order over its `KV_PAGE` places; the output takes positions in order. Each span of [`KV_SPAN`]
/// positions begins anew, and the spans are joined in order by [`Softmax::join`], so threads can share a long context.
/// Pages and spans are aligned to absolute positions, so a row's result does not depend on what else is in the batch
/// or how the prompt was cut.
fn attention_scalar(job: &Attention<'_>, out: &mut [f32]) {
    let dim = job.head_dim;
    let group = job.heads / job.kv_heads;
    let width = job.heads * dim;
    let mut span = vec![0.0; dim];
    for ((row, q), out) in job.rows.iter().zip(job.q.chunks_exact(width)).zip(out.chunks_exact_mut(width)) {
        for (head, (q, out)) in q.chunks_exact(dim).zip(out.chunks_exact_mut(dim)).enumerate() {
            attend(job, row, head / group, q, out, &mut span);
        }
    }
}

fn attend(
    job: &Attention<'_>,
    row: &AttentionRow,
    kv_head: usize,
    q: &[f32],
    out: &mut [f32],
    sums: &mut [f32],
) {
    let mut all = Softmax::NOTHING;
    out.fill(0.0);
    for span in job.spans(row) {
        sums.fill(0.0);
        let later = attend_span(job, row, kv_head, q, span, sums);
        match all.join(later) {
            Joined::Kept => {}
            Joined::Taken => out.copy_from_slice(sums),
            Joined::Sum { own, other } => {
                out.iter_mut().zip(&*sums).for_each(|(out, sum)| *out = sum.mul_add(other, *out * own));
            }
        }
    }
    if all.total > 0.0 {
        out.iter_mut().for_each(|o| *o /= all.total);
    }
}

/// Attention over what a row sees of one span; `sums` begins as zeros.
fn attend_span(
    job: &Attention<'_>,
    row: &AttentionRow,
    kv_head: usize,
    q: &[f32],
    span: usize,
    sums: &mut [f32],
) -> Softmax {
    let dim = job.head_dim;
    let visible = job.visible(row);
    let visible = visible.start.max(span * KV_SPAN)..visible.end.min((span + 1) * KV_SPAN);
    let Softmax { mut max, mut total } = Softmax::NOTHING;
    for index in visible.start / KV_PAGE..visible.end.div_ceil(KV_PAGE) {
        let page = job.kv.page(row.sequence, index);
        let first = index * KV_PAGE;
        let places = visible.start.max(first) - first..visible.end.min(first + KV_PAGE) - first;
        let mut weights = [f32::NEG_INFINITY; KV_PAGE];
        for place in places.clone() {
            let mut score = 0.0f32;
            for (channel, q) in q.iter().enumerate() {
                score = q.mul_add(page.key(dim, kv_head, channel, place), score);
            }
            weights[place] = score * job.scale;
        }
        let page_max = weights.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        // A maximum passes over NaN; a page of nothing but NaN must not be passed over.
        if page_max == f32::NEG_INFINITY && weights.iter().all(|w| *w == f32::NEG_INFINITY) {
            continue;
        }
        let new_max = max.max(page_max);
        let shrink = math::exp(max - new_max);
        weights.iter_mut().for_each(|w| *w = math::exp(*w - new_max));
        total = total.mul_add(shrink, math::sum(&weights));
        for (channel, sum) in sums.iter_mut().enumerate() {
            *sum *= shrink;
            for place in places.clone() {
                *sum = weights[place].mul_add(page.value(dim, kv_head, channel, place), *sum);
            }
        }
        max = new_max;
    }
    Softmax { max, total }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kv::KvPage;

    /// Keys of zeros, values that name their position and KV head.
    struct Positions {
        kv_heads: usize,
        pages: Vec<(Vec<f32>, Vec<f32>)>,
    }

    impl Positions {
        fn new(kv_heads: usize, count: usize) -> Positions {
            let page = |p: usize| {
                let v =
                    (0..kv_heads * KV_PAGE).map(|i| (i / KV_PAGE * 1000 + p * KV_PAGE + i % KV_PAGE) as f32);
                (vec![0.0; kv_heads * KV_PAGE], v.collect())
            };
            Positions { kv_heads, pages: (0..count).map(page).collect() }
        }

        fn run(&self, heads: usize, window: Option<usize>, position: usize) -> Vec<f32> {
            let rows = [AttentionRow { sequence: 0, position }];
            let mut out = vec![f32::NAN; heads];
            let q = vec![1.0; heads];
            let kv_heads = self.kv_heads;
            let job =
                Attention { q: &q, rows: &rows, kv: self, heads, kv_heads, head_dim: 1, scale: 1.0, window };
            ScalarOps.attention(&job, &mut out);
            out
        }
    }

    impl KvPages for Positions {
        fn page(&self, _: usize, index: usize) -> KvPage<'_> {
            KvPage::F32 { k: &self.pages[index].0, v: &self.pages[index].1 }
        }
    }

    #[test]
    fn a_row_averages_what_it_sees() {
        let kv = Positions::new(1, 3);
        assert_eq!(kv.run(1, None, 9), [4.5]);
        assert_eq!(kv.run(1, Some(4), 9), [7.5]);
        assert!((kv.run(1, None, 149)[0] - 74.5).abs() < 1e-4);
        assert!((kv.run(1, Some(100), 149)[0] - 99.5).abs() < 1e-4);
        assert_eq!(kv.run(1, Some(0), 9), [0.0], "a row that sees nothing is zero");
    }

    #[test]
    fn spans_join_to_the_whole() {
        let kv = Positions::new(1, 20);
        for position in [511, 512, 513, 1023, 1024, 1279] {
            let got = kv.run(1, None, position)[0];
            assert!((got - position as f32 / 2.0).abs() < 1e-3, "{position}: {got}");
        }
        assert!((kv.run(1, Some(600), 1100)[0] - 800.5).abs() < 1e-3);
        let nothing = Softmax::NOTHING;
        let two = Softmax { max: 1.0, total: 2.0 };
        let mut all = nothing;
        assert_eq!(
            (all.join(nothing), all.join(two), all.join(nothing)),
            (Joined::Kept, Joined::Taken, Joined::Kept)
        );
        assert_eq!(all, two);
        assert_eq!(all.join(two), Joined::Sum { own: 1.0, other: 1.0 });
        assert_eq!(all.total, 4.0);
        all.join(Softmax { max: f32::NEG_INFINITY, total: f32::NAN });
        assert!(all.total.is_nan(), "what is not a number shows across spans");
    }

    #[test]
    fn a_query_that_is_not_a_number_shows() {
        let kv = Positions::new(1, 3);
        for (window, position) in [(None, 0), (None, 149), (Some(3), 65)] {
            let rows = [AttentionRow { sequence: 0, position }];
            let job = Attention {
                q: &[f32::NAN, 1.0],
                rows: &rows,
                kv: &kv,
                heads: 2,
                kv_heads: 1,
                head_dim: 1,
                scale: 1.0,
                window,
            };
            let mut out = [0.0; 2];
            ScalarOps.attention(&job, &mut out);
            assert!(out[0].is_nan() && out[1].is_finite(), "{out:?}");
        }
    }

    #[test]
    fn query_heads_share_key_heads_in_order() {
        assert_eq!(Positions::new(2, 1).run(6, None, 0), [0.0, 0.0, 0.0, 1000.0, 1000.0, 1000.0]);
    }
}
