//! Write a neuropil plugin in safe Rust.
//!
//! Implement [`PluginBackend`] (which units are there) and [`PluginDevice`] (what one of them does), and name the former
//! in [`export_plugin!`]. A crate of type `cdylib` is then a plugin:
//!
//! ```
//! use neuropil_plugin_sdk::*;
//!
//! struct Twice;
//! struct Unit;
//!
//! impl PluginBackend for Twice {
//!     const NAME: &'static str = "twice";
//!     const VERSION: &'static str = "1.0";
//!     type Device = Unit;
//!
//!     fn new(_log: Log) -> Twice {
//!         Twice
//!     }
//!     fn probe(&self, options: &Options) -> Result<Vec<DeviceInfo>, Error> {
//!         options.check(&[])?;
//!         Ok(vec![DeviceInfo { name: "a unit of two loops".into(), ..Default::default() }])
//!     }
//!     fn open(&self, index: usize, _options: &Options) -> Result<Unit, Error> {
//!         if index == 0 { Ok(Unit) } else { Err(Error::invalid("there is one unit, of index 0")) }
//!     }
//! }
//!
//! impl PluginDevice for Unit {
//!     type Weight = Vec<f32>;
//!
//!     fn info(&self) -> DeviceInfo {
//!         DeviceInfo { name: "a unit of two loops".into(), ..Default::default() }
//!     }
//!     fn query(&self, query: &Query) -> Result<Support, Error> {
//!         match query {
//!             Query::Matmul { scheme: Scheme::F32, .. } => Ok(Support::NATIVE),
//!             _ => Err(Error::unsupported("f32 matrices only")),
//!         }
//!     }
//!     fn prepare(&self, source: &WeightSource<'_>) -> Result<Prepared<Vec<f32>>, Error> {
//!         let Matrices::One(matrix) = &source.matrices else {
//!             return Err(Error::unsupported("matrices only"));
//!         };
//!         let mut weight = vec![0.0; matrix.rows * matrix.cols];
//!         for (row, out) in weight.chunks_exact_mut(matrix.cols).enumerate() {
//!             matrix.widen_row(row, out);
//!         }
//!         let bytes = weight.len() as u64 * 4;
//!         Ok(Prepared { weight, bytes })
//!     }
//!     fn matmul(&self, job: &mut MatmulJob<'_, Vec<f32>>) -> Result<Report, Error> {
//!         for product in &mut job.products {
//!             let rows = product.y.values.chunks_exact_mut(product.rows);
//!             for (x, y) in job.x.values.chunks_exact(job.cols).zip(rows) {
//!                 for (w, y) in product.weight.chunks_exact(job.cols).zip(y) {
//!                     *y = w.iter().zip(x).map(|(w, x)| w * x).sum();
//!                 }
//!             }
//!         }
//!         Ok(Report::default())
//!     }
//! }
//!
//! export_plugin!(Twice);
//! # fn main() {}
//! ```
//!
//! The SDK stands at the border: it catches panics, checks every length, shape, handle and token count before a method
//! of yours sees them, keeps weights by number and not by address, and remembers that a unit is lost. So a plugin has no
//! unsafe code but what its vendor's library needs.
//!
//! `cluster`, submission, saved plans and imported memory are extras: name those that you implement in
//! [`PluginDevice::OFFERS`].

#![deny(unsafe_code)]

mod backend;
#[allow(unsafe_code)]
mod border;
mod error;
mod info;
mod job;
mod matrix;
mod plan;

pub use backend::{Offers, PluginBackend, PluginDevice, Prepared, Region};
pub use border::{Level, Log};
pub use error::{Code, Error};
pub use info::{DeviceInfo, DeviceKind, Options, Query, Report, Support};
pub use job::{
    Activation, ActivationKind, ClusterJob, Deadline, Input, MatmulJob, Output, Placed, Product, Stage,
};
pub use matrix::{GROUP, Matrices, Matrix, Outliers, Scheme, Shape, WeightSource, f16_at, f32_at, int4_at};

/// What `export_plugin!` expands to needs these.
#[doc(hidden)]
pub mod export {
    pub use crate::border::{Export, Exported};
    pub use neuropil_plugin_abi::{NpHost, NpPlugin};
}
