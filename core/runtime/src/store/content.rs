//! A name for what a model file holds, for what is derived from it.
//!
//! Two files with the same contents get the same name wherever they lie and whenever they were written. Reading all of
//! many gigabytes for a name would take longer than what the name saves, so it is made from the header and from pages
//! all over the data.

use std::io::{Read, Seek, SeekFrom};
use std::path::Path;

use sha2::{Digest, Sha256};

use crate::gguf::{Gguf, GgufError};

/// Bytes of the beginning that count: the header of nearly any model.
const BEGINNING: u64 = 16 << 20;
/// Pages of the rest that count, and their size.
const PAGES: u64 = 512;
const PAGE: usize = 4096;

/// The name of the contents of a file or set of files: 32 characters.
///
/// # Errors
/// [`GgufError::Io`].
pub fn content_key(gguf: &Gguf) -> Result<String, GgufError> {
    let mut hash = Sha256::new();
    for path in gguf.paths() {
        add(path, &mut hash).map_err(|source| GgufError::Io { file: path.into(), source })?;
    }
    Ok(hash.finalize().iter().take(16).map(|byte| format!("{byte:02x}")).collect())
}

fn add(path: &Path, hash: &mut Sha256) -> std::io::Result<()> {
    let mut file = std::fs::File::open(path)?;
    let len = file.metadata()?.len();
    hash.update(len.to_le_bytes());
    let mut page = [0; PAGE];
    let mut beginning = (&mut file).take(BEGINNING);
    loop {
        let read = beginning.read(&mut page)?;
        if read == 0 {
            break;
        }
        hash.update(&page[..read]);
    }
    for index in 0..PAGES {
        let at = len / PAGES * index;
        file.seek(SeekFrom::Start(at))?;
        let read = file.read(&mut page)?;
        hash.update(&page[..read]);
    }
    Ok(())
}
