//! Models in several files: `NAME-00001-of-00003.gguf` and so on.
//!
//! Each file is a GGUF file of its own with some of the tensors and the keys `split.no` (counted from 0),
//! `split.count` and `split.tensors.count`. The name of any one tells the names of all, so any one can be opened.
//! A set is taken whole or not at all.

use std::path::{Path, PathBuf};

use super::error::{GgufError, shown};
use super::metadata::{Metadata, sorted_by_name, twice};
use super::parse::{Header, MAX_TENSORS, TypePolicy, parse};
use super::shard::Shard;
use super::tensor::TensorInfo;

/// The most files of a set.
const MAX_SHARDS: u64 = 1024;

/// All files of a model and what their headers say together.
pub(super) struct Set {
    pub(super) version: u32,
    pub(super) powerinfer: bool,
    /// Of the first file; the others repeat it or hold none.
    pub(super) metadata: Metadata,
    pub(super) tensors: Vec<TensorInfo>,
    /// Indices into `tensors`, sorted by name.
    pub(super) order: Vec<u32>,
    pub(super) shards: Vec<Shard>,
}

/// Opens the file and, if it is one of a set, all others.
pub(super) fn open(path: &Path, types: TypePolicy) -> Result<Set, GgufError> {
    let mut opened = Some(open_one(path, types)?);
    let (own, count) = match &opened {
        Some((_, header)) => place_in_set(&header.metadata, path)?,
        None => (0, 1),
    };
    let mut paths = Vec::new();
    for index in 0..count {
        paths.push(if index == own { path.to_path_buf() } else { shard_path(path, own, index, count)? });
    }
    if let Some(missing) = paths.iter().find(|path| !path.exists()) {
        return Err(GgufError::MissingShard { file: path.into(), missing: missing.clone(), count });
    }

    let mut shards = Vec::new();
    let mut tensors: Vec<TensorInfo> = Vec::new();
    let mut first = None;
    for (index, shard_path) in paths.iter().enumerate() {
        let taken = if index as u64 == own { opened.take() } else { None };
        let (shard, header) = match taken {
            Some(opened) => opened,
            None => open_one(shard_path, types)?,
        };
        check_member(&header.metadata, shard_path, path, index as u64, count)?;
        let total = (tensors.len() + header.tensors.len()) as u64;
        if total > MAX_TENSORS {
            let (what, limit) = ("tensors", MAX_TENSORS);
            return Err(GgufError::TooMany { file: path.into(), what, count: total, limit });
        }
        tensors.extend(header.tensors.into_iter().map(|tensor| TensorInfo { shard: index, ..tensor }));
        first.get_or_insert((header.version, header.powerinfer, header.metadata));
        shards.push(shard);
    }
    let Some((version, powerinfer, metadata)) = first else {
        return Err(GgufError::MissingShard { file: path.into(), missing: path.into(), count });
    };
    check_tensor_count(&metadata, path, count, tensors.len() as u64)?;
    let order = sorted_by_name(&tensors, path, |tensor| &tensor.name)?;
    check_names(&tensors, &order, &paths, path)?;
    Ok(Set { version, powerinfer, metadata, tensors, order, shards })
}

fn open_one(path: &Path, types: TypePolicy) -> Result<(Shard, Header), GgufError> {
    let shard = Shard::open(path)?;
    let header = parse(shard.bytes(), path, types)?;
    Ok((shard, header))
}

/// The file's number, counted from 0, and the size of its set; `(0, 1)` for a model in one file.
fn place_in_set(metadata: &Metadata, path: &Path) -> Result<(u64, u64), GgufError> {
    let count = metadata.u64("split.count")?.unwrap_or(1);
    if count <= 1 {
        return Ok((0, 1));
    }
    if count > MAX_SHARDS {
        return Err(GgufError::TooMany { file: path.into(), what: "parts", count, limit: MAX_SHARDS });
    }
    let own = metadata.require_u64("split.no")?;
    match metadata.get("split.no") {
        Some(value) if own >= count => {
            Err(metadata.bad_value("split.no", value, "a number below split.count"))
        }
        _ => Ok((own, count)),
    }
}

/// The path of file `index` of the set, from the path of file `own`.
fn shard_path(path: &Path, own: u64, index: u64, count: u64) -> Result<PathBuf, GgufError> {
    let ending = |no: u64| format!("-{:05}-of-{count:05}.gguf", no + 1);
    let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    match name.strip_suffix(&ending(own)) {
        Some(stem) => Ok(path.with_file_name(format!("{stem}{}", ending(index)))),
        None => Err(GgufError::SplitName { file: path.into(), number: own + 1, count, wanted: ending(own) }),
    }
}

/// Checks that the file is number `index` of a set of `count`.
fn check_member(
    metadata: &Metadata,
    file: &Path,
    opened: &Path,
    index: u64,
    count: u64,
) -> Result<(), GgufError> {
    if count <= 1 {
        return Ok(());
    }
    for (key, wanted) in [("split.count", count), ("split.no", index)] {
        let found = metadata.require_u64(key)?;
        if found != wanted {
            return Err(GgufError::SplitMismatch {
                file: file.into(),
                opened: opened.into(),
                key,
                found,
                wanted,
            });
        }
    }
    Ok(())
}

fn check_tensor_count(metadata: &Metadata, file: &Path, shards: u64, found: u64) -> Result<(), GgufError> {
    match metadata.u64("split.tensors.count")? {
        Some(wanted) if wanted != found => {
            Err(GgufError::SplitTensorCount { file: file.into(), shards, found, wanted })
        }
        _ => Ok(()),
    }
}

/// Each file has been checked for itself, so a name that appears twice is in two files.
fn check_names(
    tensors: &[TensorInfo],
    order: &[u32],
    paths: &[PathBuf],
    opened: &Path,
) -> Result<(), GgufError> {
    let Some(second) = twice(tensors, order, |tensor| &tensor.name) else { return Ok(()) };
    let first = tensors.iter().find(|tensor| tensor.name == second.name).unwrap_or(second);
    let path_of = |tensor: &TensorInfo| paths.get(tensor.shard).map_or(opened, |path| path).to_path_buf();
    let tensor = shown(&second.name);
    Err(GgufError::SplitDuplicateTensor { file: path_of(second), tensor, other: path_of(first) })
}
