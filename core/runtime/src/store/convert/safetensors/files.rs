//! Safetensors files: a length, that many bytes of JSON with names, types, shapes and places, then the data.
//!
//! They are untrusted: every place is checked against its file and its shape.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use neuropil_device::DType;
use serde_json::Value;

use super::super::source::{Blob, Bytes};
use super::super::{ConvertError, buffer};
use super::header::{Header, Index, MAX_ENTRIES};
use crate::gguf::{GgufError, read_at};
use crate::shown::shown;

/// The most bytes of a header; the largest models have some MB.
const MAX_HEADER: u64 = 32 << 20;
/// The most that a tree of a document may hold: those of the largest vocabularies, and no more than some hundred MB.
const MAX_TREE: usize = 4 << 20;

/// A tensor of one of the files.
pub(super) struct Entry {
    pub name: String,
    pub dtype: DType,
    /// Slowest first, as the files have it.
    pub shape: Vec<u64>,
    file: usize,
    /// From the start of the file.
    at: u64,
    pub bytes: u64,
}

impl Entry {
    /// The id of its type in GGUF.
    pub(super) fn type_id(&self) -> u32 {
        crate::gguf::TENSOR_TYPES.iter().find(|t| t.dtype == Some(self.dtype)).map_or(0, |t| t.id)
    }
}

/// The files of a model.
pub(super) struct Files {
    pub folder: PathBuf,
    files: Vec<(PathBuf, File)>,
    pub entries: Vec<Entry>,
}

impl Files {
    /// Opens the files that the index names, or the only one.
    pub(super) fn open(folder: &Path) -> Result<Files, ConvertError> {
        let index = folder.join("model.safetensors.index.json");
        let paths = if index.is_file() {
            let Index(names) = serde_json::from_slice(&document(&index, MAX_HEADER)?).map_err(|error| {
                refused(&index, &format!("it is no index of files ({})", shown(&error.to_string())))
            })?;
            if names.is_empty() || names.iter().any(|name| name.contains(['/', '\\'])) {
                return Err(refused(&index, "it names no files, or some in other folders"));
            }
            names.into_iter().map(|name| folder.join(name)).collect()
        } else {
            vec![folder.join("model.safetensors")]
        };
        let mut all = Files { folder: folder.into(), files: Vec::new(), entries: Vec::new() };
        for path in paths {
            all.add(path)?;
        }
        let mut names: Vec<&str> = all.entries.iter().map(|entry| &*entry.name).collect();
        names.sort_unstable();
        if let Some(pair) = names.windows(2).find(|pair| pair[0] == pair[1]) {
            return Err(refused(folder, &format!("two files hold the tensor \"{}\"", shown(pair[0]))));
        }
        Ok(all)
    }

    fn add(&mut self, path: PathBuf) -> Result<(), ConvertError> {
        let failed = |source| GgufError::Io { file: path.clone(), source };
        if !path.metadata().map_err(failed)?.is_file() {
            return Err(GgufError::NotAFile { file: path }.into());
        }
        let file = File::open(&path).map_err(failed)?;
        let len = file.metadata().map_err(failed)?.len();
        let mut size = [0; 8];
        let got = read_at(&file, &mut size, 0).map_err(failed)?;
        let header = u64::from_le_bytes(size);
        if got < 8 || header > MAX_HEADER || header > len.saturating_sub(8) {
            return Err(refused(&path, "it is no safetensors file, or it is cut"));
        }
        let mut bytes = buffer(header)?;
        if read_at(&file, &mut bytes, 8).map_err(failed)? < bytes.len() {
            return Err(refused(&path, "it has become shorter"));
        }
        let Header(declared) = serde_json::from_slice(&bytes).map_err(|error| {
            refused(&path, &format!("its header is not as it should be ({})", shown(&error.to_string())))
        })?;
        drop(bytes);
        let data = 8 + header;
        for (name, entry) in declared {
            let wrong = |reason: &str| ConvertError::Tensor {
                file: path.clone(),
                tensor: shown(&name),
                reason: reason.into(),
            };
            let dtype = match entry.dtype.as_deref() {
                Some("F32") => DType::F32,
                Some("F16") => DType::F16,
                Some("BF16") => DType::BF16,
                other => {
                    let reason = format!(
                        "has type {}; F32, F16 and BF16 are converted",
                        shown(other.unwrap_or("none"))
                    );
                    return Err(wrong(&reason));
                }
            };
            let (Some(shape), Some(&[start, end])) = (entry.shape, entry.offsets.as_deref()) else {
                return Err(wrong("has no shape or no place"));
            };
            let wanted = shape.iter().try_fold(dtype.block_bytes() as u64, |bytes, n| bytes.checked_mul(*n));
            let inside = end.checked_add(data).is_some_and(|end| end <= len);
            if !inside || end.checked_sub(start) != wanted || shape.contains(&0) {
                return Err(wrong(
                    "has a place that does not fit its shape or its file; the file is cut or damaged",
                ));
            }
            if self.entries.len() == MAX_ENTRIES {
                return Err(refused(&path, "it has too many tensors"));
            }
            let (file, at, bytes) = (self.files.len(), data + start, end - start);
            self.entries.push(Entry { name, dtype, shape, file, at, bytes });
        }
        self.files.push((path, file));
        Ok(())
    }

    /// The error of a tensor.
    pub(super) fn wrong(&self, entry: &Entry, reason: String) -> ConvertError {
        let file = self.files.get(entry.file).map_or(&self.folder, |(path, _)| path);
        ConvertError::Tensor { file: file.clone(), tensor: shown(&entry.name), reason }
    }
}

impl Bytes for Files {
    fn read(&self, blob: Blob, from: u64, out: &mut [u8]) -> Result<(), ConvertError> {
        let missing = || refused(&self.folder, "it has changed while it was read");
        let entry = self.entries.get(blob.tensor).ok_or_else(missing)?;
        let (path, file) = self.files.get(entry.file).ok_or_else(missing)?;
        let at = entry.at.saturating_add(blob.at).saturating_add(from);
        let got = read_at(file, out, at).map_err(|source| GgufError::Io { file: path.clone(), source })?;
        if got < out.len() {
            return Err(self.wrong(entry, "is cut; get the file again".into()));
        }
        Ok(())
    }

    fn paths(&self) -> Vec<PathBuf> {
        self.files.iter().map(|(path, _)| path.clone()).collect()
    }
}

fn refused(path: &Path, reason: &str) -> ConvertError {
    ConvertError::Source { file: path.into(), reason: reason.into() }
}

/// A JSON document of at most `limit` bytes, as a tree.
pub(super) fn json(path: &Path, limit: u64) -> Result<Value, ConvertError> {
    let bytes = document(path, limit)?;
    if tree(&bytes) > MAX_TREE {
        return Err(refused(path, "it has more values than that of any model"));
    }
    serde_json::from_slice(&bytes)
        .map_err(|error| refused(path, &format!("it is no valid JSON ({error}); get it again")))
}

/// The bytes of a document, at most `limit`.
fn document(path: &Path, limit: u64) -> Result<Vec<u8>, ConvertError> {
    let failed = |source: io::Error| GgufError::Io { file: path.into(), source };
    let metadata = path.metadata().map_err(failed)?;
    if !metadata.is_file() || metadata.len() > limit {
        return Err(refused(path, &format!("it is no file, or larger than {limit} bytes")));
    }
    let mut bytes = buffer(metadata.len())?;
    let file = File::open(path).map_err(failed)?;
    let got = read_at(&file, &mut bytes, 0).map_err(failed)?;
    bytes.truncate(got);
    Ok(bytes)
}

/// What the tree of a document takes, counted in values: lists and objects have room for some from the start.
fn tree(bytes: &[u8]) -> usize {
    let (mut values, mut in_text, mut escaped) = (0, false, false);
    for byte in bytes {
        match byte {
            _ if escaped => escaped = false,
            b'\\' => escaped = in_text,
            b'"' => in_text = !in_text,
            b',' if !in_text => values += 1,
            b'[' if !in_text => values += 4,
            b'{' if !in_text => values += 8,
            _ => {}
        }
    }
    values
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_stands_in_texts_is_no_value() {
        assert_eq!(tree(br#"{"a,[{": [1, "\"{,", 2], "b": {}}"#), 8 + 4 + 2 + 1 + 8);
    }
}
