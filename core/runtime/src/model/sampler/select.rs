//! The best few of a long row, without sorting the row.

/// A token that may be drawn, and its logit.
pub(super) type Candidate = (u32, f32);

/// Higher logits first, then lower ids.
pub(super) fn by_rank(a: &Candidate, b: &Candidate) -> std::cmp::Ordering {
    b.1.total_cmp(&a.1).then(a.0.cmp(&b.0))
}

/// Writes the `n` best tokens of `logits` to `out`, in no order; minus infinity and NaN are never among them.
///
/// Keeps up to `2 n + 64` tokens at hand that beat the worst of the best so far, so almost every logit costs one
/// comparison.
pub(super) fn best(logits: &[f32], n: usize, out: &mut Vec<Candidate>) {
    out.clear();
    if n == 0 {
        return;
    }
    let full = n.saturating_mul(2).saturating_add(64);
    let mut floor = f32::NEG_INFINITY;
    for (id, &logit) in logits.iter().enumerate() {
        // Later tokens have higher ids, so an equal logit loses.
        if logit > floor {
            out.push((id as u32, logit));
            if out.len() >= full {
                floor = keep(out, n);
            }
        }
    }
    if out.len() > n {
        keep(out, n);
    }
}

/// Keeps the `n` best, which are fewer than there are, and gives the worst logit kept.
fn keep(candidates: &mut Vec<Candidate>, n: usize) -> f32 {
    let (_, worst, _) = candidates.select_nth_unstable_by(n - 1, by_rank);
    let floor = worst.1;
    candidates.truncate(n);
    floor
}

/// Writes the tokens of `logits` that reach `floor` to `out`, by id; minus infinity is never among them.
pub(super) fn at_least(logits: &[f32], floor: f32, out: &mut Vec<Candidate>) {
    out.clear();
    let floor = floor.max(f32::MIN);
    // Mostly no logit of a block does, and a block without branches is quick to check.
    for (block, logits) in logits.chunks(16).enumerate() {
        if logits.iter().fold(false, |any, &logit| any | (logit >= floor)) {
            let ids = block as u32 * 16..;
            out.extend(ids.zip(logits.iter().copied()).filter(|candidate| candidate.1 >= floor));
        }
    }
}

/// The `n` tokens with the highest logits, best first, ties to the lower id. Minus infinity and NaN are left out.
pub fn top(logits: &[f32], n: usize) -> Vec<(u32, f32)> {
    let mut candidates = Vec::new();
    best(logits, n.min(logits.len()), &mut candidates);
    candidates.sort_unstable_by(by_rank);
    candidates
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn top_is_the_head_of_the_sorted_row(
            row in prop::collection::vec(prop::sample::select(vec![-1.0f32, 0.0, 0.5, 2.0, f32::NEG_INFINITY]), 0..400),
            n in 0usize..40,
        ) {
            let mut all: Vec<_> = row.iter().enumerate().map(|(id, &l)| (id as u32, l)).collect();
            all.retain(|c| c.1 > f32::NEG_INFINITY);
            all.sort_by(by_rank);
            all.truncate(n);
            prop_assert_eq!(top(&row, n), all);
        }
    }
}
