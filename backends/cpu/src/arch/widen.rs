//! Pages in half precision or 8 bits, made single precision a piece at a time.
//!
//! A piece is small enough for a core's nearest cache beside the rows that use it. Widening changes no value, so
//! whether and in which pieces it is done changes no bit.

use std::mem::MaybeUninit;
use std::ops::Range;

use half::f16;
use neuropil_device::{KV_BLOCK, KV_PAGE};

use super::lanes::Lanes;

/// Channels of a piece, all positions of a page.
pub(super) const PIECE: usize = 4 * KV_BLOCK;

/// Room for a piece.
#[repr(align(64))]
pub(super) struct Wide(MaybeUninit<[f32; PIECE * KV_PAGE]>);

impl Wide {
    pub fn new() -> Wide {
        Wide(MaybeUninit::uninit())
    }

    fn as_mut_ptr(&mut self) -> *mut f32 {
        self.0.as_mut_ptr().cast()
    }
}

/// What is to be widened.
#[derive(Clone, Copy)]
pub(super) enum Narrow<'a> {
    Halves { k: &'a [f16], v: &'a [f16] },
    Codes { k: &'a [i8], k_scales: &'a [f16], v: &'a [i8], v_scales: &'a [f16] },
}

impl Narrow<'_> {
    /// The keys of some channels of a KV head, at most [`PIECE`], from a multiple of [`KV_BLOCK`] on: `[channels,
    /// KV_PAGE]`.
    ///
    /// # Safety
    /// The features of V are enabled.
    #[inline(always)]
    pub unsafe fn keys<V: Lanes>(
        &self,
        head_dim: usize,
        kv_head: usize,
        piece: Range<usize>,
        wide: &mut Wide,
    ) -> *const f32 {
        assert!(piece.len() <= PIECE, "a piece fits its room");
        let to = wide.as_mut_ptr();
        let at = (kv_head * head_dim + piece.start) * KV_PAGE;
        // SAFETY: `to` has room for the lines of a piece; the slices have what is read.
        unsafe {
            match *self {
                Narrow::Halves { k, .. } => halves::<V>(&k[at..][..piece.len() * KV_PAGE], to),
                Narrow::Codes { k, k_scales, .. } => {
                    let codes = &k[at..][..piece.len() * KV_PAGE];
                    for (codes, block) in codes.chunks(KV_BLOCK * KV_PAGE).zip(piece.start / KV_BLOCK..) {
                        let first = (block * KV_BLOCK - piece.start) * KV_PAGE;
                        let scales = scales(k_scales, head_dim, kv_head, block).as_ptr();
                        for j in (0..KV_PAGE).step_by(V::LANES) {
                            let scale = V::load_f16(scales.add(j).cast());
                            let (mut from, mut to) = (codes.as_ptr().add(j), to.add(first + j));
                            for _ in 0..codes.len() / KV_PAGE {
                                V::store(to, V::mul(V::load_i8(from.cast()), scale));
                                (from, to) = (from.wrapping_add(KV_PAGE), to.wrapping_add(KV_PAGE));
                            }
                        }
                    }
                }
            }
        }
        to
    }

    /// The values of such channels: `[KV_PAGE, channels]`.
    ///
    /// # Safety
    /// The features of V are enabled.
    #[inline(always)]
    pub unsafe fn values<V: Lanes>(
        &self,
        head_dim: usize,
        kv_head: usize,
        piece: Range<usize>,
        wide: &mut Wide,
    ) -> *const f32 {
        assert!(piece.len() <= PIECE, "a piece fits its room");
        let (to, width) = (wide.as_mut_ptr(), piece.len());
        let at = kv_head * KV_PAGE * head_dim;
        // SAFETY: `to` has room for the lines of a piece; the slices have what is read.
        unsafe {
            match *self {
                Narrow::Halves { v, .. } => {
                    let v = &v[at..][..KV_PAGE * head_dim];
                    if width == head_dim {
                        halves::<V>(v, to);
                    } else {
                        for (place, line) in v.chunks_exact(head_dim).enumerate() {
                            halves::<V>(&line[piece.clone()], to.add(place * width));
                        }
                    }
                }
                Narrow::Codes { v, v_scales, .. } => {
                    let v = &v[at..][..KV_PAGE * head_dim];
                    let mut scale = [0.0f32; KV_PAGE];
                    for first in piece.clone().step_by(KV_BLOCK) {
                        halves::<V>(
                            scales(v_scales, head_dim, kv_head, first / KV_BLOCK),
                            scale.as_mut_ptr(),
                        );
                        let count = KV_BLOCK.min(piece.end - first);
                        let (mut from, mut to) = (v[first..].as_ptr(), to.add(first - piece.start));
                        for scale in scale {
                            if count == KV_BLOCK {
                                // A count that the compiler knows leaves no loop.
                                scaled::<V>(from, KV_BLOCK, scale, to);
                            } else {
                                scaled::<V>(from, count, scale, to);
                            }
                            (from, to) = (from.wrapping_add(head_dim), to.wrapping_add(width));
                        }
                    }
                }
            }
        }
        to
    }
}

/// The scales of a block, one for each position.
fn scales(scales: &[f16], head_dim: usize, kv_head: usize, block: usize) -> &[f16] {
    &scales[(kv_head * head_dim.div_ceil(KV_BLOCK) + block) * KV_PAGE..][..KV_PAGE]
}

/// # Safety
/// The features of V are enabled, and `to` has as much room.
#[inline(always)]
unsafe fn halves<V: Lanes>(from: &[f16], to: *mut f32) {
    let whole = from.len() / V::LANES * V::LANES;
    // SAFETY: as for this function.
    unsafe {
        for i in (0..whole).step_by(V::LANES) {
            V::store(to.add(i), V::load_f16(from.as_ptr().add(i).cast()));
        }
        for (i, x) in from.iter().enumerate().skip(whole) {
            to.add(i).write(x.to_f32());
        }
    }
}

/// # Safety
/// The features of V are enabled, and the pointers are good for `count` elements.
#[inline(always)]
unsafe fn scaled<V: Lanes>(from: *const i8, count: usize, scale: f32, to: *mut f32) {
    let whole = count / V::LANES * V::LANES;
    // SAFETY: as for this function.
    unsafe {
        let scales = V::splat(scale);
        for i in (0..whole).step_by(V::LANES) {
            V::store(to.add(i), V::mul(V::load_i8(from.add(i).cast()), scales));
        }
        for i in whole..count {
            to.add(i).write(f32::from(*from.add(i)) * scale);
        }
    }
}
