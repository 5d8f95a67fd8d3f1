//! The stand-in, driven through its C functions only.

#![cfg(target_os = "linux")]

mod faults;
mod kit;
mod levels;
mod lifetimes;
mod memory;
mod numbers;
mod refusals;
mod storm;
