//! The CPU backend of neuropil.

#![deny(unsafe_code)]

mod pool;
mod topology;
