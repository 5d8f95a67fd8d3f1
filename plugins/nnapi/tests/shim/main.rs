//! The plugin through the C border, against a strict stand-in of NNAPI. No real NNAPI is behind this.

#![cfg(any(target_os = "android", target_os = "linux"))]

mod cache;
mod conformance;
mod faults;
mod kit;
mod levels;
mod memory;
mod products;
