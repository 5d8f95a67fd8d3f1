//! Where a neuron lies: arithmetic on a few numbers, so that an address costs nothing and needs no index.

use std::ops::Range;

use neuropil_device::{BundleLayout, DType, quant};

use super::StoreError;

/// The read units of the format, largest first.
pub const READ_UNITS: [usize; 3] = [4096, 512, 64];

/// Types that down rows can have: those whose kernels take single rows.
pub const DOWN_TYPES: [DType; 6] =
    [DType::F32, DType::F16, DType::BF16, DType::Q4_0, DType::Q4_1, DType::Q8_0];

/// Types that gate and up rows can have: all but those that are widened as they are used.
pub fn gate_types() -> Vec<DType> {
    DType::ALL.into_iter().filter(|dtype| !dtype.is_expanded()).collect()
}

/// Rows start at multiples of this in any layout: a cache line.
const ROW_ALIGNMENT: usize = 64;

/// Largest share of a bundle, in percent of its rows, that is spent on padding unasked.
const MOST_PADDING: usize = 15;

/// One of the two pieces in which a neuron is read (PowerInfer-2 section 4.4).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// The gate row: enough to know whether the neuron fires.
    Gate,
    /// The up and the down row.
    UpDown,
    /// Both, in one read.
    Both,
}

/// How the bundles of one layer lie. See `FORMAT.md`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Elements of a row.
    pub width: usize,
    /// Bundles.
    pub neurons: usize,
    /// Type of gate and up rows.
    pub gate_type: DType,
    /// Type of down rows.
    pub down_type: DType,
    /// Parts start at multiples of it.
    pub read_unit: usize,
    /// Where part `UpDown` begins.
    pub gate_bytes: usize,
    /// Where the down row begins.
    pub down_at: usize,
    /// From a bundle to the next.
    pub stride: usize,
}

impl Layout {
    /// The layout with a given read unit.
    ///
    /// # Errors
    /// [`StoreError::Width`] when a row is not whole blocks of a type, [`StoreError::ReadUnit`].
    pub fn new(
        width: usize,
        neurons: usize,
        gate_type: DType,
        down_type: DType,
        read_unit: usize,
    ) -> Result<Layout, StoreError> {
        if !READ_UNITS.contains(&read_unit) {
            return Err(StoreError::ReadUnit { found: read_unit as u64 });
        }
        let row = |dtype: DType| {
            let fits = quant::bundle_row_bytes(dtype, width).filter(|bytes| *bytes > 0 && *bytes < 1 << 30);
            fits.ok_or_else(|| StoreError::width(dtype, width))
        };
        let (gate, down) = (row(gate_type)?, row(down_type)?);
        let gate_bytes = gate.next_multiple_of(read_unit);
        let down_at = gate_bytes + gate.next_multiple_of(ROW_ALIGNMENT);
        let stride = (down_at + down).next_multiple_of(read_unit);
        if stride.checked_mul(neurons).is_none() {
            return Err(StoreError::width(gate_type, width));
        }
        Ok(Layout { width, neurons, gate_type, down_type, read_unit, gate_bytes, down_at, stride })
    }

    /// The layout with the largest read unit that costs little padding.
    ///
    /// # Errors
    /// As [`Layout::new`].
    pub fn choose(
        width: usize,
        neurons: usize,
        gate_type: DType,
        down_type: DType,
    ) -> Result<Layout, StoreError> {
        let with = |unit| Layout::new(width, neurons, gate_type, down_type, unit);
        for unit in READ_UNITS {
            let layout = with(unit)?;
            if layout.pads_little() {
                return Ok(layout);
            }
        }
        with(ROW_ALIGNMENT)
    }

    /// Whether padding is at most 15 % of the rows.
    pub fn pads_little(&self) -> bool {
        self.stride * 100 <= self.row_bytes() * (100 + MOST_PADDING)
    }

    /// Bytes of the three rows, without padding.
    pub fn row_bytes(&self) -> usize {
        let row = |dtype| quant::bundle_row_bytes(dtype, self.width).unwrap_or(0);
        2 * row(self.gate_type) + row(self.down_type)
    }

    /// Bytes of all bundles.
    pub fn bytes(&self) -> u64 {
        self.stride as u64 * self.neurons as u64
    }

    /// Where a part of the bundle at `position` lies, in bytes from the first bundle: one random read.
    pub fn bundle(&self, position: usize, part: Part) -> Range<u64> {
        let start = (position * self.stride) as u64;
        let (from, to) = match part {
            Part::Gate => (0, self.gate_bytes),
            Part::UpDown => (self.gate_bytes, self.stride),
            Part::Both => (0, self.stride),
        };
        start + from as u64..start + to as u64
    }

    /// Where the bundles at some positions lie: one long sequential read.
    pub fn run(&self, positions: Range<usize>) -> Range<u64> {
        (positions.start * self.stride) as u64..(positions.end * self.stride) as u64
    }

    /// The rows of a slot that holds a whole bundle.
    pub fn slot(&self) -> BundleLayout {
        BundleLayout {
            width: self.width,
            dtype: self.gate_type,
            down_dtype: self.down_type,
            gate: 0,
            up: self.gate_bytes,
            down: self.down_at,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_read_unit_is_the_largest_that_pads_little() {
        let layout = |width, gate, down| Layout::choose(width, 8, gate, down).unwrap();
        let q4 = layout(4096, DType::Q4_0, DType::Q4_0);
        assert_eq!((q4.read_unit, q4.gate_bytes, q4.down_at, q4.stride), (512, 2560, 4864, 7168));
        let f16 = layout(4096, DType::F16, DType::F16);
        assert_eq!((f16.read_unit, f16.gate_bytes, f16.stride), (4096, 8192, 24576));
        let small = layout(576, DType::Q4_1, DType::Q8_0);
        assert_eq!((small.read_unit, small.gate_bytes, small.down_at, small.stride), (64, 384, 768, 1408));
    }

    #[test]
    fn addresses_are_arithmetic() {
        let layout = Layout::choose(4096, 14336, DType::Q4_0, DType::Q4_0).unwrap();
        assert_eq!(layout.bundle(2, Part::Gate), 14336..16896);
        assert_eq!(layout.bundle(2, Part::UpDown), 16896..21504);
        assert_eq!(layout.bundle(2, Part::Both), layout.run(2..3));
        assert_eq!(layout.run(0..14336).end, layout.bytes());
        layout.slot().check(layout.stride).unwrap();
    }

    #[test]
    fn a_width_that_is_not_whole_blocks_is_refused() {
        assert!(matches!(Layout::choose(100, 8, DType::Q4_0, DType::F16), Err(StoreError::Width { .. })));
        assert!(matches!(
            Layout::choose(usize::MAX, 8, DType::F16, DType::F16),
            Err(StoreError::Width { .. })
        ));
        assert!(matches!(
            Layout::new(4096, 8, DType::F16, DType::F16, 100),
            Err(StoreError::ReadUnit { .. })
        ));
    }
}
