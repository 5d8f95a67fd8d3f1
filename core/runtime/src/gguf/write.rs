//! Writes GGUF files, version 3, that may be larger than memory.
//!
//! Everything that the header says is said first: the pairs, and each tensor's name, type and shape, from which follow
//! its place and the size of the whole. Then the bytes of the tensors come in the order of the directory, in pieces.
//! What can only be known at the end, a checksum of each tensor, has its room in the header and is filled in last.
//! The file gets its name when it is complete (see [`super::staged`]).

use std::io;
use std::path::{Path, PathBuf};

use super::encode;
use super::error::{GgufError, shown};
use super::metadata::Metadata;
use super::parse::{MAX_HEADER_BYTES, MAX_NAME_BYTES, MAX_PAIRS, MAX_TENSORS};
use super::staged::Staged;
use super::tensor::{Dims, tensor_bytes};
use super::types::tensor_type;
use super::value::{Array, Value};

/// The key of the checksums: CRC-32 (IEEE) of each tensor's bytes, in the order of the directory.
pub const CHECKSUM_KEY: &str = "neuropil.checksum";

const ALIGNMENT_KEY: &str = "general.alignment";

/// Why a file was not written. Nothing is left behind.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs)] // the fields are named for what the message says of them
pub enum WriteError {
    /// The system refused to create, write, sync or rename the file.
    #[error("{}: cannot be written ({source}); check the path and the disk", file.display())]
    Io { file: PathBuf, source: io::Error },
    /// The disk, a quota or the limit on the size of files.
    #[error(
        "{}: there is no space left for it ({bytes} bytes were to be written); free some, or lift the limit on the size of files", file.display()
    )]
    NoSpace { file: PathBuf, bytes: u64 },
    /// A folder or a device is in the way.
    #[error("{}: is no name for a file that can be written; give another path", file.display())]
    NotAFile { file: PathBuf },
    /// Another process is writing it.
    #[error("{}: another process is writing it; wait for its end, or give another path", file.display())]
    Busy { file: PathBuf },
    /// Memory for a buffer could not be had.
    #[error("{}: {bytes} bytes of memory for writing it could not be reserved; free some memory", file.display())]
    OutOfMemory { file: PathBuf, bytes: u64 },
    /// More than a reader would take.
    #[error("{}: it would have {count} {what}, and readers take {limit}; leave some out", file.display())]
    TooMany { file: PathBuf, what: &'static str, count: u64, limit: u64 },
    /// A tensor whose shape or bytes are not as they were declared.
    #[error("{}: the tensor \"{tensor}\" {reason}", file.display())]
    Tensor { file: PathBuf, tensor: String, reason: String },
    /// A value that was to be filled in, of which the header says nothing, or another size.
    #[error("{}: there is no room in the header for the value of \"{key}\"; this is a bug, please report it", file.display())]
    Late { file: PathBuf, key: String },
    /// A tensor that the format cannot hold.
    #[error(transparent)]
    Gguf(#[from] GgufError),
}

/// The key-value pairs of a file to be written, in their order.
#[derive(Clone, Debug, Default)]
pub struct Pairs(Vec<(Box<str>, Value)>);

impl Pairs {
    /// None.
    pub fn new() -> Pairs {
        Pairs::default()
    }

    /// The value of a key.
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.0.iter().find(|(k, _)| **k == *key).map(|(_, value)| value)
    }

    /// Sets a key: in its place if it is there, else at the end.
    pub fn set(&mut self, key: &str, value: impl Into<Value>) {
        let value = value.into();
        match self.0.iter_mut().find(|(k, _)| **k == *key) {
            Some(pair) => pair.1 = value,
            None => self.0.push((key.into(), value)),
        }
    }

    /// Keeps the keys that `keep` says yes to.
    pub fn retain(&mut self, mut keep: impl FnMut(&str) -> bool) {
        self.0.retain(|(key, _)| keep(key));
    }

    /// The pairs.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (&str, &Value)> {
        self.0.iter().map(|(key, value)| (&**key, value))
    }
}

impl From<&Metadata> for Pairs {
    fn from(metadata: &Metadata) -> Pairs {
        Pairs(metadata.iter().map(|(key, value)| (key.into(), value.clone())).collect())
    }
}

/// A tensor to be written: an entry of the directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewTensor {
    /// Its name.
    pub name: String,
    /// The id of its type.
    pub type_id: u32,
    /// Its dimensions, fastest first, at most four.
    pub dims: Vec<u64>,
}

impl NewTensor {
    /// An entry of the directory.
    pub fn new(name: impl Into<String>, type_id: u32, dims: impl Into<Vec<u64>>) -> NewTensor {
        NewTensor { name: name.into(), type_id, dims: dims.into() }
    }

    /// Bytes of the tensor, as a writer of `file` counts them.
    fn bytes(&self, file: &Path) -> Result<u64, WriteError> {
        let wrong =
            |reason: String| WriteError::Tensor { file: file.into(), tensor: shown(&self.name), reason };
        let Some(kind) = tensor_type(self.type_id) else {
            return Err(wrong(format!("has type {}, of which nothing is known", self.type_id)));
        };
        if self.dims.is_empty() || self.dims.len() > 4 || self.name.len() as u64 > MAX_NAME_BYTES {
            return Err(wrong("has no dimensions, more than four, or too long a name".into()));
        }
        let mut dims = Dims::scalar();
        self.dims.iter().enumerate().for_each(|(index, size)| dims.set(index, *size));
        Ok(tensor_bytes(file, &self.name, &dims, Some(kind))?)
    }
}

/// A declared tensor and where it goes.
struct Place {
    name: String,
    bytes: u64,
    /// From the start of the data.
    offset: u64,
}

/// Writes one file: [`GgufWriter::create`], then for each tensor [`begin`](GgufWriter::begin) and
/// [`write`](GgufWriter::write), then [`finish`](GgufWriter::finish). Dropped before that, it leaves nothing behind.
pub struct GgufWriter {
    staged: Staged,
    places: Vec<Place>,
    /// Tensors begun.
    begun: usize,
    /// Bytes that the tensor begun last still lacks.
    left: u64,
    /// Bytes written, from the start of the data.
    at: u64,
    /// The size of the data.
    data_bytes: u64,
    total: u64,
    crc: crc32fast::Hasher,
    checksums: Vec<u32>,
    /// Each key with the place of its value and the bytes that this takes.
    values: Vec<(String, u64, usize)>,
    patches: Vec<(u64, Vec<u8>)>,
}

impl GgufWriter {
    /// Begins the file `path`. Its pairs are `pairs` and `general.alignment`, which is `alignment`, a power of two from
    /// 8 on; with `checksums` also [`CHECKSUM_KEY`]. Takes the room on the disk where the file system can.
    ///
    /// # Errors
    /// [`WriteError`]; nothing is left behind.
    pub fn create(
        path: &Path,
        pairs: &Pairs,
        alignment: u32,
        tensors: &[NewTensor],
        checksums: bool,
    ) -> Result<GgufWriter, WriteError> {
        debug_assert!(alignment.is_power_of_two() && alignment >= 8);
        let mut pairs = pairs.clone();
        pairs.set(ALIGNMENT_KEY, alignment);
        pairs.retain(|key| key != CHECKSUM_KEY);
        if checksums {
            pairs.set(CHECKSUM_KEY, Value::Array(Array::U32(vec![0; tensors.len()].into())));
        }
        let alignment = u64::from(alignment);
        for (what, count, limit) in
            [("keys", pairs.0.len() as u64, MAX_PAIRS), ("tensors", tensors.len() as u64, MAX_TENSORS)]
        {
            if count > limit {
                return Err(WriteError::TooMany { file: path.into(), what, count, limit });
            }
        }
        let mut places = Vec::with_capacity(tensors.len());
        let mut end = 0u64;
        for tensor in tensors {
            let bytes = tensor.bytes(path)?;
            places.push(Place { name: tensor.name.clone(), bytes, offset: end });
            let next = end.checked_add(bytes).and_then(|end| end.checked_next_multiple_of(alignment));
            end = next
                .ok_or_else(|| GgufError::SizeOverflow { file: path.into(), tensor: shown(&tensor.name) })?;
        }
        let offsets: Vec<u64> = places.iter().map(|place| place.offset).collect();
        let (mut header, values) = encode::header(&pairs, tensors, &offsets);
        header.resize(header.len().next_multiple_of(alignment as usize), 0);
        if header.len() > MAX_HEADER_BYTES {
            let (count, limit) = (header.len() as u64, MAX_HEADER_BYTES as u64);
            let what = "bytes in its header";
            return Err(WriteError::TooMany { file: path.into(), what, count, limit });
        }
        let total = (header.len() as u64).saturating_add(end);
        let mut staged = Staged::create(path, total)?;
        staged.write(&header)?;
        Ok(GgufWriter {
            staged,
            places,
            begun: 0,
            left: 0,
            at: 0,
            data_bytes: end,
            total,
            crc: crc32fast::Hasher::new(),
            checksums: Vec::with_capacity(tensors.len()),
            values,
            patches: Vec::new(),
        })
    }

    /// The size that the file will have.
    pub fn file_bytes(&self) -> u64 {
        self.total
    }

    /// Begins the next tensor of the directory, which must have this name; the one before is complete.
    ///
    /// # Errors
    /// [`WriteError::Tensor`] when it is not so, and those of writing.
    pub fn begin(&mut self, name: &str) -> Result<(), WriteError> {
        self.end()?;
        let Some(place) = self.places.get(self.begun).filter(|place| place.name == name) else {
            return Err(self.wrong(name, "was not declared to come next".into()));
        };
        let (offset, bytes) = (place.offset, place.bytes);
        self.pad(offset)?;
        self.left = bytes;
        self.begun += 1;
        Ok(())
    }

    /// Writes the next bytes of the tensor that was begun.
    ///
    /// # Errors
    /// [`WriteError::Tensor`] when it has fewer left, and those of writing.
    pub fn write(&mut self, bytes: &[u8]) -> Result<(), WriteError> {
        let Some(left) = self.left.checked_sub(bytes.len() as u64) else {
            let reason = format!("has {} bytes left and {} were given", self.left, bytes.len());
            return Err(self.wrong(&self.current(), reason));
        };
        self.crc.update(bytes);
        self.staged.write(bytes)?;
        self.left = left;
        self.at += bytes.len() as u64;
        Ok(())
    }

    /// Begins the next tensor and writes all of it.
    ///
    /// # Errors
    /// As [`GgufWriter::begin`] and [`GgufWriter::write`].
    pub fn tensor(&mut self, name: &str, bytes: &[u8]) -> Result<(), WriteError> {
        self.begin(name)?;
        self.write(bytes)
    }

    /// Completes the file, syncs it and gives it its name; returns its size.
    ///
    /// # Errors
    /// [`WriteError::Tensor`] when a tensor is missing or incomplete, and those of writing; nothing is left behind.
    pub fn finish(mut self) -> Result<u64, WriteError> {
        self.end()?;
        if let Some(missing) = self.places.get(self.begun) {
            return Err(self.wrong(&missing.name, "was declared and not written".into()));
        }
        self.pad(self.data_bytes)?;
        if self.values.iter().any(|(key, ..)| key == CHECKSUM_KEY) {
            let checksums = std::mem::take(&mut self.checksums);
            self.set_late(CHECKSUM_KEY, &checksums.into())?;
        }
        self.staged.commit(&self.patches)?;
        Ok(self.total)
    }

    /// Gives a key of the header its value when that is known only now. The value takes the bytes of the one that it
    /// replaces.
    ///
    /// # Errors
    /// [`WriteError::Late`] when it is not so.
    pub fn set_late(&mut self, key: &str, value: &Value) -> Result<(), WriteError> {
        let mut bytes = Vec::new();
        encode::value(&mut bytes, value);
        match self.values.iter().find(|(k, _, len)| k == key && *len == bytes.len()) {
            Some((_, at, _)) => self.patches.push((*at, bytes)),
            None => return Err(WriteError::Late { file: self.staged.path().into(), key: shown(key) }),
        }
        Ok(())
    }

    /// Ends the tensor that was begun last.
    fn end(&mut self) -> Result<(), WriteError> {
        if self.left > 0 {
            let reason = format!("was ended {} bytes before its end", self.left);
            return Err(self.wrong(&self.current(), reason));
        }
        if self.begun > 0 {
            let crc = std::mem::take(&mut self.crc).finalize();
            self.checksums.push(crc);
        }
        Ok(())
    }

    fn pad(&mut self, to: u64) -> Result<(), WriteError> {
        while self.at < to {
            let zeros = [0; 4096];
            let take = (to - self.at).min(zeros.len() as u64);
            self.staged.write(zeros.get(..take as usize).unwrap_or_default())?;
            self.at += take;
        }
        Ok(())
    }

    fn current(&self) -> String {
        let place = self.begun.checked_sub(1).and_then(|index| self.places.get(index));
        place.map(|place| place.name.clone()).unwrap_or_default()
    }

    fn wrong(&self, tensor: &str, reason: String) -> WriteError {
        WriteError::Tensor { file: self.staged.path().into(), tensor: shown(tensor), reason }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Gguf, I8, Strings, parse, parse::TypePolicy};
    use super::*;

    fn path(name: &str) -> PathBuf {
        std::env::temp_dir().join(format!("neuropil-write-{}-{name}.gguf", std::process::id()))
    }

    fn all_values() -> Pairs {
        let mut pairs = Pairs::new();
        pairs.set("text", "ä\u{0}b");
        pairs.set("u8", Value::U8(200));
        pairs.set("i8", Value::I8(-3));
        pairs.set("u16", Value::U16(60_000));
        pairs.set("i16", Value::I16(-300));
        pairs.set("u32", u32::MAX);
        pairs.set("i32", Value::I32(-70_000));
        pairs.set("f32", 1.5f32);
        pairs.set("bool", true);
        pairs.set("u64", Value::U64(u64::MAX));
        pairs.set("i64", Value::I64(i64::MIN));
        pairs.set("f64", Value::F64(0.1));
        let texts = Strings::of([&b"a"[..], b"", b"\xFF\xFE"]).unwrap();
        let arrays = [
            Array::U8([1, 2].into()),
            Array::I8([-1].into()),
            Array::U16([3].into()),
            Array::I16([-3].into()),
            Array::U32([7].into()),
            Array::I32([-7].into()),
            Array::F32([0.5].into()),
            Array::Bool([true, false].into()),
            Array::U64([9].into()),
            Array::I64([-9].into()),
            Array::F64([0.25].into()),
            Array::Str(texts),
        ];
        for (index, array) in arrays.into_iter().enumerate() {
            pairs.set(&format!("array.{index}"), Value::Array(array));
        }
        pairs
    }

    #[test]
    fn what_is_written_is_read_back() {
        let path = path("back");
        let tensors = [
            NewTensor::new("a", 0, [4, 3]),
            NewTensor::new("b", 2, [64]),
            NewTensor::new("c", I8, [5000, 1, 2]),
        ];
        let data = [vec![1u8; 48], vec![2; 36], (0..10_000).map(|i| (i % 255) as u8).collect()];
        let mut writer = GgufWriter::create(&path, &all_values(), 4096, &tensors, true).unwrap();
        for (tensor, data) in tensors.iter().zip(&data) {
            writer.begin(&tensor.name).unwrap();
            data.chunks(777).for_each(|piece| writer.write(piece).unwrap());
        }
        let size = writer.finish().unwrap();
        let gguf = Gguf::open_header(&path).unwrap();
        assert_eq!((gguf.file_bytes(), size % 4096), (size, 0));
        for (key, value) in all_values().iter() {
            assert_eq!(gguf.metadata().get(key), Some(value), "{key}");
        }
        let checksums = gguf.metadata().u32s(CHECKSUM_KEY).unwrap().unwrap();
        for ((tensor, data), sum) in gguf.tensors().iter().zip(&data).zip(checksums) {
            assert_eq!(gguf.data(tensor), data);
            assert_eq!(tensor.offset % 4096, 0);
            assert_eq!(crc32fast::hash(data), *sum);
        }
        std::fs::remove_file(&path).unwrap();
    }

    #[test]
    fn a_file_that_is_not_as_declared_is_not_written() {
        let path = path("declared");
        let tensors = [NewTensor::new("a", 0, [4]), NewTensor::new("b", 0, [4])];
        let begin = || GgufWriter::create(&path, &Pairs::new(), 32, &tensors, false).unwrap();
        let message = |result: Result<(), WriteError>| result.unwrap_err().to_string();
        assert!(message(begin().begin("b")).contains("\"b\" was not declared to come next"));
        assert!(message(begin().tensor("a", &[0; 17])).contains("16 bytes left and 17"));
        let mut short = begin();
        short.tensor("a", &[0; 8]).unwrap();
        assert!(message(short.begin("b")).contains("8 bytes before its end"));
        drop(short);
        let mut one = begin();
        one.tensor("a", &[0; 16]).unwrap();
        assert!(message(one.finish().map(|_| ())).contains("\"b\" was declared and not written"));
        assert!(!path.exists());
        let odd = [NewTensor::new("a", 2, [33])];
        assert!(GgufWriter::create(&path, &Pairs::new(), 32, &odd, false).is_err());
    }

    #[test]
    fn a_file_without_tensors_is_whole() {
        let path = path("empty");
        GgufWriter::create(&path, &Pairs::new(), 32, &[], false).unwrap().finish().unwrap();
        let bytes = std::fs::read(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        assert_eq!(parse(&bytes, &path, TypePolicy::Supported).unwrap().alignment, 32);
    }
}
