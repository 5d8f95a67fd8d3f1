//! From a model file to a neuron store.
//!
//! The result is planned in whole before anything is written: types and layouts of all layers, keys, directory. Then the
//! resident tensors are copied and the bundles built, by some threads that each hold the bundles of some neurons, while
//! one more computes the digest of the source. What is written does not depend on the number of threads.

mod error;
mod neurons;
mod order;
mod plan;
mod powerinfer;
mod resident;
mod safetensors;
mod source;
mod twin;
mod work;

use std::path::{Path, PathBuf};

use neuropil_device::DType;

use crate::gguf::{CHECKSUM_KEY, Gguf, NewTensor, Pairs, verify};

pub use error::ConvertError;
pub use twin::twin;

/// What the result is to be. The default keeps what can be kept.
#[derive(Clone, Debug, Default)]
pub struct ConvertOptions {
    /// The type of gate, up and down rows. Down rows take `q8_0` when they cannot have it. Default: gate and up keep
    /// their bits; down keeps float types and becomes `q8_0` else.
    pub ffn_type: Option<DType>,
    /// The type of down rows.
    pub down_type: Option<DType>,
    /// A file with `blk.N.ffn_count`: neurons that fire most come first. Default: the order of the source.
    pub counts: Option<PathBuf>,
    /// One of [`READ_UNITS`](super::READ_UNITS). Default: the largest that pads bundles by at most 15 %.
    pub read_unit: Option<usize>,
    /// What the result holds besides what the source does.
    pub additions: Additions,
}

/// Keys and tensors for the result. Entries over the neurons of a layer are in the order of the source, and come out in
/// that of the result; with `blk.N.ffn_count` among them, neurons are sorted by these counts.
#[derive(Clone, Debug, Default)]
pub struct Additions {
    /// Keys, which replace those of the source.
    pub pairs: Pairs,
    /// Tensors and their bytes, which replace those of the source.
    pub tensors: Vec<(NewTensor, Vec<u8>)>,
    /// Names of tensors of the source to leave out.
    pub removed: Vec<String>,
}

/// What a conversion did.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ConvertReport {
    /// Bytes of the source's files.
    pub source_bytes: u64,
    /// Bytes of the result.
    pub bytes: u64,
    /// Bytes of the tensors that are not bundles.
    pub resident_bytes: u64,
    /// Bytes of the bundles.
    pub bundle_bytes: u64,
    /// Bytes of the bundles that are padding.
    pub padding_bytes: u64,
    /// Parts of bundles start at multiples of it.
    pub read_unit: usize,
    /// The digest of the source, in hex.
    pub sha256: String,
    /// Whether neurons were sorted by how often they fire.
    pub sorted: bool,
    /// What was done with each layer.
    pub layers: Vec<LayerReport>,
    /// What the user should know, in sentences.
    pub notes: Vec<String>,
}

/// What a conversion did with a layer.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct LayerReport {
    /// Type of gate and up rows.
    pub gate_type: DType,
    /// Type of down rows.
    pub down_type: DType,
    /// Neurons, of each expert.
    pub neurons: usize,
    /// Experts; 1 without.
    pub experts: usize,
    /// Difference that requantising made to gate and up: root mean square, as a share of that of the weights.
    pub gate_up_loss: f64,
    /// The same of down.
    pub down_loss: f64,
}

/// Converts the model at `source` to a neuron store at `out`, which may replace a file, the source too. `progress` is
/// told the bytes written and their sum, and says whether to go on. A source with checksums is read once before, so that
/// damage is not given new ones.
///
/// # Errors
/// [`ConvertError`]; nothing is left behind, and what was at `out` stays.
pub fn convert(
    source: &Path,
    out: &Path,
    options: &ConvertOptions,
    progress: &mut dyn FnMut(u64, u64) -> bool,
) -> Result<ConvertReport, ConvertError> {
    // A source of another kind has no checksums, and one that cannot be opened is refused below.
    if let Ok(gguf) = Gguf::open_header(source)
        && gguf.metadata().get(CHECKSUM_KEY).is_some()
    {
        verify(&gguf, &mut |_| {})?;
    }
    let source = source::Source::open(source)?;
    let orders = order::orders(&source, options.counts.as_deref(), &options.additions)?;
    let plan = plan::Plan::new(&source, options, &orders)?;
    work::run(&source, &orders, plan, out, progress)
}

/// A buffer of `bytes` zeros.
fn buffer(bytes: u64) -> Result<Vec<u8>, ConvertError> {
    let count = usize::try_from(bytes).map_err(|_| ConvertError::OutOfMemory { bytes })?;
    let mut buffer = reserved(count)?;
    buffer.resize(count, 0);
    Ok(buffer)
}

/// An empty vector with room for `count` elements.
fn reserved<T>(count: usize) -> Result<Vec<T>, ConvertError> {
    let mut out = Vec::new();
    let bytes = (count as u64).saturating_mul(size_of::<T>() as u64);
    out.try_reserve_exact(count).map_err(|_| ConvertError::OutOfMemory { bytes })?;
    Ok(out)
}
