//! The work a device can be given: two kinds, and a third for units that pay for each round trip.
//!
//! **Polymorphic by data.** Prefill is one cluster with all neurons and many tokens, decode is many small clusters
//! and few tokens; the same job serves both, and the scheduler decides who gets which. Inputs and outputs are F32,
//! token after token. A job owns leases on what it reads and writes; weights are the device's own, made by
//! [`crate::Device::prepare`].

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use crate::quant::bundle_row_bytes;
use crate::{Activation, Buffer, DType, DeviceError, DeviceId, PinnedSlots, ReadLease, WriteLease};

/// Where the bytes of a matrix come from: memory, or a file. A device reads it piece by piece, from any thread and
/// in any order, while it packs or uploads; so a weight is never in memory twice.
pub trait RowSource: Sync {
    /// Bytes in all.
    fn len(&self) -> usize;

    /// Whether there are none.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Copies the `out.len()` bytes that start at byte `offset`.
    ///
    /// # Errors
    /// [`DeviceError::Source`] when they cannot be had.
    fn read(&self, offset: usize, out: &mut [u8]) -> Result<(), DeviceError>;
}

impl RowSource for &[u8] {
    fn len(&self) -> usize {
        <[u8]>::len(self)
    }

    fn read(&self, offset: usize, out: &mut [u8]) -> Result<(), DeviceError> {
        let bytes = offset.checked_add(out.len()).and_then(|end| self.get(offset..end));
        let bytes = bytes.ok_or_else(|| DeviceError::Source { reason: "the weight is too short".into() })?;
        out.copy_from_slice(bytes);
        Ok(())
    }
}

impl RowSource for Vec<u8> {
    fn len(&self) -> usize {
        self.len()
    }

    fn read(&self, offset: usize, out: &mut [u8]) -> Result<(), DeviceError> {
        self.as_slice().read(offset, out)
    }
}

/// A matrix as it lies in a model file: `rows` rows of `cols` elements, row after row.
#[derive(Clone, Copy)]
pub struct Matrix<'a> {
    /// Element type.
    pub dtype: DType,
    /// Rows: outputs of a matmul.
    pub rows: usize,
    /// Columns: inputs of a matmul.
    pub cols: usize,
    /// `dtype.matrix_bytes(rows, cols)` bytes.
    pub data: &'a dyn RowSource,
}

impl Matrix<'_> {
    /// Checks that the bytes are those of the type and shape, and that there are some.
    ///
    /// # Errors
    /// [`DeviceError::Shape`].
    pub fn check(&self) -> Result<(), DeviceError> {
        if !self.data.is_empty() && self.dtype.matrix_bytes(self.rows, self.cols) == Some(self.data.len()) {
            return Ok(());
        }
        Err(DeviceError::Shape {
            dtype: self.dtype,
            rows: self.rows,
            cols: self.cols,
            bytes: self.data.len(),
        })
    }
}

/// What [`crate::Device::prepare`] packs, uploads or compiles.
#[derive(Clone, Copy)]
pub enum WeightSource<'a> {
    /// One matrix, for [`MatmulJob`].
    Matrix(Matrix<'a>),
    /// A block of neurons, for [`ClusterJob`]: gate and up are `neurons × width`, down is `width × neurons`.
    Neurons {
        /// One row per neuron.
        gate: Matrix<'a>,
        /// One row per neuron.
        up: Matrix<'a>,
        /// One column per neuron.
        down: Matrix<'a>,
    },
}

/// A weight in the layout of the device that made it. Cheap to clone: clones share the memory.
#[derive(Clone)]
pub struct PreparedWeight {
    device: DeviceId,
    shape: WeightShape,
    bytes: usize,
    imp: Arc<dyn Any + Send + Sync>,
}

/// What a prepared weight is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WeightShape {
    /// For [`MatmulJob`].
    Matrix {
        /// Outputs.
        rows: usize,
        /// Inputs.
        cols: usize,
    },
    /// For [`ClusterJob`].
    Neurons {
        /// Neurons in the block.
        neurons: usize,
        /// Width of the model.
        width: usize,
    },
}

impl WeightSource<'_> {
    /// The shape that the prepared weight will have.
    ///
    /// # Errors
    /// [`DeviceError::Shape`] when the bytes or the three matrices of a block do not match, or a matrix is empty.
    pub fn shape(&self) -> Result<WeightShape, DeviceError> {
        match self {
            WeightSource::Matrix(m) => {
                m.check()?;
                Ok(WeightShape::Matrix { rows: m.rows, cols: m.cols })
            }
            WeightSource::Neurons { gate, up, down } => {
                let (neurons, width) = (gate.rows, gate.cols);
                gate.check()?;
                Matrix { rows: neurons, cols: width, ..*up }.check()?;
                Matrix { rows: width, cols: neurons, ..*down }.check()?;
                Ok(WeightShape::Neurons { neurons, width })
            }
        }
    }
}

impl PreparedWeight {
    /// Wraps a device's own form of a weight; `bytes` is the memory it takes.
    pub fn new(
        device: DeviceId,
        shape: WeightShape,
        bytes: usize,
        imp: Arc<dyn Any + Send + Sync>,
    ) -> PreparedWeight {
        PreparedWeight { device, shape, bytes, imp }
    }

    /// What it is.
    pub fn shape(&self) -> WeightShape {
        self.shape
    }

    /// Memory it takes on its device.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// The own form of device `device`, which is called `name`.
    ///
    /// # Errors
    /// [`DeviceError::ForeignHandle`] when another device made it.
    pub fn downcast<T: Any + Send + Sync>(&self, device: DeviceId, name: &str) -> Result<&T, DeviceError> {
        let own = if self.device == device { self.imp.downcast_ref() } else { None };
        own.ok_or_else(|| DeviceError::ForeignHandle { device: name.into() })
    }

    /// The device's own form, if `device` made it and nobody else holds it: its memory may be reused.
    pub fn into_inner<T: Any + Send + Sync>(self, device: DeviceId) -> Option<T> {
        if self.device != device {
            return None;
        }
        self.imp.downcast::<T>().ok().and_then(Arc::into_inner)
    }
}

impl fmt::Debug for PreparedWeight {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PreparedWeight({:?}, {} bytes)", self.shape, self.bytes)
    }
}

/// One product of a [`MatmulJob`].
pub struct Product {
    /// A [`WeightShape::Matrix`] with as many columns as the job's input.
    pub weight: PreparedWeight,
    /// F32 `[tokens, rows]`.
    pub y: WriteLease,
    /// Add to `y` instead of overwriting it.
    pub accumulate: bool,
}

/// Most products that one [`MatmulJob`] holds.
pub const MAX_PRODUCTS: usize = 4;

/// `y[t, r] (+)= Σ_c w[r, c] · x[t, c]` for one input and up to [`MAX_PRODUCTS`] weights that share it, so that Q, K
/// and V are one job and the input is quantised once.
pub struct MatmulJob {
    /// Tokens: rows of `x` and of each `y`.
    pub tokens: usize,
    /// F32 `[tokens, cols]`.
    pub x: ReadLease,
    products: [Option<Product>; MAX_PRODUCTS],
}

impl MatmulJob {
    /// A job without products yet.
    pub fn new(tokens: usize, x: ReadLease) -> MatmulJob {
        MatmulJob { tokens, x, products: [const { None }; MAX_PRODUCTS] }
    }

    /// Adds a product.
    ///
    /// # Panics
    /// When the job already has [`MAX_PRODUCTS`].
    pub fn with(mut self, product: Product) -> MatmulJob {
        let free = self.products.iter_mut().find(|p| p.is_none());
        *free.expect("a matmul job holds at most four products; submit a second job") = Some(product);
        self
    }

    /// The products.
    pub fn products(&self) -> impl Iterator<Item = &Product> {
        self.products.iter().flatten()
    }

    /// The input and the products, to write the outputs.
    pub fn parts_mut(&mut self) -> (&ReadLease, impl Iterator<Item = &mut Product>) {
        (&self.x, self.products.iter_mut().flatten())
    }
}

/// Which part of a feed-forward layer a [`ClusterJob`] computes: one of its three products, or some that follow each
/// other. A job leaves in `hidden` what the next one needs, so neurons can be computed as their weights arrive: `GateUp`
/// for any of them at any time, then one `Down` for all.
///
/// However a layer is cut into stages, and its neurons into jobs, it has the bits of `Fused`, as long as jobs that sum
/// ([`Stage::has_down`]) are cut at slices of positions ([`crate::quant::SLICE`]) and overwrite or add in that order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Stage {
    /// `hidden = gate · x`, before the activation: enough to know which neurons fire.
    Gate,
    /// From `hidden` as left by `Gate`, in place: `hidden = act(hidden, up · x)`; 0 for a neuron that its gates switch
    /// off.
    Up,
    /// From `hidden` as left by `Up`: `y (+)= down · hidden`.
    Down,
    /// `Gate`, then `Up`.
    GateUp,
    /// `Up`, then `Down`, but `hidden` stays as left by `Gate`.
    UpDown,
    /// All in one go; needs no `hidden`.
    Fused,
}

impl Stage {
    /// Every stage.
    pub const ALL: [Stage; 6] =
        [Stage::Gate, Stage::Up, Stage::Down, Stage::GateUp, Stage::UpDown, Stage::Fused];

    /// Its name in reports.
    pub fn name(self) -> &'static str {
        match self {
            Stage::Gate => "gate",
            Stage::Up => "up",
            Stage::Down => "down",
            Stage::GateUp => "gate+up",
            Stage::UpDown => "up+down",
            Stage::Fused => "ffn",
        }
    }

    /// Whether gate rows are multiplied.
    pub fn has_gate(self) -> bool {
        matches!(self, Stage::Gate | Stage::GateUp | Stage::Fused)
    }

    /// Whether up rows are multiplied, and the activation is applied.
    pub fn has_up(self) -> bool {
        matches!(self, Stage::Up | Stage::GateUp | Stage::UpDown | Stage::Fused)
    }

    /// Whether down rows are added up: `y` is written.
    pub fn has_down(self) -> bool {
        matches!(self, Stage::Down | Stage::UpDown | Stage::Fused)
    }

    /// Whether `x` is read.
    pub fn reads_x(self) -> bool {
        self.has_gate() || self.has_up()
    }

    /// Whether `hidden` holds what an earlier stage left.
    pub fn reads_hidden(self) -> bool {
        !self.has_gate()
    }

    /// Whether `hidden` takes what a later stage needs.
    pub fn writes_hidden(self) -> bool {
        !self.has_down()
    }

    /// Whether the job needs `hidden`, to read or to write.
    pub fn has_hidden(self) -> bool {
        self.reads_hidden() || self.writes_hidden()
    }
}

/// How the bytes of one neuron are laid out in an arena slot; offsets in bytes. Rows are sorted as
/// [`crate::quant::bundle_row`] does, so that a slot's neuron can be computed at the speed of memory.
///
/// A job uses the bytes of its stage's rows alone: of `Gate` the gate row must be valid, of `Down` the down row, and the
/// others may be anything.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BundleLayout {
    /// Elements of each row: the width of the model.
    pub width: usize,
    /// Type of the gate and up rows.
    pub dtype: DType,
    /// Type of the down row.
    pub down_dtype: DType,
    /// Where the gate row starts.
    pub gate: usize,
    /// Where the up row starts.
    pub up: usize,
    /// Where the down row (the neuron's column of the down matrix) starts.
    pub down: usize,
}

impl BundleLayout {
    /// Checks that the three rows lie in a slot of `slot_bytes`.
    ///
    /// # Errors
    /// [`DeviceError::Shape`] for a width that is not whole blocks, [`DeviceError::Mismatch`] for a row that does not
    /// fit.
    pub fn check(&self, slot_bytes: usize) -> Result<(), DeviceError> {
        for (dtype, at) in [(self.dtype, self.gate), (self.dtype, self.up), (self.down_dtype, self.down)] {
            let bytes = bundle_row_bytes(dtype, self.width).ok_or(DeviceError::Shape {
                dtype,
                rows: 1,
                cols: self.width,
                bytes: slot_bytes,
            })?;
            let needed = at.saturating_add(bytes);
            if needed > slot_bytes {
                return Err(DeviceError::Mismatch { what: "bytes of a slot", needed, found: slot_bytes });
            }
        }
        Ok(())
    }
}

/// The weights of a cluster.
pub enum ClusterWeights {
    /// Hot: a block that the device holds in its own layout.
    Block(PreparedWeight),
    /// Cold: bundles in an arena, pinned until the job is done.
    Bundles {
        /// Layout of each slot.
        layout: BundleLayout,
        /// One slot per neuron.
        slots: PinnedSlots,
        /// U32 `[neurons]`, ascending: the position of each slot's neuron in its layer. It says to which slice of the
        /// sum over neurons the neuron belongs, so that a layer has the same bits whichever neurons are left out. A
        /// stage without a sum does not read it, and takes neurons in any order.
        positions: ReadLease,
    },
}

/// The feed-forward of one *neuron cluster* over all tokens of the step (PowerInfer-2 sections 3.1 and 4.1). A dense
/// layer is one cluster with all neurons.
pub struct ClusterJob {
    /// Which part.
    pub stage: Stage,
    /// Tokens: rows of `x` and `y`.
    pub tokens: usize,
    /// The non-linearity.
    pub activation: Activation,
    /// The neurons.
    pub weights: ClusterWeights,
    /// F32 `[tokens, width]`. `Down` does not read it: any lease will do.
    pub x: ReadLease,
    /// F32 `[tokens, neurons]`: see [`Stage::reads_hidden`] and [`Stage::writes_hidden`]; `None` for `Fused`.
    pub hidden: Option<WriteLease>,
    /// F32 `[tokens, width]`; `None` for a stage without [`Stage::has_down`].
    pub y: Option<WriteLease>,
    /// Of a block: add its sum to `y` instead of overwriting it. Of bundles: go on with the sum in `y`, which is that of
    /// the slices before, instead of beginning with 0; so a layer that is cut at slices has the bits of a whole one.
    pub accumulate: bool,
}

/// A whole transformer block (norm, QKV, attention over device-resident KV, FFN) for units that pay for each round
/// trip; the device made and owns the weights and the KV cache behind `block`.
pub struct BlockJob {
    /// The block's weights, in the device's form.
    pub block: PreparedWeight,
    /// Tokens: rows of `x` and `y`.
    pub tokens: usize,
    /// Position of the first token in its sequence.
    pub position: usize,
    /// Which of the device's KV caches.
    pub sequence: u32,
    /// F32 `[tokens, width]`: the residual stream.
    pub x: ReadLease,
    /// F32 `[tokens, width]`.
    pub y: WriteLease,
}

/// Host memory that a device may reach without a copy.
#[derive(Clone, Debug)]
pub struct HostRegion {
    /// The memory; leases keep it alive and exclusive.
    pub buffer: Buffer,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stage_hands_over_what_the_next_one_reads() {
        for stage in Stage::ALL {
            let products = [stage.has_gate(), stage.has_up(), stage.has_down()];
            assert!(products.contains(&true) && products != [true, false, true], "{stage:?}");
            assert_eq!(stage.reads_hidden(), !products[0], "{stage:?}");
            assert_eq!(stage.writes_hidden(), !products[2], "{stage:?}");
            assert_eq!(stage.reads_x(), stage != Stage::Down);
            assert_eq!(stage.has_hidden(), stage != Stage::Fused);
        }
    }
}
