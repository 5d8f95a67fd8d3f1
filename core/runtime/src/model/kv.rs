//! The cache of keys and values of one sequence.
//!
//! It grows page by page ([`KV_PAGE`] positions, all layers) as positions come, so a long context costs nothing until
//! it is used. Pages are shared between forks of a sequence (Best-of-N over one prompt) and copied when one of them
//! writes. The layout of a page is that of [`neuropil_device::KvPage`].

use std::sync::Arc;

use half::f16;
use neuropil_device::{KV_BLOCK, KV_PAGE, KvPage, KvPages, quantize_kv};

use crate::engine::EngineError;

use super::ModelError;
use super::room::{Room, Taken};

/// Precision of the cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum KvType {
    /// Half precision.
    #[default]
    F16,
    /// Single precision.
    F32,
    /// Codes of 8 bits with a scale for every 32 channels of a position: about half of half precision.
    Q8_0,
}

/// What a cache holds per position.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct KvShape {
    /// Transformer blocks.
    pub layers: usize,
    /// Key and value heads.
    pub kv_heads: usize,
    /// Channels per head.
    pub head_dim: usize,
    /// Precision.
    pub kind: KvType,
}

impl KvShape {
    /// Elements of the keys (or values) of one layer in one page.
    fn plane(&self) -> usize {
        self.kv_heads * self.head_dim * KV_PAGE
    }

    /// Scales of the keys (or values) of one layer in one page of 8-bit codes.
    fn scale_plane(&self) -> usize {
        self.kv_heads * self.head_dim.div_ceil(KV_BLOCK) * KV_PAGE
    }

    /// Bytes of one page.
    pub fn page_bytes(&self) -> usize {
        let bytes = match self.kind {
            KvType::F16 => 2 * self.plane(),
            KvType::F32 => 4 * self.plane(),
            KvType::Q8_0 => self.plane() + 2 * self.scale_plane(),
        };
        2 * self.layers * bytes
    }
}

/// [`KV_PAGE`] positions, and the memory that they are counted with.
#[derive(Debug)]
struct Page {
    data: PageData,
    _taken: Taken,
}

impl Page {
    fn new(shape: &KvShape, room: Option<&Arc<Room>>) -> Result<Page, ModelError> {
        let taken = Room::take(room, shape.page_bytes() as u64)?;
        Ok(Page { data: PageData::new(shape)?, _taken: taken })
    }

    fn copy(&self, shape: &KvShape, room: Option<&Arc<Room>>) -> Result<Page, ModelError> {
        let taken = Room::take(room, shape.page_bytes() as u64)?;
        Ok(Page { data: self.data.copy()?, _taken: taken })
    }
}

/// Keys then values of layer 0, keys then values of layer 1, and so on; scales in the same order.
#[derive(Clone, Debug)]
enum PageData {
    F16(Vec<f16>),
    F32(Vec<f32>),
    Q8_0 { codes: Vec<i8>, scales: Vec<f16> },
}

impl PageData {
    fn new(shape: &KvShape) -> Result<PageData, ModelError> {
        let elements = 2 * shape.layers * shape.plane();
        Ok(match shape.kind {
            KvType::F16 => PageData::F16(filled(elements, f16::ZERO)?),
            KvType::F32 => PageData::F32(filled(elements, 0.0)?),
            KvType::Q8_0 => PageData::Q8_0 {
                codes: filled(elements, 0)?,
                scales: filled(2 * shape.layers * shape.scale_plane(), f16::ZERO)?,
            },
        })
    }

    fn copy(&self) -> Result<PageData, ModelError> {
        Ok(match self {
            PageData::F16(from) => PageData::F16(copied(from)?),
            PageData::F32(from) => PageData::F32(copied(from)?),
            PageData::Q8_0 { codes, scales } => {
                PageData::Q8_0 { codes: copied(codes)?, scales: copied(scales)? }
            }
        })
    }
}

fn reserved<T>(elements: usize) -> Result<Vec<T>, ModelError> {
    let mut data = Vec::new();
    data.try_reserve_exact(elements).map_err(|_| ModelError::OutOfMemory {
        what: "the KV cache".into(),
        bytes: (elements * size_of::<T>()) as u64,
    })?;
    Ok(data)
}

fn filled<T: Clone>(elements: usize, value: T) -> Result<Vec<T>, ModelError> {
    let mut data = reserved(elements)?;
    data.resize(elements, value);
    Ok(data)
}

fn copied<T: Copy>(from: &[T]) -> Result<Vec<T>, ModelError> {
    let mut data = reserved(from.len())?;
    data.extend_from_slice(from);
    Ok(data)
}

/// Keys and values of the positions of one sequence.
#[derive(Debug)]
pub(crate) struct KvCache {
    shape: KvShape,
    /// What its memory is counted with, if there is a budget.
    room: Option<Arc<Room>>,
    pages: Vec<Arc<Page>>,
    len: usize,
}

impl KvCache {
    /// An empty cache.
    pub fn new(shape: KvShape, room: Option<Arc<Room>>) -> KvCache {
        KvCache { shape, room, pages: Vec::new(), len: 0 }
    }

    /// Memory of its pages, those it shares with forks included.
    pub fn bytes(&self) -> usize {
        self.pages.len() * self.shape.page_bytes()
    }

    /// Another cache with the same positions, sharing the pages until one of the two writes.
    pub fn fork(&self) -> KvCache {
        KvCache { shape: self.shape, room: self.room.clone(), pages: self.pages.clone(), len: self.len }
    }

    /// Forgets the positions from `len` on.
    pub fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
        self.pages.truncate(self.len.div_ceil(KV_PAGE));
    }

    /// Makes room to write the positions `self.len()..len`.
    ///
    /// # Errors
    /// [`ModelError::OutOfMemory`]; the positions held stay as they are.
    pub fn reserve(&mut self, len: usize) -> Result<(), ModelError> {
        let pages = len.div_ceil(KV_PAGE);
        while self.pages.len() < pages {
            self.pages.push(Arc::new(Page::new(&self.shape, self.room.as_ref())?));
        }
        for page in &mut self.pages[self.len / KV_PAGE..pages] {
            if Arc::get_mut(page).is_none() {
                *page = Arc::new(page.copy(&self.shape, self.room.as_ref())?);
            }
        }
        Ok(())
    }

    /// Writes one position of one layer; `k` and `v` are `[kv_heads, head_dim]`. The position must be reserved.
    pub fn write(&mut self, layer: usize, position: usize, k: &[f32], v: &[f32]) {
        let KvShape { head_dim, .. } = self.shape;
        let (plane, scale_plane) = (self.shape.plane(), self.shape.scale_plane());
        let place = position % KV_PAGE;
        let page = self.pages.get_mut(position / KV_PAGE).and_then(Arc::get_mut);
        match &mut page.expect("a position is reserved before it is written").data {
            PageData::F16(data) => {
                scatter(head_dim, place, k, v, halves_mut(data, layer, plane), f16::from_f32)
            }
            PageData::F32(data) => scatter(head_dim, place, k, v, halves_mut(data, layer, plane), |x| x),
            PageData::Q8_0 { codes, scales } => {
                let (to_k, to_v) = halves_mut(codes, layer, plane);
                let (k_scales, v_scales) = halves_mut(scales, layer, scale_plane);
                quantize(head_dim, place, k, k_scales, |head, channel, codes| {
                    let lines = to_k[(head * head_dim + channel) * KV_PAGE..].chunks_exact_mut(KV_PAGE);
                    lines.zip(codes).for_each(|(line, code)| line[place] = *code);
                });
                quantize(head_dim, place, v, v_scales, |head, channel, codes| {
                    let at = (head * KV_PAGE + place) * head_dim + channel;
                    to_v[at..at + codes.len()].copy_from_slice(codes);
                });
            }
        }
    }

    /// Declares the positions up to `len` written in every layer.
    pub fn commit(&mut self, len: usize) {
        debug_assert!(len >= self.len && len <= self.pages.len() * KV_PAGE);
        self.len = len;
    }

    fn page(&self, layer: usize, index: usize) -> KvPage<'_> {
        let (plane, scale_plane) = (self.shape.plane(), self.shape.scale_plane());
        match &self.pages[index].data {
            PageData::F16(data) => {
                let (k, v) = halves(data, layer, plane);
                KvPage::F16 { k, v }
            }
            PageData::F32(data) => {
                let (k, v) = halves(data, layer, plane);
                KvPage::F32 { k, v }
            }
            PageData::Q8_0 { codes, scales } => {
                let ((k, v), (k_scales, v_scales)) =
                    (halves(codes, layer, plane), halves(scales, layer, scale_plane));
                KvPage::Q8_0 { k, k_scales, v, v_scales }
            }
        }
    }
}

/// What a layer has of an array: that of its keys and that of its values.
fn halves<T>(data: &[T], layer: usize, plane: usize) -> (&[T], &[T]) {
    data[2 * layer * plane..][..2 * plane].split_at(plane)
}

fn halves_mut<T>(data: &mut [T], layer: usize, plane: usize) -> (&mut [T], &mut [T]) {
    data[2 * layer * plane..][..2 * plane].split_at_mut(plane)
}

/// Writes keys and values of one position.
fn scatter<T>(
    head_dim: usize,
    place: usize,
    k: &[f32],
    v: &[f32],
    (to_k, to_v): (&mut [T], &mut [T]),
    convert: impl Fn(f32) -> T,
) {
    for (x, line) in k.iter().zip(to_k.chunks_exact_mut(KV_PAGE)) {
        line[place] = convert(*x);
    }
    for (v, head) in v.chunks_exact(head_dim).zip(to_v.chunks_exact_mut(head_dim * KV_PAGE)) {
        let to = &mut head[place * head_dim..][..head_dim];
        to.iter_mut().zip(v).for_each(|(to, x)| *to = convert(*x));
    }
}

/// Quantises the keys or values of one position; `put` takes the codes of a block with its head and first channel.
fn quantize(
    head_dim: usize,
    place: usize,
    x: &[f32],
    scales: &mut [f16],
    mut put: impl FnMut(usize, usize, &[i8]),
) {
    let mut scales = scales.chunks_exact_mut(KV_PAGE);
    for (head, x) in x.chunks_exact(head_dim).enumerate() {
        // One scale for each block, in their order; the last block of a head may be shorter.
        for ((block, x), scales) in x.chunks(KV_BLOCK).enumerate().zip(&mut scales) {
            let (scale, codes) = quantize_kv(x);
            scales[place] = scale;
            put(head, block * KV_BLOCK, &codes[..x.len()]);
        }
    }
}

/// The sequences of one step, in the order that the step counts them.
pub(crate) trait Sequences: Sync {
    /// The cache of a sequence.
    fn cache(&self, sequence: usize) -> &KvCache;

    /// The cache of a sequence, to write.
    fn cache_mut(&mut self, sequence: usize) -> &mut KvCache;

    /// Takes the logits of one of the rows that the step was asked for.
    fn take_logits(&mut self, row: usize, logits: &[f32]) -> Result<(), EngineError>;

    /// Whether nobody waits for the step any more. Looked at once per layer.
    fn cancelled(&self) -> bool;
}

/// One layer of the caches of a step, as attention reads it.
pub(crate) struct LayerPages<'a> {
    /// The sequences.
    pub sequences: &'a dyn Sequences,
    /// The layer.
    pub layer: usize,
}

impl KvPages for LayerPages<'_> {
    fn page(&self, sequence: usize, index: usize) -> KvPage<'_> {
        self.sequences.cache(sequence).page(self.layer, index)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(cache: &KvCache, position: usize) -> f32 {
        cache.page(1, position / KV_PAGE).key(3, 1, 2, position % KV_PAGE)
    }

    fn push(cache: &mut KvCache, value: f32) {
        let position = cache.len;
        cache.reserve(position + 1).unwrap();
        for layer in 0..2 {
            cache.write(layer, position, &[value; 6], &[value; 6]);
        }
        cache.commit(position + 1);
    }

    #[test]
    fn forks_share_what_was_and_part_where_they_write() {
        for kind in [KvType::F16, KvType::F32, KvType::Q8_0] {
            let mut a = KvCache::new(KvShape { layers: 2, kv_heads: 2, head_dim: 3, kind }, None);
            (0..70).for_each(|i| push(&mut a, i as f32));
            let mut b = a.fork();
            push(&mut a, 100.0);
            push(&mut b, 200.0);
            let near =
                |cache: &KvCache, position, want: f32| (key(cache, position) - want).abs() <= want / 1000.0;
            assert!(near(&a, 70, 100.0) && near(&b, 70, 200.0));
            assert!(near(&a, 69, 69.0) && near(&b, 69, 69.0));
            assert!(Arc::ptr_eq(&a.pages[0], &b.pages[0]), "a full page stays shared");
            b.truncate(10);
            push(&mut b, 7.0);
            assert!(near(&a, 10, 10.0) && near(&b, 10, 7.0));
            assert_eq!(b.len, 11);
        }
    }

    #[test]
    fn a_position_of_8_bits_is_near_and_stays_as_it_was_written() {
        // 40 channels: a whole block and one of eight.
        let shape = KvShape { layers: 2, kv_heads: 2, head_dim: 40, kind: KvType::Q8_0 };
        let mut cache = KvCache::new(shape, None);
        let value = |layer: usize, position: usize, i: usize| {
            let x = ((layer * 31 + position * 17 + i * 7) % 101) as f32 - 50.0;
            if position.is_multiple_of(3) { x * 100.0 } else { x * 0.01 }
        };
        let read = |cache: &KvCache, layer: usize, position: usize| -> Vec<[f32; 2]> {
            let page = cache.page(layer, position / KV_PAGE);
            let at = |i: usize| (40, i / 40, i % 40, position % KV_PAGE);
            let both = |(dim, head, channel, place)| {
                [page.key(dim, head, channel, place), page.value(dim, head, channel, place)]
            };
            (0..80).map(|i| both(at(i))).collect()
        };
        let mut written = Vec::new();
        for position in 0..100 {
            cache.reserve(position + 1).unwrap();
            for layer in 0..2 {
                let k: Vec<f32> = (0..80).map(|i| value(layer, position, i)).collect();
                let v: Vec<f32> = k.iter().map(|k| -2.0 * k).collect();
                cache.write(layer, position, &k, &v);
                let got = read(&cache, layer, position);
                for (i, [got_k, got_v]) in got.iter().enumerate() {
                    let first = i / 40 * 40 + i % 40 / KV_BLOCK * KV_BLOCK;
                    let block = &k[first..(first + KV_BLOCK).min(i / 40 * 40 + 40)];
                    let largest = block.iter().fold(0.0f32, |m, x| m.max(x.abs()));
                    let k = k[i];
                    assert!((got_k - k).abs() <= largest / 250.0, "{position} {i}: {got_k} for {k}");
                    assert!((got_v + 2.0 * k).abs() <= largest / 125.0, "{position} {i}: {got_v} for {k}");
                }
                written.push((layer, position, got));
            }
            cache.commit(position + 1);
        }
        assert!(written.iter().all(|(layer, position, was)| read(&cache, *layer, *position) == *was));
        // 80 codes and four scales, keys and values, two layers, two pages.
        assert_eq!(cache.bytes(), 2 * 64 * 2 * 2 * (80 + 4 * 2));
    }
}
