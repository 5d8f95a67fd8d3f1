//! From a text to its id.
//!
//! An open table of 32-bit ids over texts that lie elsewhere: four bytes a slot, no copies of the texts. The hash has
//! a random key, so that neither a model file nor a prompt can be made to collide.

use std::hash::{BuildHasher, RandomState};

use super::TokenizerError;
use super::error::reserve;
use super::vocabulary::TextList;

/// No id.
pub(super) const NONE: u32 = u32::MAX;

/// Finds texts of one [`TextList`], which every method is given again.
pub(super) struct TextIndex {
    slots: Vec<u32>,
    used: usize,
    state: RandomState,
}

impl TextIndex {
    /// An index with room for `texts` texts.
    pub fn with_room(texts: usize) -> Result<Self, TokenizerError> {
        let mut index = Self { slots: Vec::new(), used: 0, state: RandomState::new() };
        index.allocate(texts)?;
        Ok(index)
    }

    fn allocate(&mut self, texts: usize) -> Result<(), TokenizerError> {
        let size = texts.saturating_mul(2).max(16).next_power_of_two();
        let mut slots = Vec::new();
        reserve(&mut slots, size, "the index of the vocabulary")?;
        slots.resize(size, NONE);
        self.slots = slots;
        Ok(())
    }

    /// The slot that holds `text`, or the free one where it belongs.
    fn slot(&self, texts: &TextList, text: &[u8]) -> usize {
        let mask = self.slots.len() - 1;
        let mut at = self.state.hash_one(text) as usize & mask;
        while self.slots[at] != NONE && texts.get(self.slots[at] as usize) != Some(text) {
            at = (at + 1) & mask;
        }
        at
    }

    /// The id of `text`.
    pub fn get(&self, texts: &TextList, text: &[u8]) -> Option<u32> {
        let id = self.slots[self.slot(texts, text)];
        (id != NONE).then_some(id)
    }

    /// Adds text `id` of `texts`. Of equal texts the first one stays. Returns the id that the text has now.
    pub fn insert(&mut self, texts: &TextList, id: u32) -> Result<u32, TokenizerError> {
        let Some(text) = texts.get(id as usize) else { return Ok(NONE) };
        if self.used * 2 >= self.slots.len() {
            let old = std::mem::take(&mut self.slots);
            self.allocate(old.len())?;
            for id in old.into_iter().filter(|&id| id != NONE) {
                let at = texts.get(id as usize).map(|text| self.slot(texts, text));
                if let Some(at) = at {
                    self.slots[at] = id;
                }
            }
        }
        let at = self.slot(texts, text);
        if self.slots[at] == NONE {
            self.slots[at] = id;
            self.used += 1;
        }
        Ok(self.slots[at])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_what_was_put_in_across_growth() {
        let texts = TextList::collect((0..1000).map(|i| i.to_string())).unwrap();
        let mut index = TextIndex::with_room(3).unwrap();
        for id in 0..1000 {
            assert_eq!(index.insert(&texts, id).unwrap(), id);
        }
        for id in 0..1000 {
            assert_eq!(index.get(&texts, id.to_string().as_bytes()), Some(id));
        }
        assert_eq!(index.get(&texts, b"1000"), None);
        assert_eq!(index.get(&texts, b""), None);
    }

    #[test]
    fn the_first_of_equal_texts_stays() {
        let texts = TextList::collect(["a", "b", "a"]).unwrap();
        let mut index = TextIndex::with_room(3).unwrap();
        let ids: Vec<_> = (0..3).map(|id| index.insert(&texts, id).unwrap()).collect();
        assert_eq!(ids, [0, 1, 0]);
    }
}
