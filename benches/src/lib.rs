//! What the benches share: timing, the machine's own limits, and products on the kernels.
//!
//! A speed says little without the most that the machine can do, and that differs from hour to hour on a machine that
//! others use too. So the limits are measured here, by the same code in every bench and in the same run.

#![deny(unsafe_code)]

#[allow(unsafe_code)]
mod loops;
pub mod measure;
pub mod products;
pub mod roofline;
