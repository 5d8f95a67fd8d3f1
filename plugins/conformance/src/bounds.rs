//! How wrong a product may be.
//!
//! A unit may compute in less than F32: bounds let honest arithmetic of its class pass, and catch a wrong tile, scale or
//! channel. An error is that of one output row over all tokens, relative to the root of the sum of the squared terms of
//! its sums. Rounding stays small against that also where a sum cancels.
//!
//! | class   | errors up to | what reaches it, with the worst error that was measured                      |
//! |---------|--------------|------------------------------------------------------------------------------|
//! | `exact` | 2e-5         | F32 arithmetic, in any order of the sum (1e-6)                               |
//! | `f16`   | 3e-3         | F16 (1e-3), inputs as 16-bit integers (6e-5)                                 |
//! | `int8`  | 6e-2         | 8-bit inputs with a scale per token (1.1e-2), BF16 (9e-3), 8-bit outputs too (5.6e-2) |
//!
//! | weights                             | products       | feed-forwards  |
//! |-------------------------------------|----------------|----------------|
//! | `f32 f16 bf16`                      | 2e-2           | 4e-2           |
//! | schemes and types with codes        | 6e-2           | 1.2e-1         |
//!
//! For comparison: one column of 100 left out is an error of about 0.1, another scale for one group of ten 0.1 to 0.3,
//! the scale of another channel 0.5. A feed-forward is compared with its own reference, in which the errors of its
//! products go through the non-linearity.

use crate::report::Precision;
use crate::sample::Kind;

/// Below this an output counts as nothing: for inputs of zeros and denormals, which a unit may flush.
pub const NOTHING: f64 = 1e-6;

/// A row whose terms are small has at least this share of the size of the greatest row as its own, and of what the
/// lengths of the greatest row of the matrix and of the input make likely: a unit may round all outputs alike, and a host
/// may have put a group of weights into another scheme.
pub const LEAST_SHARE: f64 = 1.0 / 3.0;

const EXACT: f64 = 2e-5;
const F16: f64 = 3e-3;
const INT8: f64 = 6e-2;

const OF_FLOATS: f64 = 2e-2;
const OF_CODES: f64 = INT8;

/// The class of an error.
pub fn precision(error: f64) -> Precision {
    match error {
        error if error <= EXACT => Precision::Exact,
        error if error <= F16 => Precision::F16,
        error if error <= INT8 => Precision::Int8,
        _ => Precision::None,
    }
}

/// Largest error of a product.
pub fn product(kind: Kind) -> f64 {
    if kind.is_float() { OF_FLOATS } else { OF_CODES }
}

/// Largest error of a stage of a feed-forward.
pub fn cluster(kind: Kind, down: Kind) -> f64 {
    2.0 * product(kind).max(product(down))
}
