//! Quantised activations in the order in which a kernel reads them.
//!
//! A kernel multiplies a tile of up to 8 tokens with the same weights. All that it needs for 32 columns of a tile
//! lies together: one stream to read, one address to keep. The values are those of
//! [`neuropil_device::quant::quantize_activations`].
//!
//! Tokens are cut in tiles of 8, then one each of 4, 2 and 1 as needed. A tile of height h has for each 32 columns a
//! record of codes, `f32 d[h]`, `f32 d·sum[h]`, `i32 start[5][h]`, `u32 fine[h]`. The codes are `i8 q[32]` for one token;
//! else `i8 q[h / 2][4][2][8]`: two tokens take turns with 8 codes each, which is a register of an instruction that
//! multiplies matrices of 2 × 8. The starts are what products with weight codes start from that are too large by an
//! offset: -8, -16 and -128 times the sum of all codes, and -32 times the sum of the first 16 and of the last.
//!
//! Behind these records come as many again for the refinements. They hold something only where `fine` says that a token
//! of the tile is refined in this block; there the scale of the others is 0.
//!
//! A single row is remembered: the jobs of a layer's neurons, computed as they arrive, have the same input one after the
//! other, and comparing it takes a tenth of the time of quantising it.

use crate::arch::Isa;
use crate::mem::Claims;
use neuropil_device::quant::ACT_BLOCK;
use neuropil_device::{AlignedBytes, OutOfMemory};

/// Tokens in a full tile.
pub(crate) const TILE: usize = 8;
/// Bytes of 32 columns of one token.
pub(crate) const RECORD: usize = field::FINE + 4;

/// Where the fields of a record lie: bytes of one token before each.
pub(crate) mod field {
    pub(crate) const SCALE: usize = neuropil_device::quant::ACT_BLOCK;
    pub(crate) const SCALED_SUM: usize = SCALE + 4;
    pub(crate) const STARTS: usize = SCALED_SUM + 4;
    pub(crate) const FINE: usize = STARTS + 5 * 4;
}

/// Height of the tile that starts at token `start`.
pub(crate) fn tile_height(start: usize, tokens: usize) -> usize {
    match tokens - start {
        8.. => 8,
        4.. => 4,
        2.. => 2,
        rest => rest,
    }
}

/// Where the codes of token `t` begin in a record of height `h`.
pub(crate) const fn codes_at(h: usize, t: usize) -> usize {
    if h == 1 { 0 } else { t / 2 * 2 * ACT_BLOCK + t % 2 * 8 }
}

/// How far apart each 8 codes of a token lie in a record of height `h`.
pub(crate) const fn eights(h: usize) -> usize {
    if h == 1 { 8 } else { 16 }
}

/// Bytes of all records of one token.
fn token_bytes(cols: usize) -> usize {
    2 * (cols / ACT_BLOCK) * RECORD
}

/// The quantised activations of some tokens. The memory is kept from use to use.
#[derive(Debug)]
pub struct Activations {
    bytes: AlignedBytes,
    tokens: usize,
    cols: usize,
    /// The row that [`Activations::quantize_row`] quantised, if that was the last use.
    row: Vec<f32>,
}

impl Activations {
    /// No tokens yet.
    pub fn new() -> Result<Self, OutOfMemory> {
        Ok(Activations { bytes: AlignedBytes::zeroed(0)?, tokens: 0, cols: 0, row: Vec::new() })
    }

    /// Makes room for `tokens` × `cols` activations. Allocates only when there was never room for as many.
    ///
    /// # Panics
    /// When `cols` is no multiple of 32.
    pub fn reserve(&mut self, tokens: usize, cols: usize) -> Result<(), OutOfMemory> {
        assert!(cols.is_multiple_of(ACT_BLOCK), "{cols} activations are not blocks of {ACT_BLOCK}");
        self.row.clear();
        let too_much = OutOfMemory(usize::MAX);
        let len = token_bytes(cols).checked_mul(tokens).ok_or(too_much)?;
        if len > self.bytes.as_ref().len() {
            self.bytes = AlignedBytes::zeroed(len)?;
        }
        (self.tokens, self.cols) = (tokens, cols);
        Ok(())
    }

    /// Tokens.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Activations per token.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Makes room for a single row and quantises it, unless it is the one that is here already.
    pub fn quantize_row(&mut self, isa: Isa, x: &[f32]) -> Result<(), OutOfMemory> {
        let [old, new]: [&[u8]; 2] = [bytemuck::cast_slice(&self.row), bytemuck::cast_slice(x)];
        if old == new && !new.is_empty() {
            return Ok(());
        }
        self.reserve(1, x.len())?;
        self.quantize(isa, x);
        self.row.try_reserve(x.len()).map_err(|_| OutOfMemory(size_of_val(x)))?;
        self.row.extend_from_slice(x);
        Ok(())
    }

    /// Quantises `x[tokens, cols]` on the calling thread.
    ///
    /// # Panics
    /// When `x` has another length.
    pub fn quantize(&mut self, isa: Isa, x: &[f32]) {
        let parts = self.parts(x);
        while parts.quantize_next(isa) {}
    }

    /// Prepares to quantise `x[tokens, cols]` on several threads.
    ///
    /// # Panics
    /// When `x` has another length.
    pub fn parts<'a>(&'a mut self, x: &'a [f32]) -> ActivationParts<'a> {
        assert_eq!(Some(x.len()), self.tokens.checked_mul(self.cols), "x is tokens x cols");
        let (tokens, cols) = (self.tokens, self.cols);
        let len = tokens * token_bytes(cols);
        ActivationParts { x, tokens, cols, claims: Claims::new(&mut self.bytes.as_mut()[..len]) }
    }

    /// The records of the tile that starts at token `start`, for all columns, and those of its refinements.
    pub(crate) fn tile(&self, start: usize) -> &[u8] {
        let token = token_bytes(self.cols);
        &self.bytes.as_ref()[start * token..][..tile_height(start, self.tokens) * token]
    }
}

/// Activations that are being quantised; threads share it and each takes parts until none is left.
#[derive(Debug)]
pub struct ActivationParts<'a> {
    x: &'a [f32],
    tokens: usize,
    cols: usize,
    claims: Claims<'a, u8>,
}

impl ActivationParts<'_> {
    /// Quantises the next tile: a row's outliers are known only when all of it was seen. False when nothing was left.
    pub fn quantize_next(&self, isa: Isa) -> bool {
        let token_bytes = token_bytes(self.cols);
        let height = |at: usize| tile_height(at / token_bytes, self.tokens);
        let piece = self.claims.claim(|at| at + height(at) * token_bytes);
        let Some((at, records)) = piece else { return false };
        isa.quantize(&self.x[at / token_bytes * self.cols..], self.cols, height(at), records);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use neuropil_device::quant::{QuantizedRow, quantize_activations};

    /// The value of one field of a record.
    fn value<const N: usize>(tile: &[u8], height: usize, block: usize, offset: usize, t: usize) -> [u8; N] {
        let at = block * height * RECORD + height * offset + t * N;
        tile[at..][..N].try_into().unwrap()
    }

    fn check(acts: &Activations, x: &[f32]) {
        let (tokens, cols) = (acts.tokens(), acts.cols());
        let blocks = cols / ACT_BLOCK;
        let mut start = 0;
        while start < tokens {
            let height = tile_height(start, tokens);
            let tile = acts.tile(start);
            let rows: Vec<_> =
                (start..start + height).map(|t| quantize_activations(&x[t * cols..][..cols])).collect();
            for b in 0..blocks {
                let fine = rows.iter().any(|(_, fine)| fine.d[b] != 0.0);
                for (t, (row, refinement)) in rows.iter().enumerate() {
                    let flag = u32::from_le_bytes(value(tile, height, b, field::FINE, t));
                    assert_eq!(flag, u32::from(fine));
                    check_record(tile, height, b, t, row, b);
                    if fine {
                        check_record(tile, height, blocks + b, t, refinement, b);
                    }
                }
            }
            start += height;
        }
    }

    /// Compares token `t` of the `at`-th record of a tile with block `b` of a row.
    fn check_record(tile: &[u8], height: usize, at: usize, t: usize, row: &QuantizedRow, b: usize) {
        let eights: [[u8; 8]; 4] = std::array::from_fn(|n| {
            let at = at * height * RECORD + codes_at(height, t) + n * eights(height);
            tile[at..][..8].try_into().unwrap()
        });
        let want: &[i8] = &row.q[b * 32..][..32];
        let float = |offset| f32::from_le_bytes(value(tile, height, at, offset, t));
        let same = |a: f32, b: f32| a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan();
        assert!(same(float(field::SCALE), row.d[b]));
        if row.d[b] == 0.0 {
            return;
        }
        assert_eq!(bytemuck::cast_slice::<u8, i8>(eights.as_flattened()), want);
        assert!(same(float(field::SCALED_SUM), row.d[b] * row.sum[b] as f32));
        let low: i32 = want[..16].iter().map(|q| i32::from(*q)).sum();
        let high = row.sum[b] - low;
        for (n, want) in [-8 * row.sum[b], -16 * row.sum[b], -128 * row.sum[b], -32 * low, -32 * high]
            .into_iter()
            .enumerate()
        {
            assert_eq!(i32::from_le_bytes(value(tile, height, at, field::STARTS + 4 * n, t)), want);
        }
    }

    #[test]
    fn every_instruction_set_quantises_like_the_reference() {
        let mut acts = Activations::new().unwrap();
        for isa in Isa::all_available() {
            for tokens in [1, 2, 3, 7, 8, 9, 21] {
                let cols = 320;
                let mut x: Vec<f32> =
                    (0..tokens * cols).map(|i| ((i * 7919 % 1009) as f32 - 504.0) * 0.01).collect();
                x[..32].fill(0.0);
                x[5] = -0.0;
                x[40] = 127.0;
                x[cols - 1] = -90.0;
                x[41] = 0.5;
                x[42] = -1.5;
                if tokens > 1 {
                    x[cols + 3] = f32::NAN;
                    x[cols + 33] = f32::INFINITY;
                    x[cols + 64..cols + 96].fill(-3e-37);
                    x[cols + 64] = 1e-45;
                }
                acts.reserve(tokens, cols).unwrap();
                acts.quantize(isa, &x);
                check(&acts, &x);
            }
        }
    }

    #[test]
    fn a_row_that_is_here_is_kept_and_no_other() {
        let mut acts = Activations::new().unwrap();
        let row =
            |seed: f32, cols: usize| -> Vec<f32> { (0..cols).map(|i| (i as f32 * seed).sin()).collect() };
        let (a, mut b) = (row(0.1, 64), row(0.3, 64));
        for x in [&a, &a, &b, &row(0.1, 32), &a] {
            acts.quantize_row(Isa::detect(), x).unwrap();
            check(&acts, x);
        }
        b[63] = -b[63];
        acts.quantize_row(Isa::detect(), &b).unwrap();
        check(&acts, &b);
        // Another use in between.
        let two = row(0.7, 64);
        acts.reserve(2, 32).unwrap();
        acts.quantize(Isa::detect(), &two);
        check(&acts, &two);
        acts.quantize_row(Isa::detect(), &b).unwrap();
        check(&acts, &b);
    }

    #[test]
    fn threads_share_the_work() {
        let (tokens, cols) = (13, 320);
        let mut x: Vec<f32> = (0..tokens * cols).map(|i| (i as f32 * 0.1).sin()).collect();
        x.iter_mut().step_by(1500).for_each(|x| *x = 30.0);
        let mut acts = Activations::new().unwrap();
        acts.reserve(tokens, cols).unwrap();
        let parts = acts.parts(&x);
        std::thread::scope(|s| {
            for _ in 1..4 {
                let parts = &parts;
                s.spawn(move || while parts.quantize_next(Isa::detect()) {});
            }
        });
        check(&acts, &x);
    }
}
