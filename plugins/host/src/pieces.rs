//! Token counts and buckets: a unit has graphs for a few counts only, so a long input is cut into pieces, and a piece
//! that is too short is filled up.

/// Tokens of each piece, in order: the buckets that are run. They hold at least `tokens`, and only the last one more.
///
/// A rest that would fill a quarter of its bucket is filled up; a smaller one goes to smaller buckets.
pub(crate) fn pieces(tokens: usize, buckets: &[usize]) -> Vec<usize> {
    let mut pieces = Vec::new();
    let mut left = tokens;
    while left > 0 {
        let above = buckets.iter().find(|bucket| **bucket >= left);
        let below = buckets.iter().rev().find(|bucket| **bucket <= left);
        let piece = match (above, below) {
            (None, None) => left,
            (Some(above), None) => *above,
            (None, Some(below)) => *below,
            (Some(above), Some(below)) => {
                if left >= above.div_ceil(4) {
                    *above
                } else {
                    *below
                }
            }
        };
        pieces.push(piece);
        left = left.saturating_sub(piece);
    }
    pieces
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn inputs_are_cut_and_filled_up() {
        assert_eq!(pieces(0, &[1, 16]), [0; 0]);
        assert_eq!(pieces(77, &[]), [77]);
        assert_eq!(pieces(512, &[1, 16, 128]), [128; 4]);
        assert_eq!(pieces(100, &[1, 16, 128]), [128]);
        assert_eq!(pieces(20, &[1, 16, 128]), [16, 16]);
        assert_eq!(pieces(19, &[1, 16, 128]), [16, 1, 1, 1]);
        assert_eq!(pieces(129, &[128]), [128, 128]);
        assert_eq!(pieces(3, &[128]), [128]);
        for tokens in 1..600 {
            let cut = pieces(tokens, &[4, 32, 100]);
            let (last, before) = cut.split_last().unwrap();
            let before: usize = before.iter().sum();
            assert!(before < tokens && before + last >= tokens, "{tokens}");
        }
    }
}
