//! aarch64: NEON, and NEON with the dot-product and the 8-bit matrix extension.

mod neon;

pub use neon::{Neon, NeonDot, NeonI8mm};
