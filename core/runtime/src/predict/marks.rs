//! One bit per token and neuron: may it fire?

/// Marks of some tokens over the neurons of one layer.
#[derive(Clone, Debug, Default)]
pub struct Marks {
    words: Vec<u64>,
    per_token: usize,
    neurons: usize,
}

impl Marks {
    /// Clears the marks and sets their shape.
    pub fn reset(&mut self, tokens: usize, neurons: usize) {
        (self.per_token, self.neurons) = (neurons.div_ceil(64), neurons);
        self.words.clear();
        self.words.resize(tokens * self.per_token, 0);
    }

    /// Neurons per token.
    pub fn neurons(&self) -> usize {
        self.neurons
    }

    /// Marks the neurons of a token whose score is above the threshold, or not a number: a broken score hides nothing.
    pub fn above(&mut self, token: usize, scores: &[f32], threshold: f32) {
        let words = &mut self.words[token * self.per_token..][..self.per_token];
        for (word, scores) in words.iter_mut().zip(scores[..self.neurons].chunks(64)) {
            for (bit, score) in scores.iter().enumerate() {
                *word |= u64::from(*score > threshold || score.is_nan()) << bit;
            }
        }
    }

    /// Marks the first `count` neurons of a token.
    pub fn first(&mut self, token: usize, count: usize) {
        (0..count.min(self.neurons)).for_each(|neuron| self.mark(token, neuron));
    }

    /// Marks one neuron of a token.
    pub fn mark(&mut self, token: usize, neuron: usize) {
        self.words[token * self.per_token + neuron / 64] |= 1 << (neuron % 64);
    }

    /// Whether a neuron of a token is marked.
    #[inline]
    pub fn is_marked(&self, token: usize, neuron: usize) -> bool {
        self.words[token * self.per_token + neuron / 64] >> (neuron % 64) & 1 == 1
    }

    /// Marks of a token.
    pub fn count(&self, token: usize) -> usize {
        let words = &self.words[token * self.per_token..][..self.per_token];
        words.iter().map(|word| word.count_ones() as usize).sum()
    }

    /// Lists, ascending, the neurons that are marked for any token.
    pub fn union(&self, list: &mut Vec<u32>) {
        list.clear();
        for index in 0..self.per_token {
            let mut word =
                self.words.iter().skip(index).step_by(self.per_token).fold(0, |all, word| all | word);
            while word != 0 {
                list.push((64 * index) as u32 + word.trailing_zeros());
                word &= word - 1;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_union_lists_what_any_token_marked() {
        let mut marks = Marks::default();
        marks.reset(2, 130);
        let mut scores = vec![-1.0; 130];
        (scores[3], scores[64], scores[129]) = (1.0, f32::NAN, 0.5);
        marks.above(0, &scores, 0.0);
        marks.first(1, 2);
        marks.mark(1, 64);
        let mut list = vec![9; 3];
        marks.union(&mut list);
        assert_eq!(list, [0, 1, 3, 64, 129]);
        assert_eq!((marks.count(0), marks.count(1)), (3, 3));
        assert!(marks.is_marked(0, 129) && !marks.is_marked(1, 129));
        marks.reset(1, 4);
        marks.union(&mut list);
        assert!(list.is_empty());
    }
}
