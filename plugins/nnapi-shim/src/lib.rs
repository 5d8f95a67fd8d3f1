//! A strict stand-in for Android's `libneuralnetworks.so`, for tests on machines that have no such library.
//!
//! It exports the C functions under their real names, computes on the CPU in plain Rust, and checks its client harder than
//! a phone would: states, sizes, lifetimes, shared use. A second, small set of functions lets tests inject faults and
//! read counters ([`control`]).
//!
//! ```text
//!   c           the exported C functions: pointers in, codes out
//!     model       operands and operations       check   what an operation asks of its operands
//!     compile     a model made ready            cache   compiled models on disk
//!     execution   one run, its states           ops     the arithmetic
//!     memory      mapped files, opaque buffers  peek    client memory, read without trust
//!   world       the tables of live handles, the counters, the lock
//!   control     faults and counters for tests   devices what the machine pretends to have
//!   symbols     which function came with which level
//! ```
//!
//! One process has one world behind one lock, as the real library has: a C interface with bare handles leaves no other
//! place for it. Handles are numbers that are never dereferenced, so a stale one is found, counted and refused.
//!
//! It needs Linux, for files in memory and for `/proc`; elsewhere the crate is empty.

#![cfg(target_os = "linux")]

pub mod c;
mod cache;
mod check;
pub mod codes;
mod compile;
pub mod control;
mod desc;
mod devices;
mod execution;
mod faults;
mod memory;
mod model;
mod operand;
mod ops;
mod peek;
mod run;
pub mod symbols;
mod world;
