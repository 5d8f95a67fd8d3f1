//! The parser: the bytes of one file to its metadata and tensor directory.
//!
//! It works on a byte slice and knows no files, so tests and the fuzzer need none. It makes one pass. It trusts
//! no number: a count is compared with the bytes left, at the smallest size of an element, before it is used.
//! What it keeps of the file is bounded twice: by the limits below, and by the bytes of the file itself.

use std::fmt;
use std::path::Path;

use super::cursor::Cursor;
use super::error::{GgufError, shown};
use super::metadata::{Metadata, sorted_by_name, twice};
use super::tensor::{Dims, TensorInfo, check_extents, tensor_bytes};
use super::types::{DATA_TYPES, supported_names, tensor_type};
use super::value::{Array, Strings, Value};

/// The most bytes a header may have. The largest vocabularies in use take 16 MB.
pub const MAX_HEADER_BYTES: usize = 512 << 20;
/// The most metadata pairs a file may have.
pub const MAX_PAIRS: u64 = 1 << 16;
/// The most tensors a file, or a whole set, may have.
pub const MAX_TENSORS: u64 = 1 << 18;
/// The most bytes of a key or a tensor name.
pub const MAX_NAME_BYTES: u64 = u16::MAX as u64;
/// The largest `general.alignment`; the smallest is 8.
pub const MAX_ALIGNMENT: u64 = 16 << 20;

/// How a file of PowerInfer begins; the rest is GGUF version 3.
const POWERINFER: &[u8; 4] = b"PWRI";
/// `general.alignment` when the key is absent.
const DEFAULT_ALIGNMENT: u64 = 32;
/// A key of no bytes, its length, the type, a value of one byte.
const MIN_PAIR_BYTES: u64 = 8 + 4 + 1;
/// A name of no bytes, its length, no dimensions, their count, the type, the offset.
const MIN_TENSOR_BYTES: u64 = 8 + 4 + 4 + 8;

/// Which tensor types the parser accepts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TypePolicy {
    /// Those that neuropil runs, and those of a neuron store's bundles and lists; another is an error.
    Supported,
    /// Any, for listing and converting a file; the size of an unknown one counts as 0. PowerInfer's files, which only
    /// their first four bytes tell from others, are taken too.
    Any,
}

/// What the header of one file says.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Header {
    /// 2 or 3.
    pub version: u32,
    /// Whether it is a file of PowerInfer: a sparse model, to be converted.
    pub powerinfer: bool,
    /// The key-value pairs.
    pub metadata: Metadata,
    /// The tensors, in the file's order, with their absolute extents.
    pub tensors: Vec<TensorInfo>,
    /// Every tensor's offset, counted from `data_start`, is a multiple of this.
    pub alignment: u64,
    /// Where the data begins.
    pub data_start: u64,
}

/// Parses `bytes`, the whole of one file; `file` is what errors call it.
pub fn parse(bytes: &[u8], file: &Path, types: TypePolicy) -> Result<Header, GgufError> {
    let mut cursor = Cursor::new(bytes, MAX_HEADER_BYTES, file);
    let powerinfer = bytes.starts_with(POWERINFER);
    let version = version(&mut cursor, types)?;
    let tensor_count = cursor.u64(&"the tensor count")?;
    let pair_count = cursor.u64(&"the number of keys")?;
    cursor.expect(tensor_count, MIN_TENSOR_BYTES, &"the tensor directory")?;
    cursor.expect(pair_count, MIN_PAIR_BYTES, &"the metadata")?;
    at_most(file, "keys", pair_count, MAX_PAIRS)?;
    at_most(file, "tensors", tensor_count, MAX_TENSORS)?;

    let mut pairs = cursor.reserve(pair_count)?;
    for index in 0..pair_count {
        pairs.push(pair(&mut cursor, index)?);
    }
    let metadata = Metadata::new(file, pairs)?;
    let alignment = alignment(&metadata, file)?;

    cursor.expect(tensor_count, MIN_TENSOR_BYTES, &"the tensor directory")?;
    let mut tensors = cursor.reserve(tensor_count)?;
    let mut total = 0u64;
    for index in 0..tensor_count {
        let tensor = tensor(&mut cursor, index, types)?;
        total = padded_sum(total, &tensor, alignment)
            .ok_or_else(|| GgufError::SizeOverflow { file: file.into(), tensor: shown(&tensor.name) })?;
        tensors.push(tensor);
    }

    // The cursor is inside the header limit, so this does not overflow.
    let data_start = cursor.at().next_multiple_of(alignment);
    for tensor in &mut tensors {
        place(tensor, file, data_start, alignment)?;
    }
    let order = sorted_by_name(&tensors, file, |tensor| &tensor.name)?;
    if let Some(tensor) = twice(&tensors, &order, |tensor| &tensor.name) {
        return Err(GgufError::DuplicateTensor { file: file.into(), tensor: shown(&tensor.name) });
    }
    check_extents(file, &tensors, bytes.len() as u64)?;
    Ok(Header { version, powerinfer, metadata, tensors, alignment, data_start })
}

fn at_most(file: &Path, what: &'static str, count: u64, limit: u64) -> Result<(), GgufError> {
    if count > limit {
        return Err(GgufError::TooMany { file: file.into(), what, count, limit });
    }
    Ok(())
}

fn version(cursor: &mut Cursor, types: TypePolicy) -> Result<u32, GgufError> {
    let file = || cursor.file.to_path_buf();
    let (file, magic) = (file(), cursor.array::<4>(&"the GGUF signature")?);
    if &magic == POWERINFER {
        if types == TypePolicy::Supported {
            return Err(GgufError::PowerInfer { file });
        }
    } else if &magic != b"GGUF" {
        return Err(GgufError::NotGguf { file, found: magic.escape_ascii().to_string() });
    }
    match cursor.u32(&"the version")? {
        version @ (2 | 3) => Ok(version),
        // Seen from here, a big-endian version has its number in the high bytes.
        swapped if swapped != 0 && swapped & 0xFFFF == 0 => Err(GgufError::BigEndian { file }),
        version => Err(GgufError::UnsupportedVersion { file, version }),
    }
}

/// `general.alignment`: a u32, a power of two, from 8 to [`MAX_ALIGNMENT`].
fn alignment(metadata: &Metadata, file: &Path) -> Result<u64, GgufError> {
    let key = "general.alignment";
    match metadata.get(key) {
        None => Ok(DEFAULT_ALIGNMENT),
        Some(&Value::U32(v)) if v.is_power_of_two() && (8..=MAX_ALIGNMENT).contains(&u64::from(v)) => {
            Ok(v.into())
        }
        Some(value @ Value::U32(_)) => {
            Err(metadata.bad_value(key, value, "a power of two from 8 to 16777216"))
        }
        Some(value) => Err(GgufError::WrongType {
            file: file.into(),
            key: key.into(),
            wanted: "u32",
            found: value.type_name(),
        }),
    }
}

/// What is being read, in words; it is formatted only when something is wrong.
enum Part<'a> {
    Name(&'static str, u64),
    Of(&'static str, &'a str),
}

impl fmt::Display for Part<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Part::Name(what, index) => write!(f, "the name of {what} {index}"),
            Part::Of(what, name) => write!(f, "{what} \"{}\"", shown(name)),
        }
    }
}

/// A key or a tensor name.
fn name<'a>(cursor: &mut Cursor<'a>, part: Part<'_>) -> Result<&'a str, GgufError> {
    let bytes = cursor.string(&part)?;
    let (file, what) = (|| cursor.file.to_path_buf(), || part.to_string());
    if bytes.len() as u64 > MAX_NAME_BYTES {
        let (bytes, limit) = (bytes.len() as u64, MAX_NAME_BYTES);
        return Err(GgufError::NameTooLong { file: file(), what: what(), bytes, limit });
    }
    std::str::from_utf8(bytes).map_err(|_| GgufError::NotUtf8 { file: file(), what: what() })
}

fn pair(cursor: &mut Cursor, index: u64) -> Result<(Box<str>, Value), GgufError> {
    let key = name(cursor, Part::Name("key", index))?;
    let type_id = cursor.u32(&Part::Of("the type of the key", key))?;
    Ok((cursor.owned(key)?.into_boxed_str(), value(cursor, key, type_id)?))
}

fn value(cursor: &mut Cursor, key: &str, type_id: u32) -> Result<Value, GgufError> {
    let what = &Part::Of("the value of the key", key);
    Ok(match type_id {
        0 => Value::U8(u8::from_le_bytes(cursor.array(what)?)),
        1 => Value::I8(i8::from_le_bytes(cursor.array(what)?)),
        2 => Value::U16(u16::from_le_bytes(cursor.array(what)?)),
        3 => Value::I16(i16::from_le_bytes(cursor.array(what)?)),
        4 => Value::U32(u32::from_le_bytes(cursor.array(what)?)),
        5 => Value::I32(i32::from_le_bytes(cursor.array(what)?)),
        6 => Value::F32(f32::from_le_bytes(cursor.array(what)?)),
        7 => {
            let [byte] = cursor.array(what)?;
            Value::Bool(bool_of(byte, key, cursor.file)?)
        }
        8 => {
            let bytes = cursor.string(what)?;
            let mut owned = cursor.reserve(bytes.len() as u64)?;
            owned.extend_from_slice(bytes);
            Value::Str(owned.into_boxed_slice())
        }
        9 => Value::Array(array(cursor, key)?),
        10 => Value::U64(u64::from_le_bytes(cursor.array(what)?)),
        11 => Value::I64(i64::from_le_bytes(cursor.array(what)?)),
        12 => Value::F64(f64::from_le_bytes(cursor.array(what)?)),
        _ => return Err(unknown_type(cursor, key, type_id)),
    })
}

fn unknown_type(cursor: &Cursor, key: &str, type_id: u32) -> GgufError {
    GgufError::UnknownValueType { file: cursor.file.into(), key: shown(key), type_id }
}

/// A bool is 0 or 1; the format calls a file with another byte invalid.
fn bool_of(byte: u8, key: &str, file: &Path) -> Result<bool, GgufError> {
    match byte {
        0 => Ok(false),
        1 => Ok(true),
        other => Err(GgufError::BadValue {
            file: file.into(),
            key: shown(key),
            value: format!("the byte {other}"),
            wanted: "a bool of 0 or 1",
        }),
    }
}

fn array(cursor: &mut Cursor, key: &str) -> Result<Array, GgufError> {
    let what = &Part::Of("the array of the key", key);
    let type_id = cursor.u32(what)?;
    let count = cursor.u64(what)?;
    Ok(match type_id {
        0 => Array::U8(numbers(cursor, count, what, u8::from_le_bytes)?),
        1 => Array::I8(numbers(cursor, count, what, i8::from_le_bytes)?),
        2 => Array::U16(numbers(cursor, count, what, u16::from_le_bytes)?),
        3 => Array::I16(numbers(cursor, count, what, i16::from_le_bytes)?),
        4 => Array::U32(numbers(cursor, count, what, u32::from_le_bytes)?),
        5 => Array::I32(numbers(cursor, count, what, i32::from_le_bytes)?),
        6 => Array::F32(numbers(cursor, count, what, f32::from_le_bytes)?),
        7 => {
            let bytes = cursor.take(count, what)?;
            let mut out = cursor.reserve(count)?;
            for &byte in bytes {
                out.push(bool_of(byte, key, cursor.file)?);
            }
            Array::Bool(out.into_boxed_slice())
        }
        8 => Array::Str(strings(cursor, count, what)?),
        9 => return Err(GgufError::NestedArray { file: cursor.file.into(), key: shown(key) }),
        10 => Array::U64(numbers(cursor, count, what, u64::from_le_bytes)?),
        11 => Array::I64(numbers(cursor, count, what, i64::from_le_bytes)?),
        12 => Array::F64(numbers(cursor, count, what, f64::from_le_bytes)?),
        _ => return Err(unknown_type(cursor, key, type_id)),
    })
}

fn numbers<T, const N: usize>(
    cursor: &mut Cursor,
    count: u64,
    what: &Part,
    from: fn([u8; N]) -> T,
) -> Result<Box<[T]>, GgufError> {
    cursor.expect(count, N as u64, what)?;
    // The bytes are there, so the product does not overflow.
    let (elements, _) = cursor.take(count * N as u64, what)?.as_chunks::<N>();
    let mut out = cursor.reserve(count)?;
    out.extend(elements.iter().map(|bytes| from(*bytes)));
    Ok(out.into_boxed_slice())
}

/// The strings are walked once for their ends and then copied, so both tables are allocated at their exact size.
fn strings(cursor: &mut Cursor, count: u64, what: &Part) -> Result<Strings, GgufError> {
    cursor.expect(count, 8, what)?;
    let mut ends: Vec<u32> = cursor.reserve(count)?;
    let mut again = cursor.clone();
    let mut total = 0u32;
    for _ in 0..count {
        // All strings lie inside the header limit, so their sum fits.
        total += cursor.string(what)?.len() as u32;
        ends.push(total);
    }
    let mut bytes = cursor.reserve(total.into())?;
    for _ in 0..count {
        bytes.extend_from_slice(again.string(what)?);
    }
    Ok(Strings::new(bytes.into_boxed_slice(), ends.into_boxed_slice()))
}

/// One entry of the directory; its offset is still the one in the file.
fn tensor(cursor: &mut Cursor, index: u64, types: TypePolicy) -> Result<TensorInfo, GgufError> {
    let name = name(cursor, Part::Name("tensor", index))?;
    let what = &Part::Of("the entry of the tensor", name);
    let (file, shown) = (cursor.file, || shown(name));
    let n_dims = cursor.u32(what)?;
    if n_dims > 4 {
        return Err(GgufError::BadRank { file: file.into(), tensor: shown(), n_dims });
    }
    let mut dims = Dims::scalar();
    for dim in 0..n_dims as usize {
        dims.set(dim, cursor.u64(what)?);
    }
    let type_id = cursor.u32(what)?;
    let offset = cursor.u64(what)?;
    let kind = tensor_type(type_id);
    let dtype = kind.and_then(|kind| kind.dtype);
    let stored = kind.is_some_and(|kind| DATA_TYPES.contains(&kind.id));
    if types == TypePolicy::Supported && dtype.is_none() && !stored {
        return Err(GgufError::UnsupportedType {
            file: file.into(),
            tensor: shown(),
            type_id,
            type_name: kind.map_or("unknown", |kind| kind.name),
            supported: supported_names(),
        });
    }
    let bytes = tensor_bytes(file, name, &dims, kind)?;
    Ok(TensorInfo { name: cursor.owned(name)?, dims, type_id, dtype, shard: 0, offset, bytes })
}

/// The sum of all sizes up to `tensor`, each padded to the alignment.
fn padded_sum(total: u64, tensor: &TensorInfo, alignment: u64) -> Option<u64> {
    total.checked_add(tensor.bytes)?.checked_next_multiple_of(alignment)
}

/// Turns the offset in the file, which counts from the start of the data, into one from the start of the file.
fn place(tensor: &mut TensorInfo, file: &Path, data_start: u64, alignment: u64) -> Result<(), GgufError> {
    let offset = tensor.offset;
    if !offset.is_multiple_of(alignment) {
        let tensor = shown(&tensor.name);
        return Err(GgufError::Misaligned { file: file.into(), tensor, offset, alignment });
    }
    match data_start.checked_add(offset) {
        Some(absolute) => tensor.offset = absolute,
        None => return Err(GgufError::SizeOverflow { file: file.into(), tensor: shown(&tensor.name) }),
    }
    Ok(())
}
