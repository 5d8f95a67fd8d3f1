//! aarch64: NEON, and NEON with the dot-product extension.

mod neon;

pub use neon::{Neon, NeonDot};
