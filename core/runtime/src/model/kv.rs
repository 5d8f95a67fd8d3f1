//! The cache of keys and values of one sequence.
//!
//! It grows page by page ([`KV_PAGE`] positions, all layers) as positions come, so a long context costs nothing until
//! it is used. Pages are shared between forks of a sequence (Best-of-N over one prompt) and copied when one of them
//! writes. The layout of a page is that of [`neuropil_device::KvPage`].

use std::sync::Arc;

use half::f16;
use neuropil_device::{KV_PAGE, KvPage, KvPages};

use crate::engine::EngineError;

use super::ModelError;

/// Precision of the cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum KvType {
    /// Half precision.
    #[default]
    F16,
    /// Single precision.
    F32,
}

impl KvType {
    fn element_bytes(self) -> usize {
        match self {
            KvType::F16 => 2,
            KvType::F32 => 4,
        }
    }
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

    /// Bytes of one page.
    pub fn page_bytes(&self) -> usize {
        2 * self.layers * self.plane() * self.kind.element_bytes()
    }
}

/// Keys then values of layer 0, keys then values of layer 1, and so on.
#[derive(Clone, Debug)]
enum Page {
    F16(Vec<f16>),
    F32(Vec<f32>),
}

impl Page {
    fn new(shape: &KvShape) -> Result<Page, ModelError> {
        let elements = 2 * shape.layers * shape.plane();
        Ok(match shape.kind {
            KvType::F16 => Page::F16(filled(elements, f16::ZERO)?),
            KvType::F32 => Page::F32(filled(elements, 0.0)?),
        })
    }

    fn copy(&self) -> Result<Page, ModelError> {
        Ok(match self {
            Page::F16(from) => Page::F16(copied(from)?),
            Page::F32(from) => Page::F32(copied(from)?),
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
    pages: Vec<Arc<Page>>,
    len: usize,
}

impl KvCache {
    /// An empty cache.
    pub fn new(shape: KvShape) -> KvCache {
        KvCache { shape, pages: Vec::new(), len: 0 }
    }

    /// Memory of its pages, those it shares with forks included.
    pub fn bytes(&self) -> usize {
        self.pages.len() * self.shape.page_bytes()
    }

    /// Another cache with the same positions, sharing the pages until one of the two writes.
    pub fn fork(&self) -> KvCache {
        KvCache { shape: self.shape, pages: self.pages.clone(), len: self.len }
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
            self.pages.push(Arc::new(Page::new(&self.shape)?));
        }
        for page in &mut self.pages[self.len / KV_PAGE..pages] {
            if Arc::get_mut(page).is_none() {
                *page = Arc::new(page.copy()?);
            }
        }
        Ok(())
    }

    /// Writes one position of one layer; `k` and `v` are `[kv_heads, head_dim]`. The position must be reserved.
    pub fn write(&mut self, layer: usize, position: usize, k: &[f32], v: &[f32]) {
        let KvShape { kv_heads, head_dim, .. } = self.shape;
        let plane = self.shape.plane();
        let place = position % KV_PAGE;
        let page = self.pages.get_mut(position / KV_PAGE).and_then(Arc::get_mut);
        match page.expect("a position is reserved before it is written") {
            Page::F16(data) => {
                let (to_k, to_v) = data[2 * layer * plane..][..2 * plane].split_at_mut(plane);
                scatter(kv_heads, head_dim, place, k, v, to_k, to_v, f16::from_f32);
            }
            Page::F32(data) => {
                let (to_k, to_v) = data[2 * layer * plane..][..2 * plane].split_at_mut(plane);
                scatter(kv_heads, head_dim, place, k, v, to_k, to_v, |x| x);
            }
        }
    }

    /// Declares the positions up to `len` written in every layer.
    pub fn commit(&mut self, len: usize) {
        debug_assert!(len >= self.len && len <= self.pages.len() * KV_PAGE);
        self.len = len;
    }

    fn page(&self, layer: usize, index: usize) -> KvPage<'_> {
        let plane = self.shape.plane();
        let at = 2 * layer * plane;
        match &*self.pages[index] {
            Page::F16(data) => KvPage::F16 { k: &data[at..at + plane], v: &data[at + plane..at + 2 * plane] },
            Page::F32(data) => KvPage::F32 { k: &data[at..at + plane], v: &data[at + plane..at + 2 * plane] },
        }
    }
}

#[allow(clippy::too_many_arguments)] // two sources, two destinations and the place between them
fn scatter<T>(
    kv_heads: usize,
    head_dim: usize,
    place: usize,
    k: &[f32],
    v: &[f32],
    to_k: &mut [T],
    to_v: &mut [T],
    convert: impl Fn(f32) -> T,
) {
    for (x, column) in k.iter().zip(to_k.chunks_exact_mut(KV_PAGE)) {
        column[place] = convert(*x);
    }
    for head in 0..kv_heads {
        let to = &mut to_v[(head * KV_PAGE + place) * head_dim..][..head_dim];
        to.iter_mut().zip(&v[head * head_dim..]).for_each(|(to, x)| *to = convert(*x));
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
        for kind in [KvType::F16, KvType::F32] {
            let mut a = KvCache::new(KvShape { layers: 2, kv_heads: 2, head_dim: 3, kind });
            (0..70).for_each(|i| push(&mut a, i as f32));
            let mut b = a.fork();
            push(&mut a, 100.0);
            push(&mut b, 200.0);
            assert_eq!((key(&a, 70), key(&b, 70)), (100.0, 200.0));
            assert_eq!((key(&a, 69), key(&b, 69)), (69.0, 69.0));
            assert!(Arc::ptr_eq(&a.pages[0], &b.pages[0]), "a full page stays shared");
            b.truncate(10);
            push(&mut b, 7.0);
            assert_eq!((key(&a, 10), key(&b, 10), b.len), (10.0, 7.0, 11));
        }
    }
}
