//! Reads every byte of a model and looks for damage.
//!
//! A file that was damaged without being cut has extents that are all right. What gives most of such damage away
//! is a float that is not finite: in a weight itself, or in a scale of a block, where one bad bit pattern makes
//! 32 or 256 weights useless and then every token after them. A file with checksums, such as a neuron store, hides no
//! damage to its tensors.

use neuropil_device::DType;

use super::error::{GgufError, shown};
use super::tensor::TensorInfo;
use super::{CHECKSUM_KEY, Gguf, cursor};

/// Bytes of one read, rounded down to whole blocks.
const CHUNK: usize = 1 << 20;

/// What was verified.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct VerifyReport {
    /// Tensors in the file or set.
    pub tensors: u64,
    /// Bytes read.
    pub bytes: u64,
    /// Blocks whose scales, or single values, were found finite.
    pub blocks: u64,
    /// Tensors of a type whose values are not looked at, only read.
    pub unchecked: u64,
    /// Tensors whose checksum is in the file, and right.
    pub checksums: u64,
}

/// Reads every tensor byte and checks that floats and block scales are finite, and checksums where the file has them. `progress` is told the bytes read so
/// far, about once per MiB. Extents were already checked when the file was opened.
///
/// # Errors
/// [`GgufError::NotFinite`] names the first tensor and block with a NaN or an infinity, [`GgufError::Checksum`] the first
/// tensor whose bytes are not those that were written; a read that fails, and a
/// file that became shorter, are errors too.
pub fn verify(gguf: &Gguf, progress: &mut dyn FnMut(u64)) -> Result<VerifyReport, GgufError> {
    let mut report = VerifyReport { tensors: gguf.tensors().len() as u64, ..VerifyReport::default() };
    let mut buffer: Vec<u8> = cursor::reserve(CHUNK as u64, gguf.path())?;
    let checksums = checksums(gguf)?;
    for (index, tensor) in gguf.tensors().iter().enumerate() {
        let mut crc = crc32fast::Hasher::new();
        let block = tensor.dtype.map_or(1, DType::block_bytes);
        let per_read = (CHUNK / block) as u64;
        report.unchecked += u64::from(tensor.dtype.is_none());
        let mut from = 0;
        while from < tensor.bytes {
            let take = (per_read * block as u64).min(tensor.bytes - from);
            buffer.resize(take as usize, 0);
            gguf.read_part(tensor, from, &mut buffer)?;
            if checksums.is_some() {
                crc.update(&buffer);
            }
            if let Some(dtype) = tensor.dtype {
                if let Some((index, value)) = first_bad(dtype, &buffer) {
                    return Err(not_finite(gguf, tensor, dtype, from / block as u64 + index, value));
                }
                report.blocks += take / block as u64;
            }
            from += take;
            report.bytes += take;
            progress(report.bytes);
        }
        if let Some(wanted) = checksums.and_then(|all| all.get(index)) {
            let found = crc.finalize();
            if found != *wanted {
                let (file, tensor) = (gguf.shard_path(tensor).into(), shown(&tensor.name));
                return Err(GgufError::Checksum { file, tensor, wanted: *wanted, found });
            }
            report.checksums += 1;
        }
    }
    Ok(report)
}

/// The checksums that the file has, one for each tensor.
fn checksums(gguf: &Gguf) -> Result<Option<&[u32]>, GgufError> {
    let all = gguf.metadata().u32s(CHECKSUM_KEY)?;
    let count = gguf.tensors().len();
    match (all, gguf.metadata().get(CHECKSUM_KEY)) {
        (Some(all), Some(value)) if all.len() != count => {
            Err(gguf.metadata().bad_value(CHECKSUM_KEY, value, "one number for each tensor"))
        }
        _ => Ok(all),
    }
}

fn not_finite(gguf: &Gguf, tensor: &TensorInfo, dtype: DType, block: u64, value: &'static str) -> GgufError {
    let (file, tensor) = (gguf.shard_path(tensor).into(), shown(&tensor.name));
    GgufError::NotFinite { file, tensor, type_name: dtype.name(), block, value }
}

/// The first block of `bytes` with a float that is not finite, and what that float is.
fn first_bad(dtype: DType, bytes: &[u8]) -> Option<(u64, &'static str)> {
    let f16 = |bits: [u8; 2]| kind_of(u16::from_le_bytes(bits), 0x7C00);
    match dtype {
        DType::F32 => {
            let bits = |b: &[u8; 4]| f32::from_le_bytes(*b).classify();
            find(bytes.as_chunks().0, |b| match bits(b) {
                std::num::FpCategory::Nan => Some("NaN"),
                std::num::FpCategory::Infinite => Some("infinite"),
                _ => None,
            })
        }
        DType::BF16 => find(bytes.as_chunks().0, |b| kind_of(u16::from_le_bytes(*b), 0x7F80)),
        DType::F16 => find(bytes.as_chunks().0, |b| f16(*b)),
        DType::Q4_0 => find(bytes.as_chunks::<18>().0, |b| f16([b[0], b[1]])),
        DType::Q5_0 => find(bytes.as_chunks::<22>().0, |b| f16([b[0], b[1]])),
        DType::Q8_0 => find(bytes.as_chunks::<34>().0, |b| f16([b[0], b[1]])),
        DType::Q4_1 => find(bytes.as_chunks::<20>().0, |b| f16([b[0], b[1]]).or(f16([b[2], b[3]]))),
        DType::Q5_1 => find(bytes.as_chunks::<24>().0, |b| f16([b[0], b[1]]).or(f16([b[2], b[3]]))),
        DType::Q4_K => find(bytes.as_chunks::<144>().0, |b| f16([b[0], b[1]]).or(f16([b[2], b[3]]))),
        DType::Q5_K => find(bytes.as_chunks::<176>().0, |b| f16([b[0], b[1]]).or(f16([b[2], b[3]]))),
        DType::Q6_K => find(bytes.as_chunks::<210>().0, |b| f16([b[208], b[209]])),
        DType::Q2_K => find(bytes.as_chunks::<84>().0, |b| f16([b[80], b[81]]).or(f16([b[82], b[83]]))),
        DType::Q3_K => find(bytes.as_chunks::<110>().0, |b| f16([b[108], b[109]])),
        DType::IQ4_NL => find(bytes.as_chunks::<18>().0, |b| f16([b[0], b[1]])),
        DType::IQ4_XS => find(bytes.as_chunks::<136>().0, |b| f16([b[0], b[1]])),
        DType::MXFP4 => find(bytes.as_chunks::<17>().0, |b| (b[0] == u8::MAX).then_some("NaN")),
    }
}

fn find<T>(blocks: &[T], bad: impl Fn(&T) -> Option<&'static str>) -> Option<(u64, &'static str)> {
    blocks.iter().enumerate().find_map(|(index, block)| bad(block).map(|value| (index as u64, value)))
}

/// A 16-bit float is not finite when all bits of its exponent are set; it is NaN when others below them are too.
fn kind_of(bits: u16, exponent: u16) -> Option<&'static str> {
    let magnitude = bits & 0x7FFF;
    match magnitude.cmp(&exponent) {
        std::cmp::Ordering::Less => None,
        std::cmp::Ordering::Equal => Some("infinite"),
        std::cmp::Ordering::Greater => Some("NaN"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sixteen_bit_floats_are_classified_as_the_half_crate_does() {
        let name = |nan, infinite: bool| if nan { Some("NaN") } else { infinite.then_some("infinite") };
        for bits in 0..=u16::MAX {
            let (f, b) = (half::f16::from_bits(bits), half::bf16::from_bits(bits));
            assert_eq!(kind_of(bits, 0x7C00), name(f.is_nan(), f.is_infinite()), "{bits:04x}");
            assert_eq!(kind_of(bits, 0x7F80), name(b.is_nan(), b.is_infinite()), "{bits:04x}");
        }
    }

    #[test]
    fn a_bad_scale_is_found_in_its_block_in_every_type() {
        for dtype in DType::ALL {
            let block = dtype.block_bytes();
            let mut bytes = vec![0u8; 3 * block];
            assert_eq!(first_bad(dtype, &bytes), None, "{dtype}");
            let at: &[usize] = match dtype {
                DType::F32 => &[2],
                DType::Q4_1 | DType::Q5_1 | DType::Q4_K | DType::Q5_K => &[0, 2],
                DType::Q6_K => &[208],
                DType::Q2_K => &[80, 82],
                DType::Q3_K => &[108],
                _ => &[0],
            };
            for at in at {
                bytes[2 * block + at..][..2].copy_from_slice(&0xFFFFu16.to_le_bytes());
                assert_eq!(first_bad(dtype, &bytes), Some((2, "NaN")), "{dtype} at {at}");
                bytes.fill(0);
            }
        }
    }
}
