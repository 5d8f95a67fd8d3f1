//! The schemes of the border, and which of them a weight may take.

use neuropil_device::DType;
use neuropil_plugin_abi as abi;

use crate::Weights;

/// Columns that share a scale in the group schemes.
pub(crate) const GROUP: usize = 32;

/// How the elements of a matrix are written down; `neuropil_plugin.h` draws each.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[allow(missing_docs, reason = "the header describes them")]
pub enum Scheme {
    F32,
    F16,
    Group8,
    Group4,
    Group4Min,
    Channel8,
    Channel4,
}

impl Scheme {
    /// Every scheme.
    pub const ALL: [Scheme; 7] = [
        Scheme::F32,
        Scheme::F16,
        Scheme::Group8,
        Scheme::Group4,
        Scheme::Group4Min,
        Scheme::Channel8,
        Scheme::Channel4,
    ];

    /// The name in options and reports.
    pub fn name(self) -> &'static str {
        match self {
            Scheme::F32 => "f32",
            Scheme::F16 => "f16",
            Scheme::Group8 => "group8",
            Scheme::Group4 => "group4",
            Scheme::Group4Min => "group4m",
            Scheme::Channel8 => "channel8",
            Scheme::Channel4 => "channel4",
        }
    }

    /// The scheme of that name.
    pub fn from_name(name: &str) -> Option<Scheme> {
        Scheme::ALL.into_iter().find(|scheme| scheme.name() == name)
    }

    pub(crate) fn number(self) -> u32 {
        match self {
            Scheme::F32 => abi::NP_SCHEME_F32,
            Scheme::F16 => abi::NP_SCHEME_F16,
            Scheme::Group8 => abi::NP_SCHEME_GROUP8,
            Scheme::Group4 => abi::NP_SCHEME_GROUP4,
            Scheme::Group4Min => abi::NP_SCHEME_GROUP4M,
            Scheme::Channel8 => abi::NP_SCHEME_CHANNEL8,
            Scheme::Channel4 => abi::NP_SCHEME_CHANNEL4,
        }
    }

    /// The GGUF type whose blocks a group scheme takes apart.
    pub(crate) fn block_type(self) -> Option<DType> {
        match self {
            Scheme::Group8 => Some(DType::Q8_0),
            Scheme::Group4 => Some(DType::Q4_0),
            Scheme::Group4Min => Some(DType::Q4_1),
            _ => None,
        }
    }

    /// Columns that share a scale; 0 where the scheme has no groups.
    pub(crate) fn group(self) -> usize {
        if self.block_type().is_some() { GROUP } else { 0 }
    }

    /// Bits of an element in `data`.
    pub(crate) fn bits(self) -> usize {
        match self {
            Scheme::F32 => 32,
            Scheme::F16 => 16,
            Scheme::Group8 | Scheme::Channel8 => 8,
            Scheme::Group4 | Scheme::Group4Min | Scheme::Channel4 => 4,
        }
    }

    /// Bytes of `data`, `scales` and `mins`; `None` when the width does not fit or the size overflows.
    pub(crate) fn bytes(self, rows: usize, cols: usize) -> Option<[usize; 3]> {
        let row_bits = cols.checked_mul(self.bits())?;
        if !row_bits.is_multiple_of(8) || self.group() != 0 && !cols.is_multiple_of(GROUP) {
            return None;
        }
        let data = (row_bits / 8).checked_mul(rows)?;
        let groups = (cols / GROUP).checked_mul(rows)?.checked_mul(2)?;
        Some(match self {
            Scheme::F32 | Scheme::F16 => [data, 0, 0],
            Scheme::Group8 | Scheme::Group4 => [data, groups, 0],
            Scheme::Group4Min => [data, groups, groups],
            Scheme::Channel8 | Scheme::Channel4 => [data, rows.checked_mul(4)?, 0],
        })
    }

    /// The schemes that a weight of type `dtype` may take, the best one first. Those that keep every bit come first, and
    /// a scheme that loses much (4 bits per channel) only when it is asked for.
    pub(crate) fn candidates(dtype: DType, weights: Weights) -> Vec<Scheme> {
        use Scheme::{Channel8, F16, F32, Group4, Group4Min, Group8};
        match weights {
            Weights::Scheme(scheme) => vec![scheme],
            Weights::Auto => match dtype {
                DType::F32 | DType::BF16 => vec![F32, F16, Group8, Channel8],
                DType::F16 => vec![F16, F32, Group8, Channel8],
                // A code of Q4_0 is one of Q8_0 too.
                DType::Q4_0 => vec![Group4, Group8, F16, F32, Channel8],
                DType::Q4_1 => vec![Group4Min, Group8, Channel8, F16, F32],
                _ => vec![Group8, Channel8, F16, F32],
            },
        }
    }
}
