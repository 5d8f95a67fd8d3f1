//! A prepared weight, as the host keeps it.

use std::path::PathBuf;

use crate::projection::Projection;
use crate::worker::Held;

/// One weight of the plugin, with the token counts that there are graphs for; none for any.
pub(crate) struct Part {
    pub held: Held,
    pub buckets: Vec<usize>,
    /// What results of a matrix are checked with; a block has no such thing.
    pub projection: Option<Projection>,
    /// The file that its plan is kept in.
    pub plan: Option<PathBuf>,
}

/// What a [`neuropil_device::PreparedWeight`] of a plugin is.
pub(crate) enum Weight {
    /// For matmuls.
    Matrix(Part),
    /// A block of neurons that the unit runs whole.
    Block(Part),
    /// A block of neurons of a unit that only multiplies: gate, up and down.
    Apart(Box<[Part; 3]>),
}
