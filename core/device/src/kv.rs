//! Pages of keys and values as attention reads them, and the law of 8-bit pages.
//!
//! Keys lie transposed, so that the scores of a page are sums over `head_dim` with one position per lane; values lie
//! as they come, so that the result has one channel per lane. In 8 bits a scale belongs to one *position* and
//! [`KV_BLOCK`] channels, for keys too, where the codes of such a block are [`KV_PAGE`] apart: a position is then
//! quantised once, when it is written, and no later position changes what attention reads.

use half::f16;

/// Positions in one page of a KV cache.
pub const KV_PAGE: usize = 64;

/// Channels that share a scale in a page of 8-bit codes; the last block of a head may have fewer.
pub const KV_BLOCK: usize = 32;

/// One page of the keys and values of one layer and sequence.
///
/// Keys lie `[kv_heads, head_dim, KV_PAGE]`, values `[kv_heads, KV_PAGE, head_dim]`. Scales of both lie `[kv_heads,
/// blocks, KV_PAGE]` with `head_dim / KV_BLOCK` blocks, rounded up.
#[derive(Clone, Copy)]
pub enum KvPage<'a> {
    /// Half precision.
    F16 {
        /// Keys.
        k: &'a [f16],
        /// Values.
        v: &'a [f16],
    },
    /// Single precision.
    F32 {
        /// Keys.
        k: &'a [f32],
        /// Values.
        v: &'a [f32],
    },
    /// Codes of 8 bits; an element is `code · scale`, which single precision holds exactly.
    Q8_0 {
        /// Codes of the keys.
        k: &'a [i8],
        /// Scales of the keys.
        k_scales: &'a [f16],
        /// Codes of the values.
        v: &'a [i8],
        /// Scales of the values.
        v_scales: &'a [f16],
    },
}

/// Where attention finds its pages.
pub trait KvPages: Sync {
    /// Page `index` of a sequence (positions `index * KV_PAGE ..`), of the layer at hand.
    fn page(&self, sequence: usize, index: usize) -> KvPage<'_>;
}

impl KvPage<'_> {
    /// One key element.
    pub fn key(&self, head_dim: usize, kv_head: usize, channel: usize, place: usize) -> f32 {
        let at = (kv_head * head_dim + channel) * KV_PAGE + place;
        match self {
            KvPage::F16 { k, .. } => k[at].to_f32(),
            KvPage::F32 { k, .. } => k[at],
            KvPage::Q8_0 { k, k_scales, .. } => {
                f32::from(k[at]) * k_scales[scale_at(head_dim, kv_head, channel, place)].to_f32()
            }
        }
    }

    /// One value element.
    pub fn value(&self, head_dim: usize, kv_head: usize, channel: usize, place: usize) -> f32 {
        let at = (kv_head * KV_PAGE + place) * head_dim + channel;
        match self {
            KvPage::F16 { v, .. } => v[at].to_f32(),
            KvPage::F32 { v, .. } => v[at],
            KvPage::Q8_0 { v, v_scales, .. } => {
                f32::from(v[at]) * v_scales[scale_at(head_dim, kv_head, channel, place)].to_f32()
            }
        }
    }
}

fn scale_at(head_dim: usize, kv_head: usize, channel: usize, place: usize) -> usize {
    (kv_head * head_dim.div_ceil(KV_BLOCK) + channel / KV_BLOCK) * KV_PAGE + place
}

/// Quantises one block: the scale and a code for each of its values, at most [`KV_BLOCK`]; codes past them are 0.
///
/// The scale is the largest magnitude over 127, rounded *up* to half precision, so that no code is cut off and each
/// value comes back within half a scale. A value that is not finite, or 2^23 or more, makes the scale so that it
/// shows: every product of the block's codes with it is NaN or infinite.
pub fn quantize_kv(x: &[f32]) -> (f16, [i8; KV_BLOCK]) {
    let mut block = [0.0f32; KV_BLOCK];
    block.iter_mut().zip(x).for_each(|(to, x)| *to = *x);
    // The bits of magnitudes are in their order, with NaN on top.
    let largest = f32::from_bits(block.iter().fold(0, |max, x| max.max(x.to_bits() & 0x7fff_ffff)));
    let exact = largest / 127.0;
    let near = f16::from_f32(exact);
    let scale = if near.to_f32() < exact { f16::from_bits(near.to_bits() + 1) } else { near };
    let inverse = if exact == 0.0 { 0.0 } else { 1.0 / scale.to_f32() };
    // Adding 1.5 * 2^23 rounds to an integer, half to even, and leaves it in the low bits.
    (scale, block.map(|x| (x * inverse + 12_582_912.0).to_bits() as i8))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_comes_back_within_half_a_scale() {
        for magnitude in [1e-12f32, 1e-7, 1e-5, 0.003, 0.7, 1.0, 40.0, 6e4, 8e6] {
            for seed in 0..50 {
                let x: [f32; KV_BLOCK] = std::array::from_fn(|i| {
                    ((i * 7919 + seed * 104_729) % 2003) as f32 / 1001.0 * magnitude - magnitude
                });
                let (scale, codes) = quantize_kv(&x);
                let scale = scale.to_f32();
                let largest = x.iter().fold(0.0f32, |m, x| m.max(x.abs()));
                assert!(scale <= largest / 127.0 * 1.001 + 6e-8, "{magnitude}: {scale}");
                for (x, code) in x.iter().zip(codes) {
                    let error = (f64::from(code) * f64::from(scale) - f64::from(*x)).abs();
                    assert!(error <= f64::from(scale) * 0.500_05, "{x}: {code} of {scale}");
                }
            }
        }
        assert_eq!(quantize_kv(&[0.0; 32]), (f16::ZERO, [0; 32]));
        let (scale, codes) = quantize_kv(&[-1.0, 0.25]);
        assert_eq!((codes[0], codes[1], codes[2]), (-127, 32, 0), "{scale}");
    }

    #[test]
    fn what_is_not_finite_shows() {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 1e30, -f32::NAN] {
            let mut x = [0.25; KV_BLOCK];
            x[9] = bad;
            let (scale, codes) = quantize_kv(&x);
            assert!(codes.iter().all(|code| !(f32::from(*code) * scale.to_f32()).is_finite()), "{bad}");
        }
    }
}
