//! Random numbers by address: the weight in block 7 of row 123 is known without drawing those before it.
//!
//! So rows can be made by any number of threads, a cut of a model has the same rows as the whole, and a predictor can
//! repeat a part of a gate row that lies elsewhere.

/// A stream of numbers for one tensor.
#[derive(Clone, Copy, Debug)]
pub(super) struct Key(u64);

/// Odd, and its bits look random: the golden ratio.
const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

impl Key {
    /// The stream of a tensor: `tag` tells its kind, `layer` and `expert` which one it is.
    pub(super) fn new(seed: u64, tag: u64, layer: usize, expert: usize) -> Key {
        let parts = [tag, layer as u64, expert as u64];
        Key(parts.into_iter().fold(mix(seed), |key, part| mix(key ^ mix(part.wrapping_add(STEP)))))
    }

    /// The numbers of one row.
    pub(super) fn row(self, row: usize) -> Key {
        Key(mix(self.0 ^ mix(row as u64)))
    }

    /// Number `index`.
    #[inline]
    pub(super) fn at(self, index: usize) -> u64 {
        mix(self.0.wrapping_add(STEP.wrapping_mul(index as u64 + 1)))
    }

    /// Number `index`, from 0 up to `bound`.
    pub(super) fn below(self, index: usize, bound: usize) -> usize {
        ((u128::from(self.at(index)) * bound as u128) >> 64) as usize
    }
}

/// Spreads every bit of `x` over all bits (the finaliser of SplitMix64).
#[inline]
fn mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_depend_on_every_part_of_their_address() {
        let key = |seed, tag, layer, expert| Key::new(seed, tag, layer, expert).row(0).at(0);
        let all = [key(0, 0, 0, 0), key(1, 0, 0, 0), key(0, 1, 0, 0), key(0, 0, 1, 0), key(0, 0, 0, 1)];
        let row = Key::new(0, 0, 0, 0).row(1);
        let set: std::collections::BTreeSet<u64> = all.into_iter().chain([row.at(0), row.at(1)]).collect();
        assert_eq!(set.len(), 7);
    }

    #[test]
    fn bits_are_even_and_bounds_are_kept() {
        let key = Key::new(7, 1, 2, 3).row(4);
        let ones: u32 = (0..4096).map(|i| key.at(i).count_ones()).sum();
        assert!((ones as f64 / (4096.0 * 64.0) - 0.5).abs() < 0.005);
        assert!((0..1000).all(|i| key.below(i, 10) < 10));
    }
}
