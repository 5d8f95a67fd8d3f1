//! The folder of compiled weights: a file for each, under the hash of everything that it depends on.

use std::fs;
use std::path::PathBuf;

use neuropil_plugin_sdk::{Error, Matrix};
use sha2::{Digest, Sha256};

use crate::plan::Key;

/// Largest file that is read.
const MOST_BYTES: u64 = 1 << 32;

/// The folder.
pub(crate) struct Cache {
    folder: PathBuf,
}

impl Cache {
    /// Makes the folder where there is none.
    pub fn new(folder: &str) -> Result<Cache, Error> {
        fs::create_dir_all(folder)
            .map_err(|error| Error::invalid(format!("option cache={folder}: {error}")))?;
        Ok(Cache { folder: folder.into() })
    }

    /// The hash of a weight, and of what compiles it.
    pub fn key(&self, compatibility: &str, matrix: &Matrix<'_>) -> Key {
        let mut hash = Sha256::new();
        let mut part = |bytes: &[u8]| {
            hash.update((bytes.len() as u64).to_le_bytes());
            hash.update(bytes);
        };
        part(compatibility.as_bytes());
        part(format!("{:?} {} {}", matrix.scheme, matrix.rows, matrix.cols).as_bytes());
        for bytes in [matrix.data, matrix.scales, matrix.mins] {
            part(bytes);
        }
        if let Some(outliers) = matrix.outliers {
            let columns: Vec<u8> = outliers.columns.iter().flat_map(|column| column.to_le_bytes()).collect();
            for bytes in [&columns, outliers.data, outliers.scales] {
                part(bytes);
            }
        }
        hash.finalize().into()
    }

    fn path(&self, key: &Key) -> PathBuf {
        let name: String = key.iter().map(|byte| format!("{byte:02x}")).collect();
        self.folder.join(name + ".qnn")
    }

    /// What was written under a key; `None` when nothing was.
    pub fn read(&self, key: &Key) -> Option<Result<Vec<u8>, Error>> {
        let path = self.path(key);
        let metadata = fs::metadata(&path).ok()?;
        if metadata.len() > MOST_BYTES {
            return Some(Err(Error::invalid(format!("{} is too large", path.display()))));
        }
        Some(fs::read(&path).map_err(|error| Error::invalid(format!("{}: {error}", path.display()))))
    }

    /// Writes a file whole or not at all.
    pub fn write(&self, key: &Key, bytes: &[u8]) -> Result<(), Error> {
        let path = self.path(key);
        let beside = path.with_extension(format!("{}.part", std::process::id()));
        let written = fs::write(&beside, bytes).and_then(|()| fs::rename(&beside, &path));
        written.map_err(|error| {
            // It may not be there at all.
            let _ = fs::remove_file(&beside);
            Error::internal(format!("{}: {error}", path.display()))
        })
    }
}
