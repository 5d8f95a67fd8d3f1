//! Runtime.

pub mod model;
